"""Read requests and answers of the Vercel AI SDK, whose messages have parts such as `tool-call` and `tool-result`."""

import json
from collections.abc import Mapping
from typing import Any

from topr_trl.importing.calls import Dialect
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.message_parts import assistant, other, parsed_json, result_text, with_results
from topr_trl.importing.openai_messages import finish_reason, tools_as_json
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages and the tools of a request.

    Raises:
        Unusable: the provider runs a tool, or a part of a message cannot become text, for instance an image.
    """
    tools = [_tool(parsed_json(each)) for each in asked.get("tools") or ()]
    return {"prompt": [each for given in asked["messages"] for each in _messages(given)], "tools": tools_as_json(tools)}


def answers(body: Record, asked: Record) -> list[Row]:
    """Return the columns of the answer, or [] for an empty answer.

    Raises:
        Unusable: the finish reason is unknown.
    """
    calls = parsed_json(body.get("toolCalls")) or ()
    text, thinking = body.get("text") or body.get("object"), body.get("reasoning")
    if not (calls or text or thinking):
        return []
    said = [assistant(text, calls, thinking)]
    return [{"completion": said, "finish_reason": finish_reason(body["finishReason"], said)}]


def _tool(given: Record) -> Record:
    if given.get("type", "function") != "function":
        raise Unusable(f"its request has the tool {given.get('name')}, which the provider runs itself")
    found: Record = {name: given[name] for name in ("name", "description") if name in given}
    return {**found, "parameters": given.get("inputSchema", given.get("parameters"))}


def _messages(given: Record) -> list[Row]:
    """Convert a message to messages of a row, in the order of its parts. Each tool result is a separate message."""
    content = given["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not parts and given["role"] == "assistant":
        return [assistant("")]
    return with_results(
        parts,
        "tool-result",
        lambda part: other("tool", _result(part), tool_call_id=part["toolCallId"]),
        lambda run: _message(given["role"], run),
    )


def _message(role: str, parts: list[Record]) -> Row:
    rest = [part for part in parts if part.get("type") != "tool-call"]
    if role != "assistant":
        return other(role, rest)
    return assistant(rest, [part for part in parts if part.get("type") == "tool-call"])


def _result(part: Record) -> str:
    """Return the text of a result: version 5 of the SDK has it in `output`, and earlier versions in `result`."""
    value: Any = part.get("output", part.get("result"))
    if isinstance(value, Mapping) and set(value) >= {"type", "value"}:
        if value["type"] == "json" and not isinstance(value["value"], str):
            return json.dumps(value["value"])
        value = value["value"]
    return result_text(value)


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: "finishReason" in body and bool({"text", "toolCalls", "object"} & set(body)),
    prompt=prompt,
    answers=answers,
)
