"""Read verl's `{step}.jsonl`, which it writes to `trainer.rollout_data_dir`."""

from topr_trl.importing.records import Format, Record, Row


def rows(record: Record) -> list[Row]:
    """Return one row of text, with the right answer if it is a text or a number."""
    answer, uid = record.get("gts"), record.get("uid")
    return [
        {
            "prompt": record["input"], "completion": record["output"],
            "answer": str(answer) if isinstance(answer, str | int | float) else None,
            "problem_id": uid.rsplit("_", 2)[0] if uid else None,  # The suffix numbers the rollout and its part.
        }
    ]  # fmt: skip


FORMAT = Format(
    source="verl 0.5 to 0.9.1 (verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py)",
    suffix=".jsonl",
    rows=rows,
    rewards=lambda record: {"score": record["score"]},
    columns=("problem_id", "answer"),
    required=frozenset({"input", "output", "score", "step"}),
    optional=None,  # Values that the reward function returns, in addition to the score, are fields.
    loses="verl logs decoded text without special tokens, token ids or log-probabilities. Prompts lack the tokens of "
    "the chat template, and a truncated completion looks like a complete one.",
)
