"""Tables of rows in files: parquet shards, which are whole or not there, and JSON.

A file that cannot be read is a ValueError naming it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import generate_random_fingerprint

Read = TypeVar("Read")


def from_table(table: pa.Table) -> Dataset:
    """A dataset that holds `table` in memory. `Dataset(table)` alone would hash all of it."""
    return Dataset(table, fingerprint=generate_random_fingerprint())


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """A table with a column of these values, in place of one of that name or behind the others."""
    place = table.schema.get_field_index(name)
    return table.append_column(name, values) if place < 0 else table.set_column(place, name, values)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` at the end, so that the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shard_path(folder: Path, shard: int, num_shards: int) -> Path:
    """The file of a shard, counted from 0."""
    return folder / f"rows-{shard:05d}-of-{num_shards:05d}.parquet"


def save_rows(dataset: Dataset, directory: str | Path, shard: int = 0, num_shards: int = 1) -> Path:
    """Write rows as one parquet shard of `directory`; the file appears whole or not at all."""
    path = shard_path(Path(directory), shard, num_shards)
    write_parquet(dataset, path)
    return path


def write_parquet(dataset: Dataset, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Write rows, and more metadata beside that in which `datasets` finds its types again.

    The file appears, or is replaced, as a whole.
    """
    schema = dataset.features.arrow_schema
    schema = schema.with_metadata({**schema.metadata, **(metadata or {})})
    # Not `to_parquet`: it shows a progress bar for every shard.
    with atomic_write(path) as partial, pq.ParquetWriter(partial, schema, **_ENCODING) as writer:
        for table in dataset.with_format("arrow").iter(_WRITTEN_AT_ONCE):
            writer.write_table(table.cast(schema))


_WRITTEN_AT_ONCE = 16_384  # rows; one row group of the file
# Against pyarrow's defaults, on rows with ids and log-probabilities: smaller, and faster to write and to read.
_ENCODING: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}


def shards_of(path: str | Path) -> list[Path]:
    """The parquet files of a folder of rows, or the one file.

    Raises:
        FileNotFoundError: there is none, or shards are missing.
    """
    path = Path(path)
    shards = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not shards:
        inside = sorted({str(file.parent) for depth in ("*", "*/*") for file in path.glob(f"{depth}/*.parquet")})
        hint = f" There are some in {', '.join(inside[:4])}{' and others' if inside[4:] else ''}." if inside else ""
        raise FileNotFoundError(f"There are no rows (*.parquet) in {path}.{hint}")
    _, is_numbered, expected = shards[0].stem.rpartition("-of-")
    if path.is_dir() and is_numbered and expected.isdigit() and int(expected) != len(shards):
        more = "They are of several splits: name one." if len(shards) > int(expected) else "Put the missing ones back."
        raise FileNotFoundError(f"{path} holds {len(shards)} of {int(expected)} shards *-of-{expected}.parquet. {more}")
    return shards


def load_rows(path: str | Path, cache_dir: str | Path | None = None) -> Dataset:
    """Rows from a directory of parquet shards, or from a `.parquet`, `.json` or `.jsonl` file.

    `datasets` keeps its copy in `cache_dir`; default: its own cache.

    Raises:
        FileNotFoundError, ValueError: see `shards_of` and `read_table`.
    """
    return read_table(*shards_of(path), cache_dir=cache_dir)


def columns_of(file: Path) -> list[str]:
    """The columns of a file of rows."""
    return schema_of(file).names if file.suffix == ".parquet" else read_table(file).column_names


def schema_of(file: Path) -> pa.Schema:
    """The schema of a parquet file; a ValueError if it cannot be read."""
    return _read_by_pyarrow(file, pq.read_schema)


def _read_by_pyarrow(file: Path, reader: Callable[[Path], Read]) -> Read:
    """Call a reader of pyarrow, and add the name of the file to its errors."""
    try:
        return reader(file)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, error) from error


def unreadable(file: str | Path, error: BaseException) -> ValueError:
    return ValueError(
        f"{file} cannot be read: {' '.join(str(error).split()).rstrip(' .')}. Write or download it again."
    )


def read_shard(shard: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """One file of rows in memory: the columns named, as far as it has them, or all."""
    if shard.suffix != ".parquet":
        table = read_table(shard).with_format("arrow")[:]
        return table if columns is None else table.select([name for name in table.column_names if name in columns])
    names = None if columns is None else [name for name in columns_of(shard) if name in columns]
    return _read_by_pyarrow(shard, lambda path: pq.read_table(path, columns=names))


def rows_of(shard: Path) -> int:
    """The number of rows of a file."""
    return _read_by_pyarrow(shard, pq.read_metadata).num_rows if shard.suffix == ".parquet" else len(read_table(shard))


# As the first row of a JSON file, null crashes pyarrow (26.0), and with it the process.
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[?\s*null")

TABLE_SUFFIXES = (".parquet", ".json", ".jsonl")


def read_table(
    *files: str | Path, cache_dir: str | Path | None = None, columns: Sequence[str] | None = None
) -> Dataset:
    """Rows of `.parquet`, `.json` or `.jsonl` files, all of one kind; of parquet only these columns, if given.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is of another kind, or malformed.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}.")
        if path.suffix not in TABLE_SUFFIXES:
            raise ValueError(f"Rows are read from {', '.join(TABLE_SUFFIXES)}, not {path.name}.")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: it has no row.")
        if path.suffix != ".parquet":
            with path.open("rb") as file:
                if _NULL_FIRST.match(file.read(4_096)):
                    raise ValueError(f"{path} cannot be read: the first row is null. Remove it.")
    kind = "parquet" if paths[0].suffix == ".parquet" else "json"
    if kind == "parquet":  # `datasets` 4.7 fails on files without rows
        paths = [path for path in paths if rows_of(path)] or paths[:1]
    cache = str(cache_dir) if cache_dir else None
    only = {"columns": list(columns)} if kind == "parquet" and columns is not None else {}
    try:
        return load_dataset(kind, data_files=list(map(str, paths)), split="train", cache_dir=cache, **only)
    # `datasets` 4.7 lets the errors of its reader through.
    except (DatasetGenerationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(f"{paths[0]}{' and others' * (len(paths) > 1)}", error.__cause__ or error) from error
