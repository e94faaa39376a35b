"""Samplers whose order survives a resume, and that read each row once on any number of processes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Sampler

_MOST_TOGETHER = 8  # rows of a prompt save most of what can be saved
_PROMPTS_PER_STEP = 16  # at least, where rows of a prompt stay together


def rows_together(rows: int) -> int:
    """Return how many rows of a prompt stay together in an optimizer step of so many rows.

    Rows of a prompt have similar gradients, so a step of few prompts is noisier: measured with four prompts in a step
    of 32 rows, at a high learning rate. The number does not depend on the number of processes.
    """
    return min(_MOST_TOGETHER, max(1, rows // _PROMPTS_PER_STEP))


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


class StepsOfGroups(Sampler[int]):
    """A random order in which rows of a group stay together, as many as `rows_together` says.

    Groups are cut at random into pieces, and the pieces are shuffled. Within an optimizer step, pieces of a group
    become neighbors, and the groups are sorted by their longest row, longest first, unless `lengths_N` is None.

    Args:
        order: random order of the rows.
        groups_N: group of each row.
        lengths_N: tokens of each row.
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
        # A large group begins early in a random order of rows, so the pieces need an order of their own.
        shuffled = np.random.default_rng(order[:8]).permutation(len(pieces))
        pieces = [pieces[i] for i in shuffled]
        yield from (row for step in self._steps(pieces) for piece in step for row in piece)

    def _steps(self, pieces: list[list[int]]) -> Iterator[list[list[int]]]:
        """Cut the pieces into steps. A step may end within a piece; the next step takes the rest."""
        step: list[list[int]] = []
        room = self.rows
        for piece in pieces:
            while len(piece) >= room:
                yield self._sorted([*step, piece[:room]])
                piece, step, room = piece[room:], [], self.rows
            if piece:
                step.append(piece)
                room -= len(piece)
        yield step  # `dataloader_drop_last` drops its last rows, which are random if it is not sorted

    def _sorted(self, step: list[list[int]]) -> list[list[int]]:
        if self.lengths_N is None:
            return step
        longest: dict[int, int] = {}  # of the rows of each group
        for row in (row for piece in step for row in piece):
            group = int(self.groups_N[row])
            longest[group] = max(longest.get(group, 0), int(self.lengths_N[row]))
        return sorted(step, key=lambda piece: (-longest[group := int(self.groups_N[piece[0]])], group))

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
