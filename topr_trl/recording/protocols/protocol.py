"""Define the class of protocols, which are the APIs whose calls are recorded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

Body = Mapping[str, Any]  # request, answer or streamed event


class Assembler(ABC):
    """Join the events of a streamed answer into the answer that the server would send without streaming."""

    @abstractmethod
    def add(self, event: Body) -> None:
        """Add the next event.

        Args:
            event (`Body`): Event of the server, which `Protocol.is_well_formed` accepts.
        """

    @property
    @abstractmethod
    def answer(self) -> dict[str, Any] | None:
        """Answer so far, or None if the events do not yet make an answer."""

    @property
    @abstractmethod
    def finished(self) -> int:
        """Number of choices with a finish reason."""


@dataclass(frozen=True)
class Protocol:
    """API whose calls are recorded.

    Conversations are compared, and shown on the grading page, as messages of OpenAI's chat completions. Recordings
    have the bodies of the API, which `topr import` reads.

    Attributes:
        endpoint (`str`): Path of the API, below `base`.
        messages (`Callable`): Function that returns the messages of a request, or None if the request has no list of
            messages.
        choices (`Callable`): Function that returns the choices of an answer, each with its `index`, `finish_reason`,
            and `message` or `text`. It returns an empty sequence if the body is not an answer.
        assembler (`Callable`): Function that returns a new `Assembler`.
        is_well_formed (`Callable`): Function that returns whether the fields of an answer or an event have the types
            that the API defines.
        is_last (`Callable`): Function that returns whether an event is the last one. Some streams end with `[DONE]`
            instead.
        base (`str`, defaults to `"/v1"`): Start of the path.
        with_token_ids (`Callable`, *optional*): Function that returns a request that also asks for token ids. None if
            no server returns token ids in this API.
        without_token_ids (`Callable`): Function of an answer or event, and the client's request. It returns the answer
            or event with null for the values that only the recorder requested.
        whole (`Callable`, *optional*): Function of a request, an earlier request, and the answer to the earlier
            request, which the request continues by `previous_response_id`. It returns the request with the earlier
            messages. None if the API has no such field.
    """

    endpoint: str
    messages: Callable[[Body], list[Body] | None]
    choices: Callable[[Body], Sequence[Body]]
    assembler: Callable[[], Assembler]
    is_well_formed: Callable[[Body], bool]
    is_last: Callable[[Body], bool] = lambda event: False
    base: str = "/v1"
    with_token_ids: Callable[[Body], Body] | None = None
    without_token_ids: Callable[[Body, Body], Body] = lambda answer, request: answer
    whole: Callable[[Body, Body, Body], Body] | None = None


def are_objects(value: Any) -> TypeGuard[list[Body]]:
    """Return whether a value is a list of objects.

    Args:
        value (`Any`): JSON value.
    """
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def fits(value: Any, **kinds: type) -> bool:
    """Return whether a value is an object whose fields have the given types. Missing and empty fields are fine.

    Args:
        value (`Any`): JSON value.
        **kinds (`type`): Types by name of the field.
    """
    return isinstance(value, Mapping) and all(
        isinstance(value[name], kind) for name, kind in kinds.items() if value.get(name)
    )


def with_nulls(value: Body, *hidden: str) -> dict[str, Any]:
    """Return a copy with null for the hidden fields. vLLM also sends null for fields that a client did not request.

    Args:
        value (`Body`): Object.
        *hidden (`str`): Names of the fields.
    """
    return {name: None if name in hidden else inner for name, inner in value.items()}


def merged(old: Any, new: Any) -> Any:
    """Return two pieces of a streamed value as one value.

    Texts are joined, and objects are merged by field. A piece in a list is merged with the item that has the same type
    and `index`, unless their ids differ. Without an index, only text is merged, with the last item. Any other value
    replaces the earlier one, except that only text can follow text. LiteLLM sends the lists in
    `provider_specific_fields` again with each piece, so this field is replaced, too.

    Args:
        old (`Any`): Value so far, or None.
        new (`Any`): Next piece. An empty piece changes nothing.
    """
    if old is not None and new in ("", [], {}):
        return old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = dict(old)
        for name, value in new.items():
            if value is None:
                continue
            if name in _REPEATED:
                found[name] = value or old.get(name, value)
            else:
                found[name] = value if name == "provider_specific_fields" else merged(old.get(name), value)
        return found
    if isinstance(old or new, list) or isinstance(new, list):
        items = _items(old)
        for piece in _items(new):
            place = _place(items, piece)
            items[place : place + 1] = [merged(items[place], piece) if place < len(items) else piece]
        return items
    if old and isinstance(old, str):
        return old + new if isinstance(new, str) else old
    return new


_REPEATED = ("id", "type", "role", "index", "format")  # fields that later pieces repeat or leave empty
_RECENT = 64  # number of last items that a piece can continue
_TEXTS = ("text", "thinking", "reasoning.text", "reasoning.summary")  # types of items, from Mistral and OpenRouter


def _items(value: Any) -> list[Any]:
    """Return a list, or text as a list with one item. Return [] for any other value."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    return list(value) if isinstance(value, list) else []


def _place(items: list[Any], piece: Any) -> int:
    """Return the position of the item that a piece continues, or the length of the list for a new item."""
    kind, index = (piece.get("type"), piece.get("index")) if isinstance(piece, Mapping) else (None, None)
    # Without an index, only text can continue an item: the last one.
    first = len(items) - (_RECENT if index is not None else kind in _TEXTS)
    for place in reversed(range(max(first, 0), len(items))):
        item = items[place] if isinstance(items[place], Mapping) else {}
        is_same = not item.get("id") or piece.get("id") in (None, "", item["id"])
        if is_same and item.get("index") == index and kind in (None, item.get("type")):
            return place
    return len(items)


def tool_call(identifier: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call as in OpenAI's chat completions.

    Args:
        identifier (`Any`): Id of the call.
        name (`Any`): Name of the function.
        arguments (`Any`): Arguments: JSON text or an object.
    """
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
