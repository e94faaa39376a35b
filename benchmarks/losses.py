"""More losses for stored completions, beside those of `benchmarks/rivals.py`: DRO, and what was published after TOPR.

Each is a function of log π, log μ, the mask and R (`loss(logps_BT, mu_BT, mask_BT, rewards_B)`), and says how R is made
of the raw ±1. What is on-policy in its paper runs on stored rows here all the same, as the others do.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.rivals import ppo_loss, tapered
from benchmarks.rows import Rows
from topr_trl.loss import log_ratios, sequence_logps, weighted_loss

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Published(NamedTuple):
    """A loss, and R from the rows; None: R is the raw reward minus the baseline of the share."""

    loss: Loss
    rewards: Callable[[Rows], np.ndarray] | None = None


def powered(power: float) -> Loss:
    """TOPR with the truncated ratio to a power: w = min((π/μ)^τ, 1) where R < 0. J stays bounded for every τ > 0."""

    def loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
        ratio_B = power * log_ratios(logps_BT, mu_BT, mask_BT)
        weights_B = torch.where(rewards_B >= 0, torch.ones_like(ratio_B), ratio_B.clamp(max=0.0).exp())
        return weighted_loss(logps_BT, weights_B, rewards_B, mask_BT).mean()

    return loss


def oapl(beta: float) -> Loss:
    """OAPL (arXiv 2602.19362): regress β log π/μ on the optimal advantage r - V*(x), V* = β log E_μ[exp(r / β) | x]."""

    def loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
        log_ratio_B = sequence_logps(logps_BT, mask_BT) - sequence_logps(mu_BT, mask_BT)
        return (beta * log_ratio_B - rewards_B).square().mean()

    return loss


def optimal_advantages(beta: float) -> Callable[[Rows], np.ndarray]:
    """r - V*(x) of each row, with the mean over all completions of its problem."""

    def rewards(rows: Rows) -> np.ndarray:
        right = (1 + rows.group_means) / 2
        values = beta * np.log(right * np.exp(1 / beta) + (1 - right) * np.exp(-1 / beta))
        found: np.ndarray = rows.rewards - values
        return found

    return rewards


def dro(beta: float) -> Loss:
    """DRO (2405.19107), or k2: maximize A log π - β/2 log²(π/μ), with A the reward minus the mean of the problem."""

    def loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
        logps_B = sequence_logps(logps_BT, mask_BT)
        log_ratio_B = logps_B - sequence_logps(mu_BT, mask_BT)
        return (beta / 2 * log_ratio_B.square() - rewards_B * logps_B).mean()

    return loss


def centered(rows: Rows) -> np.ndarray:
    """R minus the mean of the problem."""
    return rows.rewards - rows.group_means


def tenth_of_positives(rows: Rows) -> np.ndarray:
    """W-REINFORCE (arXiv 2506.01347): a right answer counts a tenth of a wrong one."""
    return np.where(rows.rewards > 0, 0.1, -1.0)


def without_one_sided_groups(rows: Rows) -> np.ndarray:
    """Reinforce-Rej (arXiv 2504.11343): problems that are always or never solved are left out."""
    return np.where(np.abs(rows.group_means) < 1, rows.rewards, 0.0)


# The paper's bounds of the two limits, and the share of positives that they are moved for.
_LOW, _HIGH, _POSITIVES, _STRIDE = (0.6, 0.9), (1.2, 3.0), 0.5, 0.05


def bapo_loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
    """BAPO (arXiv 2510.18927): PPO per token, whose limits move in each batch until positives are half of the signal.

    R is GRPO's advantage. Of a token's terms π/μ |A| count those that the limits do not clip. The authors' published
    code differs: it raises the lower limit first, counts clipped tokens at the limit, and clips negatives above 3.
    """
    ratio_BT = (logps_BT - mu_BT).clamp(max=40.0).exp()
    signal_BT = ratio_BT.detach() * rewards_B[:, None]
    low, high = _LOW[0], _HIGH[0]
    while low < _LOW[1] or high < _HIGH[1]:
        live_BT = mask_BT & torch.where(rewards_B[:, None] > 0, ratio_BT < high, ratio_BT > low)
        positives, all_of_them = (signal_BT * live_BT).clamp(min=0).sum(), (signal_BT * live_BT).abs().sum()
        if positives >= _POSITIVES * all_of_them:
            break
        if high < _HIGH[1]:  # let more positives in first, then fewer negatives
            high += _STRIDE
        else:
            low += _STRIDE
    clipped_BT = ratio_BT.clamp(low, high) * rewards_B[:, None]
    surrogate_BT = torch.minimum(ratio_BT * rewards_B[:, None], clipped_BT)
    return -(surrogate_BT * mask_BT).sum() / mask_BT.sum()


LOSSES: dict[str, Published] = {
    "taper": Published(tapered("topr")),
    "no taper": Published(tapered("reinforce")),
    **{f"taper^{power:g}": Published(powered(power)) for power in (0.25, 0.5, 2.0, 4.0)},
    **{f"OAPL, β = {beta:g}": Published(oapl(beta), optimal_advantages(beta)) for beta in (0.3, 1.0)},
    **{f"DRO, β = {beta:g}": Published(dro(beta), centered) for beta in (0.03, 0.3)},
    "W-REINFORCE (on stored rows)": Published(tapered("reinforce"), tenth_of_positives),
    "Reinforce-Rej (ratio of the completion)": Published(ppo_loss, without_one_sided_groups),
    "BAPO": Published(bapo_loss, Rows.group_advantages),
}
