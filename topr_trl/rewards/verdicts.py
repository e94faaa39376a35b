"""Score completions: +1 for a correct answer, -1 for an incorrect or missing answer (arXiv 2503.14286, Sec. 4.1)."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
from datasets import Dataset, Value
from tqdm.auto import tqdm

from topr_trl.data.rows import text_column

VERDICTS = CORRECT, INCORRECT, INVALID = "correct", "incorrect", "invalid"

# Verdict and answer in normal form. In normal form, equal answers to a problem have the same text. The answer is the
# true answer if the verdict is "correct", and None if the verdict is "invalid".
Judgement = tuple[str, str | None]

# Function that takes the texts of completions and their true answers, and returns one judgment per completion.
Judge = Callable[[Sequence[str], Sequence[str]], list[Judgement]]

_AT_ONCE = 4_096  # maximum number of rows per call of a judge, to limit memory


def verdict(answer: str | None, truth: str) -> str:
    """Return `"correct"` or `"incorrect"`, or `"invalid"` if there is no answer (arXiv 2503.14286, Sec. 4.1).

    `answer` and `truth` must be in normal form.
    """
    if answer is None:
        return INVALID
    return CORRECT if answer == truth else INCORRECT


def score_completions(rows: Dataset, judge: Judge, description: str = "Judging") -> Dataset:
    """Add answers, verdicts and rewards of completions to their rows.

    The reward is +1 for a correct answer, and -1 for an incorrect or missing answer (arXiv 2503.14286, Sec. 4.1).

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import score_completions
    >>> from topr_trl.tasks import gsm8k

    >>> rows = Dataset.from_dict({"completion": ["The answer is 7.", "It is 7."], "answer": ["7", "7"]})
    >>> scored = score_completions(rows, gsm8k.judge)
    >>> scored["verdict"][:], scored["reward"][:]
    (['correct', 'invalid'], [1.0, -1.0])
    ```

    Args:
        rows ([`~datasets.Dataset`]):
            Rows with the columns `completion` and `answer`. A completion is text or messages. Only the last
            message is judged. `answer` is the true answer in normal form.
        judge (`Callable[[Sequence[str], Sequence[str]], list[tuple[str, str | None]]]`):
            Function of the task, such as `topr_trl.tasks.gsm8k.judge`. It takes the texts of completions and their
            true answers. For each completion, it returns a verdict and the answer in normal form.
        description (`str`, *optional*, defaults to `"Judging"`):
            Text beside the progress bar.

    Returns:
        [`~datasets.Dataset`]: the rows with three more columns. `extracted` is the answer in normal form, or None.
        `verdict` is `"correct"`, `"incorrect"` or `"invalid"`. `reward` is 1.0 or -1.0.

    Raises:
        ValueError: a completion or an answer is missing or has a wrong type.
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
    # The types are explicit, so that a shard without a valid answer has the same types as other shards.
    rows = rows.add_column("extracted", [answer for _, answer in judgements], feature=Value("string"))
    rows = rows.add_column("verdict", verdicts, feature=Value("string"))
    return rows.add_column("reward", [1.0 if v == CORRECT else -1.0 for v in verdicts], feature=Value("float64"))


def text_of(completion: Any, row: int) -> str:
    """Return the text of a completion. For a list of messages, this is the text of the last message.

    A last message without content, such as one with tool calls alone, has the text "".

    Raises:
        ValueError: the completion is neither text nor messages. The error message contains the position `row`.
    """
    is_messages = isinstance(completion, list) and completion and isinstance(completion[-1], dict)
    text = completion[-1].get("content") if is_messages else completion
    if is_messages and text is None and "role" in completion[-1]:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"Column `completion` must hold text or messages; row {row} holds {completion!r}.")
    return text


def answer_reward(judge: Judge) -> Callable[..., list[float]]:
    """Return a reward function for TRL's trainers that judges completions by the column `answer`.

    The reward is +1 for a correct answer and -1 otherwise. `AsyncTOPRTrainer` pickles its reward functions. The
    returned function can be pickled if `judge` can be pickled.
    """
    return _AnswerReward(judge)


class _AnswerReward:
    __name__ = "answer_reward"  # name in TRL's metrics

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def __call__(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [text_of(completion, i) for i, completion in enumerate(completions)]
        return [1.0 if verdict == CORRECT else -1.0 for verdict, _ in self.judge(texts, answer)]


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a synchronous or asynchronous reward function so that each call checks the rewards.

    The wrapper raises a ValueError if a reward is neither a number nor None. TRL only checks the number of rewards.

    Args:
        function (`Callable`): Reward function.
        name (`str`): Name of the function, for the error message.
    """
    from trl.trainer.utils import is_async_callable  # Reports import this module, and must not import torch and TRL.

    async def later(*args: Any, **kwargs: Any) -> list[object]:
        return check_rewards(await function(*args, **kwargs), name)

    return (
        later if is_async_callable(function) else lambda *args, **kwargs: check_rewards(function(*args, **kwargs), name)
    )


def check_rewards(rewards: object, name: str, start: int = 0) -> list[object]:
    """Return the rewards of a function as a list.

    Args:
        rewards (`object`): Value that the function returned.
        name (`str`): Name of the function, for the error message.
        start (`int`, *optional*, defaults to 0): Position of the first completion, for the error message.

    Raises:
        ValueError: the value is not a list or other iterable of rewards, or a reward is neither a number nor None.
    """
    from torch import Tensor

    if not isinstance(rewards, Iterable) or isinstance(rewards, str):
        raise ValueError(
            f"The reward function {name!r} returned {rewards!r}, not a list with one reward per completion."
        )
    rewards = list(rewards)
    for i, reward in enumerate(rewards, start):
        if not (reward is None or isinstance(reward, (Real, np.bool_, Tensor))):
            by_turn = isinstance(reward, list | tuple)
            raise ValueError(
                f"The reward function {name!r} returned {reward!r} for completion {i}. Return a number, or "
                "None if there is no reward."
                + " Only stored rows can have a reward for each turn: a column turn_rewards, which "
                "OfflineTOPRTrainer reads." * by_turn
            )
    return rewards
