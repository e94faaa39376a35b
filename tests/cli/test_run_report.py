import json
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.cli import main as cli
from topr_trl.cli.run_report import read_run, render, rows_to_show
from topr_trl.cli.run_report_curves import PANELS, draw_panel, has_metric, series
from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.report import write_report
from topr_trl.pipeline import manifest
from topr_trl.tasks.arithmetic import CARELESS_MODEL


@pytest.fixture
def run(model, tokenizer, rows, tmp_path):
    """Return the folder of a training run of four steps, with checkpoints after steps 2 and 4."""
    args = OfflineTOPRConfig(
        str(tmp_path / "run"), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-3, bf16=False,
        use_cpu=True, gradient_checkpointing=False, save_steps=2, logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()
    return tmp_path / "run"


def log_rows(folder, step, **columns):
    (folder / "completions").mkdir(exist_ok=True)
    table = {"step": [step] * 4, "prompt": ["1 + 1 ="] * 4, "completion": ["2", "3", "4", "5"],
             "reward": [1.0, 0, 0, 0],
             "advantage": [1.0, -1.0, -1.0, -1.0],
             "weight": [1.0, 0.9, 0.5, 0.001],
             "log_ratio": [None, -0.1, -0.7, -6.9], **columns}  # fmt: skip
    pq.write_table(pa.table(table), folder / f"completions/completions_{step:05d}.parquet")


@pytest.mark.slow
def test_a_run_as_a_page(run, capsys):
    log_rows(run, 3, prompt=["<script>alert(1)</script>"] * 4)
    cli.main(["plot", "--input", str(run)])
    assert "report.html: 4 optimizer steps, 4 logged rows" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    for title in (
        "Loss",
        "Weights of negatives",
        "log π/μ of negatives",
        "Positives",
        "Gradient norm",
        "Learning rate",
    ):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>Entropy</h3>" not in page  # Entropy was not logged.
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "4 optimizer steps" in page
    # The page does not refer to other files.
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "No rows were logged" not in page


@pytest.mark.slow
def test_a_run_that_is_not_finished(run):
    (run / "trainer_state.json").unlink()
    assert [entry["step"] for entry in read_run(run).histories["run"] if "loss" in entry] == [1, 2, 3, 4]
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"log_hist')  # as if a trainer were writing it
    log_rows(run, 1)
    (run / "completions" / "completions_00002.parquet").write_bytes(b"PAR1")
    found = read_run(run)
    assert [entry["step"] for entry in found.histories["run"] if "loss" in entry] == [1, 2]
    assert found.rows.num_rows == 4
    assert "2 optimizer steps" in render(found)


def test_entries_of_a_log_that_are_no_entries_are_left_out(run):
    state = {"log_history": [{"step": 3, "loss": 1.0}, None, {"loss": 2.0}, {"step": "4", "loss": 3.0}, {"step": True}]}
    (run / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(run).histories == {"run": [{"step": 3, "loss": 1.0}]}


def test_a_training_that_fails_leaves_its_log(model, tokenizer, rows, tmp_path, monkeypatch):
    args = OfflineTOPRConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
                             logging_steps=1,
                             gradient_checkpointing=False, per_device_train_batch_size=2)  # fmt: skip
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    step, taken = trainer.training_step, []

    def fail_at_the_third(*args, **kwargs):
        taken.append(None)
        if len(taken) == 3:
            raise RuntimeError("out of memory")
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", fail_at_the_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert [entry["step"] for entry in read_run(tmp_path).histories[tmp_path.name]] == [1, 2]


@pytest.mark.slow
def test_a_loop(run, tmp_path):
    loop = tmp_path / "loop"
    for iteration, rate in ((1, 0.5), (2, 0.9), (10, 0.7)):
        folder = loop / f"iteration-{iteration}"
        if iteration < 10:
            shutil.copytree(run, folder / "model")
        else:  # still in training
            shutil.copytree(run / "checkpoint-2", folder / "model" / manifest.WORK / "checkpoint-2")
        (folder / "test" / "results").mkdir(parents=True)
        answers = np.where(np.random.default_rng(0).random((20, 4)) < rate, "7", "1").tolist()
        write_report(folder / "test" / "results", {"estimate": encode(answers, ["7"] * 20)})
    log_rows(loop / "iteration-2" / "model", 4)
    found = read_run(loop)
    assert found.rows["step"].to_pylist() == [8] * 4
    assert list(found.histories) == list(found.evaluations) == ["iteration-1", "iteration-2", "iteration-10"]
    page = render(found)
    assert "10 optimizer steps in 3 iterations" in page
    assert "pass@1" in page
    # The step count continues across iterations.
    axes = draw_panel(next(p for p in PANELS if p.title == "Loss"), found.histories).axes[0]
    drawn = [
        line.get_xdata().tolist()
        for line in axes.lines
        if len(line.get_xdata()) > 2 or line.get_ydata()[0] not in (0, 1)
    ]
    assert drawn == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


@pytest.mark.slow
def test_the_newest_log_is_shown(model, tokenizer, rows, run):
    """The page shows the newest log, even that of a shorter second training in the same folder."""
    args = OfflineTOPRConfig(
        str(run), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-4, bf16=False, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()
    assert read_run(run).steps == 3
    log_rows(run, 4, completion=["old"] * 4)
    log_rows(run, 2)
    assert read_run(run).rows["completion"].to_pylist() == ["2", "3", "4", "5", "old"]


def test_a_row_that_was_logged_twice_is_shown_once_as_it_was_last(run):
    log_rows(run, 1)
    log_rows(run, 3, completion=["2", "6", "2", "7"], weight=[0.3, 0.2, 0.4, 0.1])
    rows = read_run(run).rows.select(["completion", "weight"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("2", 0.3),
        ("6", 0.2),
        ("7", 0.1),
        ("3", 0.9),
        ("4", 0.5),
        ("5", 0.001),
    ]


@pytest.mark.slow
def test_rows_that_are_messages(run):
    """Rows of messages, as TRL 1.16 logs them, can be shown. Repeated rows are shown once."""
    said = [[{"role": "assistant", "content": text}] for text in ("2", "3", "2", "5")]
    log_rows(run, 1, prompt=[[{"role": "user", "content": "1 + 1 ="}]] * 4, completion=said)
    assert len(read_run(run).rows) == 3
    assert "1 + 1 =" in render(read_run(run))


def test_nothing_to_show(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--input: .*nowhere does not exist"):
        cli.main(["plot", "--input", str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError, match=r"neither trainer_state.json nor evaluation.json"):
        cli.main(["plot", "--input", str(tmp_path)])


def test_rows_worth_a_look():
    advantages = [1.0, 0.5, 0.0] + [-1.0] * 12
    weights = [1.0, 1.0, 1.0, *np.linspace(0, 1, 12)]
    table = pa.table({"advantage": advantages, "weight": weights, "name": [str(i) for i in range(15)]})
    kinds = {kind: [row["name"] for row in rows] for kind, rows in rows_to_show(table).items()}
    assert kinds == {
        "Negatives with the highest weights": ["14", "13", "12", "11", "10"],
        "Negatives with the lowest weights": ["3", "4", "5", "6", "7"],
        "Positives": ["0", "1"],
    }
    table = table.append_column("log_ratio", pa.array([0.5, 2.0, *[-1.0] * 13]))
    assert [row["name"] for kind, rows in rows_to_show(table).items() if "π/μ" in kind for row in rows] == ["1", "0"]


def test_rows_without_a_weight_yet_are_not_shown():
    table = pa.table({"advantage": [-1.0] * 9, "weight": [0.5, None, None, 0.1, None, 0.2, 0.3, 0.4, 0.6]})
    table = table.append_column("name", pa.array(list("abcdefghi")))
    kinds = {kind: [row["name"] for row in rows] for kind, rows in rows_to_show(table).items()}
    assert kinds == {"Negatives with the highest weights": list("iahgf"), "Negatives with the lowest weights": ["d"]}


@pytest.mark.slow
def test_an_earlier_log_outlives_a_training_that_does_not_begin(run, rows):
    before = (run / "trainer_state.json").read_text()
    shutil.rmtree(run / "checkpoint-2")
    shutil.rmtree(run / "checkpoint-4")
    args = OfflineTOPRConfig(str(run), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="checkpoint"):
        OfflineTOPRTrainer(str(CARELESS_MODEL), args, rows).train(resume_from_checkpoint=True)
    assert (run / "trainer_state.json").read_text() == before


def test_files_of_something_else(run):
    (run / "evaluation.json").write_text("{}")
    with pytest.raises(ValueError, match=r"evaluation.json is damaged, or was not written by topr evaluate"):
        read_run(run)
    (run / "evaluation.json").unlink()
    (run / "checkpoint-4" / "trainer_state.json").write_text("[]")
    (run / "iteration-1.bak").mkdir()
    assert read_run(run).steps == 4


def test_logs_that_were_copied_at_once_are_ordered_by_their_step(tmp_path):
    names = {f"checkpoint-{step}": step for step in (*range(1, 10), 20, *range(10, 20))}
    for name, step in {**names, "": 21}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        path = tmp_path / name / "trainer_state.json"
        path.write_text(json.dumps({"log_history": [{"step": step, "loss": 1.0}]}))
        os.utime(path, (1, 1))
    assert read_run(tmp_path).steps == 21
    path.unlink()
    assert read_run(tmp_path).steps == 20


def test_series():
    history = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "eval_loss": 2},
        {"step": 4, "loss": 3},
    ]
    steps, values = series(history, "loss")
    assert steps.tolist() == [1, 4]
    assert values.tolist() == [1.0, 3.0]
    assert len(series(history, "nothing")[0]) == 0
    assert not has_metric(PANELS[0], history)


def test_long_runs_are_smoothed_at_the_right_height():
    history = [{"step": step, "loss": 5 + (-1.0) ** step} for step in range(1, 1001)]
    pale, bold = draw_panel(next(p for p in PANELS if p.title == "Loss"), {"run": history}).axes[0].lines
    assert np.ptp(pale.get_ydata()) == 2
    assert np.abs(bold.get_ydata() - 5).max() < 0.1


@pytest.mark.parametrize(("zero", "steps", "scale"), [(1.0, 3, "log"), (0.0, 3, "linear"), (0.0, 300, "linear")])
def test_a_value_of_zero_makes_the_scale_linear(zero, steps, scale):
    """A value of 0 makes the scale linear, also in a later training run and in a smoothed curve."""
    first = [{"step": step, "grad_norm": 1.0} for step in range(steps)]
    second = [*first, {"step": steps, "grad_norm": zero}]
    panel = next(p for p in PANELS if p.scale == "log")
    assert draw_panel(panel, {"one": first, "two": second}).axes[0].get_yscale() == scale
