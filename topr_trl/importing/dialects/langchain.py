"""Read messages that LangChain's tracers write, and messages of OpenAI's and Anthropic's APIs among them."""

import re
from collections.abc import Mapping
from typing import Any

from topr_trl.importing.calls import Dialect, first_choice
from topr_trl.importing.content_blocks import messages_of, text_or_messages
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.message_parts import assistant, other, split_parts
from topr_trl.importing.openai_messages import (
    ROLE_NAMES,
    check_content,
    finish_reason,
    finish_reason_of,
    tools_as_json,
)
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages, or the text for a completion model, and the tools of a request.

    Raises:
        Unusable: there is no prompt, there are several requests or prompts, the provider defines a tool, a tool call
            was not parsed, or a message has an unknown type or cannot become text.
    """
    if "messages" in asked:
        given: Any = [row for each in _unwrapped(asked["messages"]) for row in _messages(each)]
    else:
        prompts = asked["prompts"] if "prompts" in asked else [asked["prompt"]] if "prompt" in asked else []
        if len(prompts) != 1:
            raise Unusable(f"it has {len(prompts)} prompts and no messages; its inputs have {', '.join(asked)}")
        given = prompts[0]
    return {"prompt": given, "tools": tools_as_json(asked.get("tools"))}


def answers(body: Record, asked: Record) -> list[Row | None]:
    """Return the columns of each answer, or None for an empty answer.

    Raises:
        Unusable: the answer is in no known field, the request of a chat model is text, a tool call was not parsed, the
            finish reason is new, or a message has an unknown type or cannot become text.
    """
    return [_answer(choice, "messages" in asked) for choice in _choices(body)]


def _choices(body: Record) -> list[Record]:
    if "generations" in body:
        generations: list[Any] = body["generations"]
        return generations[0] if generations and isinstance(generations[0], list) else generations
    if "choices" in body:
        return list(body["choices"])
    raise Unusable(f"its outputs have no known field for the answer; they have {', '.join(body)}")


def _answer(choice: Record, is_chat: bool) -> Row | None:
    given = choice.get("message") or choice.get("text")
    if not given:
        return None
    if is_chat:
        completion: Any = _messages(given) if isinstance(given, Mapping) else [assistant(given)]
    elif isinstance(given, Mapping) and _role(given):
        raise Unusable("its inputs are the text of a chat, so the messages that the model read are not known")
    else:
        completion = text_or_messages(given)
    reason = choice.get("finish_reason") or (choice.get("generation_info") or {}).get("finish_reason")
    if reason is None:  # Some providers give the reason in the message, such as `response_metadata.stop_reason`.
        return {"completion": completion, "finish_reason": finish_reason_of(choice)}
    return {"completion": completion, "finish_reason": finish_reason(reason, completion if is_chat else ())}


def _is_answer(body: Record) -> bool:
    message = first_choice(body, "message")
    is_own = isinstance(message, Mapping) and ("lc" in message or _role({"type": message.get("type")}))
    return bool(is_own) or isinstance(body.get("generations"), list)


def _unwrapped(messages: Any) -> Any:
    """Return the messages of a request, which LangChain can log as the only element of a list.

    Raises:
        Unusable: the list has several requests.
    """
    if messages and isinstance(messages[0], list):
        if len(messages) > 1:
            raise Unusable(f"it has {len(messages)} requests in one run")
        return messages[0]
    return messages


def _role(given: Mapping[str, Any]) -> str | None:
    """Return the role of a message, or None if it is unknown."""
    found = (ROLE_NAMES.get(re.sub(r"message(chunk)?$", "", name.lower())) for name in _names(given))
    return next(filter(None, found), None)


def _names(given: Mapping[str, Any]) -> list[str]:
    """Return the class name of a message, such as `AIMessageChunk`, or the type and the role that it has."""
    is_object = isinstance(given.get("id"), list) and given.get("lc")
    names = given["id"][-1:] if is_object else [given.get("type"), given.get("role")]
    return [str(name) for name in names if name]


def _messages(given: Mapping[str, Any]) -> list[Row]:
    """Convert a message to messages of a row. Each tool result among Anthropic's blocks becomes a separate message."""
    content = given.get("content")
    blocks = content if isinstance(content, list) else []
    if (role := _role(given)) is None:
        raise Unusable(f"a message has the unknown type or role {' or '.join(_names(given))}")
    # LangChain's own messages repeat the calls in `tool_calls`. Only `tool_calls` has the arguments of streamed calls.
    has_calls = given.get("tool_calls") or given.get("invalid_tool_calls")
    if not has_calls and any(inner_value(block, "type") in ("tool_use", "tool_result") for block in blocks):
        return messages_of({"role": role, **given})
    inner = given.get("kwargs") or given.get("data") or given
    check_content(inner)
    more = inner.get("additional_kwargs") or {}
    if role != "assistant":
        return [other(role, inner.get("content"), tool_call_id=inner.get("tool_call_id"))]
    if inner.get("invalid_tool_calls"):
        raise Unusable("it has a tool call that could not be parsed")
    calls = inner.get("tool_calls") or more.get("tool_calls") or ()
    thinking = more.get("reasoning_content") or inner.get("reasoning_content")
    if thinking and split_parts(inner.get("content"), calls)[1]:
        thinking = None  # The parts of the content repeat this thinking.
    return [assistant(inner.get("content"), calls, thinking)]


DIALECT = Dialect(asks="messages", is_answer=_is_answer, prompt=prompt, answers=answers)
