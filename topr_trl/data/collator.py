"""Collate tokenized rows into batches, and split flat batches into sequences.

Parts of a rollout run as separate sequences and are rejoined after the forward pass.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from topr_trl.baseline import FloatArray
from topr_trl.data.masks import MASK, runs_of
from topr_trl.data.trajectories import PARTS

_CONTEXT = -100  # label of a token without a loss


def unflatten(flat: Tensor, lengths: list[int]) -> Tensor:
    """Split the per-token values of a flattened (padding-free) batch into its S sequences.

    Args:
        flat (`torch.Tensor`): One value for each predicted token (2 to N), shape (1, N - 1). The N tokens include
            padding at the end.
        lengths (`list[int]`): Number of tokens of each sequence.

    Returns:
        `torch.Tensor`: values padded with zeros, shape (S, T), where T is the length of the longest sequence. The value
        at the last token of each sequence belongs to no token of the sequence, and must be ignored.
    """
    flat = torch.nn.functional.pad(flat[0], (0, 1))
    # The last piece is padding from `pad_to_multiple_of`.
    *rows, _ = torch.split(flat, [*lengths, len(flat) - sum(lengths)])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Collator:
    """Collator that adds length, R and log μ of each row to TRL's batch of `input_ids` and `labels`.

    A row whose R is NaN does not count (see `FilledRows`), so the collator drops it. If no row of a batch counts, the
    batch keeps one row, because all processes must run a forward pass.

    Args:
        collate (`Callable`): TRL's collator.
        per_token (`bool`): Whether log μ has a value per token. Otherwise, log μ is the sum over the completion.
        skip_zeros (`bool`): Whether the forward pass skips rows with R = 0, because they have no gradient. If R is 0
            for all rows, the forward pass computes one row.
        log_mu (`Mapping`): log μ by `(dataset, row)`, for rows without a column `mu_logps`. The trainer fills this
            mapping before training.
    """

    def __init__(
        self, collate: Any, per_token: bool, skip_zeros: bool, log_mu: Mapping[tuple[int, int], float | FloatArray]
    ) -> None:
        self.collate, self.per_token, self.skip_zeros, self.log_mu = collate, per_token, skip_zeros, log_mu

    def collate_tokens(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch of all parts of the given rows, with two more keys.

        `lengths` has the number of tokens of each part, and `parts` has the number of parts of each row.
        """
        parts = [part for row in rows for part in _parts(row)]
        lengths = [len(part["input_ids"]) for part in parts]
        return {**self.collate(parts), "lengths": lengths, "parts": [len(row.get(PARTS) or [0]) for row in rows]}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of `collate_tokens` for the rows of the forward pass, with additional keys.

        A unit is a whole completion, or a turn with its own reward. N is the number of units that count, or 1 if no
        unit counts. The forward pass computes B of the N units. The batch holds the rows of these B units.

        | key | value |
        |---|---|
        | `row` | (N, 2) int64 row number and turn (-1 for a whole completion) of each unit; skipped units come last |
        | `reward` | (N,) float32 R |
        | `mu_logps` | (B,) float32 log μ; with a ratio per segment, one value per token, concatenated over the units |
        | `place` | (B,) int64 position of each unit's row in the batch; only if one of the B units is a turn |

        Unknown log μ is NaN.
        """
        units = [unit for row in rows for unit in _units(row)]
        units = [unit for unit in units if not math.isnan(unit.reward)] or units[:1]
        if self.skip_zeros:
            units.sort(key=lambda unit: unit.reward == 0)
        computed = [unit for unit in units if unit.reward != 0] or units[:1] if self.skip_zeros else units
        # A batch can hold equal copies of a row, so `id` identifies the rows.
        forward = {id(unit.row): unit.row for unit in computed}
        places = {row: place for place, row in enumerate(forward)}
        batch = self.collate_tokens(list(forward.values()))
        batch["row"] = torch.tensor([(unit.row["row"], unit.turn) for unit in units])
        batch["reward"] = torch.tensor([unit.reward for unit in units], dtype=torch.float32)
        # Values per token are concatenated over the units.
        mu_logps = [value for unit in computed for value in self._mu_logps(unit)]
        batch["mu_logps"] = torch.tensor(mu_logps, dtype=torch.float32)
        if any(unit.turn >= 0 for unit in computed):
            batch["place"] = torch.tensor([places[id(unit.row)] for unit in computed])
        return batch

    def _mu_logps(self, unit: "_Unit") -> FloatArray | list[float]:
        """Return log μ of each token of a unit, or a list with only their sum. Unknown log μ is NaN.

        If log μ of the row is a number, it is the sum over the row, so log μ of its turns and tokens is unknown. A list
        counts as unknown unless it has one number for each token that the model wrote.
        """
        row = unit.row
        mu: Any = row.get("mu_logps", self.log_mu.get((row["dataset"], row["row"])))
        if not self.per_token and unit.turn < 0 and isinstance(mu, float | int):
            return [mu]
        count = sum(row.get(MASK) or []) or len(row["input_ids"]) - row["prompt_length"]
        is_known = isinstance(mu, list | np.ndarray) and len(mu) == count
        is_known = is_known and (isinstance(mu, np.ndarray) or None not in mu)
        own = (mu if is_known else [torch.nan] * count)[unit.tokens]
        return own if self.per_token else [float(np.sum(own, dtype=np.float64))]


class _Unit(NamedTuple):
    """Whole completion, whose `turn` is -1, or a turn with its own R.

    `tokens` is the range of the unit's tokens among the tokens that the model wrote in the row.
    """

    row: dict[str, Any]
    turn: int
    reward: float
    tokens: slice


def _units(row: dict[str, Any]) -> list[_Unit]:
    """Return the units of a row."""
    rewards = row["reward"] if isinstance(row["reward"], list) else [row["reward"]]
    if len(rewards) == 1:
        return [_Unit(row, -1, rewards[0], slice(None))]
    ends = np.cumsum([end - start for start, end in runs_of(row[MASK])]).tolist()
    return [
        _Unit(row, turn, reward, slice(start, end))
        for turn, (reward, (start, end)) in enumerate(zip(rewards, pairwise([0, *ends]), strict=True))
    ]


def select_units(values_BT: Tensor, mask_BT: Tensor, place_U: Tensor, turn_U: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U, T) values and masks of units. The mask of a turn marks only the tokens of this turn.

    Args:
        values_BT (`torch.Tensor`): Values of the tokens of B rows.
        mask_BT (`torch.Tensor`): Completion mask, bool. A turn is a run of True.
        place_U (`torch.Tensor`): Row of each unit.
        turn_U (`torch.Tensor`): Position of the turn in its row, or -1 for the whole completion.
    """
    starts_BT = mask_BT & ~torch.nn.functional.pad(mask_BT[:, :-1], (1, 0))
    turns_BT = starts_BT.cumsum(1) - 1
    is_own_UT = (turn_U[:, None] < 0) | (turns_BT[place_U] == turn_U[:, None])
    return values_BT[place_U], mask_BT[place_U] & is_own_UT


def _parts(row: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return the sequences of a row. The label of a token that the model did not write is -100."""
    ids, prompt = row["input_ids"], row["prompt_length"]
    mask = row.get(MASK) or [True] * (len(ids) - prompt)
    own = [token if is_own else _CONTEXT for token, is_own in zip(ids[prompt:], mask, strict=True)]
    labels = [_CONTEXT] * prompt + own
    ends = np.cumsum(row.get(PARTS) or [len(ids)]).tolist()
    return [{"input_ids": ids[a:b], "labels": labels[a:b]} for a, b in pairwise([0, *ends])]


def join_sequences(values_ST: Tensor, parts: list[int]) -> Tensor:
    """Join the (S, T) values of sequences into (B, T') values of rows.

    `parts` has the number of sequences of each row. Padding stays between the sequences, where the mask is 0.
    """
    if len(parts) == len(values_ST):
        return values_ST
    rows = [chunk.flatten() for chunk in torch.split(values_ST, parts)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
