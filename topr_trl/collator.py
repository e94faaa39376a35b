"""Rows to batches, and flat batches back to rows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from topr_trl.baseline import FloatArray

# What is read of a row; one without `mu_logps` of its own is scored.
COLUMNS = ("input_ids", "prompt_length", "reward", "mu_logps", "row")


def unflatten(flat: Tensor, lengths: list[int]) -> Tensor:
    """Values of the next tokens of rows that follow each other, row by row.

    Args:
        flat: (1, N - 1), any dtype; N are the tokens of all rows, and perhaps some padding.
        lengths: tokens of each of the B rows.

    Returns:
        (B, T) padded with zeros, T the longest row; in each row's last place stands what belongs to none.
    """
    flat = torch.nn.functional.pad(flat[0], (0, 1))
    *rows, _ = torch.split(flat, [*lengths, len(flat) - sum(lengths)])  # the rest: pad_to_multiple_of
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Collator:
    """TRL's collator for `input_ids` and `labels`, and beside it the length, R and log μ of each row.

    Rows with R = 0 have no gradient and are left out of the forward, unless no other is there; `idle` counts them, and
    their numbers are the last of `row`.

    Attributes:
        scored: log μ by row number, of rows that brought none: the response's, or at the token level its tokens'.
    """

    def __init__(self, collate: Any, ratio_level: str, keep_idle: bool) -> None:
        self.collate, self.per_token, self.keep_idle = collate, ratio_level == "token", keep_idle
        self.scored: dict[int, float | FloatArray] = {}

    def collate_tokens(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [row["input_ids"] for row in rows]
        labels = [[-100] * row["prompt_length"] + row["input_ids"][row["prompt_length"] :] for row in rows]
        batch = self.collate([{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)])
        return {**batch, "lengths": list(map(len, ids))}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.keep_idle:
            rows = sorted(rows, key=lambda row: row["reward"] == 0)
        numbers = torch.tensor([row["row"] for row in rows])
        if not self.keep_idle:
            rows = [row for row in rows if row["reward"] != 0] or rows[:1]
        batch = self.collate_tokens(rows)
        batch["row"] = numbers
        batch["idle"] = len(numbers) - len(rows)
        batch["reward"] = torch.tensor([row["reward"] for row in rows], dtype=torch.float32)
        mu_logps: list[Any] = [row.get("mu_logps", self.scored.get(row["row"])) for row in rows]
        if self.per_token:  # of all tokens of the batch, one after the other
            counts = [len(row["input_ids"]) - row["prompt_length"] for row in rows]
            # Rows that need none may have brought none, or something else.
            known = [isinstance(mu, list | np.ndarray) and len(mu) == n for mu, n in zip(mu_logps, counts, strict=True)]
            filled = [mu if ok else [torch.nan] * n for mu, ok, n in zip(mu_logps, known, counts, strict=True)]
            mu_logps = [value for mu in filled for value in mu]
        else:
            mu_logps = [(sum(mu) if mu else torch.nan) if isinstance(mu, list) else mu for mu in mu_logps]
            mu_logps = [torch.nan if mu is None else mu for mu in mu_logps]
        batch["mu_logps"] = torch.tensor(mu_logps, dtype=torch.float32)
        return batch
