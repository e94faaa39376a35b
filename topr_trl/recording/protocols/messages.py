"""Record Anthropic's Messages API, `/v1/messages`."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from topr_trl.recording.protocols.protocol import Assembler, Body, Protocol, are_objects, fits, merged, tool_call


def messages(request: Body) -> list[Body] | None:
    """Return the system prompt and the messages of a request. Return None if the request has no list of messages.

    Args:
        request (`Body`): Request of the client.
    """
    given, system = request.get("messages"), without_request_hash(request.get("system"))
    if not are_objects(given):
        return None
    start = [{"role": "system", "content": system}] if system else []
    return [*start, *(turn for each in given for turn in _turns(each))]


def without_request_hash(system: Any) -> Any:
    """Return a system prompt without the text that Claude Code adds at its start, which has a hash of the request.

    Args:
        system (`Any`): Text or blocks. A block that has only this text is left out.
    """
    if isinstance(system, str):
        return _REQUEST_HASH.sub("", system)
    if not are_objects(system):
        return system
    found = [{**each, "text": without_request_hash(each["text"])} if "text" in each else each for each in system]
    return [block for block in found if block.get("text") != ""]


_REQUEST_HASH = re.compile(r"\Ax-anthropic-billing-header:(?:\s*\w+=[^;\s]*;)*\s*")


def without_request_hashes(messages: list[Any]) -> list[Any]:
    """Return messages whose system prompts have no hash of the request. Converters of requests copy the hash.

    Args:
        messages (`list`): Messages of a request.
    """
    return [
        {**each, "content": without_request_hash(each.get("content"))} if each.get("role") in _SYSTEM else each
        for each in messages
    ]


_SYSTEM = ("system", "developer")


def _turns(message: Body) -> list[Body]:
    """Return a message for each tool result of a message, and a message for the rest, unless there are only results."""
    blocks = message.get("content")
    if not are_objects(blocks):
        return [message]
    results: list[Body] = [
        {"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    others = [block for block in blocks if block.get("type") not in _NO_CONTENT]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    thinking = [str(block["thinking"]) for block in blocks if block.get("thinking")]
    turn = {
        "role": message.get("role"), "content": others, "reasoning_content": "\n".join(thinking),
        "tool_calls": [tool_call(call.get("id"), call.get("name"), call.get("input")) for call in calls],
    }  # fmt: skip
    return [*results, turn] if others or calls or not results else results


_NO_CONTENT = ("tool_result", "tool_use", "thinking", "redacted_thinking")


def choices(answer: Body) -> list[Body]:
    """Return the only choice of an answer. Return [] if the answer has no list of blocks.

    Args:
        answer (`Body`): Answer of the server.
    """
    if not are_objects(answer.get("content")):
        return []
    reason = answer.get("stop_reason")
    *_, said = _turns({"role": "assistant", "content": answer["content"]})
    return [{"index": 0, "message": said, "finish_reason": "length" if reason == "max_tokens" else reason}]


def _is_well_formed(body: Body) -> bool:
    return fits(body, index=int, message=Mapping, content_block=Mapping, delta=Mapping, usage=Mapping) and fits(
        body.get("delta") or {}, text=str, thinking=str, partial_json=str
    )


class _Assembler(Assembler):
    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def add(self, event: Body) -> None:
        kind, place = event.get("type"), event.get("index") or 0
        if kind == "message_start":
            self._message = dict(event.get("message") or {})
        elif kind == "content_block_start":
            self._blocks[place] = dict(event.get("content_block") or {})
        elif kind == "content_block_delta":
            piece = {name: value for name, value in (event.get("delta") or {}).items() if name != "type"}
            if citation := piece.pop("citation", None):
                piece["citations"] = [citation]
            self._blocks[place] = merged(self._blocks.get(place, {}), piece)
        elif kind == "message_delta":
            self._message |= event.get("delta") or {}
            self._message["usage"] = {**(self._message.get("usage") or {}), **(event.get("usage") or {})}

    @property
    def answer(self) -> dict[str, Any] | None:
        if not self._blocks and not self.finished:
            return None
        return {**self._message, "content": [_block(self._blocks[place]) for place in sorted(self._blocks)]}

    @property
    def finished(self) -> int:
        return int(self._message.get("stop_reason") is not None)


def _block(block: Body) -> Body:
    """Return a block with the parsed input of its tool. The input stays text if its end is missing."""
    if "partial_json" not in block:
        return block
    found = {name: value for name, value in block.items() if name != "partial_json"}
    found["input"] = block["partial_json"]
    with suppress(ValueError, RecursionError):
        found["input"] = json.loads(block["partial_json"] or "{}")
    return found


PROTOCOL = Protocol(
    endpoint="messages",
    messages=messages,
    choices=choices,
    assembler=_Assembler,
    is_well_formed=_is_well_formed,
    is_last=lambda event: event.get("type") == "message_stop",
)
