"""Recognize that a request continues an earlier answer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def continued_conversation(request: Mapping[str, Any]) -> str | None:
    """Return the key of the conversation up to the last assistant message of a request. Return None without one.

    Args:
        request (`Mapping[str, Any]`): Request for a chat completion.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return None
    last = max((n for n, each in enumerate(messages) if each.get("role") == "assistant"), default=None)
    return None if last is None else _key(request, messages[: last + 1])


def conversations(request: Mapping[str, Any], response: Mapping[str, Any]) -> list[str | None]:
    """Return, for each choice of an answer, the key of the conversation that ends with the answer.

    Args:
        request (`Mapping[str, Any]`): Request for a chat completion.
        response (`Mapping[str, Any]`): Answer.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return []
    choices = sorted(response.get("choices") or (), key=lambda choice: choice.get("index", 0))
    return [_key(request, [*messages, choice["message"]]) if choice.get("message") else None for choice in choices]


def _key(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of the messages. Applications often drop other fields of an answer, such as its reasoning."""
    shown = [
        [message.get("role"), _text(message.get("content")), [_call(call) for call in message.get("tool_calls") or ()]]
        for message in messages
    ]
    return hashlib.sha256(json.dumps([request.get("model"), shown]).encode()).hexdigest()


def _text(content: Any) -> Any:
    """Return the content of a message as text, if it consists of text."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    return content or ""


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), function.get("arguments")]
