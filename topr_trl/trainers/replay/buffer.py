"""Store rows for replay: logged rows, and rows of earlier batches with log μ from their first forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topr_trl.limits import DEAD_WEIGHT, TruncationLimits
from topr_trl.trainers.log_mu import needs_log_mu


@dataclass(frozen=True)
class ReplayRow:
    """Row to replay, with tensors on the CPU.

    Attributes:
        prompt_ids (`torch.Tensor`):
            Token ids of the prompt, shape (P,), int32.
        completion_ids (`torch.Tensor`):
            Token ids of the completion, shape (T,) with T >= 1, int32.
        written (`torch.Tensor`):
            Whether the model wrote each token, shape (T,), bool. Tokens of tool results have False.
        mu_logps (`torch.Tensor`):
            log μ of each token in nats, shape (T,), float32. A token that the model did not write has 0. Unknown log μ
            is NaN.
        reward (`float`):
            R after the baseline of the generation batch, or of the logged rows. R is not 0.
        number (`int`):
            Number of the row in the order of generation, over all processes. Logged rows have negative numbers.
        step (`int`):
            Number of optimizer steps before the row was generated. Logged rows have 0.
        weight (`float`, *optional*, defaults to `1.0`):
            Latest weight w that the loss computed for the row.
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
    def is_dead(self) -> bool:
        """Whether the row is a negative with a weight below `DEAD_WEIGHT`."""
        return self.reward < 0 and self.weight < DEAD_WEIGHT


class ReplayBuffer:
    """Buffer of the rows that one process can replay.

    The trainer calls `begin` with each generation batch, `note` after each forward pass, and `settle` before the next
    batch. `settle` adds the rows of the batch that have had a forward pass, because that pass computes their log μ. It
    skips rows with R = 0, and removes negatives whose weight has fallen below `DEAD_WEIGHT`.

    Example:

    ```python
    >>> import torch
    >>> from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow

    >>> ids = torch.tensor([1, 2], dtype=torch.int32)
    >>> row = ReplayRow(ids, ids, written=ids > 0, mu_logps=-torch.ones(2), reward=-1.0, number=0, step=0)
    >>> buffer = ReplayBuffer(size=8, rule="newest")
    >>> buffer.add([row])
    >>> [row.number for row in buffer.draw(4, seed=[42])]
    [0]
    ```

    Args:
        size (`int`):
            Maximum number of rows.
        rule (`str`):
            Rule that chooses the rows to keep: `"newest"`, `"positives"`, `"negatives"` or `"anna_karenina"`. See
            `replay_rule` of [`TOPRConfig`].

    Attributes:
        rows (`list[ReplayRow]`):
            Rows of the buffer, in the order of generation.
    """

    rows: list[ReplayRow]
    _fresh: dict[str, Tensor]  # columns of the current generation batch, whose rows are called fresh
    _step: int  # number of optimizer steps before this batch
    _awaited: set[int]  # numbers of fresh rows that have not had a forward pass
    _logps: dict[int, tuple[Tensor, int]]  # log μ by the number of a fresh row: a tensor, and the row's index in it

    def __init__(self, size: int, rule: str) -> None:
        self.size, self.rule = size, rule
        self.load({"rows": []})

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: list[ReplayRow]) -> None:
        """Add rows. Then remove dead rows and rows that the rule does not keep, and keep the newest `size` rows."""
        alive = [row for row in [*self.rows, *rows] if not row.is_dead]
        self.rows = _kept(sorted(alive, key=lambda row: row.number), self.size, self.rule)

    def draw(self, count: int, seed: list[int]) -> list[ReplayRow]:
        """Draw `count` different rows at random. If there are fewer rows, return all of them in random order.

        Args:
            count (`int`):
                Number of rows.
            seed (`list[int]`):
                Seed of the random generator. A seed and a number of rows determine the drawn positions.
        """
        places = np.random.default_rng(seed).permutation(len(self.rows))[:count]
        return [self.rows[place] for place in places]

    def begin(self, batch: dict[str, Any], step: int) -> None:
        """Start a new generation batch. `settle` adds the rows of the batch after their forward passes.

        Args:
            batch (`dict[str, Any]`):
                TRL's generation batch, with `topr_rewards` and `topr_rows`.
            step (`int`):
                Number of optimizer steps so far.
        """
        self._fresh = {name: batch[name] for name in _READ if batch.get(name) is not None}
        self._step, self._awaited, self._logps = step, set(batch["topr_rows"].tolist()), {}

    def note(self, numbers_B: Tensor, mu_logps_BT: Tensor) -> None:
        """Record log μ of a forward pass, without waiting for the device.

        Args:
            numbers_B (`torch.Tensor`):
                Row numbers, shape (B,), on the CPU.
            mu_logps_BT (`torch.Tensor`):
                log μ in nats, shape (B, T).
        """
        numbers = numbers_B.tolist()
        places = [place for place, number in enumerate(numbers) if number in self._awaited]
        if places:  # Only the first forward pass of a row gives its log μ. Later passes do not change it.
            kept = mu_logps_BT[places].detach().float()
            self._logps |= {numbers[place]: (kept, k) for k, place in enumerate(places)}
            self._awaited -= {numbers[place] for place in places}

    def settle(self, weights: Mapping[int, float]) -> None:
        """Add fresh rows that have had a forward pass since `begin`. Update weights. Remove rows as `add` does.

        Args:
            weights (`Mapping[int, float]`):
                Latest weight that the loss computed, by row number. Rows that are not in `weights` keep their weight.
        """
        entering = self._entering() if self._logps else []
        self._logps = {}
        self.rows = [replace(row, weight=weights.get(row.number, row.weight)) for row in [*self.rows, *entering]]
        self.add([])

    def _entering(self) -> list[ReplayRow]:
        """Return the rows of the current batch that have had a forward pass, and whose R is neither NaN nor 0."""
        fresh = {name: tensor.cpu() for name, tensor in self._fresh.items()}
        rewards = fresh["topr_rewards"].nan_to_num().tolist()
        return [
            _row(fresh, place, self._logps[number][0][self._logps[number][1]].cpu(), self._step)
            for place, number in enumerate(fresh["topr_rows"].tolist())
            if number in self._logps and rewards[place] != 0
        ]

    def without_log_mu(self, limits: TruncationLimits) -> list[ReplayRow]:
        """Return the rows whose log μ is unknown, although their weight depends on log μ."""
        needed = needs_log_mu(np.array([row.reward for row in self.rows]), limits)
        return [row for row, needs in zip(self.rows, needed, strict=True) if needs and row.mu_logps.isnan().any()]

    def set_log_mu(self, logps: dict[int, Tensor]) -> None:
        """Fill in the unknown log μ of rows.

        Args:
            logps (`dict[int, torch.Tensor]`):
                log μ of each token in nats, by row number. Values after the last token of the completion are ignored.
        """
        for place, row in enumerate(self.rows):
            if row.number in logps:
                computed = logps[row.number][: len(row.mu_logps)]
                self.rows[place] = replace(row, mu_logps=torch.where(row.mu_logps.isnan(), computed, row.mu_logps))

    def count_from_here(self) -> None:
        """Set the step of all rows to 0, because a new run starts."""
        self.rows = [replace(row, step=0) for row in self.rows]

    def remove(self, rows: list[ReplayRow]) -> None:
        """Remove the rows that have the numbers of the given rows."""
        gone = {row.number for row in rows}
        self.rows = [row for row in self.rows if row.number not in gone]

    def state(self) -> dict[str, Any]:
        """Return the rows as a dict for `torch.save` and `load`."""
        return {"rows": [vars(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        """Replace all rows with the rows in a result of `state`. Forget the current generation batch."""
        self.rows = [ReplayRow(**row) for row in state["rows"]]
        self._fresh, self._awaited, self._logps = {}, set(), {}


def _kept(rows: list[ReplayRow], size: int, rule: str) -> list[ReplayRow]:
    """Return the newest rows that a rule keeps, at most `size` of them. The order of the rows does not change."""
    if rule in ("positives", "negatives"):
        rows = [row for row in rows if (row.reward > 0) == (rule == "positives")]
    elif rule == "anna_karenina":
        newest = {row.prompt_ids.numpy().tobytes(): row.number for row in rows if row.reward > 0}
        rows = [row for row in rows if row.reward < 0 or newest[row.prompt_ids.numpy().tobytes()] == row.number]
    return rows[-size:]


# Columns of a generation batch that the buffer reads.
_READ = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "topr_rewards", "topr_rows")


def _row(batch: dict[str, Tensor], place: int, mu_logps_T: Tensor, step: int) -> ReplayRow:
    """Convert one row of a generation batch to a `ReplayRow`, without padding. `place` is its position in the batch."""
    length = int(batch["completion_mask"][place].sum())
    if not batch["completion_mask"][place, :length].all():
        raise ValueError(
            "A row's completion_mask has zeros before its last token, and a replayed row would not have them, so π/μ "
            "would be wrong. Write the zeros to `tool_mask`, or set replay_share=0."
        )
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
