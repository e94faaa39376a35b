"""Read ShareGPT's conversations: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}`."""

import json
from typing import Any

from topr_trl.importing.chat_messages import rewards, rows_of_conversation
from topr_trl.importing.format import IGNORED, Format, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import message, tools_as_json
from topr_trl.importing.row_table import Row

_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bot": "assistant", "bard": "assistant", "bing": "assistant",
    "observation": "tool", "tool": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
_CALL = "function_call"  # LLaMA-Factory's role for a turn with tool calls as JSON


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no assistant turn to learn from.

    Raises:
        NotOfFormat: a turn has an unknown role.
        Unusable: the record has an image, or a turn has a weight other than 0 and 1.
    """
    if record.get("image") or record.get("images"):
        raise Unusable("it has images: offline training supports only text")
    turns = [_message(turn) for turn in record["conversations"]]
    return rows_of_conversation(
        record, record["conversations"], turns, {"tools": tools_as_json(parsed_json(record.get("tools")))}
    )


def _message(turn: Record) -> Row:
    role = turn.get("from") or turn.get("role")
    content: Any = turn["value"] if "value" in turn else turn.get("content")
    more: dict[str, Any] = {name: given for name, given in turn.items() if name not in ("from", "role", "value")}
    if role == _CALL:
        calls = json.loads(content or "null")
        calls = calls if isinstance(calls, list) else [calls]
        return message({**more, "role": "assistant", "content": None, "tool_calls": calls})
    if role not in _ROLES:
        raise NotOfFormat(f"a turn is from {role!r}; known roles are {', '.join([*_ROLES, _CALL])}")
    if isinstance(content, str) and _ROLES[role] == "user" and "<image>" in content:
        raise Unusable("a turn has an <image>: offline training supports only text")
    return message({**more, "role": _ROLES[role], "content": content})


FORMAT = Format(
    source="ShareGPT's conversations, as Axolotl and LLaMA-Factory read them",
    suffix="",
    rows=rows,
    rewards=lambda record: rewards(record, "conversations"),
    columns=("problem_id", "finish_reason", "tools"),
    required=frozenset({"conversations"}),
    optional=None,
    choices=lambda record: IGNORED,
    loses="The trainer learns from assistant turns (gpt). User turns between them are context.",
)
