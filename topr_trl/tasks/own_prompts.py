"""Load the user's own prompts, which are used unchanged and scored with the user's reward functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from datasets import Dataset, load_dataset
from trl import is_conversational

from topr_trl.data.rows import checked_column, id_column
from topr_trl.data.tables import TABLE_SUFFIXES, read_table

# Result columns in rows of completions. A column of prompts with one of these names would be mistaken for a result.
_TAKEN = ("reward", "label", "extracted", "verdict", "reward_after_baseline", "times_chosen", "mu_logps",
          "mu_fingerprint", "rollout_id", "completion_mask", "turn_rewards", "turn_discount", "score")  # fmt: skip


def prepare(dataset: Dataset, num_shots: int = 0) -> Dataset:
    """Check prompts, and number them if they have no `problem_id`.

    Args:
        dataset ([`~datasets.Dataset`]): Rows with a column `prompt` (text or messages), and any other columns.
        num_shots (`int`, *optional*, defaults to `0`): Must be 0, because no worked examples are added.

    Returns:
        [`~datasets.Dataset`]: the rows with a column `problem_id`.

    Raises:
        ValueError: `num_shots` is not 0, the column `prompt` is missing or holds anything but text or messages, a
            `problem_id` is malformed, or a column has the name of a result.
    """
    if num_shots:
        raise ValueError(f"num_shots={num_shots} has no effect on own prompts, which are used as they are. Remove it.")
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"Own prompts need a column `prompt`; found {dataset.column_names}. Rename the column with the prompts, or "
            "set --task to use the prompts of a task."
        )
    refuse_results(dataset)
    checked_column(dataset, "prompt", _is_prompt, "text or messages")
    if "problem_id" in dataset.column_names:
        id_column(dataset, "problem_id")  # A malformed id raises an error here, and not after sampling.
        return dataset
    return dataset.add_column("problem_id", list(range(len(dataset))))


def refuse_results(prompts: Dataset) -> None:
    """Raise a ValueError if a column of prompts has the name of a result.

    Sampling copies the columns of prompts. A copied reward would count as the reward of the new completions.
    """
    if taken := [name for name in _TAKEN if name in prompts.column_names]:
        raise ValueError(
            f"The prompts have a column {taken[0]!r}, which is the name of a result. Rename or remove this column."
        )


def _is_prompt(value: object) -> bool:
    return (isinstance(value, str) and bool(value)) or (
        isinstance(value, list) and is_conversational({"prompt": value})
    )


def load(name_or_path: str, split: str) -> Dataset:
    """Load prompts.

    Args:
        name_or_path (`str`): Dataset on the Hub, or a `.jsonl`, `.json` or `.parquet` file.
        split (`str`): Split of a dataset on the Hub. It is ignored for a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has a suffix that is not listed above, or cannot be read.
    """
    if name_or_path.endswith(TABLE_SUFFIXES) or Path(name_or_path).is_file():
        return read_table(name_or_path)
    return load_dataset(name_or_path, split=split)


def judge(completions: Sequence[str], truths: Sequence[str]) -> NoReturn:
    """Raise a ValueError, because own prompts have no judge."""
    raise ValueError("Own prompts have no judge: set --reward_funcs.")
