"""Subtract a baseline from rewards, or find the baseline for a share of positives (arXiv 2503.14286, Sec. 3.2)."""

from math import isfinite
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
BASELINES = ("mean", "group_mean")
LARGEST_REWARD = float(np.finfo(np.float32).max)  # A larger reward would be infinite in the loss.


def as_rewards(rewards: ArrayLike, largest: float = LARGEST_REWARD) -> FloatArray:
    """Return rewards as an array of shape (N,), in float64. `None` becomes NaN, which marks a row without a reward.

    Raises:
        ValueError: the rewards do not have one dimension, are not numbers, or are above `largest` in size.
    """
    given = np.asarray(rewards)
    is_bool = given.dtype.kind == "O" and any(isinstance(reward, bool | np.bool_) for reward in given.ravel())
    if given.ndim != 1 or given.dtype.kind not in "iufO" or is_bool:
        kind = "bool" if is_bool else given.dtype
        raise ValueError(f"rewards must be numbers of shape (N,), not {kind} of shape {given.shape}.")
    array = given.astype(np.float64)
    if (wrong := np.flatnonzero(np.abs(array) > largest)).size:
        raise ValueError(
            f"rewards must be at most {largest:g} in size, or NaN; reward {wrong[0]} is {array[wrong[0]]:g}."
        )
    return array


def group_numbers(name: str, ids: ArrayLike, count: int) -> NDArray[np.int64]:
    """Return a group number for each row, shape (N,). Groups are numbered from 0, in the order of their ids.

    Args:
        name (`str`):
            Name of the argument, for errors.
        ids (`ArrayLike`):
            Id of each row, shape (N,). Rows with equal ids form a group.
        count (`int`):
            Number of rows, N.

    Raises:
        ValueError: there is not one id per row, an id is missing (None or NaN), ids are of several types, or an
            id may be rounded.
    """
    array = np.asarray(ids)
    if array.shape != (count,):
        raise ValueError(f"{name} must have one id for each of {count} rows, not the shape {array.shape}.")
    if array.dtype.kind not in "iub" and not (array.dtype.kind in "US" and isinstance(ids, np.ndarray)):
        # NumPy writes the numbers of a mixed list as text.
        _check_ids(name, list(ids) if array.dtype.kind in "US" else array.tolist())  # type: ignore[arg-type]
    return np.unique(array, return_inverse=True)[1].astype(np.int64)


def _check_ids(name: str, items: list[Any]) -> None:
    """Raise a ValueError if an id is missing or may be rounded, or if ids are of several types."""
    if missing := [row for row, value in enumerate(items) if is_missing(value)]:
        raise ValueError(f"{name}: row {missing[0]} has no id ({items[missing[0]]}). Give each row an id.")
    kinds = {
        "numbers" if isinstance(value, Real) else "text" if isinstance(value, str) else type(value).__name__
        for value in items
    }
    if len(kinds) > 1:
        raise ValueError(f"{name} must be of one type, not {' and '.join(sorted(kinds))}.")
    if rounded := [value for value in items if is_rounded(value)]:
        raise ValueError(f"{name}: {rounded[0]:.0f} may be rounded. Give ids from 2**53 on as int or text.")


def is_missing(value: object) -> bool:
    """Whether a value marks a missing value: None, NaN, or a missing value of pandas."""
    # NaN and NaT differ from themselves. The comparison of pandas.NA has no truth value.
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def is_rounded(value: Any) -> bool:
    """Whether an id is a `float` of size 2**53 or more, where neighboring whole numbers become the same `float`."""
    return isinstance(value, float | np.floating) and abs(float(value)) >= 2**53


def effective_positive_share(rewards: ArrayLike) -> float:
    """Compute the effective share of positives, `p~ = Σ_{R>=0} |R| / Σ |R|` (arXiv 2503.14286, Sec. 3.2).

    Example:

    ```python
    >>> from topr_trl import effective_positive_share

    >>> effective_positive_share([0.5, -0.5, -1.0])
    0.25
    ```

    Args:
        rewards (`ArrayLike`):
            Rewards R *after* the baseline, shape (N,). NaN marks a row without a reward, which is ignored.

    Returns:
        `float`: share in [0, 1]. NaN if no reward differs from 0.

    Raises:
        ValueError: the rewards are not numbers of shape (N,), or are above 1e300 in size.
    """
    scored = _known(rewards, 1e300)  # Metrics pass w · R, which can exceed float32. The limit keeps sums finite.
    # The denominator is the sum of the two parts. With a separately rounded Σ |R|, the share could exceed 1.
    above, below = scored[scored > 0].sum(), -scored[scored < 0].sum()
    return float(above / (above + below)) if above + below > 0 else float("nan")


def _known(rewards: ArrayLike, largest: float = LARGEST_REWARD) -> FloatArray:
    array = as_rewards(rewards, largest)
    return array[~np.isnan(array)]


def baseline_for_positive_share(rewards: ArrayLike, share: float) -> float:
    """Compute the baseline c that leads to a given effective share of positives p~ (arXiv 2503.14286, Sec. 3.2).

    If all rewards are ±1 and a share p of them is +1, then `c = (p - p~) / (p + p~ - 2 p p~)`, the inverse of Eq. 12.
    For any rewards, p~ is continuous and decreases with c. Between two adjacent rewards, p~ is a ratio of two linear
    functions of c, so the function solves for c exactly.

    Example:

    ```python
    >>> from topr_trl import baseline_for_positive_share, effective_positive_share, subtract_baseline

    >>> rewards = [1.0, -1.0, -1.0, -1.0]
    >>> c = baseline_for_positive_share(rewards, share=0.5)
    >>> c
    -0.5
    >>> effective_positive_share(subtract_baseline(rewards, c))
    0.5
    ```

    Args:
        rewards (`ArrayLike`):
            Raw rewards R0, shape (N,). NaN marks a row without a reward, which is ignored.
        share (`float`):
            Target p~, in (0, 1]. For 1, c is the lowest reward, so no R is negative.

    Returns:
        `float`: the baseline c.

    Raises:
        ValueError: the share is outside (0, 1], there is no reward, all rewards are equal and the share is below 1, or
            the rewards are not numbers of shape (N,), or are infinite in float32.
    """
    if not 0 < share <= 1:
        raise ValueError(f"The effective share of positives must be in (0, 1], not {share}.")
    values, counts = np.unique(_known(rewards), return_counts=True)
    if len(values) == 0:
        raise ValueError("There are no rewards, so the baseline cannot be computed.")
    if share == 1:
        return float(values[0])
    if len(values) == 1:
        raise ValueError(
            f"All {counts[0]} rewards are {values[0]:g}, so no baseline reaches an effective share of positives of "
            f"{share:g}: the share can only be 1 or 0. Add rows with different rewards, or set baseline to a number."
        )
    # Compute the sums of |R| above and below c, for c at each distinct reward.
    sums = values * counts
    mass_above = (sums[::-1].cumsum()[::-1]) - values * counts[::-1].cumsum()[::-1]
    mass_below = values * counts.cumsum() - sums.cumsum()
    share_at_value = mass_above / (mass_above + mass_below)  # 1 at the lowest reward, 0 at the highest
    i = min(int(np.searchsorted(-share_at_value, -share, side="right")) - 1, len(values) - 2)
    # c is between values[i] and values[i + 1]. The n+ rewards above c have the sum S+, the n- rewards up to c have the
    # sum S-.
    # Solve share = (S+ - n+ c) / ((S+ - n+ c) + (n- c - S-)) for c.
    n_above, s_above = counts[i + 1 :].sum(), sums[i + 1 :].sum()
    n_below, s_below = counts[: i + 1].sum(), sums[: i + 1].sum()
    c = (s_above * (1 - share) + share * s_below) / (n_above * (1 - share) + share * n_below)
    # Rounding must not move c past a reward, since the R of rows with that reward would change sign.
    return float(np.clip(c, values[i], np.nextafter(values[i + 1], values[i])))


def subtract_baseline(
    rewards: ArrayLike, baseline: float | str, group_ids: ArrayLike | None = None, share: float | None = None
) -> FloatArray:
    """Subtract the baseline from the raw rewards, R = R0 - c.

    Example:

    ```python
    >>> from topr_trl import subtract_baseline

    >>> subtract_baseline([1.0, 0.0, 0.0, 0.0], "mean")
    array([ 0.75, -0.25, -0.25, -0.25])
    ```

    Args:
        rewards (`ArrayLike`):
            Raw rewards R0, shape (N,). NaN marks a row without a reward and stays NaN.
        baseline (`float` or `str`):
            Baseline c. Can be a number, `"mean"` (the mean of all rewards) or `"group_mean"` (the mean of the rewards
            of the same problem).
        group_ids (`ArrayLike`, *optional*):
            Problem of each row, shape (N,), of one comparable type, without missing values. Required by `"group_mean"`.
        share (`float`, *optional*):
            Target for the effective share of positives, in (0, 1]. If given, c is computed for this share, and
            `baseline` is not used.

    Returns:
        `np.ndarray`: rewards R, shape (N,), in float64.

    Raises:
        ValueError: the baseline is unknown or not finite, `group_ids` is missing or malformed, `share` is outside
            (0, 1] or unreachable, or the rewards are not numbers of shape (N,), or are infinite in float32.
    """
    rewards = as_rewards(rewards)
    if share is not None:
        return rewards - baseline_for_positive_share(rewards, share)
    if isinstance(baseline, Real) and isfinite(baseline):
        centered = rewards - float(baseline)
        # TRL stores rewards in float32, where 0.1 is above 0.1 in float64. R must still be 0.
        return np.where(np.abs(centered) <= abs(float(baseline)) * np.finfo(np.float32).eps, 0.0, centered)
    if not isinstance(baseline, str) or baseline not in BASELINES:
        raise ValueError(f"baseline must be a finite number or one of {', '.join(BASELINES)}, not {baseline!r}.")
    if baseline == "mean":
        return _minus_mean(rewards, np.zeros(len(rewards), dtype=np.int64))
    if group_ids is None:
        raise ValueError("baseline='group_mean' needs the problem of each row. Pass group_ids.")
    return _minus_mean(rewards, group_numbers("group_ids", group_ids, len(rewards)))


def _minus_mean(rewards: FloatArray, group_N: NDArray[np.int64]) -> FloatArray:
    """Subtract from each reward the mean reward of its group. `group_N` has the group numbers, counted from 0.

    A difference within the rounding error of the sum becomes 0, since the sign of R selects the truncation limits.
    """
    scored = ~np.isnan(rewards)
    counts = np.bincount(group_N, weights=scored)
    sums = np.bincount(group_N, weights=np.where(scored, rewards, 0.0))
    largest = np.zeros(len(counts))
    np.fmax.at(largest, group_N, np.abs(rewards))
    centered = rewards - (sums / np.maximum(counts, 1))[group_N]
    rounding = (counts * largest * np.finfo(np.float64).eps)[group_N]
    return np.where(np.abs(centered) <= rounding, 0.0, centered)
