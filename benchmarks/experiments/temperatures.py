"""Evaluate each base model before training: greedy, at three temperatures, and by majority vote.

A method that only sharpens a model gains nothing over a lower temperature, which needs no training.
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
SAMPLES = {0.3: 16, 0.7: 16, 1.0: 64}  # completions per problem, by temperature
K = 32  # votes at temperature 1


def cell(base: str) -> Cell:
    """Return the cell of a base model."""
    return {"claim": "temperatures", "base": base, "weights": model_hash(base), "seed": 0, "draws": DRAWS}


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Return the cells of all base models."""
    return [cell(base) for base in BASES]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    model = base_model(cell["base"])
    return {
        f"{temperature:g}": decoded(model, cell["base"], profile, cell["seed"], samples, min(K, samples), temperature)
        for temperature, samples in SAMPLES.items()
    }


def by_temperature(store: Store, base: str) -> dict[float, float]:
    """Return accuracy by temperature. Temperature 0 is greedy decoding.

    Raises:
        Unfinished: the base model has not been evaluated.
    """
    found = store.get(cell(base))
    if found is None:
        raise Unfinished(f"the temperatures of {base} have not been measured")
    return {0.0: found["1"][GREEDY], **{temperature: found[f"{temperature:g}"]["pass@1"] for temperature in SAMPLES}}


def tables(store: Store) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of the table of base models. The best temperature is bold."""
    rows = []
    for base in BASES:
        if found := store.get(cell(base)):
            values = by_temperature(store, base)
            best = max(values.values())
            shown = [f"**{100 * value:.1f}**" if value == best else f"{100 * value:.1f}" for value in values.values()]
            kind = "wrong mode" if values[0.0] < 0.5 else "noise around a right mode"
            rows.append([base, kind, *shown, f"{100 * found['1'][f'maj@{K}']:.1f}"])
    header = ["base model", "kind", "greedy", *(f"T = {temperature:g}" for temperature in SAMPLES), f"maj@{K}"]
    return [("Base models before training", header, rows)]
