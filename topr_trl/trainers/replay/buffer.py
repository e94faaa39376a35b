"""A replay buffer: rows of earlier generation batches, each with the log μ it got when it was fresh."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topr_trl.loss import TruncationLimits
from topr_trl.trainers.log_mu import needs_log_mu
from topr_trl.trainers.metrics import DEAD_WEIGHT


@dataclass(frozen=True)
class ReplayRow:
    """A row to be used again, on the CPU.

    Attributes:
        prompt_ids: (P,) int32.
        completion_ids: (T,) int32, T >= 1.
        written: (T,) bool, which tokens the model wrote; results of tools are not.
        mu_logps: (T,) float32 log μ of each token; 0 where it did not write the token.
        reward: R, after the baseline of the batch that the row was generated in; not 0.
        number: place in the order in which rows were generated, over all processes.
        step: optimizer steps that had been made then.
        weight: w that the loss gave the row last.
    """

    prompt_ids: Tensor
    completion_ids: Tensor
    written: Tensor
    mu_logps: Tensor
    reward: float
    number: int
    step: int
    weight: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = (self.prompt_ids, self.completion_ids, self.written, self.mu_logps)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def is_dead(self) -> bool:
        """A negative that contributes almost nothing."""
        return self.reward < 0 and self.weight < DEAD_WEIGHT


class ReplayBuffer:
    """The rows of one process that may be used again.

    `begin` is called with each generation batch, `note` after each forward, `settle` before the next batch: it takes
    the rows whose log μ was noted. A row that was never forwarded, or whose R is 0, is not kept. A negative whose
    noted weight is below `DEAD_WEIGHT` is removed.

    Args:
        size: rows that are kept.
        rule: which are kept where there are more: one of `topr_trl.settings.config.REPLAY_RULES`.
    """

    rows: list[ReplayRow]  # in the order in which they were generated
    _fresh: dict[str, Tensor]  # the generation batch
    _step: int
    _awaited: set[int]  # numbers of fresh rows that were not forwarded yet
    _logps: dict[int, tuple[Tensor, int]]  # of fresh rows: where log μ is
    _weights: list[tuple[list[int], Tensor]]

    def __init__(self, size: int, rule: str) -> None:
        self.size, self.rule = size, rule
        self.load({"rows": []})

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all rows."""
        return sum(row.nbytes for row in self.rows)

    def add(self, rows: list[ReplayRow]) -> None:
        """Add rows, and cut the buffer to its size."""
        alive = [row for row in [*self.rows, *rows] if not row.is_dead]
        self.rows = _kept(sorted(alive, key=lambda row: row.number), self.size, self.rule)

    def draw(self, count: int, seed: list[int]) -> list[ReplayRow]:
        """`count` different rows at random, or all if there are fewer."""
        places = np.random.default_rng(seed).permutation(len(self.rows))[:count]
        return [self.rows[place] for place in places]

    def begin(self, batch: dict[str, Any], step: int) -> None:
        """A generation batch, of which nothing has been forwarded yet, after `step` optimizer steps."""
        self._fresh = {name: batch[name] for name in _READ if batch.get(name) is not None}
        self._step, self._awaited, self._logps = step, set(batch["topr_rows"].tolist()), {}

    def note(self, numbers_B: Tensor, mu_logps_BT: Tensor, weights_B: Tensor) -> None:
        """Record what a forward pass computed: (B,) row numbers, (B, T) log μ, (B,) float w. Does not synchronize."""
        numbers = numbers_B.tolist()
        places = [place for place, number in enumerate(numbers) if number in self._awaited]
        if places:  # the first forward of a row has its log μ
            kept = mu_logps_BT[places].detach().float()
            self._logps |= {numbers[place]: (kept, k) for k, place in enumerate(places)}
            self._awaited -= {numbers[place] for place in places}
        self._weights.append((numbers, weights_B.detach().float()))

    def settle(self) -> None:
        """Take the rows that were forwarded since `begin`, and the last weights of all."""
        weights: dict[int, float] = {}
        for numbers, weights_B in self._weights:
            weights |= dict(zip(numbers, weights_B.tolist(), strict=True))
        entering = self._entering() if self._logps else []
        self._logps, self._weights = {}, []
        self.rows = [replace(row, weight=weights.get(row.number, row.weight)) for row in [*self.rows, *entering]]
        self.add([])

    def _entering(self) -> list[ReplayRow]:
        """The rows of the batch whose log μ was noted and whose R is a number other than 0."""
        fresh = {name: tensor.cpu() for name, tensor in self._fresh.items()}
        rewards = fresh["topr_rewards"].nan_to_num().tolist()
        return [
            _row(fresh, place, self._logps[number][0][self._logps[number][1]].cpu(), self._step)
            for place, number in enumerate(fresh["topr_rows"].tolist())
            if number in self._logps and rewards[place] != 0
        ]

    # Log μ of logged rows that brought none, and checkpoints.

    def without_log_mu(self, limits: TruncationLimits) -> list[ReplayRow]:
        """The rows whose weight depends on a log μ that is unknown."""
        needed = needs_log_mu(np.array([row.reward for row in self.rows]), limits)
        return [row for row, needs in zip(self.rows, needed, strict=True) if needs and row.mu_logps.isnan().any()]

    def set_log_mu(self, logps: dict[int, Tensor]) -> None:
        """log μ of rows by their number, where it is unknown: at least as many values as a completion has tokens."""
        for place, row in enumerate(self.rows):
            if row.number in logps:
                computed = logps[row.number][: len(row.mu_logps)]
                self.rows[place] = replace(row, mu_logps=torch.where(row.mu_logps.isnan(), computed, row.mu_logps))

    def count_from_here(self) -> None:
        """Steps are counted from 0 again: another training begins."""
        self.settle()
        self.rows = [replace(row, step=0) for row in self.rows]

    def remove(self, rows: list[ReplayRow]) -> None:
        """Take out rows, known by their numbers."""
        gone = {row.number for row in rows}
        self.rows = [row for row in self.rows if row.number not in gone]

    def state(self) -> dict[str, Any]:
        """For `torch.save`; `load` reads it."""
        return {"rows": [vars(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        """Hold the rows of a checkpoint alone: what was generated since is forgotten."""
        self.rows = [ReplayRow(**row) for row in state["rows"]]
        self._fresh, self._awaited, self._logps, self._weights = {}, set(), {}, []


def _kept(rows: list[ReplayRow], size: int, rule: str) -> list[ReplayRow]:
    """The rows that a rule keeps, in their order."""
    if rule == "negatives":
        rows = [row for row in rows if row.reward < 0]
    elif rule == "anna_karenina":
        newest = {row.prompt_ids.numpy().tobytes(): row.number for row in rows if row.reward > 0}
        rows = [row for row in rows if row.reward < 0 or newest[row.prompt_ids.numpy().tobytes()] == row.number]
    return rows[-size:]


_READ = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "topr_rewards", "topr_rows")


def _row(batch: dict[str, Tensor], place: int, mu_logps_T: Tensor, step: int) -> ReplayRow:
    """A row of a generation batch on the CPU, without its padding."""
    length = int(batch["completion_mask"][place].sum())
    own = batch["tool_mask"][place, :length] if "tool_mask" in batch else torch.ones(length)
    written = own != 0
    return ReplayRow(
        prompt_ids=batch["prompt_ids"][place][batch["prompt_mask"][place] != 0].to(torch.int32),
        completion_ids=batch["completion_ids"][place, :length].to(torch.int32),
        written=written,
        mu_logps=mu_logps_T[:length].masked_fill(~written, 0.0),
        reward=float(batch["topr_rewards"][place]),
        number=int(batch["topr_rows"][place]),
        step=step,
    )
