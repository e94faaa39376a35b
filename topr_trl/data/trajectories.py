"""Join the rows of a rollout, and find units. Each unit has one reward and one length.

A trajectory must be split into rows if the model did not read its earlier tokens unchanged. For instance, a template
removes thinking, or an agent shortens the context. The rows of such a trajectory are the parts of one rollout, and
share a `rollout_id`. After tokenization a rollout is one row, and `part_lengths` has the number of tokens of each part.

A unit is a whole rollout, or a turn of a rollout with its own reward (`turn_rewards`). The trainer counts, weights and
chooses units. All units of a rollout share a forward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.baseline import FloatArray
from topr_trl.data.masks import MASK, PER_TOKEN, is_list
from topr_trl.data.rows import ROLLOUT, TURN_REWARDS
from topr_trl.data.tables import from_table

PARTS = "part_lengths"
_JOINED_AT_ONCE = 256  # number of rollouts; joining takes about ten times the memory of their tokens


Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of a table, in the order of their first rows.

    Attributes:
        order_N (`np.ndarray`): Positions of all rows, grouped by rollout. The rows of a rollout keep the order of the
            table.
        counts_R (`np.ndarray`): Number of rows of each rollout.
    """

    order_N: NDArray[np.int64]
    counts_R: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[object]) -> "Rollouts":
        """Return the rollouts for N values of `rollout_id`. A row with the value None is a rollout with one row."""
        numbers: dict[object, int] = {}
        keys = (("alone", n) if rollout is None else rollout for n, rollout in enumerate(ids))
        of_row = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        return cls(np.argsort(of_row, kind="stable"), np.bincount(of_row))

    @property
    def firsts_R(self) -> NDArray[np.int64]:
        """Position of the first row of each rollout."""
        return self.order_N[self.counts_R.cumsum() - self.counts_R]

    def rows_of(self, rollouts_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the rows of selected rollouts, grouped by rollout."""
        parts = np.split(self.order_N, self.counts_R.cumsum()[:-1])
        return np.concatenate([parts[n] for n in rollouts_M]) if len(rollouts_M) else self.order_N[:0]

    def of_each_row(self, values_R: NDArray[Value]) -> NDArray[Value]:
        """Return the value of each row's rollout, shape (N,)."""
        found = np.empty(len(self.order_N), dtype=values_R.dtype)
        found[self.order_N] = np.repeat(values_R, self.counts_R)
        return found

    def check_same(self, columns: Mapping[str, NDArray[np.generic]]) -> None:
        """Raise a ValueError if rows of a rollout differ in a value. `columns` has N values for each name."""
        first_N = self.of_each_row(self.firsts_R)
        for name, values_N in columns.items():
            if (wrong := np.flatnonzero(values_N != values_N[first_N])).size:
                row = wrong[0]
                raise ValueError(
                    f"Row {row} has the {name} {_shown(values_N[row])}, and the first row of its {ROLLOUT} "
                    f"{_shown(values_N[first_N[row]])}. The rows of a rollout are one trajectory, with one {name}: "
                    f"give all of them the same {name}, or give each trajectory its own {ROLLOUT}."
                )


@dataclass(frozen=True)
class Units:
    """Units of a table: its rollouts, or their rated turns.

    Attributes:
        rollouts_U (`np.ndarray`): Number of the rollout of each unit.
        turns_U (`np.ndarray`): Position of each unit among the turns of its rollout, or -1 for a whole rollout.
        rewards_U (`np.ndarray`): Reward of each unit.
        turns_R (`np.ndarray`): Number of turns of each rollout, or 0 if the whole rollout has the reward.
    """

    rollouts_U: NDArray[np.int64]
    turns_U: NDArray[np.int64]
    rewards_U: FloatArray
    turns_R: NDArray[np.int64]

    @classmethod
    def of(cls, rollouts: Rollouts, rewards_N: FloatArray, turns_N: "Sequence[FloatArray | None] | None") -> "Units":
        """Return the units of rollouts.

        Args:
            rollouts (`Rollouts`): Rollouts of N rows.
            rewards_N (`np.ndarray`): Reward of each row, the same in all rows of a rollout.
            turns_N (`Sequence`, *optional*): Rewards of the turns of each row, with NaN for context. An entry is None
                for a row with a reward. The argument is None if all rows have rewards. The turns of a rollout are the
                turns of all its rows.

        Raises:
            ValueError: only some rows of a rollout have rewards of turns, or a rollout has no rated turn.
        """
        count = len(rollouts.counts_R)
        if turns_N is None:
            alone = np.full(count, -1)
            return cls(np.arange(count), alone, rewards_N[rollouts.firsts_R], np.zeros(count, dtype=np.int64))
        found: list[tuple[int, int, float]] = []
        turns_R = np.zeros(count, dtype=np.int64)
        for rollout, rows in enumerate(np.split(rollouts.order_N, rollouts.counts_R.cumsum()[:-1])):
            lists = [turns for row in rows if (turns := turns_N[row]) is not None]
            if not lists:
                found.append((rollout, -1, rewards_N[rows[0]]))
                continue
            if len(lists) < len(rows):
                raise ValueError(
                    f"Rows {rows.tolist()[:8]} are one {ROLLOUT}, and only some of them have {TURN_REWARDS}. Give all "
                    f"of them {TURN_REWARDS}, or all of them a reward."
                )
            rewards = np.concatenate(lists)
            turns_R[rollout] = len(rewards)
            rated = np.flatnonzero(~np.isnan(rewards))
            if not len(rated):
                raise ValueError(
                    f"Row {rows[0]} has {TURN_REWARDS} without a number, so it has nothing to learn. Rate a turn, or "
                    "drop the row."
                )
            found += [(rollout, turn, rewards[turn]) for turn in rated.tolist()]
        rollouts_U, turns_U, rewards_U = zip(*found, strict=True)
        return cls(np.array(rollouts_U), np.array(turns_U), np.array(rewards_U), turns_R)

    def rollouts_with(self, units_M: NDArray[np.int64], *values: FloatArray) -> tuple[NDArray[np.int64], list[Any]]:
        """Return the rollouts that hold chosen units, and the values of their units.

        A unit that is chosen several times is in as many copies of its rollout. Copies are ordered by their first unit.

        Args:
            units_M (`np.ndarray`): Numbers of the chosen units, which can repeat.
            *values (`np.ndarray`): Values of the chosen units, each of shape (M,).

        Returns:
            `tuple`: the rollout of each copy, and a list with one entry for each of `values`. If no rollout has turns,
            the entry is an array with the value of each copy. Otherwise, the entry has a list for each copy. For a
            whole rollout, this list has one value. For turns, it has one value per turn, with NaN for turns that are
            not in the copy.
        """
        if not self.turns_R.any():
            return self.rollouts_U[units_M], list(values)
        order = np.argsort(units_M, kind="stable")
        ordered = units_M[order]
        copies_M = np.empty(len(units_M), dtype=np.int64)  # number of earlier choices of the same unit
        copies_M[order] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        places: dict[tuple[int, int], int] = {}
        rollouts_M = self.rollouts_U[units_M].tolist()
        place_M = [places.setdefault(key, len(places)) for key in zip(rollouts_M, copies_M.tolist(), strict=True)]
        rollouts_K = np.array([rollout for rollout, _ in places])
        lists = []
        for each in values:
            rows = [[float("nan")] * max(1, count) for count in self.turns_R[rollouts_K]]
            for place, turn, value in zip(place_M, self.turns_U[units_M].tolist(), each.tolist(), strict=True):
                rows[place][max(turn, 0)] = value
            lists.append(rows)
        return rollouts_K, lists


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def join_parts(rows: Dataset, counts_R: NDArray[np.int64]) -> Dataset:
    """Join tokenized rows into tokenized rollouts, in memory.

    Args:
        rows ([`~datasets.Dataset`]): Tokenized rows, grouped by rollout. See `topr_trl.data.tokenization.tokenize`.
        counts_R (`np.ndarray`): Number of rows of each rollout.

    Returns:
        [`~datasets.Dataset`]: one row per rollout, with the concatenated `input_ids` of all parts, and `part_lengths`.
        `completion_mask` covers all tokens after the first part's prompt. It is False for the prompts of later parts.
        Log-probabilities per token are concatenated, and sums of log-probabilities are added. The result is null if any
        part has null. Other columns, such as `prompt_length`, have the value of the first part.
    """
    ends_R, tables = counts_R.cumsum(), []
    for start in range(0, len(counts_R), _JOINED_AT_ONCE):
        some = counts_R[start : start + _JOINED_AT_ONCE]
        end = ends_R[start + len(some) - 1]
        tables.append(_join(rows.select(range(end - some.sum(), end)), some))
    return from_table(pa.concat_tables(tables))


def _join(rows: Dataset, counts_R: NDArray[np.int64]) -> pa.Table:
    chunks = rows.with_format("arrow")[:]
    # All rows together can have more than 2**31 tokens.
    large = [pa.large_list(kind.value_type) if is_list(kind) else kind for kind in chunks.schema.types]
    table = chunks.cast(pa.schema(list(zip(chunks.column_names, large, strict=True)))).combine_chunks()
    lengths, prompts = (
        np.asarray(column) for column in (pc.list_value_length(table["input_ids"]), table["prompt_length"])
    )
    ends_R = counts_R.cumsum()
    starts_R = ends_R - counts_R
    part_of_token = np.repeat(np.arange(len(lengths)), lengths)
    place_in_part = np.arange(len(part_of_token)) - np.repeat(lengths.cumsum() - lengths, lengths)
    in_prompt = place_in_part < prompts[part_of_token]
    own = ~in_prompt
    if MASK in table.column_names:
        masked = np.asarray(pc.is_valid(table[MASK]))
        own[masked[part_of_token] & ~in_prompt] = np.asarray(pc.list_flatten(table[MASK]))
    is_first = np.zeros(len(lengths), dtype=bool)
    is_first[starts_R] = True
    after_prompt = ~(in_prompt & is_first[part_of_token])
    completion_lengths_R = np.add.reduceat(lengths, starts_R) - prompts[starts_R]
    joined = {
        "input_ids": _lists(pc.list_flatten(table["input_ids"]), np.add.reduceat(lengths, starts_R)),
        MASK: _lists(pa.array(own[after_prompt]), completion_lengths_R),
        PARTS: _lists(pa.array(lengths), counts_R),
    }
    for name in sorted(set(table.column_names) - set(joined)):  # `prompt_length` is one of these columns.
        joined[name] = _joined(table[name], starts_R, name in PER_TOKEN)
    return pa.table(joined)


def _joined(values: pa.ChunkedArray, starts_R: NDArray[np.int64], are_logps: bool) -> pa.Array:
    """Return a column with one value per rollout.

    Log-probabilities are concatenated or added, and the result is null if any part is null. Other columns have the
    value of the first part.
    """
    values = values.combine_chunks()
    if not are_logps:
        return values.take(pa.array(starts_R))
    unknown = np.logical_or.reduceat(np.asarray(pc.is_null(values)), starts_R)
    if not is_list(values.type):
        sums = np.add.reduceat(np.asarray(values.cast(pa.float64())), starts_R)
        return pa.array(sums, mask=unknown)
    counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0))
    return _lists(values.flatten(), np.add.reduceat(counts, starts_R), unknown)


def _lists(
    values: pa.Array | pa.ChunkedArray, counts: NDArray[np.int64], null: NDArray[np.bool_] | None = None
) -> pa.LargeListArray:
    """Split values into lists with `counts` values each, or null where `null` is True."""
    offsets = pa.array(np.concatenate([[0], counts.cumsum()]))
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return pa.LargeListArray.from_arrays(offsets, values, mask=None if null is None else pa.array(null))
