"""What the candidates of a model say about it: pass@k, maj@k, valid answers, with the paper's intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, nan, sqrt
from typing import Any

import numpy as np
from datasets import Dataset

from topr_trl.rewards import CORRECT, INCORRECT, INVALID

_DRAWS = 100  # the paper's


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its standard error; the paper plots `value ± 2 standard_error`."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        margin = f" ± {200 * self.standard_error:.1f}" if self.standard_error == self.standard_error else ""
        return f"{100 * self.value:.1f} %{margin}"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k of the S samples, drawn without replacement, is correct.

    `1 - C(S - c, k) / C(S, k)`, the unbiased estimator (arXiv 2107.03374, Eq. 1).

    Raises:
        ValueError: k is not between 1 and S.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples, {num_samples}; it is {k}.")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of S samples a problem.

    Attributes:
        pass_at: `{k: estimate}`; the value is exact over all draws, the standard error the paper's.
        maj_at: `{k: estimate}`, by the paper's resampling.
        shares: share of `correct`, `incorrect` and `invalid` samples.
        cardinality: how many problems have 0, 1, ..., S correct samples.
        num_problems, num_samples: problems, and samples of each.
    """

    pass_at: dict[int, Estimate]
    maj_at: dict[int, Estimate]
    shares: dict[str, float]
    cardinality: list[int]
    num_problems: int
    num_samples: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; a standard error that does not exist is None."""
        plain = asdict(self)
        for estimate in (*plain["pass_at"].values(), *plain["maj_at"].values()):
            if estimate["standard_error"] != estimate["standard_error"]:
                estimate["standard_error"] = None
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Evaluation":
        """What `to_dict` gave, perhaps by way of JSON, whose keys are text."""

        def estimates(values: dict[Any, dict[str, float | None]]) -> dict[int, Estimate]:
            return {
                int(k): Estimate(float(e["value"] or 0), nan if (s := e["standard_error"]) is None else s)
                for k, e in values.items()
            }

        return cls(**{**plain, "pass_at": estimates(plain["pass_at"]), "maj_at": estimates(plain["maj_at"])})


def evaluate_samples(
    answers: Sequence[Sequence[str | None]],
    truths: Sequence[str],
    pass_ks: Sequence[int] = (1,),
    maj_ks: Sequence[int] = (),
    seed: int = 0,
) -> Evaluation:
    """Evaluate S samples for each of P problems by the paper's procedure (arXiv 2503.14286, Sec. 4.1).

    K of the S answers of each problem are drawn without replacement, 100 times; the estimate is the mean over the
    draws of the mean over the problems. Its standard error is `sqrt(K V / (S - K))` with V the variance over the
    draws; it is NaN for K = S, where every draw is the same. pass@k's value is computed exactly instead.

    Args:
        answers: P lists of S answers in normal form, None where a sample is invalid.
        truths: P right answers in the same form.
        pass_ks, maj_ks: the k of pass@k and maj@k, each in [1, S].
        seed: of the draws.

    Raises:
        ValueError: there is no problem, problems differ in their number of samples, or a k is outside [1, S].
    """
    num_problems, num_samples = len(answers), len(answers[0]) if answers else 0
    if num_problems == 0 or num_problems != len(truths):
        raise ValueError(f"There must be as many problems as truths, and at least one: {num_problems}, {len(truths)}.")
    if any(len(row) != num_samples for row in answers):
        raise ValueError(f"Every problem needs the same number of samples; found {sorted({len(r) for r in answers})}.")
    for k in (*pass_ks, *maj_ks):
        if not 1 <= k <= num_samples:
            raise ValueError(f"k must be between 1 and the number of samples, {num_samples}; it is {k}.")

    # Answers as small integers: -1 invalid, 0 right, other numbers for other answers.
    codes = np.empty((num_problems, num_samples), dtype=np.int64)
    for row, (given, truth) in enumerate(zip(answers, truths, strict=True)):
        known: dict[str, int] = {truth: 0}
        codes[row] = [-1 if a is None else known.setdefault(a, len(known)) for a in given]
    correct = codes == 0
    rng = np.random.default_rng(seed)

    def resample(k: int, score: object) -> Estimate:
        means = []
        for _ in range(_DRAWS):
            columns = rng.permuted(np.tile(np.arange(num_samples), (num_problems, 1)), axis=1)[:, :k]
            means.append(score(np.take_along_axis(codes, columns, axis=1)).mean())  # type: ignore[operator]
        spare = num_samples - k
        error = sqrt(k * float(np.var(means)) / spare) if spare else float("nan")
        return Estimate(float(np.mean(means)), error)

    pass_at = {}
    for k in pass_ks:
        exact = np.mean([pass_at_k(num_samples, int(c), k) for c in correct.sum(axis=1)])
        pass_at[k] = Estimate(float(exact), resample(k, lambda drawn: (drawn == 0).any(axis=1)).standard_error)
    return Evaluation(
        pass_at=pass_at,
        maj_at={k: resample(k, _majority_is_right) for k in maj_ks},
        shares={
            CORRECT: float(correct.mean()),
            INCORRECT: float((codes > 0).mean()),
            INVALID: float((codes < 0).mean()),
        },
        cardinality=np.bincount(correct.sum(axis=1), minlength=num_samples + 1).tolist(),
        num_problems=num_problems,
        num_samples=num_samples,
    )


def evaluate_candidates(
    rows: Dataset, pass_ks: Sequence[int] = (1,), maj_ks: Sequence[int] = (), seed: int = 0
) -> Evaluation:
    """Evaluate scored candidates, see `evaluate_samples`.

    Args:
        rows: columns `problem_id`, `extracted` and `answer` (`topr_trl.rewards.score_candidates`); as many rows of each
            problem.
        pass_ks, maj_ks: the k of pass@k and maj@k, each in [1, samples of a problem].
        seed: of the draws.

    Raises:
        ValueError: see `evaluate_samples`.
    """
    answers: dict[Any, list[str | None]] = {}
    truths: dict[Any, str] = {}
    for problem, extracted, truth in zip(rows["problem_id"], rows["extracted"], rows["answer"], strict=True):
        answers.setdefault(problem, []).append(extracted)
        truths[problem] = truth
    return evaluate_samples(list(answers.values()), list(truths.values()), pass_ks, maj_ks, seed)


def _majority_is_right(drawn: np.ndarray) -> np.ndarray:
    """(P,) whether the most frequent valid answer, the first seen of equals, is the right one (code 0)."""
    valid = drawn >= 0
    # counts[p, j]: how often the answer of sample j occurs among the drawn of problem p.
    counts = (drawn[:, :, None] == drawn[:, None, :]).sum(axis=2) * valid
    winner = counts.argmax(axis=1)  # argmax takes the first of equals
    rows = np.arange(len(drawn))
    return (drawn[rows, winner] == 0) & valid[rows, winner]
