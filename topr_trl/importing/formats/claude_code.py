"""Read the sessions that Claude Code keeps in `~/.claude/projects`. Each call of the model becomes a row."""

from collections.abc import Iterable, Iterator
from typing import Any

from topr_trl.importing.format import CALL, Format, Placed, Record, Unusable
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.message_parts import assistant, other
from topr_trl.importing.message_trees import branch
from topr_trl.importing.openai_messages import finish_reason
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout

_PARENT = "parentUuid"
_CLEARED = "[Old tool result content cleared]"  # text that the model reads in place of an old result


def sessions(records: Iterable[Placed]) -> Iterator[Placed]:
    """Yield the sessions of a file. A session also gets the lines of the sessions in the file that it continues.

    Lines without a session, such as titles, are skipped. Broken lines and lines of other formats are yielded unchanged.

    Args:
        records (`Iterable`): Place and content of each line.
    """
    found = list(joined_by("sessionId", _session_of)(records))
    joined = [record[LINES] if isinstance(record, dict) and LINES in record else [] for _, record in found]
    session_of = {str(line["uuid"]): n for n, lines in enumerate(joined) for line in lines if line.get("uuid")}
    own = [{str(line.get("uuid")) for line in lines} for lines in joined]
    for n, ((place, record), lines) in enumerate(zip(found, joined, strict=True)):
        read = [n]  # The loop adds to `read`, because an earlier session may continue a still earlier session.
        for m in read:
            parents = {str(line.get(_PARENT)) for line in joined[m]} - own[m]
            read += {session_of[name] for name in parents if name in session_of} - {*read}
        copied = [line for m in sorted(read[1:]) for line in joined[m]]
        yield place, {**record, LINES: [*copied, *lines]} if copied else record  # type: ignore[dict-item]


def rows(record: Record) -> list[Row]:
    """Return a row for each call of the model. The lines before the call in its branch of the session are the prompt.

    Failed calls, and text that Claude Code wrote itself, give no rows. The calls of a session are rows of one rollout.
    A resumed or forked session has copies of earlier calls, so each row has the name of its call.

    Raises:
        NotOfFormat: the branch of a call has a cycle.
        Unusable: the file lacks a line or a tool result that the model read, the place of a message is not known, a
            message has a part without text, or the finish reason is new.
    """
    if any(_queued(each) and not each.get("uuid") for each in record[LINES]):
        raise Unusable("it has a queued_command without a uuid, so the place of this message of the user is not known")
    lines = {each["uuid"]: each for each in record[LINES] if each.get("uuid")}
    calls: dict[str, list[Record]] = {}  # lines of each call. Claude Code writes one line per block of an answer.
    for each in lines.values():
        if each["type"] == "assistant" and not each.get("isApiErrorMessage"):
            calls.setdefault(_call_of(each), []).append(each)
    results = {part["tool_use_id"]: part for each in lines.values() for part in _results(each)}
    interrupted = {each[_PARENT] for each in lines.values() if _is_interruption(each)}
    found = []
    for identifier, answer in calls.items():
        last = answer[-1]["message"]
        if last.get("model") == "<synthetic>":  # Claude Code wrote this text itself.
            continue
        found.append({
            "prompt": list(_prompt(answer[0][_PARENT], lines, calls, results)), "completion": [_turn(answer)],
            "finish_reason": "length" if answer[-1]["uuid"] in interrupted else finish_reason(last.get("stop_reason")),
            "model": last.get("model"), CALL: identifier,
        })  # fmt: skip
    agent = next((each["agentId"] for each in lines.values() if each.get("agentId")), None)
    name = f"{record['sessionId']}/{agent}" if agent else str(record["sessionId"])
    return as_rollout(found, name)


def _call_of(line: Record) -> str:
    return line["message"].get("id") or line["uuid"]


def _blocks(line: Record) -> list[Any]:
    content = inner_value(line, "message", "content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _results(line: Record) -> list[Record]:
    return [part for part in _blocks(line) if line["type"] == "user" and part["type"] == "tool_result"]


def _queued(line: Record) -> Any:
    """Return the content of a message that the user sent while the model worked. Return None for any other line."""
    given = line.get("attachment")
    return inner_value(given, "prompt") if inner_value(given, "type") == "queued_command" else None


def _is_interruption(line: Record) -> bool:
    parts = _blocks(line) if line["type"] == "user" else []
    return any(str(part.get("text")).startswith("[Request interrupted by user") for part in parts)


def _prompt(
    last: str | None, lines: dict[str, Record], calls: dict[str, list[Record]], results: dict[str, Record]
) -> Iterator[Row]:
    """Yield the messages that the model had read up to the line with the id `last`, including this line.

    Results of parallel calls are in different branches of the session. Each turn is therefore followed by all results
    of its calls.

    Raises:
        NotOfFormat: the branch has a cycle.
        Unusable: the file lacks a line or a tool result that the model read, or a message has a part without text.
    """
    seen = set[str]()
    read = list(_read(last, lines))
    cleared = {name for line in read for name in inner_value(line, "microcompactMetadata", "compactedToolIds") or ()}
    for line in read:
        if line["type"] == "user":
            rest = [part for part in _blocks(line) if part["type"] != "tool_result"]
            if rest:
                yield other("user", rest)
        elif queued := _queued(line):
            yield other("user", queued)
        elif line["type"] == "assistant" and not line.get("isApiErrorMessage") and (name := _call_of(line)) not in seen:
            seen.add(name)
            turn = _turn(calls[name])
            yield turn
            for each in turn["tool_calls"] or ():
                if each["id"] not in results:
                    raise Unusable(f"the result of the call {each['id']} is not in the file")
                content = _CLEARED if each["id"] in cleared else results[each["id"]].get("content")
                yield other("tool", content, tool_call_id=each["id"])


def _read(last: str | None, lines: dict[str, Record]) -> Iterator[Record]:
    """Yield the lines of a branch up to the line with the id `last`.

    A compaction keeps some earlier messages. Their lines are in the branch before the compaction. The model read them
    after the line `anchorUuid`, so they follow this line.

    Raises:
        NotOfFormat: the branch has a cycle.
        Unusable: the file lacks a line that the model read.
    """

    def error(name: str) -> Unusable:
        return Unusable(f"the model read the line {name}, which is not in the file")

    kept, found = {}, branch(lines, last, _PARENT, error)
    own = {line["uuid"] for line in found}
    for line in found:
        if segment := inner_value(line, "compactMetadata", "preservedSegment"):
            kept[segment["anchorUuid"]] = segment
        yield line
        if (segment := kept.get(line["uuid"])) and (head := segment["headUuid"]) not in own:
            earlier = branch(lines, segment["tailUuid"], _PARENT, error)
            if head not in (names := [each["uuid"] for each in earlier]):
                raise Unusable(f"a compaction kept the line {head}, which is not before {segment['tailUuid']}")
            yield from earlier[names.index(head) :]


def _turn(answer: list[Record]) -> Row:
    """Return the assistant turn of a call from its lines. Some versions of Claude Code write a block twice."""
    parts = [part for each in answer for part in _blocks(each)]
    blocks = [part for n, part in enumerate(parts) if part not in parts[:n]]
    return assistant(blocks, [part for part in blocks if part["type"] == "tool_use"])


def _session_of(place: str, line: Record) -> Any:
    """Return the id of a line's session.

    If the line lacks this id, return `""` for a line with a type and no message, such as a title, and None otherwise.
    """
    return line.get("sessionId", "" if "type" in line and "message" not in line else None)


def _is_line(record: Record) -> bool:
    kind, names = record.get("type"), set(record)
    is_about_lines = (kind == "summary" and "leafUuid" in names) or kind == "file-history-snapshot"
    return is_about_lines or ({"sessionId", "type"} <= names and bool({"uuid", "leafUuid", "operation"} & names))


FORMAT = Format(
    source="Claude Code (its files have no documentation; after sessions of the versions 1.0 to 2.1)",
    test=_is_line,
    rows=rows,
    columns=("problem_id", "rollout_id", "finish_reason", "model"),
    required=frozenset({"sessionId", LINES}),
    join=sessions,
    names_calls=True,
    loses="Sessions lack the system prompt, the tools, and the reminders that Claude Code attaches. Claude's thinking "
    "is a summary, or hidden. Sessions have no rewards: see --rewards and --id_field sessionId.",
)
