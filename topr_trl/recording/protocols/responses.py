"""Record OpenAI's Responses API, `/v1/responses`."""

from collections.abc import Iterable, Mapping
from typing import Any

from topr_trl.recording.protocols.messages import without_request_hashes
from topr_trl.recording.protocols.protocol import Assembler, Body, Protocol, are_objects, fits, tool_call, with_nulls

_TOKENS = ("input_messages", "output_messages")  # fields of vLLM's answer with token ids (`enable_response_messages`)
ELSEWHERE = ("previous_response_id", "conversation", "prompt")  # fields of a request that lacks a part of its prompt
_UNFINISHED = ("failed", "cancelled", "queued", "in_progress")  # states of a failed, canceled or unfinished answer
_LAST = ("response.completed", "response.incomplete")  # types of the last event
_PARTS = {  # by type of the event: field with the parts, field with the part's number, type of the part, text field
    "response.output_text.delta": ("content", "content_index", "output_text", "text"),
    "response.refusal.delta": ("content", "content_index", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "content_index", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_index", "summary_text", "text"),
}


def messages(request: Body) -> list[Body] | None:
    """Return the instructions and the input of a request. Return None if the input is missing, empty or malformed.

    Args:
        request (`Body`): Request of the client.
    """
    items = _items(request.get("input"))
    if not items or not are_objects(items):
        return None
    start = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    return without_request_hashes([*start, *_turns(items)])


def _items(given: Any) -> list[Any]:
    """Return the input of a request as a list of items. Return [] for a wrong type."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _turns(items: Iterable[Body]) -> list[Body]:
    """Return items as messages. The reasoning, the text and the calls of a response become one message."""
    found: list[Body] = []
    for item in items:
        turn = _turn(item)
        if found and turn.get("role") == found[-1].get("role") == "assistant":
            before = found.pop()
            turn = {"role": "assistant", **{name: before[name] + turn[name] for name in _JOINED}}
        found.append(turn)
    return found


_JOINED = ("content", "tool_calls", "reasoning_content")


def _turn(item: Body) -> Body:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role != "assistant":
        return item
    if str(kind).endswith("_output"):  # of a function, or of a tool such as the shell, which the application runs
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    content: Any = []
    calls, texts = [], []
    if kind == "function_call":
        calls = [tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))]
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [str(part.get("text")) for part in parts] if are_objects(parts) else []
    else:  # an assistant message, or a call of a tool that the provider runs
        content = item.get("content") if kind == "message" else [item]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "role": "assistant", "content": content if isinstance(content, list) else [], "tool_calls": calls,
        "reasoning_content": "\n".join(texts),
    }  # fmt: skip


def choices(answer: Body) -> list[Body]:
    """Return the only choice of an answer. Return [] if the answer has no output, or a status in `_UNFINISHED`.

    Args:
        answer (`Body`): Answer of the server.
    """
    items, status = answer.get("output"), answer.get("status")
    if not are_objects(items) or status in _UNFINISHED:
        return []
    said = [turn for turn in _turns(items) if turn.get("role") == "assistant"]
    message = said[-1] if said else {"role": "assistant", "content": None}
    return [{"index": 0, "message": message, "finish_reason": "length" if status == "incomplete" else "stop"}]


def whole(request: Body, earlier: Body, answer: Body) -> Body:
    """Return a request with the earlier input and output that it continues by `previous_response_id`.

    Args:
        request (`Body`): Request of the client.
        earlier (`Body`): Earlier request, which must have all messages before it, as this function returns them.
        answer (`Body`): Answer to the earlier request.
    """
    parts = (earlier.get("input"), answer.get("output"), request.get("input"))
    found = {name: value for name, value in request.items() if name != "previous_response_id"}
    # The earlier request may itself lack a part of its prompt.
    found |= {name: earlier[name] for name in ELSEWHERE if earlier.get(name)}
    return {**found, "input": [item for part in parts for item in _items(part)]}


def _without_token_ids(answer: Body, request: Body) -> Body:
    if request.get("enable_response_messages"):
        return answer
    if isinstance(inner := answer.get("response"), Mapping):  # an event
        return {**answer, "response": with_nulls(inner, *_TOKENS)}
    return with_nulls(answer, *_TOKENS) if "output" in answer else answer


def _is_well_formed(body: Body) -> bool:
    return fits(body, type=str, output_index=int, content_index=int, summary_index=int, response=Mapping, item=Mapping)


class _Assembler(Assembler):
    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[int, dict[str, Any]] = {}

    def add(self, event: Body) -> None:
        kind, place, piece = event.get("type") or "", event.get("output_index") or 0, event.get("delta")
        self._response = dict(event.get("response") or self._response)
        if kind in ("response.output_item.added", "response.output_item.done"):
            self._items[place] = dict(event.get("item") or {})
        elif isinstance(piece, str) and place in self._items:
            item = self._items[place]
            if kind == "response.function_call_arguments.delta":
                item["arguments"] = str(item.get("arguments") or "") + piece
            elif kind in _PARTS:
                _add_piece(item, *_PARTS[kind], event, piece)

    @property
    def answer(self) -> dict[str, Any] | None:
        items = [self._items[place] for place in sorted(self._items)]
        if self.finished:
            return {**self._response, "output": self._response.get("output") or items}
        return {**self._response, "output": items, "status": "incomplete"} if items else None

    @property
    def finished(self) -> int:
        return int(self._response.get("status") in ("completed", "incomplete"))


def _add_piece(item: dict[str, Any], field: str, number: str, kind: str, name: str, event: Body, piece: str) -> None:
    """Add a piece of text to a part of an item, in the list `field` at the position `event[number]`."""
    parts = item.get(field) or []
    place = event.get(number) or 0
    if not are_objects(parts) or not isinstance((parts[place : place + 1] or [{}])[0].get(name, ""), str):
        return
    part = dict(parts[place]) if place < len(parts) else {"type": kind}
    item[field] = [*parts[:place], {**part, name: part.get(name, "") + piece}, *parts[place + 1 :]]


PROTOCOL = Protocol(
    endpoint="responses",
    messages=messages,
    choices=choices,
    assembler=_Assembler,
    is_well_formed=_is_well_formed,
    is_last=lambda event: event.get("type") in _LAST,
    with_token_ids=lambda request: {**request, "enable_response_messages": True},
    without_token_ids=_without_token_ids,
    whole=whole,
)
