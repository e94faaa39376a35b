"""Convert replayed rows to the columns of TRL's generation batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from topr_trl.trainers.replay.buffer import ReplayRow


def check_columns(batch: dict[str, Any]) -> None:
    """Raise a ValueError if a generation batch has a column that replayed rows cannot have, for instance images."""
    for name, values in batch.items():
        if name not in _COLUMNS and not (values is None or (isinstance(values, Tensor) and values.dim() == 0)):
            raise ValueError(f"Rows with {name} cannot be replayed: only text is kept. Set replay_share=0.")


def with_rows(
    batch: dict[str, Any], rows: list[ReplayRow], pad_token_id: int, multiple: int | None = None
) -> dict[str, Any]:
    """Append K replayed rows to TRL's generation batch of F fresh rows.

    Args:
        batch (`dict[str, Any]`):
            TRL's generation batch.
        rows (`list[ReplayRow]`):
            Replayed rows, at least one.
        pad_token_id (`int`):
            Token that pads prompts and completions.
        multiple (`int`, *optional*):
            Pad prompts and completions to a multiple of this number of tokens. `None` pads to the longest one.

    Returns:
        `dict[str, Any]`: a batch of F + K rows, without the columns that are None. The column `topr_fresh` marks the
        fresh rows. If TRL's batch has no log μ (`old_per_token_logps`), the log μ of fresh rows is NaN.
    """
    ids_FT = batch["completion_ids"]
    batch = {
        "old_per_token_logps": torch.full_like(ids_FT, torch.nan, dtype=torch.float32),
        "topr_fresh": torch.ones_like(ids_FT[:, 0], dtype=torch.bool),
        **{name: value for name, value in batch.items() if value is not None},
    }
    if not all(bool(row.written.all()) for row in rows):
        batch.setdefault("tool_mask", torch.ones_like(ids_FT))
    for name, values in batch.items():
        if values.dim() == 1:
            own = torch.tensor([_COLUMNS[name](row) for row in rows])
            batch[name] = torch.cat([values, own.to(values)])
        elif values.dim() == 2:
            batch[name] = _padded(name, [*values, *map(_COLUMNS[name], rows)], pad_token_id, multiple)
    return batch


def batch_of(
    rows: list[ReplayRow], pad_token_id: int, device: torch.device, multiple: int | None = None
) -> dict[str, Tensor]:
    """Return the tokens of rows and their masks, padded as in TRL's generation batches.

    Args:
        rows (`list[ReplayRow]`):
            Rows, at least one.
        pad_token_id (`int`):
            Token that pads prompts and completions.
        device (`torch.device`):
            Device of the result.
        multiple (`int`, *optional*):
            Pad prompts and completions to a multiple of this number of tokens. `None` pads to the longest one.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return {
        name: _padded(name, list(map(_COLUMNS[name], rows)), pad_token_id, multiple).long().to(device) for name in names
    }


# Value of a replayed row in each column of a generation batch that has one entry per row.
_COLUMNS: dict[str, Callable[[ReplayRow], Any]] = {
    "prompt_ids": lambda row: row.prompt_ids,
    "prompt_mask": lambda row: torch.ones_like(row.prompt_ids),
    "completion_ids": lambda row: row.completion_ids,
    "completion_mask": lambda row: torch.ones_like(row.completion_ids),
    "tool_mask": lambda row: row.written,
    "old_per_token_logps": lambda row: row.mu_logps,
    "sampling_per_token_logps": lambda row: row.mu_logps,
    "advantages": lambda row: 0.0,  # After TRL's forward pass, w · R replaces it.
    "topr_rewards": lambda row: row.reward,
    "topr_rows": lambda row: row.number,
    "topr_fresh": lambda row: False,
}


def _padded(name: str, values: list[Tensor], pad_token_id: int, multiple: int | None) -> Tensor:
    """Return the rows of a column as a tensor of shape (N, T), padded as in TRL's batches.

    TRL pads prompts on the left and completions on the right.
    """
    fill = pad_token_id if name.endswith("_ids") else int(name == "tool_mask")
    return pad(values, fill, "left" if name.startswith("prompt") else "right", pad_to_multiple_of=multiple)
