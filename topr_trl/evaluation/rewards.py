"""Estimate the mean reward, best@k and pass@k of completions with real-valued rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.data.rows import finite_rewards, need_columns
from topr_trl.data.sampler_logps import TEMPERATURE
from topr_trl.data.tables import columns_of, from_table, read_shard, shards_of
from topr_trl.evaluation.answers import ProblemId, rows_by_problem
from topr_trl.evaluation.bootstrap import Difference, RewardDifference, matching_order, paired_bootstrap
from topr_trl.evaluation.estimates import (
    Estimate,
    Evaluation,
    RewardEstimate,
    exact_estimate,
    powers_of_two,
    standard_error_of_draws,
)
from topr_trl.evaluation.pass_and_maj_at_k import chances_of_best, pass_of_problems

PASSED, NOT_PASSED, WITHOUT = "passed", "not passed", "without a reward"


@dataclass(frozen=True)
class RewardSamples:
    """Rewards of S samples for each of P problems. [`reward_samples_of`] converts rows to this class.

    Attributes:
        rewards_PS (`np.ndarray`):
            Rewards, shape (P, S), float64. NaN for a sample without a reward.
        problem_ids (`Sequence[int | float | str]`):
            Ids of the P problems.
        greedy_P (`np.ndarray`, *optional*):
            Reward of the greedy completion (temperature 0) of each problem, shape (P,), with NaN for a completion
            without a reward. `None` without greedy completions.
        temperatures (`Sequence[float]`, *optional*, defaults to `()`):
            Distinct temperatures of the samples, in ascending order. Empty if a sample's temperature is unknown.
    """

    rewards_PS: NDArray[np.float64]
    problem_ids: Sequence[ProblemId]
    greedy_P: NDArray[np.float64] | None = None
    temperatures: Sequence[float] = ()

    @property
    def num_problems(self) -> int:
        """Number of problems, P."""
        return len(self.rewards_PS)

    @property
    def num_samples(self) -> int:
        """Number of samples per problem, S."""
        return self.rewards_PS.shape[1]

    @property
    def num_rows(self) -> int:
        """Total number of samples and greedy completions."""
        return self.rewards_PS.size + (0 if self.greedy_P is None else len(self.greedy_P))


def reward_samples_of(rows: Dataset) -> RewardSamples:
    """Convert rows with rewards to [`RewardSamples`]. Problems are in order of first appearance.

    Args:
        rows ([`~datasets.Dataset`]):
            Rows with the same number of rows for each problem. Columns:

            - `reward`: reward of the completion, or null if there is none. Without this column, `label` is used.
            - `problem_id`: problem of the row. Without this column, rows with equal `prompt` share a problem.
            - `temperature` (optional): a row with temperature 0 is the greedy completion of its problem and not a
              sample. If all rows have temperature 0, they are also the samples.

    Returns:
        [`RewardSamples`]: the rewards as arrays.

    Raises:
        ValueError: there is no row, no row has a reward, a column is missing or has a wrong value, or the problems
            differ in their number of samples or greedy rows.
    """
    problem = "problem_id" if "problem_id" in rows.column_names else "prompt"
    reward = "label" if "label" in rows.column_names and "reward" not in rows.column_names else "reward"
    need_columns(rows.column_names, (reward, problem), "Rows to evaluate")
    if len(rows) == 0:
        raise ValueError("There are no rows to evaluate.")
    rewards = finite_rewards(rows, may_be_missing=True)
    if np.isnan(rewards).all():
        raise ValueError(f"None of the {len(rewards)} rows to evaluate has a reward.")
    places, sampled, greedy, temperatures = rows_by_problem(rows)
    counts = {len(place) for place in sampled}
    if len(counts) > 1:
        raise ValueError(
            f"Every problem needs the same number of samples. The {len(places)} problems have {min(counts)} to "
            f"{max(counts)} samples."
        )
    greedy_P = rewards[np.array(greedy)] if greedy else None
    return RewardSamples(rewards[np.array(sampled)], list(places), greedy_P, temperatures)


def read_reward_samples(path: Path) -> RewardSamples:
    """Read [`RewardSamples`] from a folder of shards or a file."""
    tables = []
    for shard in shards_of(path):
        names = columns_of(shard)
        tables.append(
            read_shard(shard, ("reward", "label", "problem_id" if "problem_id" in names else "prompt", TEMPERATURE))
        )
    try:
        return reward_samples_of(from_table(pa.concat_tables(tables)))
    except (ValueError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: {error}") from error


def best_moments(samples: RewardSamples, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each problem's mean and variance of the highest reward of k samples, two arrays of shape (P,).

    The moments are exact over all draws without replacement. Draws without any reward are left out. The values of a
    problem without rewards are NaN.
    """
    sorted_PS = -np.sort(-samples.rewards_PS, axis=1)  # NaN comes last
    weights_PS = ~np.isnan(sorted_PS) * chances_of_best(samples.num_samples, k)
    total_P = weights_PS.sum(axis=1)
    with np.errstate(invalid="ignore"):
        weights_PS = weights_PS / total_P[:, None]
    mean_P = (weights_PS * np.nan_to_num(sorted_PS)).sum(axis=1)
    variance_P = (weights_PS * np.nan_to_num(sorted_PS - mean_P[:, None]) ** 2).sum(axis=1)
    return mean_P, variance_P


def best_estimate(samples: RewardSamples, k: int) -> RewardEstimate:
    """Estimate the highest reward of k samples, as a mean over problems and draws. For k = 1, this is the mean reward.

    The standard error is the paper's, `sqrt(k V / (S - k))` (arXiv 2503.14286, Sec. 4.1). V is the sum of the problems'
    variances, divided by P². The error accounts for the random choice of samples for fixed problems. It is NaN for
    k = S. Problems without rewards are left out.
    """
    mean_P, variance_P = best_moments(samples, k)
    known_P = ~np.isnan(mean_P)
    variance = float(variance_P[known_P].sum()) / known_P.sum() ** 2
    error = standard_error_of_draws(variance, k, samples.num_samples)
    return RewardEstimate(float(mean_P[known_P].mean()), error)


def passed(samples: RewardSamples, pass_threshold: float) -> NDArray[np.bool_]:
    """Return whether each sample passes, shape (P, S). A sample without a reward does not pass."""
    return np.nan_to_num(samples.rewards_PS, nan=-np.inf) >= pass_threshold


def evaluate_rewards(samples: RewardSamples, pass_threshold: float | None = None) -> Evaluation:
    """Evaluate rewards of S samples for each of P problems: mean reward, best@k, and pass@k with a threshold.

    The values of k are the powers of two up to S. best@k is the mean of the highest reward of k samples.

    Args:
        samples ([`RewardSamples`]):
            Rewards.
        pass_threshold (`float`, *optional*):
            Minimum reward for a sample to pass. `None` omits pass@k.

    Returns:
        [`Evaluation`]: the estimates.
    """
    size = samples.num_samples
    ks = powers_of_two(size)
    shares: dict[str, float] = {}
    pass_at: dict[int, Estimate] = {}
    cardinality: list[int] = []
    missing = float(np.isnan(samples.rewards_PS).mean())
    if pass_threshold is not None:
        passed_PS = passed(samples, pass_threshold)
        not_passed_PS = ~passed_PS & ~np.isnan(samples.rewards_PS)
        shares = {PASSED: float(passed_PS.mean()), NOT_PASSED: float(not_passed_PS.mean())}
        pass_at = {k: exact_estimate(pass_of_problems(passed_PS, k), k, size) for k in ks}
        cardinality = np.bincount(passed_PS.sum(axis=1), minlength=size + 1).tolist()
    if missing:
        shares[WITHOUT] = missing
    return Evaluation(
        pass_at=pass_at,
        maj_at={},
        shares=shares,
        cardinality=cardinality,
        num_problems=samples.num_problems,
        num_samples=size,
        temperatures=list(samples.temperatures),
        reward=best_estimate(samples, 1),
        best_reward_at={k: best_estimate(samples, k) for k in ks if k > 1},
        greedy_reward=None if samples.greedy_P is None else _greedy_estimate(samples.greedy_P),
        pass_threshold=pass_threshold,
    )


def _greedy_estimate(greedy_P: NDArray[np.float64]) -> RewardEstimate | None:
    """Return the mean greedy reward, or None if all are NaN. The error accounts for the random choice of problems."""
    known = greedy_P[~np.isnan(greedy_P)]
    if len(known) == 0:
        return None
    return RewardEstimate(float(known.mean()), float(known.std() / len(known) ** 0.5))


def compare_rewards(
    first: RewardSamples, second: RewardSamples, pass_threshold: float | None = None, seed: int = 0
) -> dict[str, Difference]:
    """Compare the rewards of two runs, with a paired bootstrap over the problems.

    Args:
        first ([`RewardSamples`]):
            Rewards of the first run.
        second ([`RewardSamples`]):
            Rewards of the second run for the same problems, in any order.
        pass_threshold (`float`, *optional*):
            Minimum reward for a sample to pass. `None` omits pass@k.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `dict[str, Difference]`: differences by measure. k is a power of two, and S is the smaller number of samples.

        - `"greedy reward"`, if a problem has greedy rewards in both runs
        - `"reward"`
        - `"best reward@k"` for 1 < k ≤ S
        - `"pass@k"` for k ≤ S, if there is a threshold

    Raises:
        ValueError: the runs differ in their problems, or no problem has rewards in both runs.
    """
    order = matching_order(first.problem_ids, second.problem_ids)
    greedy = None if second.greedy_P is None else second.greedy_P[order]
    both = first, RewardSamples(second.rewards_PS[order], first.problem_ids, greedy, second.temperatures)
    ks = powers_of_two(min(first.num_samples, second.num_samples))
    if np.isnan(best_moments(both[0], 1)[0] + best_moments(both[1], 1)[0]).all():
        raise ValueError("No problem has rewards in both runs, so the runs cannot be compared.")
    found: dict[str, Difference] = {}
    if first.greedy_P is not None and greedy is not None and not np.isnan(first.greedy_P + greedy).all():
        found["greedy reward"] = _reward_difference(first.greedy_P, greedy, seed)
    for k in ks:
        means = [best_moments(samples, k)[0] for samples in both]
        found["reward" if k == 1 else f"best reward@{k}"] = _reward_difference(means[0], means[1], seed)
    if pass_threshold is not None:
        have_passed = [passed(samples, pass_threshold) for samples in both]
        for k in ks:
            first_P1, second_P1 = (pass_of_problems(passed_PS, k)[:, None] for passed_PS in have_passed)
            (found[f"pass@{k}"],) = paired_bootstrap(first_P1, second_P1, seed)
    return found


def _reward_difference(first_P: NDArray[np.float64], second_P: NDArray[np.float64], seed: int) -> RewardDifference:
    """Compare the mean rewards of two runs over the problems that have rewards in both runs."""
    known = ~np.isnan(first_P) & ~np.isnan(second_P)
    (found,) = paired_bootstrap(first_P[known, None], second_P[known, None], seed)
    return RewardDifference(**found.to_dict())
