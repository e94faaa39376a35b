"""Write rows as parquet shards, atomically, and read rows from parquet and JSON files.

A file that exists but cannot be read raises a ValueError with its name.
"""

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.json as paj
import pyarrow.parquet as pq
from datasets import Dataset, Features, Json, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import generate_random_fingerprint

from topr_trl.data.json_documents import read_documents

Read = TypeVar("Read")


def from_table(table: pa.Table) -> Dataset:
    """Return a dataset of `table` in memory, without the hash over all values that `Dataset(table)` would compute."""
    return Dataset(table, fingerprint=generate_random_fingerprint())


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return a table with the column added at the end, or with the column of this name replaced."""
    place = table.schema.get_field_index(name)
    return table.append_column(name, values) if place < 0 else table.set_column(place, name, values)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` at the end, so that `path` is never an incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shard_path(folder: Path, shard: int, num_shards: int) -> Path:
    """Return the path of a shard. Shards are numbered from 0."""
    return folder / f"rows-{shard:05d}-of-{num_shards:05d}.parquet"


def save_rows(dataset: Dataset, directory: str | Path, shard: int = 0, num_shards: int = 1) -> Path:
    """Save rows as one parquet shard of a folder. The file is written atomically.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import load_rows, save_rows

    >>> rows = Dataset.from_dict({"prompt": ["3 + 4 = "], "completion": ["7"], "reward": [1.0]})
    >>> save_rows(rows, "rollouts").name
    'rows-00000-of-00001.parquet'
    >>> load_rows("rollouts").column_names
    ['prompt', 'completion', 'reward']
    ```

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows to save.
        directory (`str` or `Path`):
            Folder to write to. It is created if needed.
        shard (`int`, *optional*, defaults to `0`):
            Number of the shard, counted from 0.
        num_shards (`int`, *optional*, defaults to `1`):
            Total number of shards in the folder.

    Returns:
        `Path`: the file.
    """
    path = shard_path(Path(directory), shard, num_shards)
    write_parquet(dataset, path)
    return path


def write_parquet(dataset: Dataset, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Write rows atomically as a parquet file. `metadata` is added to the metadata that `datasets` writes."""
    schema = dataset.features.arrow_schema
    schema = schema.with_metadata({**schema.metadata, **(metadata or {})})
    # pyarrow cannot read a row group whose messages have more than 2 GB of text.
    most = max(1, min(_WRITTEN_AT_ONCE, len(dataset.data) * _BYTES_AT_ONCE // max(1, dataset.data.nbytes)))
    # `Dataset.to_parquet` would show a progress bar for each shard.
    with atomic_write(path) as partial, pq.ParquetWriter(partial, schema, **_ENCODING) as writer:
        for table in dataset.with_format("arrow").iter(most):
            writer.write_table(table.cast(schema))


_WRITTEN_AT_ONCE = 16_384  # maximum number of rows in each row group of a file
_BYTES_AT_ONCE = 1 << 30
# With these settings, token ids and log-probabilities take less time to write and less space than with the defaults.
_ENCODING: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}


def shards_of(path: str | Path) -> list[Path]:
    """Return the parquet files of a folder of rows.

    For any other path, return a list with only this path, even if there is no such file.

    Raises:
        FileNotFoundError: the folder has no parquet file, the folder has files of several splits, or the number of
            files differs from the number in the name of the first file.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    shards = sorted(path.glob("*.parquet"))
    if not shards:
        inside = sorted({str(file.parent) for depth in ("*", "*/*") for file in path.glob(f"{depth}/*.parquet")})
        hint = f" There are some in {', '.join(inside[:4])}{' and others' if inside[4:] else ''}." if inside else ""
        raise FileNotFoundError(f"There are no rows (*.parquet) in {path}.{hint}")
    numbered = [shard.stem.rpartition("-of-") for shard in shards]
    splits = {name.rpartition("-")[0] for name, _, count in numbered if count.isdigit()}
    if len(splits) > 1:
        raise FileNotFoundError(
            f"{path} holds shards of several splits ({', '.join(sorted(splits))}). Move each split to its own folder, "
            "or name one file."
        )
    _, is_numbered, expected = numbered[0]
    if is_numbered and expected.isdigit() and int(expected) != len(shards):
        more = (
            "There are too many: move the others to their own folder."
            if len(shards) > int(expected)
            else "Restore the missing shards."
        )
        raise FileNotFoundError(f"{path} holds {len(shards)} of {int(expected)} shards *-of-{expected}.parquet. {more}")
    return shards


def load_rows(path: str | Path, cache_dir: str | Path | None = None) -> Dataset:
    """Load rows from a folder of parquet shards, or from a `.parquet`, `.json` or `.jsonl` file.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import load_rows

    >>> Dataset.from_dict({"prompt": ["3 + 4 = "], "completion": ["7"]}).to_json("rows.jsonl")
    >>> load_rows("rows.jsonl")[0]
    {'prompt': '3 + 4 = ', 'completion': '7'}
    ```

    Args:
        path (`str` or `Path`):
            Folder or file.
        cache_dir (`str` or `Path`, *optional*):
            Folder in which `datasets` keeps its copy. `None` uses its default cache.

    Returns:
        [`~datasets.Dataset`]: the rows of all shards.

    Raises:
        FileNotFoundError: there is no such file, or the folder does not hold exactly one complete set of shards.
        ValueError: a file has a suffix that is not listed above, is empty or is damaged, or there is no row.
    """
    return read_table(*shards_of(path), cache_dir=cache_dir)


def columns_of(file: Path) -> list[str]:
    """Return the column names of a file of rows."""
    return schema_of(file).names if file.suffix == ".parquet" else read_table(file).column_names


def schema_of(file: Path) -> pa.Schema:
    """Return the schema of a parquet file. A damaged file raises a ValueError."""
    return _read_by_pyarrow(file, pq.read_schema)


def _read_by_pyarrow(file: Path, reader: Callable[[Path], Read]) -> Read:
    """Call a reader of pyarrow. If the file exists but cannot be read, raise a ValueError that names the file."""
    try:
        return reader(file)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, error) from error


def unreadable(file: str | Path, error: BaseException) -> ValueError:
    """Return an error with the name of the file and the message of the original error."""
    return ValueError(
        f"{file} cannot be read: {' '.join(str(error).split()).rstrip(' .')}. Write or download it again."
    )


def read_shard(shard: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one file of rows into memory. Names in `columns` that the file lacks are ignored. None reads all columns."""
    if shard.suffix != ".parquet":
        table = read_table(shard).with_format("arrow")[:]
        return table if columns is None else table.select([name for name in table.column_names if name in columns])
    names = None if columns is None else [name for name in columns_of(shard) if name in columns]
    return _read_by_pyarrow(shard, lambda path: pq.read_table(path, columns=names))


def rows_of(shard: Path) -> int:
    """Return the number of rows of a file."""
    return _read_by_pyarrow(shard, pq.read_metadata).num_rows if shard.suffix == ".parquet" else len(read_table(shard))


# pyarrow 26.0 crashes the process if the first row of a JSON file is null.
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[?\s*null")

TABLE_SUFFIXES = (".parquet", ".json", ".jsonl")


def read_table(
    *files: str | Path, cache_dir: str | Path | None = None, columns: Sequence[str] | None = None
) -> Dataset:
    """Load rows from files of the same format: `.parquet`, `.json` or `.jsonl`.

    `columns` selects columns of parquet files. It has no effect on JSON files. `cache_dir` is the folder in which
    `datasets` keeps its copy.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file has a suffix that is not listed above, is empty or is damaged, or there is no row.
    """
    paths, are_arrays = [Path(file) for file in files], False
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}.")
        if path.suffix not in TABLE_SUFFIXES:
            raise ValueError(
                f"Rows are read from {', '.join(TABLE_SUFFIXES)}, not {path.name}. Convert the file with topr "
                "import, or with pandas."
            )
        if path.suffix != ".parquet":
            with path.open("rb") as file:
                start = file.read(4_096)
            if _NULL_FIRST.match(start):
                raise ValueError(f"{path} cannot be read: the first row is null. Remove it.")
            if not start.strip(b"[] \t\r\n"):
                raise ValueError(f"{path} is empty: it has no row.")
            are_arrays |= start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    kind = "parquet" if paths[0].suffix == ".parquet" else "json"
    if kind == "parquet":  # Skip files without rows, on which `datasets` 4.7 fails.
        paths = [path for path in paths if rows_of(path)]
        if not paths:
            raise ValueError(f"{files[0]}{' and others' * (len(files) > 1)} cannot be used: there is no row.")
    cache = str(cache_dir) if cache_dir else None
    only = {"columns": list(columns)} if kind == "parquet" and columns is not None else {}
    escaped = [glob.escape(str(path.absolute())) for path in paths]  # `datasets` reads the names of files as patterns.
    load = partial(load_dataset, kind, data_files=escaped, split="train", cache_dir=cache)
    try:
        rows = load(**only)
        rows = _with_exact_values(rows, paths, are_arrays) if kind == "json" else rows
        exact = _mapped(rows.features, lambda kind: _ExactJson() if isinstance(kind, Json) else kind)
        rows.info.features = Features(exact)
        return rows
    except _READING as error:
        for path in paths if kind == "parquet" else ():
            read_shard(path, columns)  # For a damaged file, `read_shard` raises an error that names the file.
        if kind == "json" and (features := _types_of_json(paths)) is not None:
            with suppress(*_READING):
                return _with_exact_values(load(features=features), paths, are_arrays)
        raise unreadable(f"{paths[0]}{' and others' * (len(paths) > 1)}", error.__cause__ or error) from error


class _ExactJson(Json):
    """Type of a column with JSON of several types. `datasets` reads 0.3 in such a column as 0.30000000000000004."""

    def encode_example(self, example_data: Any) -> str | None:
        return None if example_data is None else json.dumps(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Json)


def _with_exact_values(rows: Dataset, paths: list[Path], are_arrays: bool) -> Dataset:
    """Return rows of JSON files with the values of the files, also where `datasets` has changed them.

    JSON has no dates, but `datasets` converts a column if all of its texts look like dates. A completion would then not
    be text, and a reward function could not compare it with an answer. In arrays, and in files in which values of a
    column have different types or fields, `datasets` rounds all numbers to 10 decimals. In such a column, it reads the
    text "42" as a number.
    """
    features = _mapped(rows.features, lambda kind: Value("string") if _is_date(kind) else kind)
    stored = _mapped(features, lambda kind: Value("string") if isinstance(kind, Json) else kind)
    if stored == rows.features and not are_arrays:
        return rows
    records, tables = chain.from_iterable(map(read_documents, paths)), []
    while batch := [each if isinstance(each, dict) else {"text": each} for _, each in islice(records, 1_000)]:
        columns = {name: [_stored(each.get(name), kind) for each in batch] for name, kind in features.items()}
        tables.append(pa.Table.from_pydict(columns, Features(stored).arrow_schema))
    return from_table(pa.concat_tables(tables).cast(Features(features).arrow_schema))


def _mapped(feature: Any, change: Callable[[Any], Any]) -> Any:
    """Return the type of a column, or the types of several columns, with `change` applied to each inner type."""
    if isinstance(feature, dict):
        return {name: _mapped(inner, change) for name, inner in feature.items()}
    return List(_mapped(feature.feature, change)) if isinstance(feature, List) else change(feature)


def _is_date(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith("timestamp")


def _stored(value: Any, feature: Any) -> Any:
    """Return a value of a JSON file as it is stored in a column of the given type."""
    if value is None or value != value:  # NaN differs from itself. `datasets` reads it as null.
        return None
    if isinstance(feature, dict):
        return {name: _stored(value.get(name), inner) for name, inner in feature.items()}
    if isinstance(feature, List):
        return [_stored(each, feature.feature) for each in value]
    if feature == Value("float64"):
        return float(value)  # Arrow refuses integers above 2^53.
    return json.dumps(value) if isinstance(feature, Json) else value


# `datasets` 4.7 does not wrap all errors of its reader in a DatasetGenerationError.
_READING = (DatasetGenerationError, ValueError, KeyError, TypeError, AttributeError)
_JSON_AT_ONCE = 10 << 20  # number of bytes at the start of a JSON file that `datasets` reads to infer the types


def _types_of_json(paths: list[Path]) -> Features | None:
    """Return the types of the columns in files of JSON lines, of which at least one is large.

    Return None if no file is larger than 10 MiB, if a file is not JSON lines, or if a column has several types.

    `datasets` infers the types from the first 10 MiB. It then fails if a later row has a new field, a fraction in a
    column of whole numbers, or text in a column of nulls.
    """
    if all(path.stat().st_size <= _JSON_AT_ONCE for path in paths):
        return None
    schemas = []
    try:
        for path in paths:
            with path.open("rb") as file:
                while lines := file.read(_JSON_AT_ONCE):
                    lines += file.readline()
                    options = paj.ReadOptions(block_size=len(lines))
                    schemas.append(paj.read_json(pa.BufferReader(lines), options).schema)
        return Features.from_arrow_schema(pa.unify_schemas(schemas, promote_options="permissive"))
    except pa.ArrowException:  # A file is an array, or a column has several types.
        return None
