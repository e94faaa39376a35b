"""Rewards in the sense of the paper: +1 for a right answer, -1 for a wrong one and for no answer at all."""

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, Value
from tqdm.auto import tqdm

CORRECT, INCORRECT, INVALID = "correct", "incorrect", "invalid"

# A verdict, and the answer in a form that equal answers share: the truth's own where it is right, None where invalid.
Judgement = tuple[str, str | None]

# From the texts of responses and the right answers to judgements, in their order.
Judge = Callable[[Sequence[str], Sequence[str]], list[Judgement]]

_AT_ONCE = 4_096  # rows that a judge gets; bounds what is held in memory


def verdict(answer: str | None, truth: str) -> str:
    """`"correct"`, `"incorrect"`, or `"invalid"` where there is no answer (arXiv 2503.14286, Sec. 4.1)."""
    if answer is None:
        return INVALID
    return CORRECT if answer == truth else INCORRECT


def score_candidates(rows: Dataset, judge: Judge, description: str = "Judging") -> Dataset:
    """Candidates with what their responses answer and are worth.

    Args:
        rows: columns `completion` (text) and `answer` (the right one, in normal form).
        judge: of the task, as `topr_trl.tasks.gsm8k.judge`.
        description: of the progress bar.

    Returns:
        The rows with the columns `extracted` (the answer in normal form, None where there is none), `verdict`
        (`"correct"`, `"incorrect"`, `"invalid"`) and `reward` (+1 or -1).
    """
    judgements: list[Judgement] = []
    texts = rows.select_columns(["completion", "answer"])
    with tqdm(total=len(rows), desc=description, unit="row", delay=5) as progress:
        for start in range(0, len(rows), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            judgements += judge(part["completion"], part["answer"])
            progress.update(len(part["answer"]))
    verdicts = [verdict for verdict, _ in judgements]
    # A shard in which nothing is valid must have the same type as the others.
    rows = rows.add_column("extracted", [answer for _, answer in judgements], feature=Value("string"))
    rows = rows.add_column("verdict", verdicts, feature=Value("string"))
    return rows.add_column("reward", [1.0 if v == CORRECT else -1.0 for v in verdicts], feature=Value("float64"))


def answer_reward(judge: Judge) -> Callable[..., list[float]]:
    """A reward function for TRL's trainers: +1 where the response's answer is that of the column `answer`, else -1."""

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [1.0 if verdict == CORRECT else -1.0 for verdict, _ in judge(texts, answer)]

    reward.__name__ = "answer_reward"
    return reward
