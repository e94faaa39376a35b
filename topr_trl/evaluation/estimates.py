"""Estimate pass@k, maj@k and measures based on scores, with the paper's standard errors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan, sqrt
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.evaluation.answers import RIGHT_CODE, Samples, encode, samples_of
from topr_trl.evaluation.pass_and_maj_at_k import expected_best, expected_maj, expected_pass
from topr_trl.rewards import CORRECT, INCORRECT, INVALID

_DRAWS = 100  # number of draws in the paper


@dataclass(frozen=True)
class Estimate:
    """Mean over problems, with its standard error. The paper plots `value ± 2 standard_error`.

    pass@k, maj@k and other measures of samples have the paper's standard error, which accounts for the random choice
    of samples for fixed problems. Greedy accuracy has the binomial standard error, which accounts for the random choice
    of problems.

    Attributes:
        value (`float`):
            Mean over the problems, in [0, 1].
        standard_error (`float`):
            Standard error of the mean. NaN if it is undefined.
    """

    value: float
    standard_error: float

    UNIT, _DIGITS, _SIGN = 100, 1, "%"  # factor, decimals and sign of shown values

    def __str__(self) -> str:
        known = self.standard_error == self.standard_error
        margin = f" ± {2 * self.UNIT * self.standard_error:.{self._DIGITS}f}" if known else ""
        return f"{self.UNIT * self.value:.{self._DIGITS}f}{self._SIGN}{margin}"


@dataclass(frozen=True)
class RewardEstimate(Estimate):
    """Mean reward over problems, with its standard error. `print` shows both numbers in units of the reward."""

    UNIT, _DIGITS, _SIGN = 1, 3, ""


SomeEstimate = TypeVar("SomeEstimate", bound=Estimate)


@dataclass(frozen=True)
class Group:
    """Results for the problems of one subject or level.

    Attributes:
        num_problems (`int`):
            Number of problems.
        pass_at_1 ([`Estimate`]):
            pass@1.
        maj_at (`dict[int, Estimate]`):
            maj@k for the largest k of the evaluation. Empty if maj@k was not evaluated.
    """

    num_problems: int
    pass_at_1: Estimate
    maj_at: dict[int, Estimate]


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of S samples per problem, as returned by [`evaluate_rows`] and [`evaluate_samples`].

    The estimates by k are means over problems and over draws of k samples. They are exact over all draws, except for
    weighted self-consistency, which uses 100 draws.

    Attributes:
        pass_at (`dict[int, Estimate]`):
            pass@k by k: the probability that at least one of k samples is correct, or passes. Empty for rewards without
            `pass_threshold`.
        maj_at (`dict[int, Estimate]`):
            maj@k by k: the probability that the most frequent valid answer of k samples is correct.
        shares (`dict[str, float]`):
            Shares of `correct`, `incorrect` and `invalid` samples. For rewards, the shares of samples that are `passed`
            or `not passed` (with `pass_threshold`), or `without a reward`.
        cardinality (`list[int]`):
            Numbers of problems with 0, 1, ..., S correct or passed samples. Empty for rewards without `pass_threshold`.
        num_problems (`int`):
            Number of problems.
        num_samples (`int`):
            Number of samples per problem, S.
        weighted_sc_at (`dict[int, Estimate]`, *optional*, defaults to `{}`):
            Weighted self-consistency by k: the probability that the valid answer with the highest sum of scores is
            correct. Empty if this measure was not evaluated.
        best_at (`dict[int, Estimate]`, *optional*, defaults to `{}`):
            best@k by k: the probability that the valid sample with the highest score is correct. Empty if this measure
            was not evaluated.
        groups (`dict[str, dict[str, Group]]`, *optional*, defaults to `{}`):
            Results by subject and by level, if they are known: `{"subject": {name: group}, "level": {name: group}}`.
        greedy ([`Estimate`], *optional*):
            Share of problems whose greedy answer (temperature 0) is correct. `None` without greedy answers.
        temperatures (`list[float]`, *optional*, defaults to `[]`):
            Distinct temperatures of the samples, in ascending order. Empty if a sample's temperature is unknown.
        reward ([`RewardEstimate`], *optional*):
            Mean reward of the samples. `None` if rewards were not evaluated.
        best_reward_at (`dict[int, RewardEstimate]`, *optional*, defaults to `{}`):
            Mean of the highest reward of k samples, by k > 1. Empty if rewards were not evaluated.
        greedy_reward ([`RewardEstimate`], *optional*):
            Mean reward of the greedy completions (temperature 0). `None` if no greedy completion has a reward.
        pass_threshold (`float`, *optional*):
            Minimum reward for a sample to pass, if `pass_at` and `shares` are based on rewards.
    """

    pass_at: dict[int, Estimate]
    maj_at: dict[int, Estimate]
    shares: dict[str, float]
    cardinality: list[int]
    num_problems: int
    num_samples: int
    weighted_sc_at: dict[int, Estimate] = field(default_factory=dict)
    best_at: dict[int, Estimate] = field(default_factory=dict)
    groups: dict[str, dict[str, Group]] = field(default_factory=dict)
    greedy: Estimate | None = None
    temperatures: list[float] = field(default_factory=list)
    reward: RewardEstimate | None = None
    best_reward_at: dict[int, RewardEstimate] = field(default_factory=dict)
    greedy_reward: RewardEstimate | None = None
    pass_threshold: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as nested dictionaries, for JSON. An undefined standard error is None."""
        return _without_nan(asdict(self))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Evaluation":
        """Create an evaluation from the output of `to_dict`. Values of k may be text, because JSON keys are text."""
        found = dict(plain)
        for name in ("pass_at", "maj_at", "weighted_sc_at", "best_at"):
            found[name] = _curve(Estimate, plain.get(name, {}))
        found["best_reward_at"] = _curve(RewardEstimate, plain.get("best_reward_at", {}))
        for name, kind in (("greedy", Estimate), ("reward", RewardEstimate), ("greedy_reward", RewardEstimate)):
            found[name] = _estimate(kind, plain[name]) if plain.get(name) else None
        found["groups"] = {
            column: {
                name: Group(
                    group["num_problems"], _estimate(Estimate, group["pass_at_1"]), _curve(Estimate, group["maj_at"])
                )
                for name, group in members.items()
            }
            for column, members in plain.get("groups", {}).items()
        }  # fmt: skip
        return cls(**found)


def shared_ks(curves: Sequence[Mapping[int, Estimate]]) -> list[int]:
    """Return the values of k that all curves have."""
    return [k for k in curves[0] if all(k in other for other in curves)]


def _estimate(kind: type[SomeEstimate], plain: dict[str, Any]) -> SomeEstimate:
    error = plain["standard_error"]
    return kind(plain["value"], nan if error is None else error)


def _curve(kind: type[SomeEstimate], plain: dict[Any, dict[str, Any]]) -> dict[int, SomeEstimate]:
    return {int(k): _estimate(kind, each) for k, each in plain.items()}


def _without_nan(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _without_nan(value) for key, value in plain.items()}
    return None if isinstance(plain, float) and plain != plain else plain


def standard_error_of_draws(variance: float, k: int, num_samples: int) -> float:
    """Return `sqrt(k V / (S - k))` (arXiv 2503.14286, Sec. 4.1), or NaN for k = S, where only one draw exists.

    Args:
        variance (`float`): Variance V of the mean over the problems, for a draw of k samples.
        k (`int`): Number of samples of a draw.
        num_samples (`int`): Number S of samples per problem.
    """
    return sqrt(k * max(variance, 0.0) / (num_samples - k)) if k < num_samples else nan


def exact_estimate(expected_P: NDArray[np.float64], k: int, num_samples: int) -> Estimate:
    """Return the limit of the paper's estimate for infinitely many draws (arXiv 2503.14286, Sec. 4.1).

    `expected_P` holds the probability e_p that a draw of k samples solves problem p. Draws of different problems are
    independent, so their mean over the problems has the variance V = Σ e_p (1 - e_p) / P².
    """
    variance = float((expected_P * (1 - expected_P)).sum()) / len(expected_P) ** 2
    return Estimate(float(expected_P.mean()), standard_error_of_draws(variance, k, num_samples))


def greedy_estimate(greedy_P: NDArray[np.bool_]) -> Estimate:
    """Return the share of correct greedy answers, with the binomial standard error sqrt(p (1 - p) / P).

    The paper's standard error measures differences between samples, but a problem has only one greedy answer.
    """
    share = float(greedy_P.mean())
    return Estimate(share, sqrt(share * (1 - share) / len(greedy_P)))


def weighted_sc_estimate(samples: Samples, k: int, seed: int = 0, draws: int = _DRAWS) -> Estimate:
    """Estimate weighted self-consistency with the paper's procedure (arXiv 2503.14286, Sec. 4.1).

    In each draw, k of the S samples of each problem are drawn without replacement. The draw solves a problem if the
    valid answer with the highest sum of scores is correct. The value is the mean over draws and problems. The standard
    error uses the variance of the draws' means.

    Args:
        samples ([`Samples`]):
            Samples with scores.
        k (`int`):
            Number of samples to draw, in [1, S]. For k = 1, the exact pass@1 is returned.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.
        draws (`int`, *optional*, defaults to `100`):
            Number of draws.

    Raises:
        ValueError: k is outside [1, S], or k > 1 and the samples have no scores.
    """
    samples.check_k(k)
    if k == 1:  # A single sample always wins the vote, so the value is pass@1.
        return exact_estimate(expected_pass(samples, 1), 1, samples.num_samples)
    rng = np.random.default_rng(seed)
    order_PS = np.tile(np.arange(samples.num_samples), (samples.num_problems, 1))
    means = [weighted_sc_solved(samples, rng.permuted(order_PS, axis=1)[:, :k]).mean() for _ in range(draws)]
    return Estimate(float(np.mean(means)), standard_error_of_draws(float(np.var(means)), k, samples.num_samples))


def weighted_sc_solved(samples: Samples, drawn_PK: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each problem's valid answer with the highest sum of scores is correct, shape (P,).

    `drawn_PK` holds the positions of the drawn samples, in the order of drawing. In a tie, the first drawn answer wins.
    """
    scores_PS = _scores_of(samples)
    codes_PK = np.take_along_axis(samples.codes_PS, drawn_PK, axis=1)
    # Adding the same scores in a different order can change the last digits of their sum. To detect ties, divide the
    # scores by the problem's largest absolute score, and round the sums to nine decimals.
    largest_P1 = np.abs(scores_PS).max(axis=1, keepdims=True)
    weights_PK = np.take_along_axis(scores_PS, drawn_PK, axis=1) / np.where(largest_P1 > 0, largest_P1, 1.0)
    width = int(codes_PK.max()) + 2  # number of codes: code c has index c + 1, so invalid samples have index 0
    cells_PK = np.arange(len(codes_PK))[:, None] * width + codes_PK + 1
    sums = np.bincount(cells_PK.ravel(), weights_PK.ravel(), minlength=len(codes_PK) * width)
    votes_PK = np.where(codes_PK >= 0, np.round(sums[cells_PK], 9), -np.inf)
    winner_P = votes_PK.argmax(axis=1)  # `argmax` returns the first maximum.
    return codes_PK[np.arange(len(codes_PK)), winner_P] == RIGHT_CODE


def _scores_of(samples: Samples) -> NDArray[np.float64]:
    if samples.scores_PS is None:
        raise ValueError("Weighted self-consistency and best-of-k need a score for each sample; there are no scores.")
    return samples.scores_PS


class Measures(TypedDict, total=False):
    """Arguments that [`evaluate_rows`], [`evaluate_samples`] and [`evaluate`] share, by keyword.

    Attributes:
        pass_ks (`Sequence[int]`, *optional*, defaults to `(1,)`):
            Values of k for pass@k, each in [1, S].
        maj_ks (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for maj@k, each in [1, S].
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws for weighted self-consistency.
        weighted_sc_ks (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for weighted self-consistency, each in [1, S]. Needs scores.
        best_ks (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for best@k, each in [1, S]. Needs scores.
    """

    pass_ks: Sequence[int]
    maj_ks: Sequence[int]
    seed: int
    weighted_sc_ks: Sequence[int]
    best_ks: Sequence[int]


def evaluate(
    samples: Samples,
    pass_ks: Sequence[int] = (1,),
    maj_ks: Sequence[int] = (),
    seed: int = 0,
    weighted_sc_ks: Sequence[int] = (),
    best_ks: Sequence[int] = (),
) -> Evaluation:
    """Evaluate S samples for each of P problems, and the greedy answers if there are any. See [`Measures`].

    pass@k, maj@k and best@k are exact means over all draws of k of the S samples. Weighted self-consistency is
    estimated from 100 draws, as in the paper, because its exact value is expensive for k > 1.

    Raises:
        ValueError: a k is outside [1, S], or a measure needs scores and there are no scores.
    """
    for k in (*pass_ks, *maj_ks, *weighted_sc_ks, *best_ks):
        samples.check_k(k)
    if weighted_sc_ks or best_ks:
        _scores_of(samples)
    size, correct_PS = samples.num_samples, samples.codes_PS == RIGHT_CODE
    voted = {k: expected_maj(samples, k) for k in maj_ks}
    return Evaluation(
        pass_at={k: exact_estimate(expected_pass(samples, k), k, size) for k in pass_ks},
        maj_at={k: exact_estimate(expected_P, k, size) for k, expected_P in voted.items()},
        shares={
            CORRECT: float(correct_PS.mean()),
            INCORRECT: float((samples.codes_PS > RIGHT_CODE).mean()),
            INVALID: float((samples.codes_PS < RIGHT_CODE).mean()),
        },
        cardinality=np.bincount(correct_PS.sum(axis=1), minlength=size + 1).tolist(),
        num_problems=samples.num_problems,
        num_samples=size,
        weighted_sc_at={k: weighted_sc_estimate(samples, k, seed) for k in weighted_sc_ks},
        best_at={k: exact_estimate(expected_best(samples, k), k, size) for k in best_ks},
        groups=_by_group(samples, {k: voted[k] for k in sorted(voted)[-1:]}),
        greedy=None if samples.greedy_P is None else greedy_estimate(samples.greedy_P),
        temperatures=list(samples.temperatures),
    )


def _by_group(samples: Samples, voted: Mapping[int, NDArray[np.float64]]) -> dict[str, dict[str, Group]]:
    passed, size = expected_pass(samples, 1), samples.num_samples

    def group(members_P: NDArray[np.bool_]) -> Group:
        maj = {k: exact_estimate(expected_P[members_P], k, size) for k, expected_P in voted.items()}
        return Group(int(members_P.sum()), exact_estimate(passed[members_P], 1, size), maj)

    return {
        column: {name: group(np.array(names) == name) for name in sorted(set(names))}
        for column, names in samples.groups.items()
    }


def evaluate_in_full(samples: Samples, seed: int = 0) -> Evaluation:
    """Evaluate all measures that the samples allow, at powers of two.

    pass@k is evaluated for k ≤ S. The other measures are evaluated for 1 < k < S, because they equal pass@1 at k = 1
    and have no standard error at k = S.
    """
    pass_ks = powers_of_two(samples.num_samples)
    ks = [k for k in pass_ks if 1 < k < samples.num_samples]
    scored = ks if samples.scores_PS is not None else []
    return evaluate(samples, pass_ks, ks, seed, weighted_sc_ks=scored, best_ks=scored)


def powers_of_two(limit: int) -> list[int]:
    """Return the powers of two from 1 to `limit`."""
    return [2**i for i in range(limit.bit_length())]


def evaluate_samples(
    answers: Sequence[Sequence[str | None]],
    truths: Sequence[str],
    *,
    scores: Sequence[Sequence[float]] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    **measures: Unpack[Measures],
) -> Evaluation:
    """Evaluate lists of answers: S answers for each of P problems.

    Example:

    ```python
    >>> from topr_trl import evaluate_samples

    >>> answers = [["7", "9", "7", "7"], ["8", None, "3", "3"]]  # None is an invalid answer
    >>> evaluation = evaluate_samples(answers, truths=["7", "8"], pass_ks=(1, 2))
    >>> print(evaluation.pass_at[1])
    50.0% ± 35.4
    >>> evaluation.shares
    {'correct': 0.5, 'incorrect': 0.375, 'invalid': 0.125}
    ```

    Args:
        answers (`Sequence[Sequence[str | None]]`):
            S answers for each of P problems. Equal answers to a problem must be the same text. `None` is an invalid
            answer.
        truths (`Sequence[str]`):
            True answers to the P problems. A correct answer must be the same text as the true answer.
        scores (`Sequence[Sequence[float]]`, *optional*):
            Finite score of each answer, for instance from a verifier.
        groups (`Mapping[str, Sequence[str]]`, *optional*):
            Subject and level of each problem: `{"subject": P names, "level": P names}`.
        measures ([`Measures`], *optional*):
            Measures to evaluate, and the seed: `pass_ks`, `maj_ks`, `seed`, `weighted_sc_ks` and `best_ks`.

    Returns:
        [`Evaluation`]: the estimates.

    Raises:
        ValueError: the lengths of `answers`, `truths`, `scores` or a group differ, there is no problem or no sample,
            problems differ in their number of samples, a score is not finite, a k is outside [1, S], or a measure needs
            scores and there are no scores.
    """
    return evaluate(encode(answers, truths, scores, groups=groups), **measures)


def evaluate_rows(rows: Dataset, **measures: Unpack[Measures]) -> Evaluation:
    """Evaluate rows from [`score_completions`].

    pass@k, maj@k and best@k are exact means over all draws of k of a problem's S samples. Their standard errors are the
    paper's (arXiv 2503.14286, Sec. 4.1).

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import evaluate_rows

    >>> rows = {"problem_id": [0, 0, 1, 1], "answer": ["7", "7", "8", "8"], "extracted": ["7", "9", None, "8"]}
    >>> evaluation = evaluate_rows(Dataset.from_dict(rows), pass_ks=(1, 2))
    >>> evaluation.pass_at[1].value, evaluation.pass_at[2].value
    (0.5, 1.0)
    ```

    Args:
        rows ([`~datasets.Dataset`]):
            Rows with the columns `problem_id` or `prompt`, `answer` and `extracted`, and with the same number S of
            samples for each problem. See [`samples_of`] for all columns.
        measures ([`Measures`], *optional*):
            Measures to evaluate, and the seed: `pass_ks`, `maj_ks`, `seed`, `weighted_sc_ks` and `best_ks`.

    Returns:
        [`Evaluation`]: the estimates.

    Raises:
        ValueError: [`samples_of`] rejects the rows, a k is outside [1, S], or a measure needs scores and there are no
            scores.
    """
    return evaluate(samples_of(rows), **measures)
