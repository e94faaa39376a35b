"""Find text of a record that no row has, and tell whether it may be the completion or a part of the prompt."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from topr_trl.importing.field_names import Kind, kind_of
from topr_trl.importing.format import Choices, NotOfFormat, Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.row_table import Row

_LONG = 16  # characters; shorter text can occur in a row by chance
_WORDS_OF_PROSE = 4
_TOKENS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")  # long lists without text of their own
_ASSISTANT = ("assistant", "model", "ai", "bot", "gpt")


class Unread(NamedTuple):
    """Names of fields with text that no row has.

    Attributes:
        completions (`list[str]`): Fields that may hold the completion.
        prompts (`list[str]`): Fields that may be a part of the prompt.
        others (`list[str]`): Other fields at the top of the record.
    """

    completions: list[str]
    prompts: list[str]
    others: list[str]


class _Text(NamedTuple):
    """Text in a record, with the path and the kind of its field.

    `name` is the path up to the first list of objects, with dots, as settings such as `--completion_field` take it.
    """

    path: tuple[str, ...]
    name: str
    text: str
    kind: Kind


def find_unread(record: Record, rows: Sequence[Row], read: Collection[str], choices: Choices) -> Unread:
    """Return the fields of a record that have text which no row has.

    A short text counts as read if it equals a text of the rows, and a longer one if a text of the rows contains it. A
    text that contains a prompt and its completion counts as read, too.

    Args:
        record (`Record`): Record.
        rows (`Sequence[Row]`): Rows of the record.
        read (`Collection[str]`): Paths of fields that settings name. They count as read.
        choices (`Choices`): Kinds of fields that may hold the completion or a part of the prompt.
    """
    texts = [{_plain(text) for text in _texts_of(row)} for row in rows]
    exact, pairs = set().union(*texts), [_ends_of(row) for row in rows]
    everything = "\n".join(exact)
    found = Unread([], [], [])
    for each in _texts_in(record):
        name = each.name
        if any(name == path or name.startswith(f"{path}.") for path in read):
            continue
        is_top = len(each.path) == 1
        if (not is_top and each.kind in (Kind.ABOUT, Kind.UNKNOWN)) or _is_read(each, exact, everything):
            continue
        if any(prompt in each.text and completion in each.text for prompt, completion in pairs):
            continue
        is_prose = len(each.text.split()) >= _WORDS_OF_PROSE
        if each.kind in choices.completions:
            found.completions.append(name)
        elif each.kind in choices.prompts and (each.kind is not Kind.UNKNOWN or is_prose):
            found.prompts.append(name)
        elif is_top:
            found.others.append(name)
    return Unread(*(list(dict.fromkeys(names)) for names in found))


def check_unread(unread: Unread, choices: Choices, messages: str) -> None:
    """Check that no field with unread text may hold the completion or a part of the prompt.

    Args:
        unread (`Unread`): Fields with unread text. A setting that names the field of the completion or of the prompt
            answers the question: then the list is empty.
        choices (`Choices`): Remedies.
        messages (`str`): Field with the messages, for the remedies.

    Raises:
        NotOfFormat: there is such a field.
    """
    questions = (
        (unread.completions, "the completion", choices.completion),
        (unread.prompts, "a part of the prompt", choices.prompt),
    )
    for names, what, remedy in questions:
        if names:
            listed = ", ".join(names)
            advice = remedy.format(names=listed, fields=" ".join(names), messages=messages)
            raise NotOfFormat(f"the text of {listed} is in no row, and may be {what}. {advice}")


def _is_read(given: _Text, exact: Collection[str], everything: str) -> bool:
    text = _plain(given.text)
    if not text or text in exact:
        return True
    if (len(text) < _LONG and given.kind is not Kind.ASKED) or text not in everything:
        return False
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", everything) is not None


def _ends_of(row: Row) -> tuple[str, str]:
    """Return the last text of a row's prompt and the last text of its completion."""
    ends = []
    for name in ("prompt", "completion"):
        value = row.get(name)
        ends.append(str(value[-1].get("content") or "") if isinstance(value, list) and value else str(value or ""))
    return ends[0] or "\0", ends[1] or "\0"  # No text contains a null character.


def _plain(text: str) -> str:
    """Return text with single spaces, because formats change white space."""
    return " ".join(text.split())


def _texts_of(row: Row) -> Iterator[str]:
    """Yield each text of a row. Text prompts and completions are also joined, because a record may have both in one."""
    yield from (each.text for name, value in row.items() for each in _texts_in({name: value}))
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        yield row["prompt"] + row["completion"]


def _texts_in(
    value: Any, path: tuple[str, ...] = (), kind: Kind | None = None, name: str | None = None
) -> Iterator[_Text]:
    """Yield each text in a value. The role of a message gives the kind of its content."""
    value = parsed_json(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and len(path) == 1:
        if kind_of(path) in (Kind.WRITTEN, Kind.ANSWER, Kind.ASKED):
            yield _Text(path, path[0], str(value), kind_of(path))
    elif isinstance(value, str):
        own = kind_of(path)
        yield _Text(path, name or ".".join(path), value, own if kind is None or own is Kind.ABOUT else kind)
    elif isinstance(value, Mapping):
        said = None
        if isinstance(role := value.get("role"), str):
            said = Kind.WRITTEN if role in _ASSISTANT else Kind.ASKED
        for key, inner in value.items():
            if key in _TOKENS:
                continue
            yield from _texts_in(_joined(inner) if said else inner, (*path, str(key)), said or kind, name)
    elif isinstance(value, list | tuple):
        for inner in () if value and isinstance(value[0], int | float) else value:
            yield from _texts_in(inner, path, kind, name or ".".join(path))


def _joined(content: Any) -> Any:
    """Return the content of a message as one text if it is a list of parts with text."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) and "text" in part for part in content):
        return content
    return "".join(str(part["text"]) for part in content)
