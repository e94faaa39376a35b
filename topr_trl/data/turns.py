"""Rows as messages: their tokens, and which of them the model wrote."""

import json
from functools import lru_cache
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers, supports_tool_calling
from trl.data_utils import common_prefix_length

Messages = list[dict[str, Any]]


def tokenize_turns(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Any = None,
    truncated: bool = False,
    **kwargs: Any,
) -> tuple[list[int], list[int], list[bool]]:
    """Token ids of a prompt and of a completion of one or more turns, and whether the model wrote each of the latter.

    A turn of the assistant is what it adds to the rendered messages before it, generation prompt included, up to the
    stop token: what a sampler would write. The rest is context. They are rendered by the tokenizer's own template. If
    that writes earlier turns differently once later ones follow, by the one that TRL trains such a model with, which
    keeps them. If that does so, too, its `{% generation %}` blocks say what is the model's.

    Args:
        truncated: the last turn ended at a limit of tokens: no stop token follows it.
        kwargs: for the chat template.

    Raises:
        ValueError: the assistant has no turn; or the template cannot write these messages, leaves out calls of tools,
            or writes earlier turns differently and has no such blocks.
    """
    prompt, completion, tools = plain_messages(prompt), plain_messages(completion), plain_tools(tools)
    templates, writes_tools = _templates(tokenizer, str(tokenizer.chat_template))
    if not writes_tools and any(m["role"] == "tool" or m.get("tool_calls") for m in (*prompt, *completion)):
        raise ValueError(
            "it calls tools, and the tokenizer's chat template does not write calls and results of tools. Set "
            "chat_template_path to one that does, or give completion_ids and completion_mask"
        )
    try:
        prompt_ids, ids, written = _rendered(prompt, completion, tokenizer, templates, {"tools": tools, **kwargs})
    except TemplateError as error:
        raise ValueError(f"its chat template cannot write these messages: {error}") from None
    written = _up_to_the_stop(ids, written, tokenizer)
    if not any(written):
        is_there = any(message["role"] == "assistant" for message in completion)
        why = "the chat template leaves the assistant's turns out" if is_there else "no turn is the assistant's"
        raise ValueError(f"there is nothing to learn from its completion: {why}")
    last = len(written) - written[::-1].index(True)
    if truncated and ids[last - 1] in special_tokens(tokenizer):
        last -= 1
    return prompt_ids, ids[:last], written[:last]  # what follows the last turn has no effect


def _rendered(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    templates: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[list[int], list[int], list[bool]]:
    """By the first of the templates that keeps earlier turns as they were, or else by the blocks of the last."""
    for template in templates:
        options = {**options, "chat_template": template}
        try:
            return _by_prefixes(prompt, completion, tokenizer, options)
        except _NotNested:
            if template == templates[-1] and not has_generation_markers(template):
                raise
    return _by_markers(prompt, completion, tokenizer, options)


@lru_cache(maxsize=8)
def _templates(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> tuple[tuple[str, ...], bool]:
    """The tokenizer's own template and TRL's for training, if there is one; and whether the former writes tools.

    `chat_template` is what the tokenizer has: it may get another.
    """
    own = tokenizer.chat_template
    own = own["default"] if isinstance(own, dict) else own
    try:
        trls = get_training_chat_template(tokenizer) or own
    except ValueError:  # TRL has none for it
        trls = own
    return tuple(dict.fromkeys((own, trls))), supports_tool_calling(tokenizer)


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
    """What the calls of a message call, each with its name and arguments."""
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


class _NotNested(ValueError):
    """Rendered messages do not begin with what the messages before were rendered to."""


def _by_markers(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> tuple[list[int], list[int], list[bool]]:
    render = tokenizer.apply_chat_template
    whole = render([*prompt, *completion], return_dict=True, return_assistant_tokens_mask=True, **options)
    before = render(prompt, add_generation_prompt=completion[0]["role"] == "assistant", return_dict=False, **options)
    ids, written = whole["input_ids"], [bool(value) for value in whole["assistant_masks"]]
    start = common_prefix_length(ids, before)
    return ids[:start], ids[start:], written[start:]


def _by_prefixes(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> tuple[list[int], list[int], list[bool]]:
    def render(messages: Messages, before_a_turn: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=before_a_turn, **options
        )
        return text

    def added(text: str, known: str) -> list[int]:
        if not text.startswith(known):
            raise _NotNested(
                "its chat template writes earlier turns differently once later ones follow (it removes their thinking, "
                "for example), so the model read other tokens than the last rendering has. Set chat_template_path to a "
                "template that keeps them, or make each turn a row of its own, with what the model read as its prompt"
            )
        ids: list[int] = tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
        return ids

    text = render(prompt, completion[0]["role"] == "assistant")
    prompt_ids, ids = added(text, ""), list[int]()
    written: list[bool] = []
    for n, message in enumerate(completion):
        if message["role"] == "assistant":
            before = render([*prompt, *completion[:n]], True) if n else text
            after = render([*prompt, *completion[: n + 1]], False)
            context, own = added(before, text), added(after, before)
            ids += context + own
            written += [False] * len(context) + [True] * len(own)
            text = after
    return prompt_ids, ids, written


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that may end a turn: the tokenizer's stop token, and others such as Gemma's `<end_of_turn>`."""
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset({*added, *tokenizer.all_special_ids, tokenizer.eos_token_id} - {None})


def _up_to_the_stop(ids: list[int], written: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Without the white space that templates write behind the stop token: a sampler never wrote it."""
    found, start = list[bool](), 0
    stops = special_tokens(tokenizer)
    for own, turn in groupby(written):
        end = own_end = start + len(list(turn))
        if own and (places := [place for place in range(start, end) if ids[place] in stops]):
            behind = places[-1] + 1
            own_end = end if tokenizer.decode(ids[behind:end]).strip() else behind
        found += [own] * (own_end - start) + [False] * (end - own_end)
        start = end
    return found
