"""Rows with the same `rollout_id` form a rollout, and their tokens are joined into one row."""

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from topr_trl.data.rows import rollout_column
from topr_trl.data.trajectories import Rollouts, Units, join_parts

IDS = ["b", None, "a", "b", None, "a", "b"]


def test_rows_of_a_rollout_stay_in_their_order():
    found = Rollouts.of(IDS)
    assert found.order_N.tolist() == [0, 3, 6, 1, 2, 5, 4]
    assert found.counts_R.tolist() == [3, 1, 2, 1]
    assert found.firsts_R.tolist() == [0, 1, 2, 4]
    assert found.rows_of(np.array([2, 0])).tolist() == [2, 5, 0, 3, 6]
    assert found.rows_of(np.array([], dtype=int)).tolist() == []
    assert found.of_each_row(found.firsts_R).tolist() == [0, 1, 2, 0, 4, 2, 0]
    assert Rollouts.of([0, 1] * 50).rows_of(np.array([1])).tolist() == list(range(1, 100, 2))


def test_without_ids_each_row_is_a_rollout():
    rows = Dataset.from_dict({"reward": [1.0, 2.0]})
    assert Rollouts.of(rollout_column(rows)).counts_R.tolist() == [1, 1]
    nothing = Rollouts.of([])
    assert (nothing.order_N.tolist(), nothing.counts_R.tolist(), nothing.firsts_R.tolist()) == ([], [], [])


def test_ids_are_numbers_or_text():
    missing = float("nan")  # as from pandas
    for ids in (["a", None, "a", None], [3, None, 3, None], [3.0, missing, 3.0, missing]):
        rows = Dataset.from_dict({"rollout_id": ids})
        assert Rollouts.of(rollout_column(rows)).counts_R.tolist() == [2, 1, 1]


def test_a_number_and_its_text_are_different_rollouts():
    assert Rollouts.of([1, "1", 1]).counts_R.tolist() == [2, 1]


def test_ids_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"Column `rollout_id` must hold numbers or text; row 0 holds \[1\]"):
        rollout_column(Dataset.from_dict({"rollout_id": [[1], [2]]}))


@pytest.mark.parametrize(
    ("values", "said"), [(np.array([1.0, 1, 1, 0.5]), "0.5"), (np.array(["x", "x", "x", "y"]), "y")]
)
def test_values_that_differ_within_a_rollout(values, said):
    found = Rollouts.of(["a", "b", "a", "b"])
    with pytest.raises(
        ValueError, match=rf"Row 3 has the reward {said}, and the first row of its rollout_id (1|x)\. The rows"
    ):
        found.check_same({"reward": values})
    found.check_same({"reward": values[[0, 1, 0, 1]]})


def test_units_are_rollouts_or_their_rated_turns():
    """Row 0 has one reward. Rows 1 and 3 are a rollout of four turns, of which two are rated. Row 2 has one turn."""
    rollouts, nan = Rollouts.of([None, "x", None, "x"]), np.nan
    turns = [None, np.array([1.0, nan]), np.array([2.0]), np.array([nan, -1.0])]
    units = Units.of(rollouts, np.array([0.5, nan, nan, nan]), turns)
    found = [column.tolist() for column in vars(units).values()]
    assert found == [[0, 1, 1, 2], [-1, 0, 3, 0], [0.5, 1, -1, 2], [0, 4, 1]]
    # The turn that is chosen twice needs a second copy of the rollout.
    chosen, values = units.rollouts_with(np.array([2, 0, 1, 2]), np.array([-1.0, 0.5, 1.0, -1.0]), np.arange(4.0))
    assert chosen.tolist() == [1, 0, 1]
    np.testing.assert_equal(values[0], [[1.0, nan, nan, -1.0], [0.5], [nan, nan, nan, -1.0]])
    np.testing.assert_equal(values[1], [[2.0, nan, nan, 0.0], [1.0], [nan, nan, nan, 3.0]])
    whole = Units.of(Rollouts.of(["x", None, "x"]), np.array([1.0, 0.5, 1.0]), None)
    assert [column.tolist() for column in vars(whole).values()] == [[0, 1], [-1, -1], [1.0, 0.5], [0, 0]]
    chosen, values = whole.rollouts_with(np.array([1, 1]), np.array([0.5, 0.25]))
    assert (chosen.tolist(), values[0].tolist()) == ([1, 1], [0.5, 0.25])


@pytest.fixture(autouse=True, params=[1, 256])
def joined_at_once(request, monkeypatch):
    monkeypatch.setattr("topr_trl.data.trajectories._JOINED_AT_ONCE", request.param)


def parts(**columns):
    """Return three tokenized rows: [1 2 | 3 4] and [1 2 3 4 5 | 6], which are one rollout, and [7 | 8 9]."""
    return Dataset(pa.table({
        "input_ids": pa.array([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [7, 8, 9]], pa.list_(pa.int32())),
        "prompt_length": pa.array([2, 5, 1], pa.int32()), **columns,
    }))  # fmt: skip


def test_parts_become_one_row():
    joined = join_parts(parts(row=[4, 5, 6]), np.array([2, 1]))
    assert joined["input_ids"][:] == [[1, 2, 3, 4, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    assert joined["prompt_length"][:] == [2, 1]
    # After the first prompt: the first completion, the second prompt as context, and the second completion.
    assert joined["completion_mask"][:] == [[True, True] + [False] * 5 + [True], [True, True]]
    assert joined["part_lengths"][:] == [[4, 6], [3]]
    assert joined["row"][:] == [4, 6]


def test_masks_of_parts_are_kept():
    masks = pa.array([[True, False], None, None], pa.list_(pa.bool_()))
    joined = join_parts(parts(completion_mask=masks), np.array([2, 1]))
    assert joined["completion_mask"][:] == [[True, False] + [False] * 5 + [True], [True, True]]


def test_values_per_token_and_their_sums():
    per_token = pa.array([[-1.0, -2.0], [-3.0], [-4.0, -5.0]], pa.list_(pa.float32()))
    joined = join_parts(parts(mu_logps=per_token, sampler_logps=per_token), np.array([2, 1]))
    assert joined["mu_logps"][:] == joined["sampler_logps"][:] == [[-1.0, -2.0, -3.0], [-4.0, -5.0]]
    assert joined.features["mu_logps"].feature.dtype == "float32"
    sums = join_parts(parts(mu_logps=pa.array([-3.0, -3.5, -9.0], pa.float32())), np.array([2, 1]))
    assert sums["mu_logps"][:] == [-6.5, -9.0]
    assert sums.features["mu_logps"].dtype == "float64"  # float64, so that sums of many parts are precise


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.float64())])
def test_an_unknown_value_of_a_part_is_unknown_for_its_rollout(kind):
    known = [-1.0, -2.0] if pa.types.is_list(kind) else -3.0
    joined = join_parts(parts(mu_logps=pa.array([known, None, known], kind)), np.array([2, 1]))
    assert joined["mu_logps"][:] == [None, known]


def test_other_columns_are_those_of_the_first_part():
    joined = join_parts(parts(reward=[1.0, 2.0, 3.0], problem_id=["a", "b", "c"]), np.array([2, 1]))
    assert joined["reward"][:] == [1.0, 3.0]
    assert joined["problem_id"][:] == ["a", "c"]


def test_a_rounded_rollout_id_is_refused():
    rows = Dataset.from_dict({"rollout_id": [1.0, 2.0**60, 2.0**60], "reward": [1.0] * 3})
    with pytest.raises(ValueError, match=r"`rollout_id` holds 1152921504606846976 in row 1.*int64 or as text"):
        rollout_column(rows)
