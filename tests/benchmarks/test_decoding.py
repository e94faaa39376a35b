"""The benchmarks' own decoding draws from the model's distribution."""

import pytest
import torch

from benchmarks import decoding
from benchmarks.rows import Rows
from benchmarks.setting import base_model, problems, tokenizer
from topr_trl import score_completions
from topr_trl.tasks import gsm8k


@pytest.mark.slow
@pytest.mark.parametrize("batch_rows", [512, 24])
def test_log_probabilities_are_those_of_the_model(monkeypatch, batch_rows):
    """Log-probabilities equal the model's. This includes finished rows that leave the batch, and a cache that grows."""
    monkeypatch.setattr(decoding, "ROWS", batch_rows)
    model, questions = base_model("main"), problems("main", 9, 5)
    model.train()
    found = decoding.draw(model, tokenizer("main"), questions, 8, 50, seed=3)
    assert model.training
    stop = tokenizer("main").eos_token_id
    assert found["problem_id"] == [p for p in questions["problem_id"] for _ in range(8)]
    assert found["sample_id"] == list(range(8)) * 9
    for ids, reason, logps in zip(found["completion_ids"], found["finish_reason"], found["sampler_logps"], strict=True):
        assert (ids[-1] == stop) == (reason == "stop")
        assert stop not in ids[:-1]
        assert len(ids) == len(logps) <= 50
        assert reason == "stop" or len(ids) == 50
    assert len(set(found["finish_reason"])) == 2
    rows = Rows.of(score_completions(found, gsm8k.judge))
    for drawn, computed in zip(rows.mu_logps, rows.scored_by(model).mu_logps, strict=True):
        torch.testing.assert_close(drawn, computed, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("large", [10_000, 2])
def test_tokens_come_with_their_probabilities(monkeypatch, large):
    monkeypatch.setattr(decoding, "_LARGE", large)
    model, questions = base_model("main"), problems("main", 2, 5)
    count = 4_000
    found = decoding.draw(model, tokenizer("main"), questions, count, 3, seed=1)
    for n, prompt in enumerate(questions["prompt"]):
        ids = torch.tensor([row[:1] for row in found["completion_ids"][n * count : (n + 1) * count]])
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer("main")(prompt)["input_ids"]])).logits[0, -1]
        expected = logits.softmax(-1)
        share = torch.bincount(ids[:, 0], minlength=len(expected)) / count
        assert ((share - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt() + 1 / count).all()
    again = decoding.draw(model, tokenizer("main"), questions, 4, 3, seed=1)
    assert again["completion_ids"] == decoding.draw(model, tokenizer("main"), questions, 4, 3, seed=1)["completion_ids"]


def test_a_seed_gives_the_completions_that_it_gave():
    """Paired comparisons need the same completions for a seed.

    If this test fails, increase `DRAWS` and rerun the paired comparisons.
    """
    found = decoding.draw(base_model("main"), tokenizer("main"), problems("main", 4, 7), 2, 80, seed=3)
    assert decoding.DRAWS == 3
    assert found["completion"][:3] == [
        " 3 * 3 = 9. 22 + 9 = 31. 31 + 18 = 49. The answer is 49.",
        " 3 * 3 = 16. 22 + 16 = 48. 48 + 18 = 66. The answer is 66.",
        " 15 + 9 = 24. 8 * 2 = 16. 24 + 16 = 49. The answer is 49.",
    ]
