"""Read JSON files of any layout: a record per line, arrays of records, and documents that span several lines."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

_CHUNK = 1 << 20  # bytes to read at a time
LONGEST = 128 << 20  # maximum bytes or characters of a record; a small file can unpack to more than the memory
_SPACE = " \t\r\n"
_BETWEEN = re.compile(f"[{_SPACE},]*")


def is_by_lines(path: Path) -> bool:
    """Return whether each line of a file is a record, and not part of an array or of a longer document.

    The answer depends on the first `_CHUNK` bytes, which may end inside the first document.

    Args:
        path (`Path`): JSON file, compressed or not.

    Raises:
        OSError: the file cannot be read or decompressed.
    """
    start = _start_of(path).decode("utf-8", "replace").lstrip("\ufeff" + _SPACE)
    if start[:1] not in ("[", "{"):
        return True
    try:
        first, end = json.JSONDecoder().raw_decode(start)
    except json.JSONDecodeError as error:
        # The chunk can end inside a document. This gives an error in the last 64 characters of the chunk, or an
        # unterminated string, which is reported at its start. Any other error comes from a broken line.
        broken_in_chunk = error.pos < len(start) - 64 and not error.msg.startswith("Unterminated string")
        return start[0] == "{" and (broken_in_chunk or "\n" not in start.rstrip())
    except (RecursionError, ValueError):  # The functions that read records report these errors.
        return start[0] == "{"
    return isinstance(first, dict) and "\n" not in start[:end]


def _start_of(path: Path) -> bytes:
    """Return the first `_CHUNK` bytes of a file. If a compressed file is truncated, return the bytes before the error.

    Raises:
        OSError: no byte can be read.
    """
    found = b""
    with pa.input_stream(path) as file:
        try:
            while len(found) < _CHUNK and (more := file.read(_CHUNK >> 4)):
                found += more
        except OSError:
            if not found:
                raise
    return found


def too_long(path: Path, place: str) -> ValueError:
    """Return the error for a record that is longer than `LONGEST`.

    Args:
        path (`Path`): File.
        place (`str`): Place of the record in the file.
    """
    hint = " (a log of inspect_ai: as an .eval file)" if path.suffix == ".json" else ""
    return ValueError(
        f"{path}: {place} is longer than {LONGEST >> 20} MiB. Leave it out, or write each record as a line of its own"
        f"{hint}."
    )


def read_documents(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file without loading the whole file.

    A record is an item of a top-level array, an item of an array in a top-level array, or any other document. Each
    record comes with the number of arrays that started before the record, including the array that holds it.

    Args:
        path (`Path`): JSON file, compressed or not.

    Raises:
        UnicodeDecodeError: the file is not UTF-8.
        ValueError: the file is not valid JSON, is nested too deeply, or has a record that is longer than
            `LONGEST`. Complete records before invalid JSON are yielded first.
        OSError: the file cannot be read or decompressed.
    """
    decoder, text, place, in_array, arrays, done = json.JSONDecoder(), "", 0, False, 0, 0
    with io.TextIOWrapper(io.BufferedReader(pa.input_stream(path)), "utf-8", newline="") as file:
        text = file.read(_CHUNK).lstrip("\ufeff" + _SPACE)
        wanted = _CHUNK
        while True:
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # The pattern always matches.
            if place == len(text) and text:
                text, place, wanted = file.read(_CHUNK), 0, _CHUNK
                continue
            if text[place : place + 1] == ("]" if in_array else "["):
                in_array, place = not in_array, place + 1
                arrays += in_array
                continue
            try:
                value, place = decoder.raw_decode(text, place)
            except json.JSONDecodeError as error:
                if len(text) - place > LONGEST:
                    raise too_long(path, f"record {done + 1:,}") from None
                more = file.read(min(wanted, LONGEST + 1 - (len(text) - place)))
                if not more:
                    if not in_array and place == len(text):
                        return
                    raise ValueError(
                        f"{path}: after {done:,} complete records, it is not valid JSON ({error})."
                    ) from None
                # The next chunk is twice as large, because each attempt parses a long document from its start.
                text, place, wanted = text[place:] + more, 0, wanted * 2
                continue
            except RecursionError:
                raise ValueError(f"{path}: after {done:,} complete records, its JSON is nested too deeply.") from None
            except ValueError as error:  # an integer with more than 4,300 digits
                raise ValueError(f"{path}: after {done:,} complete records: {error}.") from None
            done, wanted = done + 1, _CHUNK
            if isinstance(value, list):  # an array in an array, such as a run in a list of runs
                arrays += 1
                yield from ((arrays, item) for item in value)
            else:
                yield arrays, value
