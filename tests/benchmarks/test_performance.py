"""The benchmarks of time and memory run, and judge what they measure; what they measure is no test's business."""

import json

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.performance import data, page
from benchmarks.performance.timing import in_turn, peak_memory, scoring_peak, scoring_seconds, seconds_per_step
from benchmarks.performance.work import GSM8K, SAMPLES, VARIANTS, WORDS, Case, candidates, even, offline_topr
from topr_trl.data.tables import load_rows

MODEL = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1, vocab_size=1_024, pad_token_id=1, eos_token_id=0)  # fmt: skip


def case(steps=2, **changes):
    rows = candidates(steps * 16, even(8), WORDS, **changes)
    return Case(MODEL, rows, 8, 2, {"use_cpu": True, "bf16": False})


def test_candidates_have_gsm8ks_lengths():
    rows = candidates(4_000, GSM8K, WORDS)
    responses = np.log([len(row["completion"]) for row in rows])
    assert responses.mean() == pytest.approx(4.14, abs=0.03)
    assert responses.std() == pytest.approx(0.45, abs=0.02)
    assert sum(row["reward"] for row in rows) == pytest.approx(0, abs=20)
    assert len({tuple(row["prompt"]) for row in rows}) == 4_000 / SAMPLES


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs(variant):
    assert 0 < seconds_per_step(VARIANTS[variant], case()) < 60


def test_memory_and_scoring():
    weights = sum(p.numel() * p.element_size() for p in case().fresh_model().parameters())
    assert peak_memory(VARIANTS["topr"], case()) > 2 * weights  # and gradients
    with_copy, without = (peak_memory(VARIANTS[f"topr{more}"], case()) for more in (", frozen copy", ""))
    assert with_copy - without == pytest.approx(weights, rel=0.5)
    assert scoring_seconds(offline_topr(), case()) > 0
    assert set(scoring_peak(case(steps=1))) == {"log mu pass", "with logits"}


def test_variants_run_in_turn():
    order = []
    measures = {name: lambda: float(len(order)) for name in "abc"}
    assert in_turn(measures, 2, order.append) == {"a": [1.0, 6.0], "b": [2.0, 4.0], "c": [3.0, 5.0]}
    assert order == list("abcbca")


@pytest.mark.slow
def test_rows_on_disk(tmp_path):
    count = data.write_candidates(tmp_path / "rows", 65)
    rows = load_rows(tmp_path / "rows", tmp_path / "cache")
    assert len(rows) == count == 65 * data.SAMPLES
    assert len(rows[0]["prompt_ids"]) == data.PROMPT
    seconds, memory = data.curate(tmp_path / "rows", tmp_path / "curated")
    assert seconds > 0
    assert memory > 1e6


def test_goals_and_page(tmp_path):
    content = json.loads((page.RESULT).read_text())
    written = page.write(content, tmp_path)
    text = written.read_text()
    for line in page.goals(content):
        assert line.met or f"*{line.measure}*: {line.reason}" in text, f"{line.measure}: the page does not say why"
    # A goal that is missed is shown as missed.
    content["results"]["gsm8k"]["topr, unsorted"] = [2 * t for t in content["results"]["gsm8k"]["sft"]]
    missed = {line.measure: line.reason for line in page.goals(content) if not line.met}
    assert missed["step, offline TOPR / SFT, same rows, neither sorted (same tokens)"] == ""
    assert "(same tokens) | ≤ 1.03× | **2.00×" in page.write(content, tmp_path).read_text()
    # "Equal" is said where the rounds lie on both sides of the goal, and only there.
    times = content["results"]["generating"]
    measure = "the same, generation included"
    for worst, reason in ((0.9, "Equal within the range of the rounds."), (1.1, "")):
        times["online topr, generating"] = [
            r * t for r, t in zip((worst, 1.2, 1.2), times["grpo, generating"], strict=True)
        ]
        assert [line.reason for line in page.goals(content) if line.measure == measure] == [reason]


def test_the_page_is_that_of_the_results(tmp_path):
    content = json.loads((page.RESULT).read_text())
    assert page.write(content, tmp_path).read_text() == (page.ROOT / "docs" / "performance.md").read_text()


def test_the_grid_of_shared_prompts_is_shown_if_it_was_run():
    times = {"topr": 1.0, "topr, not shared": 2.0, "sft": 3.0}
    found = {"300 + 85, 8": {name: {"seconds": s, "bytes": 100 * s} for name, s in times.items()}}
    assert page._grid(None) == ""
    # 8 · 385 tokens instead of 300 + 8 · 85.
    assert page._grid(found).endswith("| 300 | 85 | 8 | 3.1× | 3.00× | 2.00× | 0.50× |")
