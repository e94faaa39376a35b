"""Define the task of a generative verifier (arXiv 2503.14286, Sec. 4.4), which reasons about a solution and judges it.

A verification is a completion of a prompt that contains a solution. Its answer is yes or no. The reward is +1 for the
correct answer and -1 otherwise. Therefore, verification problems go through the usual stages: `sample_completions`,
`score_completions(rows, judge)`, `OfflineTOPRTrainer` and `evaluate_rows`. pass@1 is the accuracy of the verifier. The
solutions can come from another model.
"""

import re
from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.data.rows import checked_column, need_columns
from topr_trl.evaluation.answers import verdict_column
from topr_trl.rewards import CORRECT, Judgement, text_of, verdict

YES, NO = "yes", "no"
TEMPLATE = (
    "Question: {question}\nAnswer:{solution}\n\nIs the answer right? Check each step, then end with "
    '"Verdict: yes" or "Verdict: no".\nCheck:'
)
# Texts that end a verification. Without them, a base model continues with another question.
STOP_STRINGS = ("\nQuestion:",)
_PLACE = re.compile(r"\{question\}|\{solution\}")
# The pattern matches "Verdict: no", "**Verdict**: **yes**" and "Verdict: \\boxed{no}", but not "Verdict: no errors".
_VERDICT = re.compile(
    r"verdict\W{1,16}(?:(?:boxed|text(?:bf)?|mathbf)\W{1,3}){0,2}(yes|no)\b(?![ \t]+[a-z])", re.IGNORECASE
)


def extract_verdict(text: str) -> str | None:
    """Return the last `"yes"` or `"no"` that follows "Verdict:". Return None if a verification has no verdict."""
    found = _VERDICT.findall(text)
    return found[-1].lower() if found else None


def judge(texts: Sequence[str], truths: Sequence[str]) -> list[Judgement]:
    """Return a verdict on each verification, and its answer, for `score_completions` and `answer_reward`.

    Args:
        texts (`Sequence[str]`): Verifications.
        truths (`Sequence[str]`): Correct answers, `"yes"` or `"no"`.
    """
    answers = [extract_verdict(text) for text in texts]
    return [(verdict(answer, truth), answer) for answer, truth in zip(answers, truths, strict=True)]


def build_prompt(question: str, solution: str, template: str = TEMPLATE) -> str:
    """Return the prompt of a verification.

    Args:
        question (`str`): Question.
        solution (`str`): Solution to verify.
        template (`str`, *optional*, defaults to `TEMPLATE`): Text with the placeholders `{question}` and `{solution}`.
    """
    # A template can contain other braces, such as \boxed{yes}, so `str.format` could raise. Replacing both placeholders
    # in one pass leaves `{solution}` in a question unchanged.
    texts = {"{question}": question.strip(), "{solution}": solution}
    return _PLACE.sub(lambda place: texts[place.group()], template)


def verification_problems(
    solutions: Dataset, template: str = TEMPLATE, balanced: bool = False, seed: int = 0
) -> Dataset:
    """Convert solutions into problems for a verifier.

    Args:
        solutions ([`~datasets.Dataset`]):
            Rows from `score_completions`, with the columns `question`, `completion` and `verdict`.
        template (`str`, *optional*, defaults to `TEMPLATE`):
            Text with the placeholders `{question}` and `{solution}`.
        balanced (`bool`, *optional*, defaults to `False`):
            Whether to drop random solutions until half of the remaining solutions are correct. The paper keeps all
            solutions.
        seed (`int`, *optional*, defaults to `0`):
            Seed for dropping solutions.

    Returns:
        [`~datasets.Dataset`]: columns `problem_id` (row number in `solutions`), `prompt` and `answer` (`"yes"` or
        `"no"`).

    Raises:
        ValueError: a column is missing or malformed, the template lacks a placeholder, or no solution is left.
    """
    need_columns(solutions.column_names, ("question", "completion", "verdict"), "Solutions to verify")
    if not all(place in template for place in ("{question}", "{solution}")):
        raise ValueError(f"The template needs the placeholders {{question}} and {{solution}}; found {template!r}.")
    right = np.array(verdict_column(solutions)) == CORRECT
    chosen = _balance(right, seed) if balanced else np.arange(len(right))
    if len(chosen) == 0:
        raise ValueError(
            f"There is nothing to verify: {right.sum()} of {len(right)} solutions are correct. Add solutions, or set "
            "balanced=False."
        )

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
    """Return the score of each solution: the share of its verifications that say yes.

    Invalid verifications count as no.

    Args:
        verifications ([`~datasets.Dataset`]):
            Scored verifications of the problems from `verification_problems`, with the columns `problem_id` and
            `extracted`.
        num_solutions (`int`):
            Number of rows in `solutions`, the argument of `verification_problems`.

    Returns:
        `list[float]`: one score in [0, 1] per solution. Use these scores as the column `score` of the solutions,
        for weighted self-consistency and best@k.

    Raises:
        ValueError: a solution has no verification, or a `problem_id` does not match a solution.
    """
    numbers = checked_column(
        verifications, "problem_id", lambda value: isinstance(value, int | float) and float(value).is_integer(),
        "row numbers of solutions",
    )  # fmt: skip
    places = np.array(numbers, dtype=np.int64)
    if len(places) and not 0 <= places.min() <= places.max() < num_solutions:
        raise ValueError(
            f"The verifications name solutions {places.min()} to {places.max()}; num_solutions is {num_solutions}. Set "
            "num_solutions to the number of solutions."
        )
    says_yes = np.array([verdict == YES for verdict in verifications["extracted"]], dtype=float)
    count = np.bincount(places, minlength=num_solutions)
    yes = np.bincount(places, says_yes, minlength=num_solutions)
    if (count == 0).any():
        raise ValueError(
            f"{int((count == 0).sum())} of {num_solutions} solutions have no verification. Verify each solution."
        )
    return [float(share) for share in yes / count]
