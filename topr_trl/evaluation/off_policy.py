"""Estimate a policy's mean reward from completions that another policy wrote."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class OffPolicyValues(NamedTuple):
    """Estimates by problem.

    Attributes:
        values_P: float64, mean reward of each problem's completions under π.
        effective_samples: how many completions of a problem count on average; with few, an estimate says little more
            than that the policies differ.
    """

    values_P: NDArray[np.float64]
    effective_samples: float


def off_policy_values(
    log_ratios_N: NDArray[np.float64], rewards_N: NDArray[np.float64], problems_N: NDArray[np.int64]
) -> OffPolicyValues:
    """Self-normalized importance sampling: `Σ w R / Σ w` over the completions of each problem, w = π/μ.

    Consistent as completions are added, and biased towards μ's mean reward with few (Swaminathan and Joachims, The
    Self-Normalized Estimator for Counterfactual Learning, 2015, Sec. 4; Owen, Monte Carlo, 2013, Ch. 9). The effective
    number of samples is `(Σ w)² / Σ w²`.

    Args:
        log_ratios_N: log π/μ of each completion.
        rewards_N: rewards of the completions.
        problems_N: the problem of each completion, 0, ..., P - 1, each with a completion.
    """
    count = int(problems_N.max()) + 1
    largest = np.full(count, -np.inf)
    np.maximum.at(largest, problems_N, log_ratios_N)
    weights = np.exp(log_ratios_N - largest[problems_N])  # of a problem, up to a factor
    sums, squares, rewards = (np.bincount(problems_N, v) for v in (weights, weights**2, weights * rewards_N))
    return OffPolicyValues(rewards / sums, float((sums**2 / squares).mean()))
