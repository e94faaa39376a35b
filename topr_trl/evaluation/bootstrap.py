"""Is one run better than another? A paired bootstrap over the problems of both."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topr_trl.evaluation.answers import Samples
from topr_trl.evaluation.estimates import powers_of_two
from topr_trl.evaluation.exact import expected_maj, expected_pass

_DRAWS = 10_000
_DIGITS = 12  # of a mean: equal values have means that differ by rounding
_CHUNK = 500  # draws at a time, to bound memory


@dataclass(frozen=True)
class Difference:
    """How much better the second of two runs is, in one measure.

    Attributes:
        difference: of the means over the problems, second run minus first.
        low, high: the 95% interval, from percentiles of the bootstrap.
        share_better: share of the bootstrap's draws in which the second run is better.
    """

    difference: float
    low: float
    high: float
    share_better: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        # + 0.0 makes a zero of a negative zero.
        found = (round(100 * value, 1) + 0.0 for value in (self.difference, self.low, self.high))
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*found)


def paired_bootstrap(first_PM: NDArray[np.float64], second_PM: NDArray[np.float64], seed: int = 0) -> list[Difference]:
    """Differences of M measures, with intervals over problems.

    P problems are drawn with replacement 10,000 times, and both runs are compared on the same problems, so that
    their difficulty cancels (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Ch. 13).

    `first_PM` and `second_PM` hold each measure of each run, by problem.
    """
    gains_PM = second_PM - first_PM
    means_DM = _drawn_means(gains_PM, seed)
    low_M, high_M = np.percentile(means_DM, [2.5, 97.5], axis=0)
    better_M = (means_DM > 0).mean(axis=0)
    rows = np.stack([gains_PM.mean(axis=0), low_M, high_M, better_M], axis=1).tolist()
    return [Difference(*row) for row in rows]


def share_best(values_PA: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """(A,) in which share of the bootstrap's draws of problems each of A runs has the highest mean.

    `values_PA` holds the runs' values by problem; equals share a draw.
    """
    means_DA = _drawn_means(values_PA, seed).round(_DIGITS)
    is_best_DA = means_DA >= means_DA.max(axis=1, keepdims=True)
    shares: NDArray[np.float64] = (is_best_DA / is_best_DA.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def _drawn_means(values_PM: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """(D, M) means over P problems that are drawn with replacement."""
    problems, rng = len(values_PM), np.random.default_rng(seed)
    return np.concatenate([
        rng.multinomial(problems, np.full(problems, 1 / problems), size=_CHUNK) @ values_PM / problems
        for _ in range(_DRAWS // _CHUNK)
    ])  # fmt: skip


def compare(first: Samples, second: Samples, seed: int = 0) -> dict[str, Difference]:
    """Compare two runs in greedy accuracy, pass@k and maj@k, paired by problem.

    The numbers of samples of the runs may differ.

    Returns:
        `{"greedy": difference, "pass@1": ...}`: greedy if both runs have greedy answers; for k in powers of two pass@k
        up to the smaller number of samples S, and maj@k from 2 to below it.

    Raises:
        ValueError: the runs differ in their problems, or in the right answers to them.
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


def matched(first: Samples, second: Samples) -> Samples:
    """The second run with its problems in the order of the first; a ValueError as from `compare`."""
    place = {problem: i for i, problem in enumerate(second.problem_ids)}
    lacking = [problem for problem in first.problem_ids if problem not in place]
    more = set(place) - set(first.problem_ids)
    if lacking or more:
        raise ValueError(
            "The runs must have the same problems (by problem_id, or by prompt if neither run has that column): "
            f"{len(lacking)} of {first.num_problems} in the first are not in the second, {len(more)} of "
            f"{second.num_problems} in the second are not in the first."
        )
    order = [place[problem] for problem in first.problem_ids]
    truths = [second.truths[i] for i in order]
    other = [problem for i, problem in enumerate(first.problem_ids) if first.truths[i] != truths[i]]
    if other:
        raise ValueError(
            f"The runs must have the same problems: {len(other)} of {first.num_problems} have a different right "
            f"answer in the second, such as problem {other[0]!r}."
        )
    scores = second.scores_PS[order] if second.scores_PS is not None else None
    groups = {column: [names[i] for i in order] for column, names in second.groups.items()}
    greedy = second.greedy_P[order] if second.greedy_P is not None else None
    return Samples(second.codes_PS[order], first.problem_ids, truths, scores, groups, greedy, second.temperatures)
