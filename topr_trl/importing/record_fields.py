"""Find fields of a record by name or path, and rename the fields that the user chose."""

from typing import Any

from topr_trl.importing.format import NotOfFormat, Record
from topr_trl.importing.message_parts import parsed_json


def field_value(record: Record, path: str, error: type[NotOfFormat]) -> Any:
    """Return the value of a field, or of an inner field such as `info.score`.

    Args:
        record (`Record`): Record.
        path (`str`): Name of the field. The path of an inner field has dots between the names, from outer to inner. A
            number selects an item of a list, counted from 0.
        error (`type[NotOfFormat]`): Error to raise if the record lacks the field.
    """
    if path in record:  # A column's own name can have a dot.
        return record[path]
    value: Any = record
    for name in path.split("."):
        value = parsed_json(value)
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise error(f"it has no field {path}; it has {', '.join(sorted(map(str, record)))}")
    return value


def with_named_fields(record: Record, prompt_fields: list[str] | None, completion_field: str | None) -> Record:
    """Give the names `prompt` and `completion` to the fields that the user chose.

    A renamed field replaces a field that already has the new name.

    Args:
        record (`Record`): Record.
        prompt_fields (`list[str]` or `None`): Fields with the parts of the prompt, joined with empty lines.
        completion_field (`str` or `None`): Field with the completion.

    Raises:
        NotOfFormat: the record lacks one of these fields, or a field to join is not text.
    """
    given = {"prompt": prompt_fields, "completion": completion_field and [completion_field]}
    columns = {name: list(paths) for name, paths in given.items() if paths}
    renamed = {name: _joined([field_value(record, path, NotOfFormat) for path in paths], paths)
               for name, paths in columns.items()}  # fmt: skip
    gone = {*columns, *(path for paths in columns.values() for path in paths)}
    return {**renamed, **{name: value for name, value in record.items() if name not in gone}}


def _joined(values: list[Any], names: list[str]) -> Any:
    """Return a single value unchanged. Join several texts with empty lines, without empty ones.

    Raises:
        NotOfFormat: one of several values is neither text nor a list of texts.
    """
    if len(values) == 1:
        return values[0]
    texts = list[str]()
    for name, value in zip(names, values, strict=True):
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | int | float | None) for part in parts):
            raise NotOfFormat(f"its {name} is {str(value)[:60]}, and only text can be joined in --prompt_field")
        texts += [str(part) for part in parts if part not in (None, "") and part == part]  # NaN is unlike itself.
    return "\n\n".join(texts)
