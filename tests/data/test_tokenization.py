import pyarrow as pa
import pytest
from datasets import Dataset
from tokenizers.normalizers import Strip

from tests.data.test_messages import MARKED
from topr_trl.data.tables import from_table, load_rows
from topr_trl.data.tokenization import tokenize, tokenize_row


@pytest.mark.parametrize("ids", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_ids_are_joined_as_rows_are_tokenized(tokenizer, ids):
    prompts, completions = [[1, 2], [3], [4, 5, 6], [7]], [[8], [9, 10], [11], [12, 13]]
    table = pa.table({"prompt_ids": pa.array(prompts, ids), "completion_ids": pa.array(completions, ids),
                      "prompt": ["a"] * 4, "mu_logps": [[-1.0], [-1.0, -2.0], [-1.0], [-1.0, -1.0]]})  # fmt: skip
    rows = from_table(table).select([3, 1, 2])  # `select` adds an index mapping, as after curation.
    joined = tokenize(rows, tokenizer, ["mu_logps"])
    one_by_one = [tokenize_row(row, tokenizer) for row in rows]
    assert joined["input_ids"][:] == [prompt + completion for prompt, completion, _ in one_by_one]
    assert joined["prompt_length"][:] == [len(prompt) for prompt, _, _ in one_by_one]
    assert joined["mu_logps"][:] == rows["mu_logps"][:]
    assert joined.column_names == ["mu_logps", "input_ids", "prompt_length"]


def test_log_probabilities_that_are_null_mark_context_beside_text_too(tokenizer):
    row = {"prompt": "1", "completion_ids": [5, 6, 7], "sampler_logps": [-1.0, None, -2.0]}
    assert tokenize_row(row, tokenizer).completion_mask == [True, False, True]


@pytest.mark.parametrize("wrong", [None, True, "1", 2**31])
def test_a_list_that_holds_no_ids_is_refused(tokenizer, wrong):
    for row in ({"prompt": "a", "completion": [5, wrong]}, {"prompt": [5, wrong], "completion": "a"}):
        with pytest.raises(ValueError, match=r"must be text, messages .* or token ids"):
            tokenize_row(row, tokenizer)


def test_one_turn_of_the_assistant_is_tokenized_as_a_sampler_would_have_written_it(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = {"prompt": [{"role": "user", "content": "1"}], "completion": [{"role": "assistant", "content": "2"}]}
    written = [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    assert tokenize_row(row, tokenizer)[1:] == (written, None)  # without the newline after the stop token
    assert tokenize_row({**row, "finish_reason": "length"}, tokenizer)[1:] == (written[:-1], None)
    row["completion"] *= 2
    assert tokenize_row({**row, "finish_reason": "length"}, tokenizer).completion_ids[-1] != tokenizer.eos_token_id


def test_a_completion_that_was_cut_has_no_stop_token(tokenizer):
    answer = {"role": "assistant", "content": "2"}
    text, asked = {"prompt": "1", "completion": "2"}, {"prompt": [{"role": "user", "content": "1"}]}
    rows = [text, {**asked, "completion": "2"}, {**asked, "completion": [answer]}, {"prompt": [5], "completion": "2"},
            {**asked, "completion": [answer, asked["prompt"][0], answer]}]  # fmt: skip
    for row in rows:
        assert tokenize_row(row, tokenizer).completion_ids[-1] == tokenizer.eos_token_id
        assert tokenize_row({**row, "finish_reason": "length"}, tokenizer).completion_ids[-1] != tokenizer.eos_token_id
        for reason in ("abort", "error", "content_filter", "repetition"):
            with pytest.raises(ValueError, match=f"finish_reason is '{reason}', .* stop or length"):
                tokenize_row({**row, "finish_reason": reason}, tokenizer)
    given = {"prompt_ids": [5], "prompt": "1", "completion_ids": [6, 7], "finish_reason": "length"}
    assert tokenize_row(given, tokenizer).completion_ids == [6, 7]
    for reason, is_cut in (("length", True), ("tool_calls", False), (None, False)):
        ids = tokenize_row({**asked, "completion": [{**answer, "finish_reason": reason}]}, tokenizer).completion_ids
        assert (ids[-1] != tokenizer.eos_token_id) == is_cut


def test_rows_that_lack_ids_are_tokenized(tokenizer):
    rows = Dataset.from_dict({"prompt": ["3 + 4 =", "1"], "prompt_ids": [[1, 2], None],
                              "completion": ["7", "2"], "completion_ids": [[8], []]})  # fmt: skip
    found = tokenize(rows, tokenizer)
    assert found["input_ids"][0] == [1, 2, 8]
    assert found["input_ids"][1] == [*tokenizer("1")["input_ids"], *tokenizer("2")["input_ids"], tokenizer.eos_token_id]


def test_tokens_are_found_again(tokenizer, rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    made = []
    for _ in range(2):
        found = tokenize(load_rows(tmp_path / "rows.parquet", tmp_path / "cache"), tokenizer)
        made.append([file["filename"] for file in found.cache_files])
    assert made[0] == made[1] != []


def test_a_completion_without_tokens_is_a_stop_token(tokenizer):
    tokenizer.backend_tokenizer.normalizer = Strip()  # Some SentencePiece tokenizers strip spaces.
    assert tokenize_row({"prompt": "a", "completion": " "}, tokenizer).completion_ids == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("behind", "last", "stop", "stop_of_call"),
    [
        ("<|stop|>", "<|stop|><|end|>", "<|stop|>", "<|stop|>"),
        ("", "", "<|user|>", "<|tool|>"),
        ("\\n", "<|stop|>", "<|stop|>", "<|stop|>"),
    ],
)
def test_a_text_completion_in_a_chat_ends_with_the_stop_token_of_the_template(
    tokenizer, behind, last, stop, stop_of_call
):
    """In Gemma's template, this token is not the tokenizer's EOS token. GLM's template writes none."""
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>", "<|stop|>"]})
    tokenizer.chat_template = MARKED.replace("behind", f"'{behind}'").replace("last or", f"'{last}' or")
    prompt = [{"role": "user", "content": "3 + 4 ="}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for chat in ({"prompt": prompt}, {"prompt": text}, {"prompt": f"{text}4 + 3 ="}, {"prompt": ids}):
        for completion in ("7", f"7{stop}"):
            assert tokenizer.decode(tokenize_row({**chat, "completion": completion}, tokenizer)[1]) == f"7{stop}"
        for completion in ("7<|end|>", f"7{stop_of_call}"):
            assert tokenizer.decode(tokenize_row({**chat, "completion": completion}, tokenizer)[1]) == completion
    plain = tokenize_row({"prompt": "3 + 4 =", "completion": "7"}, tokenizer)
    assert tokenizer.decode(plain.completion_ids) == "7<|end|>"


def test_a_prompt_has_one_bos_token(bos_tokenizer):
    bos = bos_tokenizer.bos_token
    once = bos_tokenizer("3 + 4 =")["input_ids"]
    assert once[0] == bos_tokenizer.bos_token_id
    for prompt in ("3 + 4 =", f"{bos}3 + 4 ="):
        assert tokenize_row({"prompt": prompt, "completion": "7"}, bos_tokenizer).prompt_ids == once
    bos_tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for completion in ("7", [{"role": "assistant", "content": "7"}]):
        row = {"prompt": [{"role": "user", "content": "3 + 4 ="}], "completion": completion}
        assert tokenize_row(row, bos_tokenizer).prompt_ids == once
