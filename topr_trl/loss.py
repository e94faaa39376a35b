"""The loss of TOPR (arXiv 2503.14286, Algorithm 1) and the objective whose gradient it follows (Eq. 11).

Pure functions; both trainers call `topr_loss`. Letters in names: B rows (completions), T completion tokens. π is the
policy in training, μ the policy that wrote the completions, R the reward after the baseline is subtracted.
"""

from dataclasses import dataclass
from math import exp, inf, log
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class TruncationLimits:
    """Limits to which the ratio π/μ of a completion is clipped, for R >= 0 and for R < 0.

    `w = clip(π/μ, a_pos, b_pos)` if R >= 0, else `clip(π/μ, a_neg, b_neg)` (arXiv 2503.14286, Eq. 7).

    Raises:
        ValueError: a limit is negative or not a number, or a lower one is infinite or above its upper one.
    """

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def __post_init__(self) -> None:
        for sign, a, b in (("pos", self.a_pos, self.b_pos), ("neg", self.a_neg, self.b_neg)):
            if not (0 <= a < inf and b >= 0):
                raise ValueError(f"Truncation limits must be >= 0 and a_{sign} finite: a_{sign}={a}, b_{sign}={b}.")
            if a > b:
                raise ValueError(
                    f"The lower truncation limit a_{sign}={a} is above the upper one b_{sign}={b}. Swap or raise them."
                )

    @property
    def ratio_matters_pos(self) -> bool:
        """Whether the weight of a completion with R >= 0 depends on π/μ, and so on log μ."""
        return self.a_pos < self.b_pos

    @property
    def ratio_matters_neg(self) -> bool:
        """Whether the weight of a completion with R < 0 depends on π/μ, and so on log μ."""
        return self.a_neg < self.b_neg

    @property
    def bounded(self) -> bool:
        """Whether the objective has an upper bound whatever the negatives (Prop. 3.2): exactly if a- = 0."""
        return self.a_neg == 0


PRESETS: dict[str, TruncationLimits] = {
    "topr": TruncationLimits(1.0, 1.0, 0.0, 1.0),
    "positives_only": TruncationLimits(1.0, 1.0, 0.0, 0.0),  # reward-weighted SFT: STaR, ReST, RAFT
    "reinforce": TruncationLimits(1.0, 1.0, 1.0, 1.0),  # naive REINFORCE: unbounded, collapses off-policy
    "opr": TruncationLimits(0.0, inf, 0.0, inf),  # plain importance sampling: unbiased, high variance
    "tis": TruncationLimits(0.0, 1.0, 0.0, 1.0),  # truncated importance sampling
}
"""The limits of TOPR and its relatives, by name (arXiv 2503.14286, Table 1)."""

RATIO_LEVELS = ("sequence", "token", "geometric")

# Only an infinite upper limit, or one beyond it, lets a ratio come this far. e^40 keeps the squared gradient norm
# finite in float32, so that gradient clipping still works; a row with such a weight outweighs every other row all the
# same.
MAX_LOG_WEIGHT = 40.0


def sequence_logps(logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) log-probability of each completion, `log π(y|x) = Σ_t log π(y_t|x,y_<t)`, in float32 (or wider).

    Args:
        logps_BT: (B, T) log-probabilities of the completion tokens, any float dtype. Padding may hold anything.
        mask_BT: (B, T), non-zero where a token belongs to the completion.
    """
    wide = logps_BT.to(torch.promote_types(logps_BT.dtype, torch.float32))
    return wide.masked_fill(mask_BT == 0, 0.0).sum(-1)


def log_ratios(policy_logps_BT: Tensor, mu_logps: Tensor, mask_BT: Tensor, ratio_level: str = "sequence") -> Tensor:
    """`log π/μ` of each completion (or token), detached.

    Args:
        policy_logps_BT, mask_BT: see `sequence_logps`.
        mu_logps: log μ, either (B, T) per token or (B,) summed over the completion.
        ratio_level: `"sequence"` is the paper: the ratio of the whole completion, a product over its tokens. The other
            two are *not* TOPR. They are here so that what other systems ship under its name can be compared with it:
            `"token"` tapers each token by its own ratio, `"geometric"` by the length-normalized (geometric mean)
            ratio, from which the taper all but vanishes on long completions.

    Returns:
        (B,), or (B, T) with `"token"` and zero at padding; float32 or wider.

    Raises:
        ValueError: `ratio_level` is unknown, or is `"token"` while log μ comes as sums.
    """
    if ratio_level not in RATIO_LEVELS:
        raise ValueError(f"ratio_level must be one of {RATIO_LEVELS}, not {ratio_level!r}.")
    policy_logps_BT = policy_logps_BT.detach()  # Alg. 1's stop-gradient: the ratio is a weight, and not learned
    if ratio_level == "token":
        if mu_logps.dim() != 2:
            raise ValueError("ratio_level='token' needs log μ per token, shape (B, T); it was given as sums, (B,).")
        wide = torch.promote_types(policy_logps_BT.dtype, torch.float32)
        return (policy_logps_BT.to(wide) - mu_logps.to(wide)).masked_fill(mask_BT == 0, 0.0)
    mu_B = sequence_logps(mu_logps, mask_BT) if mu_logps.dim() == 2 else mu_logps
    log_ratio_B = sequence_logps(policy_logps_BT, mask_BT) - mu_B
    if ratio_level == "geometric":
        log_ratio_B = log_ratio_B / mask_BT.sum(-1).clamp(min=1)
    return log_ratio_B


def truncated_weights(log_ratio: Tensor, rewards_B: Tensor, limits: TruncationLimits) -> Tensor:
    """`w = clip(π/μ, a, b)`, with (a+, b+) where R >= 0 and (a-, b-) where R < 0 (Eq. 7).

    Computed in log space, so ratios of e^±1000 are safe. A row whose two limits are equal has that weight whatever
    its ratio, even if the ratio is unknown (NaN): positives need no log μ under the TOPR limits. Nor does a row with
    R = 0, whatever the limits.

    Args:
        log_ratio: (B,) or (B, T) `log π/μ`, as `log_ratios` gives it.
        rewards_B: (B,) R, after the baseline.

    Returns:
        Weights of the shape and dtype of `log_ratio`, never attached to the graph.
    """
    positive = (rewards_B >= 0).view(-1, *[1] * (log_ratio.dim() - 1))

    def clipped(a: float, b: float) -> Tensor:
        if a == b:
            return torch.full_like(log_ratio, min(a, exp(MAX_LOG_WEIGHT)))
        return log_ratio.clamp(log(a) if a else -inf, min(log(b), MAX_LOG_WEIGHT)).exp()

    # Stop-gradient: the weight scales the gradient of log π, it is not differentiated (Algorithm 1).
    log_ratio = log_ratio.detach()
    # The ratio of a row that learns nothing may not have been computed, and 0 times an unknown weight must be 0.
    nothing_to_learn = (rewards_B == 0).view_as(positive)
    log_ratio = log_ratio.masked_fill(nothing_to_learn & log_ratio.isnan(), 0.0)
    return torch.where(positive, clipped(limits.a_pos, limits.b_pos), clipped(limits.a_neg, limits.b_neg))


class LossOutputs(NamedTuple("_LossOutputs", [("losses_B", Tensor), ("weights", Tensor), ("log_ratios", Tensor)])):
    """Losses, weights and log-ratios of `topr_loss`.

    Attributes:
        losses_B: (B,) losses, float32 or wider, attached to the graph. Average them for the loss of a batch.
        weights: (B,) truncated weights w, or (B, T) with `ratio_level="token"`; detached.
        log_ratios: log π/μ, of the shape of `weights`; detached. NaN where log μ is not known.
    """

    __slots__ = ()


def topr_loss(
    policy_logps_BT: Tensor,
    mu_logps: Tensor,
    rewards_B: Tensor,
    mask_BT: Tensor,
    limits: TruncationLimits,
    ratio_level: str = "sequence",
    length_normalization: bool = True,
) -> LossOutputs:
    """Loss of each completion, `ℓ = -stop_grad(w) · R · log π(y|x) / |y|` (Algorithm 1; the division: Sec. 4.2).

    Args:
        policy_logps_BT: (B, T) log π of the completion tokens, attached to the graph, any float dtype.
        mu_logps: (B, T) or (B,) log μ, see `log_ratios`. NaN where the row's weight does not need it.
        rewards_B: (B,) R, after the baseline; its sign decides which limits apply.
        mask_BT: (B, T), non-zero where a token belongs to the completion. A row without tokens has loss 0.
        ratio_level: `"sequence"` for TOPR; see `log_ratios` for the others.
        length_normalization: divide by |y|, as the paper does.

    Raises:
        ValueError: see `log_ratios`.
    """
    log_ratio = log_ratios(policy_logps_BT, mu_logps, mask_BT, ratio_level)
    weights = truncated_weights(log_ratio, rewards_B, limits)
    losses_B = weighted_loss(policy_logps_BT, weights, rewards_B, mask_BT, length_normalization)
    return LossOutputs(losses_B, weights, log_ratio)


def weighted_loss(
    policy_logps_BT: Tensor, weights: Tensor, rewards_B: Tensor, mask_BT: Tensor, length_normalization: bool = True
) -> Tensor:
    """The loss of each completion where the weights are known.

    Args:
        policy_logps_BT, rewards_B, mask_BT, length_normalization: see `topr_loss`.
        weights: (B,), or (B, T) with a ratio per token; without gradient.

    Returns:
        (B,) losses, in the dtype of the log-probabilities, or a wider one.
    """
    if weights.dim() == 2:
        weighted_B = sequence_logps(weights * policy_logps_BT, mask_BT)
    else:
        weighted_B = weights * sequence_logps(policy_logps_BT, mask_BT)
    loss_B = -rewards_B.to(weighted_B.dtype) * weighted_B
    return loss_B / mask_BT.sum(-1).clamp(min=1) if length_normalization else loss_B


def taper(ratio: Tensor, a: float, b: float) -> Tensor:
    """The taper function ρ(x, a, b) of Eq. 11, differentiable.

    `ρ = a (1 + log(x/a))` if x < a, `b (1 + log(x/b))` if x > b, and x between; so `ρ <= x` and
    `ρ'(x) = clip(x,a,b)/x`. With a = 0 the lower branch is absent, with b = ∞ the upper one. With a = b = 0, ρ is 0.

    Args:
        ratio: x > 0, any shape and float dtype.
        a, b: limits, 0 <= a <= b; b may be infinite.
    """
    if b == 0:
        return ratio * 0.0
    # log(x) - log(a), not log(x/a): the quotient overflows for the smallest limits.
    lower = ratio if a == 0 else torch.where(ratio < a, a * (1 + ratio.log() - log(a)), ratio)
    return lower if b == inf else torch.where(ratio > b, b * (1 + ratio.log() - log(b)), lower)


def objective(policy_logps_B: Tensor, mu_logps_B: Tensor, rewards_B: Tensor, limits: TruncationLimits) -> Tensor:
    """The objective `J = Σ_τ μ(τ) ρ(π(τ)/μ(τ), a, b) R(τ)` over an enumerated set of completions (Eq. 11).

    A scalar, whose gradient is Eq. 7: that of `-Σ μ(τ) topr_loss(τ).losses_B` without length division.

    Args:
        policy_logps_B, mu_logps_B, rewards_B: (B,) log π(τ), attached to the graph, log μ(τ), and R(τ).
    """
    ratio_B = (policy_logps_B - mu_logps_B).exp()
    tapered_B = torch.where(
        rewards_B >= 0, taper(ratio_B, limits.a_pos, limits.b_pos), taper(ratio_B, limits.a_neg, limits.b_neg)
    )
    return (mu_logps_B.exp() * tapered_B * rewards_B).sum()
