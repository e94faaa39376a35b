"""Rewards in the sense of the paper: +1 for a right answer, -1 for a wrong one and for no answer at all."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset, Value

CORRECT, INCORRECT, INVALID = "correct", "incorrect", "invalid"

# From the text of a response to its answer in a normal form, or None if it states none.
ExtractAnswer = Callable[[str], str | None]


def verdict(answer: str | None, truth: str) -> str:
    """`"correct"`, `"incorrect"`, or `"invalid"` where there is no answer (arXiv 2503.14286, Sec. 4.1)."""
    if answer is None:
        return INVALID
    return CORRECT if answer == truth else INCORRECT


def score_candidates(rows: Dataset, extract_answer: ExtractAnswer) -> Dataset:
    """Candidates with what their responses answer and are worth.

    Args:
        rows: columns `completion` (text) and `answer` (the right one, in normal form).
        extract_answer: see above.

    Returns:
        The rows with the columns `extracted` (the answer in normal form, None where there is none), `verdict`
        (`"correct"`, `"incorrect"`, `"invalid"`) and `reward` (+1 or -1).
    """
    answers = [extract_answer(text) for text in rows["completion"]]
    verdicts = [verdict(answer, truth) for answer, truth in zip(answers, rows["answer"], strict=True)]
    rewards = [1.0 if v == CORRECT else -1.0 for v in verdicts]
    # A shard in which nothing is valid must have the same type as the others.
    rows = rows.add_column("extracted", answers, feature=Value("string"))
    return rows.add_column("verdict", verdicts).add_column("reward", rewards)


def answer_reward(extract_answer: ExtractAnswer) -> Callable[..., list[float]]:
    """A reward function for TRL's trainers: +1 where the extracted answer equals the column `answer`, else -1."""

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [
            1.0 if verdict(extract_answer(text), truth) == CORRECT else -1.0
            for text, truth in zip(texts, answer, strict=True)
        ]

    reward.__name__ = "answer_reward"
    return reward
