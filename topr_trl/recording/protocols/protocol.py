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


def tool_call(identifier: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call as in OpenAI's chat completions.

    Args:
        identifier (`Any`): Id of the call.
        name (`Any`): Name of the function.
        arguments (`Any`): Arguments: JSON text or an object.
    """
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
