"""Test parts of the import that all formats share. Most of these files have the format of verl."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.importing import FORMATS
from topr_trl.importing.record_files import files_of
from topr_trl.pipeline import manifest
from topr_trl.pipeline.stages import import_ as importing
from topr_trl.pipeline.stages.import_ import ImportArguments


def record(n, **more):
    return {"input": f"{n // 2} + 1 =", "output": f" {n}.", "gts": str(n // 2 + 1), "score": float(n % 2), "step": 3,
            **more}  # fmt: skip


def lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records))
    return path


def imported(source, out, **settings):
    given = {"format": "verl", "input": source, "output_dir": out, **settings}
    main.main(["import", *(part for name, value in given.items() for part in (f"--{name}", str(value)))])
    return load_rows(out)


def test_rows_of_several_files_in_several_shards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importing, "RECORDS_PER_SHARD", 4)
    for step in range(2):
        lines(tmp_path / "log" / f"{step}.jsonl", [record(n) for n in range(10 * step, 10 * step + 10)])
    rows = imported(tmp_path / "log", tmp_path / "rows")
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 6
    assert rows["completion"][:] == [f" {n}." for n in range(20)]
    assert rows["reward"][:] == [0.0, 1.0] * 10
    assert rows["answer"][:] == [str(n // 2 + 1) for n in range(20)]
    assert len(set(rows["problem_id"])) == 10
    said = capsys.readouterr().out
    assert "without special tokens" in said
    assert f"Rows in {tmp_path / 'rows'}/: 20." in said


def test_a_killed_import_goes_on_with_the_shards_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "RECORDS_PER_SHARD", 4)
    source = lines(tmp_path / "log.jsonl", [record(n) for n in range(10)])
    write, written = importing.write_shard, []

    def killed(table, path, *more):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(table, path, *more)

    monkeypatch.setattr(importing, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        imported(source, tmp_path / "rows")
    monkeypatch.setattr(importing, "write_shard", lambda table, path, *more: written.append(path.name) or
                        write(table, path, *more))  # fmt: skip
    rows = imported(source, tmp_path / "rows")
    assert len(set(written)) == len(written) == 3
    assert rows["completion"][:] == [f" {n}." for n in range(10)]
    (tmp_path / "rows" / written[1]).unlink()
    assert imported(source, tmp_path / "rows")["completion"][:] == rows["completion"][:]


@pytest.mark.parametrize("where", ["train=true", "train=True", "level=2", "info.split=a", "step=3", "id=7"])
def test_records_are_chosen_by_a_value(tmp_path, where):
    kept = record(1, train=True, level=2.0, info={"split": "a"}, id="7")
    others = [record(0, train=False, level=1.0, info={"split": "b"}, step=4, id="007"), record(2, step=None)]
    source = lines(tmp_path / "log.jsonl", [kept, *others])
    assert imported(source, tmp_path / "rows", where=where)["completion"][:] == [" 1."]


def test_lines_that_were_cut_off_are_counted_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importing, "RECORDS_PER_SHARD", 2)
    source = lines(tmp_path / "\x1b.jsonl", [record(0), "\n", '{"input": "1 +\n', record(2), record(3), '{"inp'])
    assert len(imported(source, tmp_path / "rows")) == 3
    said = capsys.readouterr().out
    assert "left out: �.jsonl, line 3, �.jsonl, line 6." in said
    imported(source, tmp_path / "rows")
    assert manifest.read(tmp_path / "rows").stages["import"]["left_out"]["broken"]["count"] == 2
    with pytest.raises(ValueError, match="none of its records"):
        imported(lines(tmp_path / "other.jsonl", ["{"]), tmp_path / "other")


def test_the_first_shards_may_have_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "RECORDS_PER_SHARD", 2)
    cut = [{"content": [["q", "a"]], "rewards": [1.0], "input_lengths": [2], "token_ids": [[5, 6]],
            "token_loss_mask": [[0, own]], "generation_logprobs": [[0.0, -0.5]]} for own in (0, 0, 0, 1)]  # fmt: skip
    source = lines(tmp_path / "log.jsonl", cut)
    rows = imported(source, tmp_path / "rows", format="nemo-rl")
    assert rows["completion_ids"][:] == [[6]]
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 2
    assert imported(source, tmp_path / "rows", format="nemo-rl").to_list() == rows.to_list()


def test_a_compressed_file_that_breaks_off_keeps_its_whole_lines(tmp_path, capsys):
    whole = "".join(json.dumps(record(n)) + "\n" for n in range(4_000)).encode()
    packed = gzip.compress(whole)
    (tmp_path / "log.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    rows = imported(tmp_path / "log.jsonl.gz", tmp_path / "rows")
    assert 100 < len(rows) < 4_000
    assert rows["completion"][:] == [f" {n}." for n in range(len(rows))]
    assert "1 line is not valid JSON" in capsys.readouterr().out


def test_a_file_and_its_compressed_copy_are_not_read_both(tmp_path):
    lines(tmp_path / "log" / "1.jsonl", [record(0)])
    (tmp_path / "log" / "1.jsonl.gz").write_bytes(gzip.compress(json.dumps(record(0)).encode()))
    with pytest.raises(ValueError, match=r"1\.jsonl and .*1\.jsonl\.gz hold the same records"):
        imported(tmp_path / "log", tmp_path / "rows")


def test_files_of_a_folder_with_other_suffixes(tmp_path):
    run = lines(tmp_path / "run" / "1" / "1.traj.json", [record(0)])
    (tmp_path / "run" / "preds.json").write_text("{}")
    assert files_of(tmp_path / "run") == [run]
    older = lines(tmp_path / "older" / "1" / "a.traj", [record(0)])
    assert files_of(tmp_path / "older") == [older]
    for n, name in enumerate(("a.jsonl", "B.JSONL")):
        lines(tmp_path / "log" / name, [record(n)])
    assert len(imported(tmp_path / "log", tmp_path / "rows")) == 2
    for name in ("c.ndjson", "c.TRAJ"):
        other = lines(tmp_path / "log" / name, [record(2)])
        with pytest.raises(ValueError, match=rf"must hold only \.jsonl .*it has \{other.suffix} files"):
            imported(tmp_path / "log", tmp_path / "others")
        other.unlink()


def test_a_folder_of_a_table_and_other_records(tmp_path):
    (tmp_path / "table.csv").write_text("question,answer,score\na,b,1\n")
    (tmp_path / "log.json").write_text(json.dumps([record(0)]))
    with pytest.raises(ValueError, match=r"must hold only \.csv .*it has \.json files"):
        files_of(tmp_path)


def test_a_folder_of_parquet_files_and_a_description(tmp_path):
    for n in range(2):
        pq.write_table(pa.Table.from_pylist([record(n)]), tmp_path / f"{n}.parquet")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(imported(tmp_path, tmp_path / "rows")) == 2


def test_hidden_copies_of_other_programs_are_not_read(tmp_path):
    """Jupyter keeps copies of edited files, and macOS writes files with attributes."""
    lines(tmp_path / ".log" / "1.jsonl", [record(0)])
    lines(tmp_path / ".log" / ".ipynb_checkpoints" / "1-checkpoint.jsonl", [record(0)])
    (tmp_path / ".log" / "._1.jsonl").write_bytes(b"\0\5\x16\7Mac OS X\xff")
    assert len(imported(tmp_path / ".log", tmp_path / "rows")) == 1
    (tmp_path / ".log" / "1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"\.log must hold only JSON, CSV or parquet files.*\. Choose"):
        imported(tmp_path / ".log", tmp_path / "other")


def test_records_without_a_reward_can_be_left_out(tmp_path, capsys):
    records = [record(0), record(1, score=None), record(2), record(3, info={"stars": 4})]
    source = lines(tmp_path / "log.jsonl", records)
    assert imported(source, tmp_path / "rows", skip_unrewarded=True)["reward"][:] == [0.0, 0.0, 1.0]
    assert "1 record has no reward and is left out: log.jsonl, line 2." in capsys.readouterr().out
    rows = imported(source, tmp_path / "stars", skip_unrewarded=True, reward_fields="info.stars")
    assert rows["completion"][:] == [" 3."]
    (tmp_path / "rewards.jsonl").write_text('{"id": " 2.", "reward": 1}')
    by_text = {"rewards": tmp_path / "rewards.jsonl", "id_field": "output"}
    with pytest.raises(ValueError, match=r"line 1: .*--rewards .*output ' 0\.'.* --skip_unrewarded"):
        imported(source, tmp_path / "second", **by_text)
    assert imported(source, tmp_path / "second", skip_unrewarded=True, **by_text)["completion"][:] == [" 2."]


def test_an_edited_log_of_the_same_size_is_another_one(tmp_path):
    source = lines(tmp_path / "log.jsonl", [record(0)])
    imported(source, tmp_path / "rows")
    lines(source, [record(0, score=1.0)])
    with pytest.raises(ValueError, match=r"rows .*other settings \(input"):
        imported(source, tmp_path / "rows")


def test_how_they_were_sampled_can_be_given(tmp_path):
    source = lines(tmp_path / "log.jsonl", [record(0)])
    (row,) = imported(source, tmp_path / "rows", temperature=0.7, logprobs_mode="raw_logprobs")
    assert (row["temperature"], row["logprobs_mode"]) == (0.7, "raw_logprobs")
    with pytest.raises(ValueError, match=r"logprobs_mode .*raw_logprobs.* not 'raw'"):
        imported(source, tmp_path / "other", logprobs_mode="raw")


def test_the_problem_can_be_named(tmp_path, capsys):
    source = lines(tmp_path / "log.jsonl", [record(n, task={"id": n % 2}) for n in range(0, 8, 2)])
    assert len(set(imported(source, tmp_path / "rows")["problem_id"])) == 4
    assert "--problem_field" in capsys.readouterr().out
    source = lines(tmp_path / "log.jsonl", [record(n, task={"id": n % 4}) for n in range(0, 8, 2)])
    rows = imported(source, tmp_path / "named", problem_field="task.id")
    assert rows["problem_id"][:] == ["0", "2", "0", "2"]
    assert "4 rows of 2 problems." in capsys.readouterr().out
    graded = {"problem": "1 + 1", "generations": ["2"], "correctness_math_verify": [True], "task": {"id": 7}}
    pq.write_table(pa.Table.from_pylist([graded]), tmp_path / "graded.PARQUET")
    rows = imported(tmp_path / "graded.PARQUET", tmp_path / "graded", format="graded", problem_field="task.id")
    assert rows["problem_id"][:] == ["7"]
    with pytest.raises(ValueError, match=r"line 1: it has no field task\.name .*; it has"):
        imported(source, tmp_path / "other", problem_field="task.name")


def test_every_format_is_in_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "rows.md").read_text()
    table = "".join(line for line in guide.splitlines() if line.startswith("| `"))
    assert not [name for name in FORMATS if f"`{name}`" not in table]


def test_missing_fields_and_other_formats(tmp_path):
    source = lines(tmp_path / "list.jsonl", ["[1]\n"])
    with pytest.raises(ValueError, match="JSON object, and is a int"):
        imported(source, tmp_path / "rows")
    assert not (tmp_path / "rows" / "_manifest.json").exists()
    with pytest.raises(ValueError, match=r"format .* graded, .*, weave, not 'pickle'"):
        imported(source, tmp_path / "rows", format="pickle")


def test_rewards_of_fields_inside_and_of_a_second_file(tmp_path):
    source = lines(tmp_path / "log.jsonl", [record(n, uid=f"u{n}", info={"style": n / 2}) for n in range(4)])
    main.main(["import", "--format", "verl", "--input", str(source), "--output_dir", str(tmp_path / "a"),
               "--reward_fields", "score", "info.style"])  # fmt: skip
    assert load_rows(tmp_path / "a")["reward"][:] == [0.0, 1.5, 1.0, 2.5]
    second = lines(tmp_path / "rewards.jsonl", [{"id": f"u{n}", "reward": -n} for n in range(4)])
    rows = imported(source, tmp_path / "b", rewards=second, id_field="uid")
    assert rows["reward"][:] == [0.0, -1.0, -2.0, -3.0]
    with pytest.raises(ValueError, match="both set the reward of a record"):
        ImportArguments(format="verl", rewards=str(second), reward_fields=["score"])


@pytest.mark.parametrize("names", [("rows.csv", "rewards.jsonl"), ("rows.jsonl", "rewards.csv")])
def test_ids_that_are_numbers_in_one_file_and_text_in_the_other(tmp_path, names):
    source, second = (tmp_path / name for name in names)
    records = [{"id": n, "prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(2)]
    rewards = [{"id": n, "reward": n} for n in range(2)]
    for path, each in ((source, records), (second, rewards)):
        table = ["\n".join(",".join(map(str, values)) for values in (each[0], *(row.values() for row in each)))]
        lines(path, table if path.suffix == ".csv" else each)
    assert imported(source, tmp_path / "rows", format="table", rewards=second)["reward"][:] == [0.0, 1.0]


def test_saved_places_name_no_folder_of_this_machine(tmp_path):
    lines(tmp_path / "log" / "0.jsonl", [record(0), "{broken\n", record(1)])
    imported(tmp_path / "log", tmp_path / "rows")
    kept = [(tmp_path / "rows" / manifest.NAME).read_text()]
    kept += [str(pq.read_schema(shard).metadata) for shard in (tmp_path / "rows").glob("*.parquet")]
    assert "0.jsonl, line 2" in kept[0]
    stage = json.loads(kept[0])["stages"]["import"]
    for text in (json.dumps(stage["left_out"]), *kept[1:]):
        assert str(tmp_path) not in text
    assert all("0.jsonl" not in text for text in kept[1:])  # Shards are published as they are.
