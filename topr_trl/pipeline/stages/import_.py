"""Convert rollout files from other systems into rows."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from topr_trl.curation import counted
from topr_trl.data.rows import ROLLOUT, TURN_REWARDS
from topr_trl.data.sampler_logps import TEMPERATURE
from topr_trl.data.tables import atomic_write, read_shard, shard_path, shards_of
from topr_trl.importing.format import LeftOut, Placed
from topr_trl.importing.input_settings import ALL_TURNS, LAST_TURN
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.record_files import count_records, files_of
from topr_trl.importing.record_rewards import UnknownLabel, numbers_in
from topr_trl.importing.record_to_rows import Part, RecordReader, short_place
from topr_trl.importing.row_table import to_table
from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import FolderArguments
from topr_trl.pipeline.shards import write_shard
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import values_of
from topr_trl.recording.store import recording_id, recording_in
from topr_trl.user_warnings import printable

RECORDS_PER_SHARD = 1_000
_MOST_REWARDS = 6  # maximum number of distinct rewards that the summary lists
_REWARDS = ("reward", TURN_REWARDS)  # a row has at most one of these columns
_RECORDS_WITH_LABELS = 20_000  # number of records in which to look for other unknown labels
_MOST_LABELS = 20  # maximum number of unknown labels that an error lists
_MOST_PLACES = 5  # maximum number of skipped records that the summary lists for each reason


@dataclass
class ImportArguments(FolderArguments, ReadingArguments):
    """Settings of `topr import`."""

    input: str | None = field(
        default=None, metadata={"help": "File, folder or hub:owner/name[:[config/]split][@revision] of logs. Required."}
    )


class Import(Stage[ImportArguments]):
    """Stage that converts records from other systems into rows, `RECORDS_PER_SHARD` records per shard."""

    settings = ImportArguments
    outcome = "Rows in {folder}/: {rows:,}."
    order = 0

    def inputs(self) -> Json:
        """Return the files and all settings."""
        args = self.args
        named = {"rewards": args.rewards, "requests": args.requests}
        second = {name: manifest.fingerprint(Path(path)) for name, path in named.items() if path}
        own = [f.name for f in fields(args) if f.name not in ("input", "output_dir", *named)]
        # Identify a recording by its id, because the recording may grow. The finished import of a killed command then
        # stays valid when the command is started again.
        recording = recording_in(args.source)
        source = recording_id(recording) if recording else manifest.fingerprint(args.source)
        return {"input": source, **second, **values_of(args, own)}

    def make(self) -> Result:
        """Write the missing shards.

        Raises:
            ValueError: no record can be used, or a record does not match the format. The error for such a record names
                the file and the place of the record.
        """
        args = self.args
        reader = RecordReader(args, args.source)
        found = files_of(args.source)
        files = reader.format.without_repeats(found)
        shards = sum(-(-count // RECORDS_PER_SHARD) for count in count_records(files, reader.format.join))
        if not shards:
            raise ValueError(f"{args.source} has no record.")
        if recording_in(args.source):
            with suppress(PermissionError):  # of a folder of another user
                self.folder.chmod(0o700)  # Only the user can read a recording.
            # Remove the shards of a killed import, because the recording may have grown since then.
            for shard in self.folder.glob("*-of-*.parquet"):
                shard.unlink()
        if args.rollout_field:
            all_records = chain.from_iterable(map(reader.records_of, files))
            reader.find_runs(tqdm(all_records, desc="Finding runs", unit="record"), args.rollout_field)
        conversational: bool | None = None  # whether the first row has messages as its prompt; None until a row is read
        waiting: list[tuple[Path, Part]] = []  # shards to write once `conversational` is known
        for k, records in enumerate(
            # A recording may have grown since its records were counted, so stop after the counted shards.
            tqdm(
                islice(_records_by_shard(map(reader.records_of, files)), shards),
                total=shards,
                desc=f"Importing {reader.name}",
                unit="shard",
            )
        ):
            path = shard_path(self.folder, k, shards)
            is_made = path.is_file() and _notes_file(path).is_file()
            if conversational is not None and is_made and not reader.format.names_calls:
                continue
            with _listing_unknown_labels(reader, files):
                part = reader.read(records)
            waiting.append((path, part))
            if conversational is None and part.rows:
                conversational = isinstance(part.rows[0]["prompt"], list)
            if conversational is None:
                continue
            for shard, made in waiting:
                kept = {name: value for name, value in made._asdict().items() if name != "rows"}
                with atomic_write(_notes_file(shard)) as partial:
                    partial.write_text(json.dumps(kept))
                if not shard.is_file():
                    table = to_table(made.rows, reader.columns, conversational)
                    write_shard(table, shard, {self.name: []})
            waiting.clear()
        if waiting:
            left_out = {reason: sum(len(part.left_out[reason]) for _, part in waiting) for reason in LeftOut}
            why = "; ".join(_in_words(reason, count) for reason, count in left_out.items() if count)
            remedy = " Grade some of them first." if left_out[LeftOut.UNGRADED] and recording_in(args.source) else ""
            raise ValueError(f"{args.source}: none of its records holds a completion to learn from. {why}.{remedy}")
        rows, notes = _count_columns(self.folder, reader)
        repeated = [short_place(str(file), args.source) for file in found if file not in files]
        notes["left_out"][LeftOut.REPEATED] = _count_places(repeated)
        if "reward" not in reader.columns:
            numbers = chain.from_iterable(map(numbers_in, reader.first_records()))
            notes["numbers"] = list(dict.fromkeys(numbers))
        return rows, notes

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return a description of the rows and of the skipped records, in several lines."""
        return printable(_describe(done))


# Texts for the summary, by the note of a row. See `LeftOut.text`.
_NOTED = {
    "several_turns": "row{|s} {has|have} several turns of the model, TURNS",
    "ends_with_user": "row{|s} end{s|} with a turn of the user, which is not learned",
    "printed": "completion{|s} {is|are} the printed text{|s} of {a |}Python object{|s}, and {is|are} read as text",
    "placeholder": "prompt{|s} or completion{|s} {is a word|are words} for a missing value, such as nan, and {is|are} "
    "read as text",
    "partial": "row{|s} lack{s|} some of the --reward_fields, and get{s|} the sum of the others",
    "redacted": "row{|s} {has|have} text that --redact blanked out, and no token ids",
}
_TEXTS = {**{reason.value: f"{reason.text} and {{is|are}} left out" for reason in LeftOut}, **_NOTED}
_TURNS = {
    ALL_TURNS: "which all get the reward of the row (if it is for the last turn alone, set --completion last_turn)",
    LAST_TURN: "and only the last turn is trained on",
}


def _describe(done: Json) -> str:
    rows, rollouts, problems = done["rows"], done["rollouts"], done["problems"]
    has = [f"{name}{'' if n == rows else f' in {n:,}'}" for name, n in done["filled"].items() if n]
    title = f"Recognized as {recognized}" if (recognized := done.get("recognized")) else "Format"
    # Only contributors need the names of source files.
    made_by = re.sub(r" \([^()]*\.py\b[^()]*\)", "", done["format"])
    lines = [f"{title}: {made_by}. Rows have {', '.join(has)}."]
    if done.get("chat"):
        lines.append("Text was converted to chat messages, so the chat template of the model applies. For plain text, "
                     "set --chat false.")  # fmt: skip
    if read_from := done.get("read_from"):
        columns = ", ".join(f"{' or '.join(names)} ({what})" for what, names in read_from.items())
        lines.append(f"Read from columns: {columns}.")
    if done["lacking"]:
        lacking = ("right answers" if name == "answer" else name for name in done["lacking"])
        lines.append(f"Not in these files: {', '.join(lacking)}.")
    runs = counted(rollouts, "run") if rollouts < rows else counted(rows, "row")
    if 1 < rollouts == problems:
        lines.append(
            f"{runs}, each for a different problem. If some of them share a problem, give topr import --problem_field, "
            "the field with its id. topr trial, baseline='group_mean' and some curation rules group rows by problem."
        )
    else:
        lines.append(f"{runs} of {counted(problems, 'problem')}.")
    if turns := done.get("rated_turns"):
        whole = rows - done["filled"][TURN_REWARDS]
        lines.append(f"{turns:,} turns have rewards of their own, and {whole:,} rows have one reward.")
    if rewards := done["rewards"]:
        lines.append(_describe_rewards(rewards, "rating" if turns else "row"))
    else:
        found = done.get("numbers")
        numbers = f" Fields with numbers: {', '.join(found)}." if found else ""
        lines.append("There are no rewards. Set --reward_fields to the fields with rewards, set --rewards to a file of "
                     f"rewards, or score the rows with topr score.{numbers}")  # fmt: skip
    if done["temperatures"][1:] or 0 in done["temperatures"]:
        found = ", ".join(f"{value:g}" for value in done["temperatures"])
        lines.append(f"The rows were sampled at temperatures {found}. The trainer needs one temperature above 0: "
                     "import files of one temperature, or set topr import --temperature.")  # fmt: skip
    places = done["left_out"] | done["noted"]
    for kind in _TEXTS:
        if kind in places and (count := places[kind]["count"]):
            first = places[kind]["first"]
            text = _in_words(kind, count).replace("TURNS", _TURNS[done["completion"]])
            lines.append(f"{text}: {', '.join(first)}{', ...' * (count > len(first))}.")
    if not_read := done["not_read"]:
        lines.append(f"Not read: {', '.join(not_read)}.")
    if not done["filled"].get("sampler_logps"):
        lines.append("There are no log-probabilities. Where log μ is needed, the starting model will compute it, as if "
                     "it had written the rows.")  # fmt: skip
    return "\n".join([*lines, done["loses"]]).strip()


def _in_words(reason: str, count: int) -> str:
    """Return the number of records or rows with the text for a reason."""
    return f"{count:,} " + re.sub(r"{([^|]*)\|([^}]*)}", lambda pair: pair[1 + (count > 1)], _TEXTS[reason])


def _describe_rewards(rewards: list[tuple[float, int]] | list[float], unit: str) -> str:
    """Return the number of units with each reward, or the range of the rewards if there are many values."""
    if isinstance(rewards[0], float):
        return f"Rewards range from {rewards[0]:g} to {rewards[1]:g}."
    counts = [f"{value:g} in {counted(n, unit)}" for value, n in rewards]
    return f"Rewards: {', '.join(counts)}."


@contextmanager
def _listing_unknown_labels(reader: RecordReader, files: Sequence[Path]) -> Iterator[None]:
    """Add the unknown labels of the first records to the error for the first unknown label."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__context__, UnknownLabel):
            raise
        records = islice(chain.from_iterable(map(reader.records_of, files)), _RECORDS_WITH_LABELS)
        unknown = dict.fromkeys(reader.unknown_labels(records))
        shown = ", ".join(list(unknown)[:_MOST_LABELS]) + ", ..." * (len(unknown) > _MOST_LABELS)
        where = f"Labels without a number in the first {_RECORDS_WITH_LABELS:,} records"
        raise ValueError(f"{error} {where}: {shown or 'none'}.") from None


def _records_by_shard(files: Iterable[Iterator[Placed]]) -> Iterator[Iterator[Placed]]:
    """Yield an iterator over the records of each shard. A shard holds records of one file only."""
    for records in files:
        for first in records:
            shard = chain((first,), islice(records, RECORDS_PER_SHARD - 1))
            yield shard
            for _ in shard:  # Read past records that the caller skipped.
                pass


def _notes_file(shard: Path) -> Path:
    """Return the file with the notes about a shard. Notes name files of the user, so a shard must not hold them."""
    return shard.parent / manifest.WORK / f"{shard.stem}.json"


def _count_places(places: list[str]) -> Json:
    return {"count": len(places), "first": places[:_MOST_PLACES]}


def _count_rewards(rewards: NDArray[np.float64]) -> list[tuple[float, int]] | list[float]:
    """Return each reward with its number of rows, or only the smallest and the largest if there are many."""
    values, counts = (found.tolist() for found in np.unique(rewards, return_counts=True))
    return list(zip(values, counts, strict=True)) if len(values) <= _MOST_REWARDS else [values[0], values[-1]]


def _count_columns(folder: Path, reader: RecordReader) -> tuple[int, Json]:
    """Return the number of rows, and notes for the manifest, such as counts of values, problems and skipped records."""
    filled, rows, temperatures = Counter[str](), 0, set[float | None]()
    problems, runs, rewards = set[str](), set[str](), list[NDArray[np.float64]]()
    rated_turns = 0
    left_out: dict[str, list[str]] = {}
    noted: dict[str, list[str]] = {}
    not_read, read_from = Counter[str](), dict[str, list[str]]()
    for shard in shards_of(folder):
        table = read_shard(shard)
        rows += len(table)
        filled.update({name: len(table) - table[name].null_count for name in table.column_names})
        problems |= set(table["problem_id"].unique().to_pylist())
        if "reward" in table.column_names:
            rewards.append(table["reward"].drop_null().to_numpy())
        if TURN_REWARDS in table.column_names:
            of_turns = table[TURN_REWARDS].combine_chunks().flatten().drop_null().to_numpy()
            rewards.append(of_turns)
            rated_turns += len(of_turns)
        if ROLLOUT in table.column_names:
            runs |= set(table[ROLLOUT].drop_null().unique().to_pylist())
        if TEMPERATURE in table.column_names:
            temperatures |= set(table[TEMPERATURE].unique().to_pylist())
        shard_notes = json.loads(_notes_file(shard).read_text())
        not_read.update(shard_notes["not_read"])
        for what, names in shard_notes.get("read_from", {}).items():
            read_from[what] = list(dict.fromkeys([*read_from.get(what, ()), *names]))
        for name, found in (("left_out", left_out), ("noted", noted)):
            for kind, places in shard_notes[name].items():
                found.setdefault(kind, []).extend(places)
    return rows, {
        "format": reader.format.source,
        "recognized": None if reader.args.format else reader.name,
        "chat": reader.chat,
        "problems": len(problems),
        "rollouts": len(runs) + rows - filled[ROLLOUT],
        "filled": dict(filled),
        "rewards": _count_rewards(np.concatenate(rewards)) if rewards else [],
        "rated_turns": rated_turns,
        "lacking": [name for name in reader.columns if not filled[name] and not (name in _REWARDS and rewards)],
        "temperatures": sorted({1.0 if value is None else value for value in temperatures}),
        "left_out": {kind: _count_places(places) for kind, places in left_out.items()},
        "noted": {kind: _count_places(places) for kind, places in noted.items()},
        "not_read": dict(not_read),
        "read_from": read_from,
        "completion": reader.args.completion,
        "loses": reader.format.loses,
    }
