"""Convert messages whose content has the blocks of Anthropic's Messages API or of Bedrock's Converse API."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.message_parts import call, other, split_parts, with_results
from topr_trl.importing.openai_messages import ROLE_NAMES, finish_reason, message, with_role
from topr_trl.importing.row_table import Row

# Blocks that OpenAI's messages lack, and text, in the order in which chat templates write them.
_ORDER = {"thinking": 0, "reasoning": 0, "redacted_thinking": 0, "text": 1, "tool_use": 2}


def messages_of(given: Mapping[str, Any]) -> list[Row]:
    """Convert a chat message to messages of a row. Each result of a tool becomes a separate message.

    Args:
        given (`Mapping[str, Any]`): Message whose content is text, parts of OpenAI's API, or blocks.

    Raises:
        NotOfFormat: the message has no role, or is not an object.
        Unusable: a block cannot become text, for instance an image or a tool that the provider ran, a chat template
            cannot write the blocks in their order, or `message` raises this error.
    """
    if not isinstance(given, Mapping):
        raise NotOfFormat(f"a message is {str(given)[:60]!r}, and must be an object with a role and content")
    given = with_role(given)
    blocks = _as_blocks(given.get("content"))
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        return [message(given)]
    given = {**given, "content": blocks}
    if ROLE_NAMES.get(str(given.get("role")).lower()) == "assistant":
        return [_answer(given, blocks) if any(map(_is_block, blocks)) else message(given)]
    return with_results(
        blocks,
        "tool_result",
        lambda block: other("tool", _as_blocks(block.get("content")), tool_call_id=block.get("tool_use_id")),
        lambda run: message({**given, "content": run}),
    ) or [message(given)]


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
    """Return the content of a message, with each part of the Converse API as a block. Cache points are left out."""
    if not isinstance(content, list):
        return content
    found = [_block(part) if isinstance(part, Mapping) else part for part in content]
    return [block for block in found if block is not None]


def _block(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a part of the Converse API, which is an object with one field, as a block of the Messages API.

    Return None for a cache point. Return other parts unchanged.
    """
    if "type" in part or len(part) != 1:
        return part
    ((name, inner),) = part.items()
    if name == "cachePoint":
        return None
    if name == "toolUse":
        return {"type": "tool_use", "id": inner.get("toolUseId"), "name": inner["name"], "input": inner["input"]}
    if name == "toolResult":
        return {"type": "tool_result", "tool_use_id": inner.get("toolUseId"), "content": inner.get("content")}
    if name == "reasoningContent":
        # If the provider hides the thinking, its text is None.
        return {"type": "thinking", "thinking": (inner.get("reasoningText") or {}).get("text")}
    if name == "guardContent" and "text" in inner:
        return {"type": "text", "text": inner["text"]["text"]}
    if name in ("text", "json"):
        return {"type": "text", "text": inner if name == "text" else json.dumps(inner, ensure_ascii=False)}
    return {"type": name}


def _is_block(block: Mapping[str, Any]) -> bool:
    # Parts of the type `tool_use` also occur in inspect_ai's logs, without an input.
    return _ORDER.get(str(block.get("type")), 1) != 1 and (block["type"] != "tool_use" or "input" in block)


def _answer(given: Mapping[str, Any], blocks: list[Mapping[str, Any]]) -> Row:
    """Return the assistant turn of a message with blocks."""
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
