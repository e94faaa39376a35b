"""Compare all methods on four epochs of the same rows, as in Figures 1 and 3 of the paper.

Learning rates are also chosen after four epochs. Results dated before 2026-11-26 were run at the rates that are best
after one epoch. They are used if both rates are the same.
"""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.experiments import temperatures
from benchmarks.loops import offline
from benchmarks.methods import METHODS
from benchmarks.setting import Profile

EPOCHS = 4
END = "curve/-1/pass@1"


def experiments(store: Store) -> list[Experiment]:
    """Return the comparison.

    Raises:
        Unfinished: the base model has not been evaluated before training.
    """
    untrained = temperatures.by_temperature(store, "main")[1.0]
    return [Experiment(
        "rivals", {method.label: {"rival": name} for name, method in METHODS.items()}, rates(1e-5, 3e-5, 1e-4, 3e-4),
        range(5), (END,), f"The same rows {EPOCHS} times: main", {"task": "main", "epochs": EPOCHS}, further=2,
        untrained={END: untrained}, shows=(END, "curve/-1/invalid"),
    )]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    _, found = offline.trained(
        cell["task"], METHODS[cell["rival"]], profile, cell["seed"], cell["learning_rate"], epochs=cell["epochs"],
        split="validation" if cell["seed"] == TUNING_SEED else "test",
    )  # fmt: skip
    return found
