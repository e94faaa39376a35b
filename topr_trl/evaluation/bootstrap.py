"""Compare runs with a paired bootstrap over their problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from topr_trl.evaluation.answers import ProblemId, Samples
from topr_trl.evaluation.estimates import powers_of_two
from topr_trl.evaluation.pass_and_maj_at_k import expected_maj, expected_pass

_DRAWS = 10_000
_DIGITS = 12  # decimals to compare; float error can make the means of equal runs differ in later decimals
_CHUNK = 500  # draws at a time, to bound memory


@dataclass(frozen=True)
class Difference:
    """Difference in one measure between two runs (second minus first), as returned by [`compare`].

    `print` shows the difference and its interval in percentage points.

    Attributes:
        difference (`float`):
            Mean over problems in the second run minus the mean in the first run. 0.1 is 10 percentage points.
        low (`float`):
            Lower end of the 95% interval (2.5th percentile of the bootstrap draws).
        high (`float`):
            Upper end of the 95% interval (97.5th percentile of the bootstrap draws).
        share_better (`float`):
            Share of bootstrap draws in which the second run is better.
    """

    difference: float
    low: float
    high: float
    share_better: float

    _UNIT, _DIGITS = 100, 1  # factor and decimals of printed values

    def to_dict(self) -> dict[str, float]:
        """Return the attributes as a dictionary, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        # Adding 0.0 turns -0.0 into 0.0.
        found = (round(self._UNIT * value, self._DIGITS) + 0.0 for value in (self.difference, self.low, self.high))
        return "{} [{}, {}]".format(*(f"{value:+.{self._DIGITS}f}" for value in found))


class RewardDifference(Difference):
    """Difference between the mean rewards of two runs. `print` shows it in units of the reward."""

    _UNIT, _DIGITS = 1, 3


def paired_bootstrap(first_PM: NDArray[np.float64], second_PM: NDArray[np.float64], seed: int = 0) -> list[Difference]:
    """Compute the difference between two runs in each of M measures, with bootstrap intervals over P problems.

    The problems are drawn with replacement 10,000 times. Both runs are compared on the same drawn problems, so the
    difficulty of the problems cancels. The intervals are percentiles of the draws (Efron and Tibshirani, An
    Introduction to the Bootstrap, 1993, Ch. 13).

    Args:
        first_PM (`np.ndarray`):
            Value of each measure for each problem in the first run, shape (P, M).
        second_PM (`np.ndarray`):
            Value of each measure for each problem in the second run, shape (P, M).
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `list[Difference]`: one difference per measure.

    Raises:
        ValueError: the runs do not have the same shape (P, M), or a value is not finite.
    """
    if first_PM.ndim != 2 or first_PM.shape != second_PM.shape or 0 in first_PM.shape:
        raise ValueError(f"Both runs need values of the same shape (P, M), not {first_PM.shape} and {second_PM.shape}.")
    if not (np.isfinite(first_PM).all() and np.isfinite(second_PM).all()):
        raise ValueError("The values of both runs must be finite. Leave out problems without a value.")
    gains_PM = second_PM - first_PM
    means_DM = _drawn_means(gains_PM, seed).round(_DIGITS)
    low_M, high_M = np.percentile(means_DM, [2.5, 97.5], axis=0)
    better_M = (means_DM > 0).mean(axis=0)
    rows = np.stack([gains_PM.mean(axis=0), low_M, high_M, better_M], axis=1).tolist()
    return [Difference(*row) for row in rows]


def share_best(values_PA: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Return the share of bootstrap draws in which each of A runs has the highest mean, shape (A,).

    `values_PA` holds a value for each problem and run. Runs that tie for the highest mean share the draw equally.
    """
    means_DA = _drawn_means(values_PA, seed).round(_DIGITS)
    is_best_DA = means_DA >= means_DA.max(axis=1, keepdims=True)
    shares: NDArray[np.float64] = (is_best_DA / is_best_DA.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def _drawn_means(values_PM: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the mean of each measure in each of D bootstrap draws of P problems, shape (D, M)."""
    problems, rng = len(values_PM), np.random.default_rng(seed)
    # A multinomial draw counts how often each problem is drawn with replacement.
    return np.concatenate([
        rng.multinomial(problems, np.full(problems, 1 / problems), size=_CHUNK) @ values_PM / problems
        for _ in range(_DRAWS // _CHUNK)
    ])  # fmt: skip


def compare(first: Samples, second: Samples, seed: int = 0) -> dict[str, Difference]:
    """Compare the greedy accuracy, pass@k and maj@k of two runs, with a paired bootstrap over the problems.

    The runs may differ in their number of samples.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import compare, samples_of

    >>> problems = {"problem_id": [0, 0, 1, 1], "answer": ["7", "7", "8", "8"]}
    >>> before = samples_of(Dataset.from_dict({**problems, "extracted": ["7", "9", "9", "9"]}))
    >>> after = samples_of(Dataset.from_dict({**problems, "extracted": ["7", "7", "8", "9"]}))
    >>> print(compare(before, after)["pass@1"])  # percentage points, and the 95% interval
    +50.0 [+50.0, +50.0]
    ```

    Args:
        first ([`Samples`]):
            Answers of the first run.
        second ([`Samples`]):
            Answers of the second run to the same problems, in any order.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `dict[str, Difference]`: differences by measure. k is a power of two, and S is the smaller number of samples.

        - `"greedy"`, if both runs have greedy answers
        - `"pass@k"` for k ≤ S
        - `"maj@k"` for 1 < k < S

    Raises:
        ValueError: the runs differ in their problems, or in the true answers.
    """
    second = matched(first, second)
    size = min(first.num_samples, second.num_samples)
    measures = [("pass", expected_pass, k) for k in powers_of_two(size)]
    measures += [("maj", expected_maj, k) for k in powers_of_two(size) if 1 < k < size]
    values = [{f"{name}@{k}": expected(run, k) for name, expected, k in measures} for run in (first, second)]
    if first.greedy_P is not None and second.greedy_P is not None:
        greedy = (first.greedy_P, second.greedy_P)
        values = [{"greedy": right_P.astype(float), **of_run} for right_P, of_run in zip(greedy, values, strict=True)]
    first_PM, second_PM = (np.stack(list(of_run.values()), axis=1) for of_run in values)
    return dict(zip(values[0], paired_bootstrap(first_PM, second_PM, seed), strict=True))


def matching_order(first: Sequence[ProblemId], second: Sequence[ProblemId]) -> list[int]:
    """Return the place in the second run of each problem of the first run.

    Raises:
        ValueError: the runs differ in their problems.
    """
    place = {problem: i for i, problem in enumerate(second)}
    if lacking := set(first) ^ set(second):
        counts = [len(lacking & set(problems)) for problems in (first, second)]
        raise ValueError(
            "The runs must have the same problems (by problem_id, or by prompt if neither run has that column): "
            f"{counts[0]} of {len(first)} in the first are not in the second, {counts[1]} of {len(second)} in the "
            "second are not in the first."
        )
    return [place[problem] for problem in first]


def matched(first: Samples, second: Samples) -> Samples:
    """Return the second run with its problems in the order of the first run.

    Raises:
        ValueError: the runs differ in their problems, or in the true answers.
    """
    order = matching_order(first.problem_ids, second.problem_ids)
    truths = [second.truths[i] for i in order]
    other = [problem for i, problem in enumerate(first.problem_ids) if first.truths[i] != truths[i]]
    if other:
        raise ValueError(
            f"The runs must have the same problems: {len(other)} of {first.num_problems} have a different correct "
            f"answer in the second, such as problem {other[0]!r}."
        )
    greedy = second.greedy_P[order] if second.greedy_P is not None else None
    scores = second.scores_PS[order] if second.scores_PS is not None else None
    groups = {column: [names[i] for i in order] for column, names in second.groups.items()}
    return Samples(second.codes_PS[order], first.problem_ids, truths, scores, groups, greedy, second.temperatures)
