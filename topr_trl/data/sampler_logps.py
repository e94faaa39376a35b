"""Read the sampling settings of rows, and decide whether `sampler_logps` can be used as log μ.

The trainer computes log π from all logits, divided by the sampling temperature of the rows. The log-probabilities of a
sampler are comparable with log π if they describe the same distribution. Log-probabilities after temperature and
filters (`processed_logprobs`) are comparable if no filter removed any token. Log-probabilities of the model
(`raw_logprobs`) are comparable at temperature 1.

A filter that keeps 99.5% of the probability mass at each token raises log μ of 1,000 tokens by 5. A negative then
starts with a weight of e⁻⁵ instead of 1.
"""

from collections.abc import Mapping, Set
from typing import Any

from datasets import Dataset

from topr_trl.data.rows import checked_column

SAMPLING = TEMPERATURE, TOP_P, TOP_K = "temperature", "top_p", "top_k"
GREEDY = 0.0  # temperature of a greedy completion, which is for evaluation only
LOGPROBS_MODE = "logprobs_mode"
LOGPROBS_MODES = RAW, PROCESSED = "raw_logprobs", "processed_logprobs"  # vLLM's names
_REMEDY = "Set log_mu='trainer'"


def temperature_of(datasets: Mapping[str, Set[float | None]], training: float | None = None) -> float:
    """Return the sampling temperature of rows, at which log π is computed. It is 1 if no temperature is known.

    Args:
        datasets (`Mapping[str, Set]`): Distinct temperatures of each dataset, with None for an unknown temperature. A
            dataset without any known temperature is assumed to have the training temperature.
        training (`float`, *optional*): Training temperature. `None` uses the temperature of the first dataset, or 1 if
            that temperature is unknown.

    Raises:
        ValueError: rows have different temperatures.
    """
    for name, distinct in datasets.items():
        known = _temperature(name, distinct)
        if training is None:
            training = 1.0 if known is None else known
        elif known not in (None, _rounded(training)):
            raise ValueError(
                f"The {name} dataset was sampled at temperature {known:g}, and log π is computed at {training:g}, "
                f"the temperature of training. Leave these rows out, or train at {known:g}."
            )
    return 1.0 if training is None else training


def _temperature(name: str, distinct: Set[float | None]) -> float | None:
    """Return the temperature that all rows have, or None if no row has a known temperature.

    Raises:
        ValueError: the rows have several temperatures.
    """
    if distinct <= {None}:
        return None
    # A row without a temperature counts as 1, the usual default.
    found = sorted({_rounded(1.0 if value is None else value) for value in distinct})
    if len(found) > 1:
        every = [f"{value:g}{' (none given)' * (value == 1 and None in distinct)}" for value in found]
        raise ValueError(
            f"The {name} dataset has rows of several temperatures: {', '.join(every)}. log π needs a single "
            f"temperature. Train on rows of one temperature, or drop the column `{TEMPERATURE}` to use 1 for all rows."
        )
    return found[0]


def _rounded(temperature: float) -> float:
    """Round to six significant digits, which makes float32 and float64 values equal."""
    return float(f"{temperature:.6g}")


def why_incomparable(rows: Dataset, temperature: float, vocabulary: int) -> str | None:
    """Return the reason why `sampler_logps` of rows cannot be used as log μ, or None if the columns show no reason.

    Args:
        rows ([`~datasets.Dataset`]): Rows with `sampler_logps`.
        temperature (`float`): Temperature of the rows, at which the trainer computes log π.
        vocabulary (`int`): Number of tokens of the tokenizer. A `top_k` of at least this number filters nothing.

    Raises:
        ValueError: a column has an invalid sampling setting.
    """
    names = [name for name in (TOP_P, TOP_K, LOGPROBS_MODE) if name in rows.column_names]
    columns = {name: checked_column(rows, name, *_KINDS[name], "Fix or drop the column.") for name in names}
    settings = ({name: column[n] for name, column in columns.items()} for n in range(len(rows)))
    for how in {tuple(how.values()): how for how in settings}.values():  # Check each combination of settings once.
        mode, top_p, top_k = (how.get(name) for name in (LOGPROBS_MODE, TOP_P, TOP_K))
        advice = "" if mode else f"; add a column {LOGPROBS_MODE} if you know the mode ({' or '.join(LOGPROBS_MODES)})"
        if temperature != 1 and mode != PROCESSED:
            return (
                f"its rows were sampled at temperature {temperature:g}, and their sampler_logps "
                f"{'are' if mode else 'may be'} for temperature 1 ({LOGPROBS_MODE} is {mode}). {_REMEDY}{advice}"
            )
        filters = {TOP_P: top_p is not None and top_p < 1, TOP_K: 0 < (top_k or 0) < vocabulary}
        cut = [f"{name}={how[name]:g}" for name, cuts in filters.items() if cuts]
        if cut and mode != RAW:
            return (
                f"its rows were sampled with {' and '.join(cut)}, and their sampler_logps "
                f"{'were' if mode else 'may have been'} computed after that ({LOGPROBS_MODE} is {mode}), so they are "
                "larger than over the whole vocabulary, and every negative would start with a small weight. "
                f"{_REMEDY}{advice}; or sample with top_p=1 and top_k=-1"
            )
    return None


_KINDS: dict[str, tuple[Any, str]] = {
    TOP_P: (lambda v: v is None or (isinstance(v, int | float) and 0 < v <= 1), "numbers in (0, 1]"),
    TOP_K: (
        lambda v: v is None or (isinstance(v, int | float) and float(v).is_integer()),
        "whole numbers; below 1 means no limit",
    ),
    LOGPROBS_MODE: (lambda v: v is None or v in LOGPROBS_MODES, " or ".join(LOGPROBS_MODES)),
}
