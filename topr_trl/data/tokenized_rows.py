"""Compute lengths and prompt groups of tokenized rows, and check that a model can read the rows.

Tokenized rows have these columns:

| column | meaning |
|---|---|
| `input_ids` | tokens of prompt and completion |
| `prompt_length` | number of tokens of the prompt |
| `reward` | R: the reward minus the baseline; or a list, if turns have rewards of their own |
| `given_reward` | the reward before the baseline is subtracted; or a list |
| `dataset` | number of the dataset in the trainer |
| `row` | position of the row in the dataset |
| `mu_logps`, `mu_fingerprint`, `sampler_logps` | as in `topr_trl.data.rows`, if the rows have these columns |
| `completion_mask` | whether the model wrote each token of the completion; only if a row has context |
| `part_lengths` | lengths of the parts of a rollout, which are concatenated in `input_ids` |

With `log_mu="sampler"`, the column `sampler_logps` is renamed to `mu_logps`. Lists of log-probabilities have no values
for context.

A list of rewards has one value for the whole completion, or a value for each turn of the model. A turn is a run of
tokens in `completion_mask`. NaN marks a turn that does not count.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from topr_trl.data.masks import MASK
from topr_trl.data.trajectories import PARTS

COLUMNS = ("input_ids", "prompt_length", MASK, PARTS, "reward", "mu_logps", "dataset", "row")
_NAMED = 20  # maximum number of rows that an error message lists


def is_prepared(rows: object) -> bool:
    """Whether rows are already tokenized, like the evaluation sets that `Trainer` passes to `evaluate`."""
    return isinstance(rows, Dataset) and {"input_ids", "prompt_length", "row"} <= set(rows.column_names)


def column(dataset: Dataset, name: str) -> pa.ChunkedArray:
    """Return an Arrow column in the order of the dataset, which can differ from the order of its table."""
    if dataset._indices is None:  # The table has the order of the dataset, so the two copies below are not needed.
        return dataset.data.column(name)
    return dataset.select_columns([name]).with_format("arrow")[:][name]


def lengths_of(dataset: Dataset) -> NDArray[np.int64]:
    """Return the number of tokens in `input_ids` of each row, shape (N,)."""
    return np.asarray(pc.list_value_length(column(dataset, "input_ids")), dtype=np.int64)


def sequence_lengths(dataset: Dataset) -> NDArray[np.int64]:
    """Return the number of tokens of each row, or of its longest part if it has parts, shape (N,)."""
    if PARTS not in dataset.column_names:
        return lengths_of(dataset)
    parts = column(dataset, PARTS)
    starts = np.asarray(pc.list_value_length(parts)).cumsum()[:-1]
    return np.maximum.reduceat(np.asarray(pc.list_flatten(parts)), np.concatenate([[0], starts])).astype(np.int64)


def rewards_of_units(dataset: Dataset, name: str = "reward") -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the rewards of all units that count, shape (U,), and the row of each unit.

    Args:
        dataset ([`~datasets.Dataset`]): Tokenized rows.
        name (`str`, *optional*, defaults to `"reward"`): Column to read: `reward` or `given_reward`.
    """
    values = column(dataset, name)
    if not pa.types.is_list(values.type):
        return values.to_numpy(), np.arange(len(dataset))
    owners = np.repeat(np.arange(len(dataset)), np.asarray(pc.list_value_length(values)))
    flat = pc.list_flatten(values).to_numpy()
    return flat[~np.isnan(flat)], owners[~np.isnan(flat)]


def prompt_groups(dataset: Dataset) -> NDArray[np.int64]:
    """Return a group number for each row, shape (N,). Rows with equal prompt tokens have the same number."""
    prompts = column(dataset, "prompt_length").to_numpy()
    ids = pc.list_flatten(column(dataset, "input_ids")).to_numpy()
    lengths = lengths_of(dataset)
    starts = lengths.cumsum() - lengths
    numbers: dict[bytes, int] = {}
    return np.array(
        [
            numbers.setdefault(ids[start : start + length].tobytes(), len(numbers))
            for start, length in zip(starts, prompts, strict=True)
        ],
        dtype=np.int64,
    )


def part_saved_by_sharing(dataset: Dataset, groups_N: NDArray[np.int64], together: int, least: int) -> float:
    """Return the fraction of tokens saved if up to `together` rows with the same prompt compute the prompt only once.

    The last token of the prompt is never shared, because each row predicts the first token of its completion from it.

    Args:
        dataset ([`~datasets.Dataset`]): Tokenized rows.
        groups_N (`np.ndarray`): Group number of each row, from `prompt_groups`.
        together (`int`): Maximum number of rows that share a prompt.
        least (`int`): Minimum number of shared tokens. A prompt with at most `least` tokens is not shared.
    """
    rows_G = np.bincount(groups_N)
    shared_G = np.zeros(len(rows_G), dtype=np.int64)
    shared_G[groups_N] = column(dataset, "prompt_length").to_numpy() - 1
    again_G = rows_G - -(-rows_G // together)
    return float((again_G * shared_G)[shared_G >= least].sum() / max(lengths_of(dataset).sum(), 1))


_RESIZE = "If the token was added to the tokenizer, first call model.resize_token_embeddings(len(tokenizer))."


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise a ValueError if the model of this config has no embedding for the pad token or the stop token."""
    for name in ("pad_token", "eos_token"):
        number = getattr(tokenizer, f"{name}_id")
        if number is not None and not 0 <= number < config.vocab_size:
            raise ValueError(
                f"tokenizer.{name} {getattr(tokenizer, name)!r} has the id {number}, and the model has the ids 0 to "
                f"{config.vocab_size - 1}. {_RESIZE} Or set tokenizer.{name} to a token of the model."
            )


def check_ids(what: str, sequences: Iterable[Sequence[int]], config: PretrainedConfig) -> None:
    """Raise a ValueError if the model of this config has no embedding for a token. `what` names the sequences."""
    for ids in sequences:
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            wrong = next(number for number in ids if not 0 <= number < config.vocab_size)
            raise ValueError(
                f"{what} holds the token id {wrong}, and the model has the ids 0 to {config.vocab_size - 1}. {_RESIZE}"
            )


def check_tokens(
    name: str, dataset: Dataset, config: PretrainedConfig, max_length: int | None, virtual_tokens: int = 0
) -> None:
    """Check that a model with this config can read tokenized rows.

    `max_length` is a number of tokens, or None for no limit. `virtual_tokens` is the number of tokens that an adapter
    adds to each row.

    Raises:
        ValueError: a token id is outside the vocabulary, or a row is longer than `max_length` or than the model's
            context without the virtual tokens. The length of a row with parts is the length of its longest part.
    """
    vocabulary = config.vocab_size
    context = getattr(config, "max_position_embeddings", None)
    limits = {"max_length": max_length, "the model's context": None if context is None else context - virtual_tokens}
    lengths, ids, rows = lengths_of(dataset), pc.list_flatten(column(dataset, "input_ids")), column(dataset, "row")
    extremes = pc.min_max(ids)
    if extremes["min"].as_py() < 0 or extremes["max"].as_py() >= vocabulary:
        wrong = int(np.argmax((ids.to_numpy() < 0) | (ids.to_numpy() >= vocabulary)))
        row = rows[int(np.searchsorted(lengths.cumsum(), wrong, side="right"))]
        raise ValueError(
            f"Row {row} of the {name} dataset holds the token id {ids[wrong]}, and the model has the ids 0 to "
            f"{vocabulary - 1}: the id is from a different tokenizer. Drop prompt_ids and completion_ids, so that text "
            f"is tokenized, or train the model that the ids are for. {_RESIZE}"
        )
    lengths = sequence_lengths(dataset)
    for what, limit in limits.items():
        too_long = np.flatnonzero(lengths > (np.inf if limit is None else limit))
        if len(too_long):
            places = rows.to_numpy()[too_long].tolist()
            which = f": rows {', '.join(map(str, places[:_NAMED]))}{', ...' if places[_NAMED:] else ''}"
            raise ValueError(
                f"{len(too_long)} of {len(lengths)} rows of the {name} dataset are longer than {what}, {limit} "
                f"tokens; the first is row {places[0]} with {lengths[too_long[0]]}. Drop or shorten "
                f"them{which if places[1:] else ''}."
            )
