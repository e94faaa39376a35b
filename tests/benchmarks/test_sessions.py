"""Losses and weights of sessions match a plain loop, and sessions have mistakes in the intended places."""

import numpy as np
import pytest
import torch

from benchmarks.experiments.long_completions import ANYWHERE, FEW, NONE, Setting, drawing
from benchmarks.rows import Rows
from benchmarks.sessions import ANSWER, DPPO, POSITIVES, POWER, POWER_TOKENS, REPEATED, Sessions, token_weights
from benchmarks.setting import base_model, problems, sample
from topr_trl.limits import SEGMENT_TOKENS

CHOSEN = np.array([[0, 5, 9, 2, 7], [3, 3, 12, 20, 1], [20, 1, 7, 4, 4]])
REWARDS = np.array([-1.0, 1.0, -1.0])


@pytest.fixture(scope="module")
def pool():
    model = base_model("main")
    return Rows.of(sample(model, "main", problems("main", 6, 5), 4, 0)).scored_by(model)


@pytest.fixture(scope="module")
def moved():
    model = base_model("main").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)  # so that π differs from μ
    return model


def by_a_plain_loop(log_ratios, level):
    """Return the weights of the tokens of a session with reward -1. `log_ratios` has a tensor per answer."""
    flat = torch.cat(log_ratios)
    if level == ANSWER:
        return torch.cat([answer.sum().clamp(max=0).exp().expand(len(answer)) for answer in log_ratios])
    if level.startswith("segment"):
        parts = flat.split(16 if level == "segment 16" else SEGMENT_TOKENS)
        return torch.cat([part.sum().clamp(max=0).exp().expand(len(part)) for part in parts])
    if level == POWER:
        return (flat.sum() * min(1, POWER_TOKENS / len(flat))).clamp(max=0).exp().expand(len(flat))
    if level == "prefix":
        return flat.cumsum(0).clamp(max=0).exp()
    return (
        {"sequence": flat.sum().expand(len(flat)), "token": flat, "geometric": flat.mean().expand(len(flat))}[level]
        .clamp(max=0)
        .exp()
    )


@pytest.mark.parametrize("level", ["sequence", "segment", "segment 16", "prefix", "token", "geometric", ANSWER, POWER])
def test_loss_and_weights_are_those_of_a_plain_loop(pool, moved, level):
    sessions = Sessions(pool, CHOSEN, REWARDS)
    now, losses = pool.scored_by(moved).mu_logps, []
    for chosen, reward in zip(CHOSEN, REWARDS, strict=True):
        logps = [now[i] for i in chosen]
        weights = by_a_plain_loop([now[i] - pool.mu_logps[i] for i in chosen], level) if reward < 0 else 1.0
        losses.append(-reward * (weights * torch.cat(logps)).mean())
    torch.testing.assert_close(sessions.loss(moved, level), torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)
    assert sum(map(len, (pool.responses[i] for i in CHOSEN[0]))) > POWER_TOKENS  # Otherwise, the power would be 1.
    quarters = sessions.weights_by_quarter(moved, level)
    assert all(0 < weight <= 1 for weight in quarters)
    if level == "prefix":
        assert quarters[0] > quarters[3]


def test_weights_of_dppo():
    mu_ST = torch.tensor([[0.5, 0.5, 0.1, 0.1]] * 2).log()
    policy_ST = torch.tensor([[0.8, 0.6, 0.01, 0.35], [0.2, 0.45, 0.01, 0.35]]).log()
    weights = token_weights(torch.tensor([1.0, -2.0]), policy_ST, mu_ST, torch.ones(2, 4), torch.zeros(2, 4), DPPO)
    expected = [[0.0, 1.2, 0.1, 0.0], [0.0, 0.9, 0.1, 3.5]]  # 0 if π - μ exceeds 0.2 in the direction of the push
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_positives_only_has_no_negatives(pool, moved):
    assert Sessions(pool, CHOSEN, REWARDS).weights_by_quarter(moved, POSITIVES) == [0.0] * 4


@pytest.mark.parametrize("mistakes", [ANYWHERE, "early", "late", FEW, NONE])
def test_mistakes_are_where_they_should_be(pool, mistakes):
    drawn = drawing(pool, np.arange(len(pool)), Setting(16, mistakes), np.random.default_rng(0))(40)
    right_SP = drawn.rows.rewards.reshape(40, 16) > 0
    good, bad = (right_SP[drawn.rewards_S.numpy() == reward] for reward in (1, -1))
    assert good.mean() == pytest.approx({FEW: 0.8, NONE: 1.0}.get(mistakes, 0.5), abs=0.1)
    first, second = bad[:, :8].mean(), bad[:, 8:].mean()
    expected = {ANYWHERE: (0.05, 0.05), "early": (0.0, 0.5), "late": (0.5, 0.0)}.get(mistakes, (0.5, 0.5))
    assert (first, second) == pytest.approx(expected, abs=0.1)


def test_positives_repeated_are_good_sessions_alone(pool, moved):
    drawn = drawing(pool, np.arange(len(pool)), Setting(4), np.random.default_rng(0), REPEATED)(6)
    assert drawn.rewards_S.tolist() == [1.0] * 6
    torch.testing.assert_close(drawn.loss(moved, REPEATED), drawn.loss(moved))


def test_a_session_of_one_answer_is_right_or_wrong(pool):
    drawn = drawing(pool, np.arange(len(pool)), Setting(1), np.random.default_rng(0))(10)
    assert drawn.rows.rewards.tolist() == drawn.rewards_S.tolist()
