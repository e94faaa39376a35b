"""Read logs and batches of Anthropic's Messages API."""

from dataclasses import replace
from typing import Any

from topr_trl.importing.calls import Dialect, field_of, format_of_calls
from topr_trl.importing.content_blocks import answer_of, prompt_of
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.openai_messages import tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row
from topr_trl.recording.protocols.messages import without_request_hash


def prompt(asked: Record) -> Row:
    """Return the messages and the tools of a request.

    Raises:
        NotOfFormat: the request has no messages, or a message has no role.
        Unusable: the provider defines or runs a tool, or a message cannot be used (see `content_blocks.prompt_of`).
    """
    if asked.get("mcp_servers"):
        raise Unusable("its request has mcp_servers, whose tools the provider runs itself, and does not log")
    system = without_request_hash(asked.get("system")) or asked.get("instructions")
    messages = prompt_of(field_of(asked, "messages", "request"), system)
    return {"prompt": messages, "tools": tools_as_json(asked.get("tools"))}


def answers(body: Record, asked: Record) -> list[Row | None]:
    """Return a list with the columns of the answer, or `[None]` if the answer is empty.

    Raises:
        Unusable: the finish reason is unknown, the log lacks a tool call, or the answer cannot become a message, for
            instance because the provider ran a tool itself (see `content_blocks.messages_of`).
    """
    return [answer_of(body, body.get("stop_reason") or body.get("finish_reason"))]


def _is_answer(body: Record) -> bool:
    content = body.get("content")
    # Some logs have only the content. A message of OpenAI's Responses API also has the type `message`, but its parts
    # have the type `output_text`.
    return body.get("type", "message") == "message" and isinstance(content, list) and not any(
        inner_value(block, "type") == "output_text" for block in content
    )  # fmt: skip


DIALECT = Dialect(asks="messages", is_answer=_is_answer, prompt=prompt, answers=answers)
_CALLS = format_of_calls(
    DIALECT,
    source="Anthropic's Messages API and its batches (anthropic-sdk-python, types/message.py)",
    loses="Claude's thinking is a summary, or hidden. Text is tokenized again, which can give different tokens. A "
    "request without a temperature used the default of the API, which is assumed to be 1.",
)


def _as_call(record: Record) -> Record:
    """Return a line of a batch's results as a call. Return any other record unchanged."""
    result: Any = record.get("result")
    if "custom_id" not in record or not isinstance(inner_value(result, "type"), str):
        return record
    others = {name: value for name, value in record.items() if name != "result"}
    return {**others, "response": result.get("message")}


FORMAT = replace(
    _CALLS,
    test=lambda record: _as_call(record) is not record or _CALLS.test(record),
    records=lambda record: _CALLS.records(_as_call(record)),  # type: ignore[misc]
)
