"""Completion masks: which tokens of a completion the model wrote.

In a trajectory of several turns the results of tools and later turns of the user are context: they are read, and count
neither in the loss, nor in the ratio, nor in the length. Rows say which tokens these are in one of three ways:

- `completion_mask` beside `completion_ids`: 1 where the model wrote, 0 where it read;
- `sampler_logps` that are null where the model wrote nothing;
- messages: all turns but the assistant's are context, see `topr_trl.data.messages`.

Without any of them the model wrote all of the completion.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.data.rows import MalformedRow, need_columns
from topr_trl.data.tables import from_table, set_column

MASK = "completion_mask"
PER_TOKEN = ("sampler_logps", "mu_logps")  # may have a value for each token of the completion


def have_masks(rows: Dataset) -> bool:
    """Whether rows with ids say which tokens the model wrote: by a mask, or by log-probabilities that are null."""
    if MASK in rows.column_names:
        return True
    if "sampler_logps" not in rows.column_names or not is_list(rows.data["sampler_logps"].type):
        return False
    return any(chunk.flatten().null_count for chunk in rows.data["sampler_logps"].chunks)


def explicit_masks(rows: Dataset) -> Dataset:
    """Rows with ids, whose masks are in `completion_mask` alone; see `apply_masks`."""
    if not have_masks(rows):
        return rows
    need_columns(rows.column_names, ["completion_ids"], "Rows with masks")
    table = rows.with_format("arrow")[:]
    if not is_list(kind := table.schema.field("completion_ids").type):
        raise ValueError(f"Column completion_ids must hold lists of token ids; it holds {kind}.")
    lengths = pc.fill_null(pc.list_value_length(table["completion_ids"]), 0)
    return from_table(apply_masks(table, lengths.to_pylist(), list(range(len(table)))))


def apply_masks(table: pa.Table, lengths: list[int], places: list[int]) -> pa.Table:
    """Check the masks of rows, and cut values per token to the tokens that the model wrote.

    Args:
        table: with `completion_mask`, or `sampler_logps` with nulls.
        lengths: tokens of the completions.
        places: of these rows in their dataset, for messages.

    Returns:
        The table with `completion_mask`: bool for each token of the completion, or null if the model wrote all of them.

    Raises:
        MalformedRow: a mask of another length or other values, or one without a token that the model wrote; or
            `sampler_logps` that are null where the model wrote.
    """
    # log μ may be a sum, which has nothing to cut.
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
            raise MalformedRow(places[n], "sampler_logps is null for tokens that the model wrote, by completion_mask")
        masks.append(None if mask.all() else mask)
        for values in per_token:
            if (own := values[n]) is not None and len(own) == length:
                values[n] = own[mask]
    table = set_column(table, MASK, pa.array(masks, pa.list_(pa.bool_())))
    for name in PER_TOKEN:
        if name in columns:
            kind = table.schema.field(name).type
            if not pa.types.is_floating(kind.value_type):  # whole numbers, which were read as float64
                kind = pa.list_(pa.float64())
            table = set_column(table, name, pa.array(columns[name], kind, from_pandas=True))
    return table


def written(mask: NDArray[Any] | None, sampler_logps: NDArray[Any] | None, tokens: int) -> NDArray[np.bool_]:
    """(T,) whether the model wrote each token of a completion.

    Args:
        mask: numbers or bool, None for all; NaN stands for null.
        sampler_logps: says it if there is no mask: NaN where the model wrote nothing.
        tokens: T.

    Raises:
        ValueError: the mask has another length or other values than 0 and 1, or there is none that is 1.
    """
    if mask is None:
        if sampler_logps is None or not np.isnan(sampler_logps).any():
            return np.ones(tokens, dtype=bool)
        if len(sampler_logps) != tokens:
            raise ValueError(
                f"sampler_logps is null for some of {len(sampler_logps)} tokens, and the completion has {tokens}: keep "
                "the sampler's `completion_ids` with it"
            )
        mask = ~np.isnan(sampler_logps)
    if len(mask) != tokens:
        raise ValueError(
            f"completion_mask has {len(mask)} values, and the completion {tokens} tokens. It is of `completion_ids`, "
            "without the prompt"
        )
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("completion_mask must be 1 for tokens that the model wrote and 0 for what it read")
    if not mask.any():
        raise ValueError("by its mask the model wrote nothing of the completion, so there is nothing to learn from it")
    return mask.astype(bool)


def _arrays(table: pa.Table, name: str) -> list[NDArray[np.float64] | None]:
    """A column of lists row by row as arrays, with NaN for null.

    Raises:
        ValueError: it does not hold lists of numbers.
    """
    kind = table[name].type
    values = kind.value_type if is_list(kind) else kind
    is_numeric = is_number(values) or pa.types.is_boolean(values) or pa.types.is_null(values)
    if not is_numeric or not (is_list(kind) or pa.types.is_null(kind)):
        raise ValueError(f"Column {name} must hold lists of numbers, one for each token; it holds {kind}.")
    # Integers that float64 rounds are no error here: neither masks nor log-probabilities have any.
    return list(table[name].cast(pa.large_list(pa.float64()), safe=False).to_numpy())


def is_number(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are numbers (bool is not one)."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists of any length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
