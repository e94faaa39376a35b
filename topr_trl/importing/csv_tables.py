"""Read CSV and TSV files. Each row becomes a dictionary from column names to text."""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_BETWEEN = re.compile(r"[,;\t|\r\n]")
_QUOTED = re.compile(r'(?<![^,;\t|\r\n])"(?:[^"]|"")*"')  # a quoted cell, with or without line breaks
_LONGEST = 32 << 20  # characters of a line or a cell; a small file can unpack to more than the memory
_SEPARATOR = "sep="  # start of the line in which Excel writes the delimiter, above the header


def read_table(path: Path) -> Iterator[dict[str, str | None]]:
    """Yield each row of a file as a dictionary. The value of an empty cell is None.

    Args:
        path (`Path`): File with a header of column names. It may be compressed.

    Raises:
        ValueError: the file is empty, not a table or not UTF-8, two of its columns have the same name, or a row has
            too few or too many cells, or quotes that do not match.
        OSError: the file cannot be read or decompressed.
    """
    rows = _rows(path)
    names = next(rows, [])
    for row in rows:
        yield {name: value or None for name, value in zip(names, row, strict=True)}


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the names of the columns, and then the cells of each row. Empty lines are skipped."""
    delimiter, has_separator = _delimiter(path)
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST))
    reader = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1  # number of the row's first line
    try:
        for row in reader:
            if has_separator and row:
                has_separator = False
            elif row:
                if not names:
                    names = row
                    _check_names(path, names)
                if len(row) != len(names):
                    raise ValueError(
                        f"{path} cannot be read as a table: line {line:,} has {len(row)} cells, and the header has "
                        f"{len(names)} columns. Give each row as many cells as the header, put text with a comma, a "
                        "quote or a line break in double quotes, delete lines above the header, or write one JSON "
                        "object per line."
                    )
                yield row
            line = reader.line_num + 1
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not UTF-8. Save it as UTF-8 (in Excel: CSV UTF-8), or write one JSON object per line."
        ) from None
    except csv.Error as error:
        raise ValueError(
            f"{path} cannot be read as a table: in line {line:,}, a cell starts with a double quote, and its end is "
            f"not clear ({error}, line {reader.line_num:,}). Start and end the cell with a double quote, and write "
            'each quote inside it twice ("say ""hi"""), or write one JSON object per line.'
        ) from None


def _lines(path: Path) -> Iterator[str]:
    with io.TextIOWrapper(io.BufferedReader(pa.input_stream(path)), "utf-8-sig", newline="") as file:
        while line := file.readline(_LONGEST + 1):
            if len(line) > _LONGEST:
                raise ValueError(f"{path} has a line of more than {_LONGEST:,} characters. Leave it out.")
            yield line


def _check_names(path: Path, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated[:1] == [""]:
        raise ValueError(
            f"{path} has columns without a name: its header is {str(names)[:60]}. If this line is a title, delete it. "
            "Otherwise, name all columns."
        )
    if repeated:
        raise ValueError(f"{path} has two columns named {repeated[0]!r}. Rename one of them.")


def _delimiter(path: Path) -> tuple[str, bool]:
    """Return the delimiter of a file, and whether a line above the header gives it."""
    with pa.input_stream(path) as file:
        first = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)  # UTF-8's byte order mark, which Excel writes
    if not first.strip():
        raise ValueError(f"{path} is empty: it has no header and no row.")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(
            f"{path} is UTF-16. Save it as UTF-8 (in Excel: CSV UTF-8), or write one JSON object per line."
        )
    text = _QUOTED.sub(lambda name: _BETWEEN.sub(" ", name[0]), first.decode("utf-8", "replace"))
    line = text.lstrip("\r\n").replace("\r", "\n").partition("\n")[0]  # Empty lines are skipped.
    if line.startswith(_SEPARATOR) and len(line) == len(_SEPARATOR) + 1:
        return line[-1], True
    delimiter = "\t" if ".tsv" in map(str.lower, path.suffixes) else max(_DELIMITERS, key=line.count)
    if not line.count(delimiter):
        raise ValueError(
            f"{path} has one column ({line[:60]!r}). A table needs a header with the names of at least two columns, "
            "and commas, semicolons or tabs between them. If this line is a title, delete it."
        )
    return delimiter, False
