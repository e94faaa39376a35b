"""The base models, as measured by all claims that compare with them."""

from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.setting import Profile, base_model, evaluate, model_hash, summary
from benchmarks.verdicts import MEASURED, Verdict

SAMPLES = 16


def cells(profile: Profile, store: Store) -> list[Cell]:
    tasks = ("main", "hard") if profile.seeds > 1 else ("main",)
    return [{"claim": "base", "task": task, "model": model_hash(task), "seed": 0} for task in tasks]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    return summary(evaluate(base_model(cell["task"]), cell["task"], profile, SAMPLES, cell["seed"]))


def point(store: Store, profile: Profile, task: str = "main") -> dict[str, float]:
    """pass@1, its error, and the shares of answers of the base model.

    Raises:
        Unfinished: it has not been measured.
    """
    for cell, result in store.results(cells(profile, store)):
        if cell["task"] == task:
            return result
    raise Unfinished("the base model has not been measured: run the claim base")


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    measured = {cell["task"]: result for cell, result in store.results(cells(profile, store))}
    return [
        Verdict(
            "The base models",
            "",
            "; ".join(
                f"{task} task: pass@1 {100 * r['pass@1']:.1f} ± {200 * r['error']:.1f} %, "
                f"invalid {100 * r['invalid']:.1f} %"
                for task, r in measured.items()
            ),
            MEASURED,
        )
    ]
