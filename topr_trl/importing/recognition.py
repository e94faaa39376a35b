"""Recognize the format of a file from its first records."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from topr_trl.importing import FORMATS
from topr_trl.importing.formats.messages import messages_fields
from topr_trl.importing.input_settings import FORMAT_OF_SETTING, InputArguments
from topr_trl.importing.record_files import files_of, parsed, read_records
from topr_trl.importing.refused_formats import Refused, refused

_RECORDS = 20  # number of records to test
_BY_RANK = dict(sorted(FORMATS.items(), key=lambda item: item[1].rank))
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")


def format_of(record: Any) -> str | None:
    """Return the name of a record's format. Return None if the format is not recognized.

    Args:
        record (`Any`): Record.
    """
    if not isinstance(record, Mapping):
        return None
    return next((name for name, each in _BY_RANK.items() if each.test(dict(record))), None)


def recognize(file: Path) -> str:
    """Recognize the format of a file from its first records, and return its name.

    Args:
        file (`Path`): File.

    Raises:
        ValueError: the format is not recognized or not supported, or the first records have different formats.
    """
    seen = [parsed(raw) for _, raw in islice(read_records(file), _RECORDS)]
    records = [record for record in seen if record is not None]
    if unread := next(filter(None, map(refused, records)), None):
        raise ValueError(f"{file}: {explain(unread)}.")
    names = {format_of(record) for record in records}
    known = sorted(name for name in names if name is not None)
    if len(known) == 1:
        return known[0]
    if known:
        raise ValueError(
            f"{file} looks like {' and '.join(known)}. Set --format to one of them, or split the file by format."
        )
    raise ValueError(f"{file}: its format is not recognized: {_describe(file, seen, records)}")


def recognize_source(args: InputArguments, source: Path) -> str:
    """Return the name of the format of a file or folder, from the settings or from its first records.

    Args:
        args (`InputArguments`): Settings.
        source (`Path`): Folder or file that is imported.

    Raises:
        ValueError: the files are not found (see `files_of`), or their format is not recognized (see `recognize`).
    """
    named = (format for name, format in FORMAT_OF_SETTING.items() if getattr(args, name))
    return next(named, None) or recognize(files_of(source)[0])


def explain(found: Refused) -> str:
    """Return a description of a file that the import does not read, with the advice for the user."""
    return f"it looks like {found.name}. {found.advice}"


def _describe(file: Path, seen: list[Any], records: list[Any]) -> str:
    if file.suffix.lower() in _SPREADSHEETS:
        return "it is a spreadsheet. Save it as CSV (in Excel: CSV UTF-8)."
    if not seen:
        return "it has no record."
    if not records:
        return (
            "none of its first lines is JSON. If it is a table, rename it to .csv or .tsv. Otherwise, write one JSON "
            "object per line."
        )
    if not isinstance(records[0], Mapping):
        found = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(type(records[0]), "a number")
        return f"its first record is {found}, and must be a JSON object."
    fields = messages_fields(records[0])
    if len(fields) > 1:
        return f"{', '.join(fields)} may all hold its messages. Set --messages_field to one of them."
    if {"custom_id", "url", "body"} <= set(records[0]):
        return "it is the input file of a batch. Import the output file of the batch, and set --requests to this file."
    header = " Its first line must name the columns." if file.suffix.lower() in (".csv", ".tsv") else ""
    return (
        f"its records have the fields {', '.join(map(str, records[0]))}.{header} If two of them hold a prompt and a "
        "completion, set --prompt_field and --completion_field to their names. Otherwise, set --format to one of "
        f"{', '.join(FORMATS)}."
    )
