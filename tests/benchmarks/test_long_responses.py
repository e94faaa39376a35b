"""Sessions of many answers have one ratio and one length."""

import numpy as np
import pytest
import torch

from benchmarks.experiments.long_responses import as_the_sampler_says
from benchmarks.rows import Rows, response_logps
from benchmarks.sessions import Sessions
from benchmarks.setting import base_model, problems, sample


@pytest.fixture(scope="module")
def pool():
    model = base_model("main")
    return Rows.of(sample(model, "main", problems("main", 6, 5), 4, 0))


def own_logps(model, prompt, response):
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


@pytest.mark.parametrize("source", ["trainer", "top-k"])
def test_a_session_has_one_ratio_and_one_length(pool, source):
    """The loss and its gradient equal those of a plain loop over the sessions."""
    chosen = np.array([[0, 5, 9], [3, 3, 12], [20, 1, 7]])
    sessions, model = Sessions(as_the_sampler_says(pool, source), chosen), base_model("main")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)  # so that π differs from μ
    model.eval()
    found = sessions.loss(model)
    found.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    losses = []
    for n, rows in enumerate(chosen):
        own = torch.cat([own_logps(model, pool.prompts[i], pool.responses[i]) for i in rows])
        mu = torch.cat([sessions.rows.mu_logps[3 * n + k] for k in range(3)])
        reward = 1.0 if (pool.rewards[rows] > 0).mean() > (pool.rewards > 0).mean() else -1.0
        weight = 1.0 if reward > 0 else (own - mu).sum().detach().clamp(max=0).exp()
        losses.append(-weight * reward * own.sum() / len(own))
    expected = torch.stack(losses).mean()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, model.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5)
    assert set(sessions.rewards_S.tolist()) == {1.0, -1.0}  # Otherwise, the test would miss one of the rewards.


def test_log_probabilities_of_what_top_k_leaves(pool):
    model = base_model("main").eval()
    with torch.no_grad():
        logps, mask = response_logps(model, pool.prompts[:1], pool.responses[:1], top_k=2)
        prompt, response = pool.prompts[0], pool.responses[0]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    for found, row, token in zip(logps[0][mask[0]], logits, response, strict=True):
        kept = row.topk(2).indices.tolist()
        expected = row[kept].log_softmax(-1)[kept.index(token)] if token in kept else row.log_softmax(-1)[token]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
