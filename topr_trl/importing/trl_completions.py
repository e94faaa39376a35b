"""TRL's `completions/completions_{step}.parquet`, written with `log_completions=True`."""

from itertools import pairwise
from pathlib import Path

from topr_trl.data.tables import read_shard
from topr_trl.importing.records import Format, NotOfFormat, Record, Row, text_or_messages

_FIXED = frozenset({"step", "prompt", "completion", "advantage"})
_OF_TOPR = {"weight", "log_ratio"}  # what this package's trainers add


def rows(record: Record) -> list[Row]:
    """One row, of text or of messages."""
    if "weight" in record and "⟦" in str(record["completion"]):  # what the model did not write, see completions_log
        raise NotOfFormat(
            "its completion marks what the model did not write: the tokens are in the rows that this run learned from"
        )
    return [{name: text_or_messages(record[name]) for name in ("prompt", "completion")}]


def rewards(record: Record) -> dict[str, float | None]:
    """The reward functions' columns, and numbers that they logged."""
    others = {name: value for name, value in record.items() if name not in _FIXED | _OF_TOPR}
    return {name: value for name, value in others.items() if isinstance(value, float | None)}


def without_repeats(files: list[Path]) -> list[Path]:
    """Where TRL logs more often than it samples, it writes the same rows again, as another step's."""
    tables = (read_shard(file, ("prompt", "completion")) for file in files)
    return files[:1] + [file for file, (before, own) in zip(files[1:], pairwise(tables), strict=True) if own != before]


FORMAT = Format(
    source="TRL 0.28 to 1.16 (trl/trainer/grpo_trainer.py, GRPOTrainer.log)",
    suffix=".parquet",
    rows=rows,
    rewards=rewards,
    columns=("problem_id",),
    required=_FIXED,
    optional=None,
    loses="TRL logs the last generation batch before each log, as text: tokenized again it need not give the tokens "
    "that were sampled. An evaluation at the same step takes the file's place, and its rows are read as if they had "
    "been for training. Before 1.15 prompts are text that the chat template has written.",
    without_repeats=without_repeats,
)
