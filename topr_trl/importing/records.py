"""Read the files of other systems and check their records, for all formats."""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr_trl.data.messages import check_weight, plain_content
from topr_trl.data.rendering import is_learned
from topr_trl.data.sampler_logps import LOGPROBS_MODE, SAMPLING
from topr_trl.data.tables import rows_of, unreadable
from topr_trl.importing import csv_tables, eval_archives, json_documents

Record = dict[str, Any]
Row = dict[str, Any]

_CALL = pa.struct({"name": pa.string(), "arguments": pa.string()})
MESSAGES = pa.list_(
    pa.struct({
        "role": pa.string(), "content": pa.string(), "reasoning_content": pa.string(), "name": pa.string(),
        "tool_call_id": pa.string(), "weight": pa.int8(),
        "tool_calls": pa.list_(pa.struct({"id": pa.string(), "type": pa.string(), "function": _CALL})),
    })
)  # fmt: skip
IDS, LOGPS = pa.list_(pa.int32()), pa.list_(pa.float32())
TEXT, NUMBER = pa.string(), pa.float64()
_COMPRESSED = (".zst", ".gz")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON writes a character above 16 bits as a pair of surrogates
_MOST_CHARACTERS = 60  # maximum length of a value in a message

# Columns that rows can have in addition to prompt and completion.
COLUMNS: dict[str, pa.DataType] = {
    "prompt_ids": IDS, "completion_ids": IDS, "completion_mask": pa.list_(pa.int8()), "sampler_logps": LOGPS,
    "reward": NUMBER, "problem_id": TEXT, "rollout_id": TEXT, "finish_reason": TEXT, "answer": TEXT, "tools": TEXT,
    "chat_template_kwargs": TEXT,
    **dict(zip(SAMPLING, (NUMBER, NUMBER, pa.int64()), strict=True)), LOGPROBS_MODE: TEXT,
}  # fmt: skip


class NotOfFormat(ValueError):
    """Error for a record that does not match its format: a field is missing, unknown or has another type."""


class LeftOut(StrEnum):
    """Reason why a completion or a record gives no row. The summary of an import counts each reason."""

    BROKEN = "broken"
    CALLS = "calls"
    EMPTY = "empty"
    EVALUATED = "evaluated"
    FAILED = "failed"
    FROZEN = "frozen"
    MASKED = "masked"
    UNGRADED = "ungraded"
    UNREWARDED = "unrewarded"
    OTHER = "other"
    TIED = "tied"
    UNUSABLE = "unusable"
    WHERE = "where"


class Unusable(NotOfFormat):
    """Error for a record of the right format that cannot be used, for instance because it has an image.

    Attributes:
        reason (`LeftOut`): Reason in the summary, if such records are left out.
        option (`str`): Setting that leaves such records out.
    """

    reason, option = LeftOut.UNUSABLE, "skip_unusable"


class Unrewarded(Unusable):
    """Error for a record without a reward."""

    reason, option = LeftOut.UNREWARDED, "skip_unrewarded"


@dataclass(frozen=True)
class Format:
    """Format of another system, and its conversion to rows.

    Attributes:
        source (`str`): Project, version and file that write the format. `required` and `optional` come from there.
        suffix (`str`): Suffix of the files: `.jsonl` for JSON in any layout, or `""` for any kind of file.
        rows (`Callable`): Function that converts a record to rows, which may have a `reward`. It returns None for an
            empty completion, and a `LeftOut` for a completion that is left out for another reason.
        rewards (`Callable`, *optional*): Function that returns the numbers of a record that can be its reward, by name.
            None if the rows have a `reward`, or the files have none.
        columns (`tuple[str, ...]`): Columns of `COLUMNS` that the rows may have, besides prompt, completion, problem_id
            and reward.
        required (`frozenset[str]`): Required fields of a record.
        optional (`frozenset[str]`, *optional*): Other fields of a record. With None, all fields are allowed.
        loses (`str`): Information that the files lack, and the consequences, for the user.
        without_repeats (`Callable`): Function that removes files whose records are also in other files. The files are
            sorted by name.
        records (`Callable`): Function that splits what a file holds into records, for instance a document into its
            samples.
        same (`str`, *optional*): Field that must be the same in all records of an import.
        chat (`bool`, defaults to `False`): Whether text is what a user and a chat model said.
    """

    source: str
    suffix: str
    rows: Callable[[Record], Sequence[Row | LeftOut | None]]
    rewards: Callable[[Record], dict[str, Any]] | None
    columns: tuple[str, ...]
    required: frozenset[str]
    optional: frozenset[str] | None = frozenset()
    loses: str = ""
    without_repeats: Callable[[list[Path]], list[Path]] = list
    records: Callable[[Record], Iterable[Record]] | None = None
    same: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        assert set(self.columns) <= set(COLUMNS), f"{set(self.columns) - set(COLUMNS)} are not columns of rows"

    def check(self, record: Any, ignored: Iterable[str] = ()) -> None:
        """Check the fields of a record.

        Args:
            record (`Any`): Record.
            ignored (`Iterable[str]`, *optional*): Unknown fields to accept.

        Raises:
            NotOfFormat: a field is missing or unknown.
        """
        if not isinstance(record, dict):
            raise NotOfFormat(f"it must be a JSON object, and is a {type(record).__name__}: write one record per line")
        if missing := sorted(self.required - set(record)):
            more = "; --format messages reads lists of messages" * ("messages" in record)
            raise NotOfFormat(f"it lacks {', '.join(missing)}; it has {', '.join(sorted(record))}{more}")
        known = self.required | (set(record) if self.optional is None else self.optional) | set(ignored)
        if unknown := sorted(set(record) - known):
            raise NotOfFormat(
                f"it has {', '.join(unknown)}, which {self.source} does not write. To ignore such fields, name them "
                "with --ignore_fields"
            )


def files_of(path: Path, suffix: str) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted by name. For a file, return the file.

    Args:
        path (`Path`): Folder or file.
        suffix (`str`): Suffix of the files. Compressed files have a second suffix.

    Raises:
        ValueError: the folder has no file with this suffix, or has files of other formats, too.
    """
    if path.is_file():
        return [path]
    known = _LIKE.get(suffix, (suffix,)) if suffix else SUFFIXES
    suffix = next((kind for kind in known if _files_in(path, kind)), suffix or "JSON, CSV or parquet")
    found, *others = (_files_in(path, kind) for kind in (suffix, *sorted(set(_OWN_FORMAT) - {suffix})))
    kinds = {_uncompressed(files[0]).suffix for files in others if files}
    if not found:
        kinds = {_uncompressed(file).suffix for file in path.rglob("*") if file.is_file()} - {""}
    if not found or kinds:
        more = f"; it has {' and '.join(sorted(kinds))} files" if kinds else ""
        raise ValueError(f"{path} must hold only {suffix} files of this format{more}. Name a file, or another folder.")
    for file, following in pairwise(found):  # A compressed copy comes right after its file.
        if _uncompressed(file) == _uncompressed(following):
            raise ValueError(f"{file} and {following} hold the same records. Remove one, or name a file.")
    return found


SUFFIXES = (".jsonl", ".parquet", ".eval", ".csv", ".tsv", ".ndjson", ".traj", ".json")
_OWN_FORMAT = (".jsonl", ".parquet", ".csv", ".tsv", ".eval")  # A folder must hold files of one of these suffixes only.
# Suffixes to look for, by the suffix of the format. The first one counts, because `.json` files may describe a run.
_LIKE = {".jsonl": (".jsonl", ".ndjson", ".traj", ".json"), ".eval": (".eval", ".json")}


def _files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix, compressed or not, sorted by name."""
    found = (file for end in ("", *_COMPRESSED) for file in folder.rglob(f"*{suffix}{end}"))
    return sorted(found, key=_by_name)


def _by_name(file: Path) -> tuple[Path, Path]:
    """Return the key that sorts a file and its compressed copy next to each other."""
    return _uncompressed(file), file


def _uncompressed(file: Path) -> Path:
    """Return the name of a file without the suffix of compression."""
    return file.with_suffix("") if file.suffix in _COMPRESSED else file


def count_records(files: Sequence[Path]) -> list[int]:
    """Return the number of records (lines or rows) in each file."""
    return [_count(path) for path in files]


def _count(path: Path) -> int:
    kind = _uncompressed(path).suffix
    if kind == ".parquet":
        return rows_of(path)
    if kind == eval_archives.SUFFIX:
        return eval_archives.count_samples(path)
    if kind in csv_tables.SUFFIXES:
        return csv_tables.count_rows(path)
    with _readable(path):
        by_lines = json_documents.is_by_lines(path)
        return sum(1 for _ in (_read_lines(path) if by_lines else json_documents.read_documents(path)))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Add the name of a file to errors of reading it, for instance of decompression."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers. For a truncated file, the last line is not valid JSON."""
    number = 0
    with io.BufferedReader(pa.input_stream(path)) as file:  # `input_stream` decompresses, according to the suffix.
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except OSError as error:
            if number == 0:
                raise unreadable(path, error) from error
            yield number + 1, b"{"


def read_records(path: Path) -> Iterator[tuple[str, bytes | Record]]:
    """Yield the place and the content of each record. Lines are not parsed, because callers skip some of them.

    Args:
        path (`Path`): File of records.
    """
    if path.suffix == ".parquet":
        with _readable(path):
            rows = (row for batch in pq.ParquetFile(path).iter_batches(1_024) for row in batch.to_pylist())
            yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows))
        return
    kind = _uncompressed(path).suffix
    if kind == eval_archives.SUFFIX:
        yield from ((f"{path}, {name}", sample) for name, sample in eval_archives.read_samples(path))
        return
    if kind in csv_tables.SUFFIXES:  # The header is row 1, as in a spreadsheet.
        yield from ((f"{path}, row {n}", row) for n, row in enumerate(csv_tables.read_table(path), 2))
        return
    with _readable(path):
        if json_documents.is_by_lines(path):
            yield from ((f"{path}, line {n}", line) for n, line in _read_lines(path))
        else:
            yield from ((f"{path}, record {n}", item) for n, item in enumerate(json_documents.read_documents(path), 1))


def parsed(raw: bytes | Record) -> Any:
    """Parse a line. Return None for a broken line.

    A broken line is not valid JSON, is nested too deeply, or has an unpaired surrogate (from text cut inside an emoji).

    Args:
        raw (`bytes` or `dict`): Line, or a record of a table, which is returned unchanged.
    """
    if not isinstance(raw, bytes):
        return raw
    try:
        found = json.loads(raw)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode()
    except (json.JSONDecodeError, UnicodeError, RecursionError):
        return None
    return found


def to_table(made: list[Row], places: list[str], columns: Sequence[str], conversational: bool) -> pa.Table:
    """Convert rows to a table.

    Args:
        made (`list[Row]`): Rows.
        places (`list[str]`): Place of the record of each row, for messages.
        columns (`Sequence[str]`): Columns of the table, in addition to prompt and completion.
        conversational (`bool`): Whether prompts and completions are messages. Otherwise, they are text.

    Raises:
        ValueError: a value has another type. The message names the place of its record.
    """
    text = MESSAGES if conversational else TEXT
    found = {}
    for name, kind in {"prompt": text, "completion": text, **{name: COLUMNS[name] for name in columns}}.items():
        values = [row.get(name) for row in made]
        if (array := _array(values, kind)) is None:
            wrong = next(n for n, value in enumerate(values) if _array([value], kind) is None)
            raise ValueError(
                f"{places[wrong]}: its {name} is {_shortened(values[wrong])}, and must be {_describe_type(kind)}."
            )
        found[name] = array
    return pa.table(found)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        return None


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _describe_type(kind: pa.DataType) -> str:
    names = {TEXT: "text", NUMBER: "a number", MESSAGES: "messages", IDS: "token ids"}
    return names.get(kind, "a list of numbers")


# Several formats use the functions below.


def message(given: Mapping[str, Any]) -> Row:
    """Convert a chat message to the type `MESSAGES`.

    Arguments of tool calls become JSON, and content in several parts becomes one text. Function results, which
    OpenAI's API had before tools, become tool results.

    Args:
        given (`Mapping[str, Any]`): Message in OpenAI's format.

    Raises:
        NotOfFormat: the message has no role.
        Unusable: the message contains an image, a part without text, or a weight other than 0 and 1.
    """
    if "role" not in given:
        raise NotOfFormat(f"a message has no role; it has {', '.join(sorted(given))}")
    try:
        content = plain_content(given.get("content"))
        check_weight(given)
    except ValueError as error:
        raise Unusable(str(error)) from None
    calls = [_call(json.loads(call) if isinstance(call, str) else call) for call in given.get("tool_calls") or ()]
    if given.get("function_call"):  # OpenAI's API used this field before 2023-11.
        calls.append(_call(given["function_call"]))
    reasoning = (given.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return {
        "role": "tool" if given["role"] == "function" else given["role"],
        "content": content or given.get("refusal") or content, "tool_calls": calls or None, "name": given.get("name"),
        "reasoning_content": next(filter(None, reasoning), None), "tool_call_id": given.get("tool_call_id"),
        **({"weight": 0} if given.get("weight") == 0 else {}),
    }  # fmt: skip


def row_of_run(messages: list[Row], **columns: Any) -> list[Row]:
    """Return one row, whose completion starts with the first assistant turn. Return [] without such a turn.

    A turn with weight 0 is skipped, because the model only reads it.

    Args:
        messages (`list[Row]`): Messages of the run.
        columns: Other columns of the row.
    """
    first = next((n for n, each in enumerate(messages) if is_learned(each)), None)
    return [] if first is None else [{"prompt": messages[:first], "completion": messages[first:], **columns}]


def text_or_messages(given: object) -> object:
    """Convert the messages in a list with `message`. Return text unchanged."""
    return [message(each) for each in given] if isinstance(given, list) else given


def _call(given: Mapping[str, Any]) -> Row:
    """Convert a tool call. Its name and arguments can be in the field `function` or next to its id."""
    function = given.get("function") or given
    arguments = _as_json(function.get("arguments"))
    return {"id": given.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def has_broken_call(row: Row) -> bool:
    """Return whether a tool call without token ids has arguments that are not valid JSON, for instance truncated."""
    turns = [
        turn
        for name in ("prompt", "completion")
        if isinstance(row[name], list) and not row.get(f"{name}_ids")
        for turn in row[name]
    ]
    calls = (call for turn in turns if isinstance(turn, dict) for call in turn.get("tool_calls") or ())
    return any(parsed((call["function"]["arguments"] or "{}").encode()) is None for call in calls)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def tools_as_json(tools: Any) -> str | None:
    """Return tools as JSON, with their name and parameters in the field `function`.

    A table cannot hold tools as structs, because each tool would get the parameters of all tools.

    Args:
        tools (`Any`): List of tools, or JSON, which is returned unchanged.
    """
    if not tools or isinstance(tools, str):
        return tools or None
    return json.dumps([tool if "function" in tool else {"type": "function", "function": tool} for tool in tools])


def template_columns(request: Mapping[str, Any]) -> Row:
    """Return the columns `tools` and `chat_template_kwargs` for the arguments of the chat template in a request.

    `functions` are the tools of OpenAI's API before 2023-11. OpenAI's client writes other arguments to `extra_body`.
    vLLM passes `reasoning_effort` to the chat template, too.

    Args:
        request (`Mapping[str, Any]`): Request in OpenAI's format, or a record with its fields.
    """
    options: dict[str, Any] = {}
    for body in (request.get("extra_body") or {}, request):
        if (effort := body.get("reasoning_effort")) is not None:
            options |= {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
    for body in (request.get("extra_body") or {}, request):
        given = body.get("chat_template_kwargs") or {}
        options |= json.loads(given) if isinstance(given, str) else given
    return {
        "tools": tools_as_json(request.get("tools") or request.get("functions")),
        "chat_template_kwargs": json.dumps(options) if options else None,
    }


# A filter cuts a completion, which then has no stop token either.
_FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "eos": "stop", "eos_token": "stop",
            "function_call": "stop", "max_tokens": "length", "content_filter": "length"}  # fmt: skip


def finish_reason(given: str | None) -> str | None:
    """Convert the finish reason of another system to `"stop"` or `"length"`. Return None for an unknown reason."""
    return _FINISHED.get(given or "")
