"""Find a model's thinking in messages, and in the text that a chat template writes.

A server without a reasoning parser logs the raw completion as the content of a message. This content has the thinking
and its closing tag. The opening tag can be in the generation prompt.
"""

import re
from typing import Any, NamedTuple

KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that can hold thinking
# Placeholders, which find the tags that a template writes around them.
THINKING, ANSWER = "[thinking-placeholder]", "[answer-placeholder]"


class Tags(NamedTuple):
    """Tags that a chat template writes before and after thinking."""

    opening: str
    closing: str

    def opened_by(self, before: str) -> str:
        """Return the opening tag at the end of a text, with the white space after it, or empty text."""
        end = len(before.rstrip())
        return before[end - len(self.opening) :] if before[:end].endswith(self.opening) else ""

    def are_in(self, content: str) -> bool:
        """Whether a content has thinking: it starts with the opening tag, or has the closing tag."""
        return content.lstrip().startswith(self.opening) or self.closing in content

    def raw_text(self, content: str, before: str) -> str | None:
        """Return the text that the model wrote after `before`, if the content is the raw completion, or None.

        The content is raw if it starts with the opening tag, or if `before` opens thinking and the content closes it.
        """
        opened, starts = self.opened_by(before), content.lstrip().startswith(self.opening)
        if not starts:
            return content if opened and self.closing in content else None
        # If both texts have the opening tag, drop the second one, and the white space after it.
        return content.lstrip()[len(self.opening) :].removeprefix(opened[len(self.opening) :]) if opened else content

    def with_opening(self, content: str, opened: str) -> str:
        """Put the opening tag of a generation prompt before a content that only closes thinking.

        Return any other content unchanged.
        """
        is_closed = self.closing in content and not content.lstrip().startswith(self.opening)
        return f"{opened}{content}" if is_closed else content

    def empty_block(self, text: str, before: str, content: str) -> str:
        """Return the block without thinking at the start of a turn's text, or empty text if there is none."""
        opening = "" if self.opened_by(before) else re.escape(self.opening)
        if not (block := re.match(rf"\s*{opening}\s*{re.escape(self.closing)}\s*", text)):
            return ""
        space = content[: len(content) - len(content.lstrip())]  # This space is the model's.
        return block.group().removesuffix(space)


DEFAULT = Tags("<think>", "</think>")


def tags_in(rendered: str, plain: str, generation_prompt: str) -> Tags | None:
    """Return the tags of thinking of a chat template, or None if it writes none.

    Args:
        rendered (`str`): Conversation that ends with an assistant's turn of the two placeholders.
        plain (`str`): The same conversation without the placeholder of thinking.
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


def thinking_of(message: dict[str, Any]) -> str:
    """Return the thinking that a message has in a field of its own, or empty text."""
    return next((message[name] for name in KEYS if isinstance(message.get(name), str) and message[name].strip()), "")


def without_repeated_thinking(message: dict[str, Any], tags: Tags) -> dict[str, Any]:
    """Return a message without the fields of its thinking, if its content has the same thinking between tags."""
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
