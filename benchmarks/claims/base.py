"""The base model, as measured for all claims that compare with it."""

from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.setting import Profile, base_model, evaluate, model_hash, summary
from benchmarks.verdicts import MEASURED, Verdict

SAMPLES = 16


def cells(profile: Profile, store: Store, task: str = "main") -> list[Cell]:
    return [{"claim": "base", "task": task, "model": model_hash(task), "seed": 0}]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    return summary(evaluate(base_model(cell["task"]), cell["task"], profile, SAMPLES, cell["seed"]))


def point(store: Store, profile: Profile, task: str = "main") -> dict[str, float]:
    """pass@1, its error, and the shares of answers of the base model.

    Raises:
        Unfinished: it has not been measured.
    """
    for _, result in store.results(cells(profile, store, task)):
        return result
    raise Unfinished("the base model has not been measured: run the claim base")


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    start = point(store, profile)
    return [
        Verdict(
            "The base model",
            "",
            f"pass@1 {100 * start['pass@1']:.1f} ± {200 * start['error']:.1f}%, incorrect "
            f"{100 * start['incorrect']:.1f}%, invalid {100 * start['invalid']:.1f}%",
            MEASURED,
        )
    ]
