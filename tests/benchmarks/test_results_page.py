from pathlib import Path

import pytest

from benchmarks import results_page
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
