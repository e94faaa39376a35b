"""Truncation limits (a+, b+, a-, b-) and the five methods of the paper that differ in nothing else (Table 1)."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class TruncationLimits:
    """Between which values the ratio π/μ of a response is clipped, for responses with R >= 0 and with R < 0.

    `w = clip(π/μ, a_pos, b_pos)` if R >= 0, else `clip(π/μ, a_neg, b_neg)` (arXiv 2503.14286, Eq. 7).

    Raises:
        ValueError: a limit is negative or not a number, a lower limit is infinite, or a lower limit is above its
            upper one.
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
        """Whether the weight of a response with R >= 0 depends on π/μ, and so on log μ."""
        return self.a_pos < self.b_pos

    @property
    def ratio_matters_neg(self) -> bool:
        """Whether the weight of a response with R < 0 depends on π/μ, and so on log μ."""
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
