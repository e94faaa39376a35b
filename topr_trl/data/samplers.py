"""Samplers whose order survives a resume, and that read each row once on any number of processes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Sampler


class StepsSortedByLength(Sampler[int]):
    """A random order whose optimizer steps are sorted by length, longest first.

    Which rows a step has stays random, and so does what it computes, a sum over its rows: only which of them share a
    micro-batch changes. Processes get micro-batches of the same place in the order, so none waits for another.

    The last step is not sorted unless it is full. `dataloader_drop_last` drops its last rows, and after sorting these
    would be the shortest.

    `rows`: number of rows per optimizer step, over all processes and micro-batches.
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
            if full or start < len(order) - self.rows:
                step = step[np.argsort(-self.lengths_N[step], kind="stable")]
            yield from step.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch, as Accelerate asks; a resumed run then shuffles as it would have."""
        self.order.set_epoch(epoch)


class ReseededSampler(Sampler[int]):
    """Seed TRL's sampler with the number of the epoch, so that a resumed run repeats the order."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)


class FilledSampler(Sampler[int]):
    """Pad an order of N rows to a multiple of `multiple` with the numbers N, N + 1, ...

    These numbers stand for rows that do not count, see `FilledRows`. Without them Accelerate would fill the last
    batches of several processes with rows that were read before (huggingface/accelerate#1674).
    """

    def __init__(self, order: Any, multiple: int) -> None:
        self.order, self.multiple = order, multiple

    def __len__(self) -> int:
        return -(-len(self.order) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), len(self))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)


class FilledRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized rows by their numbers; a number from N on gives a row without a reward, which does not count."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        count = len(self.rows)
        found = self.rows.__getitems__([number % count for number in numbers])
        return [
            row if number < count else {**row, "reward": float("nan")}
            for number, row in zip(numbers, found, strict=True)
        ]
