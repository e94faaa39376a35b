"""Compare TOPR with each protocol of positives only, as in Figure 4 of the paper."""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.experiment import Choice, Experiment, rates
from benchmarks.experiments import protocols
from benchmarks.loops import offline
from benchmarks.methods import METHODS, Method, topr
from benchmarks.setting import BATCH_ROWS, Profile, evaluate, model_hash, summary

GENERATIONS = 64  # completions of each test problem, as in the paper
MAJ_KS = (1, 2, 4, 8, 16, 32)
MAIN = "TOPR, c = 0"
ARMS: dict[str, tuple[str, Method]] = {
    MAIN: ("topr", METHODS["topr"]),
    "TOPR, p~ 50%": ("mean", topr(0.5)),
    "TOPR, group mean": ("group_mean", topr("group_mean")),
    "positives, once": ("removed", topr(1.0, "removed")),
    "positives, as many steps": ("positives_only", METHODS["positives_only"]),
    "positives, repeated": ("rows", topr(1.0, "rows")),
}
_OF_ARMS = ("TOPR, p~ 50%", "TOPR, group mean", "positives, once", "positives, repeated")


def _tuning() -> tuple[Experiment, Experiment]:
    """Return the two searches for learning rates: one for the methods here, and one for arms of `protocols`."""
    every = Experiment(
        "learning_rates", {name: {"rival": ARMS[name][0]} for name in (MAIN, "positives, as many steps")},
        rates(3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3), (), ("pass@1",),
        fields={"task": "main", "model": model_hash("main")},
    )  # fmt: skip
    return every, protocols.arms("main", {name: protocols.ARMS[name] for name in _OF_ARMS}, protocols.AT_32, seeds=0)


def _best(store: Store, method: str, measure: str) -> Choice | None:
    every, arms = _tuning()
    found = (arms if method in _OF_ARMS else every).best(store, method)
    return found and {"learning_rate": found["learning_rate"]}


def experiments(store: Store) -> list[Experiment]:
    """Return the searches for learning rates, and the comparison."""
    return [*_tuning(), Experiment(
        "against_positives", {label: {"rival": name} for label, (name, _) in ARMS.items()}, (), range(5), ("pass@1",),
        "One pass, 64 generations of each problem: main", tuned=_best, shows=("pass@1", "maj/32"),
    )]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    (method,) = (method for name, method in ARMS.values() if name == cell["rival"])
    model, _ = offline.trained("main", method, profile, cell["seed"], cell["learning_rate"], BATCH_ROWS)
    if cell["claim"] == "learning_rates":
        return summary(evaluate(model, "main", profile, seed=cell["seed"], split="validation"))
    found = evaluate(model, "main", profile, GENERATIONS, cell["seed"], maj_ks=MAJ_KS)
    maj = {str(k): estimate.value for k, estimate in found.maj_at.items()}
    return {**summary(found), "maj": maj, "cardinality": found.cardinality}
