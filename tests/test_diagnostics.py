import warnings

import numpy as np
import pytest
import torch

from topr_trl.diagnostics import SilentBatches, sampler_distance, warn_if_dead, warn_if_far


def test_negatives_that_are_dead_early_are_warned_about():
    for steps, first_log in ((100, 1), (40, 10)):
        with pytest.warns(UserWarning, match=f"60% of the negatives have a weight under 0.01 at step 10 of {steps}"):
            assert warn_if_dead(0.6, 10, steps, first_log)
    assert not warn_if_dead(0.6, 11, 100, 1)
    assert not warn_if_dead(0.5, 1, 100, 1)


def test_a_far_sampler_is_warned_about():
    mu = [[-1.0, -2.0], [-0.5]]
    assert sampler_distance(mu, [None, None]) == {}
    near = sampler_distance(mu, [[-1.01, -1.98], None])
    assert near == {"token": pytest.approx(0.015), "token_max": pytest.approx(0.02), "response": pytest.approx(0.01)}
    with pytest.warns(UserWarning, match=r"differ from the trainer's by 0.50 per token"):
        sampler_distance(mu, [[-1.5, -2.5], [-1.0]])
    assert not warn_if_far(0.1)
    with pytest.warns(UserWarning, match=r"by 0.11 per token"):
        assert warn_if_far(0.11)


def test_other_tokens_than_the_samplers_are_warned_about_and_not_compared():
    with pytest.warns(UserWarning, match=r"^1 of 2 rows have sampler_logps of another length"):
        found = sampler_distance([[-1.0, -2.0], [-0.5]], [[-1.0], [-0.51]])
    assert found == {name: pytest.approx(0.01) for name in ("token", "token_max", "response")}
    with pytest.warns(UserWarning, match=r"^1 of 1 rows"):
        assert sampler_distance([[-1.0, -2.0]], [[-1.0]]) == {}
    assert sampler_distance([[]], [[]]) == {}


class Batches:
    """Generation batches, as `SilentBatches` sees them: rows and whether any R is not 0."""

    def __init__(self):
        self.silent = SilentBatches()

    def add(self, rows, reward=0.0, raw=1.0):
        """What is said after a batch, or None."""
        self.silent.add(np.full(rows, reward), torch.full((rows,), raw))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.silent.warn("mean")
        return str(caught[0].message) if caught else None


def test_a_first_batch_without_any_signal_is_said_once():
    batches = Batches()
    said = batches.add(4)
    assert said.startswith("All 4 completions so far have R = 0 after baseline=mean: their rewards are all the same,")
    assert [batches.add(4) for _ in range(12)] == [None] * 12


def test_ten_batches_in_a_row_without_signal_are_said():
    batches = Batches()
    assert batches.add(4, reward=0.5) is None
    assert [batches.add(4) for _ in range(9)] == [None] * 9
    assert batches.add(4, reward=-0.5) is None
    assert [batches.add(2) for _ in range(9)] == [None] * 9
    assert batches.add(2).startswith("All 20 completions of the last 10 generation batches have R = 0")


def test_rows_that_nobody_scored_are_no_sign():
    batches = Batches()
    assert batches.add(4, raw=torch.nan) is None
    assert batches.add(3).startswith("All 3 completions so far")
