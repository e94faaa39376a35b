"""How rows were sampled, as their columns say, and whether `sampler_logps` can stand for log μ.

The trainer computes log π from all logits, divided by the temperature at which the rows were sampled. Log-probabilities
of a sampler are comparable with that if they are of the same distribution: those after temperature and filters
(`processed_logprobs`) if no filter cut anything, those of the model itself (`raw_logprobs`) at temperature 1.
A filter that keeps 99.5 % of the probability of each token inflates log μ of 1,000 tokens by 5, and a negative begins
with a weight of e⁻⁵.
"""

from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from topr_trl.data.rows import checked_column

TEMPERATURE = "temperature"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")  # vLLM's names
_FILTERS = ("top_p", "top_k")
_REMEDY = "Set log_mu='trainer'"


def temperature_of(name: str, rows: Dataset) -> float:
    """The temperature at which rows were sampled; 1 where none is given.

    Args:
        name: of the dataset, for messages.

    Raises:
        ValueError: it is not above 0, or rows have different ones.
    """
    if TEMPERATURE not in rows.column_names:
        return 1.0
    checked_column(
        rows, TEMPERATURE, lambda value: value is None or (isinstance(value, int | float) and 0 < value < float("inf")),
        "numbers above 0", "Drop rows that were not sampled, or drop the column: log π is then computed at 1.",
    )  # fmt: skip
    distinct = pc.unique(rows.select_columns([TEMPERATURE]).with_format("arrow")[:][TEMPERATURE]).to_pylist()
    found = sorted({1.0 if value is None else float(value) for value in distinct})
    if len(found) > 1:
        raise ValueError(
            f"The {name} dataset has rows of several temperatures: {', '.join(f'{value:g}' for value in found)}. log π "
            f"is computed at one. Train on the rows of one of them, or drop the column `{TEMPERATURE}`: it is then 1."
        )
    return found[0]


def why_incomparable(rows: Dataset, temperature: float, vocabulary: int) -> str | None:
    """Why `sampler_logps` of these rows cannot stand for log μ; None if they can, as far as their columns say.

    Args:
        temperature: at which the trainer computes log π.
        vocabulary: tokens that it knows; a `top_k` of so many filters nothing.

    Raises:
        ValueError: a column holds something else than how rows are sampled.
    """
    names = [name for name in (*_FILTERS, "logprobs_mode") if name in rows.column_names]
    _check(rows, names)
    if not names:
        return _of_temperature(None, temperature)
    table = rows.select_columns(names).with_format("arrow")[:]
    for how in table.group_by(names).aggregate([]).to_pylist():
        mode, top_p, top_k = (how.get(name) for name in ("logprobs_mode", *_FILTERS))
        if why := _of_temperature(mode, temperature):
            return why
        filters = {"top_p": top_p is not None and top_p < 1, "top_k": 0 < (top_k or 0) < vocabulary}
        cut = [f"{name}={how[name]:g}" for name, cuts in filters.items() if cuts]
        if cut and mode != "raw_logprobs":
            return (
                f"rows were sampled with {' and '.join(cut)}, and their sampler_logps "
                f"{'are' if mode else 'may be'} of what that left (logprobs_mode is {mode}), so that they are larger "
                f"than those of the whole vocabulary, and every negative would begin with a small weight. {_REMEDY}"
                f"{_tell(mode)}; or sample with top_p=1 and top_k=-1"
            )
    return None


def _of_temperature(mode: str | None, temperature: float) -> str | None:
    if temperature == 1 or mode == "processed_logprobs":
        return None
    return (
        f"rows were sampled at temperature {temperature:g}, and their sampler_logps {'are' if mode else 'may be'} of "
        f"temperature 1 (logprobs_mode is {mode}). {_REMEDY}{_tell(mode)}"
    )


def _tell(mode: str | None) -> str:
    return "" if mode else f"; add a column logprobs_mode if you know it ({' or '.join(LOGPROBS_MODES)})"


def _check(rows: Dataset, names: list[str]) -> None:
    kinds: dict[str, tuple[Any, str]] = {
        "top_p": (lambda v: v is None or (isinstance(v, int | float) and 0 < v <= 1), "numbers in (0, 1]"),
        "top_k": (lambda v: v is None or isinstance(v, int), "whole numbers, those below 1 for no limit"),
        "logprobs_mode": (lambda v: v is None or v in LOGPROBS_MODES, " or ".join(LOGPROBS_MODES)),
    }
    for name in names:
        is_right, expected = kinds[name]
        checked_column(rows, name, is_right, expected, "Fix or drop the column.")
