"""Results of cells survive a killed run, and a later run only runs the missing cells."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.cells import Store, finish, run


def test_store_survives_a_killed_run(tmp_path):
    store = Store(tmp_path)
    cell, other = {"claim": "a", "seed": 0}, {"claim": "a", "seed": 1}
    store.add(cell, {"x": 1.5}, 2.0, "command")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"cell": {"claim": "a", "se')  # killed while writing
    again = Store(tmp_path)
    assert again.get(cell) == {"x": 1.5}
    assert again.get(other) is None
    again.add(other, {"x": 2.5}, 2.0, "command")
    assert Store(tmp_path).get(other) == {"x": 2.5}
    assert {"command", "commit", "date", "machine", "versions", "seconds"} <= set(
        json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    )


@pytest.mark.slow
@pytest.mark.processes
def test_only_unfinished_cells_are_run(tmp_path):
    store = Store(tmp_path)
    cells = [{"claim": "a", "seed": seed} for seed in range(3)]
    store.add(cells[1], {"seed": "kept"}, 0.0, "")
    assert run(lambda: cells, _echo, store, 2, "command", "test")
    assert [store.get(cell) for cell in cells] == [{"seed": 0}, {"seed": "kept"}, {"seed": 2}]


def test_no_cell_starts_after_the_time_limit_and_results_of_running_ones_are_kept(tmp_path):
    store, until = Store(tmp_path), time.monotonic() + 0.5
    cells = [{"claim": "a", "seed": seed} for seed in range(9)]

    def work(cell):
        while time.monotonic() <= until:
            time.sleep(0.01)
        return {}

    with ThreadPoolExecutor(2) as pool:
        assert not finish(lambda: cells, work, store, pool, 2, "command", "test", until)
    assert len(store.finished) == 2


def test_results_determine_further_cells(tmp_path):
    store = Store(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        assert finish(lambda: [{"claim": "a", "seed": n} for n in range(min(len(store.finished), 3) + 1)], _echo, store,
                      pool, 2, "command", "test")  # fmt: skip
    assert [entry["cell"]["seed"] for entry in store.finished.values()] == [0, 1, 2, 3]


def _echo(cell):
    return {"seed": cell["seed"]}
