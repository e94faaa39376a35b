"""Warn of trainings that learn little without failing: dead negatives, another sampler, equal rewards."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from topr_trl.trainers.metrics import DEAD_WEIGHT
from topr_trl.user_warnings import warn_user

# A run in which this share of the negatives is dead within this share of its steps has gone wrong.
MOSTLY_DEAD, EARLY = 0.5, 0.1


def warn_if_dead(share: float, step: int, steps: int, first_log: int) -> bool:
    """Warn, and return True, if most negatives are dead early in a training, or at its first log."""
    if share <= MOSTLY_DEAD or step > max(EARLY * steps, first_log):
        return False
    warn_user(
        f"{share:.0%} of the negatives have a weight under {DEAD_WEIGHT:g} at step {step} of {steps} and "
        "contribute almost nothing: by log μ, the model in training is far from the one that wrote them. If so, a "
        "lower learning rate or fewer updates on the same rows keep them longer. If not, look at where log μ comes "
        "from: log-probabilities of a truncated distribution (top_k, top_p), of another temperature or with the noise "
        "of another engine add up over long completions. See docs/metrics.md."
    )
    return True


_SILENT = 10  # batches without any signal, after which there is a warning
# Mean difference, in nats per token, beyond which the sampler had other weights or settings, not merely other kernels.
_FAR = 0.1


def sampler_distance(mu_logps: list[list[float]], sampler_logps: list[list[float] | None]) -> dict[str, float]:
    """How far the sampler's log-probabilities of completions are from the trainer's; warns if they are far.

    Both are N lists with one value per token; None where the sampler reported none.

    Returns:
        All in nats. `token`: mean absolute difference of a token's log-probability; `token_max`: the largest;
        `response`: mean absolute difference of a completion's, the noise in log π/μ under `log_mu="sampler"`. Empty
        without rows.
    """
    pairs = [(np.asarray(m), np.asarray(s)) for m, s in zip(mu_logps, sampler_logps, strict=True) if s is not None]
    cut = [len(s) for m, s in pairs if len(m) != len(s)]
    if cut:
        warn_user(
            f"{len(cut)} of {len(pairs)} rows have sampler_logps of another length than their completion_ids: other "
            "tokens are trained on than the sampler wrote. Keep the sampler's completion_ids with the rows."
        )
    pairs = [(m, s) for m, s in pairs if len(m) == len(s) > 0]
    if not pairs:
        return {}
    tokens = np.abs(np.concatenate([m - s for m, s in pairs]))
    distance = {
        "token": float(tokens.mean()),
        "token_max": float(tokens.max()),
        "response": float(np.mean([abs((m - s).sum()) for m, s in pairs])),
    }
    warn_if_far(distance["token"])
    return distance


def warn_if_far(distance: float) -> bool:
    """Warn if log-probabilities of sampler and trainer differ by more nats per token than rounding explains.

    Returns:
        Whether it has warned.
    """
    if distance > _FAR:
        warn_user(
            f"The sampler's log-probabilities differ from the trainer's by {distance:.2f} per token: the sampler had "
            "other weights, another tokenizer or RoPE settings, or computed at low precision. Sample from the "
            "checkpoint that training starts from, in the precision of training. If another model did write the rows, "
            "set log_mu='sampler'."
        )
    return distance > _FAR


class SilentBatches:
    """Generation batches in a row in which every R is 0, so that nothing is learned from them.

    Attributes:
        had_signal: whether there was something to learn before: in another batch, in logged rows, or in an interrupted
            run that goes on.
    """

    def __init__(self, had_signal: bool = False) -> None:
        self.had_signal = had_signal
        self._rows = self._batches = 0
        self._has_warned = False

    def add(self, rewards: NDArray[np.float64], raw_rewards_N: Tensor) -> None:
        """A batch: R of the rows that are trained on, and the raw rewards of all; NaN for a row without one."""
        has_signal = bool(rewards.any())
        is_silent = not has_signal and not bool(raw_rewards_N.isnan().all())
        self.had_signal |= has_signal
        self._batches = self._batches + 1 if is_silent else 0
        self._rows = self._rows + len(raw_rewards_N) if is_silent else 0

    def warn(self, baseline: float | str) -> None:
        """Warn, once, if there was no other batch since training began, or none of the last ten."""
        since_start = self._rows > 0 and not self.had_signal
        if self._has_warned or not (since_start or self._batches >= _SILENT):
            return
        self._has_warned = True
        which = "so far" if since_start else f"of the last {self._batches} generation batches"
        warn_user(
            f"All {self._rows} completions {which} have R = 0 after baseline={baseline}: their rewards are all the "
            "same, and there is nothing to learn from them. Look at the reward functions."
        )
