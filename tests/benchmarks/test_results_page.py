from pathlib import Path

import pytest

from benchmarks import real_model, results_page
from benchmarks.__main__ import open_store
from benchmarks.cells import Store
from benchmarks.claims import controls, temperatures
from benchmarks.setting import HERE, PROFILES

PAGE = HERE.parent / "docs" / "results.md"
FULL = PROFILES["full"]
RATE = 3e-4


def test_the_page_shows_the_results(tmp_path):
    store = open_store(HERE / "results", FULL)
    results_page.write(store, FULL, PAGE, tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == PAGE.read_text()


def decoded(greedy: float, sampled: float) -> dict[str, float]:
    values = {"greedy": greedy, "pass@1": sampled, "maj@8": sampled, "maj@32": sampled}
    return {**values, **{f"{name} error": 0.01 for name in values}}


@pytest.fixture
def store(tmp_path) -> Store:
    """A base model that is wrong in its mode, on which each method reaches 60%, and TOPR 80%, at the middle rate."""
    store = Store(tmp_path / "results")
    base = controls.BASES[0]
    sampled = {"0.3": decoded(0.1, 0.2), "0.7": decoded(0.1, 0.3), "1": decoded(0.1, 0.25)}
    for one in controls.BASES:
        store.add(temperatures.cell(one), sampled, 60.0, "")
    experiment = controls.experiment(store, base)
    for method in controls.METHODS:
        end = 0.8 if method == "TOPR (default)" else 0.6
        for rate in controls.ADAMW_RATES:
            found = decoded(end if rate == RATE else 0.3, end if rate == RATE else 0.3)
            store.add(experiment.cell(method, rate, controls.TUNING_SEED), found, 60.0, "")
        for seed in range(controls.SEEDS):
            store.add(experiment.cell(method, RATE, seed), decoded(end, end), 60.0, "")
    return store


def filled(store: Store, folder: Path) -> str:
    results_page.write(store, FULL, PAGE, folder / "page.md")
    return (folder / "page.md").read_text()


def test_tables_of_a_store(store, tmp_path):
    page = filled(store, tmp_path)
    base = controls.BASES[0]
    assert f"| {base} | wrong mode | 10.0 | 20.0 | **30.0** | 25.0 | 25.0 |" in page
    assert "| base model at its best | 30.0 (T = 0.7) |" in page
    assert "| TOPR (default) | **80.0 ± 1.2** |" in page  # two standard errors of 0.01, over the root of three seeds
    assert "| KTO | pass@1 | **+20.0 ± 1.6** |" in page
    assert "| KTO | greedy | **+20.0 ± 0.0** |" in page  # over seeds alone


def test_a_method_below_the_base_models_best_temperature_is_not_bold(store, tmp_path):
    better = {"0.3": decoded(0.1, 0.795), "0.7": decoded(0.1, 0.3), "1": decoded(0.1, 0.25)}
    store.add(temperatures.cell(controls.BASES[0]), better, 60.0, "")
    page = filled(store, tmp_path)
    assert "| base model at its best | 79.5 (T = 0.3) |" in page
    assert "| TOPR (default) | 80.0 ± 1.2 |" in page


def test_without_results_the_page_says_so(tmp_path):
    page = filled(Store(tmp_path / "nothing"), tmp_path)
    assert page.count(results_page._NOT_YET) == 6


def test_each_measure_has_its_own_rate(store):
    base, method = controls.BASES[0], "KTO"
    experiment = controls.experiment(store, base)
    # The highest rate is better for greedy answers alone.
    store.add(experiment.cell(method, 1e-3, controls.TUNING_SEED), decoded(0.9, 0.1), 60.0, "")
    assert experiment.best_rate(store, method, "pass@1") == 3e-4
    assert experiment.best_rate(store, method, "greedy") is None  # 3e-3 is not known yet
    wanted = controls.cells(FULL, store)
    assert experiment.cell(method, 3e-3, controls.TUNING_SEED) in wanted
    assert len({tuple(cell.items()) for cell in wanted}) == len(wanted)


# A pretrained model.


def ended(greedy, right, samples=4):
    return {
        "greedy_by_problem": greedy, "right_by_problem": right, "samples": samples, "greedy": sum(greedy) / len(greedy),
        "pass@1": sum(right) / len(right) / samples, "maj@4": 0.5, "pass@4": 0.75, "invalid": 0.1,
    }  # fmt: skip


@pytest.fixture
def real(tmp_path) -> Store:
    """Six test problems. Positives repeated solve one problem more than TOPR, greedy; no other method was run."""
    store = Store(tmp_path / "real")
    untrained = {
        "1": ended([1, 0, 0, 0, 0, 0], [8, 4, 1, 2, 0, 0], 8), "0.3": ended([1, 0, 0, 0, 0, 0], [4, 2, 0, 0, 0, 0])
    }  # fmt: skip
    store.add(real_model.untrained_cell(results_page.REAL), untrained, 60.0, "")
    experiment = real_model.experiment(results_page.REAL)
    for method, greedy in (("TOPR (default)", [1, 1, 0, 0, 0, 0]), ("positives repeated", [1, 1, 1, 0, 0, 0])):
        for rate in real_model.RATES:
            store.add(experiment.cell(method, rate, controls.TUNING_SEED), {real_model.SCORE: -rate}, 60.0, "")
        for seed in range(real_model.REPETITIONS):
            end = ended(greedy, [4, 4, 2, 2, 0, 0])
            store.add(experiment.cell(method, real_model.RATES[0], seed), end, 60.0, "")
    return store


def test_tables_of_a_pretrained_model(real):
    table = results_page.real_table(real)
    assert "| untrained, T = 1 | 16.7 | 31.2 | 50.0 | 75.0 | 10.0 |" in table
    # Over six problems, two of them right: 1.96 · sqrt(6/5 · 1/3 · 2/3 / 6).
    assert "| TOPR (default) | 33.3 ± 41.3 | 50.0 ± 35.8 | 50.0 ± 0.0 | 75.0 ± 0.0 | 10.0 ± 0.0 |" in table
    assert "c = 0" not in table
    assert "| positives repeated | -16.7 ± 32.7 | +0.0 ± 0.0 |" in results_page.real_differences(real)
    strata = results_page.real_strata(real)
    assert "0 of 8 (problems: 2) | 1 or 2 of 8 (problems: 2) | 3 or more of 8 (problems: 2)" in strata
    assert "| untrained | 0.0 | 18.8 | 75.0 |" in strata
    assert "| TOPR (default) | 0.0 ± 0.0 | 50.0 ± 0.0 | 100.0 ± 0.0 |" in strata


def test_a_pretrained_model_that_was_not_run(tmp_path):
    template = tmp_path / "template.md"
    template.write_text("<!-- table real -->\n<!-- end -->\n<!-- table real_strata -->\n<!-- end -->\n")
    nothing = Store(tmp_path / "nothing")
    results_page.write(nothing, FULL, template, tmp_path / "page.md", nothing)
    assert (tmp_path / "page.md").read_text().count(results_page._NOT_YET) == 2
