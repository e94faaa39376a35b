"""Compute exact pass@k, maj@k and best@k over all draws of k of a problem's S samples, without replacement.

The paper's estimates (arXiv 2503.14286, Sec. 4.1) converge to these values as the number of draws grows.
"""

from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from topr_trl.evaluation.answers import RIGHT_CODE, Samples

_MOST_SAMPLES = 1_000  # with more samples per problem, the number of possible draws can overflow float64


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Compute the probability that at least one of k samples, drawn without replacement, is correct.

    This is the unbiased estimator `1 - C(S - c, k) / C(S, k)` (arXiv 2107.03374, Eq. 1).

    Args:
        num_samples (`int`):
            Number of samples, S.
        num_correct (`int`):
            Number of correct samples, c.
        k (`int`):
            Number of samples to draw, in [1, S].

    Returns:
        `float`: the probability.

    Raises:
        ValueError: k is not in [1, S], or c is not in [0, S].
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples, {num_samples}; it is {k}.")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"num_correct must be between 0 and the number of samples, {num_samples}; it is {num_correct}."
        )
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def expected_pass(samples: Samples, k: int) -> NDArray[np.float64]:
    """Return pass@k of each problem, shape (P,). See `pass_at_k`."""
    return pass_of_problems(samples.codes_PS == RIGHT_CODE, k)


def pass_of_problems(is_right_PS: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Return pass@k of each problem, shape (P,), from whether each sample is right or passes."""
    size = is_right_PS.shape[1]
    known = np.array([pass_at_k(size, c, k) for c in range(size + 1)])
    return known[is_right_PS.sum(axis=1)]


def chances_of_best(size: int, k: int) -> NDArray[np.float64]:
    """Return the probability that sample i is the best of a draw of k samples, shape (S,).

    The samples are numbered 0, ..., S - 1 from the best to the worst, and drawn without replacement. The probability
    is `C(S - 1 - i, k - 1) / C(S, k)`.
    """
    return np.array([comb(size - 1 - i, k - 1) / comb(size, k) for i in range(size)])


def expected_maj(samples: Samples, k: int) -> NDArray[np.float64]:
    """Return maj@k of each problem, shape (P,).

    maj@k is the probability that the most frequent valid answer of k samples is correct. Among equally frequent
    answers, the first drawn answer wins. Each of them is equally likely to be drawn first.

    Raises:
        ValueError: k is outside [1, S], or there are more than 1,000 samples per problem.
    """
    samples.check_k(k)
    if samples.num_samples > _MOST_SAMPLES:
        raise ValueError(f"maj@k supports at most {_MOST_SAMPLES} samples per problem, not {samples.num_samples}.")
    values = np.empty(samples.num_problems)
    for i, codes in enumerate(samples.codes_PS):
        counts = np.bincount(codes[codes >= 0], minlength=1)
        others = tuple(sorted(int(n) for n in counts[1:] if n))
        values[i] = _majority_is_right(int(counts[0]), others, samples.num_samples)[k]
    return values


def expected_best(samples: Samples, k: int) -> NDArray[np.float64]:
    """Return best@k of each problem, shape (P,). The samples must have scores.

    best@k is the probability that the valid sample with the highest score of k samples is correct, see
    `chances_of_best`. Samples with equal scores share their probabilities equally.

    Raises:
        ValueError: k is outside [1, S].
    """
    samples.check_k(k)
    assert samples.scores_PS is not None
    chances_S = chances_of_best(samples.num_samples, k)
    values = np.empty(samples.num_problems)
    for p, (codes, scores) in enumerate(zip(samples.codes_PS, samples.scores_PS, strict=True)):
        # Invalid samples rank last, and count as incorrect if a draw has no valid sample.
        _, ranks = np.unique(np.where(codes >= 0, -scores, np.inf), return_inverse=True)
        members = np.bincount(ranks)
        chance = np.add.reduceat(chances_S, np.cumsum(members) - members)
        values[p] = (chance * np.bincount(ranks, weights=codes == RIGHT_CODE) / members).sum()
    return values


@lru_cache(maxsize=20_000)
def _majority_is_right(right: int, others: tuple[int, ...], size: int) -> NDArray[np.float64]:
    """Return the probabilities that the most frequent valid answer of k samples is correct, for k = 0, ..., S.

    Polynomials count the draws: the coefficient of x^d is the number of ways to draw d samples. Suppose that the draw
    has c correct samples. The correct answer can win only if each incorrect answer has m <= c samples in the draw. An
    incorrect answer with n samples therefore contributes Σ_{m <= c} C(n, m) x^m, and ties if m = c. Row t of `table`
    counts the draws with t ties. In these draws, the correct answer wins with probability 1 / (t + 1).

    Args:
        right: number of samples with the true answer.
        others: number of samples of each incorrect answer, sorted. The remaining samples are invalid.
        size: number of samples, S.
    """
    wins = np.zeros(size + 1)
    for c in range(1, right + 1):
        rivals = [n for n in others if n >= c]  # answers with fewer samples cannot reach c
        free = size - right - sum(rivals)
        table = np.zeros((min(len(rivals), size // c) + 1, size - c + 1))
        table[0, : free + 1] = _binomials(free)
        for n in rivals:
            fresh = np.zeros_like(table)
            for m in range(c):
                fresh[:, m:] += float(comb(n, m)) * table[:, : table.shape[1] - m]
            fresh[1:, c:] += float(comb(n, c)) * table[:-1, : table.shape[1] - c]
            table = fresh
        shares = table / np.arange(1, len(table) + 1)[:, None]
        wins[c:] += float(comb(right, c)) * shares.sum(axis=0)
    return wins / _binomials(size)


def _binomials(n: int) -> NDArray[np.float64]:
    """Return the binomial coefficients C(n, 0), ..., C(n, n)."""
    return np.array([float(comb(n, m)) for m in range(n + 1)])
