"""Find the special tokens of a tokenizer, and search text without splitting special tokens."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens: the stop token, and others such as `<end_of_turn>` or the BOS token."""
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    # `size` is only a part of the cache key, because tokens can be added to a tokenizer.
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset({*added, *tokenizer.all_special_ids, tokenizer.eos_token_id} - {None})


def rfind_between_specials(part: str, text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the last index, from `start` on, at which `part` occurs without splitting a special token.

    Return -1 if there is no such index. For instance, the part `<|end|>` is found in the text `4.<|end|>`, but the part
    `end` is not.
    """
    specials = _special_texts(tokenizer, len(tokenizer))
    place = text.rfind(part, start)
    while place >= 0 and (_splits(specials, text, place) or _splits(specials, text, place + len(part))):
        place = text.rfind(part, start, place + len(part) - 1)
    return place


def find_between_specials(part: str, text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the first index, from `start` on, at which `part` occurs without splitting a special token.

    Return -1 if there is no such index.
    """
    specials = _special_texts(tokenizer, len(tokenizer))
    place = text.find(part, start)
    while place >= 0 and (_splits(specials, text, place) or _splits(specials, text, place + len(part))):
        place = text.find(part, place + 1)
    return place


@lru_cache(maxsize=8)
def _special_texts(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[str, ...]:
    """Return the texts of special tokens, except single characters, which cannot be split."""
    tokens = tokenizer.convert_ids_to_tokens(sorted(special_tokens(tokenizer)))
    return tuple(token for token in tokens if len(token) > 1)


def _splits(specials: tuple[str, ...], text: str, place: int) -> bool:
    """Whether cutting a text at an index would split a special token."""
    first, longest = _extent(specials)
    return any(
        text[start] in first
        and text.startswith(specials, start)
        and any(start + len(special) > place and text.startswith(special, start) for special in specials)
        for start in range(max(0, place - longest + 1), min(place, len(text)))
    )


@lru_cache(maxsize=8)
def _extent(specials: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return the first characters of special tokens, and the length of the longest one."""
    return frozenset(special[0] for special in specials), max(map(len, specials), default=0)
