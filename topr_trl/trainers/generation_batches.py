"""Choose rows of TRL's generation batches, and trim their padding."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

# Keys of TRL's batch whose last columns are the tokens of the completions.
_OF_COMPLETIONS = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "token_type_ids", "mm_token_type_ids",
)  # fmt: skip


def keep_rows(
    batch: dict[str, Any], chosen: NDArray[np.int64], steps: int, process: int, processes: int
) -> dict[str, Any]:
    """Reduce the generation batch of a process to the chosen rows.

    Every process must keep the same number of rows, a multiple of `steps`. A process with fewer chosen rows also keeps
    some unchosen rows, whose R is NaN. `topr_scale` makes the loss the mean over the chosen rows.

    Args:
        batch (`dict[str, Any]`):
            TRL's generation batch of the process.
        chosen (`np.ndarray`):
            Numbers of the chosen rows among the rows of all processes.
        steps (`int`):
            Number of micro-batches of the generation batch.
        process (`int`):
            Number of the process.
        processes (`int`):
            Number of processes, whose batches have the same size.
    """
    device, rows = batch["completion_ids"].device, len(batch["completion_ids"])
    is_unchosen = torch.ones(processes, rows, dtype=torch.uint8)
    is_unchosen.view(-1)[torch.from_numpy(chosen)] = 0
    most = rows - int(is_unchosen.sum(1).min())
    count = min(max(-(-most // steps), 1) * steps, rows)
    keep = is_unchosen[process].argsort(stable=True)[:count]

    # The image tensors of a batch have no row axis. TRL's function splits them into lists with one item per row.
    batch = unsplit_pixel_values_by_grid(take_rows(split_pixel_values_by_grid(batch), keep))
    scale = count * processes / max(len(chosen), 1)
    batch["topr_scale"] = torch.tensor(scale, device=device)
    return batch


def take_rows(batch: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Return the rows of a batch at `places`. Values without rows, such as scalars, stay."""
    taken = dict(batch)
    for name, value in batch.items():
        if isinstance(value, list):
            taken[name] = [value[i] for i in places.tolist()]
        elif isinstance(value, Tensor) and value.dim() > 0:
            taken[name] = value[places.to(value.device)]
    return taken


def trim_padding(batch: dict[str, Any], multiple: int | None) -> dict[str, Any]:
    """Drop masked columns at the end. TRL pads to the longest completion of the generation batch.

    A batch with images is returned unchanged.

    Args:
        batch (`dict[str, Any]`):
            TRL's micro-batch. The function changes it.
        multiple (`int`, *optional*):
            Keep a multiple of this number of columns. `None` keeps only the needed columns.
    """
    if "pixel_values" in batch:  # Keep masked columns, which can be the tokens of an image that a tool returned.
        return batch
    full, step = batch["completion_ids"].size(1), multiple or 1
    needed = max(int(batch["completion_mask"].flip(-1).cumsum(-1).any(0).sum()), 1)  # up to the last 1 of any row
    excess = max(full - -(-needed // step) * step, 0)
    for name in _OF_COMPLETIONS:
        if name in batch and batch[name].size(1) >= full:
            batch[name] = batch[name][:, : batch[name].size(1) - excess]
    return batch
