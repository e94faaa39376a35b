"""Find each part of a message in the text that a chat template rendered, to detect text that the template omits.

Templates trim text, and some escape it as JSON. Therefore, the search ignores whitespace. For text that a template may
escape, the search also tries escaped forms.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from topr_trl.data.chat_templates import DEFAULT, KEYS, CannotWrite, Messages, Tags, remembered, thinking_of
from topr_trl.data.text_tokens import special_tokens

_TEXTS = ("content", *KEYS, "refusal")  # keys of a message that can hold text
_SWITCHES = re.compile("/no_think|/think|/system_override")  # SmolLM3, Nemotron
_ANYWHERE = ("system", "developer")  # roles of messages that some templates write before or after all other messages


def end_of_turn(
    message: dict[str, Any], context: str, text: str, tokenizer: PreTrainedTokenizerBase, tags: Tags | None = None
) -> int:
    """Return the index at which the last part of a message ends in the text of its turn.

    If the message has a tool call, the index is unknown, so the function returns the end of the text.

    Args:
        message (`dict`): Assistant message.
        context (`str`): Text before the turn. A part of the message can start there.
        text (`str`): Text that the template added for the message.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        tags (`Tags`, *optional*): Tags of thinking of the template. `None` looks for `</think>`.

    Raises:
        CannotWrite: the text lacks a part of the message, or has thinking or a special token that the model did not
            write.
    """
    visible = squeezed(text)
    count = _visible_length(message, squeezed(context), visible, tokenizer)
    _check_thinking(message, visible[:count], tags or DEFAULT, tokenizer)
    if message.get("tool_calls"):
        return len(text)
    # `count` ignores whitespace. Count back from the end to find the same place in the text with whitespace.
    end, after = len(text), len(visible) - count
    while after:
        end -= 1
        after -= not text[end].isspace()
    end = len(text[:end].rstrip())
    # Whitespace at the end of the content is from the model. Include it if the template kept it.
    content = message["content"]
    trailing = content[len(content.rstrip()) :]
    return end + len(trailing) if text.startswith(trailing, end) else end


def _visible_length(message: dict[str, Any], context: str, text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of a turn's text up to the end of the last part of its message.

    `context` and `text` have no whitespace. A part can start in the context, since some generation prompts end with
    `<think>`. A part must not start or end within a special token: the part `e` is not found in `<|end|>`.

    Raises:
        CannotWrite: the text lacks a part of the message.
    """
    read, rest = len(context), context + text
    end = read
    for name, part in _parts(message):
        own = squeezed(part)
        place = find_between_specials(own, rest, tokenizer, max(0, read - len(own) + 1), last=True)
        if place < 0:
            remedy = "" if name == "the content" else ", write it into the content as the model did"
            raise CannotWrite(
                f"its chat template leaves out {name} of an assistant's turn ({part.strip()[:40]!r}), which the model "
                "wrote. Set chat_template_path to a template that writes it (or chat_template_kwargs, if the template "
                f"has an option for it){remedy}, or give completion_ids"
            )
        end = max(end, place + len(own))
        rest = _without(rest, [(place, place + len(own))])  # A later part with the same text must match elsewhere.
    for name, part in _arguments(message):
        if _find(part, text, 0, tokenizer) is None:
            raise CannotWrite(
                f"its chat template leaves out {name} ({part.strip()[:40]!r}), which the model wrote. Set "
                "chat_template_path to a template that writes it, or give completion_ids"
            )
    return end - read


def _check_thinking(message: dict[str, Any], written: str, tags: Tags, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a CannotWrite if a template adds thinking to a message, or repeats a special token of its content."""
    content, closing = squeezed(message["content"]), squeezed(tags.closing)
    before = written[: find_between_specials(content, written, tokenizer, last=True)] if content in written else ""
    if written.count(closing) > content.count(closing) + bool(thinking_of(message)):
        found = f"thinking ({tags.closing}) that the model did not write"
    elif (special := first_special(before, tokenizer)) and special in content:
        found = f"{special}, which the content has, too"
    else:
        return
    raise CannotWrite(
        f"its chat template writes {found}, before the content of an assistant's turn, which may be a raw completion. "
        "Give its thinking as reasoning_content and its answer as content, set chat_template_path to a different "
        "template, or give completion_ids"
    )


def empty_block(
    own: str, before: str, message: dict[str, Any], tags: Tags | None, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the empty block of thinking that a template wrote at the start of a turn, or empty text.

    The model did not write this block: the template adds it to turns without thinking. If thinking is off, the
    generation prompt has the same block, so the block is context.
    """
    content = message["content"]
    if not tags or thinking_of(message) or tags.are_in(content):
        return ""
    block = tags.empty_block(own, before, content)
    special = first_special(block, tokenizer)
    # If the content has the special token, too, it may be a raw completion. `end_of_turn` then raises an error.
    return "" if special and special in content else block


def check_context(
    messages: Messages, text: str, tokenizer: PreTrainedTokenizerBase, before_a_user: bool = False
) -> None:
    """Check that a text has each part of the messages that the model read.

    Many templates remove the thinking of earlier turns, so the model does not read it. Therefore, the text needs the
    thinking of a turn only if no user message follows the turn, as between tool calls.

    Args:
        messages (`list[dict]`): Messages that the model did not write for this row.
        text (`str`): Text that the template rendered for the messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        before_a_user (`bool`, *optional*, defaults to `False`): Whether a user message follows these messages.

    Raises:
        CannotWrite: the text lacks a part of a message.
    """
    text, place = squeezed(text), 0
    turn, turn_start = list[tuple[int, int]](), 0  # matches from the last assistant turn on, and the start of this turn
    last_user = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for n, message in enumerate(messages):
        role = message["role"]
        is_anywhere = role in _ANYWHERE
        if role == "assistant":
            message = _as_read(message, with_thinking=n > last_user and not before_a_user)
            turn, turn_start = [], place
        found = list[tuple[int, int]]()
        for name, part in (*_parts(message), *_arguments(message)):
            span = _find(part, text, 0 if is_anywhere else place, tokenizer)
            if span is None and role == "tool":  # Gemma's templates write tool results before the turn's text.
                span = _find(part, _without(text, turn), turn_start, tokenizer)
            if span is None and role in ("system", "user"):  # Templates read switches of thinking, and remove them.
                span = _find(_SWITCHES.sub("", part), text, 0 if is_anywhere else place, tokenizer)
            if span is None:
                raise CannotWrite(
                    f"its chat template leaves out {name} of a message with the role {role} ({part.strip()[:40]!r}), "
                    "which the model read. Set chat_template_path to a template that writes it, or give prompt_ids and "
                    "completion_ids"
                )
            found.append(span)
        if not is_anywhere:
            place = max([place, *(end for _, end in found)])
        turn += found


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text of the same length, with null characters in place of the spans."""
    for start, end in spans:
        text = text[:start] + "\0" * (end - start) + text[end:]
    return text


def _as_read(message: dict[str, Any], with_thinking: bool) -> dict[str, Any]:
    """Return an assistant turn as the model reads it later: without thinking, or with it in the field `thinking`."""
    thinking, ends, answer = message["content"].rpartition(DEFAULT.closing)
    if with_thinking:
        extra = {"thinking": thinking.strip().removeprefix(DEFAULT.opening)} if ends else {}
        return {**message, "content": answer, **extra}
    return {**{name: value for name, value in message.items() if name not in KEYS}, "content": answer}


def _parts(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name and text of each nonblank part of a message. The names of called tools come last."""
    content = squeezed(message["content"])
    texts = {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
    # A message can have its thinking twice: under two keys, or also in the content. One match is enough.
    names = {text: f"the {name}" for name, text in texts.items() if name == "content" or squeezed(text) not in content}
    called = [str(call.get("name") or "") for call in _calls(message)]
    parts = [*((name, text) for text, name in names.items()), *((f"the call of {name}", name) for name in called)]
    return [(name, text) for name, text in parts if text.strip()]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [*(call.get("function", call) for call in message.get("tool_calls", [])), message.get("function_call")]
    return [call for call in calls if isinstance(call, dict)]


def _arguments(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a description and the text of each nonblank key and string in the arguments of a message's calls.

    Numbers are skipped, because templates can rewrite them.
    """
    for call in _calls(message):
        for text in _texts_in(call.get("arguments")):
            if text.strip():
                yield f"an argument of the call of {call.get('name')}", text


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)


def _find(part: str, text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """Return the start and end of the first match of a part in a text without whitespace, from `start` on, or None.

    The text can contain the part with Python escapes or JSON escapes. JSON escapes can be applied once or twice, with
    or without escapes of non-ASCII characters.
    """
    for own in _spellings(part.strip()):
        place = find_between_specials(own, text, tokenizer, start)
        if place >= 0:
            return place, place + len(own)
    return None


def _spellings(part: str) -> Iterator[str]:
    """Yield the forms in which a template may write a part, without whitespace."""
    yield squeezed(part)
    yield squeezed(repr(part)[1:-1])
    for only_ascii in (False, True):
        once = json.dumps(part, ensure_ascii=only_ascii)
        yield squeezed(once[1:-1])
        yield squeezed(json.dumps(once, ensure_ascii=only_ascii)[3:-3])  # Drop the quotes of both encodings.


def find_between_specials(
    part: str, text: str, tokenizer: PreTrainedTokenizerBase, start: int = 0, last: bool = False
) -> int:
    """Return the first or last index, from `start` on, at which `part` occurs without splitting a special token.

    Return -1 if there is no such index. For instance, the part `<|end|>` is found in the text `4.<|end|>`, but the part
    `end` is not.
    """
    specials = _special_texts(tokenizer)
    place = text.rfind(part, start) if last else text.find(part, start)
    while place >= 0 and (_splits(specials, text, place) or _splits(specials, text, place + len(part))):
        place = text.rfind(part, start, place + len(part) - 1) if last else text.find(part, place + 1)
    return place


def first_special(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the special token that comes first in a text, or empty text if there is none."""
    found = [special for special in _special_texts(tokenizer) if special in text]
    return min(found, key=lambda special: (text.index(special), -len(special)), default="")


@remembered
def _special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of special tokens, except single characters, which cannot be split."""
    tokens = tokenizer.convert_ids_to_tokens(sorted(special_tokens(tokenizer)))
    return tuple(token for token in tokens if len(token) > 1)


def _splits(specials: tuple[str, ...], text: str, place: int) -> bool:
    """Whether cutting a text at an index would split a special token."""
    return any(text.find(each, max(0, place - len(each) + 1), max(0, place + len(each) - 1)) >= 0 for each in specials)


def squeezed(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())
