"""The baseline c in R = R0 - c, which in TOPR sets the effective share of positives (arXiv 2503.14286, Sec. 3.2)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
BASELINES = ("mean", "group_mean")


def effective_positive_share(rewards: ArrayLike) -> float:
    """`p~ = Σ_{R>=0} |R| / Σ |R|`: the share of the gradient's mass that is positive (Sec. 3.2).

    Args:
        rewards: (N,) rewards R *after* the baseline. NaN marks a row without a reward and is left out.

    Returns:
        A number in [0, 1]; NaN if every reward is 0, since then nothing is learned from any row.
    """
    scored = _known(rewards)
    # Not by Σ |R|: summed in another order, rounding could carry the share past 1.
    above, below = scored[scored > 0].sum(), -scored[scored < 0].sum()
    return float(above / (above + below)) if above + below > 0 else float("nan")


def _known(rewards: ArrayLike) -> FloatArray:
    array = np.asarray(rewards, dtype=np.float64)
    return array[~np.isnan(array)]


def baseline_for_positive_share(rewards: ArrayLike, share: float) -> float:
    """The baseline c under which the effective share of positives is `share`.

    For rewards ±1 this is `c = (p - p~) / (p + p~ - 2 p p~)`, the inverse of Eq. 12. For others, p~ is continuous and
    falling in c, a ratio of two linear functions between neighboring rewards, so it is solved exactly there.

    Args:
        rewards: (N,) raw rewards R0. NaN marks a row without a reward and is left out.
        share: the target p~, in (0, 1]; 1 puts c at the lowest reward, which takes the negatives out.

    Raises:
        ValueError: the share is outside (0, 1], or the rewards allow no other than 1 (they are all the same).
    """
    if not 0 < share <= 1:
        raise ValueError(f"The effective share of positives must be in (0, 1], not {share}.")
    values, counts = np.unique(_known(rewards), return_counts=True)
    if len(values) == 0:
        raise ValueError("There is no reward to solve the baseline from.")
    if share == 1:
        return float(values[0])
    if len(values) == 1:
        raise ValueError(
            f"All {counts[0]} rewards are {values[0]:g}, so no baseline reaches an effective share of positives of "
            f"{share:g}: with every baseline it is 1 or 0. Add rows with other rewards, or set a number as baseline."
        )
    # Mass above and below c, with c at each distinct reward.
    sums = values * counts
    mass_above = (sums[::-1].cumsum()[::-1]) - values * counts[::-1].cumsum()[::-1]
    mass_below = values * counts.cumsum() - sums.cumsum()
    share_at_value = mass_above / (mass_above + mass_below)  # 1 at the lowest reward, 0 at the highest
    i = min(int(np.searchsorted(-share_at_value, -share, side="right")) - 1, len(values) - 2)
    # Between values[i] and values[i + 1]: share = (S+ - n+ c) / ((S+ - n+ c) + (n- c - S-)).
    n_above, s_above = counts[i + 1 :].sum(), sums[i + 1 :].sum()
    n_below, s_below = counts[: i + 1].sum(), sums[: i + 1].sum()
    c = (s_above * (1 - share) + share * s_below) / (n_above * (1 - share) + share * n_below)
    # Rounding must not carry it past a reward: rows would change sides.
    return float(np.clip(c, values[i], np.nextafter(values[i + 1], values[i])))


def subtract_baseline(
    rewards: ArrayLike, baseline: float | str, group_ids: ArrayLike | None = None, share: float | None = None
) -> FloatArray:
    """(N,) float64 R = R0 - c for each row.

    Args:
        rewards: (N,) raw rewards R0. NaN marks a row without a reward and stays NaN.
        baseline: c as a number, `"mean"` (of all rows) or `"group_mean"` (of the rows of the same problem).
        group_ids: (N,) the problem of each row, any comparable dtype; needed by `"group_mean"` only.
        share: the effective share of positives to reach; then `baseline` is not used.

    Raises:
        ValueError: the baseline is not one of the above, or the share cannot be reached.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if share is not None:
        return rewards - baseline_for_positive_share(rewards, share)
    if baseline == "mean":
        return _minus_mean(rewards, np.zeros(len(rewards), dtype=np.int64))
    if baseline == "group_mean":
        if group_ids is None:
            raise ValueError("baseline='group_mean' needs to know the problem of each row (group_ids).")
        return _minus_mean(rewards, np.unique(np.asarray(group_ids), return_inverse=True)[1])
    if isinstance(baseline, str):
        raise ValueError(f"baseline must be a number or one of {', '.join(BASELINES)}, not {baseline!r}.")
    return rewards - baseline


def _minus_mean(rewards: FloatArray, group_N: NDArray[np.int64]) -> FloatArray:
    """(N,) rewards minus the mean of their group, which has a number in 0 ... N - 1.

    What differs from the mean by no more than the rounding of its sum is 0: its sign decides whether a row is learned.
    """
    scored = ~np.isnan(rewards)
    counts = np.bincount(group_N, weights=scored)
    sums = np.bincount(group_N, weights=np.where(scored, rewards, 0.0))
    largest = np.zeros(len(counts))
    np.fmax.at(largest, group_N, np.abs(rewards))
    centered = rewards - (sums / np.maximum(counts, 1))[group_N]
    rounding = (counts * largest * np.finfo(np.float64).eps)[group_N]
    return np.where(np.abs(centered) <= rounding, 0.0, centered)
