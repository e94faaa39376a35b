"""TRL's `completions/completions_{step}.parquet`, written with `log_completions=True`."""

from topr_trl.formats.records import Format, Record, Row, text_or_messages

_FIXED = frozenset({"step", "prompt", "completion", "advantage"})
_OF_TOPR = {"weight", "log_ratio"}  # what this package's trainers add


def rows(record: Record) -> list[Row]:
    """One row, of text or of messages."""
    return [{name: text_or_messages(record[name]) for name in ("prompt", "completion")}]


def rewards(record: Record) -> dict[str, float | None]:
    """The reward functions' columns, and numbers that they logged."""
    if "reward" in record:  # of OfflineTOPRTrainer, which has one
        return {"reward": record["reward"]}
    others = {name: value for name, value in record.items() if name not in _FIXED | _OF_TOPR}
    return {name: value for name, value in others.items() if isinstance(value, float | None)}


FORMAT = Format(
    source="TRL 0.28 to 1.16 (trl/trainer/grpo_trainer.py, GRPOTrainer.log)",
    suffix=".parquet",
    rows=rows,
    rewards=rewards,
    columns=("problem_id",),
    required=_FIXED,
    optional=None,
    loses="TRL logs the last generation batch before each log, as text: tokenized again it need not give the tokens "
    "that were sampled. Before 1.15 prompts are text that the chat template has written.",
)
