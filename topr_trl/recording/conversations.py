"""Compute keys of conversations, so that the recorder recognizes a request that continues an earlier answer."""

import hashlib
import json
from collections.abc import Iterable, Mapping
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
    return None if last is None else _hash(request, messages[: last + 1], salt).hexdigest()


class Conversation:
    """Hash of the messages in a request.

    The recorder computes it when the request arrives, because long requests take time, and the answer must not wait.

    Args:
        request (`Mapping[str, Any]`): Request for a chat completion.
        salt (`str`, *optional*, defaults to `""`): Secret text in the hash, as in `continued_conversation`.
    """

    def __init__(self, request: Mapping[str, Any], salt: str = "") -> None:
        messages = _messages(request)
        self._hash = None if messages is None else _hash(request, messages, salt)

    def keys(self, response: Mapping[str, Any]) -> dict[int, str]:
        """Return the keys of the conversations that end with the choices of an answer.

        Args:
            response (`Mapping[str, Any]`): Answer of the server.

        Returns:
            `dict[int, str]`: key by the `index` of the choice, for choices with a message. The dictionary is empty if
                the request has no list of messages.
        """
        found = {}
        for choice in response.get("choices") or ():
            if self._hash is not None and choice.get("message"):
                longer = self._hash.copy()
                longer.update(_shown(choice["message"]))
                found[choice.get("index") or 0] = longer.hexdigest()
        return found


def _messages(request: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the messages of a request. Return None if the request has no list of messages."""
    messages = request.get("messages")
    is_list = isinstance(messages, list) and all(isinstance(each, Mapping) for each in messages)
    return messages if is_list else None


def _hash(request: Mapping[str, Any], messages: Iterable[Mapping[str, Any]], salt: str) -> "hashlib._Hash":
    """Return a hash of the model and of the messages."""
    found = hashlib.sha256(json.dumps([salt, request.get("model")]).encode())
    for message in messages:
        found.update(_shown(message))
    return found


def _shown(message: Mapping[str, Any]) -> bytes:
    """Return the role, text and tool calls of a message as JSON.

    Other fields are left out, such as the reasoning, because applications often drop them from the history.
    """
    parts = [message.get("role"), _text(message.get("content")), _calls(message.get("tool_calls"))]
    return json.dumps(parts).encode()


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
