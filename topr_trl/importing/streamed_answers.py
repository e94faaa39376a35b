"""Join the events of a logged stream into the answer that the client read.

A stream is a list of events, or the text that the server sent: server-sent events, or one JSON object per line.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from topr_trl.importing.format import Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.recording.protocols import PROTOCOLS
from topr_trl.recording.protocols.completions import CHAT, TEXT
from topr_trl.recording.protocols.protocol import Assembler

_FAILED, _CUT = "failed", "incomplete"  # finish reasons of a stream with an error, and of a stream without its end
_NO_DATA = ("event:", "id:", "retry:", ":")  # starts of other lines of server-sent events; ":" starts a comment


def whole_answer(answer: Any) -> Any:
    """Return the answer of a stream, as the API gives it without streaming. Return any other value unchanged.

    If the stream lacks a finish reason, the answer gets the reason `failed` after an error, and otherwise `incomplete`.

    Args:
        answer (`Any`): Logged answer.
    """
    events = _events(answer)
    is_failed = any(event.get("error") or event.get("type") in ("error", "response.failed") for event in events)
    parts = [event for event in events if not event.get("error") and event.get("type") not in ("error", "ping")]
    for is_part, join in _KINDS if parts and not _are_several(parts) else ():
        if all(map(is_part, parts)):
            # The stream may lack its first event, or an event may lack a required field.
            with suppress(KeyError, TypeError, AttributeError):
                return join(parts, _FAILED if is_failed else _CUT)
    return answer


def _events(answer: Any) -> list[Record]:
    """Return the events of a stream. Return [] if the answer cannot be a stream."""
    answer = parsed_json(answer)
    if isinstance(answer, str):
        lines = answer.split("\n") if answer.lstrip().startswith(("data:", "{", *_NO_DATA)) else []
        answer = [line for line in map(str.strip, lines) if line and not line.startswith(_NO_DATA)]
    if not isinstance(answer, list):
        return []
    found = [parsed_json(each.removeprefix("data:").strip() if isinstance(each, str) else each) for each in answer]
    found = [parsed_json(inner_value(each, "data")) or each for each in found if each != "[DONE]"]
    return found if all(isinstance(each, Mapping) for each in found) else []


def _are_several(events: list[Record]) -> bool:
    """Return whether the events belong to several answers, as in a list of whole responses."""
    ids = {event.get("id") or event.get("responseId") or event.get("response_id") for event in events}
    starts = [event for event in events if event.get("type") in _STARTS or "messageStart" in event]
    return len(ids - {None, ""}) > 1 or len(starts) > 1 or any(event.get("done") for event in events[:-1])


_STARTS = ("message_start", "response.created")


def _is_type(*starts: str) -> Callable[[Record], bool]:
    return lambda event: str(event.get("type")).startswith(starts)


def _is_chunk(event: Record) -> bool:
    if not isinstance(choices := event.get("choices"), list) or not PROTOCOLS[CHAT].is_well_formed(event):
        return False
    return event.get("object") == _TEXT_OBJECT or all("delta" in each for each in choices)


_TEXT_OBJECT = "text_completion"


def _assembled(endpoint: str, events: list[Record]) -> Assembler:
    assembler = PROTOCOLS[endpoint].assembler()
    for event in events:
        assembler.add(event)
    return assembler


def _of_protocol(
    endpoint: str, empty: Record, end_field: str, starts: tuple[str, ...] = ()
) -> Callable[[list[Record], str], Record]:
    """Return the function that joins the events of an API that the recorder reads.

    Args:
        endpoint (`str`): Endpoint of the API. See `topr_trl.recording.protocols.PROTOCOLS`.
        empty (`Record`): Answer without content.
        end_field (`str`): Field of the answer with its finish reason or status.
        starts (`tuple[str, ...]`, defaults to `()`): Types that the first event can have. If the first event
            has a different type, the start of the answer is missing, and the returned function raises a `KeyError`.
            `()` allows all events.
    """

    def join(events: list[Record], end: str) -> Record:
        if starts and events[0]["type"] not in starts:
            raise KeyError(starts[0])
        assembler = _assembled(endpoint, events)
        return {**empty, **(assembler.answer or {}), **({} if assembler.finished else {end_field: end})}

    return join


def _of_chunks(events: list[Record], end: str) -> Record:
    """Join chunks of OpenAI's chat completions or legacy completions. Each choice has its own finish reason."""
    answer = _assembled(TEXT if events[0].get("object") == _TEXT_OBJECT else CHAT, events).answer or {"choices": []}
    choices = [{**choice, "finish_reason": choice["finish_reason"] or end} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def _of_generated(events: list[Record], end: str) -> Record:
    """Join lines of Ollama's `/api/generate`."""
    texts = {name: "".join(event.get(name) or "" for event in events) for name in ("response", "thinking")}
    whole = {name: value for event in events for name, value in event.items()} | texts
    return whole if whole["done"] else {**whole, "done": True, "done_reason": end}


def _of_converse(events: list[Record], end: str) -> Record:
    """Join events of Bedrock's Converse API."""
    blocks: dict[int, Record] = {}
    for event in events:
        given = event.get("contentBlockStart") or event.get("contentBlockDelta") or {}
        block = blocks.setdefault(given.get("contentBlockIndex", 0), {})
        for name, value in {**given.get("start", {}), **given.get("delta", {})}.items():
            _add(block, name, value)
    for block in blocks.values():
        if "toolUse" in block:
            block["toolUse"]["input"] = parsed_json(block["toolUse"].get("input") or "{}")
        if "text" in (thinking := block.get("reasoningContent") or {}):
            block["reasoningContent"] = {"reasoningText": {"text": thinking["text"]}}
    reason = next((event["messageStop"]["stopReason"] for event in events if "messageStop" in event), end)
    content = [block for block in blocks.values() if block]
    return {"output": {"message": {"role": "assistant", "content": content}}, "stopReason": reason}


def _add(place: Record, name: str, value: Any) -> None:
    """Add a piece to a field: text to text, and fields to an object. Any other piece replaces the old value."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            _add(place.setdefault(name, {}), inner, each)
    elif isinstance(value, str) and isinstance(place.get(name), str):
        place[name] += value
    else:
        place[name] = value


def _of_gemini(events: list[Record], end: str) -> Record:
    """Join responses of Gemini's API."""
    found: dict[int, Record] = {}
    for event in events:
        for each in event.get("candidates") or ():
            candidate = found.setdefault(each.get("index") or 0, {"content": {"role": "model", "parts": []}})
            candidate |= {name: value for name, value in each.items() if name != "content" and value is not None}
            for part in (each.get("content") or {}).get("parts") or ():
                _add_part(candidate["content"]["parts"], part)
    for candidate in found.values():
        if not candidate.get("finishReason") and not candidate.get("finish_reason"):
            candidate["finishReason"] = end
    return {**{name: value for event in events for name, value in event.items()}, "candidates": [*found.values()]}


def _add_part(parts: list[Record], part: Record) -> None:
    """Add a part to the parts of a candidate.

    Text continues the last part if the last part is also text, and both parts or neither part is thinking.
    """
    kinds = [(isinstance(each.get("text"), str), bool(each.get("thought"))) for each in (*parts[-1:], part)]
    if len(kinds) == 2 and kinds[0] == kinds[1] and kinds[0][0]:
        parts[-1] = {**parts[-1], "text": parts[-1]["text"] + part["text"]}
    else:
        parts.append(part)


_OF_CONVERSE = {"messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata"}
_OF_ITEMS = (
    "response.created", "response.queued", "response.in_progress", "response.output_item.added",
    "response.output_item.done", "response.completed", "response.incomplete", "response.failed",
)  # fmt: skip
_NO_MESSAGE = {"type": "message", "role": "assistant", "content": []}
# Kinds of streams: test of an event, and function that joins the events.
_KINDS: tuple[tuple[Callable[[Record], bool], Callable[[list[Record], str], Record]], ...] = (
    (_is_chunk, _of_chunks),
    (_is_type("response."), _of_protocol("responses", {"object": "response", "output": []}, "status", _OF_ITEMS)),
    (
        _is_type("message_start", "message_delta", "message_stop", "content_block_"),
        _of_protocol("messages", _NO_MESSAGE, "stop_reason", ("message_start", "content_block_start")),
    ),
    (lambda event: bool(event) and set(event) <= _OF_CONVERSE, _of_converse),
    (lambda event: bool({"candidates", "usageMetadata", "usage_metadata"} & {*event}), _of_gemini),
    (
        lambda event: isinstance(event.get("done"), bool) and "message" in event,
        _of_protocol("api/chat", {"done": True}, "done_reason"),
    ),
    (lambda event: isinstance(event.get("done"), bool), _of_generated),
)
