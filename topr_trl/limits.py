"""Define the truncation limits of the ratio π/μ, and the presets, without importing PyTorch, for fast early checks."""

from dataclasses import dataclass
from math import inf

# A negative with a lower weight is "dead": it contributes almost nothing to the gradient.
DEAD_WEIGHT = 0.01


@dataclass(frozen=True)
class TruncationLimits:
    """Limits to which the ratio π/μ of a completion is clipped (arXiv 2503.14286, Eq. 7).

    The clipped ratio is the weight of the completion: `w = clip(π/μ, a_pos, b_pos)` if R >= 0, and
    `w = clip(π/μ, a_neg, b_neg)` if R < 0.

    Example:

    ```python
    >>> from topr_trl import PRESETS, TruncationLimits

    >>> PRESETS["topr"]
    TruncationLimits(a_pos=1.0, b_pos=1.0, a_neg=0.0, b_neg=1.0)
    >>> TruncationLimits(a_pos=1, b_pos=1, a_neg=0, b_neg=2).bounded
    True
    ```

    Args:
        a_pos (`float`):
            Lower limit for R >= 0, a+ in the paper. Must be finite and at least 0.
        b_pos (`float`):
            Upper limit for R >= 0, b+ in the paper. Can be infinite.
        a_neg (`float`):
            Lower limit for R < 0, a- in the paper. Must be finite and at least 0.
        b_neg (`float`):
            Upper limit for R < 0, b- in the paper. Can be infinite.

    Raises:
        ValueError: a limit is negative or NaN, a lower limit is infinite, or a lower limit is above its upper limit.
    """

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def __post_init__(self) -> None:
        for sign, a, b in (("pos", self.a_pos, self.b_pos), ("neg", self.a_neg, self.b_neg)):
            if not (0 <= a < inf and b >= 0):
                raise ValueError(
                    f"Truncation limits must be >= 0, and a_{sign} finite; found a_{sign}={a} and b_{sign}={b}."
                )
            if a > b:
                raise ValueError(
                    f"The lower truncation limit a_{sign}={a} is above the upper limit b_{sign}={b}. "
                    f"Lower a_{sign}, or raise b_{sign}."
                )

    @property
    def ratio_matters_pos(self) -> bool:
        """Whether the weight of a completion with R >= 0 depends on π/μ and therefore needs log μ."""
        return self.a_pos < self.b_pos

    @property
    def ratio_matters_neg(self) -> bool:
        """Whether the weight of a completion with R < 0 depends on π/μ and therefore needs log μ."""
        return self.a_neg < self.b_neg

    @property
    def bounded(self) -> bool:
        """Whether the objective has an upper bound for all rewards, which is true if and only if a- = 0 (Prop. 3.2)."""
        return self.a_neg == 0


PRESETS: dict[str, TruncationLimits] = {
    "topr": TruncationLimits(1.0, 1.0, 0.0, 1.0),
    "positives_only": TruncationLimits(1.0, 1.0, 0.0, 0.0),  # reward-weighted SFT: STaR, ReST, RAFT
    "reinforce": TruncationLimits(1.0, 1.0, 1.0, 1.0),  # naive REINFORCE: unbounded, collapses off-policy
    "opr": TruncationLimits(0.0, inf, 0.0, inf),  # plain importance sampling: unbiased, high variance
    "tis": TruncationLimits(0.0, 1.0, 0.0, 1.0),  # truncated importance sampling
}
"""Truncation limits of TOPR and related methods, by name (arXiv 2503.14286, Table 1)."""

RATIO_LEVELS = ("sequence", "segment")
SEGMENT_TOKENS = 64  # default, in tokens; benchmarks/long_completions.md compares 16, 64 and 256 tokens
