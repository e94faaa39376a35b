"""Apply chat templates, and find out what a template writes: tools, and tags around thinking.

A server without a reasoning parser logs the raw completion as the content of a message. This content has the thinking
and its closing tag. The opening tag can be in the generation prompt.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, supports_tool_calling

Messages = list[dict[str, Any]]
Probe = TypeVar("Probe", bound=Callable[..., Any])

KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that can hold thinking
# Placeholder texts. The code finds the tags that a template writes around them.
THINKING, ANSWER = "[thinking-placeholder]", "[answer-placeholder]"


class CannotWrite(ValueError):
    """Error for a chat template that refuses messages, or changes or omits text that the model read or wrote."""


class Tags(NamedTuple):
    """Tags that a chat template writes before and after thinking."""

    opening: str
    closing: str

    def opened_by(self, before: str) -> str:
        """Return the opening tag at the end of a text, with the whitespace after it, or empty text."""
        end = len(before.rstrip())
        return before[end - len(self.opening) :] if before[:end].endswith(self.opening) else ""

    def are_in(self, content: str) -> bool:
        """Whether the content of a message has thinking: it starts with the opening tag, or has the closing tag."""
        return content.lstrip().startswith(self.opening) or self.closing in content

    def raw_text(self, content: str, before: str) -> str | None:
        """Return the text that the model wrote after `before`, if the content is the raw completion, or None.

        The content is raw if it starts with the opening tag, or if `before` opens thinking and the content closes it.
        """
        opened, starts = self.opened_by(before), content.lstrip().startswith(self.opening)
        if not starts:
            return content if opened and self.closing in content else None
        # If `before` and the content both have the opening tag, drop the tag of the content. Also drop the whitespace
        # after this tag, if `before` ends with the same whitespace.
        return content.lstrip()[len(self.opening) :].removeprefix(opened[len(self.opening) :]) if opened else content

    def with_opening(self, content: str, opened: str) -> str:
        """Put the opening tag of a generation prompt before content that closes thinking without opening it.

        Return any other content unchanged.
        """
        is_closed = self.closing in content and not content.lstrip().startswith(self.opening)
        return f"{opened}{content}" if is_closed else content

    def empty_block(self, text: str, before: str, content: str) -> str:
        """Return the empty block of thinking at the start of a turn's text, or empty text if there is no such block."""
        opening = "" if self.opened_by(before) else re.escape(self.opening)
        if not (block := re.match(rf"\s*{opening}\s*{re.escape(self.closing)}\s*", text)):
            return ""
        space = content[: len(content) - len(content.lstrip())]  # The model wrote this whitespace.
        return block.group().removesuffix(space)


DEFAULT = Tags("<think>", "</think>")


def remembered(probe: Probe) -> Probe:
    """Keep the results of a function of a tokenizer, because many rows need the same result.

    The function can have further arguments by position, such as options of the chat template. They are compared as JSON
    text, and the function gets them as read from this text. Its result may depend on the tokens and on the template, so
    it is computed again after either has changed.
    """

    @lru_cache(maxsize=64)
    def kept(tokenizer: PreTrainedTokenizerBase, size: int, template: str, arguments: str) -> Any:
        return probe(tokenizer, *json.loads(arguments))

    @wraps(probe)
    def found(tokenizer: PreTrainedTokenizerBase, *arguments: Any) -> Any:
        return kept(tokenizer, len(tokenizer), str(tokenizer.chat_template), json.dumps(arguments, default=str))

    return cast(Probe, found)


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, /, tokenize: bool = False, **options: Any) -> Any:
    """Apply a chat template to messages. Return text, or the tokenizer's output if `tokenize` is True.

    Raises:
        CannotWrite: the template refuses the messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
    # A template that concatenates text with the arguments of a tool call, which are a dict, raises a TypeError.
    except (TemplateError, TypeError) as error:
        raise CannotWrite(
            f"its chat template cannot write these messages: {error}. Set chat_template_path to a template that can, "
            "or give completion_ids"
        ) from None


def templates_of(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the templates to try, and whether the tokenizer's own template can write tool calls and tool results.

    The templates are the tokenizer's own and TRL's training template, if TRL has one for this model. A tokenizer can
    have several named templates, of which `tool_use` is for `options` with tools.
    """
    return _templates_of(tokenizer, tokenizer.get_chat_template(tools=options.get("tools")))


@lru_cache(maxsize=8)
def _templates_of(tokenizer: PreTrainedTokenizerBase, own: str) -> tuple[tuple[str, ...], bool]:
    # `own` is a part of the cache key, because the template of a tokenizer can be replaced.
    try:
        trls = get_training_chat_template(tokenizer) or own
    except ValueError:  # TRL has no template for this model.
        trls = own
    return tuple(dict.fromkeys((own, trls))), own != tokenizer.chat_template or supports_tool_calling(tokenizer)


def check_tools(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> None:
    """Check that a template writes the definitions of the tools in its options.

    Raises:
        CannotWrite: the template leaves out the name of a tool or of a parameter.
    """
    if options.get("tools") and (missing := _missing_tools(tokenizer, options)):
        raise CannotWrite(
            f"its chat template leaves out {missing}. Set chat_template_path to a template that writes the definitions "
            "of tools, give prompt_ids and completion_ids, or drop the column tools if the model did not read them"
        )


@remembered
def _missing_tools(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> str | None:
    """Return a description of a tool or a parameter that a template leaves out, or None.

    The template renders a placeholder message, because the messages of a row could contain the same names. If the
    template refuses the placeholder, the result is None.
    """
    try:
        text = render(tokenizer, [{"role": "user", "content": "?"}], add_generation_prompt=True, **options)
    except CannotWrite:  # The template refuses the placeholder, so this check is impossible.
        return None
    return missing_of_tools(options["tools"], text)


def missing_of_tools(tools: Any, text: str) -> str | None:
    """Return a description of the first tool or parameter whose name a text lacks, or None."""
    for function in (tool.get("function", tool) for tool in tools if isinstance(tool, dict)):
        tool = str(_dict(function).get("name") or "")
        if tool not in text:
            return f"the tool {tool}"
        for name in _dict(_dict(_dict(function).get("parameters")).get("properties")):
            if name not in text:
                return f"the parameter {name} of the tool {tool}"
    return None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@remembered
def thinking_tags(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Tags | None:
    """Return the tags that a template writes around thinking, or None. `options` include the template."""
    asked = [{"role": "user", "content": "?"}]
    plain = {"role": "assistant", "content": ANSWER}
    answers = ({**plain, **dict.fromkeys(KEYS, THINKING)}, plain)
    try:
        thought, unthought = (str(render(tokenizer, [*asked, answer], **options)) for answer in answers)
        return tags_in(thought, unthought, str(render(tokenizer, asked, add_generation_prompt=True, **options)))
    except CannotWrite:  # The template refuses the placeholders, so its tags are unknown.
        return None


def open_thinking(messages: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> tuple[Tags, str]:
    """Return the thinking tags of the tokenizer's own template, and the opening tag that ends the generation prompt.

    If the template writes no tags, the tags are `DEFAULT`. The second text is empty if the generation prompt does not
    end with the opening tag, or if the template refuses the messages.
    """
    own = {**options, "chat_template": templates_of(tokenizer, options)[0][0]}
    if not (tags := thinking_tags(tokenizer, own)):
        return DEFAULT, ""
    try:
        return tags, tags.opened_by(render(tokenizer, messages, add_generation_prompt=True, **own))
    except CannotWrite:
        return tags, ""


def tags_in(rendered: str, plain: str, generation_prompt: str) -> Tags | None:
    """Return the tags of thinking of a chat template, or None if it writes none.

    Args:
        rendered (`str`): Conversation that ends with an assistant's turn of the two placeholders.
        plain (`str`): The same conversation without the placeholder for thinking.
        generation_prompt (`str`): Text before a completion. It can end with the opening tag.
    """
    before, _, after = rendered.partition(THINKING)
    closing, is_written, _ = after.partition(ANSWER)
    closing = closing.strip()
    if is_written and closing:
        openings = [before[len(generation_prompt) :].strip()] if before.startswith(generation_prompt) else []
        if "/" in closing:
            openings.append(closing.replace("/", "", 1))
        if not "".join(plain.split()).startswith("".join(f"{generation_prompt}{ANSWER}".split())):
            openings.append(generation_prompt.split()[-1])  # Only thinking can follow this generation prompt.
        for opening in filter(before.rstrip().endswith, filter(None, openings)):
            return Tags(opening, closing)
    return DEFAULT if generation_prompt.rstrip().endswith(DEFAULT.opening) else None


def is_learned(message: dict[str, Any]) -> bool:
    """Whether a message of a completion is a turn to learn from. Weight 0 marks context, as in OpenAI's format."""
    return bool(message.get("role") == "assistant" and message.get("weight", 1))


def learned_turns(completion: Messages) -> list[int]:
    """Return the positions of the turns to learn from."""
    return [n for n, message in enumerate(completion) if is_learned(message)]


def change_turns(completion: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    """Return a completion in which each learned turn is replaced by the result of `change`."""
    return [change(message) if is_learned(message) else message for message in completion]


def thinking_of(message: dict[str, Any]) -> str:
    """Return the text in the field of a message that holds its thinking, or empty text."""
    return next((message[name] for name in KEYS if isinstance(message.get(name), str) and message[name].strip()), "")


def without_repeated_thinking(message: dict[str, Any], tags: Tags) -> dict[str, Any]:
    """Return a message without its fields for thinking, if its content has the same thinking before the closing tag."""
    in_content = "".join(message["content"].rpartition(tags.closing)[0].split())
    thinking = "".join(thinking_of(message).split())
    if not thinking or in_content.removeprefix("".join(tags.opening.split())) != thinking:
        return message
    return {name: value for name, value in message.items() if name not in KEYS}


def with_thinking_in_content(message: dict[str, Any], is_cut: bool) -> dict[str, Any]:
    """Return an assistant message with its thinking in the content, between `<think>` and `</think>`.

    A message without thinking, or with `</think>` in its content, is returned unchanged.

    Args:
        message (`dict`): Assistant message.
        is_cut (`bool`): Whether the message was cut at a token limit. If it also has no content and no tool call, its
            thinking gets no `</think>`.
    """
    thinking, content = thinking_of(message), message["content"]
    if not thinking or DEFAULT.closing in content:
        return message
    others = {name: value for name, value in message.items() if name not in KEYS}
    is_open = is_cut and not content.strip() and not message.get("tool_calls")
    after = "" if is_open else f"\n{DEFAULT.closing}\n\n{content}"
    return {**others, "content": f"{DEFAULT.opening}\n{thinking}{after}"}


def added(text: str, known: str) -> str:
    """Return the text after a known beginning. Raise a CannotWrite if the text has a different beginning."""
    if not text.startswith(known):
        raise CannotWrite(
            "its chat template changes earlier turns once later turns follow (for example, it removes their "
            "thinking), so the model did not read the tokens of the last rendering. Set chat_template_path to a "
            "template that keeps earlier turns unchanged, or make each turn its own row, with the text that the "
            "model read as the prompt"
        )
    return text[len(known) :]


def text_after(
    messages: Messages,
    message: dict[str, Any],
    before: str,
    tags: Tags | None,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> str:
    """Return the text of messages and a turn that follows them.

    If the content of the turn is a raw completion, the text has this content unchanged, because some templates would
    add a second block of thinking. If `tags` is None, the template always writes the turn.
    """
    raw = tags.raw_text(message["content"], before) if tags and not thinking_of(message) else None
    if raw is not None:
        text = str(render(tokenizer, [*messages, {**message, "content": ANSWER}], **options))
        if ANSWER in text:
            raw = raw.rstrip() if message.get("tool_calls") else raw  # Before a call, the template writes whitespace.
            return f"{before}{raw}{text.rpartition(ANSWER)[2]}"
    return str(render(tokenizer, [*messages, message], **options))
