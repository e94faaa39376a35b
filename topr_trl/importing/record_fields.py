"""Find fields of a record by name or path, and rename the fields that the user chose."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from topr_trl.importing.format import NotOfFormat, Record
from topr_trl.importing.message_parts import is_messages, parsed_json


def field_value(record: Record, path: str, error: type[NotOfFormat]) -> Any:
    """Return the value of a field, or of an inner field such as `info.score`.

    Args:
        record (`Record`): Record.
        path (`str`): Name of the field. The path of an inner field has dots between the names, from outer to inner. A
            name can itself have dots. A number selects an item of a list, counted from 0.
        error (`type[NotOfFormat]`): Error to raise if the record lacks the field.
    """
    for value in _values_at(record, path):
        return value
    raise error(_missing(path, tuple(sorted(map(str, record)))))


@lru_cache  # Millions of records can lack the same field.
def _missing(path: str, names: tuple[str, ...]) -> str:
    similar = [f" (did you mean {name}?)" for name in get_close_matches(path, names, 1)]
    return f"it has no field {path}{''.join(similar)}; it has {', '.join(names)}"


def _values_at(value: Any, path: str) -> Iterator[Any]:
    """Yield the value at a path for each way to divide the path into names, because names can have dots."""
    value = parsed_json(value)
    fields = {str(n): each for n, each in enumerate(value)} if isinstance(value, list) else value
    if not isinstance(fields, Mapping):
        return
    if path in fields:
        yield fields[path]
    for n, character in enumerate(path):
        if character == "." and (name := path[:n]) in fields:
            yield from _values_at(fields[name], path[n + 1 :])


def inner_value(value: Any, *path: str) -> Any:
    """Return the value of an inner field. Return None if a field is missing.

    Args:
        value (`Any`): Record.
        *path (`str`): Names of the fields, from outer to inner.
    """
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def value_at(record: Any, *paths: str) -> Any:
    """Return the value of the first path that has one, with JSON text parsed. Return None if no path has a value.

    Args:
        record (`Any`): Record.
        *paths (`str`): Names with dots between them, from outer to inner. A name can itself have dots, as in
            `attributes.gen_ai.input.messages`.
    """
    return parsed_json(raw_value_at(record, *paths))


def raw_value_at(record: Any, *paths: str) -> Any:
    """Return the value of the first path that has one, without parsing it. See `value_at`."""
    found = (value for path in paths for value in _values_at(record, path))
    return next((value for value in found if value is not None), None)


def listed(record: Record, *names: str) -> list[Any]:
    """Return the first list in the given fields. If no field has a list, return the record itself in a list.

    Args:
        record (`Record`): Single record, or an object with a list of records, such as a page of an export.
        *names (`str`): Fields that can hold the list.
    """
    return next((record[name] for name in names if isinstance(record.get(name), list)), [record])


def first_listed(record: Record, *names: str) -> Record:
    """Return the first record in the first list of the given fields, see `listed`. Return {} if it is not an object."""
    first = next(iter(listed(record, *names)), None)
    return dict(first) if isinstance(first, Mapping) else {}


def rewards_in(field: str) -> Callable[[Record], dict[str, Any]]:
    """Return a function for `Format.rewards` that reads the rewards, by name, from a field of a record.

    Args:
        field (`str`): Name of the field. The reward `x` in the field `scores` has the name `scores.x`.
    """
    return lambda record: {f"{field}.{name}": value for name, value in record[field].items()}


@dataclass(frozen=True)
class DifferentRatings:
    """Ratings with the same name and different values. `RecordRewards` raises an error if a reward has this type.

    Attributes:
        name (`str`): Name of the ratings.
        values (`tuple[Any, Any]`): First value, and first different value.
    """

    name: str
    values: tuple[Any, Any]


def values_by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dictionary of ratings by their names, without ratings that are None.

    Equal ratings with the same name are one rating. Different ratings with the same name become `DifferentRatings`.

    Args:
        pairs (`Iterable[tuple[str, Any]]`): Name and value of each rating.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if value is None or isinstance(first := found.setdefault(name, value), DifferentRatings):
            continue
        if first != value:
            found[name] = DifferentRatings(name, (first, value))
    return found


def with_named_fields(record: Record, prompt_fields: list[str] | None, completion_field: str | None) -> Record:
    """Give the names `prompt` and `completion` to the fields that the user chose.

    A renamed field replaces a field that already has the new name.

    Args:
        record (`Record`): Record.
        prompt_fields (`list[str]` or `None`): Fields with the parts of the prompt: texts or messages.
        completion_field (`str` or `None`): Field with the completion.

    Raises:
        NotOfFormat: the record lacks one of these fields, or a field to join cannot become text or messages.
    """
    given = {"prompt": prompt_fields, "completion": completion_field and [completion_field]}
    columns = {name: list(paths) for name, paths in given.items() if paths}
    renamed = {name: _joined([field_value(record, path, NotOfFormat) for path in paths], paths)
               for name, paths in columns.items()}  # fmt: skip
    gone = {*columns, *(path for paths in columns.values() for path in paths)}
    return {**renamed, **{name: value for name, value in record.items() if name not in gone}}


def _joined(values: list[Any], names: list[str]) -> Any:
    """Return a single value unchanged. Join several texts into one text, with blank lines between them.

    If one of the values has messages, join all values into a list of messages: each text becomes a user message. A list
    of texts counts as one text, and an object without inner objects as a text with a line for each field. Each pair in
    a list of pairs such as `[question, answer]` becomes two messages. Empty values are left out.

    Raises:
        NotOfFormat: a value cannot become text or messages.
    """
    if len(values) == 1:
        return values[0]
    parts = [_as_part(name, parsed_json(value)) for name, value in zip(names, values, strict=True)]
    if not any(isinstance(part, list) for part in parts):
        return "\n\n".join(str(part) for part in parts if part)
    messages = [part if isinstance(part, list) else [{"role": "user", "content": part}] for part in parts if part]
    return [message for part in messages for message in part]


def _as_part(name: str, value: Any) -> str | list[Any]:
    """Return a part of a prompt as text or messages."""
    if value is None or value != value:  # NaN differs from itself.
        return ""
    if isinstance(value, Mapping) and all(isinstance(each, str | int | float | None) for each in value.values()):
        return "\n".join(f"{key}: {each}" for key, each in value.items() if each not in (None, ""))
    if not isinstance(value, list):
        return _as_text(name, value)
    if is_messages(value):
        return value
    if value and all(isinstance(each, list) and len(each) == 2 for each in value):
        roles = ("user", "assistant")
        return [
            {"role": role, "content": text} for pair in value for role, text in zip(roles, pair, strict=True) if text
        ]
    return "\n\n".join(_as_text(name, each) for each in value)


def _as_text(name: str, value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise NotOfFormat(f"its {name} is {str(value)[:60]}, and only text and messages can be joined")
    return str(value)


def without_fields(record: Record, paths: Collection[str]) -> Record:
    """Return a record without the given fields.

    Args:
        record (`Record`): Record.
        paths (`Collection[str]`): Names of fields, or paths of inner fields such as `meta.message_id`.
    """
    inner = {path.partition(".")[0] for path in paths if "." in path and path not in record}
    found = {name: value for name, value in record.items() if name not in paths}
    for name in inner & set(found):
        if isinstance(value := parsed_json(found[name]), Mapping):
            below = [path.partition(".")[2] for path in paths if path.startswith(f"{name}.")]
            found[name] = without_fields(dict(value), below)
    return found
