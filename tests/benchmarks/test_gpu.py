"""`benchmarks.gpu` measures steps of tiny models on a CPU, and prints a table."""

import time
from dataclasses import replace

import pytest

from benchmarks import gpu, pretrained, setting
from benchmarks.cells import Store
from benchmarks.experiment import TUNING_SEED, rates
from benchmarks.experiments import wrong_answers

TINY = replace(setting.PROFILES["quick"], problems=4, test_problems=2)


def one_run():
    """Return a comparison of one method at one rate with one seed."""
    of_main = wrong_answers.of_base("main")
    method = {wrong_answers.DEFAULT: {"recipe": wrong_answers.DEFAULT, "iterations": 2}}
    return replace(of_main, methods=method, choices=rates(1e-4), seeds=(0,), further=0)


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


def test_a_missing_gpu_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no GPU.*--tiny"):
        gpu.main([])


def test_nothing_is_begun_when_time_is_up(tmp_path):
    store = Store(tmp_path, "gpu")
    assert not gpu.run_steps(store, True, 1.0, until=0.0)
    assert not gpu.run_iterations([one_run()], TINY, store, 1, until=0.0, device="cpu")
    assert not store.finished


@pytest.mark.weekly
def test_iterations_run_in_the_pool(tmp_path):
    store = Store(tmp_path, "gpu")
    assert gpu.run_iterations([one_run()], TINY, store, 1, until=time.monotonic() + 600, device="cpu")
    assert [entry["cell"]["seed"] for entry in store.finished.values()] == [TUNING_SEED, 0]


def test_experiments_without_their_models_are_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(setting, "CACHE", tmp_path)
    assert not gpu._experiments(1, 0.0)
    assert "left out" in capsys.readouterr().out
    for base in pretrained.BASES:
        (tmp_path / base).mkdir()
        (tmp_path / base / "model.safetensors").touch()
    monkeypatch.setattr(wrong_answers, "model_hash", lambda base: "hash")
    found = [run.func.__name__ for run in gpu._experiments(1, 0.0)]
    assert found == ["run_iterations"]  # There are no problems of GSM8K.
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").touch()
    order = [run.func.__name__ for run in gpu._experiments(1, 0.0)]
    assert order == ["run_iterations", "run_rivals", "run_iterations"]
