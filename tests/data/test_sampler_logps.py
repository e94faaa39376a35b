import re

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from topr_trl.data.rows import training_temperatures
from topr_trl.data.sampler_logps import temperature_of, why_incomparable

VOCABULARY = 50


def sampled(**columns):
    return Dataset.from_dict({"prompt": ["a", "b"], **{name: list(values) for name, values in columns.items()}})


def test_temperature_of_rows():
    """A row without a temperature counts as 1. Temperatures are compared after rounding."""
    for distinct, expected in (({0.7}, 0.7), ({None}, 1.0), ({1.0, None}, 1.0), ({1e-7}, 1e-7), (set(), 1.0)):
        assert temperature_of({"train": distinct}) == expected
    assert temperature_of({}) == 1.0
    with pytest.raises(ValueError, match=r"^The train dataset .*temperatures: 0.7, 1 \(none given\)\."):
        temperature_of({"train": {0.7, None}})
    assert temperature_of({"train": {1 / 3}}, training=1 / 3) == 1 / 3
    with pytest.raises(ValueError, match=r"temperature 0\.333333"):
        temperature_of({"train": {1 / 3}}, training=0.33)


def test_rows_to_evaluate_that_do_not_say_get_the_temperature_of_the_rows_to_train_on():
    in_float32 = float(np.float32(0.7))
    for train, evaluated, expected in ((0.7, None, 0.7), (None, 1.0, 1.0), (0.7, in_float32, 0.7), (None, None, 1.0)):
        assert temperature_of({"train": {train}, "eval": {evaluated}}) == expected
    with pytest.raises(ValueError, match=r"eval dataset .*temperature 0.7, .* at 1"):
        temperature_of({"eval": {0.7}}, training=1.0)


@pytest.mark.parametrize(
    ("temperature", "columns", "wrong"),
    [
        (1.0, {}, None),
        (1.0, {"logprobs_mode": ("raw_logprobs",) * 2, "top_k": (5, 5), "top_p": (0.9, 0.9)}, None),
        (1.0, {"logprobs_mode": ("processed_logprobs",) * 2, "top_k": (-1, 0), "top_p": (1, None)}, None),
        (1.0, {"logprobs_mode": ("processed_logprobs",) * 2, "top_k": (float(VOCABULARY), 99.0)}, None),
        (1.0, {"logprobs_mode": ("processed_logprobs",) * 2, "top_k": (None, 1)},
         r"its rows .*top_k=1, .* were .*is processed_logprobs\), so they are larger .* weight\. "
         r"Set log_mu='trainer'; or .*top_p=1 and top_k=-1"),
        (1.0, {"top_p": (1.0, 0.95), "top_k": (0, 5)},
         r"its rows .*top_p=0.95 and top_k=5, .*may have been .*add a column logprobs_mode .*top_k=-1"),
        (0.7, {"logprobs_mode": ("processed_logprobs",) * 2}, None),
        (0.7, {"logprobs_mode": ("processed_logprobs", "raw_logprobs")},
         r"its rows .* are for .*mode is raw_logprobs\)\. Set log_mu='trainer'"),
        (0.7, {}, r"its rows .*temperature 0\.7, .*may be .*is None\)\. Set .*'trainer'; .*raw_logprobs or pro.*\)"),
    ],
)  # fmt: skip
def test_log_probabilities_that_can_be_log_mu(temperature, columns, wrong):
    why = why_incomparable(sampled(**columns), temperature, VOCABULARY)
    assert why is None if wrong is None else re.fullmatch(wrong, why)


@pytest.mark.parametrize("rows", [0, 2])
def test_columns_without_values_may_be_of_any_type(rows):
    nothing = Dataset(pa.table({name: pa.nulls(rows, pa.list_(pa.int64())) for name in ("top_p", "temperature")}))
    assert why_incomparable(nothing, 1.0, VOCABULARY) is None
    assert training_temperatures(nothing) <= {None}


@pytest.mark.parametrize(
    ("column", "wrong", "expected"),
    [
        ("top_p", 1.5, r"numbers in \(0, 1\]"), ("top_p", 0.0, r"numbers in \(0, 1\]"),
        ("top_k", 0.5, "whole numbers; below 1 means no limit"),
        ("logprobs_mode", "raw", "raw_logprobs or processed_logprobs"),
    ],
)  # fmt: skip
def test_settings_of_no_sampler_are_refused(column, wrong, expected):
    message = rf"^Column `{column}` must hold {expected}; row 1 holds {wrong!r}\. Fix or drop the column\.$"
    with pytest.raises(ValueError, match=message):
        why_incomparable(sampled(**{column: (None, wrong)}), 1.0, VOCABULARY)


def test_a_column_of_temperatures_holds_numbers_above_zero():
    remedy = "Drop greedy rows .*drop the column: log π is then computed at temperature 1"
    for wrong in (0.0, -1.0, float("inf"), "hot"):
        message = rf"^Column `temperature` must hold numbers above 0; row 1 holds .*\. {remedy}\.$"
        with pytest.raises(ValueError, match=message):
            training_temperatures(sampled(temperature=(None, wrong)))
