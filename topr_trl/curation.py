"""Choose the rows that an iteration trains on (arXiv 2503.14286, Sec. 4.3)."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topr_trl.baseline import (
    FloatArray,
    as_rewards,
    baseline_for_positive_share,
    group_numbers,
    subtract_baseline,
)
from topr_trl.user_warnings import warn_user

CURATIONS = ("none", "uniform", "positives", "positive_share", "balanced", "repeated_positives", "anna_karenina")

REPEATING = ("balanced", "repeated_positives")  # rules that can choose a row several times

# In each iteration, the paper trains on 50,000 rows for the 7,473 problems of GSM8K.
ROWS_PER_PROBLEM = 50_000 / 7_473


@dataclass(frozen=True)
class Curated:
    """Result of [`curate`]: the chosen rows, and counts of the rows they were chosen from.

    `print` shows the counts in one line. With the rules `"balanced"` and `"repeated_positives"`, rows with R = 0 count
    neither as positives nor as negatives.

    Attributes:
        indices (`np.ndarray`):
            Positions of the chosen rows, shape (M,), int64, in ascending order. `"balanced"` and
            `"repeated_positives"` can repeat a position. Shuffle the rows before training.
        size (`int`):
            Number of rows that were requested.
        available_positives (`int`):
            Number of rows with R >= 0 before the choice.
        available_negatives (`int`):
            Number of rows with R < 0 before the choice.
        chosen_positives (`int`):
            Number of chosen rows with R >= 0.
        problems (`int`):
            Number of problems before the choice.
        problems_without_positive (`int`):
            Number of problems without a row with R >= 0.
    """

    indices: NDArray[np.int64]
    size: int
    available_positives: int
    available_negatives: int
    chosen_positives: int
    problems: int
    problems_without_positive: int

    @property
    def shortfall(self) -> int:
        """Number of requested rows that the rule could not choose."""
        return self.size - len(self.indices)

    def __str__(self) -> str:
        chosen, different = len(self.indices), len(np.unique(self.indices))
        share = self.chosen_positives / chosen if chosen else 0.0
        positives, negatives = self.available_positives, self.available_negatives
        are_all = chosen == different == positives + negatives
        text = (
            f"{counted(chosen, 'row')}, {share:.1%} positive{':' if are_all else ', chosen from'} "
            f"{counted(positives, 'positive')} and {counted(negatives, 'negative')} of "
            f"{counted(self.problems, 'problem')} ({self.problems_without_positive:,} without a positive)"
        )
        if different < chosen:
            text += f"; {counted(different, 'different row')}"
        return text + (f"; {self.shortfall:,} fewer than requested" if self.shortfall else "")


def counted(number: int, word: str) -> str:
    """Return a number with a noun, as in "1 row" and "2,000 rows"."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def curate(
    rewards: ArrayLike,
    problem_ids: ArrayLike,
    rule: str = "uniform",
    size: int | None = None,
    positive_share: float = 0.5,
    sample_ids: ArrayLike | None = None,
    seed: int = 0,
) -> Curated:
    """Choose the rows to train on (arXiv 2503.14286, Sec. 4.3).

    | rule | chosen rows | meaning of `size=None` |
    |---|---|---|
    | `"none"` | all rows with a reward | |
    | `"uniform"` | `size` rows at random | all rows with a reward |
    | `"positives"` | `size` positives at random | all positives |
    | `"positive_share"` | positives and negatives at random, in the given share | as many rows as possible |
    | `"balanced"` | half positives, repeated if there are too few, and half negatives | up to all rows with R ≠ 0 |
    | `"repeated_positives"` | positives only, repeated until there are `size` rows | number of rows with a reward |
    | `"anna_karenina"` | the first positive of each problem, then random negatives | up to 6.69 rows per problem |

    If there are too few rows, the function returns fewer rows than `size`. `"positive_share"` and `"balanced"` then
    keep the share, and `"anna_karenina"` returns all first positives and all negatives. If there are more first
    positives than `size`, `"anna_karenina"` returns `size` of them at random and no negatives. The function warns if it
    returns too few rows, if the rule needs positives or negatives and there are none, or if `"balanced"` leaves out
    positives because there are fewer negatives.

    `"balanced"` and `"repeated_positives"` are not in the paper. They choose each positive equally often, up to a
    difference of one, and never repeat a negative. They leave out rows with R = 0, which teach nothing.

    Example:

    ```python
    >>> from topr_trl import curate

    >>> curated = curate([1.0, 1.0, -1.0, -1.0], problem_ids=[0, 0, 0, 1], rule="anna_karenina", size=3)
    >>> curated.indices.tolist()
    [0, 2, 3]
    >>> print(curated)
    3 rows, 33.3% positive, chosen from 2 positives and 2 negatives of 2 problems (1 without a positive)
    ```

    Args:
        rewards (`ArrayLike`):
            Rewards R after the baseline, shape (N,). A row is positive if R >= 0. NaN marks a row without a reward,
            which is never chosen.
        problem_ids (`ArrayLike`):
            Problem of each row, shape (N,), of one comparable type, without missing values.
        rule (`str`, *optional*, defaults to `"uniform"`):
            Rule from the table above.
        size (`int`, *optional*):
            Number of rows to choose. Not used by `"none"`. `None` uses the number in the last column of the table.
        positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives, in [0, 1], for the rule `"positive_share"`.
        sample_ids (`ArrayLike`, *optional*):
            Position of each row in the order in which the completions of its problem were sampled, shape (N,). With
            `sample_ids`, the choice does not depend on the order of the rows. `None` uses the order of the rows.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random choices.

    Returns:
        [`Curated`]: positions of the chosen rows, and counts.

    Raises:
        ValueError: the rule is unknown, `rewards`, `problem_ids` or `sample_ids` are malformed or have different
            lengths, `size` is not a whole number of at least 1, or `positive_share` is outside [0, 1], or differs from
            0.5 although the rule is not `"positive_share"`.
    """
    rewards = as_rewards(rewards)
    problem = group_numbers("problem_ids", problem_ids, len(rewards))
    position = np.arange(len(rewards))
    if sample_ids is not None:
        if np.asarray(sample_ids).dtype.kind not in "iuf":  # As text, 10 comes before 9.
            raise ValueError(f"sample_ids must be numbers, not {np.asarray(sample_ids).dtype}.")
        position = group_numbers("sample_ids", sample_ids, len(rewards))
    if rule not in CURATIONS:
        raise ValueError(f"curation must be one of {CURATIONS}, not {rule!r}.")
    if size is not None and not (isinstance(size, Integral) and size >= 1):
        raise ValueError(f"size must be a whole number of rows, at least 1, not {size}.")
    if not 0 <= positive_share <= 1:
        raise ValueError(f"positive_share must be in [0, 1], not {positive_share}.")
    if positive_share != 0.5 and rule != "positive_share":
        raise ValueError(f"positive_share={positive_share:g} has no effect with the rule {rule!r}. Remove it.")

    # Sort the rows, so that with `sample_ids` the choice does not depend on the order in which the rows are given.
    order = np.lexsort((position, problem))
    known = _can_be_chosen(rewards, rule)
    order = order[known[order]]
    is_positive = rewards[order] >= 0
    share = {"positive_share": positive_share, "balanced": 0.5, "repeated_positives": 1.0, "positives": 1.0}.get(rule)
    if rule == "repeated_positives" and size is None:
        size = int((~np.isnan(rewards)).sum()) or None  # rows with R = 0 count, too
    asked, chosen = _choose(rule, order, is_positive, problem, size, share, seed)
    indices = np.sort(np.concatenate(chosen)).astype(np.int64)
    curated = _curated(indices, asked, rewards, problem, known)
    _warn_if_short(curated, rule, share)
    return curated


def _can_be_chosen(rewards_N: FloatArray, rule: str) -> NDArray[np.bool_]:
    """Return a mask of the rows that a rule can choose: rows with a reward, and with R ≠ 0 if the rule repeats rows."""
    return ~np.isnan(rewards_N) & ((rewards_N != 0) | (rule not in REPEATING))


def _curated(
    indices: NDArray[np.int64],
    size: int,
    rewards_N: FloatArray,
    problem_N: NDArray[np.int64],
    known_N: NDArray[np.bool_],
) -> Curated:
    """Return a choice with the counts for rewards R. `known_N` marks the rows that the choice was made from."""
    is_positive_N = known_N & (rewards_N >= 0)
    count = len(np.unique(problem_N))
    return Curated(
        indices=indices,
        size=size,
        available_positives=int(is_positive_N.sum()),
        available_negatives=int((known_N & ~is_positive_N).sum()),
        chosen_positives=int(is_positive_N[indices].sum()),
        problems=count,
        problems_without_positive=count - len(np.unique(problem_N[is_positive_N])),
    )


def _choose(
    rule: str,
    order: NDArray[np.int64],
    is_positive: NDArray[np.bool_],
    problem: NDArray[np.int64],
    size: int | None,
    positive_share: float | None,
    seed: int,
) -> tuple[int, list[NDArray[np.int64]]]:
    """Return the number of requested rows, and the positions of the chosen rows in one or two arrays.

    `order` has the positions of the rows to choose from, sorted by problem and sampling order. `is_positive` tells for
    each row of `order` whether it is positive. `problem` has the problem number of each row, in the order in which
    [`curate`] got the rows.
    """
    positives, negatives = order[is_positive], order[~is_positive]
    rng = np.random.default_rng(seed)

    def draw(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return rows if count >= len(rows) else rng.choice(rows, count, replace=False)

    if rule in ("none", "uniform"):
        asked = len(order) if size is None or rule == "none" else size
        return asked, [draw(order, asked)]
    if positive_share is not None:
        repeats = rule in REPEATING and len(positives) > 0
        limits: list[float] = [len(order) if size is None else size]
        if positive_share < 1:
            limits.append(len(negatives) / (1 - positive_share))
        if positive_share > 0 and not repeats:
            limits.append(len(positives) / positive_share)
        count = int(min(limits) + 1e-9)  # 1e-9 corrects rounding: 3 / (1 - 0.7) is slightly below 10.
        count_positive = round(count * positive_share)
        # `resize` cycles through the positives.
        kept = np.resize(rng.permutation(positives), count_positive) if repeats else draw(positives, count_positive)
        return count if size is None else size, [kept, draw(negatives, count - count_positive)]
    # The rule is "anna_karenina". `positives` is in sampling order, so `first` has the first positive of each problem.
    _, first = np.unique(problem[positives], return_index=True)
    paper_size = round(ROWS_PER_PROBLEM * len(np.unique(problem)))
    asked = min(paper_size, len(first) + len(negatives)) if size is None else size
    kept = draw(positives[first], asked)
    return asked, [kept, draw(negatives, asked - len(kept))]


def _warn_if_short(curated: Curated, rule: str, positive_share: float | None) -> None:
    missing = []
    if not curated.available_positives and (rule == "anna_karenina" or (positive_share or 0) > 0):
        missing.append("positive")
    has_share_of_negatives = positive_share is not None and positive_share < 1
    if not curated.available_negatives and (rule == "anna_karenina" or has_share_of_negatives):
        missing.append("negative")
    if missing:
        warn_user(f"curation={rule!r}: there is no {' and no '.join(missing)} row. Chosen: {curated}.")
    elif curated.shortfall:
        warn_user(
            f"curation={rule!r}: there are too few rows, so {len(curated.indices):,} are chosen instead of "
            f"{curated.size:,}."
        )
    elif rule == "balanced" and curated.size == 2 * curated.available_negatives < 2 * curated.available_positives:
        warn_user(
            f"curation='balanced' leaves out {curated.available_positives - curated.chosen_positives:,} of "
            f"{curated.available_positives:,} right completions, because there are fewer wrong ones: "
            f"{curated.available_negatives:,}. Balanced rows are meant for few right answers."
        )


def _middle_of_two(rewards_N: FloatArray) -> float:
    """Return the middle between the two values of the rewards, their only value, or 0 without rewards.

    Raises:
        ValueError: there are more than two values.
    """
    values = np.unique(rewards_N[~np.isnan(rewards_N)])
    if len(values) > 2:
        raise ValueError(
            f"curation='balanced' chooses half right and half wrong rows, and needs rewards with two values. Here they "
            f"have {len(values):,}: {', '.join(f'{value:g}' for value in values[:4])}{', …' * (len(values) > 4)}. Give "
            "each row one of two rewards (imported stars: --label_values 1=-1 2=-1 3= 4=1 5=1 --skip_unrewarded true), "
            "or choose the rows above the baseline with curation='repeated_positives'."
        )
    return float(values.mean()) if len(values) else 0.0


def compose(
    rewards: ArrayLike,
    problem_ids: ArrayLike,
    *,
    baseline: float | str = 0.0,
    effective_positive_share: float | None = None,
    rule: str = "none",
    size: int | None = None,
    positive_share: float = 0.5,
    sample_ids: ArrayLike | None = None,
    seed: int = 0,
    turns: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], Curated]:
    """Subtract the baseline from raw rewards, and choose the rows to train on.

    The baseline is computed from all rows, and the sign of R then decides which rows are positive. The target
    `effective_positive_share` is for the chosen rows, so the baseline is computed again after the choice. If all chosen
    rows have the same raw reward, no baseline reaches a target below 1, and the first baseline is kept. With more than
    two different rewards, the second baseline can change the sign of R of some rows. The counts of the result are for
    the second baseline.

    The rule `"balanced"` needs rewards with at most two values, such as 0 and 1. Rows with the larger value are
    positives. The baseline is the middle between the two values.

    Args:
        rewards (`ArrayLike`):
            Raw rewards R0, shape (N,). See [`subtract_baseline`].
        problem_ids (`ArrayLike`):
            Problem of each row, shape (N,).
        baseline (`float` or `str`, *optional*, defaults to `0.0`):
            Baseline c: a number, `"mean"` or `"group_mean"`.
        effective_positive_share (`float`, *optional*):
            Target p~ for the effective share of positives, in (0, 1]. If given, `baseline` is not used. The rule
            `"balanced"` does not use `baseline`, and takes no target.
        rule (`str`, *optional*, defaults to `"none"`):
            Rule that chooses the rows. See [`curate`].
        size (`int`, *optional*):
            Number of rows to choose. See [`curate`].
        positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives for the rule `"positive_share"`.
        sample_ids (`ArrayLike`, *optional*):
            Position of each row in the sampling order of its problem, shape (N,). See [`curate`].
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random choices.
        turns (`ArrayLike`, *optional*):
            Turn index of each row, shape (N,), if rows are turns and rewards are returns. Then `"mean"` and
            `"group_mean"` average only over rows with the same turn index, because returns shrink with the turn.

    Returns:
        `tuple`: rewards R of the chosen rows, shape (M,) in float64, and the [`Curated`] choice.

    Raises:
        ValueError: `rule="balanced"`, and the rewards have more than two values, or `effective_positive_share` is
            given; or `turns` and `effective_positive_share` are given. See also [`subtract_baseline`] and [`curate`].
    """
    rewards = as_rewards(rewards)
    if rule == "balanced":
        if effective_positive_share is not None:
            raise ValueError("The rule 'balanced' sets the baseline. Remove effective_positive_share.")
        baseline = _middle_of_two(rewards)
    problem = groups = group_numbers("problem_ids", problem_ids, len(rewards))
    if turns is not None:
        if effective_positive_share is not None:
            raise ValueError("Returns have a baseline for each turn index. Remove effective_positive_share.")
        of_turn = group_numbers("turns", turns, len(rewards))
        if baseline == "mean":
            baseline, groups = "group_mean", of_turn
        elif baseline == "group_mean":
            groups = problem * (of_turn.max(initial=0) + 1) + of_turn
    after_baseline = subtract_baseline(rewards, baseline, groups, effective_positive_share)
    curated = curate(after_baseline, problem, rule, size, positive_share, sample_ids, seed)
    one_sided = len(np.unique(rewards[curated.indices])) < 2  # If so, no baseline reaches a share below 1.
    if effective_positive_share is None or one_sided:
        return after_baseline[curated.indices], curated
    known = _can_be_chosen(after_baseline, rule)
    after_baseline = rewards - baseline_for_positive_share(rewards[curated.indices], effective_positive_share)
    curated = _curated(curated.indices, curated.size, after_baseline, problem, known)
    return after_baseline[curated.indices], curated
