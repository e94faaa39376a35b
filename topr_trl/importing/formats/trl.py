"""Read TRL's `completions/completions_{step}.parquet`, which trainers write with `log_completions=True`."""

from itertools import pairwise
from pathlib import Path

from topr_trl.data.chat_templates import is_learned
from topr_trl.data.tables import read_shard
from topr_trl.importing.completions import check_one_turn
from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import IGNORED, Format, NotOfFormat, Record, has
from topr_trl.importing.row_table import Row

_FIXED = frozenset({"step", "prompt", "completion", "advantage"})
_OF_TOPR = {"weight", "log_ratio"}  # columns that only the trainers of topr_trl log


def rows(record: Record) -> list[Row]:
    """Return one row of text or messages.

    Raises:
        NotOfFormat: a trainer of topr_trl marked context in the completion, or see `content_blocks.messages_of`.
        Unusable: a `rollout_func` wrote turns of users or tools into the text of a turn, or see
            `content_blocks.messages_of`.
    """
    if "weight" in record and "⟦" in str(record["completion"]):  # The trainers of topr_trl mark context with ⟦ ⟧.
        raise NotOfFormat(
            "its completion marks text that the model did not write (⟦ and ⟧). Use the rows that this run was "
            "trained on"
        )
    row = {name: text_or_messages(record[name]) for name in ("prompt", "completion")}
    given = row["completion"]
    for text in (each.get("content") for each in given if is_learned(each)) if isinstance(given, list) else [given]:
        check_one_turn(str(text), is_decoded=True)
    return [row]


def rewards(record: Record) -> dict[str, float | None]:
    """Return the columns of the reward functions, and other columns of floats that these functions logged."""
    others = {name: value for name, value in record.items() if name not in _FIXED | _OF_TOPR}
    return {name: value for name, value in others.items() if isinstance(value, float | None)}


def without_repeats(files: list[Path]) -> list[Path]:
    """Return the first file, and each file whose prompts or completions differ from the file before it.

    If TRL logs more often than it samples, TRL writes the same rows again with a different step.

    Args:
        files (`list[Path]`): Files, sorted by name.
    """
    tables = (read_shard(file, ("prompt", "completion")) for file in files)
    return files[:1] + [file for file, (before, own) in zip(files[1:], pairwise(tables), strict=True) if own != before]


FORMAT = Format(
    source="TRL 0.28 to 1.16 (trl/trainer/grpo_trainer.py, GRPOTrainer.log)",
    rank=3,
    test=has("step", "prompt", "completion", "advantage"),
    rows=rows,
    rewards=rewards,
    columns=("problem_id",),
    required=_FIXED,
    choices=lambda record: IGNORED,
    loses="TRL logs the last generation batch before each log, as text. Tokenizing this text can give different "
    "tokens. An evaluation at the same step replaces the file, so its rows are read as training rows. Before TRL "
    "1.15, prompts are text with the chat template applied. Logs of runs with tools lack the definitions of the tools.",
    without_repeats=without_repeats,
)
