"""Measure every base model before training: greedy, at three temperatures, and by majority vote.

A method that only sharpens a model gains nothing over a lower temperature, which costs nothing.
"""

from typing import Any

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.decoded import GREEDY, decoded
from benchmarks.decoding import DRAWS
from benchmarks.setting import BUNDLED, Profile, base_model, model_hash

BASES = (
    BUNDLED, "sure-60", "sure-17", "sure-3", "misconception-30", "misconception-10", "misconception-3", "wanders-30",
    "wanders-10", "wanders-3", "main", "hard", "slips-60", "slips-30", "slips-10", "slips-3",
)  # fmt: skip
SAMPLES = {0.3: 16, 0.7: 16, 1.0: 64}  # by temperature
K = 32  # of the majority vote at temperature 1


def cells(profile: Profile, store: Store) -> list[Cell]:
    return [cell(base) for base in (BASES[:1] if profile.is_quick else BASES)]


def cell(base: str) -> Cell:
    return {"claim": "temperatures", "base": base, "weights": model_hash(base), "seed": 0, "draws": DRAWS}


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model(cell["base"])
    return {
        f"{temperature:g}": decoded(model, cell["base"], profile, cell["seed"], samples, min(K, samples), temperature)
        for temperature, samples in SAMPLES.items()
    }


def by_temperature(store: Store, base: str) -> dict[float, tuple[float, float]]:
    """Return accuracy and its standard error by temperature; greedy is 0.

    Raises:
        Unfinished: the base model has not been measured.
    """
    found = store.get(cell(base))
    if found is None:
        raise Unfinished(f"the temperatures of {base} have not been measured")
    sampled = {
        temperature: (found[f"{temperature:g}"]["pass@1"], found[f"{temperature:g}"]["pass@1 error"])
        for temperature in SAMPLES
    }
    at_one = found["1"]
    return {0.0: (at_one[GREEDY], at_one[f"{GREEDY} error"]), **sampled}


def is_wrong_in_its_mode(store: Store, base: str) -> bool:
    """Whether greedy decoding is wrong on more than half of the problems: training has to teach, not sharpen."""
    return by_temperature(store, base)[0.0][0] < 0.5
