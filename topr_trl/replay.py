"""A replay buffer: rows of earlier generation batches, each with the log μ it got when it was fresh."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topr_trl.metrics import DEAD_WEIGHT


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
        tensors = (self.prompt_ids, self.completion_ids, self.written, self.mu_logps)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def is_dead(self) -> bool:
        """A negative that has practically left the loss."""
        return self.reward < 0 and self.weight < DEAD_WEIGHT


class ReplayBuffer:
    """The rows of one process that may be used again.

    A generation batch is announced by `begin`; `settle` takes those of its rows whose log μ `note` has told in between.
    A row that was never forwarded, or whose R is 0, is not kept, and a dead negative leaves.

    Args:
        size: rows that are kept.
        rule: which are kept where there are more: one of `topr_trl.config.REPLAY_RULES`.
    """

    def __init__(self, size: int, rule: str) -> None:
        self.size, self.rule = size, rule
        self.rows: list[ReplayRow] = []  # in the order in which they were generated
        self._fresh: dict[str, Tensor] = {}
        self._step, self._entered = 0, set[int]()
        self._noted: list[tuple[list[int], Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
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
        self._step, self._entered = step, set()

    def note(self, numbers_B: Tensor, mu_logps_BT: Tensor, weights_B: Tensor) -> None:
        """What a forward has found of some rows, fresh or used again; the device is not waited for."""
        self._noted.append((numbers_B.tolist(), mu_logps_BT.detach().float(), weights_B.detach().float()))

    def settle(self) -> None:
        """Take the rows that were forwarded since `begin`, and the last weights of those that were used again."""
        mu_logps: dict[int, Tensor] = {}
        weights: dict[int, float] = {}
        for numbers, mu_logps_BT, weights_B in self._noted:
            mu_logps = dict(zip(numbers, mu_logps_BT.cpu(), strict=True)) | mu_logps  # the first forward counts
            weights |= dict(zip(numbers, weights_B.tolist(), strict=True))
        self._noted = []
        fresh = {name: tensor.cpu() for name, tensor in self._fresh.items()} if mu_logps else {}
        entering = [
            replace(_row(fresh, place, mu_logps[number], self._step), weight=weights[number])
            for place, number in enumerate(fresh["topr_rows"].tolist() if fresh else ())
            if number in mu_logps and number not in self._entered and _is_learned_from(fresh, place)
        ]
        self._entered |= {row.number for row in entering}
        self.rows = [replace(row, weight=weights.get(row.number, row.weight)) for row in self.rows]
        self.add(entering)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """For `torch.save`; `load` reads it."""
        return {"rows": [asdict(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        self.rows = [ReplayRow(**row) for row in state["rows"]]


def _kept(rows: list[ReplayRow], size: int, rule: str) -> list[ReplayRow]:
    """The rows that a rule keeps, in their order."""
    newest_first = rows[::-1]
    if rule == "negatives":
        newest_first = [row for row in newest_first if row.reward < 0]
    elif rule == "anna_karenina":
        first_positives: dict[bytes, ReplayRow] = {}
        for row in newest_first:
            if row.reward > 0:
                first_positives.setdefault(row.prompt_ids.numpy().tobytes(), row)
        newest_first = [*first_positives.values(), *(row for row in newest_first if row.reward < 0)]
    kept = {row.number for row in newest_first[:size]}
    return [row for row in rows if row.number in kept]


_READ = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "topr_rewards", "topr_rows")


def _is_learned_from(batch: dict[str, Tensor], place: int) -> bool:
    return bool(batch["topr_rewards"][place].nan_to_num(0.0) != 0)


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


def with_rows(batch: dict[str, Any], rows: list[ReplayRow], pad_token_id: int) -> dict[str, Any]:
    """TRL's generation batch of F rows with K others behind them.

    Where the batch has no log μ of its own rows (`old_per_token_logps`), that is NaN.

    Raises:
        ValueError: the batch has a column with a row axis that the K rows do not have, of images for instance.
    """
    shape, device = batch["completion_ids"].shape, batch["completion_ids"].device
    batch = {
        "old_per_token_logps": torch.full(shape, torch.nan, device=device),
        **{name: value for name, value in batch.items() if value is not None},
    }
    if not all(bool(row.written.all()) for row in rows):
        batch.setdefault("tool_mask", torch.ones(shape, dtype=torch.long, device=device))
    for name, values in batch.items():
        if isinstance(values, Tensor) and values.dim() == 0:
            continue
        if name not in _COLUMNS:
            raise ValueError(f"Rows with {name} cannot be used again: only text is kept. Set replay_share=0.")
        value_of, fill = _COLUMNS[name]
        own = [value_of(row) for row in rows]
        if values.dim() == 1:
            batch[name] = torch.cat([values, values.new_tensor(own)])
        else:
            fill = pad_token_id if name.endswith("_ids") else fill
            batch[name] = _behind(values, own, fill, pad_left=name.startswith("prompt"))
    return batch


# The columns of a generation batch with a row axis: what a row has in them, and what pads it.
_COLUMNS: dict[str, tuple[Callable[[ReplayRow], Any], float]] = {
    "prompt_ids": (lambda row: row.prompt_ids, 0),
    "prompt_mask": (lambda row: torch.ones_like(row.prompt_ids), 0),
    "completion_ids": (lambda row: row.completion_ids, 0),
    "completion_mask": (lambda row: torch.ones_like(row.completion_ids), 0),
    "tool_mask": (lambda row: row.written, 1),
    "old_per_token_logps": (lambda row: row.mu_logps, 0),
    "sampling_per_token_logps": (lambda row: row.mu_logps, 0),
    "importance_sampling_ratio": (lambda row: torch.ones(1), 1),  # not used by this loss
    "advantages": (lambda row: 0.0, 0),  # neither
    "topr_rewards": (lambda row: row.reward, 0),
    "topr_rows": (lambda row: row.number, 0),
}


def _behind(values_FT: Tensor, rows: list[Tensor], fill: float, pad_left: bool) -> Tensor:
    """(F + K, T') the values with K rows behind them, all padded to the longest."""
    width = max([values_FT.size(1), *map(len, rows)])
    missing = width - values_FT.size(1)
    behind = torch.full((len(rows), width), fill, dtype=values_FT.dtype)
    for k, row in enumerate(rows):
        behind[k, slice(width - len(row), width) if pad_left else slice(len(row))] = row.to(behind.dtype)
    padded = torch.nn.functional.pad(values_FT, (missing, 0) if pad_left else (0, missing), value=fill)
    return torch.cat([padded, behind.to(values_FT.device)])
