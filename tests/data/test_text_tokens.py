import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from topr_trl.data.messages import tokenize_turns
from topr_trl.data.rendered_parts import find_between_specials
from topr_trl.data.text_tokens import continued_ids, special_tokens
from topr_trl.data.tokenization import tokenize_row


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
    assert find_between_specials(part, text, tokenizer, last=True) == place


def test_a_part_is_found_from_the_start_on(tokenizer):
    assert find_between_specials("e", "e.e", tokenizer, 1) == 2
    assert find_between_specials("e", "e..", tokenizer, 1) == -1


# Tokenizers that add tokens where a text starts or ends.
SPACED = [f"▁{c}" for c in "0123456789=+"]
PIECES = ["<unk>", "<s>", "</s>", "▁", "\n", "\n\n", *map(chr, range(33, 127)), *SPACED]
SPACES = {
    "prepend": (Sequence([Prepend("▁"), Replace(" ", "▁")]), None),
    "always": (None, Metaspace(prepend_scheme="always", split=True)),
    "first": (None, Metaspace(prepend_scheme="first", split=False)),
    "never": (None, Metaspace(prepend_scheme="never")),
}


def spaced_tokenizer(space, post="<s> $A"):
    """Return a tokenizer like those of Llama 2, Mistral 7B and Phi-3, which puts a space before a text."""
    merges = [*((piece[0], piece[1]) for piece in SPACED), ("\n", "\n")]
    core = Tokenizer(models.BPE({piece: n for n, piece in enumerate(PIECES)}, merges, unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = SPACES[space]
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = TemplateProcessing(single=post, special_tokens=[("<s>", 1), ("</s>", 2)])
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|bot|>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<unk>")


@pytest.mark.parametrize("post", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("prompt", "completion", "written"),
    [
        ("3 + 4 =", " 7", ["▁7"]),
        ("3 + 4 =", "7", ["7"]),
        ("3 + 4 = ", "7", ["7"]),
        ("3 + 4 =\n", "7", ["7"]),
        ("3 + 4 =\n", "\n7", ["\n", "7"]),
        ("<s>3 + 4 =", " 7</s>", ["▁7"]),
    ],
)
def test_nothing_is_added_between_prompt_and_completion(space, post, prompt, completion, written):
    tokenizer = spaced_tokenizer(space, post)
    found = tokenize_row({"prompt": prompt, "completion": completion}, tokenizer)
    assert tokenizer.convert_ids_to_tokens(found.completion_ids) == [*written, "</s>"]
    tokens = tokenizer.convert_ids_to_tokens(found.prompt_ids)
    assert tokens.count("<s>") == (post.startswith("<s>") or prompt.startswith("<s>"))
    assert "</s>" not in tokens
    both = tokenizer.decode([*found.prompt_ids, *found.completion_ids], skip_special_tokens=True)
    assert both == f"{prompt}{completion}".replace("<s>", "").replace("</s>", "")
    for given in ({"prompt_ids": found.prompt_ids, "prompt": "?"}, {"prompt": found.prompt_ids}):
        assert tokenize_row({**given, "completion": completion}, tokenizer) == found


@pytest.mark.parametrize("space", SPACES)
def test_turns_are_tokenized_as_the_whole_conversation(space):
    tokenizer = spaced_tokenizer(space)
    turns = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7 = 7"}] * 2
    for template in (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        "{% for m in messages %}{{ 'USER ' if m.role == 'user' else '<|bot|>' }}{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}",
    ):
        tokenizer.chat_template = template
        prompt, ids, _ = tokenize_turns(turns[:1], turns[1:], tokenizer)
        whole = tokenizer.apply_chat_template(turns, return_dict=False)
        assert prompt + ids == whole[: len(prompt + ids)]
        _, cut, _ = tokenize_turns(turns[:1], turns[1:2], tokenizer, truncated=True)
        assert cut == ids[: len(cut)]
        assert tokenizer.decode(cut).strip() == "7 = 7"


def test_words_that_merge_with_the_text_before_them():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "=": 1, "7": 2, "8": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"merges the start .* completion_ids"):
        continued_ids("7 8", "=", tokenizer)
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    for before in ("=", "= ", "?", "a longer text ="):
        assert continued_ids("7 8", before, tokenizer) == [2, 3]
