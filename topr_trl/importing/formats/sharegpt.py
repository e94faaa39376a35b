"""Read ShareGPT's conversations: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}`."""

import json
from collections.abc import Sequence

from topr_trl.importing.format import Format, NotOfFormat, Record, Unusable
from topr_trl.importing.formats.messages import choices, rewards, rows_of_conversation
from topr_trl.importing.message_parts import is_messages, parsed_json
from topr_trl.importing.openai_messages import ROLE_NAMES, ROLES, message, template_columns
from topr_trl.importing.row_table import Row

_CALL = "function_call"  # LLaMA-Factory's role for a turn with tool calls as JSON


def rows(record: Record, rated: Sequence[int] | None = None) -> list[Row]:
    """Return one row of messages, or a row for each rated answer. Return [] if there is no turn to learn from.

    Raises:
        NotOfFormat: a turn has no role or an unknown role, or see `rows_of_conversation`.
        Unusable: a turn has an image or cannot be used (see `openai_messages.message`), the provider defines a tool, or
            see `rows_of_conversation`.
    """
    given = parsed_json(record["conversations"])
    options = template_columns({**record, "tools": parsed_json(record.get("tools"))})
    return rows_of_conversation(record, given, [[_message(turn)] for turn in given], options, rated)


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


def _has_turns(record: Record) -> bool:
    turns = parsed_json(record.get("conversations"))
    return isinstance(turns, list) and is_messages(turns[:1])


FORMAT = Format(
    source="ShareGPT's conversations, as Axolotl and LLaMA-Factory read them",
    rank=3,
    test=_has_turns,
    rows=rows,
    messages="conversations",
    rewards=lambda record: rewards(record, "conversations"),
    rates_turns=True,
    columns=("problem_id", "finish_reason", "tools", "chat_template_kwargs"),
    required=frozenset({"conversations"}),
    choices=lambda record: choices(record, "conversations"),
    loses="The trainer learns from assistant turns (gpt). User turns between them are context.",
)
