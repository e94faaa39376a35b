"""What runs on a GPU runs tiny on a CPU; the figures are no test's business."""

from importlib.util import find_spec

import pytest

from benchmarks.cells import Store
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import learning, page, steps

TINY = steps.Machine(use_cpu=True, peak=1e12, flash=False)


@pytest.mark.slow
def test_all_parts_run_and_go_on_where_they_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(learning, "CACHE", tmp_path / "cache")
    store = Store(tmp_path / "results")
    gpu.run(["steps"], store, TINY, 0.0)
    assert not store.finished
    assert "Time is up" in capsys.readouterr().out
    gpu.run(list(gpu.PARTS), store, TINY, 60.0)
    kept = Store(tmp_path / "results")
    cells = [cell for part in gpu.PARTS.values() for cell in part.cells(tiny=True, store=kept)]
    assert not kept.unfinished(cells)
    text = page.text(kept)
    assert page.MISSING not in text
    assert "nan" not in text
    for variant in (*steps.PADDED, *steps.GENERATING):
        assert f"| {variant} |" in text
    for method in (learning.BASE, *learning.METHODS):
        assert f"| {method} |" in text
    capsys.readouterr()
    gpu.run(list(gpu.PARTS), kept, TINY, 60.0)
    assert not capsys.readouterr().out


def test_what_is_missing_or_too_large_is_said(tmp_path):
    store = Store(tmp_path)
    missing = [f"* {title}" for title in page._TITLES.values()]
    assert page.text(store).endswith("\n".join([f"**{page.MISSING}:**", "", *missing, ""]))
    for cell in steps.cells(tiny=False, store=store):
        store.add(cell, {"device": "a GPU", "failed": "out of memory"}, 1.0, "")
    text = page.text(store)
    assert text.count("\n* ") == 2 + (find_spec("deepspeed") is None)
    assert "| 8b | GSM8K | yes | all | out of memory |" in text
    assert "| 3b | GSM8K | no | out of memory | out of memory |" in text


def test_the_page_is_that_of_the_results():
    assert (page.ROOT / "docs" / "full_size.md").read_text() == page.text(Store(page.RESULTS))


def test_each_method_of_a_task_is_tuned_on_a_seed_apart(tmp_path):
    store = Store(tmp_path)
    first = learning.cells(False, store)
    assert {cell["seed"] for cell in first if cell["method"] != learning.BASE} == {learning.TUNING_SEED}
    for cell in first:
        is_best = cell.get("learning_rate") == 3e-5
        store.add(cell, {"tests": {"generated": {"pass@1": float(is_best)}}}, 1.0, "")
    new = store.unfinished(learning.cells(False, store))
    assert {cell["seed"] for cell in new} == set(range(learning.SEEDS))
    assert {cell["learning_rate"] for cell in new} == {3e-5}
    assert len(new) == 5 * len(learning.METHODS) * learning.SEEDS


def test_what_a_model_of_that_size_learns_from():
    """A careless author's solutions, and GSM8K's in words; of GSM8K no row that is trained on later."""
    rows = {}
    for task in (learning.MIXED, "sure-17"):
        draw, tokenizer = learning.to_learn_from(task, learning.SIZES["tiny"], TINY)
        rows[task] = [draw() for _ in range(300)]
        for prompt, text in rows[task][:20]:
            assert tokenizer.decode(tokenizer(prompt + text)["input_ids"]) == prompt + text
    unread = {row["question"] for row in TINY.gsm8k_rows("train").to_list()[-learning.SIZES["tiny"].held_back :]}
    read = {prompt.removeprefix("Question: ").removesuffix("\nAnswer:") for prompt, _ in rows[learning.MIXED]}
    assert not unread & read
    assert any("\nThe answer is" in text for _, text in rows[learning.MIXED])
    assert not any("\nThe answer is" in text for _, text in rows["sure-17"])
