"""Tokenize text without unwanted tokens that the tokenizer adds, and find the special tokens of a tokenizer.

Many tokenizers add tokens where a text starts or ends: a BOS token, a stop token, or a space before the first word
(SentencePiece). A completion continues its prompt, so nothing may be added between them.
"""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

# Neutral texts, after which a completion is tokenized if its start would merge with the end of its prompt.
_NEUTRAL = ("\n", "x", ".", "=")
_CONTEXT = 64  # number of characters before a text that can change how its start is tokenized


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


def completion_ids(text: str, before: str, tokenizer: PreTrainedTokenizerBase, is_cut: bool) -> list[int]:
    """Return the token ids of a text completion, with the stop token unless the completion was cut."""
    ids = continued_ids(text, before, tokenizer)
    if is_cut or ids[-1:] == [stop := stop_token(tokenizer)]:  # The text can already end with the stop token.
        return ids
    return [*ids, stop]


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text prompt, with at most one BOS token at its start, and no added stop token."""
    found = tokenizer(prompt, return_special_tokens_mask=True)
    ids, is_added = found["input_ids"], found["special_tokens_mask"]
    end = max((n for n, added in enumerate(is_added, 1) if not added), default=0)
    return without_second_bos(ids[:end], tokenizer)


def without_second_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a prompt, without its first token if it starts with two BOS tokens."""
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


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


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens, such as the stop token, the BOS token and `<end_of_turn>`."""
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    # `size` is only a part of the cache key, because tokens can be added to a tokenizer.
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset({*added, *tokenizer.all_special_ids, tokenizer.eos_token_id} - {None})
