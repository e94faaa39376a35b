"""`graph_sampling` samples like transformers. The CUDA graph needs a GPU and is not tested."""

import pytest
import torch

from benchmarks import graph_sampling
from topr_trl.generation import transformers as backend
from topr_trl.generation.settings import SamplingArguments
from topr_trl.tasks import arithmetic, gsm8k


@pytest.fixture
def problems():
    return gsm8k.prepare(arithmetic.arithmetic_dataset(5, seed=3), num_shots=0)


@pytest.mark.slow
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(model, tokenizer, problems, monkeypatch):
    args = SamplingArguments(num_generations=1, max_new_tokens=48, greedy=True, sampling_batch_size=5)
    stops = (" is",)
    wanted = backend.sample_completions(model, tokenizer, problems, args, stops)
    monkeypatch.setattr(backend, "_generate", graph_sampling.generate)
    found = backend.sample_completions(model, tokenizer, problems, args, stops)
    greedy = [(a, b) for a, b in zip(wanted, found, strict=True) if a["temperature"] == 0]
    assert any(a["finish_reason"] == "stop" for a, _ in greedy)
    for a, b in greedy:
        assert b["completion_ids"] == a["completion_ids"]
        assert b["finish_reason"] == a["finish_reason"]
        assert b["sampler_logps"] == pytest.approx(a["sampler_logps"], abs=1e-4)


def test_drawn_tokens_have_the_probabilities_of_the_model(model, tokenizer, problems, monkeypatch):
    monkeypatch.setattr(backend, "_generate", graph_sampling.generate)
    args = SamplingArguments(num_generations=400, max_new_tokens=1, top_k=3, sampling_batch_size=400)
    rows = backend.sample_completions(model, tokenizer, problems.select([0]), args)
    with torch.no_grad():
        logits = model(torch.tensor([rows[0]["prompt_ids"]])).logits[0, -1]
    allowed = logits.topk(3)
    expected = dict(zip(allowed.indices.tolist(), allowed.values.softmax(0).tolist(), strict=True))
    drawn = [row["completion_ids"][0] for row in rows]
    assert set(drawn) <= set(expected)
    for token, share in expected.items():
        assert drawn.count(token) / len(drawn) == pytest.approx(share, abs=0.1)
    for row in rows:
        assert row["sampler_logps"][0] == pytest.approx(
            float(logits.log_softmax(0)[row["completion_ids"][0]]), abs=1e-4
        )
