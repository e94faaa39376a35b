"""verl's `{step}.jsonl`, written to `trainer.rollout_data_dir`."""

from topr_trl.importing.records import Format, Record, Row


def rows(record: Record) -> list[Row]:
    """One row of text; the answer if it is one."""
    answer, uid = record.get("gts"), record.get("uid")
    return [
        {
            "prompt": record["input"], "completion": record["output"],
            "answer": str(answer) if isinstance(answer, str | int | float) else None,
            "problem_id": uid.rsplit("_", 2)[0] if uid else None,  # behind it: which rollout, and which part of it
        }
    ]  # fmt: skip


FORMAT = Format(
    source="verl 0.5 to 0.9.1 (verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py)",
    suffix=".jsonl",
    rows=rows,
    rewards=lambda record: {"score": record["score"]},
    columns=("problem_id", "answer"),
    required=frozenset({"input", "output", "score", "step"}),
    optional=None,  # what the reward function returns beside the score
    loses="verl decodes without special tokens and logs neither tokens nor log-probabilities: prompts lack the tokens "
    "of the chat template, and a completion that was cut off looks like one that ended.",
)
