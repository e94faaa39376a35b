"""Join the events of a logged stream to the answer that the client read.

A stream is a list of events, or the text that the server sent: server-sent events, or one JSON object per line.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from topr_trl.importing.format import Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.recording.answers import CHAT, TEXT, Assembler, is_well_formed

_FAILED, _CUT = "error", "incomplete"  # finish reasons of a stream with an error, and of a stream without its end


def whole_answer(answer: Any) -> Any:
    """Return the answer of a stream, as the API gives it without streaming. Return another answer unchanged.

    A stream that ends early has a finish reason which means that the model did not end the answer.

    Args:
        answer (`Any`): Logged answer.
    """
    events = _events(answer)
    is_failed = any(event.get("error") or event.get("type") == "error" for event in events)
    parts = [event for event in events if not event.get("error") and event.get("type") not in ("error", "ping")]
    for is_part, join in _KINDS if parts and not _are_several(parts) else ():
        if all(map(is_part, parts)):
            with suppress(KeyError, TypeError, AttributeError):  # An event lacks a part of its API.
                return join(parts, _FAILED if is_failed else _CUT)
    return answer


def _events(answer: Any) -> list[Record]:
    """Return the events of a stream. Return [] if the answer cannot be a stream."""
    answer = parsed_json(answer)
    if isinstance(answer, str):
        start = answer.lstrip()[:6]
        lines = answer.split("\n") if start.startswith(("data:", "event:", "{")) else []
        answer = [line for line in map(str.strip, lines) if line and not line.startswith(("event:", "id:", ":"))]
    if not isinstance(answer, list):
        return []
    found = [parsed_json(each.removeprefix("data:").strip() if isinstance(each, str) else each) for each in answer]
    found = [parsed_json(inner_value(each, "data")) or each for each in found if each != "[DONE]"]
    return found if all(isinstance(each, Mapping) for each in found) else []


def _are_several(events: list[Record]) -> bool:
    """Return whether the events are several answers, such as a list of whole responses."""
    ids = {event.get("id") or event.get("responseId") or event.get("response_id") for event in events}
    starts = [event for event in events if event.get("type") in _STARTS or "messageStart" in event]
    return len(ids - {None, ""}) > 1 or len(starts) > 1 or any(event.get("done") for event in events[:-1])


_STARTS = ("message_start", "response.created")


def _is_type(*starts: str) -> Callable[[Record], bool]:
    return lambda event: str(event.get("type")).startswith(starts)


def _is_chunk(event: Record) -> bool:
    if not isinstance(choices := event.get("choices"), list) or not is_well_formed(event):
        return False
    return event.get("object") == _TEXT_OBJECT or all("delta" in each for each in choices)


_TEXT_OBJECT = "text_completion"


def _of_chunks(events: list[Record], end: str) -> Record:
    """Join chunks of OpenAI's chat completions or legacy completions."""
    assembler = Assembler(TEXT if events[0].get("object") == _TEXT_OBJECT else CHAT)
    for event in events:
        assembler.add(event)
    answer = assembler.answer or {"choices": []}
    choices = [{**choice, "finish_reason": choice["finish_reason"] or end} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def _of_responses(events: list[Record], end: str) -> Record:
    """Return the response in the last event of OpenAI's Responses API, or what the client had read of it."""
    body: Record = {"object": "response", "status": "in_progress", "output": []}
    items: dict[int, Record] = {}
    for event in events:
        body |= event.get("response") or {}
        if "item" in event:
            items[event["output_index"]] = dict(event["item"])
        elif event["type"].endswith(".delta"):
            _add_delta(items[event["output_index"]], event["delta"])
    output = body["output"] or [items[n] for n in sorted(items)]
    if body.get("status") in ("in_progress", "queued"):
        body["status"] = "failed" if end == _FAILED else end
    return {**body, "output": output}


def _add_delta(item: Record, text: str) -> None:
    """Add a piece of text to an item. The last event of an item replaces the item."""
    if item["type"] == "function_call":
        item["arguments"] += text
    else:
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        item["content"] = [*(item.get("content") or ()), {"type": kind, "text": text}]


def _of_anthropic(events: list[Record], end: str) -> Record:
    """Join events of Anthropic's Messages API."""
    message: Record = {"type": "message", "role": "assistant", "stop_reason": None}
    blocks: dict[int, Record] = {}
    inputs: dict[int, str] = {}  # JSON of each tool call
    for event in events:
        place, delta = event.get("index", 0), event.get("delta") or {}
        if event["type"] == "message_start":
            message |= event["message"]
        elif event["type"] == "content_block_start":
            blocks[place] = dict(event["content_block"])
        elif event["type"] == "message_delta":
            message |= delta
        for name in {"text", "thinking"} & set(delta):
            blocks[place][name] = blocks[place].get(name, "") + delta[name]
        inputs[place] = inputs.get(place, "") + delta.get("partial_json", "")
    content = [{**block, "input": parsed_json(inputs[n])} if inputs.get(n) else block for n, block in blocks.items()]
    return {**message, "content": content, "stop_reason": message["stop_reason"] or end}


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
    """Add a piece to a field: text to text, and fields to an object."""
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
        for each in event["candidates"] or ():
            candidate = found.setdefault(each.get("index") or 0, {"content": {"role": "model", "parts": []}})
            candidate |= {name: value for name, value in each.items() if name != "content" and value is not None}
            for part in (each.get("content") or {}).get("parts") or ():
                _add_part(candidate["content"]["parts"], part)
    for candidate in found.values():
        if not candidate.get("finishReason") and not candidate.get("finish_reason"):
            candidate["finishReason"] = end
    return {**{name: value for event in events for name, value in event.items()}, "candidates": [*found.values()]}


def _add_part(parts: list[Record], part: Record) -> None:
    """Add a part to the parts of a candidate. Text continues the last part if both are thinking, or both are not."""
    kinds = [(isinstance(each.get("text"), str), bool(each.get("thought"))) for each in (*parts[-1:], part)]
    if len(kinds) == 2 and kinds[0] == kinds[1] and kinds[0][0]:
        parts[-1] = {**parts[-1], "text": parts[-1]["text"] + part["text"]}
    else:
        parts.append(part)


def _of_ollama(events: list[Record], end: str) -> Record:
    """Join lines of Ollama's API."""
    whole: Record = {}
    for event in events:
        for name, value in event.items():
            if name == "message":
                _add_message(whole.setdefault(name, {"role": "assistant"}), value)
            elif name in ("response", "thinking"):
                _add(whole, name, value)
            else:
                whole[name] = value
    return whole if whole["done"] else {**whole, "done": True, "done_reason": end}


def _add_message(message: Record, piece: Record) -> None:
    for name, value in piece.items():
        if name == "tool_calls":
            message[name] = [*(message.get(name) or ()), *(value or ())]
        elif name != "role":
            _add(message, name, value)


_OF_CONVERSE = {"messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata"}
# Test of an event, and function that joins the events.
_KINDS: tuple[tuple[Callable[[Record], bool], Callable[[list[Record], str], Record]], ...] = (
    (_is_chunk, _of_chunks),
    (_is_type("response."), _of_responses),
    (_is_type("message_start", "message_delta", "message_stop", "content_block_"), _of_anthropic),
    (lambda event: bool(event) and set(event) <= _OF_CONVERSE, _of_converse),
    (lambda event: "candidates" in event, _of_gemini),
    (lambda event: isinstance(event.get("done"), bool), _of_ollama),
)
