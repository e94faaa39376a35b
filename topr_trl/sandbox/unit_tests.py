"""Programs that a model wrote, run in a sandbox and judged by their unit tests.

The calls of the tests are evaluated in the program's process; their values come back as text and are compared here. The
right values never enter the sandbox, so a program passes only by computing them.
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

_SECONDS_AROUND = 15.0  # to start and end a program


def run_tests(
    programs: Sequence[str], tests: Sequence[str], seconds: float = 3.0, memory_mb: int = 256
) -> list[Judgement]:
    """Judge Python programs by their unit tests, several at a time. A `topr_trl.rewards.Judge` whose truths are tests.

    Args:
        programs: source texts. They are never run in this process.
        tests: one text per program, lines of the form `assert CALL == LITERAL`, as in `assert f([1, 2]) == 3`.
        seconds: wall-clock limit for a program and its tests.
        memory_mb: MiB of address space for each of its processes.

    Returns:
        One verdict and answer per program: `"correct"` and its tests if all pass, `"invalid"` and None if it does not
        compile, otherwise `"incorrect"` and the values of the calls, one per line (`!` and a name where a call raised
        or the program ended). Programs that behave alike share an answer.

    Raises:
        OSError: this is not Linux.
        RuntimeError: the sandbox itself failed.
        ValueError: tests have another form, there is none, or a limit is not positive.
    """
    if seconds <= 0 or memory_mb < 1:
        raise ValueError(f"A program needs time and memory: seconds={seconds}, memory_mb={memory_mb}.")
    pairs = list(zip(programs, tests, strict=True))
    distinct = list(dict.fromkeys(pairs))
    items = [[program, parse_tests(text)[0], seconds, memory_mb << 20] for program, text in distinct]
    found: dict[tuple[str, str], str | None] = {}
    if items:
        pool = _pool(seconds, memory_mb)
        with tqdm(total=len(items), desc="Running tests", unit="program", delay=5, leave=False) as progress:
            found = dict(zip(distinct, pool.map(items, progress.update), strict=True))
    if NOT_STARTED in found.values():
        raise RuntimeError("The sandbox could not start a program. Has the machine no memory or processes left?")
    return [_judgement(found[pair], pair[1]) for pair in pairs]


def _judgement(found: str | None, tests: str) -> Judgement:
    if found == NO_PROGRAM:
        return INVALID, None
    values = "!Killed" if found is None else found.removeprefix(RAN)
    return (CORRECT, tests) if values == "\n".join(parse_tests(tests)[1]) else (INCORRECT, values)


@lru_cache(maxsize=65_536)
def parse_tests(tests: str) -> tuple[list[str], list[str]]:
    """The calls of tests, and their right values in canonical text.

    Raises:
        ValueError: a line is not `assert CALL == LITERAL`, or there is none.
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
        raise ValueError(f"There is no test in {tests!r}: every program would pass.")
    return calls, values


@lru_cache(maxsize=4)
def _pool(seconds: float, memory_mb: int) -> WorkerPool:
    if sys.platform != "linux":
        raise OSError(f"The sandbox needs Linux, and this is {sys.platform}. Run this in a Linux container.")
    pool = WorkerPool(
        Path(__file__).with_name("child.py"), "run", seconds=seconds + _SECONDS_AROUND,
        memory=(memory_mb + 256) << 20,
        # A fixed seed of hashes: a program whose result depends on the order of a set always gives the same.
        environment={"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    refused = pool.map([None])[0]
    if refused is None:
        raise RuntimeError("The sandbox could not be entered; its message is above.")
    if refused:
        warn_user(
            f"The sandbox is weaker here than it can be: {refused}. Programs have their limits of time and memory, but "
            "can reach the network, and change files and processes as their user can. Run models that you do not "
            "trust in a container. See docs/examples.md."
        )
    return pool
