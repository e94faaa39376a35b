"""The stage `import`: files of other systems become rows, shard by shard."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from tqdm.auto import tqdm

from topr_trl.data.rows import ROLLOUT
from topr_trl.data.sampled import TEMPERATURE
from topr_trl.data.tables import read_shard, shard_path, shards_of
from topr_trl.formats.records import Record, count_records, files_of, parsed, read_records, to_table
from topr_trl.pipeline.arguments import ImportArguments
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.record_reader import Part, RecordReader, numbers_in, short_place
from topr_trl.pipeline.shards import Made, notes_of, write_shard

RECORDS_PER_SHARD = 1_000
_LOOKED_AT = 100  # records, for fields that may be the reward
_NAMED = 5  # places of what was left out that the summary lists


def import_rows(args: ImportArguments) -> Made:
    """Rows of the records, `RECORDS_PER_SHARD` records per shard; shards that are there are kept.

    Raises:
        ValueError: a record is not of the format; it names file and line.
    """
    reader = RecordReader(args)
    found = files_of(args.source, reader.format.suffix)
    files = reader.format.without_repeats(found)
    shards = sum(-(-count // RECORDS_PER_SHARD) for count in count_records(files))
    if not shards:
        raise ValueError(f"{args.source} has no record.")
    if args.rollout_field:
        reader.find_runs(tqdm(chain.from_iterable(map(read_records, files)), desc="Finding runs", unit="record"))
    conversational: bool | None = None  # whether prompts are messages: by the first row
    waiting: list[tuple[Path, Part]] = []  # shards before it, whose columns have its types
    for k, records in enumerate(tqdm(_parts(files), total=shards, desc=f"Importing {args.format}", unit="shard")):
        path = shard_path(args.folder, k, shards)
        if conversational is not None and path.is_file():
            continue
        part = reader.read(records)
        waiting.append((path, part))
        if part.rows:
            conversational = isinstance(part.rows[0]["prompt"], list)
        if conversational is None:
            continue
        for shard, made in waiting:
            if not shard.is_file():
                table = to_table(made.rows, made.places, reader.columns, conversational)
                write_shard(table, shard, {"import": []}, made.left_out)
        waiting.clear()
    if waiting:
        raise ValueError(f"{args.source}: none of its records holds a completion to learn from.")
    rows, notes = _summary(args.folder, reader)
    repeated = [short_place(str(file), args.source) for file in found if file not in files]
    notes["left_out"]["repeated"] = _first(repeated)
    if "reward" not in reader.columns:
        seen = (numbers_in(parsed(raw)) for _, raw in islice(read_records(files[0]), _LOOKED_AT))
        notes["numbers"] = list(dict.fromkeys(chain.from_iterable(seen)))
    return rows, notes


def _parts(files: Sequence[Path]) -> Iterator[list[tuple[str, bytes | Record]]]:
    """The records of each shard, which are of one file."""
    for file in files:
        records = read_records(file)
        while part := list(islice(records, RECORDS_PER_SHARD)):
            yield part


def _first(places: list[str]) -> Json:
    return {"count": len(places), "first": places[:_NAMED]}


def _summary(folder: Path, reader: RecordReader) -> tuple[int, Json]:
    """Rows, and for the manifest what they have and what was left out."""
    filled, rows, temperatures = Counter[str](), 0, set[float | None]()
    problems, runs = set[str](), set[str]()
    left_out: dict[str, list[str]] = {}
    for shard in shards_of(folder):
        table = read_shard(shard)
        rows += len(table)
        filled.update({name: len(table) - table[name].null_count for name in table.column_names})
        problems |= set(table["problem_id"].unique().to_pylist())
        if ROLLOUT in table.column_names:
            runs |= set(table[ROLLOUT].drop_null().unique().to_pylist())
        if TEMPERATURE in table.column_names:
            temperatures |= set(table[TEMPERATURE].unique().to_pylist())
        for kind, places in notes_of(shard).items():
            left_out.setdefault(kind, []).extend(places)
    return rows, {
        "format": reader.format.source,
        "problems": len(problems),
        "rollouts": len(runs) + rows - filled[ROLLOUT],
        "filled": dict(filled),
        "lacking": [name for name in reader.columns if not filled[name]],
        "temperatures": sorted({1.0 if value is None else value for value in temperatures}),
        "left_out": {kind: _first(places) for kind, places in left_out.items()},
        "loses": reader.format.loses,
    }
