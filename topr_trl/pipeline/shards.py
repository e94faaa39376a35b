"""Shards of rows: stages add columns to them, each replaced as a whole, and they say which stages they went through."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from topr_trl.data.tables import (
    columns_of,
    from_table,
    read_shard,
    rows_of,
    schema_of,
    shard_path,
    shards_of,
    write_parquet,
)
from topr_trl.pipeline import stages as registry
from topr_trl.pipeline.manifest import Json

CHOSEN = "reward_after_baseline"  # R of the rows that `curate` has chosen; null in the others
MU_COLUMNS = ("mu_logps", "mu_fingerprint")  # log μ of each token, and the model that it was computed with
_STAGES = b"topr_trl.stages"  # in the metadata of a shard
_NOTES = b"topr_trl.notes"

ColumnsByStage = dict[str, list[str]]  # the stages that a shard went through, and the columns that each added


def count_rows(folder: Path) -> int:
    """Rows of all shards."""
    return sum(map(rows_of, shards_of(folder)))


def write_shard(table: pa.Table, path: Path, stages: ColumnsByStage, notes: Json | None = None) -> None:
    """Write rows that stages have worked on; the file appears, or is replaced, as a whole.

    `notes` are kept until a stage writes the shard again.
    """
    more = {_NOTES: json.dumps(notes).encode()} if notes else {}
    write_parquet(from_table(table), path, {_STAGES: json.dumps(stages).encode(), **more})


def notes_of(shard: Path) -> Json:
    """Return the notes that `write_shard` saved with a shard."""
    notes: Json = json.loads((pq.read_schema(shard).metadata or {}).get(_NOTES, b"{}"))
    return notes


def stages_of(shard: Path) -> ColumnsByStage:
    """The stages that a shard went through, and the columns that each added."""
    metadata = schema_of(shard).metadata if shard.suffix == ".parquet" else None
    stages: ColumnsByStage = json.loads((metadata or {}).get(_STAGES, b"{}"))
    return stages


def has_shards_of(stage: str, folder: Path) -> bool:
    """Whether a stage has written a shard of a folder. One that cannot be read is made again."""
    return any(_has_been_through(stage, shard) for shard in folder.glob("*.parquet"))


def _has_been_through(stage: str, shard: Path) -> bool:
    try:
        return stage in stages_of(shard)
    except ValueError:
        return False


def _without(stage: str, stages: ColumnsByStage) -> tuple[ColumnsByStage, set[str]]:
    """The stages before this one, and the columns that it and those after it added: another run makes them again."""
    first = registry.load(stage).order
    later = {name for name in stages if registry.load(name).order >= first}
    added = {column for name in later for column in stages[name]}
    return {name: columns for name, columns in stages.items() if name not in later}, added


def columns_before(stage: str, source: Path) -> list[str]:
    """The columns that all shards have without what this stage and those after it added."""
    shards = shards_of(source)
    kept = [set(columns_of(shard)) - _without(stage, stages_of(shard))[1] for shard in shards]
    return [name for name in columns_of(shards[0]) if all(name in names for names in kept)]


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
        if path.is_file() and stage in stages_of(path):
            continue
        before, added = _without(stage, stages_of(shard))
        table = read_shard(shard).drop_columns(sorted(added))
        result = columns(k, table)
        write_shard(result, path, {**before, stage: [n for n in result.column_names if n not in table.column_names]})


@contextmanager
def naming(shard: Path) -> Iterator[None]:
    """Rows are counted by shard, so errors name theirs."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{shard}: {error}") from error
