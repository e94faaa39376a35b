"""Apply chat templates, and find out what a template writes: tools, and tags around thinking."""

import json
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, supports_tool_calling

from topr_trl.data.rendered_parts import CannotWrite, Messages, missing_of_tools
from topr_trl.data.thinking import ANSWER, DEFAULT, KEYS, THINKING, Tags, tags_in


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


def writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of the tokenizer writes tool calls and tool results."""
    return templates_of(tokenizer, str(tokenizer.chat_template))[1]


@lru_cache(maxsize=8)
def templates_of(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> tuple[tuple[str, ...], bool]:
    """Return the templates to try, and whether the tokenizer's own template writes tools.

    The templates are the tokenizer's own and TRL's training template, if TRL has one for this model. `chat_template`
    is a part of the cache key, because the template of a tokenizer can be replaced.
    """
    own = tokenizer.chat_template
    own = own["default"] if isinstance(own, dict) else own
    try:
        trls = get_training_chat_template(tokenizer) or own
    except ValueError:  # TRL has no template for this model.
        trls = own
    return tuple(dict.fromkeys((own, trls))), supports_tool_calling(tokenizer)


def check_tools(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> None:
    """Check that a template writes the definitions of the tools in its options.

    Raises:
        CannotWrite: the template leaves out the name of a tool or of a parameter.
    """
    if options.get("tools") and (missing := _missing_tools(tokenizer, json.dumps(options, default=str))):
        raise CannotWrite(
            f"its chat template leaves out {missing}. Set chat_template_path to a template that writes the definitions "
            "of tools, give prompt_ids and completion_ids, or drop the column tools if the model did not read them"
        )


@lru_cache(maxsize=64)
def _missing_tools(tokenizer: PreTrainedTokenizerBase, options: str) -> str | None:
    """Return a description of a tool or a parameter that a template leaves out, or None.

    The template renders a placeholder message, because the messages of a row could contain the same names. `options`
    are JSON text, because the cache needs hashable arguments.
    """
    given = json.loads(options)
    try:
        text = render(tokenizer, [{"role": "user", "content": "?"}], add_generation_prompt=True, **given)
    except CannotWrite:  # The template refuses the placeholder, so this check is impossible.
        return None
    return missing_of_tools(given["tools"], text)


def thinking_tags(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Tags | None:
    """Return the tags that a template writes around thinking, or None. `options` include the template."""
    return _tags_of(tokenizer, json.dumps(options, default=str))


@lru_cache(maxsize=64)
def _tags_of(tokenizer: PreTrainedTokenizerBase, options: str) -> Tags | None:
    """Return the tags of thinking, or None. `options` are JSON text, because the cache needs hashable arguments."""
    asked, given = [{"role": "user", "content": "?"}], json.loads(options)
    plain = {"role": "assistant", "content": ANSWER}
    answers = ({**plain, **dict.fromkeys(KEYS, THINKING)}, plain)
    try:
        thought, unthought = (str(render(tokenizer, [*asked, answer], **given)) for answer in answers)
        return tags_in(thought, unthought, str(render(tokenizer, asked, add_generation_prompt=True, **given)))
    except CannotWrite:  # The template refuses the placeholders, so it is unknown how it writes thinking.
        return None


def open_thinking(messages: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> tuple[Tags, str]:
    """Return the tags of thinking of the own template, and the opening tag if the generation prompt ends with it."""
    own = {**options, "chat_template": templates_of(tokenizer, str(tokenizer.chat_template))[0][0]}
    if not (tags := thinking_tags(tokenizer, own)):
        return DEFAULT, ""
    try:
        return tags, tags.opened_by(render(tokenizer, messages, add_generation_prompt=True, **own))
    except CannotWrite:
        return tags, ""
