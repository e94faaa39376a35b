"""Rewards as in the paper: +1 for a right answer, -1 for a wrong one or none."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from tqdm.auto import tqdm
from trl.trainer.utils import is_async_callable

from topr_trl.data.rows import text_column

VERDICTS = CORRECT, INCORRECT, INVALID = "correct", "incorrect", "invalid"

# A verdict, and the answer in a form that equal answers share: the right answer itself where the verdict is correct,
# None where it is invalid.
Judgement = tuple[str, str | None]

# From the texts of completions and the right answers to judgements, in the same order.
Judge = Callable[[Sequence[str], Sequence[str]], list[Judgement]]

_AT_ONCE = 4_096  # rows per call of a judge; bounds the memory


def verdict(answer: str | None, truth: str) -> str:
    """`"correct"`, `"incorrect"`, or `"invalid"` where there is no answer (arXiv 2503.14286, Sec. 4.1)."""
    if answer is None:
        return INVALID
    return CORRECT if answer == truth else INCORRECT


def score_completions(rows: Dataset, judge: Judge, description: str = "Judging") -> Dataset:
    """Rows with the answers, verdicts and rewards of their completions.

    Args:
        rows: columns `completion` (text, or messages: the last counts) and `answer` (the right one, in normal form).
        judge: the task's, such as `topr_trl.tasks.gsm8k.judge`.

    Returns:
        The rows with the columns `extracted` (the answer in normal form, None where there is none), `verdict`
        (`"correct"`, `"incorrect"`, `"invalid"`) and `reward` (+1 or -1).

    Raises:
        ValueError: a completion or an answer is missing, or something else than text.
    """
    judgements: list[Judgement] = []
    answers, completions = text_column(rows, "answer"), rows.select_columns(["completion"])
    with tqdm(total=len(rows), desc=description, unit="row", delay=5) as progress:
        for start in range(0, len(rows), _AT_ONCE):
            part = completions[start : start + _AT_ONCE]["completion"]
            texts = [text_of(completion, i) for i, completion in enumerate(part, start)]
            judgements += judge(texts, answers[start : start + _AT_ONCE])
            progress.update(len(texts))
    verdicts = [verdict for verdict, _ in judgements]
    # Explicit types: a shard without a valid answer must have the same types as the others.
    rows = rows.add_column("extracted", [answer for _, answer in judgements], feature=Value("string"))
    rows = rows.add_column("verdict", verdicts, feature=Value("string"))
    return rows.add_column("reward", [1.0 if v == CORRECT else -1.0 for v in verdicts], feature=Value("float64"))


def text_of(completion: Any, row: int) -> str:
    """The text of a completion; of messages, the last one's.

    Raises:
        ValueError: it is neither text nor messages.
    """
    is_messages = isinstance(completion, list) and completion and isinstance(completion[-1], dict)
    text = completion[-1].get("content") if is_messages else completion
    if not isinstance(text, str):
        raise ValueError(f"Column `completion` must hold text or messages; row {row} holds {completion!r}.")
    return text


def answer_reward(judge: Judge) -> Callable[..., list[float]]:
    """A reward function for TRL's trainers: +1 where the completion has the answer of the column `answer`, else -1.

    It can be pickled if `judge` can, as `AsyncTOPRTrainer` needs.
    """
    return _AnswerReward(judge)


class _AnswerReward:
    __name__ = "answer_reward"  # what TRL calls it in metrics

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def __call__(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [text_of(completion, i) for i, completion in enumerate(completions)]
        return [1.0 if verdict == CORRECT else -1.0 for verdict, _ in self.judge(texts, answer)]


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A reward function of TRL's trainers, sync or async; TRL itself checks only the length of what it returns.

    Raises:
        ValueError: when called, and the function returns something else than a list of numbers and None.
    """

    def check(rewards: Any) -> list[Any]:
        if not isinstance(rewards, Iterable) or isinstance(rewards, str):
            raise ValueError(
                f"The reward function {name!r} returned {rewards!r}, not a list with one reward per completion."
            )
        rewards = list(rewards)
        for i, reward in enumerate(rewards):
            if not (reward is None or isinstance(reward, (Real, np.bool_, torch.Tensor))):
                raise ValueError(
                    f"The reward function {name!r} returned {reward!r} for completion {i}. Return a number, or "
                    "None where there is no reward."
                )
        return rewards

    async def later(*args: Any, **kwargs: Any) -> list[Any]:
        return check(await function(*args, **kwargs))

    return later if is_async_callable(function) else lambda *args, **kwargs: check(function(*args, **kwargs))
