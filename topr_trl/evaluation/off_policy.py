"""Estimate the mean reward of a policy π from completions that another policy μ wrote."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class OffPolicyValues(NamedTuple):
    """Off-policy estimates of the mean reward of each problem.

    Attributes:
        values_P (`np.ndarray`):
            Estimated mean reward of each problem under π, shape (P,), float64.
        effective_samples (`float`):
            Effective sample size of a problem, averaged over problems. A small value means that the policies differ
            too much for a precise estimate.
    """

    values_P: NDArray[np.float64]
    effective_samples: float


def off_policy_values(
    log_ratios_N: NDArray[np.float64], rewards_N: NDArray[np.float64], problems_N: NDArray[np.int64]
) -> OffPolicyValues:
    """Estimate the mean reward of each problem by self-normalized importance sampling, `Σ w R / Σ w` with w = π/μ.

    The estimate is consistent. With few completions it is biased toward the mean reward of μ (Swaminathan and Joachims,
    The Self-Normalized Estimator for Counterfactual Learning, 2015, Sec. 4; Owen, Monte Carlo, 2013, Ch. 9). The
    effective sample size is `(Σ w)² / Σ w²`.

    Args:
        log_ratios_N (`np.ndarray`):
            log π/μ of each completion, shape (N,), in nats.
        rewards_N (`np.ndarray`):
            Rewards of the completions, shape (N,).
        problems_N (`np.ndarray`):
            Problem of each completion, shape (N,), numbered from 0 to P - 1. Each problem needs at least one
            completion.

    Returns:
        `OffPolicyValues`: the estimates, and the mean effective sample size.

    Raises:
        ValueError: the arrays differ in length, a value is not finite, or a problem has no completion.
    """
    if not (log_ratios_N.shape == rewards_N.shape == problems_N.shape == (len(problems_N),)):
        raise ValueError("log_ratios_N, rewards_N and problems_N must have the same shape (N,).")
    if not (np.isfinite(log_ratios_N).all() and np.isfinite(rewards_N).all()):
        raise ValueError("log π/μ and the rewards must be finite.")
    if 0 in np.bincount(problems_N):
        raise ValueError("problems_N must number the problems from 0 to P - 1 without a gap.")
    count = int(problems_N.max()) + 1
    largest = np.full(count, -np.inf)
    np.maximum.at(largest, problems_N, log_ratios_N)
    # Subtracting the largest log-ratio of each problem avoids overflow. The scale of the weights cancels below.
    weights = np.exp(log_ratios_N - largest[problems_N])
    sums, squares, products = (np.bincount(problems_N, v) for v in (weights, weights**2, weights * rewards_N))
    return OffPolicyValues(products / sums, float((sums**2 / squares).mean()))
