"""Read the sessions that Codex keeps in `~/.codex/sessions`. Each answer of the model becomes a row."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from topr_trl.importing.dialects.openai_responses import messages_of
from topr_trl.importing.format import CALL, Format, Placed, Record, Unusable
from topr_trl.importing.joined_records import LINES
from topr_trl.importing.message_parts import other
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.record_files import parsed
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout

_EVENTS = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")


def sessions(records: Iterable[Placed]) -> Iterator[Placed]:
    """Yield the sessions of a file. A session starts with a line of the type `session_meta`.

    Broken lines and lines of other formats are yielded unchanged. The session has None in place of a broken line.

    Args:
        records (`Iterable`): Place and content of each line.
    """
    first, lines = "", list[Any]()
    for place, raw in records:
        record = parsed(raw)
        if inner_value(record, "payload") is None:
            yield place, raw
            if record is not None:
                continue
        # A session that continues an earlier one starts with two lines `session_meta`, without an item between them.
        if inner_value(record, "type") == "session_meta" and any(map(_is_item, lines)):
            yield first, _session(lines)
            lines = []
        first = first if lines else place
        lines.append(record)
    if any(line is not None for line in lines):
        yield first, _session(lines)


def _is_item(line: Any) -> bool:
    return inner_value(line, "type") == "response_item"


def _session(lines: list[Any]) -> Record:
    metas = [line["payload"] for line in lines if inner_value(line, "type") == "session_meta"]
    # A forked session has a copy of the lines of its source, or only the id of its source.
    source = (metas[-1].get("forked_from_id") or metas[-1].get("id")) if metas else None
    return {"session_id": metas[0].get("id") if metas else None, "source_id": source, LINES: lines}


def rows(record: Record) -> list[Row]:
    """Return a row for each answer of the model. All earlier messages of the session are the prompt.

    The answers of a session are rows of one rollout. After a compaction, the new history replaces earlier messages in
    the prompt.

    Raises:
        Unusable: a line before the last line is broken, the file lacks the context after a compaction, the user took
            back a turn, several rows have no session id that joins them, or an item cannot become a message, for
            instance because the provider ran a tool itself (see `openai_responses.messages_of`).
    """
    found, history, own = list[Row](), list[Record](), list[Record]()
    start, models = list[Row](), set[str]()
    *whole, last = record[LINES]
    for line in [*whole, *filter(None, [last])]:  # If Codex was killed, the last line can be broken.
        if line is None:
            raise Unusable("a line is not valid JSON, so what the model read after it is not known")
        kind, given = line["type"], line["payload"]
        if kind == "session_meta" and (text := inner_value(given, "base_instructions", "text")):
            start = start or [other("system", text)]
        elif kind == "turn_context" and given.get("model"):
            models.add(given["model"])
        elif kind == "response_item":
            own += _item(given)
        elif kind == "compacted":
            found += _answers(start, history, own)
            if given.get("replacement_history") is None:
                raise Unusable("its context was compacted, and the file lacks the new context")
            history, own = [item for each in given["replacement_history"] for item in _item(each)], []
        elif kind == "event_msg" and given.get("type") == "thread_rolled_back":
            raise Unusable("the user took back a turn, so later turns had a different context")
    found += _answers(start, history, own)
    # Lines of Codex have no ids. In sessions with the same source, rows with the same text are the same call.
    for row in found:
        said = [each for each in (*row["prompt"], *row["completion"]) if each not in start]
        text = json.dumps([record.get("source_id"), said])
        row[CALL] = hashlib.sha256(text.encode()).hexdigest() if record.get("source_id") else None
        row["model"] = next(iter(models)) if len(models) == 1 else None
    return as_rollout(found, record.get("session_id"), "a session_meta with the id")


def _answers(start: list[Row], history: list[Record], own: list[Record]) -> list[Row]:
    """Return a row for each assistant turn in `own`. Each prompt starts with `start` and `history`."""
    read = [*start, *messages_of(history)]
    messages = [*read, *messages_of(own)]
    return [
        {"prompt": messages[:n], "completion": [each]}
        for n, each in enumerate(messages)
        if n >= len(read) and each["role"] == "assistant"
    ]


def _item(given: Record) -> list[Record]:
    """Return a list with the item in the format of the Responses API. Return [] for a `ghost_snapshot`."""
    kind = given["type"]
    if kind == "ghost_snapshot":
        return []
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": given["input"]})
        return [{**given, "type": "function_call", "arguments": arguments}]
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = given["output"]
        text = output.get("content") if isinstance(output, dict) else output
        return [{**given, "type": "function_call_output", "output": text}]
    return [given]


FORMAT = Format(
    source="Codex (codex-rs/protocol/src/protocol.rs, RolloutItem; models.rs, ResponseItem)",
    test=lambda record: isinstance(record.get("payload"), dict) and record.get("type") in _EVENTS,
    rows=rows,
    columns=("problem_id", "rollout_id", "model"),
    required=frozenset({LINES}),
    join=sessions,
    names_calls=True,
    loses="Sessions lack the tools and, before 2026, the system prompt. The model's reasoning is a summary, or hidden. "
    "A free-form call of a tool has its text as the argument input. Sessions have no rewards: see --rewards and "
    "--id_field session_id.",
)
