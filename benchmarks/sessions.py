"""Long completions for small models: sessions of many answers.

A session joins answers of the base model to several problems. The model reads each answer without the others, but the
session has one reward, one length and one ratio, like a trajectory of several rows (`rollout_id`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.ratios import log_ratios, weighted_loss
from benchmarks.rows import Rows, response_logps
from topr_trl import PRESETS, truncated_weights
from topr_trl.loss import MAX_LOG_WEIGHT
from topr_trl.trainers.metrics import row_metrics

ANSWER, POWER, POSITIVES, REPEATED = "answer", "power", "positives", "repeated"  # levels that only this benchmark has
DPPO, DPPO_LIMIT = "dppo", 0.2  # DPPO's loss (arXiv 2602.04879, Eq. 11) with its binary TV divergence and limit δ
POWER_TOKENS = 160  # ℓ: the ratio of longer sessions is raised to the power ℓ / |y|


class Sessions:
    """Sessions with R and log μ.

    Args:
        pool: answers.
        rows_SP: rows of the pool that are the parts of each session.
        rewards_S: reward of each session. Default: 1 if more of its answers are right than in the pool, else -1.
    """

    def __init__(self, pool: Rows, rows_SP: np.ndarray, rewards_S: np.ndarray | None = None) -> None:
        self.rows, self.parts = pool[rows_SP.ravel()], rows_SP.shape[1]
        if rewards_S is None:
            right_S = (self.rows.rewards.reshape(rows_SP.shape) > 0).mean(1)
            rewards_S = np.where(right_S > (pool.rewards > 0).mean(), 1.0, -1.0)
        self.rewards_S = torch.tensor(rewards_S, dtype=torch.float32)

    @property
    def tokens(self) -> float:
        """Return the mean length of a session."""
        return sum(map(len, self.rows.responses)) / len(self.rewards_S)

    def loss(self, model: PreTrainedModel, level: str = "sequence", temperature: float = 1.0) -> Tensor:
        """Return the mean loss of the sessions.

        Args:
            model: model being trained.
            level: a level of `benchmarks.ratios.log_ratios`, `ANSWER` (a ratio for each answer),
                `POWER`, `DPPO`, `POSITIVES`, or `REPEATED` (the same, for sessions that are all good).
            temperature: temperature of log π, which is that of log μ.
        """
        policy_ST, mu_ST, mask_ST, part_ST = self.logps(model, temperature)
        weights = token_weights(self.rewards_S, policy_ST.detach(), mu_ST, mask_ST, part_ST, level)
        return weighted_loss(policy_ST, weights, self.rewards_S, mask_ST).mean()

    def logps(self, model: PreTrainedModel, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (S, T) log π, log μ, the mask, and the number of the answer that each token belongs to."""
        logps, mask = response_logps(model, self.rows.prompts, self.rows.responses, temperature=temperature)
        lengths = mask.sum(1).tolist()
        policy = logps[mask].split(lengths)
        part = [torch.full((length,), n % self.parts) for n, length in enumerate(lengths)]

        def joined(values: Sequence[Tensor]) -> Tensor:
            sessions = [torch.cat(values[n : n + self.parts]) for n in range(0, len(values), self.parts)]  # type: ignore[arg-type]
            return pad_sequence(sessions, batch_first=True)

        return joined(policy), joined(self.rows.mu_logps), joined([torch.ones_like(x) for x in part]), joined(part)

    @torch.no_grad()
    def weights_by_quarter(self, model: PreTrainedModel, level: str) -> list[float]:
        """Return the negatives' mean weight in each quarter of a session."""
        policy_ST, mu_ST, mask_ST, part_ST = self.logps(model)
        weights_ST = token_weights(self.rewards_S, policy_ST, mu_ST, mask_ST, part_ST, level)
        place_ST = 4 * (mask_ST.cumsum(1) - 1) // mask_ST.sum(1, keepdim=True)
        negative_ST = (self.rewards_S < 0)[:, None] & (mask_ST > 0)
        return [float(weights_ST[negative_ST & (place_ST == quarter)].mean()) for quarter in range(4)]

    @torch.no_grad()
    def log_ratios(self, model: PreTrainedModel) -> Tensor:
        """Return (S,) log π/μ of sessions."""
        now = self.rows.scored_by(model).mu_logps
        per_row = torch.stack([(new - old).sum() for new, old in zip(now, self.rows.mu_logps, strict=True)])
        return per_row.view(-1, self.parts).sum(1)

    def weights(self, model: PreTrainedModel) -> dict[str, float]:
        """Return mean weight, dead share and mean log-ratio of negatives, as trainers log them (NaN without any)."""
        log_ratio_S = self.log_ratios(model)
        weights_S = truncated_weights(log_ratio_S, self.rewards_S, PRESETS["topr"])
        logged = row_metrics(weights_S, log_ratio_S, self.rewards_S)
        names = {"weight": "weight_mean_negatives", "dead": "negatives_dead", "log_ratio": "log_ratio/negatives/mean"}
        return {short: logged.get(f"topr/{name}", float("nan")) for short, name in names.items()}


def token_weights(
    rewards_S: Tensor, policy_ST: Tensor, mu_ST: Tensor, mask_ST: Tensor, part_ST: Tensor, level: str
) -> Tensor:
    """Return (S, T) weights of the tokens. See `Sessions.loss` for the levels."""
    if level in (POSITIVES, REPEATED):
        return (rewards_S > 0).float()[:, None].expand_as(policy_ST)
    if level == DPPO:  # Drop a token if π - μ exceeds the limit in the direction of the reward.
        pushed_ST = rewards_S.sign()[:, None] * (policy_ST.exp() - mu_ST.exp())
        return (policy_ST - mu_ST).clamp(max=MAX_LOG_WEIGHT).exp().masked_fill(pushed_ST > DPPO_LIMIT, 0.0)
    if level == ANSWER:
        by_token = log_ratios(policy_ST, mu_ST, mask_ST, "token")
        by_part = torch.zeros(len(policy_ST), int(part_ST.max()) + 1).scatter_add(1, part_ST, by_token)
        log_ratio = by_part.gather(1, part_ST)
    elif level == POWER:
        log_ratio_S = log_ratios(policy_ST, mu_ST, mask_ST, "sequence")
        log_ratio = log_ratio_S * (POWER_TOKENS / mask_ST.sum(1)).clamp(max=1)
    else:
        log_ratio = log_ratios(policy_ST, mu_ST, mask_ST, level)
    weights = truncated_weights(log_ratio, rewards_S, PRESETS["topr"])
    return weights if weights.dim() == 2 else weights[:, None].expand_as(policy_ST)
