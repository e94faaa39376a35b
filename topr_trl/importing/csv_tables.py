"""Read CSV and TSV files. Each row becomes a dictionary from column names to text."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_BETWEEN = re.compile(r"[,;\t|\r\n]")
_QUOTED = re.compile(r'(?<![^,;\t|\r\n])"(?:[^"]|"")*"')  # a quoted cell, with or without line breaks
_BLOCK = 16 << 20  # bytes; pyarrow cannot read a row that spans three blocks


def read_table(path: Path) -> Iterator[dict[str, str | None]]:
    """Yield each row of a file as a dictionary. The value of an empty cell is None.

    Args:
        path (`Path`): File with a header of column names. It may be compressed.

    Raises:
        ValueError: the file is empty, not a table or not UTF-8, or two of its columns have the same name.
        OSError: the file cannot be read or decompressed.
    """
    for batch in _batches(path):
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield {name: value or None for name, value in zip(batch.schema.names, values, strict=True)}


def count_rows(path: Path) -> int:
    """Return the number of rows of a file, without the header."""
    return sum(batch.num_rows for batch in _batches(path))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    names, delimiter = _header(path)
    options: dict[str, Any] = {
        "read_options": csv.ReadOptions(block_size=_BLOCK, use_threads=False),
        "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        "convert_options": csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    }
    try:
        with csv.open_csv(path, **options) as reader:
            yield from reader
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: BaseException) -> ValueError:
    why = " ".join(str(error).split()).rstrip(".")
    if "UTF8" in why or isinstance(error, UnicodeDecodeError):
        remedy = "Save it as UTF-8 (in Excel: CSV UTF-8)"
    elif "Expected" in why:
        remedy = (
            "Give each row as many cells as the header, and put text with a comma, a quote or a line break in double "
            "quotes"
        )
    else:
        remedy = "Fix the file"
    return ValueError(f"{path} cannot be read as a table: {why}. {remedy}, or write one JSON object per line.")


def _header(path: Path) -> tuple[list[str], str]:
    """Return the column names and the delimiter of a file."""
    with pa.input_stream(path) as file:
        first = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)  # UTF-8's byte order mark, which Excel writes
    if not first.strip():
        raise ValueError(f"{path} is empty: it has no header and no row.")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(
            f"{path} is UTF-16. Save it as UTF-8 (in Excel: CSV UTF-8), or write one JSON object per line."
        )
    text = _QUOTED.sub(lambda name: _BETWEEN.sub(" ", name[0]), first.decode("utf-8", "replace"))
    line = text.lstrip("\r\n").replace("\r", "\n").partition("\n")[0]  # pyarrow skips empty lines.
    delimiter = "\t" if ".tsv" in path.suffixes else max(_DELIMITERS, key=line.count)
    if not line.count(delimiter):
        raise ValueError(
            f"{path} has one column ({line[:60]!r}). A table needs a header with the names of at least two columns, "
            "and commas, semicolons or tabs between them."
        )
    options = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        with csv.open_csv(path, csv.ReadOptions(block_size=_BLOCK), options) as reader:
            names = reader.schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path} has two columns named {repeated[0]!r}. Rename one of them.")
    return names, delimiter
