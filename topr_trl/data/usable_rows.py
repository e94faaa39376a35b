"""Check whether rows have the columns that their use needs.

This module does not import PyTorch, so commands can check rows quickly.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from topr_trl.data.rows import TURN_REWARDS, check_trainable_columns, have_rewards, need_columns
from topr_trl.data.tables import columns_of, shards_of

_OF_EVALUATION = ("problem_id", "prompt")  # columns that identify the problem of a row; one of the two is enough
_TO_EVALUATE = "Rows to evaluate"


def check_usable(columns: Sequence[str], use: str, by_functions: bool = False) -> None:
    """Check that rows have the columns that their use needs. A label counts as a reward.

    Args:
        columns (`Sequence[str]`): Names of the columns.
        use (`str`): What the rows are for:
            - `"train"`: to choose rows, compute log μ, or train.
            - `"score"`: to compute rewards. Without reward functions, rows with rewards keep them.
            - `"loop"`: to train in a loop. Rows without rewards are scored first.
            - `"evaluate"`: to evaluate. Rows with neither rewards nor extracted answers are scored first.
            - `"answers"`: to evaluate extracted answers.
        by_functions (`bool`, defaults to `False`): Whether reward functions score the rows.

    Raises:
        ValueError: a column is missing, or reward functions would score rows that are scored already.
    """
    rewarded = have_rewards(columns)
    if use == "train" or (use == "loop" and rewarded):
        check_trainable_columns(columns)
    elif use == "answers":
        need_columns(columns, (_OF_EVALUATION, "answer", "extracted"), _TO_EVALUATE)
    elif use == "evaluate" and is_scored(columns) and not by_functions:
        need_columns(columns, (_OF_EVALUATION,), _TO_EVALUATE)
    elif by_functions and (rewarded or (use == "evaluate" and is_scored(columns))):
        there = [name for name in ("reward", TURN_REWARDS, "label", "verdict", "extracted") if name in columns]
        raise ValueError(
            f"the rows are scored already. Remove the columns {', '.join(there)} to score with reward_funcs, or remove "
            "reward_funcs."
        )
    elif use == "evaluate":
        answer = () if by_functions else ("answer",)
        need_columns(columns, (_OF_EVALUATION, *answer, ("extracted", "reward", "completion")), _TO_EVALUATE)
    elif by_functions or not rewarded:
        prompt = ("prompt",) if by_functions or use == "loop" else ()
        need_columns(columns, (*prompt, "completion", *(() if by_functions else ("answer",))), "rows without a reward")


def refuse_rewards_of_turns(turns: Any, who: str) -> None:
    """Raise a ValueError if a row has rewards of turns. `who` needs one reward per row.

    Args:
        turns (`Any`): Arrow column `turn_rewards`.
        who (`str`): Name of the command, for the error message.
    """
    if turns.null_count < len(turns):
        raise ValueError(
            f"{who} needs one reward per row, and rows have rewards in the column {TURN_REWARDS}. Train on them with "
            "topr train: it takes the same settings for baseline and curation, and applies them to turns."
        )


def is_scored(columns: Collection[str]) -> bool:
    """Return whether rows with these columns have rewards or extracted answers."""
    return have_answers(columns) or have_rewards(columns)


def in_all_shards(path: Path, test: Callable[[list[str]], bool]) -> bool:
    """Return whether the columns of each file of `path` pass a test, such as `is_scored`."""
    return all(test(columns_of(shard)) for shard in shards_of(path))


def have_answers(columns: Collection[str]) -> bool:
    """Return whether rows with these columns have the answers that a judge extracted, and the correct answers."""
    return {"extracted", "answer"} <= set(columns)
