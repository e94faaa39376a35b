"""Experiments plan cells, try learning rates, and report each method at its best rate."""

import numpy as np
import pytest

from benchmarks.__main__ import published
from benchmarks.cells import Store
from benchmarks.experiment import TUNING_SEED, Experiment, error, next_rate, rates, tune, value
from benchmarks.experiments import ALL, compared, online, planned
from benchmarks.experiments.online import needed
from benchmarks.setting import PROFILES
from benchmarks.statistics import over_seeds

FULL = PROFILES["full"]


def experiment(**more):
    settings = {"choices": rates(1e-4, 3e-4), "seeds": (0, 1), "measures": ("pass@1",), **more}
    return Experiment("some", {"a": {"method": "a"}, "b": {"method": "b"}}, **settings)


def run(one, store, end):
    """Run all cells, including cells that are planned from earlier results."""
    while todo := store.unfinished(one.cells(store)):
        for cell in todo:
            store.add(cell, end(cell), 1.0, "")


def test_a_method_is_reported_at_the_rate_that_was_best_when_tuned(tmp_path):
    one, store = experiment(fields={"base": "x"}, reported_fields={"draws": 3}), Store(tmp_path)
    tuning = one.cells(store)
    assert [cell["seed"] for cell in tuning] == [TUNING_SEED] * 4
    assert not any("draws" in cell for cell in tuning)
    run(one, store, lambda cell: {"pass@1": cell["learning_rate"] * (1 if cell["method"] == "a" else -1), "error": 0.1})
    assert one.best(store, "a") == {"learning_rate": 3e-4}
    assert one.best(store, "b") == {"learning_rate": 1e-4}
    assert one.measured(store, "a") == {0: (3e-4, 0.1), 1: (3e-4, 0.1)}
    assert one.cell("a", {"learning_rate": 3e-4}, 1) == {
        "claim": "some", "base": "x", "method": "a", "learning_rate": 3e-4, "seed": 1, "draws": 3,
    }  # fmt: skip
    assert one.is_finished(store)


def test_each_measure_has_its_own_choice(tmp_path):
    one, store = experiment(measures=("greedy", "pass@1")), Store(tmp_path)
    run(one, store, lambda cell: {"greedy": cell["learning_rate"], "pass@1": -cell["learning_rate"]})
    assert [one.best(store, "a", measure)["learning_rate"] for measure in one.measures] == [3e-4, 1e-4]


def test_a_measure_can_choose_a_rate_that_another_measure_tried(tmp_path):
    """Greedy accuracy has a local optimum at 1e-4. The search by pass@1 goes on to lower rates."""
    one, store = experiment(measures=("greedy", "pass@1"), further=2), Store(tmp_path)
    greedy = {3e-4: 0.2, 1e-4: 0.4, 3e-5: 0.3, 1e-5: 0.8}
    run(one, store, lambda cell: {"greedy": greedy[cell["learning_rate"]], "pass@1": -cell["learning_rate"]})
    assert one.best(store, "a", "greedy") == {"learning_rate": 1e-5}


def test_more_seeds_do_not_narrow_the_error_over_problems(tmp_path):
    one, store = experiment(measures=("greedy", "pass@1")), Store(tmp_path)
    run(one, store, lambda cell: {"greedy": 0.5, "greedy error": 0.1, "pass@1": 0.5, "pass@1 error": 0.1})
    assert over_seeds(one.measured(store, "a", "greedy")).half == pytest.approx(2 * 0.1)
    assert over_seeds(one.measured(store, "a", "pass@1")).half == pytest.approx(2 * 0.1 / 2**0.5)


def test_finalists_are_run_with_all_seeds_and_the_higher_end_counts(tmp_path):
    one, store = experiment(finalists={"a": 2}), Store(tmp_path)

    def end(cell):
        tuned = cell["seed"] == TUNING_SEED
        return {"pass@1": cell["learning_rate"] if tuned else -cell["learning_rate"]}

    run(one, store, end)
    assert one.best(store, "a") == {"learning_rate": 1e-4}
    assert one.best(store, "b") == {"learning_rate": 3e-4}
    level = experiment(level=1.0)
    assert level.best(store, "b") is None  # Both rates are finalists, and one has not been run with all seeds.


def test_rates_of_another_experiment(tmp_path):
    store = Store(tmp_path)
    one = experiment(tuned=lambda store, method, measure: {"learning_rate": 1e-2})
    assert {(cell["learning_rate"], cell["seed"]) for cell in one.cells(store)} == {(1e-2, 0), (1e-2, 1)}


def test_values_and_errors_of_a_result():
    result = {"curve": [{"pass@1": 0.1}, {"pass@1": 0.2, "error": 0.01}], "maj": {"32": 0.5}, "greedy": 1.0}
    assert value(result, "curve/-1/pass@1") == 0.2
    assert error(result, "curve/-1/pass@1") == 0.01
    assert value(result, "maj/32") == 0.5
    assert np.isnan(error(result, "maj/32"))
    assert error({"greedy": 1.0, "greedy error": 0.1}, "greedy") == 0.1
    assert error({"maj@8": 0.5, "maj@8 error": 0.2}, "maj@8") == 0.2
    assert np.isnan(error({"failed": True, "curve": []}, "end/pass@32"))
    assert value({**result, "failed": True}, "curve/-1/pass@1") == 0


@pytest.mark.parametrize(("peak", "tried"), [(3e-3, [3e-4, 1e-3, 3e-3, 1e-2]), (3e-5, [1e-4, 3e-5, 1e-5]), (1.0, None)])
def test_rates_are_tried_until_the_best_lies_between_others(peak, tried):
    """At most three further rates are tried, all with the best number of rows per step."""
    choices = [{**choice, "batch_rows": batch} for batch in (32, 8) for choice in rates(1e-4, 3e-4)]

    def end(choice):
        return -abs(np.log(choice["learning_rate"] / peak)) + 0.1 * (choice["batch_rows"] == 8)

    found, best = tune(choices, 3, end, untrained=-99)
    assert all(one["batch_rows"] == 8 for one in found[4:])
    of_eight = {one["learning_rate"] for one in found if one["batch_rows"] == 8}
    assert len(of_eight) == 5 if tried is None else set(tried) <= of_eight
    if tried:
        assert best == {"learning_rate": peak, "batch_rows": 8}


def test_lower_rates_are_tried_where_all_harm():
    ends = {1e-4: 0.0, 3e-4: 0.01, 1e-3: 0.0, 3e-5: 0.05, 1e-5: 0.2, 3e-6: 0.15}
    tried, best = tune(rates(1e-4, 3e-4, 1e-3), 3, lambda choice: ends[choice["learning_rate"]], untrained=0.1)
    assert [one["learning_rate"] for one in tried[3:]] == [3e-5, 1e-5, 3e-6]
    assert best == {"learning_rate": 1e-5}
    assert tune(rates(1e-4), 3, lambda choice: None) == (rates(1e-4), None)
    assert [next_rate(3e-5, up) for up in (True, False)] == [1e-4, 1e-5]


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("rivals", "long_completions", "wrong_answers")])
def test_published_results_are_those_of_the_experiments(name):
    """All planned cells are published, so none would be run again. The excluded experiments are not finished."""
    store = published()
    cells = planned(name, FULL, store)
    assert cells
    assert not store.unfinished(cells)
    assert all(one.is_finished(store) for one in compared(name, store))


def test_rivals_are_tuned_where_they_are_compared():
    cells = planned("rivals", FULL, published())
    assert {cell["epochs"] for cell in cells} == {4}
    assert TUNING_SEED in {cell["seed"] for cell in cells}


def test_completions_until_an_accuracy():
    tested = np.array([0, 100, 200])
    assert needed(tested, np.array([0.1, 0.3, 0.5]), 0.4) == pytest.approx(150)
    assert needed(tested, np.array([0.4, 0.5, 0.5]), 0.4) == 0
    assert needed(tested, np.array([0.1, 0.3, 0.3]), 0.4) == np.inf


def test_the_share_of_completions_counts_those_that_the_target_needs_itself(monkeypatch):
    """The target reaches its final accuracy after 200 of 400 completions, and the method after 150."""
    curves = {"ours": [0.1, 0.3, 0.5, 0.5, 0.5], "theirs": [0.1, 0.2, 0.4, 0.4, 0.4]}
    tested = np.array([0, 100, 200, 300, 400])
    monkeypatch.setattr(online, "find", lambda store, base, method, *_: (tested, np.array([curves[method]] * 2)))
    assert online.share_needed(None, "main", "ours", "theirs") == pytest.approx([0.75] * 3)
