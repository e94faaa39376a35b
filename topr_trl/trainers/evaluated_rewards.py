"""Compute the reward metrics of an online evaluation over completions."""

import math

import torch
from torch import Tensor
from trl.trainer.utils import nanstd


class EvaluatedRewards:
    """Rewards of the completions of one evaluation set.

    TRL logs means over batches, which differ in size. Accelerate repeats rows at the end, so that each process has a
    full batch (huggingface/accelerate#1674). This class gives all completions the same weight, and ignores repeated
    rows.

    Args:
        count (`float`, *optional*, defaults to `inf`):
            Number of completions of the set. `inf` means that the number is unknown.
    """

    def __init__(self, count: float = math.inf) -> None:
        self._left = count
        self._batches: list[Tensor] = []  # a column of summed rewards, then one column per reward function

    def add(self, raw_rewards_N: Tensor, rewards_NF: Tensor) -> Tensor:
        """Store the rewards of a batch. Return the summed rewards, with NaN for repeated rows.

        Args:
            raw_rewards_N (`torch.Tensor`):
                Weighted sums of the rewards, shape (N,).
            rewards_NF (`torch.Tensor`):
                Rewards by function, shape (N, F).
        """
        count = int(min(len(raw_rewards_N), self._left))
        self._left -= count
        self._batches.append(torch.cat([raw_rewards_N[:count, None], rewards_NF[:count]], dim=1))
        repeated = torch.arange(len(raw_rewards_N), device=raw_rewards_N.device) >= count
        return raw_rewards_N.masked_fill(repeated, torch.nan)

    def read(self, names: list[str]) -> dict[str, list[float]]:
        """Return means and standard deviations under the names of TRL's metrics, and forget the rewards.

        Return {} if no batch was added since the last call.

        Args:
            names (`list[str]`):
                Names of the reward functions.
        """
        if not self._batches:
            return {}
        columns = torch.cat(self._batches).cpu().double().T
        self._batches = []
        functions = [(f"rewards/{name}/mean", f"rewards/{name}/std") for name in names]
        metrics = {}
        for (mean, std), values in zip([("reward", "reward_std"), *functions], columns, strict=True):
            metrics[mean], metrics[std] = [values.nanmean().item()], [nanstd(values).item()]
        return metrics
