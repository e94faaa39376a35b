import pyarrow as pa
import pytest
from datasets import Dataset

from topr_trl.candidates import (
    columns_of,
    from_table,
    load_candidates,
    problem_column,
    save_candidates,
    tokenize,
    tokenize_row,
)


def test_shards_come_back_in_order(rows, tmp_path):
    save_candidates(rows.select(range(4)), tmp_path, 0, 2)
    with pytest.raises(FileNotFoundError, match="1 of 2 shards"):
        load_candidates(tmp_path)
    save_candidates(rows.select(range(4, 8)), tmp_path, 1, 2)
    assert load_candidates(tmp_path).to_list() == rows.to_list()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_single_files(rows, tmp_path, suffix):
    path = tmp_path / f"logged.{suffix}"
    rows.to_parquet(path) if suffix == "parquet" else rows.to_json(path)
    assert load_candidates(path)["completion"][:] == rows["completion"][:]


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="no candidates"):
        load_candidates(tmp_path)
    for missing in ("nowhere.parquet", "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no file or folder .*{missing}"):
            load_candidates(tmp_path / missing)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        load_candidates(tmp_path / "empty.jsonl")
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"not rows\.csv"):
        load_candidates(tmp_path / "rows.csv")


def test_malformed_files_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(ValueError, match=r"rows\.jsonl cannot be read"):
        load_candidates(tmp_path / "rows.jsonl")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("a,b")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read"):
        columns_of(tmp_path / "rows.parquet")


@pytest.mark.parametrize("ids", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_ids_are_joined_as_rows_are_tokenized(tokenizer, ids):
    prompts, completions = [[1, 2], [3], [4, 5, 6], [7]], [[8], [9, 10], [11], [12, 13]]
    table = pa.table({"prompt_ids": pa.array(prompts, ids), "completion_ids": pa.array(completions, ids),
                      "prompt": ["a"] * 4, "mu_logps": [[-1.0], [-1.0, -2.0], [-1.0], [-1.0, -1.0]]})  # fmt: skip
    rows = from_table(table).select([3, 1, 2])  # with an index, as curation leaves them
    joined = tokenize(rows, tokenizer, ["mu_logps"])
    one_by_one = [tokenize_row(row, tokenizer) for row in rows]
    assert joined["input_ids"][:] == [prompt + completion for prompt, completion in one_by_one]
    assert joined["prompt_length"][:] == [len(prompt) for prompt, _ in one_by_one]
    assert joined["mu_logps"][:] == rows["mu_logps"][:]
    assert joined.column_names == ["mu_logps", "input_ids", "prompt_length"]


@pytest.mark.parametrize(("wrong", "message"), [(None, "1 ids that are empty"), (2**32 + 7, "no token id.*4294967303")])
def test_ids_that_cannot_be(tokenizer, wrong, message):
    rows = Dataset.from_dict({"prompt": ["a"], "prompt_ids": [[1]], "completion_ids": [[5, wrong]]})
    with pytest.raises(ValueError, match=f"`completion_ids`.*{message}"):
        tokenize(rows, tokenizer)


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
        found = tokenize(load_candidates(tmp_path / "rows.parquet", tmp_path / "cache"), tokenizer)
        made.append([file["filename"] for file in found.cache_files])
    assert made[0] == made[1] != []


def test_problems():
    rows = Dataset.from_dict({"prompt": ["a", "b", "a"], "problem_id": [7, 7, 8]})
    assert problem_column(rows).tolist() == [7, 7, 8]
    by_prompt = problem_column(rows.remove_columns("problem_id"))
    assert by_prompt[0] == by_prompt[2] != by_prompt[1]
