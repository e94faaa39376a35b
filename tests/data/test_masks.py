import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from topr_trl.data.masks import apply_masks, explicit_masks, runs_of, written
from topr_trl.data.rows import MalformedRow
from topr_trl.data.tokenization import tokenize

MASKS = [[1, 0, 0, 1], None, [1, 1]]
IDS = {"prompt": ["a", "b", "c"], "prompt_ids": [[1], [2, 3], [4]], "completion_ids": [[5, 6, 7, 8], [9], [10, 11]]}


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.float32()])
def test_a_mask_beside_ids(tokenizer, kind):
    table = pa.table({**IDS, "completion_mask": pa.array(MASKS, pa.list_(pa.int64())).cast(pa.list_(kind)),
                      "sampler_logps": [[-1.0, 0.0, 0.0, -2.0], [-3.0], [-4.0, -5.0]],
                      "mu_logps": [[-1.5, -2.5], [-3.5], None]})  # fmt: skip
    found = tokenize(Dataset(table), tokenizer, ["sampler_logps", "mu_logps"])
    assert found["completion_mask"][:] == [[True, False, False, True], None, None]
    assert found["sampler_logps"][:] == [[-1.0, -2.0], [-3.0], [-4.0, -5.0]]  # Values for context are dropped.
    assert found["mu_logps"][:] == [[-1.5, -2.5], [-3.5], None]  # already one value per token that the model wrote


def test_log_probabilities_that_are_null_where_the_model_wrote_nothing(tokenizer):
    rows = Dataset.from_dict({**IDS, "sampler_logps": [[-1.0, None, None, -2.0], None, [-4.0, -5.0]]})
    found = tokenize(rows, tokenizer, ["sampler_logps"])
    assert found["completion_mask"][:] == [[True, False, False, True], None, None]
    assert found["sampler_logps"][:] == [[-1.0, -2.0], None, [-4.0, -5.0]]
    without = tokenize(rows.remove_columns("sampler_logps"), tokenizer)
    assert "completion_mask" not in without.column_names


def test_a_mask_is_the_same_whether_all_rows_have_ids_or_not(tokenizer):
    some = {name: [*values, None] for name, values in IDS.items()} | {"prompt": ["a", "b", "c", "3 + 4 ="]}
    rows = Dataset.from_dict({**some, "completion": [None] * 3 + ["7"], "completion_mask": [*MASKS, None],
                              "sampler_logps": [[-1.0, None, None, -2.0], [-3.0], None, None]})  # fmt: skip
    found = tokenize(rows, tokenizer, ["sampler_logps"])
    assert found["completion_mask"][:] == [[True, False, False, True], None, None, None]
    assert found["sampler_logps"][:] == [[-1.0, -2.0], [-3.0], None, None]


@pytest.mark.parametrize("all_ids", [True, False])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0, 1], r"completion_mask has 3 values, and the completion 4 tokens\. .* value per token .* the prompt"),
        ([0, 1, 0, 0, 1, 1], "completion_mask has 6 values"),
        ([1, 2, 0, 1], "'completion_mask must be 1 for tokens that the model wrote and 0 for context'"),
        ([1, None, 0, 1], "must be 1 for tokens that the model wrote and 0"),
        ([1, 2**60 + 1, 0, 1], "must be 1 for tokens that the model wrote and 0"),  # float64 rounds it
        (
            [0, 0, 0, 0],
            "'its mask has no 1, so the model wrote no token of the completion, and there is nothing to learn'",
        ),
    ],
)
def test_masks_that_cannot_be(tokenizer, mask, message, all_ids):
    rows = Dataset.from_dict({**IDS, "completion_mask": [None, None, mask]}).select([2, 0, 1])
    rows = rows.remove_columns("completion_ids").add_column("completion_ids", [[5, 6, 7, 8], [9], [10]])
    if not all_ids:
        rows = rows.remove_columns("prompt_ids")
    with pytest.raises(MalformedRow, match=message) as error:
        tokenize(rows, tokenizer)
    assert error.value.row == 0


def test_nulls_in_log_probabilities_of_other_tokens():
    with pytest.raises(
        ValueError, match=r"null for some of 3 tokens, and the completion has 2: keep the sampler's .* them$"
    ):
        written(None, np.array([-1.0, np.nan, -2.0]), 2)


def test_log_probabilities_that_are_null_where_the_mask_says_that_the_model_wrote():
    columns = {"completion_mask": [[1, 0], [1, 0]], "sampler_logps": [[-1.0, None], [None, -1.0]]}
    message = "sampler_logps is null where completion_mask is 1"
    with pytest.raises(MalformedRow) as error:
        apply_masks(pa.table(columns), [2, 2], [40, 41])
    assert error.value.args == (41, message)
    # A list with a different length than the completion is not compared with the mask, and keeps its nulls.
    longer = {"completion_mask": [[1, 0]], "sampler_logps": pa.array([[None, -1.0, -2.0]], pa.list_(pa.float32()))}
    found = apply_masks(pa.table(longer), [2], [0])
    assert found["sampler_logps"].to_pylist() == [[None, -1.0, -2.0]]
    assert found["sampler_logps"].type == pa.list_(pa.float32())


def test_places_are_named_as_they_were_given():
    with pytest.raises(MalformedRow) as error:
        apply_masks(pa.table({"completion_mask": [[0, 0]]}), [2], [41])
    assert error.value.row == 41


def test_masks_that_only_log_probabilities_say_become_explicit():
    rows = Dataset.from_dict({**IDS, "sampler_logps": [[-1.0, None, None, -2.0], None, [-4.0, -5.0]],
                              "mu_logps": [[-1.5, None, None, -2.5], None, [-4.5, -5.5]]})  # fmt: skip
    found = explicit_masks(rows.select([2, 0]))
    assert found["completion_mask"][:] == [None, [True, False, False, True]]
    assert found["mu_logps"][:] == [[-4.5, -5.5], [-1.5, -2.5]]
    whole = rows.remove_columns("sampler_logps")
    assert explicit_masks(whole) is whole
    assert explicit_masks(found.select([])).num_rows == 0


def test_log_probabilities_may_be_whole_numbers():
    lowest = -(2**63) + 1  # float64 rounds it
    table = pa.table({"completion_mask": [[1, 0], [1, 1]], "mu_logps": pa.array([[lowest, 0], [-1, -2]])})
    found = apply_masks(table, lengths=[2, 2], places=[0, 1])
    assert found["mu_logps"].to_pylist() == [[float(lowest)], [-1.0, -2.0]]
    assert found["mu_logps"].type == pa.list_(pa.float64())


def test_masks_of_ones_become_a_column_of_nulls():
    found = explicit_masks(Dataset.from_dict({**IDS, "completion_mask": [[1, 1, 1, 1], None, [1, 1]]}))
    assert found.data["completion_mask"].to_pylist() == [None] * 3
    assert found.data["completion_mask"].type == pa.list_(pa.bool_())


def test_masks_of_rows_without_ids():
    rows = Dataset.from_dict({"prompt": ["1", "2"], "completion_mask": [None, [1, 0]]})
    with pytest.raises(ValueError, match=r"^Rows with masks need .*completion_ids"):
        explicit_masks(rows)
    with pytest.raises(MalformedRow, match="completion_mask has 2 values, and the completion 0 tokens") as error:
        explicit_masks(rows.add_column("completion_ids", [[1], None]))
    assert error.value.row == 1


def test_a_sum_of_log_mu_stays_beside_a_mask(tokenizer):
    rows = Dataset.from_dict({**IDS, "completion_mask": MASKS, "mu_logps": [-4.0, -3.5, -9.0]})
    found = tokenize(rows, tokenizer, ["mu_logps"])
    assert found["mu_logps"][:] == [-4.0, -3.5, -9.0]
    assert found["completion_mask"][:] == [[True, False, False, True], None, None]
    assert explicit_masks(rows)["mu_logps"][:] == [-4.0, -3.5, -9.0]


@pytest.mark.parametrize(
    ("column", "values"),
    [("completion_mask", [1, 0, 1]), ("completion_mask", [["1"], ["1"], ["0"]]), ("completion_ids", [1, 2, 3])],
)
def test_columns_of_another_kind_are_named(column, values):
    rows = Dataset.from_dict({**IDS, "completion_mask": MASKS, column: values})
    with pytest.raises(ValueError, match=rf"Column {column} must hold lists of .*; it holds"):
        explicit_masks(rows)


def test_turns_are_runs_of_ones():
    assert runs_of([1, 1, 0, 1]) == [(0, 2), (3, 4)]
    assert runs_of(None) == runs_of([False]) == []


def test_a_mask_needs_ids(tokenizer):
    rows = Dataset.from_dict({"prompt": ["1"], "completion": ["2"], "completion_mask": [[1, 0]]})
    with pytest.raises(MalformedRow, match="a completion_mask and no completion_ids"):
        tokenize(rows, tokenizer)
