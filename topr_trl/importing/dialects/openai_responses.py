"""Read responses of OpenAI's Responses API: batch files, and logs of requests with responses."""

from collections.abc import Iterable
from typing import Any

from topr_trl.importing.calls import Dialect, check_lengths, field_of, format_of_calls
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.message_parts import assistant, call, other, split_parts, text_of
from topr_trl.importing.openai_messages import template_columns, tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row
from topr_trl.recording.protocols.responses import ELSEWHERE


def prompt(asked: Record) -> Row:
    """Return the messages, the tools and the template settings of a request.

    Raises:
        NotOfFormat: the request has no input.
        Unusable: the request refers to an earlier response, a conversation or a stored prompt, which is not in the
            file; the request has a tool that the provider runs itself; or an item cannot become a message, see
            `messages_of`.
    """
    for name in ELSEWHERE:
        if asked.get(name) and asked[name] != asked.get("input"):  # Tracers log a text without a name.
            raise Unusable(f"its request has {name}, so the file does not have the whole prompt")
    given = field_of(asked, "input", "request")
    start = [other("system", asked["instructions"])] if asked.get("instructions") else []
    messages = start + ([other("user", given)] if isinstance(given, str) else messages_of(given))
    options = template_columns({**asked, "tools": None, "reasoning_effort": inner_value(asked, "reasoning", "effort")})
    return {"prompt": messages, **options, "tools": tools_as_json(_functions(asked.get("tools")))}


def answers(body: Record, asked: Record) -> list[Row | LeftOut]:
    """Return the columns of the completion, or [] for an empty response.

    Return `[LeftOut.FAILED]` if the response failed, was canceled or was still being generated.

    Raises:
        NotOfFormat: the response has no output.
        Unusable: an item cannot become a message, see `messages_of`, or the numbers of token ids and log-probabilities
            differ.
    """
    output = field_of(body, "output", "response")
    if body.get("status") in ("failed", "cancelled", "in_progress", "queued"):
        return [LeftOut.FAILED]
    completion = messages_of(output)
    if not completion:
        return []
    return [{"completion": completion, "finish_reason": _finish_reason(body), **_tokens(body, output)}]


def _tokens(body: Record, output: Iterable[Any]) -> Row:
    """Return the token ids and the log-probabilities in an answer of vLLM (`enable_response_messages`).

    Return {} without token ids, or if the server ran tools itself.

    Raises:
        Unusable: the numbers of token ids and log-probabilities differ.
    """
    both = [body.get(name) or [] for name in ("input_messages", "output_messages")]
    if [[inner_value(each, "type") for each in given] for given in both] != [["raw_message_tokens"]] * 2:
        return {}  # A server that runs tools itself logs several messages.
    (prompt,), (completion,) = ([each["tokens"] for each in given] for given in both)
    parts = [part for item in output if item.get("type") == "message" for part in item["content"]]
    logps = [entry["logprob"] for entry in (parts[0].get("logprobs") or ())] if len(parts) == 1 else []
    check_lengths(completion, logps)
    return {"prompt_ids": prompt, "completion_ids": completion, "sampler_logps": logps or None}


def messages_of(items: Iterable[Any]) -> list[Row]:
    """Convert items of the Responses API to messages.

    The reasoning, the message and the calls of one response become one assistant turn.

    Args:
        items (`Iterable`): Items of the input of a request, or of the output of a response.

    Raises:
        Unusable: an item has a type that cannot become a message, or a part of its content has no text.
    """
    found: list[Row] = []
    turn: dict[str, Any] | None = None  # assistant turn that the next item may continue

    def end_turn() -> None:
        nonlocal turn
        if turn is not None and (turn["text"] or turn["calls"] or turn["thinking"]):
            found.append(assistant("".join(turn["text"]), turn["calls"], "\n".join(turn["thinking"])))
        turn = None

    for item in items:
        role = item.get("role")
        kind = item.get("type") or ("message" if role else "item_reference")
        if kind == "function_call_output":
            end_turn()
            found.append(other("tool", item["output"], tool_call_id=item.get("call_id")))
        elif kind == "message" and role != "assistant":
            end_turn()
            found.append(other(role, item["content"]))
        elif kind in ("message", "reasoning", "function_call"):
            # Reasoning after text or calls, or text after calls, belongs to the next response.
            if turn is not None and ((kind == "reasoning" and (turn["text"] or turn["calls"])) or
                                     (kind == "message" and turn["calls"])):  # fmt: skip
                end_turn()
            turn = turn or {"text": [], "calls": [], "thinking": []}
            if kind == "message":
                text, thinking = split_parts(item["content"])
                turn["text"].append(text)
            elif kind == "reasoning":
                thinking = text_of(item.get("content") or item.get("summary") or "")
            else:
                thinking = ""
                turn["calls"].append(call(_name_of(item), item["arguments"], item.get("call_id")))
            turn["thinking"] += [thinking] if thinking else []
        else:
            remedy = ". Let the application send whole items (AI SDK: store=false)" if kind == "item_reference" else ""
            raise Unusable(f"it has an item of type {kind}, which rows of messages cannot hold{remedy}")
    end_turn()
    return found


def _name_of(item: Record) -> str:
    """Return the name of a called function, after the name of its MCP server. Codex has the server in `namespace`."""
    server = (item.get("namespace") or "functions").rstrip("_")
    return str(item["name"]) if server == "functions" else f"{server}__{item['name']}"


def _functions(tools: Any) -> Any:
    """Return the functions in the tools of a request.

    Raises:
        Unusable: a tool is not a function.
    """
    others = {tool.get("type") for tool in tools or () if tool.get("type", "function") != "function"}
    if others:
        raise Unusable(f"its request has the tool {', '.join(map(str, others))}, and rows can only have functions")
    return [{name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
            if "function" not in tool else tool for tool in tools or ()]  # fmt: skip


def _finish_reason(body: Record) -> str | None:
    """Return `stop` for a complete response, `length` for an incomplete response, and None for any other status.

    Some logs have the status only in the items of the response.
    """
    statuses = {body.get("status"), *(item.get("status") for item in body["output"])}
    if "incomplete" in statuses or body.get("incomplete_details"):
        return "length"
    return "stop" if "completed" in statuses else None


def _is_response(body: Record) -> bool:
    items = body.get("output")
    if not isinstance(items, list):
        return False
    have_types = bool(items) and all(isinstance(inner_value(each, "type"), str) for each in items)
    return have_types or body.get("object") == "response"


DIALECT = Dialect(asks="input", is_answer=_is_response, prompt=prompt, answers=answers)
FORMAT = format_of_calls(
    DIALECT,
    source="OpenAI's Responses API (openai-python 2, types/responses)",
    loses="OpenAI's models do not show their reasoning, so the completion lacks it. Text is tokenized again, which can "
    "give different tokens. A request without a temperature used the default of the server, which is assumed to be 1.",
)
