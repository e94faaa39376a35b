"""The experiment on a pretrained model runs with the bundled model instead, and continues where it stopped."""

import json

import pytest

from benchmarks import real_model
from benchmarks.cells import Store
from benchmarks.experiment import TUNING_SEED
from benchmarks.real_model import METHODS, RATES, SCORE, Setup, Sizes, cells, experiment, untrained_cell, work
from topr_trl.tasks import arithmetic


@pytest.fixture
def setup(tmp_path):
    for name, seed in (("train", 1), ("test", 2)):
        arithmetic.arithmetic_dataset(120, seed=seed).to_json(tmp_path / f"{name}.jsonl")
    return Setup(
        str(arithmetic.CARELESS_MODEL), tmp_path / "train.jsonl", tmp_path / "test.jsonl", tmp_path / "work",
        Sizes(problems=8, apart=8, completions=4, test_problems=6, validation_problems=4,
              test_completions=2, step_rows=8),
        sampling=("--use_cpu", "true", "--num_shots", "0", "--max_new_tokens", "60"),
        training=("--use_cpu", "true", "--bf16", "false"),
    )  # fmt: skip


def test_problems_are_used_once(setup):
    parts = [("train", 0), ("train", 1), ("train", 2), ("tuning", 0), ("validation", 0)]
    questions = [
        json.loads(line)["question"]
        for split, seed in parts
        for line in real_model._problems(setup, split, seed).read_text().splitlines()
    ]
    assert len(set(questions)) == len(questions) == 3 * 8 + 8 + 4


def test_hard_problems_are_left_out(setup):
    lines = [json.loads(line) for line in setup.test.read_text().splitlines()]
    lines[:30] = [{**line, "answer": f"<<1+1=2>><<1+1=2>><<1+1=2>> {line['answer']}"} for line in lines[:30]]
    setup.test.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<<" not in real_model._problems(setup, "test").read_text()


def test_a_rate_is_chosen_by_greedy_and_sampled_answers(tmp_path):
    store = Store(tmp_path / "results")
    planned = cells("a model", store)
    assert planned[0] == untrained_cell("a model")
    assert len(planned) == 1 + len(METHODS) * len(RATES)
    for rate in RATES:
        cell = experiment("a model").cell("TOPR (default)", {"learning_rate": rate}, TUNING_SEED)
        store.add(cell, {SCORE: 0.3 if rate == RATES[1] else 0.2}, 1.0, "")
    reported = [cell for cell in cells("a model", store) if cell.get("seed") in range(real_model.REPETITIONS)]
    assert {(cell["method"], cell["learning_rate"]) for cell in reported} == {("TOPR (default)", RATES[1])}


def test_workers_run_each_cell_once_and_rates_before_repetitions(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "REPETITIONS", 2)
    order = []

    def work(cell, setup):
        order.append(cell)
        return {SCORE: cell.get("learning_rate", 0.0)}

    monkeypatch.setattr(real_model, "work", work)
    store = Store(tmp_path / "results")
    real_model.run(setup, store, workers=2)
    runs = len(RATES) + real_model.FURTHER + 2  # The highest rate is the best one, so a higher one is tried.
    assert len(order) == len({json.dumps(cell) for cell in order}) == 1 + len(METHODS) * runs
    assert not store.unfinished(cells(setup.name, store, 8))
    required = sum(not method.optional for method in METHODS.values())
    first = order[1:][: required * len(RATES)]
    assert all(cell["seed"] == TUNING_SEED and not METHODS[cell["method"]].optional for cell in first)
    assert real_model.run(setup, store, until=0.0)  # does nothing
    assert len(order) == len(store.finished)


@pytest.mark.weekly
def test_a_run_and_its_continuation(setup, monkeypatch):
    cell = experiment(setup.name, 8).cell("TOPR, balanced rows, 80%", {"learning_rate": 1e-4}, 0)
    found = work(cell, setup)
    assert found["rows"]["all"] == found["rows"]["balanced"] == 32 > found["rows"]["right"]
    assert found["steps"] == 4
    assert len(found["right_by_problem"]) == len(found["greedy_by_problem"]) == 6
    assert found["pass@1"] == pytest.approx(sum(found["right_by_problem"]) / 12)
    assert found[SCORE] == pytest.approx((found["greedy"] + found["pass@1"]) / 2)
    commands = []
    monkeypatch.setattr(real_model, "_topr", lambda setup, *words, **_: commands.append(words[0]))
    assert work(cell, setup) == found
    assert not commands


@pytest.mark.weekly
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.trl])
def test_trainers_of_trl_read_the_same_rows(method, setup):
    found = work(experiment(setup.name, 8).cell(method, {"learning_rate": 1e-4}, 0), setup)
    assert found["steps"] == 4
    assert len(found["right_by_problem"]) == 6
