"""Render messages with a chat template and locate the assistant's turns."""

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import has_generation_markers
from trl.data_utils import common_prefix_length

from topr_trl.data.chat_templates import (
    CannotWrite,
    Messages,
    Tags,
    added,
    change_turns,
    check_tools,
    is_learned,
    learned_turns,
    open_thinking,
    render,
    templates_of,
    text_after,
    thinking_of,
    thinking_tags,
    with_thinking_in_content,
    without_repeated_thinking,
)
from topr_trl.data.masks import runs_of
from topr_trl.data.rendered_parts import check_context, empty_block, end_of_turn
from topr_trl.data.text_tokens import continued_ids, token_ids


class Turn(NamedTuple):
    """Assistant turn in a rendered completion.

    Attributes:
        message (`dict`): Message of the turn.
        start (`int`): Index of the first token of the turn in the completion.
        end (`int`): Index after the last token of the turn. A turn can include tokens that the template adds after the
            stop token, such as a newline.
        before (`str`): Text before the turn.
        text (`str`): Text that the template added for the message.
        said (`int`): Index in `text` at which the thinking and the content of the message end. If the message has tool
            calls, `said` is the length of `text`.
    """

    message: dict[str, Any]
    start: int
    end: int
    before: str
    text: str
    said: int


class Rendered(NamedTuple):
    """Token ids of a prompt and of a completion, and the assistant's turns in the completion."""

    prompt_ids: list[int]
    ids: list[int]
    turns: list[Turn]


def render_turns(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    truncated: bool = False,
) -> Rendered:
    """Render messages with the first template that keeps all of their text.

    The function tries the tokenizer's own template, then TRL's training template for the model, if there is one. These
    attempts fail if, for example, a template changes earlier turns once later turns follow. The function then uses the
    `{% generation %}` blocks of the last template, if that template has blocks. If every attempt fails, and the
    generation prompt opens thinking, the function moves the thinking of each learned turn into its content and repeats
    the attempts.

    Args:
        prompt (`list[dict]`): Messages of the prompt.
        completion (`list[dict]`): Messages of the completion.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        options (`dict`): Arguments of the chat template, including `tools`.
        truncated (`bool`, *optional*, defaults to `False`): Whether the last turn was cut at a token limit.

    Raises:
        CannotWrite: every template refuses the messages, omits or changes a part of them, adds thinking, or marks a
            wrong number of turns; or it is unknown whether a truncated turn is thinking.
        ValueError: the tokenizer merges the start of a turn with the text before it.
    """
    last = max(learned_turns(completion), default=0)
    tags, opened = open_thinking([*prompt, *completion[:last]], tokenizer, options)
    completion = change_turns(completion, partial(without_repeated_thinking, tags=tags))
    if opened and truncated:
        _refuse_unknown_thinking(completion[last], tags)
    if opened:
        completion = change_turns(
            completion, lambda message: {**message, "content": tags.with_opening(message["content"], opened)}
        )
    try:
        return _render_first_way(prompt, completion, tokenizer, options)
    except CannotWrite:
        is_cut = completion[last] if truncated else None
        spelled = change_turns(completion, lambda message: with_thinking_in_content(message, message is is_cut))
        if spelled == completion or not opened:
            raise
        with suppress(CannotWrite):
            return _render_first_way(prompt, spelled, tokenizer, options)
        raise


def _render_first_way(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    """Return the first rendering that succeeds, or raise the CannotWrite of the last attempt."""
    templates, _ = templates_of(tokenizer, options)
    ways = [(_by_prefixes, template) for template in templates]
    if has_generation_markers(templates[-1]):
        ways.append((_by_markers, templates[-1]))
    for way, template in ways:
        chosen = {**options, "chat_template": template}
        try:
            check_tools(tokenizer, chosen)
            return way(prompt, completion, tokenizer, chosen)
        except CannotWrite as error:
            refusal = error
    raise refusal


def _refuse_unknown_thinking(message: dict[str, Any], tags: Tags) -> None:
    """Raise a CannotWrite if it is unknown whether a truncated turn after an opening tag is thinking or an answer."""
    content = message["content"]
    is_known = thinking_of(message) or tags.are_in(content) or message.get("tool_calls")
    if is_learned(message) and content.strip() and not is_known:
        raise CannotWrite(
            f"its last turn was cut off (finish_reason is length) and has no {tags.closing}, and its prompt opens "
            "thinking, so it is unknown whether its content is thinking or the answer. Give thinking as "
            "reasoning_content. If the model answered without thinking, set chat_template_kwargs to "
            '{"enable_thinking": false}. Or give completion_ids'
        )


def render_prompt(prompt: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> str:
    """Render a prompt of messages as text, up to the start of the completion.

    The text ends with the generation prompt. If the last message is from the assistant, the completion continues this
    message, so the text ends with the message, without a stop token.

    Raises:
        CannotWrite: the template omits or refuses a message or a tool.
        ValueError: the role of the last message is not user, tool or assistant.
    """
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"the last message of its prompt has the role {role}; it must be user, tool or assistant")
    is_open = role == "assistant"
    text = render(tokenizer, prompt, add_generation_prompt=not is_open, continue_final_message=is_open, **options)
    check_tools(tokenizer, options)
    check_context(prompt, text, tokenizer)
    return str(text)


def _by_prefixes(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    """Render the messages up to each turn. The turn is the text that the template adds for its message."""
    tags = thinking_tags(tokenizer, options)
    turns = learned_turns(completion)
    text = str(render(tokenizer, prompt, add_generation_prompt=turns[:1] == [0], **options))
    check_context(prompt, text, tokenizer)
    rendered, read = Rendered([], [], []), 0
    if turns[:1] != [0]:
        rendered.prompt_ids.extend(token_ids(text, tokenizer))
    for n in turns:
        message, known = completion[n], text
        messages = [*prompt, *completion[:n]]
        before = str(render(tokenizer, messages, add_generation_prompt=True, **options)) if n else text
        after = text_after(messages, message, before, tags if n == turns[-1] else None, tokenizer, options)
        if rendered.turns and not before.startswith(known):
            known = _drop_end(rendered, tokenizer)
        context, own = added(before, known), added(after, before)
        check_context(completion[read:n], context, tokenizer)
        block = empty_block(own, before, message, tags, tokenizer)
        before, context, own = before + block, context + block, own[len(block) :]
        said = end_of_turn(message, context if n else before, own, tokenizer, tags)
        if n:
            rendered.ids.extend(continued_ids(context, known, tokenizer))
        else:
            rendered.prompt_ids.extend(token_ids(before, tokenizer))
        start = len(rendered.ids)
        rendered.ids.extend(continued_ids(own, before, tokenizer))
        rendered.turns.append(Turn(message, start, len(rendered.ids), before, own, said))
        text, read = after, n + 1
    return rendered


def _drop_end(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> str:
    """Drop what the template wrote after the content of the last turn, and return the text before it.

    The template ends a turn in another way if a message follows. The rendering of that message has this end.
    """
    turn = rendered.turns[-1]
    own = turn.text[: turn.said]
    rendered.ids[turn.start :] = continued_ids(own, turn.before, tokenizer)
    rendered.turns[-1] = turn._replace(end=len(rendered.ids), text=own)
    return turn.before + own


def _by_markers(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    """Render all messages at once. The template's `{% generation %}` blocks mark the turns."""
    messages, places = [*prompt, *completion], [n for n, m in enumerate(completion) if m["role"] == "assistant"]
    text = render(tokenizer, messages, **options)
    whole = render(
        tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True}, **options,
    )  # fmt: skip
    known = render(
        tokenizer, prompt, tokenize=True, return_dict=False, add_generation_prompt=is_learned(completion[0]), **options
    )
    ids, spans = whole["input_ids"], whole["offset_mapping"]
    first = common_prefix_length(ids, known)
    runs = _runs(whole["assistant_masks"], first, len(places))
    tags, turns = thinking_tags(tokenizer, options), list[Turn]()
    # `previous_end` is the index in the text at which the previous turn ends. `read` is the number of messages up to
    # and including the previous turn.
    previous_end, read = 0, 0
    for n, (start, end) in zip(places, runs, strict=True):
        if not is_learned(completion[n]):
            continue
        context = text[previous_end : _text_end(spans, start)]
        before = render(tokenizer, [*prompt, *completion[:n]], add_generation_prompt=True, **options)
        # A `{% generation %}` block can include the generation prompt, which the model did not write.
        opening = before.rpartition(context)[2] if context and context in before else ""
        start += common_prefix_length(ids[start:end], continued_ids(opening, context, tokenizer))
        place = len(prompt) + n
        asked_later = any(message["role"] == "user" for message in messages[place + 1 :])
        text_start, text_end = _text_end(spans, start), _text_end(spans, end)
        check_context(messages[read:place], text[previous_end:text_start], tokenizer, asked_later)
        block = empty_block(text[text_start:text_end], text[:text_start], completion[n], tags, tokenizer)
        text_start += len(block)
        start = next((token for token in range(start, end) if spans[token][1] > text_start), end)
        context, own, previous_end, read = text[previous_end:text_start], text[text_start:text_end], text_end, place + 1
        said = end_of_turn(completion[n], context, own, tokenizer, tags)
        turns.append(Turn(completion[n], start, end, text[:text_start], own, said))
    if is_learned(completion[0]):
        first = turns[0].start  # An empty block of thinking before the first turn belongs to the prompt.
    turns = [turn._replace(start=turn.start - first, end=turn.end - first) for turn in turns]
    return Rendered(ids[:first], ids[first:], turns)


def _runs(mask: list[int], first: int, count: int) -> list[tuple[int, int]]:
    """Return the start and end of each run of ones in a mask, from index `first` on.

    Raises:
        CannotWrite: the number of runs is not `count`.
    """
    found = [(first + start, first + end) for start, end in runs_of(mask[first:])]
    if len(found) != count:
        raise CannotWrite(
            f"the generation blocks of its chat template mark {len(found)} turns, and the assistant has {count}. "
            "Set chat_template_path to a different template, or give completion_ids and completion_mask"
        )
    return found


def _text_end(spans: list[tuple[int, int]], count: int) -> int:
    """Return the index at which the first `count` tokens of a text end. Later whitespace belongs to the next token."""
    return spans[count - 1][1] if count else 0
