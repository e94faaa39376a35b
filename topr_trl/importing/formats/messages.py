"""Read chat conversations: records such as `{"messages": [...], "tools": [...]}`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from topr_trl.data.chat_templates import is_learned
from topr_trl.importing.completions import holds_completion
from topr_trl.importing.content_blocks import messages_of
from topr_trl.importing.field_names import COMPLETIONS, PROMPTS, REWARDS, Kind, normalized, words_of
from topr_trl.importing.format import Choices, Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.formats.table import columns_of, has_columns, is_failed, system_of, with_system
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import (
    ROLE_NAMES,
    check_only_text,
    check_roles,
    finish_reason_of,
    row_of_run,
    template_columns,
    with_role,
)
from topr_trl.importing.rated_turns import RATED
from topr_trl.importing.row_table import Row


def rows(record: Record, rated: Sequence[int] | None = None) -> list[Row | LeftOut]:
    """Return one row of messages, or a row for each rated answer. Return [] if there is no turn to learn from.

    Return `[LeftOut.FAILED]` if a field such as `status` says that the call failed.

    Raises:
        NotOfFormat: a message has no role, or see `rows_of_conversation`.
        Unusable: a message cannot be used (see `content_blocks.messages_of` and `openai_messages.message`), the
            provider defines a tool, or see `rows_of_conversation`.
    """
    if is_failed(record):
        return [LeftOut.FAILED]
    given = parsed_json(record["messages"]) or []
    return [*rows_of_conversation(record, given, list(map(messages_of, given)), template_columns(record), rated)]


def rows_of_conversation(
    record: Record, given: list[Record], turns: list[list[Row]], shared: Row, rated: Sequence[int] | None
) -> list[Row]:
    """Return the rows of a conversation. Return [] if there is no turn to learn from, or one of them is empty.

    A system prompt beside the messages becomes the first message, unless the messages start with a system message.

    A reward can belong to one answer: the record names the answer (`message_id`, `message_index`), the answer has a
    rating, or a setting names this rating. The row of a rated answer ends with this answer, and all earlier messages
    are the prompt.

    Args:
        record (`Record`): Record.
        given (`list[Record]`): Messages of the record.
        turns (`list[list[Row]]`): Messages of a row for each message in `given`. A message with tool results can become
            several messages.
        shared (`Row`): Other columns of the rows.
        rated (`Sequence[int]` or `None`): Indices of the messages in `given` whose ratings `--reward_fields` names.
            None if no setting defines the reward. See `Format.messages`.

    Raises:
        NotOfFormat: the rated message is not an answer of the model, a field such as `message_id` or `turn_index` may
            name a message, and which message is not known, fields name different messages, a message has several
            ratings, or the system prompt may be the name of a system.
        Unusable: the record has images, sounds or videos beside the messages, the messages are not one chat, a role is
            unknown, or the finish reason is unknown.
    """
    check_only_text(record, "it")
    _check_one_chat(given)
    ends = list(accumulate(map(len, turns)))
    messages, rated = list(chain.from_iterable(turns)), [ends[n] - 1 for n in _rated(record, given, rated)]
    check_roles(messages)
    if wrong := [n for n in rated if messages[n]["role"] != "assistant"]:
        raise NotOfFormat(
            f"its message {wrong[0]} is rated, and is from {messages[wrong[0]]['role']}, not the assistant"
        )
    system = system_of(record)
    if system and not (messages and messages[0]["role"] == "system"):
        messages, rated = with_system(messages, str(system)), [n + 1 for n in rated]
    shared = {**shared, "finish_reason": finish_reason_of({**given[-1], **record}) if given else None}
    if not rated:
        found = row_of_run(messages, **shared)
        learned = [{"completion": [turn]} for row in found for turn in row["completion"] if is_learned(turn)]
        return found if all(map(holds_completion, learned)) else []
    reasons = [shared["finish_reason"] if n == len(messages) - 1 else None for n in rated]
    return [
        {**shared, "prompt": messages[:n], "completion": messages[n : n + 1], "finish_reason": reason, RATED: True}
        for n, reason in zip(rated, reasons, strict=True)
    ]


def _check_one_chat(given: list[Record]) -> None:
    """Check that messages come from one chat, and that no message is another version of an earlier message.

    Raises:
        Unusable: the ids of chats differ, or the parent of a message is not the message before it.
    """
    ids = {str(each[key]): n for n, each in enumerate(given) for key in _IDS if each.get(key) is not None}
    is_result = [ROLE_NAMES.get(str(each.get("role") or each.get("from")).lower()) == "tool" for each in given]
    for name in dict.fromkeys(chain.from_iterable(given)):
        if (key := normalized(name).replace("_", "")) in ("parent", "parentid"):
            parents = [ids.get(str(each.get(name)), n - 1) for n, each in enumerate(given)]
            # Results of tools can have the same parent, or no place in the tree.
            is_one = all(parent < n and all(is_result[parent + 1 : n]) for n, parent in enumerate(parents))
        else:
            is_one = key not in _CHATS or len({str(each.get(name) or "") for each in given} - {""}) < 2
        if not is_one:
            raise Unusable(f"its messages are several chats or branches, see {name}. Write a record for each of them")


_CHATS = ("sessionid", "topicid", "convid", "conversationid", "chatid", "threadid")


def rewards(record: Record, messages: str = "messages") -> dict[str, Any]:
    """Return the field `reward`. Without this field, return the ratings of answers, or {} if there are none.

    In addition to ratings, return fields of the record that may be the reward, so that the user must choose.

    Args:
        record (`Record`): Record.
        messages (`str`, defaults to `"messages"`): Field with the messages.
    """
    if "reward" in record:
        return {"reward": record["reward"]}
    given = parsed_json(record[messages])
    ratings = [_rating(given[n]) for n in _rated(record, given, None)]
    if all(each is None for each in ratings):
        return {}
    beside = {name: value for name, value in record.items() if normalized(name) in REWARDS}
    return {"rating of a message": ratings, **beside}


def _rated(record: Record, given: list[Record], by_settings: Sequence[int] | None) -> list[int]:
    """Return the index of each message to which a reward belongs. Return [] if rewards belong to the whole record.

    Ratings in messages count only if the record has no `reward`, no field of the record names the rated message, and
    no setting defines the reward. Ratings of messages that are not answers count only if no answer has a rating, and
    never if they are 0 or false.

    Args:
        record (`Record`): Record.
        given (`list[Record]`): Messages of the record.
        by_settings (`Sequence[int]` or `None`): See `rated` in `rows_of_conversation`.

    Raises:
        NotOfFormat: fields name different messages, a message has several ratings, or see `_named_message`.
    """
    references = {path: _named_message(given, path, *field) for path, *field in _references(record)}
    named = {path: n for path, n in references.items() if n is not None}
    for n in by_settings or ():
        if n < len(given):  # Otherwise, the record has no reward.
            named["--reward_fields"] = n
    if len(set(named.values())) > 1:
        raise NotOfFormat(
            f"its fields {', '.join(named)} name different messages as the rated one. Set --ignore_fields to the "
            "fields that do not name it, or keep one of them in the file"
        )
    if named or by_settings is not None or "reward" in record:
        return sorted(set(named.values()))
    rated = [n for n, each in enumerate(given) if _rating(each) not in (None, "")]
    own = [n for n in rated if messages_of(given[n])[-1]["role"] == "assistant"]
    return own or [n for n in rated if _rating(given[n])]


def _references(value: Any, inside: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the name and the value of each field that may name a message, such as `message_id` inside `meta`.

    Fields of the messages themselves are skipped. `inside` is the start of the paths.
    """
    if isinstance(value, list):
        for n, each in enumerate(value):
            yield from _references(each, f"{inside}{n}.") if isinstance(each, Mapping) else ()
    elif isinstance(value, Mapping) and not {"role", "from"} & set(value):
        for name, inner in value.items():
            if isinstance(inner, Mapping | list):
                yield from _references(inner, f"{inside}{name}.")
            elif inner is not None and not _OTHER_MESSAGE & {*words_of(name)}:
                yield f"{inside}{name}", name, inner


def _named_message(messages: list[Record], path: str, name: str, value: Any) -> int | None:
    """Return the index of the message that a field names by the message's id or index. Return None for other fields.

    Raises:
        NotOfFormat: a field such as `message_id` matches no message or several messages, or a field such as
            `turn_index` may count turns.
    """
    words = words_of(name)
    ids = [[str(each[key]) for key in _IDS if each.get(key) is not None] for each in messages]
    matches = [str(value) in each for each in ids]
    is_index = words[-1:] in (["index"], ["idx"], ["position"])
    # A value can equal an id by chance, so the name of the field must also refer to a message.
    may_match = "message" in words or (bool({*words[-1:]} & _RATED_MESSAGE) and not str(value).isdigit())
    if not is_index and matches.count(True) == 1 and may_match:
        return matches.index(True)
    if is_index and "message" in words and re.fullmatch(r"-?\d+", str(value)):
        if -len(messages) <= int(value) < len(messages):
            return int(value) % len(messages)
    else:
        names_message = {"message"} < {*words} <= _RATED_MESSAGE and any(ids)
        names_turn = bool({"turn", "rated", "message"} & {*words}) and words[-1] in _NUMBERED and len(messages) > 2
        if not (names_message or names_turn):
            return None
    raise NotOfFormat(
        f"its {path} is {value!r}, and may name the rated one of its {len(messages)} messages. Write message_index, "
        f"counted from 0, or set --ignore_fields {path}"
    )


_NUMBERED = ("id", "index", "idx", "number", "position", "round")  # last words of a field that may name a turn
_IDS = ("id", "message_id", "messageId", "uuid", "run_id")
# Words of a field that names the rated message, such as `rated_message_id`.
_RATED_MESSAGE = {"message", "rated", "target", "feedback", "scored", "assistant", "response", "id", "uuid", "index"}
# Words of a field that names a message other than the rated message, such as `parent_id`.
_OTHER_MESSAGE = {"parent", "current", "last", "first", "next", "previous", "child", "children", "reply", "root"}


def _rating(given: Any) -> Any:
    """Return the rating in a message, such as `rating` or `feedback.rating`. Return None without a rating.

    Raises:
        NotOfFormat: a message has several ratings.
    """
    found = {name: value for name, value in given.items() if normalized(name) in REWARDS and value is not None}
    if len(found) > 1:
        raise NotOfFormat(f"{', '.join(found)} of a message may all be its rating. Keep one of them in the file")
    value = next(iter(found.values()), None)
    return _rating(value) if isinstance(value, Mapping) else value


def choices(record: Record, messages: str = "messages") -> Choices:
    """Return the rules for fields with text that no row has. See `Choices`.

    Args:
        record (`Record`): Record that gives at least one row.
        messages (`str`, defaults to `"messages"`): Field with the messages.
    """
    last = messages_of(parsed_json(record[messages])[-1])[-1]
    field = messages if messages != "messages" else "{messages}"
    beside = {name: value for name, value in record.items() if not isinstance(parsed_json(value), list)}
    names = columns_of(beside) if has_columns(beside) else None
    if names and str(record[names[1]]).strip() != str(last["content"]).strip():
        asked, setting = True, f"--prompt_field {field} {names[0]} --completion_field {names[1]}"
        end = f"To read the messages as the history of {names[0]}, set {setting}"
    else:
        asked = last["role"] != "assistant"
        end = "The messages end with a turn of the user, so it may be the answer to them. " * asked
        end += "To read it as the answer, set --prompt_field " + field + " --completion_field {fields}"
    alone = f"To learn from the messages alone, set --messages_field {field}"
    return Choices(
        frozenset({Kind.WRITTEN, Kind.ANSWER, Kind.UNKNOWN} if asked else {Kind.WRITTEN}),
        frozenset({Kind.ASKED}),
        f"{end}. {alone}",
        f"To keep it, add it to the messages in the file. {alone}",
        read=(messages,),
        has_answer=not asked,
        counts_numbers=asked,
    )


def messages_fields(record: Any, inside: str = "") -> list[str]:
    """Return the names of the fields of a record that hold chat messages, such as `history` or `run.messages`.

    Names have at most three parts, such as `log.run.messages`. If a record has a column for the prompt and a column for
    the completion, a column that holds only the prompt or only the completion is left out.

    Args:
        record (`Any`): Record.
        inside (`str`, *optional*): Prefix of the names, for fields of an inner record.
    """
    if not isinstance(record, Mapping):
        return []
    found = []
    for name, value in record.items():
        value = parsed_json(value)
        if is_chat_messages(value) and not (has_columns(record) and _is_part(name, value)):
            found.append(f"{inside}{name}")
        elif isinstance(value, Mapping) and inside.count(".") < 2:
            found += messages_fields(value, f"{inside}{name}.")
    return found


def _is_part(name: str, messages: list[Record]) -> bool:
    """Return whether a column of a table holds only the prompt or only the completion."""
    column = normalized(name)
    return column in PROMPTS or (column in COMPLETIONS and with_role(messages[0])["role"] in ("assistant", "ai"))


def is_chat_messages(value: Any) -> bool:
    """Return whether a value is a list of messages with roles, including an assistant message."""
    messages = [with_role(each) for each in value] if isinstance(value, list) else []
    if not all(isinstance(each, Mapping) and "role" in each for each in messages):
        return False
    return any(ROLE_NAMES.get(str(each["role"]).lower()) == "assistant" for each in messages)


FORMAT = Format(
    source="lists of messages in OpenAI's format",
    rank=4,
    test=lambda record: len(messages_fields(record)) == 1 or is_chat_messages(record.get("messages")),
    rows=rows,
    messages="messages",
    find_messages=messages_fields,
    rewards=rewards,
    rates_turns=True,
    columns=("problem_id", "finish_reason", "tools", "chat_template_kwargs"),
    required=frozenset({"messages"}),
    choices=choices,
    loses="The trainer learns from assistant turns, except turns with weight 0. User and tool turns "
    "between them are context.",
)
