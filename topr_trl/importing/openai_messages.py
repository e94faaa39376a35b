"""Convert messages, tools and finish reasons in OpenAI's format to columns of a row."""

import json
import re
from collections.abc import Mapping
from typing import Any

from topr_trl.data.messages import check_weight, plain_content
from topr_trl.data.rendering import is_learned
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.record_files import parsed
from topr_trl.importing.row_table import Row


def message(given: Mapping[str, Any]) -> Row:
    """Convert a chat message to a message of the type `MESSAGES` in `row_table`.

    Arguments of tool calls become JSON text, and content in several parts becomes one text. A refusal becomes the
    content of a message without content. The field `reasoning` or `thinking` becomes `reasoning_content`. The older
    role `function` becomes `tool`, and the older field `function_call` becomes a tool call.

    Args:
        given (`Mapping[str, Any]`): Message in OpenAI's format.

    Raises:
        NotOfFormat: the message has no role.
        Unusable: the message contains an image, a part without text, or a weight other than 0 and 1.
    """
    if "role" not in given:
        raise NotOfFormat(f"a message has no role; it has {', '.join(sorted(given))}")
    try:
        content = plain_content(given.get("content"))
        check_weight(given)
    except ValueError as error:
        raise Unusable(str(error)) from None
    calls = [_call(json.loads(call) if isinstance(call, str) else call) for call in given.get("tool_calls") or ()]
    if given.get("function_call"):  # OpenAI's API had this field before tools.
        calls.append(_call(given["function_call"]))
    reasoning = (given.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return {
        "role": "tool" if given["role"] == "function" else given["role"],
        "content": content or given.get("refusal") or content, "tool_calls": calls or None, "name": given.get("name"),
        "reasoning_content": next(filter(None, reasoning), None), "tool_call_id": given.get("tool_call_id"),
        **({"weight": 0} if any(name in given and given[name] == value for name, value in _CONTEXT) else {}),
    }  # fmt: skip


# Fields with which other programs mark a message that the model reads and does not learn: OpenAI's weight, the loss of
# ms-swift, the training flags of Axolotl, and demonstrations of SWE-agent.
_CONTEXT = (
    ("weight", 0), ("loss", False), ("train", False), ("training", False), ("trainable", False), ("learn", False),
    ("is_demo", True), ("is_demonstration", True), ("demo", True), ("is_example", True), ("is_few_shot", True),
    ("name", "example_assistant"), ("message_type", "demonstration"),
)  # fmt: skip


def row_of_run(messages: list[Row], **columns: Any) -> list[Row]:
    """Return one row whose completion starts with the first assistant turn to learn from.

    Return [] if there is no assistant turn to learn from. Assistant turns with weight 0 are context, and so is a
    greeting: an assistant turn at the start of a longer conversation, before which the model read nothing.

    Args:
        messages (`list[Row]`): Messages of the run.
        **columns (`Any`): Other columns of the row.
    """
    learned = [n for n, each in enumerate(messages) if is_learned(each)]
    first = next((n for n in learned if n), learned[0] if learned else None)
    return [] if first is None else [{"prompt": messages[:first], "completion": messages[first:], **columns}]


def text_or_messages(given: object) -> object:
    """Convert each message of a list with `message`. Return text unchanged."""
    return [message(each) for each in given] if isinstance(given, list) else given


def _call(given: Mapping[str, Any]) -> Row:
    """Convert a tool call, whose name and arguments can be in the field `function` or next to the id."""
    function = given.get("function") or given
    arguments = _as_json(function.get("arguments"))
    return {"id": given.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def has_broken_call(row: Row) -> bool:
    """Return whether the arguments of a tool call in a row are invalid JSON.

    Messages that have token ids are not checked, because the trainer does not render them.
    """
    turns = [
        turn
        for name in ("prompt", "completion")
        if isinstance(row[name], list) and not row.get(f"{name}_ids")
        for turn in row[name]
    ]
    calls = (call for turn in turns if isinstance(turn, dict) for call in turn.get("tool_calls") or ())
    arguments = (call["function"]["arguments"] or "{}" for call in calls)
    return any(text.strip() != "null" and parsed(text.encode()) is None for text in arguments)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def tools_as_json(tools: Any) -> str | None:
    """Return tools as JSON, with the name and parameters of each tool in its field `function`.

    Return None if there are no tools. JSON is necessary because structs in a table would give each tool the parameters
    of all tools.

    Args:
        tools (`Any`): List of tools, or JSON, which is returned unchanged.
    """
    if not tools or isinstance(tools, str):
        return tools or None
    return json.dumps([tool if "function" in tool else {"type": "function", "function": tool} for tool in tools])


def template_columns(request: Mapping[str, Any]) -> Row:
    """Return the columns `tools` and `chat_template_kwargs` from a request.

    OpenAI's API had `functions` before `tools`. OpenAI's client adds the fields of `extra_body` to the request, where
    they replace fields of the same name. vLLM's server passes `reasoning_effort` to the chat template. This field is
    therefore added to `chat_template_kwargs`, and replaces a `reasoning_effort` there. The value `"none"` also sets
    `enable_thinking` to False, unless `chat_template_kwargs` has a value for `enable_thinking`.

    Args:
        request (`Mapping[str, Any]`): Request in OpenAI's format, or a record with its fields.
    """
    extra = {name: value for name, value in (request.get("extra_body") or {}).items() if value is not None}
    body = {**request, **extra}
    given = body.get("chat_template_kwargs") or {}
    options: dict[str, Any] = dict(json.loads(given) if isinstance(given, str) else given)
    if (effort := body.get("reasoning_effort")) is not None:
        options["reasoning_effort"] = effort
        if effort == "none":
            options.setdefault("enable_thinking", False)
    return {
        "tools": tools_as_json(body.get("tools") or body.get("functions")),
        "chat_template_kwargs": json.dumps(options) if options else None,
    }


FAILED = "failed"
# A completion that something else than the model ended, such as a content filter, has no stop token.
_FINISHED = {
    **dict.fromkeys(
        ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_str", "completed", "complete", "tool_calls",
         "tool_call", "tool_use", "function_call"),
        "stop",
    ),
    **dict.fromkeys(
        ("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "model_context_window_exceeded",
         "content_filter", "sensitive", "safety", "recitation", "repetition", "incomplete", "truncated"),
        "length",
    ),
    **dict.fromkeys(
        ("abort", "aborted", "error", "failed", "cancelled", "canceled", "timeout", "network_error",
         "insufficient_system_resource"),
        FAILED,
    ),
    **dict.fromkeys(("", "none", "null", "unknown", "finish_reason_unspecified"), None),
}  # fmt: skip


def finish_reason_of(record: Mapping[str, Any]) -> str | None:
    """Return the finish reason that a record has for its last answer, as `finish_reason` does.

    Args:
        record (`Mapping[str, Any]`): Record, perhaps with a field such as `finish_reason`, `stopReason` or `truncated`.

    Raises:
        Unusable: see `finish_reason`.
    """
    given = {re.sub(r"[^a-z]", "", str(name).lower()): value for name, value in record.items()}
    if given.get("finishreason"):
        return finish_reason(given["finishreason"])
    if any(str(given.get(name)).lower() in ("true", "1") for name in ("truncated", "istruncated", "wastruncated")):
        return "length"
    # vLLM has the matched stop string or token in `stop_reason`.
    return _FINISHED.get(str(given.get("stopreason") or "").lower())


def finish_reason(given: str | None) -> str | None:
    """Convert a logged finish reason to `"stop"`, `"length"` or `FAILED`. Return None if the reason is not known.

    The import leaves out a completion whose reason is `FAILED`.

    Args:
        given (`str` or `None`): Reason of a server, such as `max_tokens` or `STOP`.

    Raises:
        Unusable: the reason is new, so whether the model ended the completion is not known.
    """
    reason = str(given or "").strip().lower()
    if reason not in _FINISHED:
        known = ", ".join(name for name in _FINISHED if name)
        raise Unusable(
            f"a completion ended with {given!r}, and whether the model or something else ended it is not known. Write "
            f"stop or length in the file. Known reasons: {known}"
        )
    return _FINISHED[reason]
