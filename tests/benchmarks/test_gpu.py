"""`make gpu` runs tiny on a CPU, and prints a table."""

import pytest

from benchmarks import gpu
from benchmarks.cells import Store


@pytest.mark.slow
def test_tiny_steps(capsys):
    gpu.main(["--tiny"])
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("| tiny ")]
    assert len(lines) == len(gpu.step_cells(tiny=True)) * len(gpu.BUILDS)
    for line in lines:
        seconds, tokens, mfu, memory = (cell.strip() for cell in line.split("|")[5:9])
        assert float(seconds.removesuffix(" s")) > 0
        assert float(tokens.replace(",", "")) > 0
        assert mfu.endswith("%")
        assert float(memory) >= 0


def test_what_is_missing_is_named_before_anything_runs():
    with pytest.raises(SystemExit, match=r"no GPU.*--tiny"):
        gpu.main([])
    with pytest.raises(SystemExit, match="--train and --test"):
        gpu.main(["--tiny", "--model_name_or_path", "model"])


def test_nothing_is_begun_when_time_is_up(tmp_path, capsys):
    store = Store(tmp_path, "gpu")
    assert not gpu.run_steps(store, True, 1.0, until=0.0)
    assert not store.finished
    assert "continues" in capsys.readouterr().out
