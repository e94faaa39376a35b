"""Read tables with one message per row and the id of its conversation, and JSON arrays of messages."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from topr_trl.importing.field_names import normalized
from topr_trl.importing.format import Placed, Record
from topr_trl.importing.formats import messages
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.openai_messages import ROLE_NAMES

_CONVERSATION = {
    f"{what}{end}" for end in ("id", "uuid", "") for what in ("conversation", "conv", "dialog", "dialogue", "chat",
    "thread", "session", "run", "trajectory", "episode")
}  # fmt: skip
# Fields whose values must not fall from one message of a conversation to the next message.
_ORDER = {
    "turn", "turnid", "turnindex", "turnidx", "turnnumber", "index", "idx", "position", "messageindex", "messageidx",
    "step", "sequence", "seq", "order", "timestamp", "time", "createdat", "created", "date", "datetime",
}  # fmt: skip
_OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}


def _is_one_of(name: str, names: set[str]) -> bool:
    return normalized(name).replace("_", "") in names


def _is_message(record: Record) -> bool:
    is_known = str(record.get("role")).lower() in {*ROLE_NAMES, "exit"}
    return is_known and "content" in record and not {"messages", "output", "choices"} & set(record)


def conversations(records: Iterable[Placed]) -> Iterator[Placed]:
    """Yield the conversations of a file: rows with the same id, or the messages of an array.

    A field with equal values in all messages of a conversation, such as the reward, becomes a field of the
    conversation. Exceptions are the fields in `_OF_MESSAGE`, and conversations of one message. Messages with the role
    `exit`, with which mini-swe-agent ends a run, are left out. Records that are not messages are yielded unchanged.

    Args:
        records (`Iterable`): Place and content of each message.

    Raises:
        ValueError: a message has several conversation ids, or has none and is not in an array, or the messages of a
            conversation are not in order.
    """
    for place, record in joined_by("conversation", _conversation_of)(records):
        if not isinstance(record, dict) or LINES not in record:
            yield place, record
            continue
        given = record[LINES]
        for name in given[0]:
            if _is_one_of(name, _ORDER) and any(after < before for before, after in pairwise(_values(given, name))):
                raise ValueError(
                    f"{place}: the messages of its conversation are not in the order of {name}. Sort the file by it."
                )
        shared = {
            name: value
            for name, value in given[0].items()
            if name not in _OF_MESSAGE and len(given) > 1 and all(each.get(name) == value for each in given)
        }
        read = [{name: value for name, value in each.items() if name not in shared} for each in given]
        yield place, {**shared, "messages": [each for each in read if each["role"].lower() != "exit"]}


def _values(given: list[Record], name: str) -> list[Any]:
    """Return the values of a field that are not null, as numbers, times, or lists of words and numbers.

    These lists put `turn_9` before `turn_10`.
    """
    values = [each[name] for each in given if each.get(name) is not None]
    for convert in (float, _time):
        with suppress(TypeError, ValueError):
            return [convert(value) for value in values]
    pieces = ([piece for piece in re.split(r"(\d+)", str(value)) if piece] for value in values)
    return [[(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in each] for each in pieces]


def _time(value: Any) -> datetime:
    time = datetime.fromisoformat(str(value).removesuffix(" UTC"))
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _conversation_of(place: str, record: Record) -> Any:
    """Return the id of a message's conversation, or the place of its array. Return None if the record is no message.

    Raises:
        ValueError: the message has no conversation id and is not in an array, or has several ids.
    """
    if not _is_message(record):
        return None
    names = [name for name, value in record.items() if _is_one_of(name, _CONVERSATION) and value is not None]
    if len(names) > 1:
        raise ValueError(
            f"{place}: {', '.join(names)} may all be the id of its conversation. Keep one of them in the file."
        )
    start, _, end = place.rpartition(", ")
    if not names and not end.startswith("record"):
        raise ValueError(
            f"{place}: it is one message without the id of its conversation. Add a field conversation_id to the file, "
            'or write one conversation per line: {"messages": [...], "reward": 1}.'
        )
    return (names[0], str(record[names[0]])) if names else ("array", start)


FORMAT = replace(
    messages.FORMAT,
    source="tables and arrays of messages in OpenAI's format",
    suffix="",
    rank=3,
    test=_is_message,
    join=conversations,
)
