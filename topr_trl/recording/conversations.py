"""Compute keys of conversations, so that the recorder recognizes a request that continues an earlier answer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


def continued_conversation(request: Mapping[str, Any], salt: str = "") -> str | None:
    """Return the key of the conversation in a request, up to its last assistant message. The key is a hash.

    Args:
        request (`Mapping[str, Any]`): Request for a chat completion.
        salt (`str`, *optional*, defaults to `""`): Secret text in the hash. Without salt, readers of the database can
            guess messages, and check whether their hash is the key.

    Returns:
        `str` or `None`: the key. None if the request has no assistant message.
    """
    if (messages := _messages(request)) is None:
        return None
    last = max((n for n, each in enumerate(messages) if each.get("role") == "assistant"), default=None)
    return None if last is None else _key(request, messages[: last + 1], salt)


def conversations(request: Mapping[str, Any], response: Mapping[str, Any], salt: str = "") -> dict[int, str]:
    """Return the keys of the conversations that end with the choices of an answer.

    Args:
        request (`Mapping[str, Any]`): Request for a chat completion.
        response (`Mapping[str, Any]`): Answer of the server.
        salt (`str`, *optional*, defaults to `""`): Secret text in the hashes, as in `continued_conversation`.

    Returns:
        `dict[int, str]`: key by the `index` of the choice, for choices with a message. The dictionary is empty if the
            request has no list of messages.
    """
    if (messages := _messages(request)) is None:
        return {}
    return {
        choice.get("index") or 0: _key(request, [*messages, choice["message"]], salt)
        for choice in response.get("choices") or ()
        if choice.get("message")
    }


def _messages(request: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the messages of a request. Return None if the request has no list of messages."""
    messages = request.get("messages")
    is_list = isinstance(messages, list) and all(isinstance(each, Mapping) for each in messages)
    return messages if is_list else None


def _key(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], salt: str) -> str:
    """Return a hash of the model and of the role, text and tool calls of each message.

    The hash leaves out other fields, such as the reasoning, because applications often drop them from the history.
    """
    shown = [
        [message.get("role"), _text(message.get("content")), _calls(message.get("tool_calls"))] for message in messages
    ]
    return hashlib.sha256(json.dumps([salt, request.get("model"), shown]).encode()).hexdigest()


def _text(content: Any) -> Any:
    """Return the content of a message, or "" if it is empty. If all parts of a list have text, join the texts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    return content or ""


def _calls(calls: Any) -> Any:
    return [_call(call) for call in calls] if isinstance(calls, list) else calls or []


def _call(call: Any) -> Any:
    """Return the id, name and parsed arguments of a tool call. Clients may change the whitespace of the JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]
