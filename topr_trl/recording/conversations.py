"""Compute keys of conversations, so that the recorder recognizes a request that continues an earlier answer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Messages = Sequence[Mapping[str, Any]]  # as in OpenAI's chat completions


class Conversation:
    """Hash of the messages in a request.

    The recorder computes the hash when the request arrives, so that the answer does not wait for a long request.

    Args:
        model (`object`): Model that the request names.
        messages (`Messages` or `None`): Messages of the request.
        salt (`str`, *optional*, defaults to `""`): Secret text in the hash. Without salt, readers of the database can
            guess messages, and check whether their hash is the key.

    Attributes:
        continued (`str` or `None`): Key of the conversation in the request, up to its last assistant message. None if
            there is no assistant message.
    """

    def __init__(self, model: object, messages: Messages | None, salt: str = "") -> None:
        self.continued: str | None = None
        found = hashlib.sha256(json.dumps([salt, model]).encode())
        for message in messages or ():
            found.update(_shown(message))
            if message.get("role") == "assistant":
                self.continued = found.hexdigest()
        self._hash = None if messages is None else found

    def keys(self, choices: Messages) -> dict[int, str]:
        """Return the keys of the conversations that end with the choices of an answer.

        Args:
            choices (`Messages`): Choices of the answer.

        Returns:
            `dict[int, str]`: key by the `index` of the choice, for choices with a message. The dictionary is empty if
                the request has no list of messages.
        """
        found = {}
        for choice in choices:
            if self._hash is not None and choice.get("message"):
                longer = self._hash.copy()
                longer.update(_shown(choice["message"]))
                found[choice.get("index") or 0] = longer.hexdigest()
        return found


def _shown(message: Mapping[str, Any]) -> bytes:
    """Return the role, text and tool calls of a message as JSON.

    Other fields are left out, such as the reasoning, because applications often drop them from the history.
    """
    parts = [message.get("role"), _text(message.get("content")), _calls(message.get("tool_calls"))]
    return json.dumps(parts, sort_keys=True).encode()


def _text(content: Any) -> Any:
    """Return the content of a message without thinking, or "" if it is empty. Join the texts of a list of texts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        content = [part for part in content if part.get("type") != "thinking"]
        if all("text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
    return content or ""


def _calls(calls: Any) -> Any:
    return [_call(call) for call in calls] if isinstance(calls, list) else calls or []


def _call(call: Any) -> Any:
    """Return the id, name and parsed arguments of a tool call. Clients may write their JSON in another way."""
    function = call.get("function", call.get("custom")) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments", function.get("input"))
    with suppress(ValueError, RecursionError):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = json.loads(text, parse_float=_number)
    return [call.get("id"), function.get("name"), arguments]


def _number(text: str) -> float:
    """Return a number as an integer if it is whole, because JavaScript writes 1.0 as 1."""
    number = float(text)
    return int(number) if number.is_integer() else number
