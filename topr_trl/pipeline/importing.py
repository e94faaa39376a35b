"""The stage `import`: files of other systems become rows, shard by shard."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from topr_trl.data.rows import hash_prompts
from topr_trl.data.tables import read_shard, shard_path, shards_of
from topr_trl.formats import FORMATS
from topr_trl.formats.records import (
    Format,
    NotOfFormat,
    Record,
    Row,
    count_records,
    files_of,
    parsed,
    read_records,
    to_table,
)
from topr_trl.pipeline.arguments import ImportArguments
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.shards import Made, notes_of, write_shard

RECORDS_PER_SHARD = 1_000
_NAMED = 5  # places of what was left out that the summary lists


def import_rows(args: ImportArguments) -> Made:
    """Rows of the records, `RECORDS_PER_SHARD` records per shard; shards that are there are kept.

    Raises:
        ValueError: a record is not of the format; it names file and line.
    """
    reader = _Reader(args)
    files = files_of(args.source, reader.format.suffix)
    shards = sum(-(-count // RECORDS_PER_SHARD) for count in count_records(files))
    if not shards:
        raise ValueError(f"{args.source} has no record.")
    conversational: bool | None = None  # whether prompts are messages: by the first row
    waiting: list[tuple[Path, _Part]] = []  # shards before it, whose columns have its types
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
        count = sum(len(places) for _, made in waiting for places in made.left_out.values())
        raise ValueError(f"{args.source}: none of its {count:,} records holds a completion to learn from.")
    return _summary(args.folder, reader)


def _parts(files: Sequence[Path]) -> Iterator[list[tuple[str, bytes | Record]]]:
    """The records of each shard, which are of one file."""
    for file in files:
        records = read_records(file)
        while part := list(islice(records, RECORDS_PER_SHARD)):
            yield part


class _Part(NamedTuple):
    """Rows of some records with the places of these, and the places of records that gave no row, by reason."""

    rows: list[Row]
    places: list[str]
    left_out: dict[str, list[str]]


class _Reader:
    """Reads records of a format, with what the settings and second files say of them."""

    def __init__(self, args: ImportArguments) -> None:
        self.args = args
        self.format: Format = FORMATS[args.format]
        self.rewards = _by_id(args.rewards, "id", "reward")
        self.requests = _by_id(args.requests, "custom_id", "body")
        has_reward = self.format.rewards is not None or args.reward_fields or self.rewards is not None
        self.columns = (*self.format.columns, *(["reward"] if has_reward else []))

    def read(self, records: Iterable[tuple[str, bytes | Record]]) -> _Part:
        """Rows of the records of a shard."""
        part = _Part([], [], {"broken": [], "empty": []})
        for place, raw in records:
            if (record := parsed(raw)) is None:
                part.left_out["broken"].append(place)
                continue
            try:
                rows = self._rows(record)
            except NotOfFormat as error:
                raise ValueError(f"{place}: {error}.") from None
            except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
                raise ValueError(
                    f"{place}: it is not as {self.format.source} writes it ({type(error).__name__}: {error})."
                ) from error
            part.rows.extend(rows)
            part.places.extend([place] * len(rows))
            if not rows:
                part.left_out["empty"].append(place)
        return part

    def _rows(self, record: Record) -> list[Row]:
        self.format.check(record, self.args.ignore_fields or ())
        if self.requests is not None:
            record = {**record, "request": _found(self.requests, record, "custom_id", "--requests")}
        rows, reward = self.format.rows(record), self._reward(record)
        for row in rows:
            row["reward"] = row.get("reward", reward)  # a record may hold several graded completions
            if row.get("problem_id") is None:
                row["problem_id"] = hash_prompts([row.get("prompt_ids") or row["prompt"]])[0]
        return rows

    def _reward(self, record: Record) -> float | None:
        """What a record is worth by the settings, or else by the format; None if neither says."""
        if self.rewards is not None:
            return float(_found(self.rewards, record, self.args.id_field, "--rewards"))
        if self.args.reward_fields:
            values = {name: _dig(record, name) for name in self.args.reward_fields}
        elif self.format.rewards is None:
            return None
        elif len(values := self.format.rewards(record)) != 1:
            which = f"{', '.join(values)} may all be" if values else "no number can be"
            raise NotOfFormat(f"{which} the reward: name the fields to add up with --reward_fields")
        # A reward function may have had nothing to say, if another had.
        known = {name: value for name, value in values.items() if value is not None} or values
        if wrong := [name for name, value in known.items() if not isinstance(value, int | float)]:
            raise NotOfFormat(f"{wrong[0]} is no number but {known[wrong[0]]!r}, and cannot be a reward")
        return float(sum(known.values()))


def _by_id(path: str | None, by: str, name: str) -> dict[Any, Any] | None:
    """Values of a second file by id; None if there is none."""
    if path is None:
        return None
    file, found = Path(path), {}
    for place, raw in read_records(file):
        record = parsed(raw)
        if not isinstance(record, dict) or not {by, name} <= set(record):
            raise ValueError(f"{place} must be JSON with the fields {by} and {name}.")
        found[record[by]] = record[name]
    return found


def _found(values: dict[Any, Any], record: Record, by: str, option: str) -> Any:
    known_by = _dig(record, by)
    if known_by not in values:
        raise NotOfFormat(f"{option} has nothing for the {by} {known_by!r}")
    return values[known_by]


def _dig(record: Record, path: str) -> Any:
    """The value of a field, or of one inside it: `info.score`."""
    value: Any = record
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise NotOfFormat(f"it has no field {path}; it has {', '.join(sorted(record))}")
        value = value[name]
    return value


def _summary(folder: Path, reader: _Reader) -> tuple[int, Json]:
    """Rows, and for the manifest what they have and what was left out."""
    filled, rows = Counter[str](), 0
    left_out: dict[str, list[str]] = {}
    for shard in shards_of(folder):
        table = read_shard(shard)
        rows += len(table)
        filled.update({name: len(table) - table[name].null_count for name in table.column_names})
        for kind, places in notes_of(shard).items():
            left_out.setdefault(kind, []).extend(places)
    return rows, {
        "format": reader.format.source,
        "filled": dict(filled),
        "lacking": [name for name in reader.columns if not filled[name]],
        "left_out": {kind: {"count": len(places), "first": places[:_NAMED]} for kind, places in left_out.items()},
        "loses": reader.format.loses,
    }
