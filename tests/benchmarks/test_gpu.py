"""What runs on a GPU runs tiny on a CPU; the figures are no test's business."""

import pytest

from benchmarks.cells import Store
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import page, steps


@pytest.mark.slow
def test_all_parts_run_and_go_on_where_they_stopped(tmp_path, capsys):
    store = Store(tmp_path)
    gpu.run(["steps"], store, 1e12, True, 0.0)
    assert not store.finished
    assert "Time is up" in capsys.readouterr().out
    gpu.run(list(gpu.PARTS), store, 1e12, True, 60.0)
    kept = Store(tmp_path)
    cells = [cell for part in gpu.PARTS.values() for cell in part.cells(tiny=True)]
    assert not kept.unfinished(cells)
    text = page.text(kept)
    assert page.MISSING not in text
    assert "nan" not in text
    for variant in (*steps.PADDED, *steps.GENERATING):
        assert f"| {variant} |" in text
    capsys.readouterr()
    gpu.run(list(gpu.PARTS), kept, 1e12, True, 60.0)
    assert not capsys.readouterr().out


def test_what_is_missing_or_too_large_is_said(tmp_path):
    store = Store(tmp_path)
    assert page.text(store).count(page.MISSING) == len(page._TITLES)
    for cell in steps.cells(tiny=False):
        store.add(cell, {"device": "a GPU", "failed": "out of memory"}, 1.0, "")
    text = page.text(store)
    assert text.count(page.MISSING) == 1
    assert "| 8b | GSM8K | yes | all | out of memory |" in text
    assert "| 3b | GSM8K | no | out of memory | out of memory |" in text


def test_the_page_is_that_of_the_results():
    assert (page.ROOT / "docs" / "full_size.md").read_text() == page.text(Store(page.RESULTS))
