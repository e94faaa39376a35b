"""Special tokens of a tokenizer, any of which may end a turn."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that may end a turn: the tokenizer's stop token, and others such as Gemma's `<end_of_turn>`."""
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset({*added, *tokenizer.all_special_ids, tokenizer.eos_token_id} - {None})


def rfind_between_specials(part: str, text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the last place of a part from `start` on that splits no special token of the text; -1 if there is none.

    `end` is no part of `4.<|end|>`, and `<|end|>` is.
    """
    specials = _special_texts(tokenizer, len(tokenizer))
    place = text.rfind(part, start)
    while place >= 0 and (_splits(specials, text, place) or _splits(specials, text, place + len(part))):
        place = text.rfind(part, start, place + len(part) - 1)
    return place


@lru_cache(maxsize=8)
def _special_texts(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[str, ...]:
    """Return the texts of special tokens that have a place within them."""
    tokens = tokenizer.convert_ids_to_tokens(sorted(special_tokens(tokenizer)))
    return tuple(token for token in tokens if len(token) > 1)


def _splits(specials: tuple[str, ...], text: str, place: int) -> bool:
    """Whether a place in a text is within a special token."""
    return any(
        text.find(special, max(0, place - len(special) + 1), place + len(special) - 1) >= 0 for special in specials
    )
