"""Read and write shards of rows. A shard's metadata lists the stages that wrote the shard, and their columns."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from topr_trl.data.rows import problem_column
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
from topr_trl.user_warnings import warn_user

MU_COLUMNS = ("mu_logps", "mu_fingerprint")  # log μ of each token, and the fingerprint of the model that computed it
_STAGES = b"topr_trl.stages"  # key in the metadata of a shard

_ROWS_PER_PART = 4_096  # number of rows after which `add_columns` splits a file that it writes to another folder

ColumnsByStage = dict[str, list[str]]  # the columns that each stage added, by the name of the stage


def count_rows(folder: Path) -> int:
    """Return the number of rows in all shards of a folder."""
    return sum(map(rows_of, shards_of(folder)))


def write_shard(table: pa.Table, path: Path, stages: ColumnsByStage) -> None:
    """Write a shard. The file is replaced in one step, so a killed process leaves no partial shard.

    Args:
        table (`pyarrow.Table`): Rows.
        path (`Path`): File to write.
        stages (`ColumnsByStage`): Stages that wrote the rows, with the columns of each.
    """
    write_parquet(from_table(table), path, {_STAGES: json.dumps(stages).encode()})


def stages_of(shard: Path) -> ColumnsByStage:
    """Return the stages that wrote a shard, with the columns that each stage added.

    Return {} for a file that no stage wrote.
    """
    metadata = schema_of(shard).metadata if shard.suffix == ".parquet" else None
    return json.loads((metadata or {}).get(_STAGES, b"{}"))


def has_stage(stage: str, shard: Path) -> bool:
    """Return whether a stage has written a shard."""
    try:
        return stage in stages_of(shard)
    except ValueError:  # Do not raise for a damaged shard, because `manifest.begin` can remove it.
        return False


def _split_at(stage: str, stages: ColumnsByStage) -> tuple[ColumnsByStage, set[str]]:
    """Return the stages before the given stage, and the columns that this stage and later stages added."""
    removed = registry.removed_by(stage)
    added = {column for name, columns in stages.items() if name in removed for column in columns}
    return {name: columns for name, columns in stages.items() if name not in removed}, added


def columns_before(stage: str, source: Path) -> list[str]:
    """Return the columns that all shards share, without the columns that the stage and later stages added."""
    shards = shards_of(source)
    kept = [set(columns_of(shard)) - _split_at(stage, stages_of(shard))[1] for shard in shards]
    return [name for name in columns_of(shards[0]) if all(name in names for names in kept)]


class Part(NamedTuple):
    """Range of rows of a file, which becomes a shard.

    Attributes:
        file (`Path`): File of rows.
        rows (`slice`): Rows of the file.
        first (`int`): Number of rows in the parts before this one, also in other files.
    """

    file: Path
    rows: slice
    first: int


def parts_of(source: Path, folder: Path) -> list[Part]:
    """Return the parts of `source` that become the shards of `folder`.

    If `folder` is another folder, large files are split, so that a killed stage keeps the finished parts of a file.
    Adjacent rows of a problem stay together, because a reward function can compare them.
    """
    parts, total, same = [], 0, source.resolve() == folder.resolve()
    for shard in shards_of(source):
        rows, ends = rows_of(shard), []
        if not same and rows > _ROWS_PER_PART:
            names = {"problem_id"} & {*columns_of(shard)} or {"prompt", "prompt_ids"} & {*columns_of(shard)}
            problems = problem_column(from_table(read_shard(shard, sorted(names))))
            starts = np.flatnonzero(problems[1:] != problems[:-1]) + 1
            found = np.searchsorted(starts, np.arange(_ROWS_PER_PART, rows, _ROWS_PER_PART))
            ends = np.unique(starts[found[found < len(starts)]]).tolist()
        parts += [Part(shard, slice(start, end), total + start) for start, end in pairwise([0, *ends, rows])]
        total += rows
    return parts


def add_columns(
    source: Path, folder: Path, stage: str, columns: Callable[[Part, pa.Table], pa.Table], description: str
) -> None:
    """Add the columns of a stage to each part of `source` (see `parts_of`), and write the shards to `folder`.

    Finished shards are skipped.

    Columns that this stage or later stages added to `source` before are dropped. The user gets a warning if `folder` is
    not `source` and columns of later stages are dropped.

    Args:
        source (`Path`): Folder or file of rows.
        folder (`Path`): Folder to write, which can be `source`.
        stage (`str`): Name of the stage.
        columns (`Callable`): Function that takes a part and its rows, and returns the rows with the new columns.
        description (`str`): Text beside the progress bar.
    """
    same, parts = source.resolve() == folder.resolve(), parts_of(source, folder)
    lost = {name for shard in shards_of(source) for name in stages_of(shard)} & registry.removed_by(stage) - {stage}
    if lost and not same:
        warn_user(f"topr {stage} leaves out the columns that topr {' and '.join(sorted(lost))} added to {source}.")
    if not same:  # An earlier version may have begun with another number of shards.
        kept = {shard_path(folder, k, len(parts)) for k in range(len(parts))}
        for other in {*folder.glob("rows-*-of-*.parquet")} - kept:
            other.unlink()
    read = lru_cache(1)(read_shard)
    for k, part in enumerate(tqdm(parts, desc=description, unit="shard")):
        path = part.file if same else shard_path(folder, k, len(parts))
        if path.is_file() and stage in stages_of(path):
            continue
        before, added = _split_at(stage, stages_of(part.file))
        table = read(part.file).drop_columns(sorted(added))[part.rows]
        result = columns(part, table)
        write_shard(result, path, {**before, stage: [n for n in result.column_names if n not in table.column_names]})


def remove_columns(folder: Path, stage: str) -> None:
    """Remove the columns that a stage and later stages added to the shards of a folder.

    Args:
        folder (`Path`): Folder of shards.
        stage (`str`): Name of the stage.
    """
    for shard in sorted(folder.glob("*.parquet")):
        if has_stage(stage, shard):
            before, added = _split_at(stage, stages_of(shard))
            write_shard(read_shard(shard).drop_columns(sorted(added)), shard, before)


@contextmanager
def naming(shard: Path, start: int = 0) -> Iterator[None]:
    """Add the name of the shard to a ValueError, because row numbers in errors count from row `start` of the shard."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{shard}{f', counted from row {start}' if start else ''}: {error}") from error
