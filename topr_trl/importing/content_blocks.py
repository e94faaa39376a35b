"""Convert messages whose content has blocks or parts: text, thinking, calls of tools, and their results."""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from topr_trl.importing.format import Unusable
from topr_trl.importing.message_parts import call, other, result_text, split_parts
from topr_trl.importing.openai_messages import ROLE_NAMES, finish_reason, message, with_role
from topr_trl.importing.row_table import Row

# Blocks that OpenAI's messages lack, and text, in the order in which chat templates write them.
_ORDER = {"thinking": 0, "reasoning": 0, "redacted_thinking": 0, "text": 1, "tool_use": 2}
_CALLS = ("tool_use", "tool_call", "tool-call")
_RESULTS = ("tool_result", "tool_call_response", "tool-result")
_ARGUMENTS = ("input", "arguments", "args", "tool_kwargs")


def messages_of(given: Mapping[str, Any]) -> list[Row]:
    """Convert a chat message to messages of a row. Each result of a tool becomes a separate message.

    Args:
        given (`Mapping[str, Any]`): Message whose content is text, parts of OpenAI's API, or blocks.

    Raises:
        NotOfFormat: the message has no role.
        Unusable: a block cannot become text, for instance an image or a tool that the provider ran, a chat template
            cannot write the blocks in their order, or `message` raises this error.
    """
    given = with_role(given)
    blocks = _as_blocks(given.get("content") or _of_llama_index(given))
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        return [message(given)]
    if given.get("tool_calls"):  # LangChain repeats these calls in the content, perhaps without arguments.
        blocks = [block for block in blocks if block.get("type") != "tool_use"]
    is_own, found = ROLE_NAMES.get(str(given.get("role")).lower()) == "assistant", list[Row]()
    for is_result, group in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        run = list(group)
        if is_result:
            found += [other("tool", block["content"], tool_call_id=block["tool_use_id"]) for block in run]
        else:
            to_message = _answer if is_own and any(map(_is_block, run)) else message
            found.append(to_message({**given, "content": run}))
    return found or [message({**given, "content": []})]


def text_or_messages(given: Any) -> Any:
    """Convert each message of a list with `messages_of`. Return text and other values unchanged."""
    return [row for each in given for row in messages_of(each)] if isinstance(given, list) else given


def prompt_of(messages: Iterable[Mapping[str, Any]], system: Any) -> list[Row]:
    """Convert the messages and the system prompt of a request.

    Args:
        messages (`Iterable[Mapping]`): Messages.
        system (`Any`): System prompt: text, blocks or None.

    Raises:
        NotOfFormat: a message has no role.
        Unusable: the request ends with the start of the answer, or `messages_of` raises this error.
    """
    start = messages_of({"role": "system", "content": system}) if system else []
    found = [*start, *(row for each in messages for row in messages_of(each))]
    if found and found[-1]["role"] == "assistant":
        raise Unusable(
            "its request ends with a message of the assistant, which is the start of the answer. Write the whole "
            "answer into the response, to learn from all of it"
        )
    return found


def answer_of(given: Mapping[str, Any], reason: str | None) -> Row | None:
    """Return the columns of an answer. Return None if the answer is empty.

    Args:
        given (`Mapping[str, Any]`): Message of the answer.
        reason (`str` or `None`): Finish reason in the log.

    Raises:
        Unusable: see `messages_of` and `finish_reason`.
    """
    (said,) = messages_of({**given, "role": "assistant"})
    found = {"completion": [said], "finish_reason": finish_reason(reason, [said])}
    is_empty = not any(said[name] for name in ("content", "tool_calls", "reasoning_content"))
    return None if is_empty else found


def _as_blocks(content: Any) -> Any:
    """Return the content of a message, with each part of a list as a block. Cache points are left out."""
    if not isinstance(content, list):
        return content
    parts = ({"type": "text", "text": part} if isinstance(part, str) else part for part in content)
    found = [_block(part) if isinstance(part, Mapping) else part for part in parts]
    return [block for block in found if block is not None]


def _of_llama_index(given: Mapping[str, Any]) -> Any:
    """Return the parts that LlamaIndex has in `blocks`. Return None for any other message."""
    blocks = given.get("blocks")
    has_types = isinstance(blocks, list) and all(isinstance(each, Mapping) and "block_type" in each for each in blocks)
    return blocks if has_types else None


def _block(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a part of a message as a block of Anthropic's Messages API. Return other parts unchanged.

    OpenTelemetry's conventions, the Vercel AI SDK, LlamaIndex and PostHog have other names for calls and results.
    Return None for a cache point of Bedrock's Converse API.
    """
    kind, called = part.get("type", part.get("block_type")), part
    if kind is None:
        return _block_of_converse(*part, *part.values()) if len(part) == 1 else part
    if kind == "function":
        kind, called = ("tool_call", part["function"]) if "function" in part else ("tool_result", part)
    name = _first(called, "name", "toolName", "tool_name")
    identifier = _first(part, "id", "tool_use_id", "toolCallId", "tool_call_id")
    if kind in _CALLS and name and (kind != "tool_use" or "input" in part):  # inspect_ai's `tool_use` has no input
        return {"type": "tool_use", "id": identifier, "name": name, "input": _first(called, *_ARGUMENTS)}
    if kind in _RESULTS:
        return {"type": "tool_result", "tool_use_id": identifier, "content": _result(part)}
    if kind == "text" and "text" not in part and "content" in part:
        return {"type": kind, "text": part["content"]}
    return {**part, "type": kind}


def _block_of_converse(name: str, inner: Any) -> Mapping[str, Any] | None:
    """Return a part of Bedrock's Converse API, which is an object with one field, as a block."""
    if name == "cachePoint":
        return None
    if name == "toolUse":
        return {"type": "tool_use", "id": inner.get("toolUseId"), "name": inner["name"], "input": inner["input"]}
    if name == "toolResult":
        content = _as_blocks(inner.get("content"))
        return {"type": "tool_result", "tool_use_id": inner.get("toolUseId"), "content": content}
    if name == "reasoningContent":
        # If the provider hides the thinking, its text is None.
        return {"type": "thinking", "thinking": (inner.get("reasoningText") or {}).get("text")}
    if name == "guardContent" and "text" in inner:
        return {"type": "text", "text": inner["text"]["text"]}
    if name in ("text", "json"):
        return {"type": "text", "text": inner if name == "text" else json.dumps(inner, ensure_ascii=False)}
    return {"type": name}


def _first(part: Mapping[str, Any], *names: str) -> Any:
    return next((part[name] for name in names if part.get(name) is not None), None)


def _result(part: Mapping[str, Any]) -> Any:
    """Return the content of a tool's result: text or blocks."""
    if "content" in part:
        return _as_blocks(part["content"])
    value = _first(part, "output", "response", "result")
    if part["type"] == "tool-result" and isinstance(value, Mapping) and set(value) >= {"type", "value"}:
        is_json = value["type"] == "json" and not isinstance(value["value"], str)
        return json.dumps(value["value"]) if is_json else result_text(value["value"])
    return None if part["type"] == "tool_result" else result_text(value)


def _is_block(block: Mapping[str, Any]) -> bool:
    return _ORDER.get(str(block.get("type")), 1) != 1 and (block["type"] != "tool_use" or "input" in block)


def _answer(given: Mapping[str, Any]) -> Row:
    """Return the assistant turn of a message with blocks."""
    blocks = given["content"]
    kinds = [str(block.get("type", "text")) for block in blocks if block.get("text") != ""]
    order = [_ORDER.get(kind, 1) for kind in kinds]
    if order != sorted(order):
        raise Unusable(
            f"an assistant message has {', '.join(kinds)} in this order, and chat templates write thinking, text and "
            "tool calls. Split the message in the file"
        )
    calls = [
        call(block["name"], block["input"], block.get("id")) for block in blocks if block.get("type") == "tool_use"
    ]
    text, thinking = split_parts(blocks, calls)
    return message({**given, "content": text, "reasoning_content": thinking or given.get("reasoning_content"),
                    "tool_calls": calls or given.get("tool_calls")})  # fmt: skip
