"""Results of cells survive a killed run, and a later run only runs the missing cells."""

import json

import pytest

from benchmarks.cells import Store, run


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
    run(cells, _echo, store, 2, "command", "test")
    assert [store.get(cell) for cell in cells] == [{"seed": 0}, {"seed": "kept"}, {"seed": 2}]


def _echo(cell):
    return {"seed": cell["seed"]}
