"""Training loop with AdamW, constant learning rate, no weight decay, clipped gradients and shuffled epochs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.methods import Objective
from benchmarks.setting import BATCH_ROWS


def adamw(model: PreTrainedModel, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)


def batches(size: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Yield batches of shuffled epochs without end. A batch may continue into the next epoch."""
    rng = np.random.default_rng(seed)
    queue = np.empty(0, dtype=np.int64)
    while True:
        while len(queue) < batch:
            queue = np.concatenate([queue, rng.permutation(size)])
        yield queue[:batch]
        queue = queue[batch:]


def train(
    model: PreTrainedModel,
    objective: Objective,
    steps: int,
    learning_rate: float,
    seed: int,
    measure_at: tuple[int, ...] = (),
    measure: Callable[[], dict[str, Any]] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> dict[str, list[Any]]:
    """Train in place.

    Returns:
        `curve`: for each step in `measure_at`, a dictionary with `step` and the result of `measure()`.
        `gradient_norms`: gradient norm of each step, before clipping.
    """
    optimizer = adamw(model, learning_rate)
    order = batches(objective.size, batch_rows // objective.rows_per_item, seed)
    curve, norms = [], []
    model.train()
    for step in range(1, steps + 1):
        norms.append(update(model, optimizer, objective.loss(next(order))))
        if step in measure_at and measure is not None:
            curve.append({"step": step, **measure()})
    return {"curve": curve, "gradient_norms": norms}


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one step, and return the gradient norm before clipping. Skip the step if this norm is not finite."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    return float(norm)
