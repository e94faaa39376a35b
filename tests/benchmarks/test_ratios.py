"""Tests of the ratios that TOPR is compared with."""

import math

import pytest
import torch

from benchmarks.ratios import log_ratios, tapered_loss
from topr_trl import PRESETS, topr_loss, truncated_weights

# Completions of one and two tokens. log π - log μ is -2 in the first, and -1 and -3 in the second.
POLICY = torch.tensor([[-3.0, 9.0], [-2.0, -4.0]])
MU, MASK = torch.full((2, 2), -1.0), torch.tensor([[1, 0], [1, 1]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("sequence", [-2.0, -4.0]),
        ("geometric", [-2.0, -2.0]),
        ("token", [[-2.0, 0.0], [-1.0, -3.0]]),
        ("prefix", [[-2.0, 0.0], [-1.0, -4.0]]),
        ("segment 1", [[-2.0, 0.0], [-1.0, -3.0]]),
        ("segment", [[-2.0, 0.0], [-4.0, -4.0]]),
    ],
)
def test_ratios_by_hand(level, expected):
    assert log_ratios(POLICY, MU, MASK, level).tolist() == expected


@pytest.mark.parametrize("level", ["sequence", "segment"])
def test_the_loss_is_that_of_topr(level):
    rewards = torch.tensor([1.0, -2.0])
    expected = topr_loss(POLICY, MU, rewards, MASK, PRESETS["tis"], level).losses_B
    torch.testing.assert_close(tapered_loss(POLICY, MU, rewards, MASK, "tis", level), expected)


def test_ratios_of_other_systems_hardly_taper():
    # 500 tokens with a mean log-ratio of -0.1.
    policy, mu = torch.full((1, 500), -1.1, dtype=torch.float64), torch.full((1, 500), -1.0, dtype=torch.float64)
    mask, negative = torch.ones(1, 500), torch.tensor([-1.0])
    weight = {
        level: truncated_weights(log_ratios(policy, mu, mask, level), negative, PRESETS["topr"]).mean().item()
        for level in ("sequence", "geometric", "token")
    }
    assert weight["sequence"] == pytest.approx(math.exp(-50))
    assert weight["geometric"] == pytest.approx(math.exp(-0.1))
    assert weight["token"] == pytest.approx(math.exp(-0.1))
