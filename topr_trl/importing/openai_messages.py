"""Convert messages, tools and finish reasons in OpenAI's format to columns of a row."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from topr_trl.data.chat_templates import KEYS, is_learned
from topr_trl.data.messages import check_weight, plain_content
from topr_trl.importing.field_names import words_of
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.record_files import parsed
from topr_trl.importing.row_table import Row


def message(given: Mapping[str, Any]) -> Row:
    """Convert a chat message to a message of the type `MESSAGES` in `row_table`.

    Arguments of tool calls become JSON text, and content in several parts becomes one text. A refusal becomes the
    content of a message without content. The field `reasoning`, `thinking` or `thinking_blocks` (LiteLLM) becomes
    `reasoning_content`. The older role `function` becomes `tool`, and the older field `function_call` becomes a tool
    call. A mark for context, such as `is_demo`, becomes weight 0.

    Args:
        given (`Mapping[str, Any]`): Message in OpenAI's format, or with `from` and `value` as in ShareGPT's format.

    Raises:
        NotOfFormat: the message has no role.
        Unusable: the message has an image, its content is neither text nor a list of text parts, its weight is neither
            0 nor 1, its text may be in a field other than `content`, a tool call was not parsed, or LiteLLM cut a text.
    """
    if "role" not in given and "from" in given:
        given = {**given, "role": given["from"], "content": given.get("value", given.get("content"))}
    given = with_role(given)
    if "role" not in given:
        raise NotOfFormat(f"a message has no role; it has {', '.join(sorted(given))}")
    given = _with_more(_of_blocks(given))
    check_content(given)
    check_only_text(given, "a message")
    try:
        content = plain_content(given.get("content"))
        check_weight(given)
    except ValueError as error:
        raise Unusable(str(error)) from None
    if given.get("invalid_tool_calls"):
        raise Unusable("it has a tool call that could not be parsed")
    calls = [_call(_parsed(call)) for call in _parsed(given.get("tool_calls")) or ()]
    if given.get("function_call"):  # OpenAI's API had this field before tools.
        calls.append(_call(given["function_call"]))
    hidden = (each.get("thinking") for each in given.get("thinking_blocks") or () if isinstance(each, Mapping))
    reasoning = [*map(given.get, KEYS), "\n".join(filter(None, hidden))]
    _check_not_cut(content, *reasoning, *(call["function"]["arguments"] for call in calls))
    return {
        "role": ROLE_NAMES.get(str(given["role"]).lower(), given["role"]),
        "content": content or given.get("refusal") or content, "tool_calls": calls or None, "name": given.get("name"),
        "reasoning_content": next(filter(None, reasoning), None), "tool_call_id": given.get("tool_call_id"),
        **({"weight": 0} if _is_marked(given) else {}),
    }  # fmt: skip


def _check_not_cut(*texts: Any) -> None:
    """Check that LiteLLM did not replace the middle or the end of a text in its logs.

    Raises:
        Unusable: a text has LiteLLM's mark.
    """
    if any(isinstance(text, str) and "litellm" in text and _CUT.search(text) for text in texts):
        raise Unusable(
            "LiteLLM cut a text in its log. To log whole texts, set the environment variable "
            "MAX_STRING_LENGTH_PROMPT_IN_DB of LiteLLM's server"
        )


_CUT = re.compile(r"\(litellm_truncated (skipped )?\d+ chars|\.\.\.truncated by litellm, this logger does not support")


def with_role(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its role, which LangChain has in `type`, perhaps with the other fields inside `data`.

    Args:
        given (`Mapping[str, Any]`): Message. Other values and other messages are returned unchanged.
    """
    if not isinstance(given, Mapping) or "role" in given or given.get("type") not in _TYPES:
        return given
    inner = data if isinstance(data := given.get("data"), Mapping) else given
    return {**inner, "role": given["type"]} if "content" in inner else given


def _of_blocks(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the text, the thinking and the calls that LlamaIndex has in `blocks`."""
    blocks = given.get("blocks")
    has_types = isinstance(blocks, list) and all(isinstance(each, Mapping) and "block_type" in each for each in blocks)
    if not blocks or not has_types or given.get("content"):
        return given
    calls = [{"id": each.get("tool_call_id"), "name": each["tool_name"], "arguments": each["tool_kwargs"]}
             for each in blocks if each["block_type"] == "tool_call"]  # fmt: skip
    thoughts = [each.get("content") or "" for each in blocks if each["block_type"] == "thinking"]
    parts = [{"type": each["block_type"], "text": each.get("text")}
             for each in blocks if each["block_type"] not in ("tool_call", "thinking")]  # fmt: skip
    return {"thinking": "\n".join(thoughts), "tool_calls": calls, **given, "content": parts or None}


def _with_more(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the calls, the refusal and the thinking that LangChain has in `additional_kwargs`.

    LlamaIndex also has the id of a tool's result there.
    """
    more = given.get("additional_kwargs")
    if not isinstance(more, Mapping):
        return given
    own = {name: value for name, value in given.items() if value or name not in _BESIDE_CONTENT}
    beside = {name: more[name] for name in (*_BESIDE_CONTENT, "tool_call_id") if more.get(name)}
    # Leave out thinking that is not text. OpenAI's Responses API has an object with ids and a summary.
    found = {**{name: value for name, value in beside.items() if name not in KEYS or isinstance(value, str)}, **own}
    if found.get("tool_calls"):  # LangChain repeats the call of `function_call` in `tool_calls`.
        found.pop("function_call", None)
    return found


_BESIDE_CONTENT = ("tool_calls", "function_call", "refusal", *KEYS)
_LIKE_CONTENT = ("text", "message", "value", "parts", "output", "body", "blocks")


def check_content(given: Mapping[str, Any]) -> None:
    """Check that the text of a message is not in a field other than `content`, or inside JSON as Mastra stores it.

    Args:
        given (`Mapping[str, Any]`): Message.

    Raises:
        Unusable: the message has a field such as `parts`, and neither content nor calls, or its content is such JSON.
    """
    content = given.get("content")
    if isinstance(content, str) and '"format"' in content and '"parts"' in content:
        stored = parsed(content.encode(errors="surrogatepass"))
        fields = stored if isinstance(stored, Mapping) else {}
        if isinstance(fields.get("parts"), list) and isinstance(fields.get("format"), int):
            raise Unusable("the content of a message is JSON with parts. Write its text under content")
    others = [name for name in _LIKE_CONTENT if given.get(name)]
    if others and content is None and not any(given.get(name) for name in _BESIDE_CONTENT):
        raise Unusable(f"a message has no content; it has {', '.join(others)}. Write its text under content")


def check_only_text(given: Mapping[str, Any], name: str) -> None:
    """Check that a message or a record has no fields with images, audio or video.

    Args:
        given (`Mapping[str, Any]`): Message or record.
        name (`str`): Description of `given` for the error message: `a message`, or `it` for a record.

    Raises:
        Unusable: a field such as `images` is not empty.
    """
    if others := [field for field in _NOT_TEXT if given.get(field)]:
        more = f". If this is only a name, set --ignore_fields {' '.join(others)}" if name == "it" else ""
        raise Unusable(f"{name} has {', '.join(others)}: offline training supports only text{more}")


_NOT_TEXT = ("image", "images", "img_path", "image_path", "audio", "audios", "video", "videos")

# Role of a message, by the name that a program gives the role. A name that is not in this table is kept.
ROLE_NAMES = {
    "system": "system", "developer": "developer", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "ai": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "bard": "assistant", "bing": "assistant", "observation": "tool", "tool": "tool", "tool_response": "tool",
    "function": "tool", "function_response": "tool", "usermessage": "user", "apimessage": "assistant",
}  # fmt: skip
_TYPES = ("human", "ai", "system", "tool", "function")  # of LangChain's messages


ROLES = ("system", "developer", "user", "assistant", "tool")


def check_roles(messages: Any) -> None:
    """Check the roles of messages, because some chat templates drop messages with unknown roles.

    Args:
        messages (`Any`): Messages, or text, which is always accepted.

    Raises:
        Unusable: a message has an unknown role.
    """
    for each in messages if isinstance(messages, list) else ():
        if each["role"] not in ROLES:
            raise Unusable(
                f"a message has the role {each['role']!r}; known roles are {', '.join(ROLES)}. Rename it in the file"
            )


def _is_marked(given: Mapping[str, Any]) -> bool:
    """Return whether a field marks a message as context, so that the model does not learn from this message.

    Examples are OpenAI's `weight`, the `loss` of ms-swift, the training flags of Axolotl, and SWE-agent's `is_demo`.
    """
    inner = given.get("metadata")
    flags = {**(inner if isinstance(inner, Mapping) else {}), **given}
    for name, value in flags.items():
        flag = "_".join(words_of(name))
        # Without `is`, a number can be a count or an id, as in `example: 1`.
        says_context = value is True or (value == 1 and flag.startswith("is_"))
        if flag.removeprefix("is_") in _CONTEXT_FLAGS and says_context:
            return True
        if flag.removeprefix("is_") in _LEARNED_FLAGS and isinstance(value, int | float) and value == 0:
            return True
    values = {str(given.get(name)).lower() for name in ("type", "kind", "source", "origin", "label", "message_type")}
    tags = {str(tag).lower() for tag in given["tags"]} if isinstance(given.get("tags"), list) else set()
    return given.get("name") == "example_assistant" or bool((values | tags) & _DEMONSTRATIONS)


_DEMONSTRATIONS = {"demo", "demonstration", "few_shot", "fewshot"}
_LEARNED_FLAGS = {"weight", "loss", "loss_weight", "loss_mask", "compute_loss", "train", "train_on", "train_on_turn",
                  "training", "trainable", "trained", "learn", "learned"}  # fmt: skip
_CONTEXT_FLAGS = {"demo", "demonstration", "example", "few_shot", "fewshot", "masked", "no_loss", "no_train", "ignore",
                  "ignored", "ignore_loss"}  # fmt: skip


def row_of_run(messages: list[Row], **columns: Any) -> list[Row]:
    """Return a list with one row, whose completion starts with the first assistant turn to learn from.

    Return [] if there is no assistant turn to learn from. Assistant turns with weight 0 are context. So is a greeting:
    an assistant turn that is the first message of a run with later turns to learn from.

    Args:
        messages (`list[Row]`): Messages of the run.
        **columns (`Any`): Other columns of the row.
    """
    learned = [n for n, each in enumerate(messages) if is_learned(each)]
    first = next((n for n in learned if n), learned[0] if learned else None)
    return [] if first is None else [{"prompt": messages[:first], "completion": messages[first:], **columns}]


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value


def _call(given: Mapping[str, Any]) -> Row:
    """Convert a tool call, whose name and arguments can be in the field `function` or next to the id."""
    if "toolName" in given:  # Vercel AI SDK
        given = {"id": given.get("toolCallId"), **given, "name": given["toolName"]}
    function = given.get("function") or given
    if "name" not in function:
        raise Unusable(f"it has a call of the type {given.get('type')}, which is no call of a function")
    arguments = _as_json(next((function[name] for name in _ARGUMENTS if function.get(name) is not None), None))
    return {"id": given.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


_ARGUMENTS = ("arguments", "args", "input", "parameters")


def has_broken_call(row: Row) -> bool:
    """Return whether the arguments of a tool call in a row are invalid JSON, or have an unpaired surrogate.

    A prompt or completion with token ids is not checked, because the trainer does not render its messages.
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
        tools (`Any`): List of tools, each as an object or JSON, or JSON, which is returned unchanged.

    Raises:
        Unusable: a tool is no function, the provider defines it, so the file does not have its parameters, or LiteLLM
            cut a text.
    """
    if not tools or isinstance(tools, str):
        return tools or None
    given = map(_parsed, tools)
    found = json.dumps(
        [tool if "function" in tool else {"type": "function", "function": _function(tool)} for tool in given]
    )
    _check_not_cut(found)
    return found


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with its parameters in the field `parameters`. Anthropic's API has them in `input_schema`.

    Raises:
        Unusable: the tool is no function, or the provider defines the tool, so the file does not have its parameters.
    """
    if "input_schema" in tool:
        names = ("name", "description", "input_schema")
        return {name.replace("input_schema", "parameters"): tool[name] for name in names if tool.get(name) is not None}
    if "name" not in tool or re.fullmatch(r"\w+_20\d{6}", str(tool.get("type"))):
        raise Unusable(
            f"its request has the tool {tool.get('type') or ', '.join(tool)}, which is no function with parameters"
        )
    return {name: value for name, value in tool.items() if name != "type"}


def template_columns(request: Mapping[str, Any]) -> Row:
    """Return the columns `tools` and `chat_template_kwargs` from a request.

    OpenAI's API had `functions` before `tools`. OpenAI's client adds the fields of `extra_body` to the request, where
    they replace fields of the same name. vLLM's server passes `reasoning_effort` to the chat template. This field is
    therefore added to `chat_template_kwargs`, and replaces a `reasoning_effort` there. The value `"none"` also sets
    `enable_thinking` to False, unless `chat_template_kwargs` has a value for `enable_thinking`.

    Args:
        request (`Mapping[str, Any]`): Request in OpenAI's format, or a record with the same fields.

    Raises:
        Unusable: see `tools_as_json`.
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
_CALLED = ("tool_calls", "tool_call", "tool_use", "function_call", "tool-calls")
# A completion that the model did not end itself, for instance because of a content filter, has no stop token.
_FINISHED = {
    **dict.fromkeys(
        ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_str", "completed", "complete", "word",
         *_CALLED),
        "stop",
    ),
    **dict.fromkeys(
        ("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "model_context_window_exceeded",
         "limit", "content_filter", "sensitive", "safety", "recitation", "repetition", "incomplete", "truncated",
         "refusal", "pause_turn", "content_filtered", "content-filter", "other"),
        "length",
    ),
    **dict.fromkeys(
        ("abort", "aborted", "error", "failed", "cancelled", "canceled", "timeout", "network_error",
         "insufficient_system_resource", "guardrail_intervened", "malformed_model_output", "malformed_tool_use"),
        FAILED,
    ),
    **dict.fromkeys(("", "none", "null", "unknown", "finish_reason_unspecified"), None),
}  # fmt: skip


def finish_reason_of(record: Mapping[str, Any]) -> str | None:
    """Return the finish reason in a record, as `finish_reason` does.

    A reason in an outer field hides the reasons in inner fields. Return None if the record has no reason, or different
    reasons at the same depth.

    Args:
        record (`Mapping[str, Any]`): Record, perhaps with a field such as `finish_reason`, `truncated`, or
            `response_metadata.stopReason`. Requests, messages, and fields of a judge are not searched.

    Raises:
        Unusable: see `finish_reason`.
    """
    level: list[Any] = [record]
    while level:
        fields = [(re.sub(r"[^a-z]", "", str(name).lower()), value)
                  for each in level if isinstance(each, Mapping) for name, value in each.items()]  # fmt: skip
        if found := set(filter(None, (_reason_in(key, value) for key, value in fields))):
            return found.pop() if len(found) == 1 else None
        values = [value for key, value in fields if key not in _OF_REQUEST and not key.startswith(_OF_JUDGE)]
        level = [*values, *chain.from_iterable(each for each in level if isinstance(each, list))]
    return None


def _reason_in(key: str, value: Any) -> str | None:
    """Return the finish reason in a field, or None. `key` is the letters of the field's name, in lower case."""
    inner = value.get("type", value) if isinstance(value, Mapping) else value
    if key == "finishreason" and isinstance(inner, str):
        return finish_reason(inner)
    if key in _STOP_REASONS:  # An unknown value is no error: vLLM writes the stop string or token that matched.
        return _FINISHED.get(str(inner or "").lower())
    if key in ("truncated", "istruncated", "wastruncated"):
        return "length" if str(inner).lower() in ("true", "1") else None
    # In OpenAI's Responses API, and in slime's samples. A field `completed` is not read, because it can tell whether a
    # task was solved.
    is_cut = (key == "incompletedetails" and value) or (key == "status" and str(inner).lower() == "truncated")
    return "length" if is_cut else None


_STOP_REASONS = ("stopreason", "stoptype", "donereason", "nativefinishreason")
_OF_JUDGE = ("judge", "grader", "evaluat", "critic")
# Fields of requests and of messages. They can have tool arguments with names such as `truncated`.
_OF_REQUEST = ("messages", "conversations", "prompt", "request", "content", "toolcalls", "functioncall")


def finish_reason(given: str | None, answer: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Convert a logged finish reason to `"stop"`, `"length"` or `FAILED`. Return None if there is no reason.

    Words such as `unknown` count as no reason.

    The import leaves out a completion whose reason is `FAILED`.

    Args:
        given (`str` or `None`): Reason of a server, such as `max_tokens` or `STOP`.
        answer (`Sequence[Mapping]`, defaults to `()`): Messages of the answer, to check that they have the calls.

    Raises:
        Unusable: the reason is not in `_FINISHED`, so whether the model ended the completion is not known, or the
            reason is a call, and the answer has none.
    """
    reason = str(given or "").strip().lower()
    if reason not in _FINISHED:
        known = ", ".join(name for name in _FINISHED if name)
        raise Unusable(
            f"a completion ended with {given!r}, and whether the model or something else ended it is not known. Write "
            f"stop or length in the file. Known reasons: {known}"
        )
    if answer and reason in _CALLED and not any(turn.get("tool_calls") for turn in answer):
        raise Unusable(
            f"its answer ended with {given}, and the log has no call of a tool: a part of the answer is lost"
        )
    return _FINISHED[reason]
