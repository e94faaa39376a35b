"""Read chat conversations: records such as `{"messages": [...], "tools": [...]}`."""

from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.importing.field_names import REWARDS, Kind, normalized, words_of
from topr_trl.importing.format import Choices, Format, NotOfFormat, Record
from topr_trl.importing.openai_messages import finish_reason_of, message, row_of_run, template_columns
from topr_trl.importing.prompt_tables import SYSTEM, with_system
from topr_trl.importing.row_table import Row

# Words of a field that names the rated message, such as `rated_message_id`. Other fields can name the next message.
_RATED_MESSAGE = {"message", "rated", "target", "feedback", "scored", "assistant", "response", "id", "index"}


def rows(record: Record) -> list[Row]:
    """Return one row of messages, or a row for each rated answer. Return [] if there is no turn to learn from.

    Raises:
        NotOfFormat: a message has no role, or see `rows_of_conversation`.
        Unusable: a message has an image, a part without text, or a weight other than 0 and 1.
    """
    messages = list(map(message, record["messages"]))
    return rows_of_conversation(record, record["messages"], messages, template_columns(record))


def rows_of_conversation(record: Record, given: list[Record], messages: list[Row], shared: Row) -> list[Row]:
    """Return the rows of a conversation. A system prompt beside the messages becomes the first message.

    A reward can belong to one answer: the record names the answer (`message_id`, `message_index`), or answers have
    ratings themselves. The row of such an answer ends with it, and all earlier messages are the prompt.

    Args:
        record (`Record`): Record.
        given (`list[Record]`): Messages of the record.
        messages (`list[Row]`): The same messages, as rows have them.
        shared (`Row`): Other columns of the rows.

    Raises:
        NotOfFormat: the record names a message that is not an answer of the model.
    """
    rated = _rated(record, given)
    if wrong := [n for n in rated if messages[n]["role"] != "assistant"]:
        raise NotOfFormat(
            f"its message {wrong[0]} is rated, and is from {messages[wrong[0]]['role']}, not the assistant"
        )
    system = next((record[name] for name in record if normalized(name) in SYSTEM and record[name]), None)
    if system and not (messages and messages[0]["role"] == "system"):
        messages, rated = with_system(messages, str(system)), [n + 1 for n in rated]
    shared = {**shared, "finish_reason": finish_reason_of({**given[-1], **record}) if given else None}
    if not rated:
        return row_of_run(messages, **shared)
    ends = [shared["finish_reason"] if n == len(messages) - 1 else None for n in rated]
    return [
        {**shared, "prompt": messages[:n], "completion": messages[n : n + 1], "finish_reason": end}
        for n, end in zip(rated, ends, strict=True)
    ]


def rewards(record: Record, messages: str = "messages") -> dict[str, Any]:
    """Return the field `reward`, or else the rating of each answer that has one.

    Args:
        record (`Record`): Record.
        messages (`str`, defaults to `"messages"`): Field with the messages.
    """
    if "reward" in record:
        return {"reward": record["reward"]}
    given = record[messages]
    ratings = [_rating(given[n]) for n in _rated(record, given)]
    return {"rating of a message": ratings} if any(each is not None for each in ratings) else {}


def _rated(record: Record, given: list[Record]) -> list[int]:
    """Return the index of each message to which a reward belongs. Return [] if rewards belong to the whole record."""
    named = {n for name, value in _references(record) if (n := _named_message(given, name, value)) is not None}
    if len(named) > 1:
        raise NotOfFormat(f"its fields name several messages ({', '.join(map(str, sorted(named)))}) as the rated one")
    own = [] if "reward" in record else [n for n, each in enumerate(given) if _rating(each) is not None]
    return sorted(named) or own


def _references(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that name a message, such as `meta.message_id`, without the fields of the messages."""
    for name, value in record.items():
        if isinstance(value, Mapping) and "role" not in value:
            yield from _references(value)
        elif {"message"} < {*words_of(name)} <= _RATED_MESSAGE and words_of(name)[-1] in ("id", "index"):
            yield name, value


def _named_message(messages: list[Record], name: str, value: Any) -> int | None:
    """Return the index of the message that a field names. Return None if the messages have no ids.

    Raises:
        NotOfFormat: there is no such message.
    """
    if words_of(name)[-1] == "id":
        ids = [each.get("id", each.get("message_id")) for each in messages]
        if value is None or not any(ids):
            return None
        if value in ids:
            return ids.index(value)
    elif value is None or (isinstance(value, int) and 0 <= value < len(messages)):
        return value
    raise NotOfFormat(
        f"its {name} is {value!r}, and none of its {len(messages)} messages has this {words_of(name)[-1]}"
    )


def _rating(given: Any) -> Any:
    """Return the rating in a message, such as `rating` or `feedback.rating`. Return None without a rating."""
    for name, value in given.items():
        if normalized(name) in REWARDS:
            if isinstance(value, Mapping):
                return _rating(value)
            if value is not None:
                return value
    return None


def choices(record: Record) -> Choices:
    """Return the ways to read fields with text that no row has. See `Choices`."""
    asked = record["messages"][-1]["role"] != "assistant"  # A record without messages has no rows.
    end = "The messages end with a turn of the user, so it may be the answer to them. " * asked
    return Choices(
        frozenset({Kind.WRITTEN, Kind.ANSWER, Kind.UNKNOWN} if asked else {Kind.WRITTEN}),
        frozenset({Kind.ASKED}),
        f"{end}To read it as the answer, set --prompt_field {{messages}} --completion_field {{fields}}. To learn from "
        "the messages alone, set --messages_field {messages}",
        "To keep it, add it to the messages in the file. To leave it out, set --messages_field {messages}",
    )


FORMAT = Format(
    source="lists of messages in OpenAI's format",
    suffix=".jsonl",
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "finish_reason", "tools", "chat_template_kwargs"),
    required=frozenset({"messages"}),
    optional=None,  # Logs have further fields, such as times and users.
    choices=choices,
    loses="The trainer learns from assistant turns, except turns with weight 0. User and tool turns "
    "between them are context.",
)
