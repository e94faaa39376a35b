"""Rows for the Hub: the shards as they are, their manifest, and a card with counts."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from trl import is_conversational

from topr_trl.data.masks import MASK, have_masks
from topr_trl.data.rows import ROLLOUT, problem_column
from topr_trl.data.tables import TABLE_SUFFIXES, columns_of, from_table, read_shard, shards_of
from topr_trl.hub.cards import dataset_card
from topr_trl.hub.commit import README, Parcel
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import sampling_of

_COUNTED = (
    "reward", "reward_after_baseline", "label", "verdict", "finish_reason", "mu_fingerprint",
)  # fmt: skip
_SHOWN, _LONG = 5, 300  # texts that are shown before they are published, and characters of each
_MOST_VALUES = 6  # of a column; with more, only their number and range are shown


def holds_rows(path: Path) -> bool:
    """Whether a folder or a file holds rows with a prompt and a completion."""
    files = sorted(path.glob("*.parquet"))[:1] if path.is_dir() else [path]
    files = [file for file in files if file.suffix in TABLE_SUFFIXES]
    columns = set(columns_of(files[0])) if files else set()
    return "prompt" in columns and bool({"completion", "completion_ids"} & columns)


def said_by_others(path: Path) -> list[str]:
    """A few of the texts that the model did not write: results of tools, turns of users that answer it.

    From the first rows of each shard that have some. Where only a mask tells them apart, it is the completion that they
    are in, or how many token ids.
    """
    by_shard = [list(islice(_said_by_others(shard), _SHOWN)) for shard in shards_of(path)]
    in_turn = (text for of_place in zip_longest(*by_shard) for text in of_place if text is not None)
    return [text[:_LONG] for text in islice(in_turn, _SHOWN)]


def _said_by_others(shard: Path) -> Iterator[str]:
    table = read_shard(shard, ("prompt", "completion", MASK, "sampler_logps"))
    if not have_masks(from_table(table)):
        table = table.select([name for name in ("prompt", "completion") if name in table.column_names])
    for row in from_table(table):  # decoded: `datasets` may keep messages as JSON
        for messages, at_first in ((row.get("prompt"), True), (row.get("completion"), False)):
            if is_conversational({"messages": messages}):
                yield from _not_the_models(messages, at_first)
        mask, logps, text = (row.get(name) for name in (MASK, "sampler_logps", "completion"))
        read = [value is None for value in logps or ()] if mask is None else [not value for value in mask]
        if any(read) and not is_conversational({"messages": text}):
            yield text if isinstance(text, str) and text else f"{sum(read)} token ids in completion_ids"


def _not_the_models(messages: list[dict[str, Any]], at_first: bool) -> Iterator[str]:
    """Messages that are not the assistant's; `at_first` the task itself, before its first turn, is not listed."""
    for message in messages:
        at_first = at_first and message["role"] in ("system", "developer", "user")
        if message["role"] not in ("assistant", "system", "developer") and not at_first:
            yield f"{message['role']}: {message['content']}"


@dataclass
class Counts:
    """Counts of rows: columns with their types, number of rows, problems, and values of some columns."""

    columns: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    alone: int = 0  # rows that are no parts of a rollout
    rollouts: set[Any] = field(default_factory=set)
    problems: set[Any] = field(default_factory=set)
    values: dict[str, Counter[Any]] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        trajectories = self.alone + len(self.rollouts)
        facts = {"rows": f"{self.rows:,}", "trajectories": f"{trajectories:,}"}
        facts = facts if trajectories < self.rows else {"completions": f"{self.rows:,}"}
        facts["problems"] = f"{len(self.problems):,}"
        for name, counter in self.values.items():
            if name == "mu_fingerprint":
                continue  # shown among the settings
            if len(counter) <= _MOST_VALUES:
                parts = [f"{_named(value)}: {n:,} ({n / self.rows:.1%})" for value, n in counter.most_common()]
            else:
                numbers = [value for value in counter if isinstance(value, float)]
                parts = [f"{len(counter):,} values"]
                parts += [f"from {min(numbers):g} to {max(numbers):g}"] if numbers else []
            facts[f"`{name}`"] = ", ".join(parts)
        return facts


def _named(value: Any) -> str:
    return "none" if value is None else f"{value:+g}" if isinstance(value, float) else str(value)


def counts_of(shards: list[Path]) -> Counts:
    """Count rows, one shard after the other; a ValueError if columns differ, or there is no row."""
    found = Counts()
    for shard in shards:
        table = read_shard(shard)
        columns = {column.name: str(column.type) for column in table.schema}
        found.columns = found.columns or columns
        if odd := sorted(set(found.columns) ^ set(columns)):
            raise ValueError(
                f"{shard}: all files of rows need the same columns; they differ in {', '.join(odd)}. Write them again."
            )
        found.rows += len(table)
        rollouts = table[ROLLOUT] if ROLLOUT in columns else pa.nulls(len(table))
        found.alone += rollouts.null_count
        found.rollouts |= set(rollouts.unique().to_pylist()) - {None}
        if "problem_id" in columns:
            found.problems |= set(table["problem_id"].unique().to_pylist())
        else:
            found.problems |= set(problem_column(from_table(table)))
        for name in [name for name in _COUNTED if name in columns]:
            counted = pc.value_counts(table[name]).to_pylist()
            found.values.setdefault(name, Counter()).update({each["values"]: each["counts"] for each in counted})
    if found.rows == 0:
        raise ValueError(f"There is no row in {shards[0].parent}.")
    return found


def _without_paths(path: Path) -> bytes:
    """A manifest in which paths of this machine are cut to their last part; what its fingerprint depends on stays."""
    known = json.loads(path.read_text())
    for stage in known["stages"].values() if "stages" in known else [known]:
        stage["sources"] = {}
        stage["inputs"] = _cut(stage["inputs"])
    return json.dumps(known, indent=1).encode()


def _cut(value: Any) -> Any:
    """JSON in which each absolute path is its last part."""
    if isinstance(value, dict):
        return {name: _cut(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def pack_rows(path: Path, repo_id: str) -> Parcel:
    """A folder of shards, or a file of rows, as a dataset; see `topr_trl.hub.push.pack`."""
    shards = shards_of(path)
    found = counts_of(shards)
    files: dict[str, Path | bytes] = {shard.name: shard for shard in shards}
    if (note := path / manifest.NAME).is_file():
        # With it, a folder that was loaded from the Hub is complete for the stages.
        files[manifest.NAME] = _without_paths(note)
    names = "*.parquet" if path.is_dir() else path.name
    computed_by = sorted(filter(None, found.values.get("mu_fingerprint", [])))
    card = dataset_card(repo_id, found.columns, found.facts(), found.rows, names, sampling_of(path), computed_by)
    kept = {README, *files}
    left_out = [p.name for p in sorted(path.glob("[!.]*")) if p.name not in kept] if path.is_dir() else []
    return Parcel("dataset", {**files, README: str(card).encode()}, tuple(left_out), ("*.parquet", manifest.NAME))
