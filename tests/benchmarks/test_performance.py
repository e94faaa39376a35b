"""The benchmarks of time and memory run and compare results with goals. The tests do not check speed."""

import json

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.performance import page
from benchmarks.performance.timing import in_turn, peak_memory, scoring_peak, scoring_seconds, seconds_per_step
from benchmarks.performance.work import GSM8K, SAMPLES, VARIANTS, WORDS, Case, candidates, even, offline_topr

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


@pytest.mark.weekly
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs(variant):
    assert seconds_per_step(VARIANTS[variant], case()) > 0


@pytest.mark.slow
def test_memory_and_scoring():
    weights = sum(p.numel() * p.element_size() for p in case().fresh_model().parameters())
    peaks = {name: peak_memory(VARIANTS[name], case()) for name in ("topr", "topr, frozen copy")}
    assert peaks["topr"] > 2 * weights  # weights and gradients
    assert peaks["topr, frozen copy"] - peaks["topr"] == pytest.approx(weights, rel=0.5)
    assert scoring_seconds(offline_topr(), case()) > 0
    assert set(scoring_peak(case(steps=1))) == {"log mu pass", "with logits"}


def test_variants_run_in_turn():
    order = []
    measures = {name: lambda: float(len(order)) for name in "abc"}
    assert in_turn(measures, 2, order.append) == {"a": [1.0, 6.0], "b": [2.0, 4.0], "c": [3.0, 5.0]}
    assert order == list("abcbca")


def test_a_goal_that_is_missed_is_bold():
    found = json.loads(page.RESULT.read_text())["results"]
    assert "neither sorted | ≤ 1.03× | 1.01×" in page.goals_table(found)
    found["gsm8k"]["topr, unsorted"] = [2 * seconds for seconds in found["gsm8k"]["sft"]]
    assert "neither sorted | ≤ 1.03× | **2.00× (2.00 to 2.00)** |" in page.goals_table(found)


def test_the_page_shows_the_results(tmp_path):
    """The page matches the stored results. If this test fails, run `python -m benchmarks.performance --report`."""
    content = json.loads(page.RESULT.read_text())
    assert page.write(content, tmp_path / "performance.md").read_text() == page.PAGE.read_text()
