"""Compare the gain of each method over the base model, as users decode: greedy, sampled, by majority vote.

Each method makes one pass over the rows of a seed. For each measure that is reported it has the learning rate that is
best for this measure, found after one pass on validation problems with a seed that nothing else uses.
"""

from math import nan
from typing import Any

from transformers import PreTrainedModel

from benchmarks import arms
from benchmarks.arms import ADAMW_RATES, TUNING_SEED, Arm
from benchmarks.cells import Cell, Store
from benchmarks.claims import temperatures
from benchmarks.decoded import GREEDY, decoded
from benchmarks.decoding import DRAWS
from benchmarks.experiment import Experiment
from benchmarks.rivals import RIVALS
from benchmarks.setting import BATCH_ROWS, BUNDLED, Profile, base_model, epoch_rows, model_hash
from benchmarks.statistics import Measured
from benchmarks.training import train

# Four that are wrong in their mode, then two with noise around a right mode.
BASES = ("sure-17", "misconception-10", BUNDLED, "main", "wanders-3", "hard")
SEEDS = 3
MEASURES = (GREEDY, "pass@1")  # a learning rate is chosen for each
_FURTHER = 3  # rates tried beyond the grid

# By the name in the table: share of positives and protocol of an `Arm`, or a name of `RIVALS`. Balanced rows are half
# positives, repeated, and half negatives, each once.
METHODS: dict[str, tuple[float | str, str] | str] = {
    "TOPR (default)": (0.5, "steps"),
    "TOPR, c = 0": ("p", "steps"),
    "positives once": (1.0, "removed"),
    "positives repeated": (1.0, "rows"),
    "TOPR, balanced rows": (0.5, "balanced"),
    "DAPO (TRL's GRPO)": "trl_dapo",
    "DPO": "dpo",
    "KTO": "kto",
}


def experiment(store: Store, base: str) -> Experiment:
    """Return the comparison on one base model.

    Raises:
        Unfinished: the base model has not been measured before training.
    """
    untrained = temperatures.by_temperature(store, base)
    return Experiment(
        "controls", tuple(METHODS), ADAMW_RATES, range(SEEDS), MEASURES, further=_FURTHER,
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS},
        untrained={GREEDY: untrained[0.0][0], "pass@1": untrained[1.0][0]},
    )  # fmt: skip


def cells(profile: Profile, store: Store) -> list[Cell]:
    """The cells of each base model, one base model after the other, so that whole ones are there early."""
    planned: list[Cell] = []
    for base in () if profile.is_quick else BASES:
        planned += experiment(store, base).cells(store)
        if store.unfinished(planned):
            break
    return planned


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = trained(cell["base"], cell["method"], cell["learning_rate"], profile, cell["seed"])
    split = "validation" if cell["seed"] == TUNING_SEED else "test"
    return decoded(model, cell["base"], profile, cell["seed"], split=split)


def trained(base: str, method: str, learning_rate: float, profile: Profile, seed: int) -> PreTrainedModel:
    """Return the model after one pass."""
    how = METHODS[method]
    if isinstance(how, tuple):
        share, protocol = how
        return arms.trained(Arm(base, share, protocol, learning_rate=learning_rate), profile, seed)[0]
    model = base_model(base)
    rows, pool = epoch_rows(base, profile, seed)
    objective = RIVALS[how].make(model, rows, pool)
    train(model, objective, len(rows) // BATCH_ROWS, learning_rate, seed)
    return model


def measured(store: Store, base: str, method: str, measure: str, tuned_for: str) -> Measured:
    """Return a measure by seed with its error, at the learning rate that is best for `tuned_for`."""
    # The error of greedy accuracy is over problems, and the test problems are the same for all seeds.
    return {
        seed: (one[measure], nan if measure == GREEDY else one[f"{measure} error"])
        for seed, one in experiment(store, base).ends(store, method, tuned_for).items()
    }
