"""Tokenize text without unwanted tokens that the tokenizer adds, and find special tokens and stop tokens.

Many tokenizers add tokens where a text starts or ends: a BOS token, a stop token, or a space before the first word
(SentencePiece). A completion continues its prompt, so nothing may be added between them.
"""

from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from topr_trl.data.chat_templates import ANSWER, CannotWrite, remembered, render, templates_of

# Neutral texts, after which a completion is tokenized if its start would merge with the end of its prompt.
_NEUTRAL = ("\n", "x", ".", "=")
_CONTEXT = 64  # number of characters before a text that can change how its start is tokenized

# Placeholder messages. The code finds the token that a template writes after them.
_USER: dict[str, Any] = {"role": "user", "content": ANSWER}
_CALL = {"id": "call00001", "type": "function", "function": {"name": ANSWER, "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {**_USER, "role": "tool", "name": ANSWER, "tool_call_id": "call00001"}


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text, without the special tokens that the tokenizer adds at its start or end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def continued_ids(text: str, before: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text that continues the text `before`, without a space that the tokenizer adds.

    Both texts are tokenized together, as in SFT. The tokenizer can merge the end of `before` with the start of `text`,
    but the sampler read `before` alone. In this case, a neutral text takes the place of `before`.

    Args:
        text (`str`): Text to tokenize.
        before (`str`): Text that comes before `text`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.

    Raises:
        ValueError: the tokenizer merges the start of `text` with `before` and with each neutral text.
    """
    before = before[-_CONTEXT:]
    for known in (before, *_NEUTRAL, f"{before} "):  # Some tokenizers need a space between words.
        alone, joint = token_ids(known, tokenizer), token_ids(known + text, tokenizer)
        found = joint[len(alone) :]
        # A tokenizer can merge adjacent unknown characters, so the start of `text` could be lost.
        is_lost = alone[-1:] == [tokenizer.unk_token_id] and (not known.endswith(" ") or not found)
        if alone and not is_lost and joint[: len(alone)] == alone:
            return found
    raise ValueError(
        f"the tokenizer merges the start of {text[:40]!r} with the text before it, so the tokens of the model are not "
        "known. Give prompt_ids and completion_ids"
    )


def completion_ids(
    text: str, before: str, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], in_chat: bool, is_cut: bool
) -> list[int]:
    """Return the token ids of a text completion, with the stop token unless the completion was cut.

    The stop token is that of the chat template if the prompt is a chat, else EOS.

    Args:
        text (`str`): Text of the completion. It can already end with the stop token.
        before (`str`): Text of the prompt, or its end.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        options (`dict`): Arguments of the chat template.
        in_chat (`bool`): Whether the prompt is messages. A text with the template's generation prompt is also a chat.
        is_cut (`bool`): Whether the completion was cut at a token limit.

    Raises:
        ValueError: the tokenizer has no stop token, or merges the start of `text` with `before`.
    """
    ids = continued_ids(text, before, tokenizer)
    if is_cut or stops_of(tokenizer, options).intersection(ids[-1:]):
        return ids
    opening, stop = turn_of_template(tokenizer, options, False)
    return [*ids, stop_token(tokenizer, stop if in_chat or (opening and opening in before) else None)]


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text prompt, with at most one BOS token at its start, and no added stop token."""
    found = tokenizer(prompt, return_special_tokens_mask=True)
    ids, is_added = found["input_ids"], found["special_tokens_mask"]
    end = max((n for n, added in enumerate(is_added, 1) if not added), default=0)
    ids = ids[:end]
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def stop_token(tokenizer: PreTrainedTokenizerBase, of_template: int | None) -> int:
    """Return the stop token of a chat template, or EOS if it is None.

    Raises:
        ValueError: both are None.
    """
    if of_template is not None:
        return of_template
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the completion needs a stop token, and the tokenizer has none. Set tokenizer.eos_token, or give "
            "completion_ids"
        )
    return int(tokenizer.eos_token_id)


def stops_of(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> set[int]:
    """Return EOS, and the tokens that end an answer and a tool call in the chat template."""
    of_template = {turn_of_template(tokenizer, options, is_call)[1] for is_call in (False, True)}
    return {stop for stop in (tokenizer.eos_token_id, *of_template) if stop is not None}


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> list[int]:
    """Return the EOS token ids of the tokenizer and of the generation config, and the stop tokens of the chat template.

    Each of them ends a completion. Training learns to end a turn with the template's stop token, so sampling must stop
    there.
    """
    own = generation_config.eos_token_id
    return sorted({*stops_of(tokenizer, {}), *([own] if isinstance(own, int) else own or [])})


@remembered
def turn_of_template(
    tokenizer: PreTrainedTokenizerBase, given: dict[str, Any], is_call: bool
) -> tuple[str, int | None]:
    """Return the text before a turn in the tokenizer's own chat template, and the token that ends the turn.

    The text is empty, or the token None, if it is unknown. The token is the last special token that stays if a message
    follows, such as `<end_of_turn>`: Phi's templates write EOS after it at the end of a conversation. If none stays, it
    is the turn's own special token (`<|return|>` of GPT-OSS), or else the marker of the next role, at which samplers of
    GLM stop.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        given (`dict`): Arguments of the chat template.
        is_call (`bool`): Whether the turn ends with a tool call.
    """
    if not tokenizer.chat_template:
        return "", None
    turns = [_USER, _CALLED if is_call else {**_USER, "role": "assistant"}]
    given = {**given, "chat_template": templates_of(tokenizer, given)[0][0]}
    try:
        opening = render(tokenizer, [_USER], add_generation_prompt=True, **given).partition(ANSWER)[2].strip()
        both = [render(tokenizer, each, **given) for each in (turns, [*turns, _RESULT if is_call else _USER])]
    except CannotWrite:  # The template refuses the placeholders.
        return "", None
    last, followed = (token_ids("".join(text.split(ANSWER)[2:3]), tokenizer) for text in both)
    count, specials = common_prefix_length(last, followed), special_tokens(tokenizer)
    shared, own = ([token for token in ids if token in specials] for ids in (last[:count], last))
    marker = specials.intersection(followed[count : count + 1])
    return opening, next(iter([*shared[-1:], *own, *marker]), None)


@remembered
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens, such as the stop token, the BOS token and `<end_of_turn>`."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset({*added, *tokenizer.all_special_ids, tokenizer.eos_token_id} - {None})
