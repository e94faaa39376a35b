"""The rivals on a harder task: more steps, so that the base model is seldom right (the paper's MATH)."""

from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.claims import base, learning_rates, rivals_compared
from benchmarks.claims.learning_rates import OF_TASK, best
from benchmarks.claims.rivals_compared import at, ranking, table
from benchmarks.pictures import COLOURS, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile, model_hash
from benchmarks.verdicts import MEASURED, Verdict


def cells(profile: Profile, store: Store) -> list[Cell]:
    """The base model and learning rates of this task, and once they are known, the runs."""
    if profile.is_quick:
        return []
    before = base.cells(profile, store, "hard") + learning_rates.cells(profile, store, "hard")
    return before if store.unfinished(before) else before + _runs(profile, store)


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    claim = {"base": base, "learning_rates": learning_rates}.get(cell["claim"], rivals_compared)
    return claim.work(cell, profile)


def _runs(profile: Profile, store: Store) -> list[Cell]:
    return [
        {
            "claim": "hard_task", "task": "hard", "model": model_hash("hard"), "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival, "hard"), "epochs": 1,
        }
        for seed in range(profile.seeds)
        for rival in OF_TASK["hard"]
    ]  # fmt: skip


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done, start = store.results(_runs(profile, store)), base.point(store, profile, "hard")
    names, steps = list(OF_TASK["hard"]), (profile.steps,)
    picture, (axes,) = figure(1, 5.2, 3.6)
    order = sorted(names, key=lambda name: at(done, name, steps[-1]).mean)
    for row, name in enumerate(order):
        end = at(done, name, profile.steps)
        axes.errorbar(100 * end.mean, row, xerr=100 * end.half, fmt="o", ms=5, color=COLOURS[name], capsize=2)
    axes.axvline(100 * start["pass@1"], color=COLOURS["base"], ls=":")
    axes.set_yticks(range(len(order)), [RIVALS[name].label for name in order])
    axes.set(xlabel="pass@1 (%)", title="The harder task, one epoch; dotted: base model")
    return [
        Verdict(
            "Beyond the paper's Fig. 1: a harder task, on which the base model is rarely right",
            "",
            f"base {100 * start['pass@1']:.1f}%; {ranking(done, names, steps)}",
            MEASURED,
            picture=save(picture, out, "hard"),
            details=table(done, names, steps),
        )
    ]
