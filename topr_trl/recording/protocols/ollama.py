"""Record Ollama's `/api/chat`."""

from collections.abc import Mapping
from typing import Any

from topr_trl.recording.protocols import completions
from topr_trl.recording.protocols.protocol import Assembler, Body, Protocol, are_objects, fits, merged


def messages(request: Body) -> list[Body] | None:
    """Return the messages of a request. Return None if the request has no list of messages.

    Args:
        request (`Body`): Request of the client.
    """
    found = completions.messages(request)
    return None if found is None else [_shown(each) for each in found]


def _shown(message: Body) -> Body:
    """Return a message without the ids of its calls, which clients drop or add."""
    calls = message.get("tool_calls")
    if not are_objects(calls):
        return message
    return {**message, "tool_calls": [{"function": call.get("function")} for call in calls]}


def choices(answer: Body) -> list[Body]:
    """Return the only choice of an answer. Return [] if the answer has no message.

    Args:
        answer (`Body`): Answer of the server.
    """
    if not isinstance(answer.get("message"), Mapping):
        return []
    message = answer["message"]
    said = {"role": "assistant", **_shown(message), "reasoning_content": message.get("thinking")}
    return [{"index": 0, "message": said, "finish_reason": answer.get("done_reason")}]


def _is_well_formed(body: Body) -> bool:
    message = body.get("message") or {}
    return fits(body, done=bool) and fits(message, content=str, thinking=str) and (
        not message.get("tool_calls") or are_objects(message["tool_calls"])
    )  # fmt: skip


class _Assembler(Assembler):
    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._message: dict[str, Any] = {}

    def add(self, event: Body) -> None:
        self._answer |= event
        message = dict(event.get("message") or {})
        calls = [*self._message.pop("tool_calls", ()), *(message.pop("tool_calls", None) or ())]
        self._message = {**merged(self._message, message), **({"tool_calls": calls} if calls else {})}

    @property
    def answer(self) -> dict[str, Any] | None:
        # `done` is true in the last event of a stream, and in an answer that is not a stream. The assembled answer is
        # not a stream, even if the last event is missing.
        return {**self._answer, "message": self._message, "done": True} if self._message else None

    @property
    def finished(self) -> int:
        return int(bool(self._answer.get("done")))


PROTOCOL = Protocol(
    endpoint="api/chat",
    base="",
    messages=messages,
    choices=choices,
    assembler=_Assembler,
    is_well_formed=_is_well_formed,
    is_last=lambda event: bool(event.get("done")),
)
