"""Count kinds of problems in stored rows, with advice for each kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topr_trl.baseline import FloatArray, as_rewards, group_numbers

# Kinds of problems, with advice for each kind. For problems without a right answer, the best of the package's methods
# did not depend on whether wrong answers agree (docs/results.md).
KINDS = {
    "always right": "nothing to learn",
    "most common answer right": "a lower temperature, or a vote",
    "some right answers": "repeat right answers: curation='repeated_positives'",
    "no right answer": "several iterations with curation='repeated_positives', or more samples",
    "one completion": "several samples of each problem: topr sample --num_generations 8",
}
_UNSOLVED = "no right answer"


@dataclass(frozen=True)
class Diagnosis:
    """Result of [`diagnose`]. `print` shows a table.

    Attributes:
        counts (`dict[str, int]`):
            Number of problems of each kind in `KINDS`.
        agreement (`float`):
            Mean agreement of the completions of problems without a right completion. The *agreement* of a completion is
            the share of the problem's other completions with the same answer. Problems with one completion are left
            out. NaN if no problem is left.
        are_texts (`bool`, *optional*, defaults to `False`):
            Whether whole texts were compared, because answers are not known.
    """

    counts: dict[str, int]
    agreement: float
    are_texts: bool = False

    @property
    def advice(self) -> str:
        """Advice for problems with several completions and none right. Empty without such problems."""
        if not (count := self.counts[_UNSOLVED]):
            return ""
        agree = "" if self.are_texts else f" (wrong answers agree in {self.agreement:.0%})"
        return (
            f"{count:,} of {sum(self.counts.values()):,} problems: no right answer among several{agree}. What helps: "
            f"{KINDS[_UNSOLVED]}."
        )

    def __str__(self) -> str:
        problems, width = sum(self.counts.values()), max(map(len, KINDS))
        found = {kind: count for kind, count in self.counts.items() if count}
        lines = [f"{kind:<{width}}  {count / problems:>6.1%}  {KINDS[kind]}" for kind, count in found.items()]
        if self.counts[_UNSOLVED]:
            what = "texts" if self.are_texts else "wrong answers"
            lines.append(f"Problems without a right answer: {what} agree in {self.agreement:.0%}.")
        if self.are_texts:
            lines.append("Whole texts were compared, because answers are not known. Different texts can agree.")
        return "\n".join([f"{problems:,} problem{'s' * (problems != 1)}:", *lines])


def answer_keys(*columns: Sequence[object]) -> list[str]:
    """Return the answer of each completion as text: the first of its values that is not empty, or "" if all are empty.

    Args:
        *columns (`Sequence`):
            Columns with one value per completion: extracted answers, then the completions. None or "" means that a
            completion has no extracted answer.
    """
    return [next((str(text) for text in texts if text not in (None, "")), "") for texts in zip(*columns, strict=True)]


def agreements(problem_N: NDArray[np.int64], answers: Sequence[object]) -> FloatArray:
    """Return for each completion the share of its problem's other completions that have the same answer.

    Args:
        problem_N (`np.ndarray`):
            Number of each completion's problem, from 0 to P - 1, shape (N,).
        answers (`Sequence[object]`):
            Answer of each completion, or its text if answers are not known, length N. Equal values count as the same
            answer.

    Returns:
        `np.ndarray`: shape (N,), in [0, 1]. NaN if the problem has one completion.
    """
    size_P = np.bincount(problem_N)
    keys = list(zip(problem_N.tolist(), answers, strict=True))
    same = Counter(keys)
    same_N, others_N = np.array([same[key] - 1 for key in keys]), size_P[problem_N] - 1
    return np.divide(same_N, others_N, out=np.full(len(keys), np.nan), where=others_N > 0)


def kinds_of(right_N: NDArray[np.bool_], problem_N: NDArray[np.int64], agreement_N: FloatArray) -> list[str]:
    """Return the kind of each problem, one of `KINDS`.

    Args:
        right_N (`np.ndarray`):
            Whether each completion is right, shape (N,).
        problem_N (`np.ndarray`):
            Number of each completion's problem, from 0 to P - 1, shape (N,).
        agreement_N (`np.ndarray`):
            Agreement of each completion, see [`agreements`], shape (N,).

    Returns:
        `list[str]`: kinds of the P problems.
    """
    size_P = np.bincount(problem_N)
    right_P = np.bincount(problem_N, right_N)
    # The most common answer is right if the largest agreement of a right answer is above that of each wrong answer.
    # Texts of right answers can differ, so the most common answer also counts as right if most completions are right.
    most_P = np.full((2, len(size_P)), -1.0)
    np.fmax.at(most_P, (right_N.astype(int), problem_N), agreement_N)
    is_common_P = (most_P[1] > most_P[0]) | (2 * right_P > size_P)
    kind_P = np.select([size_P == 1, right_P == size_P, is_common_P, right_P > 0], [4, 0, 1, 2], 3)
    return [list(KINDS)[number] for number in kind_P.tolist()]


def diagnose(
    rewards: ArrayLike, problem_ids: ArrayLike, answers: Sequence[object], are_texts: bool = False
) -> Diagnosis:
    """Count the problems of each kind in `KINDS`, before any training.

    Rows without a reward (NaN) are left out. Completions with the same answer rarely have the same text, so pass
    extracted answers if they are known.

    Example:

    ```python
    >>> from topr_trl import diagnose

    >>> print(diagnose([1, 1, 0, 0, 0, 0], ["a", "a", "b", "b", "c", "c"], ["7", "7", "3", "3", "4", "5"]))
    3 problems:
    always right               33.3%  nothing to learn
    no right answer            66.7%  several iterations with curation='repeated_positives', or more samples
    Problems without a right answer: wrong answers agree in 50%.
    ```

    Args:
        rewards (`ArrayLike`):
            Rewards with two values, or booleans, shape (N,). The larger value means that the completion is right.
        problem_ids (`ArrayLike`):
            Problem of each completion, shape (N,).
        answers (`Sequence[object]`):
            Answer of each completion, or its text if answers are not known, length N. Equal values count as the same
            answer. None and NaN mean that a completion has no answer, and such completions never agree.
        are_texts (`bool`, *optional*, defaults to `False`):
            Whether `answers` are whole texts. If so, the table says it.

    Returns:
        [`Diagnosis`]: number of problems of each kind, and agreement.

    Raises:
        ValueError: rewards do not have two values, rewards or `problem_ids` are malformed, or the arguments have
            different lengths.
    """
    given = np.asarray(rewards)
    rewards_N = as_rewards(given.astype(float) if given.dtype == bool else given)
    problem_N = group_numbers("problem_ids", problem_ids, len(rewards_N))
    if len(answers) != len(rewards_N):
        raise ValueError(f"answers must have one answer for each of {len(rewards_N)} rewards, not {len(answers)}.")
    known = ~np.isnan(rewards_N)
    values = np.unique(rewards_N[known])
    if len(values) != 2:
        raise ValueError(f"A diagnosis needs rewards with two values, right and wrong; these have {len(values):,}.")
    right_N, problem_N = rewards_N[known] == values[1], np.unique(problem_N[known], return_inverse=True)[1]
    # A completion without an answer gets its own number as key. NaN differs from itself.
    keys = [n if answer is None or answer != answer else str(answer) for n, answer in enumerate(answers)]
    agreement_N = agreements(problem_N, [keys[n] for n in np.flatnonzero(known).tolist()])
    kinds = Counter(kinds_of(right_N, problem_N, agreement_N))
    right_P = np.bincount(problem_N, right_N)
    unsolved_N = (right_P == 0)[problem_N] & ~np.isnan(agreement_N)
    return Diagnosis(
        {kind: kinds[kind] for kind in KINDS},
        float(agreement_N[unsolved_N].mean()) if unsolved_N.any() else float("nan"),
        are_texts,
    )
