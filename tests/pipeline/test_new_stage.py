"""A new stage needs only one file to get a command, help, resuming, and a place in the loop."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.loops import steps_of
from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.settings import IterateArguments
from topr_trl.pipeline.shards import parts_of
from topr_trl.pipeline.steps import run_steps

FILE = '''"""Count the characters of completions."""

from dataclasses import dataclass, field

import pyarrow.compute as pc

from topr_trl.data.tables import rows_of, set_column, shards_of
from topr_trl.pipeline.settings import FolderArguments
from topr_trl.pipeline.stage_inputs import rows_read
from topr_trl.pipeline.stage import Stage


@dataclass
class CountArguments(FolderArguments):
    """Settings of `topr count`."""

    factor: int = field(default=1, metadata={"help": "Multiply by this number."})


class Count(Stage[CountArguments]):
    """Number of characters of each completion, in the column `characters`."""

    settings = CountArguments
    outcome = "Counted: {rows} rows in {folder}."
    order = 15  # between score and curate
    adds_columns = True

    def inputs(self):
        return {**rows_read(self.args.source, self.folder), "factor": self.args.factor}

    def make(self):
        def counted(part, table):
            return set_column(table, "characters", pc.multiply(pc.utf8_length(table["completion"]), self.args.factor))

        self.add_columns(counted, "Counting")
        return sum(map(rows_of, shards_of(self.folder))), {}
'''
ROWS = [
    {"prompt": f"{n} + 1 =", "completion": " " + str(n + n % 2), "answer": str(n + 1), "reward": n % 2}
    for n in range(8)
]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Add a stage to the package, and yield a folder with two shards of rows."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "count.py").write_text(FILE)
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path / "more")])
    folder = tmp_path / "rows"
    folder.mkdir()
    for k in range(2):
        pq.write_table(pa.Table.from_pylist(ROWS[4 * k : 4 * k + 4]), folder / f"{k}.parquet")
    yield folder
    stages.load.cache_clear()
    sys.modules.pop("topr_trl.pipeline.stages.count", None)


def test_a_stage_in_one_file_has_a_command_with_help(rows, tmp_path, capsys):
    main.main(["count", "--help"])
    said = capsys.readouterr().out
    assert "Count the characters of completions." in said
    assert "--factor" in said
    main.main(["count", "--input", str(rows), "--output_dir", str(tmp_path / "out"), "--factor", "3"])
    assert f"Counted: 8 rows in {tmp_path / 'out'}." in capsys.readouterr().out
    assert load_rows(tmp_path / "out")["characters"][:] == [3 * len(row["completion"]) for row in ROWS]
    with pytest.raises(ValueError, match="factor: 3 there, 2 now"):
        main.main(["count", "--input", str(rows), "--output_dir", str(tmp_path / "out"), "--factor", "2"])


@pytest.mark.parametrize("suffix", ["", ".parquet", ".jsonl"])
def test_it_continues_after_a_kill(rows, tmp_path, monkeypatch, suffix):
    """A large file is written in parts, and the finished parts are kept."""
    Count, out = stages.load("count"), tmp_path / "out"
    if suffix:
        monkeypatch.setattr("topr_trl.pipeline.shards._ROWS_PER_PART", 4)
        file = rows.with_suffix(suffix)
        load_rows(rows).to_parquet(file) if suffix == ".parquet" else load_rows(rows).to_json(file)
        rows = file
    stage = Count(Count.settings(input=str(rows), output_dir=str(out)))
    real, made = Count.add_columns, []

    def killed(self, columns, description):
        def some(part, table):
            made.append(part.first)
            if made == [0, 4]:
                raise KeyboardInterrupt
            return columns(part, table)

        real(self, some, description)

    monkeypatch.setattr(Count, "add_columns", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    assert not stage.is_finished()
    assert stage.run()["rows"] == 8
    assert made == [0, 4, 4]  # the first shard was kept
    assert load_rows(out)["characters"][:] == [len(row["completion"]) for row in ROWS]
    assert stage.is_finished()
    assert stage.run()["rows"] == 8
    assert made == [0, 4, 4]


@pytest.mark.parametrize("name", ["problem_id", "prompt"])
def test_rows_of_a_problem_stay_in_one_part(tmp_path, monkeypatch, name):
    """A reward function can compare the completions of a problem."""
    monkeypatch.setattr("topr_trl.pipeline.shards._ROWS_PER_PART", 4)
    rows = [{"prompt": "1 + 1 =", "completion": "2", name: f"{n // 3}"} for n in range(9)]
    file = tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(file)
    assert [part.rows for part in parts_of(file, tmp_path / "out")] == [slice(0, 6), slice(6, 9)]
    assert [part.rows for part in parts_of(file, file)] == [slice(0, 9)]


def test_the_loop_runs_it_between_the_others(rows, tmp_path):
    loop = IterateArguments(output_dir=str(tmp_path / "run"), rows=str(rows), use_cpu=True, bf16=False)
    names = [step.stage.name for step in steps_of(loop)]
    assert names[3:7] == ["count", "curate", "log-mu", "train"]
    run_steps(steps_of(loop)[3:5], loop, loop.folder)
    folder = loop.folder / "iteration-1" / "rollouts"
    assert {"characters", "reward_after_baseline"} <= set(load_rows(folder).column_names)
    assert list(manifest.read(folder).stages) == ["count", "curate"]
