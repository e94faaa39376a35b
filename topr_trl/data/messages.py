"""Tokenize rows of messages, and mark the tokens that the model wrote."""

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from topr_trl.data.chat_templates import Messages, templates_of
from topr_trl.data.rendering import Turn, render_turns
from topr_trl.data.text_tokens import continued_ids, special_tokens, stop_token, turn_of_template


def tokenize_turns(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    /,
    tools: Any = None,
    truncated: bool = False,
    **kwargs: Any,
) -> tuple[list[int], list[int], list[bool]]:
    """Return the token ids of a prompt, the token ids of a completion with one or more turns, and the completion mask.

    An assistant turn starts after the generation prompt and ends with its stop token, as a sampler would write it. All
    other text is context, and so are assistant turns with `"weight": 0`. Context after the last learned turn is left
    out. `topr_trl.data.rendering` selects the template.

    Args:
        prompt (`list[dict]`): Messages of the prompt.
        completion (`list[dict]`): Messages of the completion.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        tools (`list` or `str`, *optional*): Tools for the chat template. Text is read as JSON.
        truncated (`bool`, *optional*, defaults to `False`): Whether the last turn was cut at a token limit. A truncated
            turn has no stop token, and its thinking may lack `</think>`.
        **kwargs (`Any`): Other arguments of the chat template.

    Raises:
        ValueError: the messages or tools are malformed; the completion has no assistant turn to learn from, or only an
            empty truncated turn; it is unknown whether a truncated turn is thinking; the tokenizer has no stop token,
            or merges the start of a turn with the text before it; or the template cannot write the messages, omits a
            part of a message or a tool, adds thinking, writes no stop token between two learned turns, or changes
            earlier turns and has no `{% generation %}` blocks that mark all turns.
    """
    prompt, completion, tools = plain_messages(prompt), plain_messages(completion), plain_tools(tools)
    uses_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in (*prompt, *completion))
    options = {"tools": tools, **kwargs}
    if uses_tools and not templates_of(tokenizer, options)[1]:
        raise ValueError(
            "it calls tools, and the tokenizer's chat template does not write tool calls and tool results. Set "
            "chat_template_path to one that does, or give completion_ids and completion_mask"
        )
    prompt_ids, ids, turns = render_turns(prompt, completion, tokenizer, options, truncated)
    if not turns:
        raise ValueError(
            "there is nothing to learn from its completion: it has no assistant turn, or all its turns have weight 0"
        )
    written = [False] * len(ids)
    calls = [bool(turn.message.get("tool_calls")) for turn in turns]
    stops = {is_call: turn_of_template(tokenizer, options, is_call)[1] for is_call in {*calls}}
    for turn, is_call in zip(turns[:-1], calls, strict=False):
        length = _length_with_stop(turn, ids, tokenizer, stops[is_call])
        if not length:
            raise ValueError(
                "its chat template writes no stop token after an assistant turn that other messages follow. Set "
                "chat_template_path to a template that writes one, or give completion_ids and completion_mask"
            )
        written[turn.start : turn.start + length] = [True] * length
    start, own = turns[-1].start, _last_turn(turns[-1], ids, tokenizer, stops[calls[-1]], truncated)
    ids, written = ids[:start] + own, written[:start] + [True] * len(own)
    if not any(written):
        raise ValueError(
            "there is nothing to learn from its completion: the assistant wrote nothing before it was cut off "
            "(finish_reason is length)"
        )
    last = len(written) - written[::-1].index(True)
    return prompt_ids, ids[:last], written[:last]  # Drop context at the end, which does not affect the loss.


def _last_turn(
    turn: Turn, ids: list[int], tokenizer: PreTrainedTokenizerBase, stop: int | None, truncated: bool
) -> list[int]:
    """Return the token ids of the last turn, with a stop token unless the turn was truncated."""
    length = _length_with_stop(turn, ids, tokenizer, stop)
    if length and not truncated:
        return ids[turn.start : turn.start + length]
    if length and turn.message.get("tool_calls"):  # It is unknown where a call was cut: remove only the stop token.
        return ids[turn.start : turn.start + length - 1]
    if truncated:
        return continued_ids(turn.text[: turn.said], turn.before, tokenizer)
    # The template wrote no stop token, so add one. Drop whitespace that the template added at the end.
    end = max(turn.said, len(turn.text.rstrip()))
    return [*continued_ids(turn.text[:end], turn.before, tokenizer), stop_token(tokenizer, stop)]


def _length_with_stop(turn: Turn, ids: list[int], tokenizer: PreTrainedTokenizerBase, stop: int | None) -> int:
    """Return the number of tokens of a turn, including its stop token, or 0 if the turn has no stop token.

    A template can write other special tokens before the stop token, for instance at the end of a call. It can write
    more tokens after the stop token: whitespace, or the end of the conversation (Phi). If a template writes no stop
    token, the sampler stops at the marker of the next role. That marker then counts as the stop token.
    """
    own, specials = ids[turn.start : turn.end], special_tokens(tokenizer)
    tail = len(own)
    while tail and (own[tail - 1] in specials or not tokenizer.decode(own[tail - 1]).strip()):
        tail -= 1
    places = [place for place in range(tail, len(own)) if own[place] in specials]
    if not places:
        return len(own) + 1 if specials.intersection(ids[turn.end : turn.end + 1]) else 0
    return next((place for place in places if own[place] in (stop, tokenizer.eos_token_id)), places[-1]) + 1


def plain_messages(messages: Messages) -> Messages:
    """Return messages as a chat template expects them: text as content, arguments of calls as objects, no null values.

    All messages in a table have the same keys. Therefore, the table stores null for missing `tool_calls`, and each call
    has null for the arguments of other tools. Arguments that are JSON text, as in OpenAI's logs, keep their nulls.

    Raises:
        ValueError: a message has no role, its content is neither text nor a list of text parts, its weight is neither
            0 nor 1, its calls are malformed, or their arguments are not valid JSON.
    """
    # In OpenAI's format, the content can be null, which stands for empty text.
    found: Messages = [{"content": "", **without_nulls(message)} for message in messages]
    for message in found:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"a message has no role; it has {', '.join(sorted(message))}")
        message["content"] = plain_content(message["content"])
        check_weight(message)
        for function in _functions(message.get("tool_calls", [])):
            if isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = _parsed_arguments(function.get("name"), arguments)
    return found


def check_weight(message: Mapping[str, Any]) -> None:
    """Raise a ValueError if a message has a weight, as in OpenAI's format, other than 0 (context) and 1 (learned)."""
    if message.get("weight") not in (None, 0, 1):
        raise ValueError(f"a message has the weight {message['weight']!r}: it must be 1 (learned) or 0 (context)")


def _functions(calls: Any) -> list[dict[str, Any]]:
    """Return the functions of a message's tool calls, as dictionaries with name and arguments."""
    are_dicts = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    found = [call.get("function", call) for call in calls] if are_dicts else []
    if not are_dicts or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"its tool_calls are {str(calls)[:60]}, and must be a list of objects with a function")
    return found


def _parsed_arguments(name: Any, arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")  # A call without arguments has empty text.
    except (ValueError, RecursionError):
        raise ValueError(
            f"the arguments of its call of {name} are not valid JSON ({arguments[:60]!r}), and what the model wrote "
            "instead is not known. Give completion_ids, write the call as content, or drop the row"
        ) from None


def plain_content(content: Any) -> Any:
    """Return the content of a message as text. The parts of a list are joined, and None is returned unchanged.

    Raises:
        ValueError: the content is neither text nor a list of parts, a part is not text (for instance, an image), or the
            text of a part is not in its field `text`.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"the content of a message is {str(content)[:60]}, and must be text or a list of parts")
    if others := sorted({str(part.get("type")) for part in content} - {"text", "input_text", "output_text"}):
        raise ValueError(f"a message has {', '.join(others)}: offline training supports only text")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: dict[str, Any]) -> str:
    text = part.get("text")
    others = sorted(name for name, value in part.items() if name not in ("type", "text") and value is not None)
    if isinstance(text, str) or (text is None and not others):
        return text or ""
    found = f"it has {', '.join(others)}" if text is None else f"its text is {str(text)[:60]}"
    raise ValueError(f"a part of a message has the type {part['type']} and no text: {found}. Put its text under text")


def plain_tools(tools: Any) -> Any:
    """Return tools as a list, or None if there are none. The tools of a row can be JSON text, which keeps its nulls.

    Raises:
        ValueError: the tools are invalid JSON, or not a list.
    """
    try:
        found = json.loads(tools or "null") if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its tools are not valid JSON ({error}): {tools[:60]!r}") from None
    if not isinstance(found, list | None):
        raise ValueError(f"its tools are {str(found)[:60]}, and must be a list")
    return (found if isinstance(tools, str) else without_nulls(found)) or None


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects whose value is null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
