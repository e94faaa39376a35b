"""Tokenized rows to batches, and flat batches back to rows.

Parts of a rollout run as separate sequences and are rejoined after the forward pass.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topr_trl.baseline import FloatArray
from topr_trl.data.masks import MASK
from topr_trl.data.trajectories import PARTS

_CONTEXT = -100  # the label that counts for nothing
NO_ROW = -1  # row number of a padding row


def unflatten(flat: Tensor, lengths: list[int]) -> Tensor:
    """Flat (1, N - 1) values of the next tokens, row by row; N are the tokens of all rows, and perhaps some padding.

    Returns:
        (B, T) padded with zeros, T the longest row; in each row's last place stands what belongs to none.
    """
    flat = torch.nn.functional.pad(flat[0], (0, 1))
    *rows, _ = torch.split(flat, [*lengths, len(flat) - sum(lengths)])  # the rest: pad_to_multiple_of
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Collator:
    """TRL's collator for `input_ids` and `labels`, and beside it the length, R and log μ of each row.

    Rows with R = 0 have no gradient and are left out of the forward, unless no other is there; `idle` counts them, and
    their numbers are the last of `row`. Rows without a reward (`FilledRows`) do not count; if there is no other row,
    one of them is computed.

    Args:
        ratio_level: of the loss; with `"token"` log μ is a value per token, else the sum over the completion.
        keep_idle: compute rows with R = 0 too.
        log_mu: log μ by the columns `dataset` and `row`, of rows that brought none; filled before training.
    """

    def __init__(
        self, collate: Any, ratio_level: str, keep_idle: bool, log_mu: Mapping[tuple[int, int], float | FloatArray]
    ) -> None:
        self.collate, self.per_token = collate, ratio_level == "token"
        self.keep_idle, self.log_mu = keep_idle, log_mu

    def collate_tokens(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch of B rows with S parts, and `lengths` of the parts and `parts` of each row."""
        parts = [part for row in rows for part in _parts(row)]
        lengths = [len(part["input_ids"]) for part in parts]
        return {**self.collate(parts), "lengths": lengths, "parts": [len(row.get(PARTS) or [0]) for row in rows]}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of `collate_tokens` for the B computed rows, plus these keys:

        `row` (B + idle,) int64, `idle` int, `reward` (B,) float32, `counts` bool, and `mu_logps` float32, (B,), or with
        a ratio per token one value for each token that the model wrote, row after row; NaN where log μ is not known.
        Without `counts`, the batch only keeps this process in step with the others, and its `row` is `NO_ROW`.
        """
        rows = [row for row in rows if row["reward"] == row["reward"]] or [{**rows[0], "reward": 0.0, "row": NO_ROW}]
        if not self.keep_idle:
            rows = sorted(rows, key=lambda row: row["reward"] == 0)
        numbers = torch.tensor([row["row"] for row in rows])
        if not self.keep_idle:
            rows = [row for row in rows if row["reward"] != 0] or rows[:1]
        batch = self.collate_tokens(rows)
        batch["row"] = numbers
        batch["idle"] = len(numbers) - len(rows)
        batch["counts"] = int(numbers[0]) != NO_ROW
        batch["reward"] = torch.tensor([row["reward"] for row in rows], dtype=torch.float32)
        if self.per_token:  # of all tokens of the batch, one after the other
            mu_logps = [value for row in rows for value in self._by_token(row)]
        else:
            mu_logps = [_sum(self._known(row)) for row in rows]
        batch["mu_logps"] = torch.tensor(mu_logps, dtype=torch.float32)
        return batch

    def _known(self, row: dict[str, Any]) -> Any:
        """log μ that a row brought, or that was computed for it; rows that need none may have brought anything."""
        return row.get("mu_logps", self.log_mu.get((row["dataset"], row["row"])))

    def _by_token(self, row: dict[str, Any]) -> FloatArray | list[float]:
        """log μ of each token that the model wrote, or NaN."""
        mu = self._known(row)
        count = sum(row.get(MASK) or []) or len(row["input_ids"]) - row["prompt_length"]
        return mu if isinstance(mu, list | np.ndarray) and len(mu) == count else [torch.nan] * count


def _sum(mu: Any) -> float:
    """log μ of a completion, of which rows that need none may have parts; NaN if it is not known."""
    if isinstance(mu, list):
        return sum(mu) if mu and None not in mu else torch.nan
    return torch.nan if mu is None else mu


def _labels(row: dict[str, Any]) -> list[int]:
    """Return the token ids of a row, with -100 for tokens that the model did not write."""
    completion = row["input_ids"][row["prompt_length"] :]
    mask = row.get(MASK) or [True] * len(completion)
    own = [token if is_own else _CONTEXT for token, is_own in zip(completion, mask, strict=True)]
    return [_CONTEXT] * row["prompt_length"] + own


def _parts(row: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The sequences of a row, with their labels."""
    ids, labels = row["input_ids"], _labels(row)
    ends = np.cumsum(row.get(PARTS) or [len(ids)]).tolist()
    return [{"input_ids": ids[a:b], "labels": labels[a:b]} for a, b in pairwise([0, *ends])]


def join_sequences(values_ST: Tensor, parts: list[int]) -> Tensor:
    """(S, T) values of sequences to (B, T') of rows: those of a row's sequences one after the other.

    `parts` are the sequences of each row. What pads one stays in between, where the mask is 0.
    """
    if len(parts) == len(values_ST):
        return values_ST
    rows = [chunk.flatten() for chunk in torch.split(values_ST, parts)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
