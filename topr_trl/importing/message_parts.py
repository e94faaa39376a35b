"""Build messages of a row from content in several parts, thinking, and tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from topr_trl.importing.format import Unusable
from topr_trl.importing.openai_messages import message
from topr_trl.importing.row_table import Row

_TEXT = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_THINKING = ("reasoning", "thinking")
_WITHOUT_TEXT = ("redacted_thinking",)  # types of parts whose text the provider hides
_CALLS = ("tool_use", "tool_call", "function_call")  # types of parts that repeat a tool call of the message


def parsed_json(value: Any) -> Any:
    """Parse text that is a JSON object or list. Return any other value unchanged.

    Args:
        value (`Any`): Value. Some exports write objects as JSON text.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # ValueError includes integers with too many digits.
        return value


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, each with the field `role` or `from`."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, Mapping) and {"role", "from"} & set(each) for each in value
    )  # fmt: skip


def call(name: str, arguments: Any, identifier: str | None = None) -> Row:
    """Return a tool call in OpenAI's format.

    Args:
        name (`str`): Name of the function.
        arguments (`Any`): Arguments: JSON text or an object.
        identifier (`str`, *optional*): Id of the call.
    """
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any) -> str:
    """Return the text of a message's content, without thinking. See `split_parts`.

    Args:
        content (`Any`): Text, a list of parts, an object (returned as JSON), None (returned as `""`), or another
            value (returned as text).

    Raises:
        Unusable: a part cannot become text, for instance an image or a tool call.
    """
    return split_parts(content)[0]


def split_parts(content: Any, calls: Sequence[Row] = ()) -> tuple[str, str]:
    """Return the text and the thinking of a message's content, each `""` if there is none.

    Hidden thinking is skipped.

    Args:
        content (`Any`): Text, a list of parts, an object (returned as JSON), None (returned as `""`), or another
            value (returned as text).
        calls (`Sequence[Row]`, defaults to `()`): Tool calls of the message. If there are any, parts with calls are
            skipped.

    Raises:
        Unusable: a part cannot become text, for instance an image, or a part is a call and there are no `calls`.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if isinstance(content, Mapping):
        return json.dumps(content), ""
    if not isinstance(content, Sequence):
        return str(content), ""
    texts, thoughts = list[str](), list[str]()
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text")
        if kind in _TEXT:
            texts.append(_string(part, "text", "content", "refusal"))
        elif kind in _THINKING:
            thoughts.append(_thinking(part))
        elif kind not in _WITHOUT_TEXT and not (calls and kind in _CALLS):
            if kind in _CALLS:
                raise Unusable(f"its content has a {kind}, and the message has no tool calls. Write it in tool_calls")
            raise Unusable(f"a message has {kind}: offline training supports only text")
    return "".join(texts), "\n".join(filter(None, thoughts))


def result_text(value: Any) -> str:
    """Return the text of a tool's result: text, the text of a list of only parts, or JSON of any other value.

    Args:
        value (`Any`): Result.

    Raises:
        Unusable: a part is not text, for instance an image.
    """
    are_parts = isinstance(value, list) and value and all(map(_is_part, value))
    return text_of(value) if isinstance(value, str) or are_parts else json.dumps(value)


def _is_part(each: Any) -> bool:
    kind = each.get("type") if isinstance(each, Mapping) else None
    return kind in ("image", "media") or (kind in _TEXT and isinstance(each.get("text", each.get("content")), str))


def _string(part: Mapping[str, Any], *names: str) -> str:
    for name in names:
        if isinstance(part.get(name), str):
            return str(part[name])
    raise Unusable(f"a part of type {part.get('type', 'text')} has no text; it has {', '.join(sorted(part))}")


def _thinking(part: Mapping[str, Any]) -> str:
    """Return the thinking of a part, or the summary of the thinking. Return "" if the provider hides both."""
    if part.get("redacted"):
        return ""
    for name in ("content", "reasoning", "thinking", "text", "summary"):
        if value := part.get(name):
            return text_of(value)
    return ""


def with_results(
    parts: Sequence[Any], kind: str, result: Callable[[Any], Row], rest: Callable[[list[Any]], Row]
) -> list[Row]:
    """Return messages for the parts of a message, in their order. Each result of a tool becomes a separate message.

    Args:
        parts (`Sequence[Any]`): Parts, which are objects.
        kind (`str`): Type of a part with the result of a tool.
        result (`Callable`): Function that returns the message of a result.
        rest (`Callable`): Function that returns the message of adjacent parts that are not results.
    """
    found: list[Row] = []
    for is_result, group in groupby(parts, lambda part: part.get("type") == kind):
        run = list(group)
        found += map(result, run) if is_result else [rest(run)]
    return found


def assistant(content: Any, calls: Sequence[Row] = (), thinking: str | None = None, **more: Any) -> Row:
    """Return an assistant turn.

    Args:
        content (`Any`): Text, or parts.
        calls (`Sequence[Row]`, defaults to `()`): Tool calls.
        thinking (`str`, *optional*): Thinking to add before the thinking of the parts.
        **more (`Any`): Other fields of the message.
    """
    text, thought = split_parts(content, calls)
    found = "\n".join(filter(None, (thinking, thought)))
    own = {"role": "assistant", "content": text, "tool_calls": list(calls) or None, "reasoning_content": found or None}
    return message({**own, **more})


def other(role: str, content: Any, **more: Any) -> Row:
    """Return a system, user or tool message.

    Args:
        role (`str`): Role. `developer` becomes `system`.
        content (`Any`): Text, or parts. Parts with thinking are left out.
        **more (`Any`): Other fields of the message.
    """
    return message({"role": "system" if role == "developer" else role, "content": text_of(content), **more})
