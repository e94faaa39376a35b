"""Compare the gain of each method over the base model, with greedy decoding, sampling and majority vote.

Each method makes one pass over the rows of a seed. For each measure in `MEASURES`, a method has its own best learning
rate, which is chosen after one pass on validation problems, with `TUNING_SEED`.
"""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.decoded import GREEDY, decoded
from benchmarks.decoding import DRAWS
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.experiments import temperatures
from benchmarks.loops import offline
from benchmarks.methods import METHODS as NAMED
from benchmarks.methods import Method, topr
from benchmarks.setting import BUNDLED, Profile, model_hash

# For the models in `WRONG_MODE`, the mode (the most likely answer) is mostly wrong. The other two models have noise
# around a correct mode.
BASES = ("sure-17", "misconception-10", BUNDLED, "main", "wanders-3", "hard")
WRONG_MODE = ("sure-17", "misconception-10", BUNDLED, "wanders-3")
SEEDS = 3
MEASURES = (GREEDY, "pass@1")  # measures with their own learning rates
VOTE = "maj@8"
TOPR = "TOPR (default)"
METHODS: dict[str, Method] = {
    TOPR: topr(0.5),
    "TOPR, c = 0": topr("p"),
    "positives once": topr(1.0, "removed"),
    "positives repeated": topr(1.0, "rows"),
    "TOPR, balanced rows": topr(0.5, "balanced"),
    "DAPO (TRL's GRPO)": NAMED["trl_dapo"],
    "DPO": NAMED["dpo"],
    "KTO": NAMED["kto"],
}


def of_base(store: Store, base: str) -> Experiment:
    """Return the comparison on one base model.

    Raises:
        Unfinished: the base model has not been evaluated before training.
    """
    untrained = temperatures.by_temperature(store, base)
    return Experiment(
        "controls", {name: {"method": name} for name in METHODS}, rates(1e-4, 3e-4, 1e-3), range(SEEDS), MEASURES,
        f"One pass, as users decode: {base}", further=3, shows=(*MEASURES, VOTE),
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS},
        untrained={GREEDY: untrained[0.0], "pass@1": untrained[1.0]},
    )  # fmt: skip


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons. A comparison starts after the previous comparison is complete (`IN_STAGES`)."""
    return [of_base(store, base) for base in BASES]


IN_STAGES = True


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    model, _ = offline.trained(
        cell["base"], METHODS[cell["method"]], profile, cell["seed"], cell["learning_rate"]
    )  # fmt: skip
    split = "validation" if cell["seed"] == TUNING_SEED else "test"
    return decoded(model, cell["base"], profile, cell["seed"], split=split)
