"""Sample each row once, on any number of processes, in an order that a resumed run repeats."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Sampler

_MOST_TOGETHER = 8  # maximum of `rows_together`; sharing a prompt among more rows would save few tokens
_PROMPTS_PER_STEP = 16  # smallest number of prompts that a step should have


def rows_together(rows: int) -> int:
    """Return how many rows of a prompt stay together in an optimizer step with `rows` rows.

    Rows of a prompt have similar gradients, so a step with few prompts is noisier. This was measured with four prompts
    in a step of 32 rows, at a high learning rate.
    """
    return min(_MOST_TOGETHER, max(1, rows // _PROMPTS_PER_STEP))


class StepsSortedByLength(Sampler[int]):
    """Random order in which the rows of each optimizer step are sorted by length, longest first.

    Each step keeps its random rows and its gradient, which is a sum over the rows. Sorting only changes which rows
    share a micro-batch. Processes get adjacent micro-batches, whose rows have similar lengths, so no process waits long
    for another process.

    The last step is sorted only if it is full. `dataloader_drop_last` drops the last rows, which would be the shortest
    after sorting.

    Args:
        order: random order of the rows.
        lengths_N: number of tokens of each row.
        rows: number of rows per optimizer step, over all processes and micro-batches.
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
        """Set the epoch, which seeds the order. Accelerate calls this method, so a resumed run repeats the order."""
        self.order.set_epoch(epoch)


class StepsOfGroups(Sampler[int]):
    """Random order in which up to `rows_together` rows of a group stay together.

    Groups are cut into random pieces, and the pieces are shuffled. With `lengths_N`, the groups in an optimizer step
    are sorted by their longest row, longest first, so the pieces of a group become adjacent.

    Args:
        order: random order of the rows.
        groups_N: number of each row's group.
        lengths_N: number of tokens of each row, or None.
        rows: number of rows per optimizer step, over all processes and micro-batches.
    """

    def __init__(
        self, order: SeedableRandomSampler, groups_N: NDArray[np.int64], lengths_N: NDArray[np.int64] | None, rows: int
    ) -> None:
        self.order, self.groups_N, self.lengths_N = order, groups_N, lengths_N
        self.rows, self.together = rows, rows_together(rows)

    def __len__(self) -> int:
        return len(self.order)

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
        # In a random order of rows, large groups tend to start early. So the pieces are shuffled again.
        shuffled = np.random.default_rng(order[:8]).permutation(len(pieces))
        pieces = [pieces[i] for i in shuffled]
        yield from (row for step in self._steps(pieces) for piece in step for row in piece)

    def _steps(self, pieces: list[list[int]]) -> Iterator[list[list[int]]]:
        """Cut the pieces into steps. If a step ends within a piece, the next step starts with the rest."""
        step: list[list[int]] = []
        room = self.rows
        for piece in pieces:
            while len(piece) >= room:
                yield self._sorted([*step, piece[:room]])
                piece, step, room = piece[room:], [], self.rows
            if piece:
                step.append(piece)
                room -= len(piece)
        yield step  # Not sorted, so that `dataloader_drop_last` drops random rows.

    def _sorted(self, step: list[list[int]]) -> list[list[int]]:
        if self.lengths_N is None:
            return step
        longest: dict[int, int] = {}  # length of the longest row of each group
        for row in (row for piece in step for row in piece):
            group = int(self.groups_N[row])
            longest[group] = max(longest.get(group, 0), int(self.lengths_N[row]))
        return sorted(step, key=lambda piece: (-longest[group := int(self.groups_N[piece[0]])], group))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the order. Accelerate calls this method, so a resumed run repeats the order."""
        self.order.set_epoch(epoch)


class ReseededSampler(Sampler[int]):
    """Sampler that seeds TRL's sampler with the number of the epoch, so that a resumed run repeats the order."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Seed the order with the number of the epoch."""
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)


class FilledSampler(Sampler[int]):
    """Sampler that pads an order of N rows to a multiple of `multiple`, with the numbers N, N + 1, ...

    These numbers stand for rows without a reward. See `FilledRows`. Without them, Accelerate would repeat rows to fill
    the last batches of several processes (huggingface/accelerate#1674).
    """

    def __init__(self, order: Any, multiple: int) -> None:
        self.order, self.multiple = order, multiple

    def __len__(self) -> int:
        return -(-len(self.order) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), len(self))

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the padded order."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)


class FilledRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized rows by number. Numbers beyond the last row give rows without a reward, which the loss ignores."""

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
