import pytest

from topr_trl.data.text_tokens import rfind_between_specials, special_tokens


def test_special_tokens_include_added_ones(tokenizer):
    tokenizer.add_tokens(["<word>"])
    tokenizer.add_tokens(["<end_of_turn>"], special_tokens=True)
    found = special_tokens(tokenizer)
    assert tokenizer.eos_token_id in found
    assert tokenizer.convert_tokens_to_ids("<end_of_turn>") in found
    assert tokenizer.convert_tokens_to_ids("<word>") not in found


@pytest.mark.parametrize(
    ("part", "text", "place"),
    [
        ("e", "e<|end|>", 0),
        ("e", "e.e<|end|>", 2),
        ("<", "<<|end|>", 0),
        ("<|end", "<|end<|end|>", 0),
        ("<|end|>", "4.<|end|>", 2),
        ("4.<|end|>", "4.<|end|><|end|>", 0),
        ("end", "4.<|end|>", -1),
        (".<|", "4.<|end|>", -1),
        ("end", "<|end|>", -1),
    ],
)
def test_a_part_is_not_found_within_a_special_token(tokenizer, part, text, place):
    assert rfind_between_specials(part, text, 0, tokenizer) == place


def test_a_part_is_found_from_the_start_on(tokenizer):
    assert rfind_between_specials("e", "e.e", 1, tokenizer) == 2
    assert rfind_between_specials("e", "e..", 1, tokenizer) == -1
