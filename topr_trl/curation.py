"""Choose the rows that an iteration trains on (arXiv 2503.14286, Sec. 4.3)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topr_trl.baseline import subtract_baseline
from topr_trl.warn import warn_user

CURATIONS = ("none", "uniform", "positives", "positive_share", "anna_karenina")

# The paper trains on 50,000 rows per iteration for the 7,473 problems of GSM8K, so 15% are first positives.
ROWS_PER_PROBLEM = 50_000 / 7_473


@dataclass(frozen=True)
class Curated:
    """The chosen rows, and what there was to choose from.

    Attributes:
        indices: (M,) int64 positions of the chosen rows, ascending. Shuffle before training.
        size: rows that were asked for.
        available_positives, available_negatives: rows with R >= 0 and R < 0 that there were.
        chosen_positives: rows with R >= 0 among the chosen.
        problems, problems_without_positive: problems that there were, and those without a positive.
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
        """Rows that were asked for and are missing under the rule."""
        return self.size - len(self.indices)

    def __str__(self) -> str:
        chosen = len(self.indices)
        share = self.chosen_positives / chosen if chosen else 0.0
        text = (
            f"{chosen:,} rows, {share:.1%} positive, chosen from {self.available_positives:,} positives and "
            f"{self.available_negatives:,} negatives of {self.problems:,} problems "
            f"({self.problems_without_positive:,} without a positive)"
        )
        return text + (f"; {self.shortfall:,} fewer than asked for" if self.shortfall else "")


def curate(
    rewards: ArrayLike,
    problem_ids: ArrayLike,
    rule: str = "uniform",
    size: int | None = None,
    positive_share: float = 0.5,
    sample_ids: ArrayLike | None = None,
    seed: int = 0,
) -> Curated:
    """Choose rows to train on.

    | rule | what is chosen | `size=None` means |
    |---|---|---|
    | `"none"` | every row | |
    | `"uniform"` | `size` rows at random | all |
    | `"positives"` | `size` positives at random | all positives |
    | `"positive_share"` | both at random, positives a share `positive_share` | as many as there are |
    | `"anna_karenina"` | the first positive of each problem, then negatives at random up to `size` | 6.69 per problem |

    Where there are too few rows, fewer are returned; rows of the other sign never take their place.
    `"positive_share"` keeps the share and returns fewer rows; `"anna_karenina"` returns all negatives there are, and
    if even the first positives are more than `size`, `size` of them at random and no negative. A shortfall, and a
    choice without positives or without negatives where the rule wants both, warns; `Curated` holds the counts.

    Args:
        rewards: (N,) R; a row is positive if R >= 0. NaN marks a row without a reward: it is never chosen.
        problem_ids: (N,) the problem of each row, any comparable dtype.
        size: rows to choose; of the table's defaults at most as many as there are, so that no default falls short.
        sample_ids: (N,) position of the row in its problem's sampling order. With it the choice does not depend on
            the order of the table; without it the order of the table is the sampling order.

    Raises:
        ValueError: an unknown rule, lengths that differ, a size below 1, a share outside [0, 1].
    """
    rewards, problem_ids = np.asarray(rewards, dtype=np.float64), np.asarray(problem_ids)
    if rule not in CURATIONS:
        raise ValueError(f"curation must be one of {CURATIONS}, not {rule!r}.")
    if len(rewards) != len(problem_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(problem_ids)} problem ids: each row needs one of each.")
    if size is not None and size < 1:
        raise ValueError(f"The number of rows to choose must be at least 1, not {size}.")
    if not 0 <= positive_share <= 1:
        raise ValueError(f"positive_share must be in [0, 1], not {positive_share}.")

    # In the order (problem, sampling order), every rule is blind to the order of the table.
    _, problem = np.unique(problem_ids, return_inverse=True)
    order = np.lexsort((np.arange(len(rewards)) if sample_ids is None else np.asarray(sample_ids), problem))
    order = order[~np.isnan(rewards[order])]
    is_positive = rewards[order] >= 0
    asked, chosen = _choose(rule, order, is_positive, problem, size, positive_share, seed)
    indices = np.sort(np.concatenate(chosen)).astype(np.int64)
    count = len(np.unique(problem))
    curated = Curated(
        indices=indices,
        size=asked,
        available_positives=int(is_positive.sum()),
        available_negatives=int((~is_positive).sum()),
        chosen_positives=int((rewards[indices] >= 0).sum()),
        problems=count,
        problems_without_positive=count - len(np.unique(problem[order[is_positive]])),
    )
    _warn_if_short(curated, rule)
    return curated


def _choose(
    rule: str,
    order: NDArray[np.int64],
    is_positive: NDArray[np.bool_],
    problem: NDArray[np.int64],
    size: int | None,
    positive_share: float,
    seed: int,
) -> tuple[int, list[NDArray[np.int64]]]:
    """The number of rows that are asked for, and the chosen ones; `order` and `is_positive` are in sampling order."""
    positives, negatives = order[is_positive], order[~is_positive]
    rng = np.random.default_rng(seed)

    def draw(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return rows if count >= len(rows) else rng.choice(rows, count, replace=False)

    if rule == "none":
        return len(order), [order]
    if rule in ("uniform", "positives"):
        rows = order if rule == "uniform" else positives
        asked = len(rows) if size is None else size
        return asked, [draw(rows, asked)]
    if rule == "positive_share":
        most = min(
            len(positives) / positive_share if positive_share > 0 else np.inf,
            len(negatives) / (1 - positive_share) if positive_share < 1 else np.inf,
        )
        most = int(most + 1e-9)  # 7 / 0.7 is a little below 10
        asked = most if size is None else size
        count = min(asked, most)
        count_positive = min(round(count * positive_share), len(positives))
        return asked, [draw(positives, count_positive), draw(negatives, count - count_positive)]
    _, first = np.unique(problem[positives], return_index=True)
    papers = round(ROWS_PER_PROBLEM * len(np.unique(problem)))
    asked = min(papers, len(first) + len(negatives)) if size is None else size
    kept = draw(positives[first], asked)
    return asked, [kept, draw(negatives, asked - len(kept))]


def _warn_if_short(curated: Curated, rule: str) -> None:
    missing = []
    if not curated.available_positives and rule in ("positives", "positive_share", "anna_karenina"):
        missing.append("positive")
    if not curated.available_negatives and rule in ("positive_share", "anna_karenina"):
        missing.append("negative")
    if missing:
        warn_user(f"curation={rule!r}: there is no {' and no '.join(missing)} row. Chosen: {curated}.")
    elif curated.shortfall:
        warn_user(f"curation={rule!r}: too few rows. Chosen: {curated}.")


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
) -> tuple[NDArray[np.float64], Curated]:
    """Subtract the baseline and choose rows: from raw rewards to R of the rows to train on.

    The baseline is taken over all rows, and the sign of R decides which of them are positive for the curation. A target
    share p~ describes the rows trained on, so it is solved once more over the chosen ones.

    Returns:
        (M,) float64 rewards R of the chosen rows, and the choice. See `subtract_baseline` and `curate`.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    after_baseline = subtract_baseline(rewards, baseline, problem_ids, effective_positive_share)
    curated = curate(after_baseline, problem_ids, rule, size, positive_share, sample_ids, seed)
    one_sided = len(np.unique(rewards[curated.indices])) < 2  # no baseline reaches the share on those alone
    if effective_positive_share is None or rule == "none" or one_sided:
        return after_baseline[curated.indices], curated
    return subtract_baseline(rewards[curated.indices], baseline, share=effective_positive_share), curated
