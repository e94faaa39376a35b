"""Shards of rows: stages add columns to them, each replaced as a whole, and they say which stages they went through."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from topr_trl.data.tables import atomic_write, from_table, read_shard, rows_of, shard_path, shards_of
from topr_trl.pipeline.manifest import Json

CHOSEN = "reward_after_baseline"  # R of the rows that `curate` has chosen; null in the others
_STAGES = b"topr_trl.stages"  # in the metadata of a shard: the stages that it has been through


Made = tuple[int, Json]  # what a stage returns: rows, and notes for the manifest


def count_rows(folder: Path) -> int:
    """Rows of all shards."""
    return sum(map(rows_of, shards_of(folder)))


def write_shard(table: pa.Table, path: Path, stage: str) -> None:
    """Write rows that a stage has worked on; the file appears, or is replaced, as a whole."""
    stages = [*_stages_of(table.schema), stage]
    schema = from_table(table).features.arrow_schema  # `datasets` finds its types again
    schema = schema.with_metadata({**schema.metadata, _STAGES: json.dumps(stages).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        pq.write_table(table.cast(schema), partial, row_group_size=16_384)


def _stages_of(schema: pa.Schema) -> list[str]:
    stages: list[str] = json.loads((schema.metadata or {}).get(_STAGES, b"[]"))
    return stages


def _is_done(path: Path, stage: str) -> bool:
    return path.is_file() and stage in _stages_of(pq.read_schema(path))


def add_columns(
    source: Path, folder: Path, stage: str, columns: Callable[[int, pa.Table], pa.Table], description: str
) -> None:
    """Let a stage add columns to each shard of `source`, into the shards of `folder`, those that are missing.

    Args:
        columns: from the number of a shard and its rows to the same rows with the columns.
        description: for the progress bar.
    """
    shards = shards_of(source)
    same = source.resolve() == folder.resolve()
    for k, shard in enumerate(tqdm(shards, desc=description, unit="shard")):
        path = shard if same else shard_path(folder, k, len(shards))
        if not _is_done(path, stage):
            write_shard(columns(k, read_shard(shard)), path, stage)


@contextmanager
def naming(shard: Path) -> Iterator[None]:
    """Rows are counted by shard, so errors name theirs."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{shard}: {error}") from error


def need(columns: Sequence[str], needed: tuple[str, ...], what: str) -> None:
    if not set(needed) <= set(columns):
        raise ValueError(f"{what} need the columns {', '.join(needed)}; found {list(columns)}.")


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.append_column(name, values) if place < 0 else table.set_column(place, name, values)
