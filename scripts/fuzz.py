"""Run the property tests of tests/bad_input/test_doors*.py with new random examples, in turn.

    python scripts/fuzz.py --minutes 30

Findings are printed with their examples. The examples are saved in `.fuzz/`, and the next run starts with them. Add
each example to its test as an `@example`. The table at the end has the number of examples and findings of each test.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
from hypothesis import Phase, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile(
    "search", derandomize=False, max_examples=10**9, database=DirectoryBasedExampleDatabase(".fuzz"),
    phases=(Phase.reuse, Phase.generate, Phase.shrink), print_blob=False,
)  # fmt: skip
settings.load_profile("search")  # before the import of the tests, which read the number of examples
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))
from tests.bad_input import test_doors, test_doors_of_logs  # noqa: E402

SECONDS = 20.0  # time of a turn


class OutOfTime(BaseException):
    """Signal that ends a turn. It is not an Exception, because an Exception would be a finding."""


class Door:
    """Property test, with its number of examples, CPU time and findings."""

    def __init__(self, name: str, test: Callable[..., Any]) -> None:
        self.name, self.test, self.tried, self.seconds = name, test, 0, 0.0
        self.findings: dict[str, str] = {}

    def take_turn(self, number: int, until: float) -> None:
        """Search in a separate process, because a library can crash it."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._search, args=(number, until, sender))
        process.start()
        sender.close()
        try:
            tried, seconds, finding = receiver.recv()
            self.tried, self.seconds = self.tried + tried, self.seconds + seconds
        except EOFError:
            process.join()
            finding = ("crash", f"The process died of signal {-(process.exitcode or 0)}.")
        process.join()
        if finding is not None and finding[0] not in self.findings:
            self.findings[finding[0]] = finding[1]
            print(f"\n{self.name} (seed {number}):\n{finding[1]}", flush=True)

    def _search(self, number: int, until: float, sender: Connection) -> None:
        inner, begin, tried, finding = self.test.hypothesis.inner_test, time.process_time(), 0, None

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal tried
            tried += 1
            inner(*args, **kwargs)
            if time.monotonic() > until:
                raise OutOfTime

        self.test.hypothesis.inner_test = counted
        try:
            seed(number)(self.test)()
        except (OutOfTime, KeyboardInterrupt):
            pass
        except BaseException as error:  # failures of pytest.raises are not Exceptions
            finding = (f"{type(error).__name__}: {error}"[:200], "".join(traceback.format_exception(error, limit=-3)))
        sender.send((tried, time.process_time() - begin, finding))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", default="", help="run only tests whose name matches this regular expression")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"Seed {options.seed}, {options.minutes:g} minutes.", flush=True)
    doors = [
        Door(name.removeprefix("test_"), test)
        for name, test in {**vars(test_doors), **vars(test_doors_of_logs)}.items()
        if name.startswith("test_") and re.search(options.only, name)
    ]
    end = time.monotonic() + 60 * options.minutes
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):  # hide messages of argparse
        while time.monotonic() < end:
            for door in doors:
                door.take_turn(rng.randrange(2**32), min(end, time.monotonic() + SECONDS))
    print("\n| door | examples | CPU minutes | findings |\n|---|---|---|---|")
    for door in doors:
        print(f"| {door.name} | {door.tried:,} | {door.seconds / 60:.1f} | {len(door.findings)} |")
    sys.exit(any(door.findings for door in doors))


if __name__ == "__main__":
    main()
