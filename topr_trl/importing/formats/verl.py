"""Read `{step}.jsonl`, which verl writes to `trainer.rollout_data_dir`."""

from topr_trl.importing.completions import check_one_turn
from topr_trl.importing.format import IGNORED, Format, Record, has
from topr_trl.importing.row_table import Row


def rows(record: Record) -> list[Row]:
    """Return one row of text, with the correct answer if it is text or a number.

    Raises:
        Unusable: the output has tool or user messages, which cannot be distinguished from the model's text.
    """
    if isinstance(record["output"], str):
        check_one_turn(record["output"], is_decoded=True)
    answer, uid = record.get("gts"), record.get("uid")
    return [
        {
            "prompt": record["input"], "completion": record["output"],
            "answer": str(answer) if isinstance(answer, str | int | float) else None,
            "problem_id": uid.rsplit("_", 2)[0] if uid else None,  # `uid` ends with _{rollout}_{part}.
        }
    ]  # fmt: skip


FORMAT = Format(
    source="verl 0.5 to 0.9.1 (verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py)",
    rank=3,
    test=has("input", "output", "score", "step"),
    rows=rows,
    rewards=lambda record: {"score": record["score"]},
    columns=("problem_id", "answer"),
    required=frozenset({"input", "output", "score", "step"}),
    choices=lambda record: IGNORED,
    loses="verl logs decoded text without special tokens, token ids or log-probabilities. Prompts lack the tokens of "
    "the chat template, and a truncated completion looks like a complete one. The dumps do not distinguish tool "
    "results from the model's text, so outputs with such results are refused.",
)
