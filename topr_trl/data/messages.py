"""Rows as messages: their tokens, and which of them the model wrote."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from topr_trl.data.rendering import Messages, Turn, render_turns, token_ids, writes_tools
from topr_trl.data.special_tokens import special_tokens


def tokenize_turns(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Any = None,
    truncated: bool = False,
    **kwargs: Any,
) -> tuple[list[int], list[int], list[bool]]:
    """Return token ids of a prompt and of a completion of one or more turns, and a mask of what the model wrote.

    An assistant's turn is the text that it adds to the rendered messages before it, generation prompt included, up to
    the stop token: what a sampler would write. The rest is context. `topr_trl.data.rendering` says which template is
    used.

    Args:
        truncated: the last turn ended at a limit of tokens: the model wrote no stop token, and may not have closed its
            thinking.
        kwargs: for the chat template.

    Raises:
        ValueError: the assistant has no turn, or only an empty one that was truncated; or the template cannot write
            these messages, leaves out a part of them, writes no stop token behind a turn, or writes earlier turns
            differently and has no `{% generation %}` blocks.
    """
    prompt, completion, tools = plain_messages(prompt), plain_messages(completion), plain_tools(tools)
    uses_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in (*prompt, *completion))
    if uses_tools and not writes_tools(tokenizer):
        raise ValueError(
            "it calls tools, and the tokenizer's chat template does not write calls and results of tools. Set "
            "chat_template_path to one that does, or give completion_ids and completion_mask"
        )
    prompt_ids, ids, turns = render_turns(prompt, completion, tokenizer, {"tools": tools, **kwargs})
    if not turns:
        raise ValueError("there is nothing to learn from its completion: no turn is the assistant's")
    written = [False] * len(ids)
    for turn in turns[:-1]:
        length = _length_with_stop(turn, ids, tokenizer)
        if not length:
            raise ValueError(
                "its chat template writes no stop token behind an assistant's turn that other messages follow. Set "
                "chat_template_path to a template that writes one, or give completion_ids and completion_mask"
            )
        written[turn.start : turn.start + length] = [True] * length
    start, own = turns[-1].start, _last_turn(turns[-1], ids, tokenizer, truncated)
    ids, written = ids[:start] + own, written[:start] + [True] * len(own)
    if not any(written):
        raise ValueError(
            "there is nothing to learn from its completion: the assistant wrote nothing before it was cut off "
            "(finish_reason is length)"
        )
    last = len(written) - written[::-1].index(True)
    return prompt_ids, ids[:last], written[:last]  # what follows the last turn has no effect


def _last_turn(turn: Turn, ids: list[int], tokenizer: PreTrainedTokenizerBase, truncated: bool) -> list[int]:
    """Return the ids that the model wrote in its last turn, with a stop token unless the turn was truncated."""
    length = _length_with_stop(turn, ids, tokenizer)
    if length and not truncated:
        return ids[turn.start : turn.start + length]
    if length and turn.message.get("tool_calls"):  # where the text of a call ends is not known
        return ids[turn.start : turn.start + length - 1]
    if truncated:
        return token_ids(turn.text[: turn.said], tokenizer)
    end = max(turn.said, len(turn.text.rstrip()))
    return [*token_ids(turn.text[:end], tokenizer), stop_token(tokenizer)]


def stop_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's stop token.

    Raises:
        ValueError: the tokenizer has no stop token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the completion needs a stop token, and the tokenizer has none. Set tokenizer.eos_token, or give "
            "completion_ids"
        )
    return int(tokenizer.eos_token_id)


def _length_with_stop(turn: Turn, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens from a turn's first to the stop token that ended it; 0 if there is none.

    A template may write more behind that token: white space, a second stop token behind a text that has its own, or, as
    Phi-3's, the end of the conversation. Some special tokens in front of it are no stop tokens, as the end of a call.
    If the template writes none at all, the sampler stops at the marker of the next role, so that marker counts as the
    stop token.
    """
    own, stops = ids[turn.start : turn.end], special_tokens(tokenizer)
    tail = len(own)
    while tail and (own[tail - 1] in stops or not tokenizer.decode(own[tail - 1]).strip()):
        tail -= 1
    places = [place for place in range(tail, len(own)) if own[place] in stops]
    if not places:
        return len(own) + 1 if stops.intersection(ids[turn.end : turn.end + 1]) else 0
    ends_with_text = bool(turn.message["content"].strip()) and not turn.message.get("tool_calls")
    for place in places[:-1]:
        is_alone = ends_with_text and place + 1 not in places
        if own[place] == tokenizer.eos_token_id or own[place + 1] == own[place] or is_alone:
            return place + 1
    return places[-1] + 1


def plain_messages(messages: Messages) -> Messages:
    """Messages as a chat template expects them: without the nulls that a table adds, arguments of calls as objects.

    Rows of a table have the same keys, so that a message without `tool_calls` has a null there, and each call has the
    arguments of all tools. A log that keeps arguments as JSON, as OpenAI's do, has no such nulls.

    Raises:
        ValueError: a message has no role, its content is not text, its calls are malformed, or their arguments are not
            valid JSON.
    """
    found: Messages = [{"content": "", **_without_nulls(message)} for message in messages]  # OpenAI's may be null
    for message in found:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"a message has no role; it has {', '.join(sorted(message))}")
        message["content"] = plain_content(message["content"])
        for function in _functions(message.get("tool_calls", [])):
            if isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = _parsed_arguments(function.get("name"), arguments)
    return found


def _functions(calls: Any) -> list[dict[str, Any]]:
    """Return the functions called by a message, each with its name and arguments."""
    found = [call.get("function", {}) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if not isinstance(calls, list) or len(found) < len(calls) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"its tool_calls are {str(calls)[:60]}, and must be a list of objects with a function")
    return found


def _parsed_arguments(name: Any, arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")  # of a call without arguments
    except json.JSONDecodeError:
        raise ValueError(
            f"the arguments of its call of {name} are not valid JSON ({arguments[:60]!r}), and what the model wrote "
            "instead is not known. Give completion_ids, write the call as content, or drop the row"
        ) from None


def plain_content(content: Any) -> Any:
    """Content of a message as text, which may come in parts; None as it is.

    Raises:
        ValueError: it is of another kind, or a part is no text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"the content of a message is {str(content)[:60]}, and must be text or a list of parts")
    if others := sorted({str(part.get("type")) for part in content} - {"text", "input_text", "output_text"}):
        raise ValueError(f"a message has {', '.join(others)}: only text can be trained on offline")
    return "".join(str(part.get("text") or "") for part in content)


def plain_tools(tools: Any) -> Any:
    """Tools as a chat template expects them; rows may have them as JSON.

    Raises:
        ValueError: they are text that is not JSON, or no list.
    """
    try:
        found = json.loads(tools or "null") if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"its tools are not valid JSON ({error}): {tools[:60]!r}") from None
    if not isinstance(found, list | None):
        raise ValueError(f"its tools are {str(found)[:60]}, and must be a list")
    return _without_nulls(found) or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
