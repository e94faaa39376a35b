"""Record OpenAI's chat completions and text completions.

The names of fields come from OpenAI's API and from vLLM (`return_token_ids`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from topr_trl.recording.protocols import protocol
from topr_trl.recording.protocols.messages import without_request_hashes
from topr_trl.recording.protocols.protocol import Body, Protocol, are_objects, fits, merged, with_nulls

CHAT, TEXT = "chat/completions", "completions"
_IDS_IN_CHOICE, _IDS_IN_ANSWER = ("token_ids", "prompt_token_ids"), ("prompt_token_ids",)


def with_token_ids(request: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """Return a request that also asks for token ids and for the log-probability of each token.

    Args:
        request (`Mapping[str, Any]`): Request of the client.
        endpoint (`str`): `CHAT` or `TEXT`.
    """
    if _asks_for_logps(request, endpoint):
        return {**request, "return_token_ids": True}
    logps = {"logprobs": True, "top_logprobs": 0} if endpoint == CHAT else {"logprobs": 0}
    return {**request, "return_token_ids": True, **logps}


def _asks_for_logps(request: Body, endpoint: str) -> bool:
    logprobs = request.get("logprobs")
    return bool(logprobs) if endpoint == CHAT else logprobs is not None


def without_token_ids(answer: Mapping[str, Any], request: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """Return an answer or a streamed event, with null for the values that only the recorder requested.

    Args:
        answer (`Mapping[str, Any]`): Answer or event of the server.
        request (`Mapping[str, Any]`): Request of the client.
        endpoint (`str`): `CHAT` or `TEXT`.
    """
    hide_ids = not request.get("return_token_ids")
    hide_logps = not _asks_for_logps(request, endpoint)
    found = with_nulls(answer, *(_IDS_IN_ANSWER if hide_ids else ()))
    if isinstance(choices := answer.get("choices"), list):
        hidden = (_IDS_IN_CHOICE if hide_ids else ()) + (("logprobs",) if hide_logps else ())
        found["choices"] = [
            with_nulls(choice, *hidden) if isinstance(choice, Mapping) else choice for choice in choices
        ]
    return found


def is_well_formed(answer: Mapping[str, Any]) -> bool:
    """Return whether the choices of an answer or a streamed event have the types of OpenAI's API.

    Args:
        answer (`Mapping[str, Any]`): Answer or event of the server.
    """
    choices = answer.get("choices") or []
    return isinstance(choices, list) and all(_is_choice(choice) for choice in choices)


def _is_choice(choice: Any) -> bool:
    kinds = {
        "message": Mapping, "delta": Mapping, "text": str, "logprobs": Mapping, "token_ids": list,
        "prompt_token_ids": list, "finish_reason": str,
    }  # fmt: skip
    if not fits(choice, **kinds) or type(choice.get("index", 0)) is not int:
        return False
    body = choice.get("message") or choice.get("delta") or {}
    calls = body.get("tool_calls") or []
    return isinstance(calls, list) and all(map(_is_tool_call, [*calls, {"function": body.get("function_call")}]))


def _is_tool_call(call: Any) -> bool:
    return fits(call, function=Mapping, custom=Mapping) and fits(call.get("function") or {}, name=str, arguments=str)


def messages(request: Body) -> list[Body] | None:
    """Return the messages of a request. Return None if the request has no list of messages.

    Args:
        request (`Body`): Request of the client.
    """
    found = request.get("messages")
    return without_request_hashes(found) if are_objects(found) else None


def prompts_of(request: Body) -> list[Any]:
    """Return the prompts of a request: texts or lists of token ids. A list of numbers is one prompt.

    Args:
        request (`Body`): Request for text completions, with one prompt or several.
    """
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def prompt_of(request: Body, choice: int) -> Any:
    """Return the prompt of a choice: text or token ids. Servers number the choices of the first prompt first.

    Args:
        request (`Body`): Request for text completions, with one prompt or several.
        choice (`int`): Number of the choice, from 0.
    """
    prompts, n = prompts_of(request), request.get("n") or 1
    is_known = isinstance(n, int) and choice // n < len(prompts)
    return prompts[choice // n] if is_known else request.get("prompt")


class Assembler(protocol.Assembler):
    """Join the events of a streamed answer into the answer that the server would send without streaming.

    Args:
        endpoint (`str`): `CHAT` or `TEXT`.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event.

        Args:
            event (`Mapping[str, Any]`): Event of the server, which `is_well_formed` accepts.
        """
        is_chat = self._endpoint == CHAT
        self._answer.update({name: value for name, value in event.items() if name != "choices" and value is not None})
        for piece in event.get("choices") or ():
            place = piece.get("index", 0)
            empty = {"message": {"role": "assistant", "content": None}} if is_chat else {"text": ""}
            choice = self._choices.setdefault(place, {"index": place, **empty, "finish_reason": None})
            if is_chat:
                _add_message(choice["message"], piece.get("delta") or {})
            else:
                choice["text"] += piece.get("text") or ""
            _add_tokens(choice, piece)

    @property
    def answer(self) -> dict[str, Any] | None:
        """Answer so far, or None if no event had a choice."""
        if not self._choices:
            return None
        kind = "chat.completion" if self._endpoint == CHAT else "text_completion"
        choices = [self._choices[place] for place in sorted(self._choices)]
        return {**self._answer, "object": kind, "choices": choices}

    @property
    def finished(self) -> int:
        """Number of choices with a finish reason."""
        return sum(choice["finish_reason"] is not None for choice in self._choices.values())


def _add_message(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a piece of a message."""
    for piece in delta.get("tool_calls") or ():
        _add_tool_call(message.setdefault("tool_calls", []), piece)
    if delta.get("function_call"):  # OpenAI's API had this field before tools.
        message.setdefault("function_call", {"name": "", "arguments": ""})
    message |= merged(message, {name: value for name, value in delta.items() if name != "tool_calls"})


def _add_tool_call(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> None:
    place = piece.get("index", len(calls))
    call = next((call for call in reversed(calls) if call["index"] == place), None)
    # Gemini's server sends parallel calls with the same index.
    is_other = call is not None and _name_of(call) and _name_of(piece)
    if call is None or (is_other and piece.get("id") not in (None, "", call["id"])):
        call = {"index": place, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        if piece.get("type") == "custom":
            call = {"index": place, "id": None, "type": "custom", "custom": {"name": "", "input": ""}}
        calls.append(call)
    call |= merged(call, piece)


def _name_of(call: Mapping[str, Any]) -> Any:
    return (call.get("function") or call.get("custom") or {}).get("name")


def _add_tokens(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add the token ids, log-probabilities and finish reason in a piece of a choice."""
    if piece.get("finish_reason"):  # Some servers send empty text instead of null before the last event.
        choice["finish_reason"] = piece["finish_reason"]
    if piece.get("prompt_token_ids"):
        choice["prompt_token_ids"] = piece["prompt_token_ids"]
    if piece.get("token_ids"):
        choice.setdefault("token_ids", []).extend(piece["token_ids"])
    for name, values in (piece.get("logprobs") or {}).items():
        if isinstance(values, list):
            choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)


PROTOCOLS = tuple(
    Protocol(
        endpoint=endpoint,
        messages=messages,
        choices=lambda answer: answer.get("choices") or (),
        assembler=partial(Assembler, endpoint),
        is_well_formed=is_well_formed,
        with_token_ids=partial(with_token_ids, endpoint=endpoint),
        without_token_ids=partial(without_token_ids, endpoint=endpoint),
    )
    for endpoint in (CHAT, TEXT)
)
