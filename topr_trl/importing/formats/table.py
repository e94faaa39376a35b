"""Read tables with a prompt, a completion, and a score or label per row: CSV, TSV, JSON lines or parquet."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from topr_trl.data.rows import TURN_REWARDS
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import sampling_of
from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.field_names import COMPLETIONS, PROMPTS, REWARDS, Kind, kind_of, normalized
from topr_trl.importing.format import Choices, Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import (
    ROLES,
    check_only_text,
    check_roles,
    finish_reason,
    finish_reason_of,
    template_columns,
)
from topr_trl.importing.row_table import Row

_SYSTEM = ("system", "system_prompt", "system_message", "system_instruction")
# Columns that the import of a table cannot keep.
_OF_ROWS = (TURN_REWARDS, "completion_ids", "prompt_ids", "completion_mask", "sampler_logps", "mu_logps")
_MASKS = ("loss_mask", "response_mask")  # of slime and other trainers: 1 for each token that the model wrote
# Text with a list of objects that have roles holds messages. Other lists, such as an extracted table, remain text.
_OBJECTS, _ROLE = re.compile(r"\s*\[\s*\{\s*['\"]"), re.compile(r"['\"]role['\"]\s*:")


def column_of(record: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    """Return the name of the column with the prompt or the completion.

    If several columns match, return the column that comes first in `names`. Columns without a value come last, except
    the first of `names`, which a setting may have chosen. The import stops if a column that was not chosen has text
    that no row has (see `unread_text`).

    Args:
        record (`Mapping[str, Any]`): Record.
        names (`Sequence[str]`): Names to look for, as `normalized` returns them. The preferred name is first.
        what (`str`): Content of the column, `prompt` or `completion`, for error messages.

    Raises:
        NotOfFormat: no column has one of the names.
    """
    found = sorted(
        (name for name in record if normalized(name) in names), key=lambda name: names.index(normalized(name))
    )
    if not found:
        raise NotOfFormat(
            f"it has no column for the {what}; it has {', '.join(map(str, record))}. Set --{what}_field to the name of "
            "the column"
        )
    return next((name for name in found if name == names[0] or record[name] not in (None, "", [])), found[0])


def has_columns(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a column for the prompt and a column for the completion.

    Columns with objects are ignored, except a message with a `role`, and a response of OpenAI's API with `choices`.
    """
    columns = (
        name for name, value in record.items() if not isinstance(value, Mapping) or {"role", "choices"} & set(value)
    )
    names = set(map(normalized, columns))
    return bool(names & set(PROMPTS) and names & set(COMPLETIONS))


def plain(value: Any, name: str) -> Any:
    """Return text, messages or None. Convert a number to text, and parse text that looks like a JSON list of messages.

    Args:
        value (`Any`): Text, messages, a number, or None. NaN becomes None.
        name (`str`): Name of the column, for error messages.

    Raises:
        NotOfFormat: the text looks like messages and is not JSON, the value has any other type, or a message has no
            role.
        Unusable: a message has an unknown role, or cannot become text (see `content_blocks.messages_of`).
    """
    if isinstance(value, str) and _OBJECTS.match(value) and _ROLE.search(value):
        try:
            objects = json.loads(value)
        except (ValueError, RecursionError):
            raise NotOfFormat(f"its {name} looks like messages, and is not valid JSON ({value[:40]!r})") from None
        if any("role" in each for each in objects if isinstance(each, dict)):
            value = objects
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _text_of(value)
    if not isinstance(value, str | list | None) or (
        isinstance(value, list) and not all(isinstance(each, Mapping) for each in value)
    ):
        raise NotOfFormat(f"its {name} is {str(value)[:60]}, and must be text or messages")
    found = text_or_messages(value)
    check_roles(found)
    return found


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return a row for each completion. An empty completion gives None. Return [] if the prompt is empty.

    Return `[LeftOut.FAILED]` if a field such as `status` says that the call failed.

    Raises:
        NotOfFormat: the column of the prompt or of the completion is missing, `plain` cannot read the prompt or a
            completion, the system prompt may be a name, or the record has a column of `_OF_ROWS`.
        Unusable: the record has images, sounds or videos, a mask shows that the completion has text of others, `plain`
            cannot use a message, there are two system prompts, a finish reason is new, or the provider defines a tool.
    """
    if name := next((name for name in _OF_ROWS if record.get(name) is not None), None):
        raise NotOfFormat(
            f"it has a column {name}, so the file already holds rows. Give it to topr train as it is, without import "
            f"settings such as --chat, or set --ignore_fields {name}"
        )
    if is_failed(record):
        return [LeftOut.FAILED]
    check_only_text(record, "it")
    prompt_name, completion_name = columns_of(record)
    prompt, completions = plain(record[prompt_name], prompt_name), _completions(record[completion_name])
    if not prompt:
        return []
    if isinstance(record[completion_name], str):
        _check_masks(record)
    if system := system_of(record):
        prompt = with_system(prompt, system)
    answer = record.get("answer") if completion_name != "answer" else None
    reason_of_all = finish_reason_of(record)
    shared = {**template_columns(record), **sampling_of(record)}
    return [
        {
            "prompt": prompt, "completion": completion, "finish_reason": finish_reason(reason) or reason_of_all,
            "answer": _text_of(answer), **shared,
        } if (completion := plain(given, completion_name)) else None
        for given, reason in completions
    ]  # fmt: skip


def _check_masks(record: Record) -> None:
    """Check that no mask has a zero between ones. Zeros before and after them are a prompt and padding.

    Raises:
        Unusable: a mask has such a zero, so the text of the completion is not only the model's.
    """
    for name in _MASKS:
        mask = parsed_json(record.get(name))
        if isinstance(mask, list) and "0" in "".join("01"[bool(own)] for own in mask).strip("0"):
            raise Unusable(
                f"its {name} has zeros between ones, so the completion has text that the model did not write and would "
                f"learn. Write the completion as a list of messages, or set --ignore_fields {name}"
            )


def _text_of(value: Any) -> str | None:
    """Return a value as text. pandas stores empty cells as NaN, and then whole numbers of the column as floats."""
    if value is None or value != value:
        return None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def is_failed(record: Record) -> bool:
    """Return whether a field of a record, such as `status`, says that the call failed or was stopped.

    The status `failed` does not count, because it can be the grade of a completion.

    Args:
        record (`Record`): Record.
    """
    status = str(record.get("status") or "").lower()
    flags = ("is_error", "aborted", "interrupted", "cancelled")
    return status in ("error", "timeout", "cancelled", "aborted", "interrupted") or any(
        str(record.get(name)).lower() == "true" for name in flags
    )


_NAME = re.compile(r"[\w./:-]*\w", re.ASCII)  # a word; text in Chinese or Japanese has no spaces


def system_of(record: Record) -> str | None:
    """Return the system prompt in a field such as `system_prompt`. Return None if no such field has a value.

    Args:
        record (`Record`): Record.

    Raises:
        NotOfFormat: the field holds a single word such as `gpt-4`, which may be the name of a system.
    """
    name = next((name for name in record if normalized(name) in _SYSTEM and record[name]), None)
    if name is None:
        return None
    text = str(record[name])
    if _NAME.fullmatch(text.strip()):
        raise NotOfFormat(
            f"its {name} is {text[:40]!r}, which may be a name and no system prompt. To leave it out, set "
            f"--ignore_fields {name}. Otherwise, write the system prompt as the first message"
        )
    return text


def columns_of(record: Record) -> tuple[str, str]:
    """Return the names of the columns with the prompt and with the completion.

    Args:
        record (`Record`): Record.

    Raises:
        NotOfFormat: one of the two columns is missing.
    """
    return column_of(record, PROMPTS, "prompt"), column_of(record, COMPLETIONS, "completion")


def _completions(value: Any) -> list[tuple[Any, str | None]]:
    """Return each completion of a column with its finish reason, or with None if the column has no finish reason.

    A column can hold one completion, a list of texts, or a list of choices, an assistant message or a response of
    OpenAI's API. The message and the response can also be JSON text.
    """
    found = parsed_json(value)
    if isinstance(found, Mapping) and _is_choice(next(iter(found.get("choices") or ()), None)):
        return _completions(found["choices"])
    if isinstance(found, Mapping) and (_is_message(found) or value is found):
        return [([found], finish_reason_of(found))]
    if isinstance(value, list) and value and all(isinstance(each, str | None) for each in value):
        return [(each, None) for each in value]
    if isinstance(value, list) and value and all(map(_is_choice, value)):
        return [([each["message"]], each.get("finish_reason")) for each in value]
    return [(value, None)]


def _is_choice(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("message"), Mapping)


def _is_message(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat message, and not a model's own JSON."""
    return value.get("role") in ROLES and bool({"content", "tool_calls"} & set(value))


def choices(record: Record) -> Choices:
    """Return the rules for columns with text that no row has. See `Choices`."""
    _, completion = columns = columns_of(record)
    is_number = isinstance(record[completion], int | float)
    is_sure = kind_of((completion,)) is Kind.WRITTEN and not is_number
    return Choices(
        frozenset({Kind.WRITTEN} if is_sure else {Kind.WRITTEN, Kind.ANSWER, Kind.UNKNOWN}),
        frozenset({Kind.ASKED, Kind.UNKNOWN}),
        f"Another column, {completion}, was taken as the completion. Set --completion_field to one of {completion}, "
        "{names}",
        "To join it to the prompt, set --prompt_field {joined}. To read only one of them, set --prompt_field to its "
        "name",
        columns=columns,
        read=(completion,) if is_number else (),
        counts_numbers=True,
    )


def with_system(prompt: Any, system: str) -> Any:
    """Return a prompt as messages that start with a system prompt. A text becomes a user message.

    Raises:
        Unusable: the prompt already starts with a system message.
    """
    own = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if own and own[0]["role"] == "system":
        raise Unusable("its prompt starts with a system message, and another column has a system prompt, too")
    return text_or_messages([{"role": "system", "content": system}, *own])


def rewards(record: Record) -> dict[str, Any]:
    """Return the columns that may hold the reward. If there is a column `reward`, return only this column."""
    found = {name: value for name, value in record.items() if normalized(name) in REWARDS}
    exact = {name: value for name, value in found.items() if normalized(name) == REWARDS[0]}
    return exact or found


FORMAT = Format(
    source="tables with columns such as prompt, completion and rating",
    rank=5,
    test=has_columns,
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "finish_reason", "answer", "tools", "chat_template_kwargs", *SAMPLING),
    required=frozenset(),
    chat=True,
    choices=choices,
    loses="Most tables hold only text. They lack tool calls, the sampling temperature, and often the system prompt.",
)
