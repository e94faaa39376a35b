"""Read tables with one message per row and the id of its conversation, and JSON arrays of messages."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, time
from itertools import pairwise
from typing import Any

from topr_trl.importing.field_names import normalized
from topr_trl.importing.format import Placed, Record
from topr_trl.importing.formats import messages
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import ROLE_NAMES, with_role

_CONVERSATION = {
    f"{what}{end}" for end in ("id", "uuid", "") for what in ("conversation", "conv", "dialog", "dialogue", "chat",
    "thread", "session", "run", "trajectory", "episode")
}  # fmt: skip
# Fields whose values must not fall from one message of a conversation to the next message.
_ORDER = {
    "turn", "turnid", "turnindex", "turnidx", "turnnumber", "index", "idx", "position", "messageindex", "messageidx",
    "step", "sequence", "seq", "order", "timestamp", "time", "createdat", "createddate", "created", "date", "datetime",
}  # fmt: skip
_OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}


def _is_one_of(name: str, names: set[str]) -> bool:
    return normalized(name).replace("_", "") in names


def _is_message(record: Record) -> bool:
    return {"role", "content"} <= set(record) and not {"messages", "output", "choices"} & set(record)


def _flat(record: Record) -> Record:
    """Return a record with the fields of the message that LangChain's chat histories have in one column.

    Other records are returned unchanged.
    """
    if _is_message(record):
        return record
    messages = {name: found for name, value in record.items()
                if (found := with_role(given := parsed_json(value))) is not given}  # fmt: skip
    if len(messages) != 1:
        return record
    ((name, message),) = messages.items()
    return {**message, **{other: value for other, value in record.items() if other != name}}


def _has_known_role(record: Record) -> bool:
    return _is_message(record := _flat(record)) and str(record["role"]).lower() in {*ROLE_NAMES, "exit"}


def conversations(records: Iterable[Placed]) -> Iterator[Placed]:
    """Yield the conversations of a file: rows with the same id, or the messages of an array.

    A field with equal values in all messages of a conversation, such as the reward, becomes a field of the
    conversation. Exceptions are nulls, the fields in `_OF_MESSAGE`, and conversations of one message. Messages with the
    role `exit`, with which mini-swe-agent ends a run, are left out. Records that are not messages are yielded
    unchanged.

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
        given = [_flat(each) for each in record[LINES]]
        _check_order(place, given)
        shared = {
            name: value
            for name, value in given[0].items()
            if name not in _OF_MESSAGE
            and value is not None
            and len(given) > 1
            and all(each.get(name) == value for each in given)
        }
        read = [{name: value for name, value in each.items() if name not in shared} for each in given]
        yield place, {**shared, "messages": [each for each in read if str(each["role"]).lower() != "exit"]}


def _check_order(place: str, given: list[Record]) -> None:
    """Check that the messages of a conversation are in the order of their numbers and times, or else of their `id`.

    Fields with other times are not compared. They are accepted if another field shows the order of all messages.

    Raises:
        ValueError: the messages are not in order, or no field shows their order and one may.
    """
    names = [name for name in given[0] if _is_one_of(name, _ORDER)]
    if not names and isinstance(given[0].get("id"), int):
        names = ["id"]
    order = {name: _values(given, name) for name in names}
    for name, values in order.items():
        if any(after < before for before, after in pairwise(values or ())):
            raise ValueError(
                f"{place}: the messages of its conversation are not in the order of {name}. Sort the file by it. If "
                "they are in order, delete this field from the file."
            )
    known = [values for values in order.values() if values is not None]
    unknown = [name for name in order if order[name] is None]
    if unknown and not any(len(values) == len({*values}) == len(given) for values in known):
        raise ValueError(
            f"{place}: its {unknown[0]} is {given[0][unknown[0]]!r}, and may show the order of the messages. Write "
            "times such as 2024-01-31 23:59. If the messages are in order, delete this field from the file."
        )


def _values(given: list[Record], name: str) -> list[Any] | None:
    """Return the values of a field that are not null, as numbers, times, or the numbers at the end of equal words.

    The numbers put `turn_9` before `turn_10`. Return [] if all values are equal, and None for other values.
    """
    values = [each[name] for each in given if each.get(name) is not None]
    if all(value == values[0] for value in values):
        return []
    for convert in (float, _time, time.fromisoformat):
        with suppress(TypeError, ValueError):
            return [convert(value) for value in values]
    found = [match for value in values if (match := re.fullmatch(r"(\D*)(\d+)", str(value)))]
    is_numbered = len(found) == len(values) and len({match[1] for match in found}) == 1
    return [int(match[2]) for match in found] if is_numbered else None


def _time(value: Any) -> datetime:
    found = datetime.fromisoformat(str(value).removesuffix(" UTC").replace(" +", "+").replace("/", "-"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _conversation_of(place: str, record: Record) -> Any:
    """Return the id of a message's conversation, or the place of its array. Return None if the record is no message.

    Raises:
        ValueError: the message has no conversation id and is not in an array, or has several ids.
    """
    if not _is_message(_flat(record)):
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
    rank=3,
    test=_has_known_role,
    join=conversations,
)
