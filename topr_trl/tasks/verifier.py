"""Generative verifier (arXiv 2503.14286, Sec. 4.4): a model that reasons about a solution and rates it right or wrong.

A verification is a completion like any other: its prompt holds a solution, its answer is yes or no, its reward +1 for
the right answer, else -1. So problems made here go through the same stages: `sample_completions`,
`score_completions(rows, judge)`, `OfflineTOPRTrainer`, `evaluate_rows` (pass@1 is the verifier's accuracy).
Another model may have written the solutions.
"""

import re
from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.data.rows import need_columns
from topr_trl.evaluation.answers import verdict_column
from topr_trl.rewards import CORRECT, Judgement, text_of, verdict

YES, NO = "yes", "no"
TEMPLATE = (
    "Question: {question}\nAnswer:{solution}\n\nIs the answer right? Check each step, then end with "
    '"Verdict: yes" or "Verdict: no".\nCheck:'
)
# End a verification besides the stop token: a base model goes on with the next question.
STOP_STRINGS = ("\nQuestion:",)
_PLACE = re.compile(r"\{question\}|\{solution\}")
# "Verdict: no", "**Verdict**: **yes**", "Verdict: \\boxed{no}"; not "Verdict: no errors".
_VERDICT = re.compile(
    r"verdict\W{1,16}(?:(?:boxed|text(?:bf)?|mathbf)\W{1,3}){0,2}(yes|no)\b(?![ \t]+[a-z])", re.IGNORECASE
)


def extract_verdict(text: str) -> str | None:
    """`"yes"` or `"no"` after the last "Verdict:"; None where there is none (invalid)."""
    found = _VERDICT.findall(text)
    return found[-1].lower() if found else None


def judge(texts: Sequence[str], truths: Sequence[str]) -> list[Judgement]:
    """Verdicts on verifications, for `score_completions` and `answer_reward`."""
    answers = [extract_verdict(text) for text in texts]
    return [(verdict(answer, truth), answer) for answer, truth in zip(answers, truths, strict=True)]


def build_prompt(question: str, solution: str, template: str = TEMPLATE) -> str:
    """The prompt of a verification."""
    # Not str.format, and both at once: questions and solutions may hold braces.
    texts = {"{question}": question.strip(), "{solution}": solution}
    return _PLACE.sub(lambda place: texts[place.group()], template)


def verification_problems(
    solutions: Dataset, template: str = TEMPLATE, balanced: bool = False, seed: int = 0
) -> Dataset:
    """Each solution as a problem for a verifier.

    Args:
        solutions: scored rows: columns `question`, `completion` and `verdict` (`score_completions`).
        template: text with the placeholders `{question}` and `{solution}`.
        balanced: drop solutions at random, by `seed`, until as many are right as are wrong. The paper keeps all.

    Returns:
        Columns `problem_id` (the row of the solution in `solutions`), `prompt` and `answer` (`"yes"`, `"no"`).

    Raises:
        ValueError: a column is missing or does not hold text, the template lacks a placeholder, or no solution is left.
    """
    need_columns(solutions.column_names, ("question", "completion", "verdict"), "Solutions to verify")
    if not all(place in template for place in ("{question}", "{solution}")):
        raise ValueError(f"The template needs the placeholders {{question}} and {{solution}}; found {template!r}.")
    right = np.array(verdict_column(solutions)) == CORRECT
    chosen = _balance(right, seed) if balanced else np.arange(len(right))
    if len(chosen) == 0:
        raise ValueError(f"There is nothing to verify: {right.sum()} of {len(right)} solutions are right.")

    def problem(row: dict[str, str], index: int) -> dict[str, object]:
        return {
            "problem_id": int(chosen[index]),
            "prompt": build_prompt(row["question"], text_of(row["completion"], int(chosen[index])), template),
            "answer": YES if row["verdict"] == CORRECT else NO,
        }

    return solutions.select(chosen).map(
        problem, with_indices=True, remove_columns=solutions.column_names, desc="Building verifications"
    )


def _balance(right: NDArray[np.bool_], seed: int) -> NDArray[np.int64]:
    rng, size = np.random.default_rng(seed), min(right.sum(), (~right).sum())
    return np.sort(np.concatenate([rng.choice(np.flatnonzero(kind), size, replace=False) for kind in (right, ~right)]))


def solution_scores(verifications: Dataset, num_solutions: int) -> list[float]:
    """The verifier's rating of each solution: the share of its verifications (invalid ones included) that say yes.

    Args:
        verifications: scored rows of `verification_problems`: columns `problem_id` and `extracted`.
        num_solutions: rows of the solutions that they verify.

    Returns:
        One score in [0, 1] per solution, for the column `score` of weighted self-consistency and best-of-n.

    Raises:
        ValueError: a solution has no verification.
    """
    places = np.array(verifications["problem_id"][:], dtype=np.int64)
    if len(places) and not 0 <= places.min() <= places.max() < num_solutions:
        raise ValueError(f"Verifications are of solutions {places.min()} to {places.max()}; there are {num_solutions}.")
    says_yes = np.array([verdict == YES for verdict in verifications["extracted"]], dtype=float)
    count = np.bincount(places, minlength=num_solutions)
    yes = np.bincount(places, says_yes, minlength=num_solutions)
    if (count == 0).any():
        raise ValueError(f"{int((count == 0).sum())} of {num_solutions} solutions have no verification.")
    return [float(share) for share in yes / count]
