"""Read completion masks, which mark the tokens of a completion that the model wrote.

In a trajectory of several turns, tool results and later user turns are context. The model reads context, but context
is not part of the loss, the ratio or the length. A row marks context in one of three ways:

- `completion_mask`, with `completion_ids`, is 1 for a token that the model wrote, and 0 for context.
- `sampler_logps` is null for context.
- In a completion of messages, assistant messages with `"weight": 0` and all messages of other roles are context. See
  `topr_trl.data.messages`.

Otherwise the model wrote the whole completion.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.data.rows import MalformedRow, need_columns
from topr_trl.data.tables import from_table, set_column

MASK = "completion_mask"
PER_TOKEN = ("sampler_logps", "mu_logps")  # columns that can have a value per token of the completion


def have_masks(rows: Dataset) -> bool:
    """Whether rows have a column `completion_mask`, or null values in the lists of `sampler_logps`."""
    if MASK in rows.column_names:
        return True
    if "sampler_logps" not in rows.column_names or not is_list(rows.data["sampler_logps"].type):
        return False
    return any(chunk.flatten().null_count for chunk in rows.data["sampler_logps"].chunks)


def explicit_masks(rows: Dataset) -> Dataset:
    """Return rows with masks in the column `completion_mask`. See `apply_masks`. Rows without masks are unchanged.

    Raises:
        ValueError: the rows have masks and no lists of token ids in `completion_ids`, or `apply_masks` raises an error.
    """
    if not have_masks(rows):
        return rows
    need_columns(rows.column_names, ["completion_ids"], "Rows with masks")
    table = rows.with_format("arrow")[:]
    if not is_list(kind := table.schema.field("completion_ids").type):
        raise ValueError(f"Column completion_ids must hold lists of token ids; it holds {kind}.")
    lengths = pc.fill_null(pc.list_value_length(table["completion_ids"]), 0)
    return from_table(apply_masks(table, lengths.to_pylist(), list(range(len(table)))))


def apply_masks(table: pa.Table, lengths: list[int], places: list[int]) -> pa.Table:
    """Check the masks of rows, and keep per-token values only for the tokens that the model wrote.

    Args:
        table (`pa.Table`): Rows with `completion_mask`, or with null values in `sampler_logps`.
        lengths (`list[int]`): Number of tokens of each completion.
        places (`list[int]`): Positions of the rows in their dataset, for error messages.

    Returns:
        `pa.Table`: the table with `completion_mask`, which has a bool per token of the completion. The mask of a row is
        null if the model wrote all tokens. Lists of log-probabilities that do not have one value per token of the
        completion are unchanged.

    Raises:
        MalformedRow: a mask has a wrong length or value, or marks no token as the model's; `sampler_logps` is null
            where the mask is 1; or there is no mask, and `sampler_logps` has a null and a wrong length.
        ValueError: a mask, or a column of log-probabilities per token, does not hold lists of numbers.
    """
    # Skip a column of log-probabilities that holds sums, which have no values per token.
    present = [name for name in (MASK, *PER_TOKEN) if name in table.column_names]
    columns = {name: _arrays(table, name) for name in present if name == MASK or is_list(table.schema.field(name).type)}
    per_token = [columns[name] for name in PER_TOKEN if name in columns]
    masks: list[NDArray[np.bool_] | None] = []
    for n, length in enumerate(lengths):
        given, logps = (columns[name][n] if name in columns else None for name in (MASK, "sampler_logps"))
        try:
            mask = written(given, logps, length)
        except ValueError as error:
            raise MalformedRow(places[n], str(error)) from None
        if given is not None and logps is not None and len(logps) == length and np.isnan(logps[mask]).any():
            raise MalformedRow(places[n], "sampler_logps is null where completion_mask is 1")
        masks.append(None if mask.all() else mask)
        for values in per_token:
            if (own := values[n]) is not None and len(own) == length:
                values[n] = own[mask]
    table = set_column(table, MASK, pa.array(masks, pa.list_(pa.bool_())))
    for name in PER_TOKEN:
        if name in columns:
            kind = table.schema.field(name).type
            if not pa.types.is_floating(kind.value_type):  # `_arrays` reads integers as float64.
                kind = pa.list_(pa.float64())
            table = set_column(table, name, pa.array(columns[name], kind, from_pandas=True))
    return table


def written(mask: NDArray[Any] | None, sampler_logps: NDArray[Any] | None, tokens: int) -> NDArray[np.bool_]:
    """Return a mask of a completion, shape (T,), which is True for tokens that the model wrote.

    Args:
        mask (`np.ndarray`, *optional*): Mask of numbers or bools, with NaN for null. None if the row has no mask.
        sampler_logps (`np.ndarray`, *optional*): Log-probabilities. NaN marks context. They are used only if there is
            no mask.
        tokens (`int`): Number of tokens, T.

    Raises:
        ValueError: the mask has a wrong length, a value other than 0 and 1, or no 1; or there is no mask, and
            `sampler_logps` has a NaN and a wrong length.
    """
    if mask is None:
        if sampler_logps is None or not np.isnan(sampler_logps).any():
            return np.ones(tokens, dtype=bool)
        if len(sampler_logps) != tokens:
            raise ValueError(
                f"sampler_logps is null for some of {len(sampler_logps)} tokens, and the completion has {tokens}: keep "
                "the sampler's `completion_ids` with them"
            )
        mask = ~np.isnan(sampler_logps)
    if len(mask) != tokens:
        raise ValueError(
            f"completion_mask has {len(mask)} values, and the completion {tokens} tokens. It must have one value "
            "per token of `completion_ids`, without the prompt"
        )
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("completion_mask must be 1 for tokens that the model wrote and 0 for context")
    if not mask.any():
        raise ValueError(
            "its mask has no 1, so the model wrote no token of the completion, and there is nothing to learn"
        )
    return mask.astype(bool)


def runs_of(mask: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return the start and end of each turn, which is a run of tokens that the model wrote. Return [] without a mask.

    Args:
        mask (`Sequence[int]`, *optional*): Completion mask.
    """
    own = np.array(mask or ())
    edges = np.flatnonzero(np.diff(own, prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _arrays(table: pa.Table, name: str) -> list[NDArray[np.float64] | None]:
    """Return a column of lists as one array per row, with NaN for a null value and None for a null list.

    Raises:
        ValueError: the column does not hold lists of numbers.
    """
    kind = table[name].type
    values = kind.value_type if is_list(kind) else kind
    is_numeric = is_number(values) or pa.types.is_boolean(values) or pa.types.is_null(values)
    if not is_numeric or not (is_list(kind) or pa.types.is_null(kind)):
        raise ValueError(f"Column {name} must hold lists of numbers, one for each token; it holds {kind}.")
    # With `safe=False`, float64 can round large integers. Neither masks nor log-probabilities have such values.
    return list(table[name].cast(pa.large_list(pa.float64()), safe=False).to_numpy())


def is_number(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are numbers. A bool is not a number."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists of variable length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
