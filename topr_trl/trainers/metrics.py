"""Log weights, ratios and rewards of rows on the device, and compute their metrics whenever the trainer logs."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from topr_trl.baseline import effective_positive_share
from topr_trl.limits import DEAD_WEIGHT
from topr_trl.loss import LossOutputs

# A weight that differs from 1 by at most this number counts as 1, because rounding can cause the difference.
ROUNDING = 1e-3
QUANTILES = (0.05, 0.5, 0.95)


def completion_means(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Average (B, T) values over the tokens of each completion, and return (B,) means. Return (B,) values unchanged."""
    if values.dim() == 1:
        return values
    return values.masked_fill(mask_BT == 0, 0.0).sum(1) / mask_BT.sum(1).clamp(min=1)


# Prefixes of metrics that give no information while π = μ for every row.
_OF_RATIO = ("topr/weight_", "topr/negatives_", "topr/realized_positive_share", "topr/log_ratio/")


def without_ratio(metrics: dict[str, float]) -> dict[str, float]:
    """Return only the metrics that do not depend on the ratio π/μ."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_RATIO)}


class RowLog:
    """Log of the rows of each forward pass, one small tensor per pass. Only reading waits for the device.

    Several readers use the same log: the metrics of training and evaluation, the table of completions, and replay. A
    reader gets each of its passes once.
    """

    def __init__(self) -> None:
        self._unread: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, readers: Iterable[str], numbers_N: Tensor, values_N6: Tensor) -> None:
        """Add the rows of a forward pass for the given readers.

        Args:
            readers (`Iterable[str]`):
                Names of the readers.
            numbers_N (`torch.Tensor`):
                Row numbers, shape (N,), or (N, 2) with a second number.
            values_N6 (`torch.Tensor`):
                Result of `row_values`, shape (N, 6).
        """
        for reader in readers:
            self._unread.setdefault(reader, []).append((numbers_N, values_N6))

    def discard(self, reader: str) -> None:
        """Remove all passes that a reader has not read."""
        self._unread.pop(reader, None)

    def read(self, reader: str) -> list[tuple[Any, float, float]]:
        """Return (number or numbers of the row, weight, log-ratio) of the unread rows that count, from this process."""
        return [
            (number, weight, log_ratio)
            for numbers_N, values_N6 in self._unread.pop(reader, [])
            for number, (weight, log_ratio, reward) in zip(numbers_N.tolist(), values_N6[:, :3].tolist(), strict=True)
            if not math.isnan(reward)
        ]

    def read_metrics(self, reader: str, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of the unread rows of all processes. Without a pass, return `{}`.

        All processes must call this method together. Either all processes or none must have added passes. Their
        numbers of rows may differ.
        """
        if not (passes := self._unread.pop(reader, [])):
            return {}
        rows = torch.cat([values_N6 for _, values_N6 in passes])
        rows = accelerator.pad_across_processes(rows, dim=0, pad_index=torch.nan)
        rows = accelerator.gather(rows).cpu().double()  # Some devices have no float64, so go to the CPU first.
        return row_metrics(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:])


def row_values(outputs: LossOutputs, rewards_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the values of N rows for `RowLog`, shape (N, 6), in float32, detached.

    The columns are the weight, the log-ratio, R, the mean log π per token, log π, and the number of tokens.

    Args:
        outputs ([`~topr_trl.loss.LossOutputs`]):
            Outputs of the loss for B rows.
        rewards_N (`torch.Tensor`):
            R of N >= B rows. The forward pass skipped the rows after the first B, because their R is 0. The skipped
            rows have weight 1 and their R. Their remaining values are NaN.
        mask_BT (`torch.Tensor`):
            Completion mask, shape (B, T).
    """
    weights_B, log_ratio_B = (completion_means(x, mask_BT) for x in (outputs.weights, outputs.log_ratios))
    logps_B, tokens_B, rewards_B = outputs.policy_logps_B, mask_BT.sum(1), rewards_N[: len(mask_BT)]
    columns = (weights_B, log_ratio_B, rewards_B, logps_B / tokens_B.clamp(min=1), logps_B, tokens_B)
    rows = torch.stack([column.detach().float() for column in columns], dim=1)
    skipped = rows.new_full((len(rewards_N) - len(rows), rows.size(1)), torch.nan)
    skipped[:, 0], skipped[:, 2] = 1.0, rewards_N[len(rows) :]
    return torch.cat([rows, skipped])


# Metrics that are left out if they are NaN, because all R, all w · R, or all weights of negatives are 0. All other
# metrics are logged even if they are NaN.
_MAY_BE_UNDEFINED = ("topr/effective_positive_share", "topr/realized_positive_share", "topr/negatives_effective")


def row_metrics(
    weights_N: Tensor, log_ratio_N: Tensor, rewards_N: Tensor, of_tokens_N3: Tensor | None = None
) -> dict[str, float]:
    """Compute the metrics of N rows on the CPU. The result lacks a metric if no row has a value for it.

    | name | meaning |
    |---|---|
    | `topr/weight_mean`, `topr/weight_mean_negatives` | mean w |
    | `topr/weight_not_one` | share of rows with w != 1 |
    | `topr/negatives_tapered` | share of negatives with w < 1 |
    | `topr/negatives_dead` | share of negatives with w < 0.01 |
    | `topr/negatives_effective` | effective share of the n negatives, (Σw)² / (n Σw²) |
    | `topr/positive_share` | share of rows with R > 0 (p in Sec. 3.2) |
    | `topr/effective_positive_share` | share of positives in Σ abs(R) (p~ in Sec. 3.2) |
    | `topr/realized_positive_share` | share of positives in Σ w·abs(R), which is p~ after the taper |
    | `topr/reward` | mean R |
    | `topr/log_ratio/{positives,negatives}/{mean,q05,q50,q95}` | log π/μ of the completion |
    | `topr/logps/{positives,negatives}/{token,completion}` | mean log π per token, and per completion |
    | `topr/tokens/{positives,negatives}` | mean number of trained tokens |

    w is the weight of a row. If the tokens of a row have different weights, w and log π/μ are means over the tokens.
    Rows with R = 0 count as positives in `topr/log_ratio/positives`, but not in `topr/logps/positives` and
    `topr/tokens/positives`. Rows whose R is NaN are ignored: they are padding or have no reward. The metrics of log π/μ
    also ignore rows whose log-ratio is NaN: the weight of these rows does not depend on the ratio.

    Args:
        weights_N (`torch.Tensor`):
            Weights, shape (N,).
        log_ratio_N (`torch.Tensor`):
            Log-ratios in nats, shape (N,).
        rewards_N (`torch.Tensor`):
            R, shape (N,).
        of_tokens_N3 (`torch.Tensor`, *optional*):
            For each completion, shape (N, 3): mean log π per token, log π, and the number of tokens. NaN or `None` if
            they are unknown.

    Returns:
        `dict[str, float]`: metrics by name.
    """
    real = ~rewards_N.isnan()
    of_tokens_N3 = (rewards_N.new_full((len(rewards_N), 3), torch.nan) if of_tokens_N3 is None else of_tokens_N3)[real]
    weights_N, log_ratio_N, rewards_N = weights_N[real], log_ratio_N[real], rewards_N[real]
    if len(rewards_N) == 0:
        return {}
    positive = rewards_N >= 0
    metrics = {
        "topr/weight_mean": weights_N.mean(),
        "topr/weight_not_one": ((weights_N - 1).abs() > ROUNDING).double().mean(),
        "topr/positive_share": (rewards_N > 0).double().mean(),  # R = 0 has no gradient
        "topr/reward": rewards_N.mean(),
        "topr/effective_positive_share": torch.tensor(effective_positive_share(rewards_N.numpy())),
        "topr/realized_positive_share": torch.tensor(effective_positive_share((weights_N * rewards_N).numpy())),
    }
    if len(negative_weights := weights_N[~positive]):
        metrics |= {
            "topr/weight_mean_negatives": negative_weights.mean(),
            "topr/negatives_tapered": (negative_weights < 1 - ROUNDING).double().mean(),
            "topr/negatives_dead": (negative_weights < DEAD_WEIGHT).double().mean(),
            "topr/negatives_effective": negative_weights.mean() ** 2 / negative_weights.square().mean(),
        }
    for name, sign in (("positives", positive), ("negatives", ~positive)):
        known = log_ratio_N[sign & ~log_ratio_N.isnan()]
        if len(known):
            metrics[f"topr/log_ratio/{name}/mean"] = known.mean()
            quantiles = known.quantile(torch.tensor(QUANTILES, dtype=known.dtype))
            for k, q in enumerate(QUANTILES):
                metrics[f"topr/log_ratio/{name}/q{round(q * 100):02d}"] = quantiles[k]
    for name, sign in (("positives", rewards_N > 0), ("negatives", rewards_N < 0)):
        known_M3 = of_tokens_N3[sign & ~of_tokens_N3[:, 0].isnan()]
        if len(known_M3):
            names = (f"topr/logps/{name}/token", f"topr/logps/{name}/completion", f"topr/tokens/{name}")
            metrics.update(zip(names, known_M3.mean(0), strict=True))
    undefined = {name for name in _MAY_BE_UNDEFINED if name in metrics and metrics[name].isnan()}
    return {name: float(value) for name, value in metrics.items() if name not in undefined}
