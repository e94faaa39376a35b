"""Run model-written programs in a sandbox, and judge them by unit tests.

The sandbox evaluates the calls of the tests and returns their values as text. The calling process compares these values
with the expected values. The expected values never enter the sandbox, so a program can only pass by computing them.
"""

import ast
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tqdm.auto import tqdm

from topr_trl.rewards import CORRECT, INCORRECT, INVALID, Judgement
from topr_trl.sandbox.child import NO_PROGRAM, NOT_STARTED, RAN, canonical
from topr_trl.sandbox.worker_pool import WorkerPool
from topr_trl.user_warnings import warn_user

_SECONDS_AROUND = 15.0  # extra time for starting and ending a program


def run_tests(
    programs: Sequence[str], tests: Sequence[str], seconds: float = 3.0, memory_mb: int = 256
) -> list[Judgement]:
    """Judge Python programs by unit tests, in worker processes. This function is a `topr_trl.rewards.Judge`.

    Args:
        programs (`Sequence[str]`):
            Source code of the programs. It never runs in the calling process.
        tests (`Sequence[str]`):
            Tests of each program: lines of the form `assert CALL == LITERAL`, as in `assert f([1, 2]) == 3`.
        seconds (`float`, *optional*, defaults to `3.0`):
            Limit of wall-clock time for a program and its tests, in seconds.
        memory_mb (`int`, *optional*, defaults to `256`):
            Limit of address space for each process of a program, in MiB.

    Returns:
        `list[Judgement]`: a verdict and an answer for each program.

        - `"correct"` and the tests, if all tests pass.
        - `"invalid"` and None, if the program does not compile.
        - `"incorrect"` and the values of the calls, one per line, otherwise. A line such as `!ValueError` stands for an
          exception. `!Timeout`, `!TooLong`, `!Ended` and `!Killed` stand for an early end.

    Raises:
        OSError: the system is not Linux.
        RuntimeError: the sandbox or a program could not start.
        ValueError: `programs` and `tests` differ in length, a line of the tests does not have the form above, a program
            has no test, or a limit is not positive.
    """
    if seconds <= 0 or memory_mb < 1:
        raise ValueError(
            f"A program needs time and memory: set seconds={seconds} and memory_mb={memory_mb} to positive values."
        )
    pairs = list(zip(programs, tests, strict=True))
    distinct = list(dict.fromkeys(pairs))
    items = [[program, parse_tests(text)[0], seconds, memory_mb << 20] for program, text in distinct]
    found: dict[tuple[str, str], str | None] = {}
    if items:
        pool = _pool(seconds, memory_mb)
        with tqdm(total=len(items), desc="Running tests", unit="program", delay=5, leave=False) as progress:
            found = dict(zip(distinct, pool.map(items, progress.update), strict=True))
    if NOT_STARTED in found.values():
        raise RuntimeError(
            "The sandbox could not start a program. Check that the machine has free memory and process slots."
        )
    return [_judgement(found[pair], pair[1]) for pair in pairs]


def _judgement(found: str | None, tests: str) -> Judgement:
    if found == NO_PROGRAM:
        return INVALID, None
    values = "!Killed" if found is None else found.removeprefix(RAN)
    return (CORRECT, tests) if values == "\n".join(parse_tests(tests)[1]) else (INCORRECT, values)


@lru_cache(maxsize=65_536)
def parse_tests(tests: str) -> tuple[list[str], list[str]]:
    """Return the calls in tests, and their expected values as text of `topr_trl.sandbox.child.canonical`.

    Args:
        tests (`str`): Lines of the form `assert CALL == LITERAL`.

    Raises:
        ValueError: a line has a different form, or there is no line.
    """
    calls, values = [], []
    try:
        for statement in ast.parse(tests).body:
            match statement:
                case ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[value])):
                    calls.append(ast.unparse(call))
                    values.append(canonical(ast.literal_eval(value)))
                case _:
                    raise ValueError(ast.unparse(statement))
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(
            f"Tests must be lines `assert CALL == LITERAL`, as in `assert f([1, 2]) == 3`; found {tests!r} ({error})."
        ) from None
    if not calls:
        raise ValueError(f"There is no test in {tests!r}, so every program would pass. Add a line with `assert`.")
    return calls, values


@lru_cache(maxsize=4)
def _pool(seconds: float, memory_mb: int) -> WorkerPool:
    if sys.platform != "linux":
        raise OSError(f"The sandbox needs Linux, and this is {sys.platform}. Run it in a Linux container.")
    pool = WorkerPool(
        Path(__file__).with_name("child.py"), "run", seconds=seconds + _SECONDS_AROUND,
        memory=(memory_mb + 256) << 20,  # A worker needs more memory than its programs may use.
        # With a fixed hash seed, programs that depend on the order of a set have reproducible results. Other variables
        # are not passed, because they can contain secrets.
        environment={"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    refused = pool.map([None])[0]
    if refused is None:
        raise RuntimeError("The sandbox did not start; its error message is above.")
    if refused:
        warn_user(
            f"The sandbox lacks a protection on this machine: {refused}. Time and memory of programs are limited, but "
            "programs may be able to reach the network, and to change files and processes of their user. Run models "
            'that you do not trust in a container. See "The sandbox" in the documentation.'
        )
    return pool
