"""Read records from JSON, CSV and parquet files, logs of inspect_ai, and recordings of `topr record`.

JSON, CSV and TSV files may be compressed with gzip or zstd.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr_trl.data import json_documents
from topr_trl.data.messages import without_nulls
from topr_trl.data.tables import unreadable
from topr_trl.importing import csv_tables, eval_archives
from topr_trl.importing.format import Placed, Record
from topr_trl.recording.store import NAME, count_rollouts, read_rollouts

RECORDING = Path(NAME).suffix
_COMPRESSED = (".zst", ".gz")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON escapes a character above U+FFFF as two surrogates


def files_of(path: Path) -> list[Path]:
    """Return the files with records in a folder and its subfolders, sorted by name.

    If `path` is a file, return only this file. Hidden files and folders are skipped, because other programs write
    copies there, such as Jupyter's `.ipynb_checkpoints`.

    Args:
        path (`Path`): Folder or file. In a folder, the first of `SUFFIXES` with files is used.

    Raises:
        ValueError: the folder has no such file, has files with several suffixes of `_ALONE`, or has a file and its
            compressed copy.
    """
    if path.is_file():
        return [path]
    suffix = next((kind for kind in SUFFIXES if _files_in(path, kind)), "JSON, CSV or parquet")
    alone = {*_ALONE, *([".json"] if suffix in (".csv", ".tsv") else [])}  # a table has no metadata files
    found, *others = (_files_in(path, kind) for kind in (suffix, *sorted(alone - {suffix})))
    kinds = {_uncompressed(files[0]).suffix for files in others if files}
    if not found:
        files = (file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        kinds = {_uncompressed(file).suffix for file in files} - {""}
    if not found or kinds:
        more = f"; it has {' and '.join(sorted(kinds))} files" if kinds else ""
        raise ValueError(f"{path} must hold only {suffix} files{more}. Choose one file or a different folder.")
    for file, following in pairwise(found):  # A compressed copy follows its file.
        if _uncompressed(file) == _uncompressed(following):
            raise ValueError(f"{file} and {following} hold the same records. Remove one of them, or use a single file.")
    return found


# Suffixes to look for. The first suffix with files is used. `.json` is last, because such files may describe a run
# instead of containing records.
SUFFIXES = (".sqlite", ".jsonl", ".parquet", ".eval", ".csv", ".tsv", ".ndjson", ".traj", ".traj.json", ".json")
# A folder may have files with only one of these suffixes.
_ALONE = tuple(suffix for suffix in SUFFIXES if not suffix.endswith(".json"))


def _files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix in any case, compressed or not, sorted by name. Skip hidden files and folders."""
    found = (file for file in folder.rglob("*") if _uncompressed(file).name.lower().endswith(suffix))
    # A file and its compressed copy are next to each other.
    return sorted(
        (file for file in found if not _is_hidden(file, folder)), key=lambda file: (_uncompressed(file), file)
    )


def _is_hidden(file: Path, folder: Path) -> bool:
    """Return whether a file in a folder, or one of the file's parents inside the folder, is hidden."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _uncompressed(file: Path) -> Path:
    """Return the path of a file without its compression suffix."""
    return file.with_suffix("") if file.suffix in _COMPRESSED else file


def _kind(path: Path) -> str:
    """Return the suffix of a file in lower case, without its compression suffix."""
    return _uncompressed(path).suffix.lower()


def count_records(files: Sequence[Path], join: Callable[[Iterable[Placed]], Iterator[Placed]] = iter) -> list[int]:
    """Return the number of records in each file, such as lines, rows or samples.

    Args:
        files (`Sequence[Path]`): Files of records.
        join (`Callable`, defaults to `iter`): Function that joins records, see `Format.join`.
    """
    if join is iter:
        return [_count(path) for path in files]
    return [sum(1 for _ in join(read_records(path))) for path in files]


def _count(path: Path) -> int:
    kind = _kind(path)
    if kind == eval_archives.SUFFIX:
        return eval_archives.count_samples(path)
    if kind == RECORDING:
        return count_rollouts(path)
    if kind == ".parquet":
        with _readable(path):
            return pq.read_metadata(path).num_rows
    return sum(1 for _ in read_records(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors of reading, decompression and decoding to a ValueError with the name of the file."""
    try:
        yield
    except FileNotFoundError:  # This error already has the name.
        raise
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}). Save it as UTF-8.") from None


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers.

    If a compressed file is truncated after its first line, yield a broken line at the end.
    """
    number = 0
    with io.BufferedReader(pa.input_stream(path)) as file:  # `input_stream` decompresses, according to the suffix.
        try:
            for number, line in enumerate(iter(lambda: file.readline(json_documents.LONGEST + 1), b""), 1):
                if len(line) > json_documents.LONGEST:
                    raise json_documents.too_long(path, f"line {number:,}")
                if line.strip():
                    yield number, line
        except OSError:
            if number == 0:
                raise
            yield number + 1, b"{"  # `parsed` returns None for this line.


def read_records(path: Path) -> Iterator[Placed]:
    """Yield the place of each record, such as `rows.jsonl, line 3`, and its content.

    A line is not parsed, because callers skip some lines. `parsed` parses a line.

    Args:
        path (`Path`): File of records.

    Raises:
        ValueError: the file cannot be read. A broken line of JSON does not raise an error.
        FileNotFoundError: a JSON, CSV, TSV or parquet file does not exist.
    """
    kind = _kind(path)
    if kind == ".parquet":
        with _readable(path):
            rows = (row for batch in pq.ParquetFile(path).iter_batches(1_024) for row in batch.to_pylist())
            yield from ((f"{path}, row {n}", _without_fields_of_others(row)) for n, row in enumerate(rows))
        return
    if kind == eval_archives.SUFFIX:
        yield from ((f"{path}, {name}", sample) for name, sample in eval_archives.read_samples(path))
        return
    if kind == RECORDING:
        yield from ((f"{path}, rollout {rollout['rollout_id']}", rollout) for rollout in read_rollouts(path))
        return
    with _readable(path):
        if kind in csv_tables.SUFFIXES:  # The header is row 1, as in a spreadsheet.
            yield from ((f"{path}, row {n}", row) for n, row in enumerate(csv_tables.read_table(path), 2))
        elif json_documents.is_by_lines(path):
            yield from ((f"{path}, line {n}", line) for n, line in _read_lines(path))
        else:
            for n, (array, item) in enumerate(json_documents.read_documents(path), 1):
                kind = "document" if array == 0 else "record" if array == 1 else f"array {array}, record"
                yield f"{path}, {kind} {n}", item


def _without_fields_of_others(value: Any) -> Any:
    """Drop the nulls with which parquet gives each tool the parameters of all tools, and each call their arguments."""
    if isinstance(value, dict):
        return {
            name: (without_nulls if name in ("tools", "functions", "arguments") else _without_fields_of_others)(inner)
            for name, inner in value.items()
        }
    is_plain = not isinstance(value, list) or (value and isinstance(value[0], int | float))  # such as token ids
    return value if is_plain else [_without_fields_of_others(each) for each in value]


def parsed(raw: bytes | Record) -> Any:
    """Parse a line. Return None for a broken line, and for a line that is `null`.

    A broken line is not valid JSON or not UTF-8, is nested too deeply, has an integer with more than 4,300 digits, or
    has an unpaired surrogate (from text cut inside an emoji).

    Args:
        raw (`bytes` or `Record`): Line, or a record of another kind of file, which is returned unchanged.
    """
    if not isinstance(raw, bytes):
        return raw
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):  # ValueError includes errors of JSON, UTF-8 and long integers.
        return None
    return None if _SURROGATE.search(raw) and has_unpaired_surrogate(found) else found


def has_unpaired_surrogate(record: Any) -> bool:
    """Return whether text in a record has an unpaired surrogate, which cannot be written as UTF-8.

    Also return True if the record is nested too deeply.
    """
    try:
        json.dumps(record, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    return False
