"""Define the columns of imported rows, and convert rows to a table."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from topr_trl.data.rows import TURN_DISCOUNT, TURN_REWARDS
from topr_trl.data.sampler_logps import LOGPROBS_MODE, SAMPLING

Row = dict[str, Any]
PLACE = "place"  # key of a row with the place of its record: the file and the position in it
_CALL = pa.struct({"name": pa.string(), "arguments": pa.string()})
MESSAGES = pa.list_(
    pa.struct({
        "role": pa.string(), "content": pa.string(), "reasoning_content": pa.string(), "name": pa.string(),
        "tool_call_id": pa.string(), "weight": pa.int8(),
        "tool_calls": pa.list_(pa.struct({"id": pa.string(), "type": pa.string(), "function": _CALL})),
    })
)  # fmt: skip
IDS, LOGPS = pa.list_(pa.int32()), pa.list_(pa.float32())
TEXT, NUMBER = pa.string(), pa.float64()
JSON_COLUMNS = ("tools", "chat_template_kwargs")  # columns with JSON text
# Columns that rows can have in addition to prompt and completion.
COLUMNS: dict[str, pa.DataType] = {
    "prompt_ids": IDS, "completion_ids": IDS, "completion_mask": pa.list_(pa.int8()), "sampler_logps": LOGPS,
    "reward": NUMBER, "problem_id": TEXT, "rollout_id": TEXT, "finish_reason": TEXT, "answer": TEXT, "tools": TEXT,
    "chat_template_kwargs": TEXT, TURN_REWARDS: pa.list_(NUMBER), TURN_DISCOUNT: NUMBER,
    **dict(zip(SAMPLING, (NUMBER, NUMBER, pa.int64()), strict=True)), LOGPROBS_MODE: TEXT,
    "model": TEXT, "served_model": TEXT, "model_revision": TEXT,
}  # fmt: skip


def to_table(made: list[Row], columns: Sequence[str], conversational: bool) -> pa.Table:
    """Convert rows to a table.

    Args:
        made (`list[Row]`): Rows, each with the place of its record in `PLACE`.
        columns (`Sequence[str]`): Columns of the table, in addition to prompt and completion. A missing value is null.
        conversational (`bool`): Whether prompts and completions are messages. Otherwise, they are text.

    Raises:
        ValueError: a value has a wrong type.
    """
    text = MESSAGES if conversational else TEXT
    found = {}
    for name, kind in {"prompt": text, "completion": text, **{name: COLUMNS[name] for name in columns}}.items():
        values = [row.get(name) for row in made]
        if (array := _array(values, kind)) is None:
            wrong = next(n for n, value in enumerate(values) if _array([value], kind) is None)
            remedy = ""
            if name in ("prompt", "completion") and isinstance(values[wrong], str) == conversational:
                chat = "" if made[wrong].get("completion_ids") else "set --chat true to make messages of text, or "
                remedy = f", as in the first row: {chat}import text and messages separately, with topr import --where"
            value, expected = repr(values[wrong])[:60], _describe_type(kind)
            raise ValueError(f"{made[wrong][PLACE]}: its {name} is {value}, and must be {expected}{remedy}.")
        found[name] = array
    return pa.table(found)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        return None


def _describe_type(kind: pa.DataType) -> str:
    names = {TEXT: "text", NUMBER: "a number", MESSAGES: "messages", IDS: "token ids"}
    return names.get(kind, "a list of numbers")
