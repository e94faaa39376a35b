"""Read ShareGPT's conversations: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}`."""

import json

from topr_trl.importing.chat_messages import choices, rewards, rows_of_conversation
from topr_trl.importing.format import Format, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import ROLE_NAMES, message, tools_as_json
from topr_trl.importing.prompt_tables import ROLES
from topr_trl.importing.row_table import Row

_CALL = "function_call"  # LLaMA-Factory's role for a turn with tool calls as JSON


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no assistant turn to learn from.

    Raises:
        NotOfFormat: a turn has an unknown role.
        Unusable: the record has an image, or a turn has a weight other than 0 and 1.
    """
    if record.get("image") or record.get("images"):
        raise Unusable("it has images: offline training supports only text")
    given = parsed_json(record["conversations"])
    return rows_of_conversation(
        record, given, [_message(turn) for turn in given], {"tools": tools_as_json(parsed_json(record.get("tools")))}
    )


def _message(turn: Record) -> Row:
    role, content = turn.get("from") or turn.get("role"), turn.get("value", turn.get("content"))
    if role == _CALL:
        calls = json.loads(content or "null")
        calls = calls if isinstance(calls, list) else [calls]
        return message({**turn, "role": "assistant", "content": None, "tool_calls": calls})
    found = message(turn)
    if found["role"] not in ROLES:
        raise NotOfFormat(f"a turn is from {role!r}; known roles are {', '.join([*ROLE_NAMES, _CALL])}")
    if isinstance(content, str) and found["role"] == "user" and "<image>" in content:
        raise Unusable("a turn has an <image>: offline training supports only text")
    return found


FORMAT = Format(
    source="ShareGPT's conversations, as Axolotl and LLaMA-Factory read them",
    suffix="",
    rows=rows,
    rewards=lambda record: rewards(record, "conversations"),
    columns=("problem_id", "finish_reason", "tools"),
    required=frozenset({"conversations"}),
    optional=None,
    choices=lambda record: choices(record, "conversations"),
    loses="The trainer learns from assistant turns (gpt). User turns between them are context.",
)
