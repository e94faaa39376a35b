"""`benchmarks.gpu` measures steps of tiny models on a CPU, and prints a table."""

import pytest

from benchmarks import gpu
from benchmarks.cells import Store


@pytest.mark.weekly
def test_tiny_steps(capsys):
    gpu.main(["--tiny"])
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("| tiny ")]
    assert len(lines) == len(gpu.step_cells(tiny=True))
    for line in lines:
        sft, alone, mfu, shared, memory = (cell.strip() for cell in line.split("|")[4:9])
        assert all(float(seconds.partition(" s")[0]) > 0 for seconds in (sft, alone, shared))
        assert mfu.endswith("%")
        assert shared.endswith("×)")
        assert float(memory.split()[0]) >= 0


def test_a_shared_step_is_compared_with_one_that_is_not_shared(tmp_path):
    store = Store(tmp_path, "gpu")
    measured = {"seconds": 2.0, "mfu": 0.5, "peak_gib": 4.0}
    shared = measured | {"seconds": 0.5, "mfu": 0.9, "peak_gib": 3.0}
    small, large = gpu.step_cells(tiny=True)
    store.add(small, {"topr": shared, "topr, not shared": measured, "sft": measured | {"seconds": 3.0}}, 1.0, "")
    store.add(large, {"failed": "out of memory"}, 1.0, "")
    row, failed = gpu.table(store, tiny=True).splitlines()[2:]
    assert row == "| tiny | 16 + 8 | 4 | 3.00 s | 2.00 s | 50% | 0.50 s (4.00×) | 4.0 (3.0) |"
    assert "out of memory" in failed
    assert failed.count("|") == row.count("|")


def test_missing_settings_are_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no GPU.*--tiny"):
        gpu.main([])
    with pytest.raises(SystemExit, match="--train and --test"):
        gpu.main(["--tiny", "--model_name_or_path", "model"])


def test_nothing_is_begun_when_time_is_up(tmp_path, capsys):
    store = Store(tmp_path, "gpu")
    assert not gpu.run_steps(store, True, 1.0, until=0.0)
    assert not store.finished
    assert "continues" in capsys.readouterr().out
