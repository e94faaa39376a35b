"""Compute metrics of weights, ratios and rewards, once per log, from rows that were collected on the device."""

import torch
from accelerate import Accelerator
from torch import Tensor

from topr_trl.baseline import effective_positive_share

# A negative with a weight below this contributes almost nothing to the gradient.
DEAD_WEIGHT = 0.01
# A difference from 1 below this is rounding.
ROUNDING = 1e-3
QUANTILES = (0.05, 0.5, 0.95)


def completion_means(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B,) means of (B, T) values over the tokens of each completion. Return (B,) values unchanged."""
    if values.dim() == 1:
        return values
    return values.masked_fill(mask_BT == 0, 0.0).sum(1) / mask_BT.sum(1).clamp(min=1)


class RowMetrics:
    """Collect one small tensor per batch, without waiting for the device until `flush`."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def add(self, weights_B: Tensor, log_ratio_B: Tensor, rewards_B: Tensor, idle: int = 0) -> Tensor:
        """Store a batch and return it as (B + idle, 3) float32.

        Args:
            weights_B: (B,) weights.
            log_ratio_B: (B,) log-ratios, in nats.
            rewards_B: (B,) R.
            idle: number of rows with R = 0 that the forward did not compute. They get weight 1 and a NaN ratio.
        """
        rows = torch.stack([x.detach().float() for x in (weights_B, log_ratio_B, rewards_B)], dim=1)
        if idle:
            rows = torch.cat([rows, torch.stack([rows.new_full((idle,), x) for x in (1.0, torch.nan, 0.0)], dim=1)])
        self._batches.append(rows)
        return rows

    def flush(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of all batches since the last flush, over all processes. Without a batch, return `{}`.

        All processes must call this method together. Each must have added a batch if any has. The numbers of rows may
        differ.
        """
        if not self._batches:
            return {}
        rows = accelerator.pad_across_processes(torch.cat(self._batches), dim=0, pad_index=torch.nan)
        rows = accelerator.gather(rows).cpu().double()  # CPU first, because some devices have no float64
        self._batches.clear()
        return row_metrics(weights_N=rows[:, 0], log_ratio_N=rows[:, 1], rewards_N=rows[:, 2])


def row_metrics(weights_N: Tensor, log_ratio_N: Tensor, rewards_N: Tensor) -> dict[str, float]:
    """Compute the metrics of N rows on the CPU. A metric is left out if no row has a value for it.

    | name | meaning |
    |---|---|
    | `topr/weight_mean`, `topr/weight_mean_negatives` | mean w |
    | `topr/weight_not_one` | share of rows with w != 1 |
    | `topr/negatives_tapered` | share of negatives with w < 1 |
    | `topr/negatives_dead` | share of negatives with w < 0.01 |
    | `topr/negatives_effective` | effective share of negatives, (Σw)² / (N Σw²) |
    | `topr/positive_share`, `topr/effective_positive_share` | p (R > 0) and p~ (Sec. 3.2) |
    | `topr/realized_positive_share` | share of positives in Σ w·abs(R), which is p~ after the taper |
    | `topr/reward` | mean R |
    | `topr/log_ratio/{positives,negatives}/{mean,q05,q50,q95}` | log π/μ of the completion |

    A row with a NaN reward is padding or has no reward, and is ignored. A row with a NaN log-ratio is ignored in the
    metrics of ratios. Its ratio was not computed, since its weight does not depend on it.

    Args:
        weights_N: (N,) weights.
        log_ratio_N: (N,) log-ratios, in nats.
        rewards_N: (N,) R.
    """
    real = ~rewards_N.isnan()
    weights_N, log_ratio_N, rewards_N = weights_N[real], log_ratio_N[real], rewards_N[real]
    if len(rewards_N) == 0:
        return {}
    positive = rewards_N >= 0
    metrics = {
        "topr/weight_mean": weights_N.mean(),
        "topr/weight_not_one": ((weights_N - 1).abs() > ROUNDING).double().mean(),
        "topr/positive_share": (rewards_N > 0).double().mean(),  # R = 0 has no gradient
        "topr/reward": rewards_N.mean(),
    }
    share = effective_positive_share(rewards_N.numpy())
    if share == share:
        metrics["topr/effective_positive_share"] = torch.tensor(share)
    realized = effective_positive_share((weights_N * rewards_N).numpy())
    if realized == realized:
        metrics["topr/realized_positive_share"] = torch.tensor(realized)
    if not positive.all():
        negative_weights = weights_N[~positive]
        metrics["topr/weight_mean_negatives"] = negative_weights.mean()
        metrics["topr/negatives_tapered"] = (negative_weights < 1 - ROUNDING).double().mean()
        metrics["topr/negatives_dead"] = (negative_weights < DEAD_WEIGHT).double().mean()
        if (squares := negative_weights.square().mean()) > 0:
            metrics["topr/negatives_effective"] = negative_weights.mean() ** 2 / squares
    for name, sign in (("positives", positive), ("negatives", ~positive)):
        known = log_ratio_N[sign & ~log_ratio_N.isnan()]
        if len(known):
            metrics[f"topr/log_ratio/{name}/mean"] = known.mean()
            quantiles = known.quantile(torch.tensor(QUANTILES, dtype=known.dtype))
            for k, q in enumerate(QUANTILES):
                metrics[f"topr/log_ratio/{name}/q{round(q * 100):02d}"] = quantiles[k]
    return {name: float(value) for name, value in metrics.items()}
