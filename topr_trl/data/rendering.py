"""Render messages with a chat template and locate the assistant's turns."""

from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers, supports_tool_calling
from trl.data_utils import common_prefix_length

from topr_trl.data.special_tokens import rfind_between_specials

Messages = list[dict[str, Any]]

_TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "refusal")  # keys for text of the model


class Turn(NamedTuple):
    """Turn of the assistant in a rendered completion.

    Attributes:
        message (`dict`): Message of the turn.
        start (`int`): Index of its first token in the completion.
        end (`int`): Index after its last token, including tokens that the template writes after the stop token.
        text (`str`): Text that the template added for the message.
        said (`int`): Index in the text after the last part of the message.
    """

    message: dict[str, Any]
    start: int
    end: int
    text: str
    said: int


class Rendered(NamedTuple):
    """Token ids of a prompt and of a completion, and the assistant's turns in the completion."""

    prompt_ids: list[int]
    ids: list[int]
    turns: list[Turn]


class CannotWrite(ValueError):
    """Error for a chat template that changes or omits text that the model read or wrote."""


def render_turns(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    """Render messages with the first template that keeps the whole text of the model.

    The function tries the tokenizer's own template, then the template with which TRL trains such a model. If a template
    writes earlier turns differently once later turns follow, its `{% generation %}` blocks are used.

    Raises:
        CannotWrite: every template omits or changes text of the model.
    """
    templates, _ = _templates(tokenizer, str(tokenizer.chat_template))
    ways = [(_by_prefixes, template) for template in templates]
    if has_generation_markers(templates[-1]):
        ways.append((_by_markers, templates[-1]))
    for way, template in ways[:-1]:
        try:
            return way(prompt, completion, tokenizer, {**options, "chat_template": template})
        except CannotWrite:
            pass
    way, template = ways[-1]
    return way(prompt, completion, tokenizer, {**options, "chat_template": template})


def writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of the tokenizer writes calls and results of tools."""
    return _templates(tokenizer, str(tokenizer.chat_template))[1]


@lru_cache(maxsize=8)
def _templates(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> tuple[tuple[str, ...], bool]:
    """Return the templates to try, and whether the tokenizer's own template writes tools.

    The templates are the tokenizer's own and TRL's for training, if there is one. `chat_template` is a cache key,
    because the template of a tokenizer can be replaced.
    """
    own = tokenizer.chat_template
    own = own["default"] if isinstance(own, dict) else own
    try:
        trls = get_training_chat_template(tokenizer) or own
    except ValueError:  # TRL has no template for this model.
        trls = own
    return tuple(dict.fromkeys((own, trls))), supports_tool_calling(tokenizer)


def _by_prefixes(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    def render(messages: Messages, before_a_turn: bool) -> str:
        return _render(tokenizer, messages, tokenize=False, add_generation_prompt=before_a_turn, **options)

    def added(text: str, known: str) -> str:
        if not text.startswith(known):
            raise CannotWrite(
                "its chat template writes earlier turns differently once later ones follow (it removes their thinking, "
                "for example), so the model read other tokens than the last rendering has. Set chat_template_path to a "
                "template that keeps them, or make each turn a row of its own, with what the model read as its prompt"
            )
        return text[len(known) :]

    text = render(prompt, completion[0]["role"] == "assistant")
    rendered = Rendered(token_ids(text, tokenizer), [], [])
    for n, message in enumerate(completion):
        if message["role"] == "assistant":
            before = render([*prompt, *completion[:n]], True) if n else text
            after = render([*prompt, *completion[: n + 1]], False)
            context, own = added(before, text), added(after, before)
            rendered.ids.extend(token_ids(context, tokenizer))
            start = len(rendered.ids)
            rendered.ids.extend(token_ids(own, tokenizer))
            said = _end_of_message(message, context if n else text, own, tokenizer)
            rendered.turns.append(Turn(message, start, len(rendered.ids), own, said))
            text = after
    return rendered


def _by_markers(
    prompt: Messages, completion: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Rendered:
    messages, places = [*prompt, *completion], [n for n, m in enumerate(completion) if m["role"] == "assistant"]
    text = _render(tokenizer, messages, tokenize=False, **options)
    whole = _render(
        tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True}, **options,
    )  # fmt: skip
    known = _render(
        tokenizer, prompt, return_dict=False, add_generation_prompt=completion[0]["role"] == "assistant", **options
    )
    ids, spans = whole["input_ids"], whole["offset_mapping"]
    first = common_prefix_length(ids, known)
    runs = _runs(whole["assistant_masks"], first)
    if len(runs) != len(places):
        raise CannotWrite(
            f"the generation blocks of its chat template mark {len(runs)} turns, and the assistant has {len(places)}. "
            "Set chat_template_path to another template, or give completion_ids and completion_mask"
        )
    turns, behind = list[Turn](), 0
    for n, (start, end) in zip(places, runs, strict=True):
        context = text[behind : _behind(spans, start)]
        before = _render(tokenizer, [*prompt, *completion[:n]], tokenize=False, add_generation_prompt=True, **options)
        # A block can include the generation prompt, which the model did not write.
        opening = before.rpartition(context)[2] if context and context in before else ""
        start += common_prefix_length(ids[start:end], token_ids(opening, tokenizer))
        own, behind = text[_behind(spans, start) : _behind(spans, end)], _behind(spans, end)
        said = _end_of_message(completion[n], context, own, tokenizer)
        turns.append(Turn(completion[n], start - first, end - first, own, said))
    return Rendered(ids[:first], ids[first:], turns)


def _runs(mask: list[int], first: int) -> list[tuple[int, int]]:
    """Return start and end of each run of ones, from index `first` on."""
    found, start = list[tuple[int, int]](), first
    for is_own, run in groupby(mask[first:]):
        end = start + len(list(run))
        if is_own:
            found.append((start, end))
        start = end
    return found


def _behind(spans: list[tuple[int, int]], count: int) -> int:
    """Return the index in a text after its first tokens. White space before the next token belongs to that token."""
    return spans[count - 1][1] if count else 0


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (
        TemplateError,
        TypeError,
    ) as error:  # TypeError: from joining text and arguments
        raise CannotWrite(
            f"its chat template cannot write these messages: {error}. Set chat_template_path to a template that can, "
            "or give completion_ids"
        ) from None


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text, without tokens that the tokenizer would add at its start or end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _end_of_message(message: dict[str, Any], context: str, text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the index in the text of a turn after the last part of its message.

    With a tool call this index is unknown, so the function returns the end of the text.

    Raises:
        CannotWrite: the text lacks a part of the message, or has thinking that the model did not write.
    """
    count = _count_said(message, _squeezed(context), _squeezed(text), tokenizer)
    if message.get("tool_calls"):
        return len(text)
    visible = [place for place, character in enumerate(text) if not character.isspace()]
    said = visible[count - 1] + 1 if count else 0
    content = message["content"]
    trailing = content[len(content.rstrip()) :]
    return said + len(trailing) if text.startswith(trailing, said) else said


def _count_said(message: dict[str, Any], context: str, text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of a turn's text up to the end of the last part of its message.

    White space is removed from both texts, because templates trim. A part can start in the context, since some
    generation prompts end with `<think>`. A part must not end within a special token, such as the `e` in `<|end|>`.
    """
    read, rest = len(context), context + text
    end = read
    for name, part in _parts(message):
        squeezed = _squeezed(part)
        place = rfind_between_specials(squeezed, rest, max(0, read - len(squeezed) + 1), tokenizer)
        if place < 0:
            raise CannotWrite(
                f"its chat template leaves out {name} of an assistant's turn ({part.strip()[:40]!r}), which the model "
                "wrote. Set chat_template_path to a template that writes it (or chat_template_kwargs, if the template "
                "has an option for it), or give completion_ids"
            )
        if squeezed.startswith("<think>") and "</think>" in rest[read:place]:
            raise CannotWrite(
                "its chat template writes a block of thinking in front of the thinking in an assistant's content. Give "
                "the thinking as reasoning_content alone, set chat_template_path to another template, or give "
                "completion_ids"
            )
        end = max(end, place + len(squeezed))
        # Two equal calls need two matches.
        rest = rest[:place] + "\0" * len(squeezed) + rest[place + len(squeezed) :]
    return end - read


def _parts(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of each part of a message that is not blank. The names of called tools are last."""
    content = _squeezed(message["content"])
    texts = {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
    # A message can have its reasoning twice: under two keys, or also in the content.
    names = {text: f"the {name}" for name, text in texts.items() if name == "content" or _squeezed(text) not in content}
    calls = [*(call.get("function", call) for call in message.get("tool_calls", [])), message.get("function_call")]
    called = [str(call.get("name") or "") for call in calls if isinstance(call, dict)]
    parts = [*((name, text) for text, name in names.items()), *((f"the call of {name}", name) for name in called)]
    return [(name, text) for name, text in parts if text.strip()]


def _squeezed(text: str) -> str:
    return "".join(text.split())
