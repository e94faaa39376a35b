"""Search the doors of the package (tests/test_doors.py) with fresh examples, one door after the other.

    python scripts/fuzz.py --minutes 30

What it finds is printed with the example, and kept in `.fuzz/`, so that the next run begins with it; it belongs into
an `@example` of the test. The table at the end says what was tried.
"""

import argparse
import contextlib
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from hypothesis import Phase, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile(
    "search", derandomize=False, max_examples=10**9, database=DirectoryBasedExampleDatabase(".fuzz"),
    phases=(Phase.reuse, Phase.generate, Phase.shrink), print_blob=False,
)  # fmt: skip
settings.load_profile("search")  # before the tests are imported: they ask how many examples it allows
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import test_doors  # noqa: E402

SECONDS = 20.0  # a door is searched before it is the next one's turn


class OutOfTime(BaseException):
    """Ends a turn; not an Exception, which would be a finding."""


class Door:
    """A property, how often it was tried, in which computing time, and what broke it."""

    def __init__(self, name: str, test: Callable[..., Any]) -> None:
        self.name, self.test, self.tried, self.seconds = name, test, 0, 0.0
        self.findings: dict[str, str] = {}

    def search(self, number: int, until: float) -> None:
        inner, begin = self.test.hypothesis.inner_test, time.process_time()

        def counted(*args: Any, **kwargs: Any) -> None:
            self.tried += 1
            inner(*args, **kwargs)
            if time.monotonic() > until:
                raise OutOfTime

        self.test.hypothesis.inner_test = counted
        try:
            seed(number)(self.test)()
        except OutOfTime:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # what pytest.raises raises is no Exception
            text = "".join(traceback.format_exception(error, limit=-3))
            if self.findings.setdefault(f"{type(error).__name__}: {error}"[:200], text) is text:
                print(f"\n{self.name} (seed {number}):\n{text}", flush=True)
        finally:
            self.test.hypothesis.inner_test = inner
            self.seconds += time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", default="", help="doors whose name holds this text")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"Seed {options.seed}, {options.minutes:g} minutes.", flush=True)
    doors = [
        Door(name.removeprefix("test_"), test)
        for name, test in vars(test_doors).items()
        if name.startswith("test_") and options.only in name
    ]
    end = time.monotonic() + 60 * options.minutes
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):  # what argparse says
        while time.monotonic() < end:
            for door in doors:
                door.search(rng.randrange(2**32), min(end, time.monotonic() + SECONDS))
    print("\n| door | examples | CPU minutes | findings |\n|---|---|---|---|")
    for door in doors:
        print(f"| {door.name} | {door.tried:,} | {door.seconds / 60:.1f} | {len(door.findings)} |")
    sys.exit(any(door.findings for door in doors))


if __name__ == "__main__":
    main()
