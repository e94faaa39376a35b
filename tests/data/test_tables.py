import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from topr_trl.data import tables
from topr_trl.data.tables import atomic_write, from_table, load_rows, read_table, save_rows, shards_of


def test_shards_come_back_in_order(rows, tmp_path):
    save_rows(rows.select(range(4)), tmp_path, 0, 2)
    with pytest.raises(FileNotFoundError, match="1 of 2 shards"):
        load_rows(tmp_path)
    save_rows(rows.select(range(4, 8)), tmp_path, 1, 2)
    assert load_rows(tmp_path).to_list() == rows.to_list()
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_write(path) as partial:
        partial.write_text("first")
        assert not path.exists()
        assert partial.parent == path.parent  # a rename across file systems would not be atomic

    def fails():
        with atomic_write(path) as partial:
            partial.write_text("sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_single_files(rows, tmp_path, suffix):
    path = tmp_path / f"logged.{suffix}"
    rows.to_parquet(path) if suffix == "parquet" else rows.to_json(path)
    assert load_rows(path)["completion"][:] == rows["completion"][:]


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="no rows"):
        load_rows(tmp_path)
    for missing in ("nowhere.parquet", "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no file or folder .*{missing}"):
            load_rows(tmp_path / missing)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_saved_rows_without_a_row(rows, tmp_path, num_shards):
    for shard in range(num_shards):
        save_rows(rows.select([]), tmp_path, shard, num_shards)
    with pytest.raises(ValueError, match=r"00000-of-0000\d\.parquet .*there is no row"):
        load_rows(tmp_path)


@pytest.mark.parametrize("text", ["\n", "[]", "[\n]\n"])
def test_json_without_a_row(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json is empty: it has no row"):
        load_rows(tmp_path / "rows.json")


@pytest.mark.parametrize("text", ["\ufeffnull", ' null\n{"prompt": "a"}', '[\nnull,\n{"prompt": "a"}]'])
def test_a_first_row_that_is_null_is_refused_before_it_crashes_pyarrow(tmp_path, text):
    (tmp_path / "rows.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.json cannot be read: the first row is null"):
        load_rows(tmp_path / "rows.json")


def test_a_later_row_that_is_null_is_an_empty_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\nnull\n')
    assert load_rows(tmp_path / "rows.jsonl")["prompt"][:] == ["a", None]


def test_late_rows_of_a_large_json_file_may_have_other_types(tmp_path):
    """`datasets` infers the types from the first 10 MB."""
    early = {"prompt": "x" * 2**20, "reward": 1, "finish_reason": None, "messages": [{"content": "a"}]}
    late = {
        "prompt": "y", "reward": 0.5, "finish_reason": "length", "messages": [{"content": "b", "name": "c"}], "new": 1,
    }  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [*[early] * 11, late])))
    loaded = load_rows(path, cache_dir=tmp_path / "cache")
    assert loaded[0] == {**early, "messages": [{"content": "a", "name": None}], "new": None}
    assert loaded[11] == late


def test_objects_in_a_large_json_file_keep_their_fields(tmp_path):
    one = {"prompt": "x" * 2**20, "metadata": {}, "call": {"b": 1, "a": 2}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [one, {**one, "call": {"a": 1, "b": 2, "c": 3}}] * 6)))
    loaded = load_rows(path, cache_dir=tmp_path / "cache")
    assert [list(loaded[place]["call"]) for place in (0, 11)] == [["b", "a"], ["a", "b", "c"]]
    assert loaded[0]["metadata"] == {}


@pytest.mark.parametrize("layout", ["lines", "array", "indented array"])
def test_text_that_looks_like_a_date_stays_text(tmp_path, layout):
    """`datasets` converts a column if all of its texts look like dates."""
    rows = [
        {"prompt": "When?\u2028", "completion": f"2024-01-0{n}", "at": {"x": [f"2024-01-0{n} 10:00:00"]}, "n": n,
         "messages": [{"role": "user", "content": "2020-02-02T10:00:00Z"}]} for n in range(1, 4)
    ]  # fmt: skip
    rows[1] |= {"completion": None, "at": None}
    text = {
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "array": json.dumps(rows),
        "indented array": json.dumps(rows, indent=1),
    }[layout]  # fmt: skip
    (tmp_path / "a.json").write_text(text)
    assert load_rows(tmp_path / "a.json").to_list() == rows
    (tmp_path / "b.json").write_text(text)
    both = read_table(tmp_path / "a.json", tmp_path / "b.json")
    assert both.column_names == list(rows[0])
    assert both.to_list() == 2 * rows


def test_arrays_of_texts_and_of_large_numbers_are_read(tmp_path):
    (tmp_path / "a.json").write_text('["a", "b"]')
    assert load_rows(tmp_path / "a.json")["text"][:] == ["a", "b"]
    (tmp_path / "b.json").write_text(json.dumps([{"seed": [2**63]}, {"seed": [0.5]}]))
    assert load_rows(tmp_path / "b.json")["seed"][:] == [[2.0**63], [0.5]]


@pytest.mark.parametrize(
    ("rows", "is_array"),
    [
        ([{"n": 1e-12, "at": {"x": 0.3}}, {"n": 0.5, "at": {"y": 3.141592653589793}}, {"n": None, "at": None}], False),
        ([{"calls": [{"name": "g", "of": {"x": 1e-12}}, {"name": "f", "of": None}]},
          {"calls": [{"name": "g", "of": {}}]}], False),
        ([{"prompt": text, "problem_id": n} for text, n in
          (('"Hello"', "17"), ("null", 17), ("42", None), ([{"role": "user"}], 18))], False),
        ([{"reward": 1e-12, "mu_logps": [-0.1234567890123456], "prompt": "42"}], True),
    ],
)  # fmt: skip
def test_values_of_json_files_are_exact(tmp_path, rows, is_array):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows) if is_array else "\n".join(map(json.dumps, rows)))
    assert [*load_rows(path)] == rows
    save_rows(load_rows(path), tmp_path / "saved")
    saved = load_rows(tmp_path / "saved")
    assert [*saved] == [*Dataset.from_list(rows, features=saved.features)] == rows
    # `datasets` joins only tables with equal types.
    assert saved.features == from_table(saved.with_format("arrow")[:]).features


def test_row_groups_have_few_bytes(rows, tmp_path, monkeypatch):
    """pyarrow cannot read a row group whose messages have more than 2 GB."""
    monkeypatch.setattr(tables, "_BYTES_AT_ONCE", 1)
    path = save_rows(rows, tmp_path)
    assert pq.read_metadata(path).num_row_groups == len(rows)


def test_a_relative_path_in_a_folder_whose_name_looks_like_a_pattern(rows, tmp_path, monkeypatch):
    save_rows(rows, tmp_path / "run[1]")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert len(load_rows(".")) == len(rows)


def test_file_names_that_are_numbers_count_no_shards(tmp_path):
    for name in ("0", "1"):
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / f"{name}.parquet")
    assert [path.name for path in shards_of(tmp_path)] == ["0.parquet", "1.parquet"]


def test_a_folder_with_several_splits_is_refused(tmp_path):
    """The number of files matches the name of the first file, but the files have different splits."""
    for name in ("test-00000-of-00002", "train-00000-of-00001"):
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / f"{name}.parquet")
    with pytest.raises(FileNotFoundError, match=r"several splits \(test, train\).*own folder"):
        shards_of(tmp_path)
