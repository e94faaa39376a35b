"""The order of rows within an optimiser step: by length, so that micro-batches hold little padding."""

from collections.abc import Iterator

import numpy as np
from accelerate.data_loader import SeedableRandomSampler
from numpy.typing import NDArray
from torch.utils.data import Sampler


class StepsSortedByLength(Sampler[int]):
    """A random order whose optimiser steps are sorted by length, longest first.

    Which rows a step has stays random, and so does what it computes, a sum over its rows: only which of them share a
    micro-batch changes. Processes get micro-batches of the same place in the order, so none waits for another.

    If the rows do not fill the last step, the first and the last are left as they are: Accelerate fills the last with
    rows of the first, or drops what is over, and neither should hit the long rows, or the short ones.

    Args:
        order: the random order of the rows.
        lengths_N: (N,) tokens of each row.
        rows: of an optimiser step, over all processes and micro-batches.
    """

    def __init__(self, order: SeedableRandomSampler, lengths_N: NDArray[np.int64], rows: int) -> None:
        self.order, self.lengths_N, self.rows = order, lengths_N, rows

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(self.order, dtype=np.int64)
        full = len(order) % self.rows == 0
        for start in range(0, len(order), self.rows):
            step = order[start : start + self.rows]
            if full or 0 < start < len(order) - self.rows:
                step = step[np.argsort(-self.lengths_N[step], kind="stable")]
            yield from step.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Accelerate says which epoch begins; a resumed run shuffles as it would have."""
        self.order.set_epoch(epoch)
