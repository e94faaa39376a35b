"""Compute the loss of TOPR (arXiv 2503.14286, Algorithm 1) and the objective that TOPR maximizes (Eq. 11).

All functions are pure. All trainers compute their weights with `topr_loss`. Letters at the end of a name give
the shape of a tensor: B rows (completions), T tokens of a completion. π is the policy in training. μ is the policy that
wrote the completions. R is the reward after the baseline is subtracted.
"""

from math import exp, inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from topr_trl.limits import RATIO_LEVELS, SEGMENT_TOKENS, TruncationLimits

# Weights are at most e^40. This bound has an effect only if an upper limit is larger, for example infinite. It keeps
# the squared gradient norm finite in float32, so that gradient clipping still works.
MAX_LOG_WEIGHT = 40.0


def _check_shape(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise a ValueError if a tensor has none of the allowed shapes, because PyTorch could broadcast the tensor."""
    if tuple(tensor.shape) not in allowed:
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, allowed))}, not {tuple(tensor.shape)}.")


def sequence_logps(logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute the log-probability of each completion, `log π(y|x) = Σ_t log π(y_t|x, y_<t)`.

    Args:
        logps_BT (`torch.Tensor`):
            Log-probabilities of the completion tokens, shape (B, T), in nats, any float dtype. Padding may hold any
            value.
        mask_BT (`torch.Tensor`):
            Mask, shape (B, T), non-zero where a token belongs to the completion.

    Returns:
        `torch.Tensor`: log-probabilities, shape (B,), in float32 or wider.
    """
    wide = logps_BT.to(torch.promote_types(logps_BT.dtype, torch.float32))
    return wide.masked_fill(mask_BT == 0, 0.0).sum(-1)


def _log_ratios(
    policy_logps_BT: Tensor, policy_logps_B: Tensor, mu_logps: Tensor, mask_BT: Tensor, segment_tokens: int | None
) -> Tensor:
    """Compute the detached log-ratios `log π/μ`, shape (B,), or (B, T) if `segment_tokens` is given.

    With segments, each token has the log-ratio of its segment, and positions with mask 0 have 0. A log-ratio is NaN if
    log μ is unknown.
    """
    # Stop-gradient of Algorithm 1: no gradient flows through the weight.
    policy_logps_BT, policy_logps_B = policy_logps_BT.detach(), policy_logps_B.detach()
    if segment_tokens is None:
        mu_B = sequence_logps(mu_logps, mask_BT) if mu_logps.dim() == 2 else mu_logps
        return policy_logps_B - _known(mu_B)
    wide = policy_logps_B.dtype
    by_token_BT = (policy_logps_BT.to(wide) - _known(mu_logps.to(wide))).masked_fill(mask_BT == 0, 0.0)
    return _segment_sums(by_token_BT, mask_BT, segment_tokens).masked_fill(mask_BT == 0, 0.0)


def _known(mu_logps: Tensor) -> Tensor:
    """Replace infinite values by NaN.

    μ cannot have written a completion of probability 0. With -inf, the ratio would be clipped to its upper limit, as if
    log μ were known.
    """
    return mu_logps.masked_fill(mu_logps.isinf(), torch.nan)


def _segment_sums(values_BT: Tensor, mask_BT: Tensor, segment_tokens: int) -> Tensor:
    """Return for each token the sum of the values over its segment. Values must be 0 where the mask is 0."""
    segment_BT = ((mask_BT != 0).cumsum(1) - 1).clamp(min=0) // segment_tokens
    sums_BK = torch.zeros_like(values_BT).scatter_add(1, segment_BT, values_BT)
    return sums_BK.gather(1, segment_BT)


def truncated_weights(log_ratio: Tensor, rewards_B: Tensor, limits: TruncationLimits) -> Tensor:
    """Compute the weights `w = clip(π/μ, a, b)`, with (a+, b+) where R >= 0 and (a-, b-) where R < 0 (Eq. 7).

    The ratio is clipped in log space, so a log-ratio of ±1000 does not overflow. Weights never exceed e^40. If both
    limits of a row have the same value, its weight is that value, even if its ratio is unknown (NaN). So positives need
    no log μ under TOPR's limits. A row with R = 0 needs no log μ under any limits.

    Example:

    ```python
    >>> import torch
    >>> from topr_trl import PRESETS, truncated_weights

    >>> log_ratio, rewards = torch.tensor([0.7, 0.7, -0.7]), torch.tensor([1.0, -1.0, -1.0])
    >>> truncated_weights(log_ratio, rewards, PRESETS["topr"])
    tensor([1.0000, 1.0000, 0.4966])
    ```

    Args:
        log_ratio (`torch.Tensor`):
            Log-ratios `log π/μ`, shape (B,) for completions, or (B, T) for tokens.
        rewards_B (`torch.Tensor`):
            Rewards R after the baseline, shape (B,).
        limits ([`TruncationLimits`]):
            Limits a+, b+, a- and b-.

    Returns:
        `torch.Tensor`: detached weights, with the shape and dtype of `log_ratio`.

    Raises:
        ValueError: a tensor has the wrong shape.
    """
    if log_ratio.dim() not in (1, 2):
        raise ValueError(f"log_ratio must have the shape (B,) or (B, T), not {tuple(log_ratio.shape)}.")
    _check_shape("rewards_B", rewards_B, (len(log_ratio),))
    positive = (rewards_B >= 0).view(-1, *[1] * (log_ratio.dim() - 1))

    def clipped(a: float, b: float) -> Tensor:
        if a == b:
            return torch.full_like(log_ratio, min(a, exp(MAX_LOG_WEIGHT)))
        return _clipped(log_ratio, a, min(b, exp(MAX_LOG_WEIGHT))).exp()

    # Stop-gradient: the weight scales the gradient of log π and is not differentiated itself (Algorithm 1).
    log_ratio = log_ratio.detach()
    # The ratio of a row with R = 0 can be unknown. The loss of the row must still be 0, and 0 times NaN is NaN.
    nothing_to_learn = (rewards_B == 0).view_as(positive)
    log_ratio = log_ratio.masked_fill(nothing_to_learn & log_ratio.isnan(), 0.0)
    return torch.where(positive, clipped(limits.a_pos, limits.b_pos), clipped(limits.a_neg, limits.b_neg))


def _clipped(log_ratio: Tensor, a: float, b: float) -> Tensor:
    """Clip log-ratios to the logarithms of the limits a <= b."""
    return log_ratio.clamp(log(a) if a else -inf, log(b) if b else -inf)


class LossOutputs(NamedTuple):
    """Outputs of `topr_loss`.

    Attributes:
        losses_B (`torch.Tensor`):
            Losses, shape (B,), in float32 or wider, attached to the graph. Their mean is the loss of the batch.
        weights (`torch.Tensor`):
            Detached weights w, shape (B,), or (B, T) with a ratio per segment.
        log_ratios (`torch.Tensor`):
            Detached log-ratios log π/μ, with the shape of `weights`. NaN where log μ is unknown.
        policy_logps_B (`torch.Tensor`):
            Detached log-probabilities log π(y|x) of the completions, shape (B,).
    """

    losses_B: Tensor
    weights: Tensor
    log_ratios: Tensor
    policy_logps_B: Tensor


def topr_loss(
    policy_logps_BT: Tensor,
    mu_logps: Tensor,
    rewards_B: Tensor,
    mask_BT: Tensor,
    limits: TruncationLimits,
    ratio_level: str = "sequence",
    length_normalization: bool = True,
    segment_tokens: int = SEGMENT_TOKENS,
) -> LossOutputs:
    """Compute the loss of each completion, `ℓ = -stop_grad(w) · R · log π(y|x) / |y|`.

    This is Algorithm 1 of the paper (arXiv 2503.14286), with the division by the length |y| from Sec. 4.2.

    A completion with w · R = 0 has the loss 0, even if π cannot write it (log π = -inf). If w · R > 0 and π cannot
    write the completion, the loss is infinite, as in maximum likelihood.

    Example:

    ```python
    >>> import torch
    >>> from topr_trl import PRESETS, topr_loss

    >>> policy_logps = torch.tensor([[-0.5, -0.5], [-1.0, -2.0]], requires_grad=True)
    >>> mu_logps = torch.tensor([-1.0, -2.0])  # sums over the completions
    >>> rewards, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 2)
    >>> outputs = topr_loss(policy_logps, mu_logps, rewards, mask, PRESETS["topr"])
    >>> outputs.weights  # the second ratio is exp(-3 + 2)
    tensor([1.0000, 0.3679])
    >>> outputs.losses_B.mean().backward()
    ```

    Args:
        policy_logps_BT (`torch.Tensor`):
            Log-probabilities under π of the completion tokens, shape (B, T), in nats, attached to the graph. Any float
            dtype.
        mu_logps (`torch.Tensor`):
            Log-probabilities under μ, shape (B, T) for tokens, or (B,) for sums over completions. NaN and infinite
            values are unknown: the loss is NaN if the weight of the row depends on them.
        rewards_B (`torch.Tensor`):
            Rewards R after the baseline, shape (B,). The sign selects the limits.
        mask_BT (`torch.Tensor`):
            Mask, shape (B, T), non-zero where a token belongs to the completion. A row without tokens has loss 0.
        limits ([`TruncationLimits`]):
            Limits of the ratio, for instance `PRESETS["topr"]`.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio is computed:

            - `"sequence"`: the paper's ratio, which is the product over the tokens of the completion.
            - `"segment"`: the product over the segment that contains the token. Use it for long completions. A
              completion is cut into segments s_1, ..., s_K of `segment_tokens` tokens. If y_<k are the tokens before
              segment k, the ratio is `x_k = π(s_k|x, y_<k) / μ(s_k|x, y_<k)`. Without length normalization, the
              gradient is that of `J(π) = Σ_k E_{y ~ μ} [ρ(x_k, a, b) R(y)]`, where ρ is the taper of Eq. 11, with the
              limits for the sign of R(y). As in Prop. 3.2, J has an upper bound if a- = 0. At π = μ, the gradient of J
              is that of the expected reward. Shorter segments taper less.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss by |y|, the number of tokens of the completion.
        segment_tokens (`int`, *optional*, defaults to `64`):
            Number of tokens in a segment, with `"segment"`. Tokens with mask 0, such as tool results, do not count. If
            a completion has at most this many tokens, its ratio is that of `"sequence"`.

    Returns:
        `LossOutputs`: losses, weights, log-ratios and log π of the rows.

    Raises:
        ValueError: `ratio_level` is unknown, `mu_logps` holds sums although `"segment"` needs log μ per token,
            `segment_tokens` is below 1, or a tensor has the wrong shape.
    """
    if ratio_level not in RATIO_LEVELS:
        raise ValueError(f"ratio_level must be one of {RATIO_LEVELS}, not {ratio_level!r}.")
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens must be at least 1, not {segment_tokens}.")
    _check_batch(policy_logps_BT, mu_logps, rewards_B, mask_BT, ratio_level)
    policy_logps_B = sequence_logps(policy_logps_BT, mask_BT)
    segments = segment_tokens if ratio_level == "segment" else None
    log_ratio = _log_ratios(policy_logps_BT, policy_logps_B, mu_logps, mask_BT, segments)
    weights = truncated_weights(log_ratio, rewards_B, limits)
    if segments:
        signal_BT = weights * rewards_B[:, None].to(weights.dtype)
        losses_B = -sequence_logps(signal_BT * reachable(policy_logps_BT, signal_BT), mask_BT)
    else:
        signal_B = weights * rewards_B.to(weights.dtype)
        losses_B = -signal_B * reachable(policy_logps_B, signal_B)
    if length_normalization:
        losses_B = losses_B / (mask_BT != 0).sum(-1).clamp(min=1)  # An empty completion has loss 0.
    return LossOutputs(losses_B, weights, log_ratio, policy_logps_B.detach())


def _check_batch(
    policy_logps_BT: Tensor, mu_logps: Tensor, rewards_B: Tensor, mask_BT: Tensor, ratio_level: str
) -> None:
    """Raise a ValueError if the tensors of a batch do not have matching shapes."""
    if policy_logps_BT.dim() != 2:
        raise ValueError(f"policy_logps_BT must have the shape (B, T), not {tuple(policy_logps_BT.shape)}.")
    rows, tokens = policy_logps_BT.shape
    _check_shape("mask_BT", mask_BT, (rows, tokens))
    if ratio_level == "segment" and mu_logps.dim() == 1:
        raise ValueError("ratio_level='segment' needs log μ per token, shape (B, T); found sums, shape (B,).")
    _check_shape("mu_logps", mu_logps, (rows, tokens), (rows,))
    _check_shape("rewards_B", rewards_B, (rows,))


def reachable(logps: Tensor, signal: Tensor) -> Tensor:
    """Replace log π = -inf by 0 where w · R is 0, because 0 times infinity is NaN.

    Where w · R is not 0, log π = -inf is not replaced, so that the loss is infinite and training stops.

    Args:
        logps (`torch.Tensor`):
            Log-probabilities under π, attached to the graph. A replaced value gets no gradient.
        signal (`torch.Tensor`):
            w · R, detached, in a shape that broadcasts to that of `logps`.
    """
    return logps.masked_fill(logps.isneginf() & (signal == 0), 0.0)


def taper(ratio: Tensor, a: float, b: float) -> Tensor:
    """Compute the taper function ρ(x, a, b) of Eq. 11, which is differentiable.

    `ρ = a (1 + log(x/a))` if x < a, `ρ = b (1 + log(x/b))` if x > b, and `ρ = x` in between. So `ρ <= x`, and
    `ρ'(x) = clip(x, a, b) / x`. With a = b = 0, ρ is 0.

    Example:

    ```python
    >>> import torch
    >>> from topr_trl import taper

    >>> taper(torch.tensor([0.5, 1.0, 2.0]), a=0.0, b=1.0)
    tensor([0.5000, 1.0000, 1.6931])
    ```

    Args:
        ratio (`torch.Tensor`):
            Ratios x > 0, any shape and float dtype.
        a (`float`):
            Lower limit, at least 0. With `a=0`, no ratio is below the limit.
        b (`float`):
            Upper limit, at least `a`. Can be infinite.

    Returns:
        `torch.Tensor`: ρ, with the shape and dtype of `ratio`.
    """
    inside = (ratio >= a) & (ratio <= b)
    # Autograd multiplies the unused branch by 0, and the derivative of log x at 0 is infinite.
    beyond = _tapered(torch.where(inside, 1.0, ratio).log(), torch.zeros_like(ratio), a, b)
    return torch.where(inside, ratio, beyond)


def _tapered(log_ratio: Tensor, log_scale: Tensor, a: float, b: float) -> Tensor:
    """Compute `exp(log_scale) ρ(exp(log_ratio), a, b)` without an overflow of the ratio.

    If c is the clipped ratio, `ρ(x, a, b) = c (1 + log(x/c))` for all x.
    """
    clipped = _clipped(log_ratio, a, b)
    beyond = (log_ratio - clipped).masked_fill(clipped.isneginf(), 0.0)  # c is 0, and -inf - -inf is NaN
    return (log_scale + clipped).exp() * (1 + beyond)


def objective(policy_logps_B: Tensor, mu_logps_B: Tensor, rewards_B: Tensor, limits: TruncationLimits) -> Tensor:
    """Compute the objective `J = Σ_τ μ(τ) ρ(π(τ)/μ(τ), a, b) R(τ)` over a set of completions (Eq. 11).

    The gradient of J is Eq. 7. It equals the gradient of `-Σ_τ μ(τ) ℓ(τ)`, where ℓ is `topr_loss` without length
    normalization. A completion with R = 0 or μ = 0 contributes 0.

    Example:

    ```python
    >>> import torch
    >>> from topr_trl import PRESETS, objective

    >>> policy, mu = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> objective(policy, mu, torch.tensor([1.0, -1.0]), PRESETS["topr"])
    tensor(-0.0767)
    ```

    Args:
        policy_logps_B (`torch.Tensor`):
            Log-probabilities log π(τ) of the completions, shape (B,), attached to the graph.
        mu_logps_B (`torch.Tensor`):
            Log-probabilities log μ(τ) of the completions, shape (B,).
        rewards_B (`torch.Tensor`):
            Rewards R(τ) after the baseline, shape (B,).
        limits ([`TruncationLimits`]):
            Limits of the ratio.

    Returns:
        `torch.Tensor`: J, a scalar.

    Raises:
        ValueError: a tensor has the wrong shape.
    """
    _check_shape("policy_logps_B", policy_logps_B, (policy_logps_B.numel(),))
    _check_shape("mu_logps_B", mu_logps_B, (len(policy_logps_B),))
    _check_shape("rewards_B", rewards_B, (len(policy_logps_B),))
    absent = mu_logps_B.isneginf() | (rewards_B == 0)
    log_ratio_B = (policy_logps_B - mu_logps_B).masked_fill(absent, 0.0)
    mu_logps_B = mu_logps_B.masked_fill(absent, -inf)
    tapered_B = torch.where(
        rewards_B >= 0,
        _tapered(log_ratio_B, mu_logps_B, limits.a_pos, limits.b_pos),
        _tapered(log_ratio_B, mu_logps_B, limits.a_neg, limits.b_neg),
    )
    return (tapered_B * rewards_B).sum()
