"""Compute ratios π/μ that TOPR was compared with: per token, per prefix, and the geometric mean."""

import torch
from torch import Tensor

from topr_trl import PRESETS, topr_loss, truncated_weights
from topr_trl.limits import SEGMENT_TOKENS
from topr_trl.loss import reachable, sequence_logps


def log_ratios(policy_logps_BT: Tensor, mu_logps_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Return detached log π/μ, shape (B,), or (B, T) with a ratio per token.

    Args:
        policy_logps_BT: log π.
        mu_logps_BT: log μ.
        mask_BT: completion mask.
        level: `"sequence"`, `"segment"`, `"segment 16"` (segments of 16 tokens), `"token"`, `"prefix"` (the product
            over the completion up to the token) or `"geometric"` (the geometric mean over the tokens).
    """
    policy_logps_BT = policy_logps_BT.detach()
    if level == "geometric":
        log_ratio_B = sequence_logps(policy_logps_BT, mask_BT) - sequence_logps(mu_logps_BT, mask_BT)
        return log_ratio_B / mask_BT.sum(-1).clamp(min=1)
    if level in ("token", "prefix"):
        log_ratio_BT = (policy_logps_BT - mu_logps_BT).masked_fill(mask_BT == 0, 0.0)
        return log_ratio_BT.cumsum(1).masked_fill(mask_BT == 0, 0.0) if level == "prefix" else log_ratio_BT
    level, _, tokens = level.partition(" ")
    segment_tokens = int(tokens or SEGMENT_TOKENS)
    rewards_B = torch.ones(len(policy_logps_BT))  # The ratio does not depend on the rewards.
    return topr_loss(
        policy_logps_BT, mu_logps_BT, rewards_B, mask_BT, PRESETS["topr"], level, segment_tokens=segment_tokens
    ).log_ratios


def weighted_loss(policy_logps_BT: Tensor, weights: Tensor, rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the (B,) losses of weights of shape (B,) or (B, T), divided by the length."""
    if weights.dim() == 1:
        weights = weights[:, None].expand_as(policy_logps_BT)
    signal_BT = weights * rewards_B[:, None]
    return -sequence_logps(signal_BT * reachable(policy_logps_BT, signal_BT), mask_BT) / mask_BT.sum(-1).clamp(min=1)


def tapered_loss(
    policy_logps_BT: Tensor, mu_logps_BT: Tensor, rewards_B: Tensor, mask_BT: Tensor, preset: str, level: str
) -> Tensor:
    """Return the (B,) losses with the limits of a preset and a ratio of `log_ratios`."""
    log_ratio = log_ratios(policy_logps_BT, mu_logps_BT, mask_BT, level)
    weights = truncated_weights(log_ratio, rewards_B, PRESETS[preset])
    return weighted_loss(policy_logps_BT, weights, rewards_B, mask_BT)
