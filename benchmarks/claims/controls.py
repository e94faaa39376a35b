"""Compare the gain of each method over the base model, as users decode: greedy, sampled, by majority vote.

Each method makes one pass over the rows of a seed. For each measure that is reported it has the learning rate that is
best for this measure, found after one pass on validation problems with a seed that nothing else uses.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

from transformers import PreTrainedModel

from benchmarks import arms
from benchmarks.arms import ADAMW_RATES, TUNING_SEED, Arm, tune
from benchmarks.cells import Cell, Store
from benchmarks.claims import temperatures
from benchmarks.decoded import GREEDY, decoded
from benchmarks.decoding import DRAWS
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


@dataclass(frozen=True)
class Control:
    """A base model, a method of `METHODS`, and a learning rate."""

    base: str
    method: str
    learning_rate: float

    def cell(self, seed: int) -> Cell:
        return {"claim": "controls", **asdict(self), "weights": model_hash(self.base), "seed": seed, "draws": DRAWS}


def cells(profile: Profile, store: Store) -> list[Cell]:
    """The cells of each base model, one base model after the other, so that whole ones are there early."""
    planned: list[Cell] = []
    for base in () if profile.is_quick else BASES:
        for method in METHODS:
            for measure in MEASURES:
                tried, best = tuned(store, base, method, measure)
                planned += [Control(base, method, rate).cell(TUNING_SEED) for rate in tried]
                planned += [Control(base, method, best).cell(seed) for seed in range(SEEDS) if best]
        planned = _once(planned)
        if store.unfinished(planned):
            break
    return planned


def tuned(store: Store, base: str, method: str, measure: str) -> tuple[list[float], float | None]:
    """Return the rates to try, and the best one; None until all have been tried."""

    def end(choice: dict[str, Any]) -> float | None:
        found = store.get(Control(base, method, choice["learning_rate"]).cell(TUNING_SEED))
        return found[measure] if found else None

    untrained = temperatures.by_temperature(store, base)[0.0 if measure == GREEDY else 1.0][0]
    tried, best = tune([{"learning_rate": rate} for rate in ADAMW_RATES], _FURTHER, end, untrained)
    return [choice["learning_rate"] for choice in tried], best and best["learning_rate"]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    control = Control(cell["base"], cell["method"], cell["learning_rate"])
    model = trained(control, profile, cell["seed"])
    split = "validation" if cell["seed"] == TUNING_SEED else "test"
    return decoded(model, control.base, profile, cell["seed"], split=split)


def trained(control: Control, profile: Profile, seed: int) -> PreTrainedModel:
    """Return the model after one pass."""
    how = METHODS[control.method]
    if isinstance(how, tuple):
        share, protocol = how
        arm = Arm(control.base, share, protocol, learning_rate=control.learning_rate)
        return arms.trained(arm, profile, seed)[0]
    model = base_model(control.base)
    rows, pool = epoch_rows(control.base, profile, seed)
    objective = RIVALS[how].make(model, rows, pool)
    train(model, objective, len(rows) // BATCH_ROWS, control.learning_rate, seed)
    return model


def measured(store: Store, base: str, method: str, measure: str, tuned_for: str) -> Measured:
    """Return a measure by seed with its error, at the learning rate that is best for `tuned_for`."""
    rate = tuned(store, base, method, tuned_for)[1]
    if rate is None:
        return {}
    found = {seed: store.get(Control(base, method, rate).cell(seed)) for seed in range(SEEDS)}
    # The error of greedy accuracy is over problems, and the test problems are the same for all seeds.
    return {
        seed: (one[measure], nan if measure == GREEDY else one[f"{measure} error"])
        for seed, one in found.items()
        if one
    }


def _once(planned: Iterable[Cell]) -> list[Cell]:
    """Drop repeated cells, keeping the order."""
    return [dict(one) for one in dict.fromkeys(tuple(cell.items()) for cell in planned)]
