"""Read logs and batches of Gemini's API, with the field names of the REST API or of Google's Python client."""

import json
import re
from collections.abc import Mapping
from typing import Any

from topr_trl.importing.calls import Dialect, field_of, format_of_calls, sampling_of
from topr_trl.importing.content_blocks import answer_of, prompt_of
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.openai_messages import FAILED, tools_as_json
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages, the tools and the sampling settings of a request.

    Raises:
        NotOfFormat: the request has no contents.
        Unusable: a part of the prompt is in a cache, a tool is not a list of functions (see `functions`), or a message
            cannot be used (see `content_blocks.prompt_of`).
    """
    settings = {**asked, **(_get(asked, "generation_config") or {}), **(asked.get("config") or {})}
    if _get(settings, "cached_content"):
        raise Unusable("its request has cachedContent, so the file does not have the whole prompt")
    system, contents = _get(settings, "system_instruction"), field_of(asked, "contents", "request")
    are_turns = isinstance(contents, list) and all(isinstance(each, Mapping) and "parts" in each for each in contents)
    tools = [each for tool in settings.get("tools") or () for each in functions(tool)]
    messages = prompt_of(
        map(_message, contents if are_turns else [contents]), _message(system)["content"] if system else None
    )
    return {"prompt": messages, "tools": tools_as_json(tools), **sampling_of(settings)}


def answers(body: Record, asked: Record) -> list[Row | LeftOut | None]:
    """Return the columns of each candidate, or None for an empty candidate.

    Return `[LeftOut.FAILED]` without candidates, for instance if the prompt was blocked.

    Raises:
        Unusable: the client called functions before the answer, the finish reason is unknown, or a candidate cannot
            become a message, for instance because the provider ran a tool (see `content_blocks.messages_of`).
    """
    if _get(body, "automatic_function_calling_history"):
        raise Unusable("its response has automaticFunctionCallingHistory, so its request lacks the calls of functions")
    found: list[Row | LeftOut | None] = []
    for each in body.get("candidates") or ():
        said, reason = _message({"parts": (each.get("content") or {}).get("parts")}), _get(each, "finish_reason")
        found.append(answer_of(said, _REASONS.get(str(reason), reason)))
    return found or [LeftOut.FAILED]


_REASONS = {
    **dict.fromkeys(("LANGUAGE", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII"), "length"),
    **dict.fromkeys(("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS"), FAILED),
}


def _get(value: Mapping[str, Any], name: str) -> Any:
    """Return a field by its name in the Python client, such as `finish_reason`, or in the REST API (`finishReason`)."""
    found = value.get(name)
    return value.get(re.sub(r"_(\w)", lambda match: match[1].upper(), name)) if found is None else found


def _message(content: Any) -> Record:
    """Convert a `Content` of Gemini's API to a message with blocks.

    Instead of a `Content`, the client also accepts text, a part, or a list of parts.
    """
    if not (isinstance(content, Mapping) and "parts" in content):
        content = {"parts": content if isinstance(content, list) else [content]}
    role = content.get("role") or "user"
    return {"role": {"model": "assistant", "function": "user"}.get(role, role),
            "content": [_block(part) for part in content["parts"] or ()]}  # fmt: skip


def _block(part: Any) -> Record:
    """Return a part as a block of Anthropic's API. An unknown part becomes a block with its name as the type."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = {name: value for name, value in part.items() if value is not None and "ignature" not in name}
    if (called := _get(fields, "function_call")) is not None:
        return {"type": "tool_use", "id": called.get("id"), "name": called["name"], "input": called.get("args") or {}}
    if (result := _get(fields, "function_response")) is not None:
        content = json.dumps(result.get("response"), ensure_ascii=False)
        return {"type": "tool_result", "tool_use_id": result.get("id"), "content": content}
    if fields.pop("thought", None):
        return {"type": "thinking", "thinking": fields.get("text")}
    others = [name for name in fields if name != "text"]
    return {"type": others[0]} if others else {"type": "text", "text": fields.get("text") or ""}


def functions(tool: Any) -> list[Record]:
    """Return the functions of a tool.

    Raises:
        Unusable: the tool is not a list of functions, for instance because the provider runs it.
    """
    names = {name for name, value in tool.items() if value is not None} if isinstance(tool, Mapping) else {str(tool)}
    if others := names - {"functionDeclarations", "function_declarations"}:
        raise Unusable(f"its request has the tool {', '.join(sorted(others))}, which is no list of functions")
    given = ({**each, "parameters": each.get("parameters") or _get(each, "parameters_json_schema")}
             for each in _get(tool, "function_declarations") or ())  # fmt: skip
    return [{name: each[name] for name in ("name", "description", "parameters") if each.get(name)} for each in given]


DIALECT = Dialect("contents", lambda body: isinstance(body.get("candidates"), list), prompt, answers)
FORMAT = format_of_calls(
    DIALECT,
    source="Gemini's API and its batches (python-genai, types.py)",
    loses="Gemini's thinking is a summary, or hidden. Text is tokenized again, which can give different tokens. A "
    "request without a temperature used the default of the model, which is assumed to be 1.",
)
