import json
import math
from pathlib import Path

import completions_tables
import pyarrow.parquet as pq
import pytest

from tests.trainers.test_distributed import launch
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.trainers.completions_table import DisplayedFloat

ACCUMULATION = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}
COLUMNS = ["step", "prompt", "completion", "reward", "advantage", "weight", "log_ratio"]


def expected(folder):
    """Return the expected log-ratios by prompt and completion, for each logged step."""
    of_step = json.loads((folder / "expected.json").read_text())
    return {step: {(prompt, completion): x for prompt, completion, x in rows} for step, rows in of_step.items()}


def tables(folder):
    return {
        step: pq.read_table(folder / "completions" / f"completions_{int(step):05d}.parquet").to_pylist()
        for step in expected(folder)
    }


def check(folder):
    """Check the weight and log-ratio of each row in the tables. Return the rows without a log-ratio."""
    without, kinds = [], set()
    for step, rows in tables(folder).items():
        log_ratio = expected(folder)[step]
        assert rows
        assert len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
        for row in rows:
            assert row["step"] == int(step)
            known = log_ratio.get((row["prompt"], row["completion"]))
            if known is None:
                without.append(row)
                assert row["log_ratio"] is None
            else:
                assert row["log_ratio"] == pytest.approx(known, abs=2e-3)
                assert row["weight"] == pytest.approx(min(math.exp(known), 1.0), rel=2e-3)
                kinds.add(row["log_ratio"])
    assert len(kinds) > 4  # otherwise, a table with mixed-up rows could pass
    return without


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "without"),
    [
        ({**ACCUMULATION, "eval_strategy": "steps", "eval_steps": 3}, 0),  # evaluation rows replace training rows
        ({"steps_per_generation": 4}, 12 + 8 + 4),  # each step trains on a quarter of the table
        ({**ACCUMULATION, "curation": "uniform", "iteration_size": 3}, 4 * 5),
    ],
    ids=["accumulation", "several steps", "curation"],
)
def test_online_rows_have_their_own_weight(tmp_path, more, without):
    completions_tables.main("online", tmp_path, **more)
    rows = check(tmp_path)
    assert [row["weight"] for row in rows] == [None] * without


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        {"sort_by_length": False, "logging_steps": 2, "baseline": "0.5", "preset": "topr"},
        {"padding_free": True},
    ],
    ids=["accumulation", "every other step", "padding-free"],
)
def test_offline_rows_have_their_own_weight(tmp_path, more):
    completions_tables.main("offline", tmp_path, **more)
    idle = check(tmp_path)
    baseline = float(more.get("baseline", 0))
    assert all((row["advantage"] > 0 if baseline else row["advantage"] == 0) and row["weight"] == 1 for row in idle)
    for step, rows in tables(tmp_path).items():
        assert list(rows[0]) == COLUMNS
        assert len(rows) in (4, 4 * more.get("gradient_accumulation_steps", 1))  # the last step of an epoch is smaller
        assert expected(tmp_path)[step].keys() <= {(row["prompt"], row["completion"]) for row in rows}
        assert all(row["reward"] == int(row["completion"].split()[0]) % 3 - 1.0 for row in rows)
        assert all(row["advantage"] == row["reward"] - baseline for row in rows)


@pytest.mark.processes
@pytest.mark.weekly
def test_rows_of_two_processes_have_their_own_weight(tmp_path):
    kinds = {"online": ACCUMULATION, "offline": {"gradient_accumulation_steps": 2}}
    launch("ddp", Path(__file__).parents[1] / "completions_tables.py", tmp_path, json.dumps(kinds), again=True)
    assert check(tmp_path / "online") == []
    assert all(row["advantage"] == 0 for row in check(tmp_path / "offline"))
    for kind in kinds:
        assert max(map(len, tables(tmp_path / kind).values())) == 8  # rows of both processes


def test_printed_and_saved_rows(model, tokenizer, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    args = OfflineTOPRConfig(
        **completions_tables.settings(tmp_path, preset="topr", max_steps=2, logging_steps=2, model_init_kwargs=None),
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer = OfflineTOPRTrainer(model, args, rows, rows, processing_class=tokenizer)
    trainer.train()
    trainer.evaluate()
    printed = capsys.readouterr().out
    header = [line for line in printed.splitlines() if "Prompt" in line]
    assert len(header) == 1  # neither the summary of training nor an evaluation prints a table
    assert header[0].replace("┃", "").replace("│", "").split() == [
        "Prompt", "Completion", "reward", "Advantage", "weight", "log_ratio"
    ]  # fmt: skip
    assert printed.count("Question:") == 1  # num_completions_to_print is 1
    (path,) = (tmp_path / "completions").iterdir()
    table = pq.read_table(path)
    assert table.column_names == COLUMNS
    assert [str(table.schema.field(name).type) for name in COLUMNS[3:]] == ["double"] * 4
    for row in table.to_pylist():
        assert row["prompt"] in rows["prompt"]
        assert row["completion"] in rows["completion"]
        if row["advantage"] > 0:
            assert (row["weight"], row["log_ratio"]) == (1, None)
        else:
            assert row["weight"] == pytest.approx(min(math.exp(row["log_ratio"]), 1))


def test_tokens_have_their_own_values_with_segments(tmp_path):
    completions_tables.main("offline", tmp_path, ratio_level="segment", segment_tokens=4, preset="topr")
    for step, rows in tables(tmp_path).items():
        for row in rows:
            assert "".join(row["tokens"]) == row["completion"]
            ratios, weights = row["token_log_ratio"], row["token_weight"]
            assert len(ratios) == len(weights) == len(row["tokens"])
            if known := expected(tmp_path)[step].get((row["prompt"], row["completion"])):
                assert sum(ratios) == pytest.approx(known, abs=2e-3)
                assert weights[0] == pytest.approx(min(math.exp(sum(ratios[:4])), 1), rel=2e-3)
                assert sum(weights) / len(weights) == pytest.approx(row["weight"], rel=1e-4)
            else:  # Rows with R = 0 are not computed.
                assert set(weights) == {1.0 if row["advantage"] else None}


def test_nothing_is_collected_when_it_is_off(model, tokenizer, rows, tmp_path):
    settings = completions_tables.settings(tmp_path, log_completions=False, model_init_kwargs=None)
    trainer = OfflineTOPRTrainer(model, OfflineTOPRConfig(**settings), rows, processing_class=tokenizer)
    trainer.train()
    assert not trainer._row_log.read("table")
    assert not (tmp_path / "completions").exists()


def test_columns_are_not_taken_twice(model, tokenizer, rows, tmp_path):
    def weight(completions, log_extra, **_):
        log_extra("log_ratio", [0] * len(completions))
        return [1.0] * len(completions)

    def trainer(*reward, **more):
        args = TOPRConfig(**completions_tables.settings(tmp_path, num_generations=2, model_init_kwargs=None, **more))
        return TOPRTrainer(model, list(reward), args=args, train_dataset=rows, processing_class=tokenizer)

    with pytest.raises(ValueError, match="column 'weight'"):
        trainer(weight)
    weight.__name__ = "right"
    with pytest.raises(ValueError, match="log_extra names a column 'log_ratio'"):
        trainer(weight, max_completion_length=4).train()


def test_numbers_are_printed_short_and_kept_whole():
    assert [str(DisplayedFloat(x)) for x in (1.0, 0.123456, 1e-9, -math.inf, math.nan)] == [
        "1", "0.123", "1e-09", "-inf", "",
    ]  # fmt: skip
    assert DisplayedFloat(0.123456) == 0.123456
