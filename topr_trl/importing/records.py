"""Shared parts of the formats of other systems: records in files, checked fields, and rows."""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr_trl.data.messages import plain_content
from topr_trl.data.sampler_logps import LOGPROBS_MODE, SAMPLING
from topr_trl.data.tables import rows_of, unreadable

Record = dict[str, Any]
Row = dict[str, Any]

_CALL = pa.struct({"name": pa.string(), "arguments": pa.string()})
MESSAGES = pa.list_(
    pa.struct({
        "role": pa.string(), "content": pa.string(), "reasoning_content": pa.string(), "name": pa.string(),
        "tool_call_id": pa.string(),
        "tool_calls": pa.list_(pa.struct({"id": pa.string(), "type": pa.string(), "function": _CALL})),
    })
)  # fmt: skip
IDS, LOGPS = pa.list_(pa.int32()), pa.list_(pa.float32())
TEXT, NUMBER = pa.string(), pa.float64()
_COMPRESSED = (".zst", ".gz")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a character beyond 16 bits is two of them in JSON
_LONG = 60  # characters of a value in a message

# What rows may have besides prompt and completion.
COLUMNS: dict[str, pa.DataType] = {
    "prompt_ids": IDS, "completion_ids": IDS, "completion_mask": pa.list_(pa.int8()), "sampler_logps": LOGPS,
    "reward": NUMBER, "problem_id": TEXT, "rollout_id": TEXT, "finish_reason": TEXT, "answer": TEXT, "tools": TEXT,
    **dict(zip(SAMPLING, (NUMBER, NUMBER, pa.int64()), strict=True)), LOGPROBS_MODE: TEXT,
}  # fmt: skip


class NotOfFormat(ValueError):
    """A record is not what the format says: a field is missing, unknown or of another kind."""


class Unrewarded(NotOfFormat):
    """Nothing says what a record is worth."""


class Evaluated(Exception):
    """A record of an evaluation, whose completions are not to be learned from."""


@dataclass(frozen=True)
class Format:
    """A format that rows can be made of.

    Attributes:
        source: the project, its version or commit, and the file that writes this: `required` and `optional` are from
            there.
        suffix: of the files.
        rows: what a record becomes; None for a completion without anything to learn from. They may have a `reward`.
        rewards: else the numbers of a record that may be its reward, by name; none if such files have no reward.
        columns: of `COLUMNS`, what its rows may have besides prompt, completion, problem_id and reward.
        required, optional: the fields of a record; no `optional` if there may be any, such as one for each reward.
        loses: what such files do not have, and what that means.
        without_repeats: of the files by name those whose records are not in others.
    """

    source: str
    suffix: str
    rows: Callable[[Record], Sequence[Row | None]]
    rewards: Callable[[Record], dict[str, Any]] | None
    columns: tuple[str, ...]
    required: frozenset[str]
    optional: frozenset[str] | None = frozenset()
    loses: str = ""
    without_repeats: Callable[[list[Path]], list[Path]] = list

    def __post_init__(self) -> None:
        assert set(self.columns) <= set(COLUMNS), f"{set(self.columns) - set(COLUMNS)} are no columns of rows"

    def check(self, record: Any, ignored: Iterable[str] = ()) -> None:
        """A `NotOfFormat` that names the fields that are missing, or that this format does not know."""
        if not isinstance(record, dict):
            raise NotOfFormat(f"it must be a JSON object, and is a {type(record).__name__}: write one record per line")
        if missing := sorted(self.required - set(record)):
            more = "; --format messages reads lists of messages" * ("messages" in record)
            raise NotOfFormat(f"it lacks {', '.join(missing)}; it has {', '.join(sorted(record))}{more}")
        known = self.required | (set(record) if self.optional is None else self.optional) | set(ignored)
        if unknown := sorted(set(record) - known):
            raise NotOfFormat(
                f"it has {', '.join(unknown)}, which {self.source} does not write. Name fields that may be left out "
                "with --ignore_fields"
            )


def files_of(path: Path, suffix: str) -> list[Path]:
    """The files of a folder (and of those in it) by name, or the one file.

    Raises:
        ValueError: there is none with this suffix, or there are others beside them.
    """
    if path.is_file():
        return [path]
    found, *others = (_files_in(path, kind) for kind in (suffix, *({".jsonl", ".parquet"} - {suffix})))
    kinds = {_plain(files[0]).suffix for files in others if files}
    if not found:
        kinds = {_plain(file).suffix for file in path.rglob("*") if file.is_file()} - {""}
    if not found or kinds:
        more = f"; it has {' and '.join(sorted(kinds))} files" if kinds else ""
        raise ValueError(f"{path} must hold {suffix} files of this format alone{more}. Name a file, or another folder.")
    for file, following in pairwise(found):  # a compressed copy comes right after the file
        if _plain(file) == _plain(following):
            raise ValueError(f"{file} and {following} hold the same records. Remove one, or name a file.")
    return found


def _files_in(folder: Path, suffix: str) -> list[Path]:
    """By name, compressed ones too."""
    found = (file for end in ("", *_COMPRESSED) for file in folder.rglob(f"*{suffix}{end}"))
    return sorted(found, key=lambda file: (_plain(file), file))


def _plain(file: Path) -> Path:
    """The name that a file has when it is not compressed."""
    return file.with_suffix("") if file.suffix in _COMPRESSED else file


def count_records(files: Sequence[Path]) -> list[int]:
    """Lines or rows of each file."""
    return [rows_of(path) if path.suffix == ".parquet" else _lines(path) for path in files]


def _lines(path: Path) -> int:
    return sum(1 for _ in _read_lines(path))


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers; a truncated file ends with one that is not valid JSON."""
    number = 0
    with io.BufferedReader(pa.input_stream(path)) as file:  # decompresses by the suffix of the file
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except OSError as error:
            if number == 0:
                raise unreadable(path, error) from error
            yield number + 1, b"{"


def read_records(path: Path) -> Iterator[tuple[str, bytes | Record]]:
    """Records with their place; lines as they are, see `parsed`: those that are skipped need not be."""
    if path.suffix == ".parquet":
        rows = (row for batch in pq.ParquetFile(path).iter_batches(1_024) for row in batch.to_pylist())
        yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows))
        return
    yield from ((f"{path}, line {n}", line) for n, line in _read_lines(path))


def parsed(raw: bytes | Record) -> Any:
    """Parse a line; None if it is not valid JSON or has an unpaired surrogate (text cut inside an emoji)."""
    if not isinstance(raw, bytes):
        return raw
    try:
        found = json.loads(raw)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode()
    except (json.JSONDecodeError, UnicodeError):
        return None
    return found


def to_table(made: list[Row], places: list[str], columns: Sequence[str], conversational: bool) -> pa.Table:
    """Rows as a table of these columns, whose prompts are text or messages.

    Raises:
        ValueError: a value is of another kind; it names the place of its record.
    """
    text = MESSAGES if conversational else TEXT
    found = {}
    for name, kind in {"prompt": text, "completion": text, **{name: COLUMNS[name] for name in columns}}.items():
        values = [row.get(name) for row in made]
        if (array := _array(values, kind)) is None:
            wrong = next(n for n, value in enumerate(values) if _array([value], kind) is None)
            raise ValueError(f"{places[wrong]}: its {name} is {_short(values[wrong])}, and must be {_kind(kind)}.")
        found[name] = array
    return pa.table(found)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        return None


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _kind(kind: pa.DataType) -> str:
    names = {TEXT: "text", NUMBER: "a number", MESSAGES: "messages", IDS: "token ids"}
    return names.get(kind, "a list of numbers")


# Parts of records that several formats share.


def message(given: Mapping[str, Any]) -> Row:
    """A message of a chat as `MESSAGES` has it: arguments of calls as JSON; text of content that comes in parts.

    Raises:
        NotOfFormat: it has no role, or shows images.
    """
    if "role" not in given:
        raise NotOfFormat(f"a message has no role; it has {', '.join(sorted(given))}")
    try:
        content = plain_content(given.get("content"))
    except ValueError as error:
        raise NotOfFormat(str(error)) from None
    calls = [_call(json.loads(call) if isinstance(call, str) else call) for call in given.get("tool_calls") or ()]
    calls += [_call(given["function_call"])] if given.get("function_call") else []  # OpenAI's, before 2023-11
    return {
        "role": given["role"], "content": content, "tool_calls": calls or None, "name": given.get("name"),
        "reasoning_content": given.get("reasoning_content") or given.get("reasoning"),
        "tool_call_id": given.get("tool_call_id"),
    }  # fmt: skip


def row_of_run(messages: list[Row], **columns: Any) -> list[Row]:
    """One row, whose completion begins with the first turn of the assistant; none without such a turn."""
    first = next((n for n, each in enumerate(messages) if each["role"] == "assistant"), None)
    return [] if first is None else [{"prompt": messages[:first], "completion": messages[first:], **columns}]


def text_or_messages(given: object) -> object:
    """Text as it is, messages each as `message` has it."""
    return [message(each) for each in given] if isinstance(given, list) else given


def _call(given: Mapping[str, Any]) -> Row:
    """A call of a tool; its name and arguments may be in `function`, or beside its id."""
    function = given.get("function") or given
    arguments = _as_json(function.get("arguments"))
    return {"id": given.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def has_broken_call(row: Row) -> bool:
    """Whether arguments of a tool call are not valid JSON, as after a cut, and no token ids say what was written."""
    said = [
        each
        for name in ("prompt", "completion")
        if isinstance(row[name], list) and not row.get(f"{name}_ids")
        for each in row[name]
    ]
    calls = (call for each in said if isinstance(each, dict) for call in each.get("tool_calls") or ())
    return any(parsed((call["function"]["arguments"] or "{}").encode()) is None for call in calls)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def tools_as_json(tools: Any) -> str | None:
    """Tools as JSON (in a table each would have the parameters of all), with name and parameters in `function`."""
    if not tools or isinstance(tools, str):
        return tools or None
    return json.dumps([tool if "function" in tool else {"type": "function", "function": tool} for tool in tools])


_FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "eos": "stop", "eos_token": "stop",
            "max_tokens": "length"}  # fmt: skip


def finish_reason(given: str | None) -> str | None:
    """`stop` or `length`; None for anything else."""
    return _FINISHED.get(given or "")
