"""Choose the order of rows in training, on any number of processes. A resumed run repeats the order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Sampler

_MOST_TOGETHER = 8  # maximum of `rows_together`; sharing a prompt among more rows would save few more tokens
_PROMPTS_PER_STEP = 16  # smallest number of prompts that a step should have


def rows_together(rows: int) -> int:
    """Return how many rows of a prompt can stay together in an optimizer step with `rows` rows.

    Rows of a prompt have similar gradients, so the gradient of a step with few prompts is noisier. The limit leaves
    room for 16 prompts in a step of 16 or more rows.
    """
    return min(_MOST_TOGETHER, max(1, rows // _PROMPTS_PER_STEP))


class _Reordered(Sampler[int]):
    """Sampler that changes the order of an inner sampler. The inner sampler gets the number of the epoch."""

    order: Any

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the order. Accelerate calls this method, so a resumed run repeats the order."""
        self.order.set_epoch(epoch)


class StepsSortedByLength(_Reordered):
    """Sampler with a random order, in which the rows of each optimizer step are sorted by length, longest first.

    Each step keeps its random rows and its gradient, which is a sum over the rows. Sorting only changes which rows
    share a micro-batch. Processes get adjacent micro-batches, whose rows have similar lengths, so no process waits long
    for another process.

    The last step is sorted only if it is full. If an incomplete step were sorted, `dataloader_drop_last` would always
    drop its shortest rows.

    Args:
        order (`SeedableRandomSampler`): Random order of the rows.
        lengths_N (`np.ndarray`): Number of tokens of each row, shape (N,).
        rows (`int`): Number of rows per optimizer step, over all processes and micro-batches.
    """

    def __init__(self, order: SeedableRandomSampler, lengths_N: NDArray[np.int64], rows: int) -> None:
        self.order, self.lengths_N, self.rows = order, lengths_N, rows

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(self.order, dtype=np.int64)
        full = len(order) % self.rows == 0
        for start in range(0, len(order), self.rows):
            step = order[start : start + self.rows]
            if full or start < len(order) - self.rows:
                step = step[np.argsort(-self.lengths_N[step], kind="stable")]
            yield from step.tolist()


class StepsOfGroups(_Reordered):
    """Sampler with a random order, in which up to `rows_together` rows of a group stay together.

    The rows of a group have the same prompt. Groups are cut into random pieces, and the pieces are shuffled. With
    `lengths_N`, the groups in a full optimizer step are sorted by their longest row, longest first. The pieces of a
    group then become adjacent.

    Args:
        order (`SeedableRandomSampler`): Random order of the rows.
        groups_N (`np.ndarray`): Group number of each row, shape (N,).
        lengths_N (`np.ndarray`, *optional*): Number of tokens of each row, shape (N,). If `None`, steps are not sorted.
        rows (`int`): Number of rows per optimizer step, over all processes and micro-batches.
    """

    def __init__(
        self, order: SeedableRandomSampler, groups_N: NDArray[np.int64], lengths_N: NDArray[np.int64] | None, rows: int
    ) -> None:
        self.order, self.groups_N, self.lengths_N = order, groups_N, lengths_N
        self.rows, self.together = rows, rows_together(rows)

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(self.order, dtype=np.int64)
        pieces: list[list[int]] = []
        open_pieces: dict[int, list[int]] = {}
        for row in order.tolist():
            group = int(self.groups_N[row])
            piece = open_pieces.get(group)
            if piece is None or len(piece) == self.together:
                piece = open_pieces[group] = []
                pieces.append(piece)
            piece.append(row)
        # In a random order of rows, large groups tend to start early, so the pieces are shuffled. The first rows of the
        # order are the seed, so each epoch has a different shuffle, and a resumed run repeats the shuffle of its epoch.
        shuffled = np.random.default_rng(order[:8]).permutation(len(pieces))
        pieces = [pieces[i] for i in shuffled]
        yield from (row for step in self._steps(pieces) for piece in step for row in piece)

    def _steps(self, pieces: list[list[int]]) -> Iterator[list[list[int]]]:
        """Cut the pieces into steps. If a step ends within a piece, the next step starts with the rest of the piece."""
        step: list[list[int]] = []
        room = self.rows
        for piece in pieces:
            while len(piece) >= room:
                yield self._sorted([*step, piece[:room]])
                piece, step, room = piece[room:], [], self.rows
            if piece:
                step.append(piece)
                room -= len(piece)
        yield step  # The incomplete last step is not sorted, so that `dataloader_drop_last` drops random rows.

    def _sorted(self, step: list[list[int]]) -> list[list[int]]:
        if self.lengths_N is None:
            return step
        longest: dict[int, int] = {}  # length of the longest row of each group
        for row in (row for piece in step for row in piece):
            group = int(self.groups_N[row])
            longest[group] = max(longest.get(group, 0), int(self.lengths_N[row]))
        return sorted(step, key=lambda piece: (-longest[group := int(self.groups_N[piece[0]])], group))


class ReseededSampler(Sampler[int]):
    """Sampler that seeds TRL's sampler in each epoch, so that a resumed run repeats the order."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Seed a shuffling sampler with its seed plus the number of the epoch."""
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)


class FilledSampler(Sampler[int]):
    """Sampler that appends the numbers N, N + 1, ... to an order of N rows, up to a length divisible by `multiple`.

    `FilledRows` returns rows without a reward for these numbers. Without the added numbers, Accelerate would repeat
    rows to fill the last batches of several processes (huggingface/accelerate#1674).
    """

    def __init__(self, order: Any, multiple: int) -> None:
        self.order, self.multiple = order, multiple

    def __len__(self) -> int:
        return -(-len(self.order) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), len(self))

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the order of the N rows, if the order has a method `set_epoch`."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)


class FilledRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized rows by number. A number beyond the last row returns a row with reward NaN, which the loss ignores."""

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
