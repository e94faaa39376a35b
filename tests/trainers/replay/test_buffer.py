"""Tests of the replay buffer: the rows that it keeps, and their log μ and weights."""

import math
from dataclasses import replace

import pytest
import torch
from replay_rows import batch_of, row

from topr_trl.limits import PRESETS
from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow


def numbers(buffer):
    return [row.number for row in buffer.rows]


def test_the_newest_are_kept_and_the_size_is_a_bound():
    buffer = ReplayBuffer(3, "newest")
    for n in range(10):
        buffer.add([row(n, reward=(-1.0) ** n)])
        assert len(buffer) <= 3
    assert numbers(buffer) == [7, 8, 9]


def test_dead_negatives_leave_and_positives_cannot_be_dead():
    buffer = ReplayBuffer(9, "newest")
    buffer.add([row(0, weight=0.009), row(1, weight=0.01), row(2, reward=0.5, weight=0.0)])
    assert numbers(buffer) == [1, 2]
    unknown = {name: value for name, value in vars(row(0)).items() if name != "weight"}
    assert ReplayRow(**unknown).weight == 1.0


@pytest.mark.parametrize(("rule", "kept"), [("negatives", [1, 4]), ("positives", [2, 3])])
def test_rules_that_keep_one_sign(rule, kept):
    buffer = ReplayBuffer(2, rule)
    buffer.add([row(n, reward=0.5 if n in (2, 3) else -1.0) for n in range(5)])
    assert numbers(buffer) == kept


def test_anna_karenina_keeps_the_newest_positive_of_each_prompt():
    buffer = ReplayBuffer(4, "anna_karenina")
    buffer.add([row(0), row(1, 0.5, prompt=(5,)), row(2), row(3, 0.5), row(4, 0.5), row(5, 0.5), row(6)])
    assert numbers(buffer) == [1, 2, 5, 6]  # 3 and 4 have the prompt of the newer 5; 0 is the oldest


def test_a_checkpoint_forgets_what_was_generated_since():
    buffer = ReplayBuffer(9, "newest")
    buffer.add([row(3)])
    state = buffer.state()
    buffer.begin(batch_of([1.0, -1.0]), step=1)
    buffer.note(torch.tensor([100, 101]), torch.zeros(2, 4))
    buffer.load(state)
    buffer.settle({100: 1.0, 101: 0.5})
    assert numbers(buffer) == [3]


def test_a_draw_is_of_different_rows_and_depends_on_the_seed_alone():
    buffer = ReplayBuffer(50, "newest")
    buffer.add([row(n) for n in range(50)])
    drawn = [[r.number for r in buffer.draw(20, [0, step])] for step in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 20
    assert len(buffer.draw(99, [0])) == 50


def test_forwarded_rows_enter_with_their_first_log_mu_and_their_last_weight():
    buffer = ReplayBuffer(9, "newest")
    buffer.add([row(3)])
    buffer.begin(batch_of([1.0, -1.0, 0.0, math.nan, -1.0]), step=17)
    logps = torch.arange(20.0).view(5, 4) / -10
    buffer.note(torch.tensor([103, 101]), logps[[3, 1]])
    buffer.note(torch.tensor([100]), logps[[0]])
    buffer.note(torch.tensor([101, 3]), logps[[2, 2]])
    buffer.settle({103: 1.0, 101: 0.5, 100: 0.75, 3: 0.25})
    assert numbers(buffer) == [3, 100, 101]  # 102 has R = 0, 103 has no R, 104 has had no forward pass
    old, first, second = buffer.rows
    assert (old.weight, old.step, first.weight, second.weight, second.step) == (0.25, 0, 0.75, 0.5, 17)
    assert second.prompt_ids.tolist() == [3, 4]
    assert second.completion_ids.tolist() == [7, 8, 9]
    assert second.prompt_ids.dtype == second.completion_ids.dtype == torch.int32
    assert second.written.tolist() == [True, True, True]
    torch.testing.assert_close(first.mu_logps, logps[0, :3])
    torch.testing.assert_close(second.mu_logps, logps[1, :3])
    # A checkpoint in the middle of a batch also calls `settle`. Rows with a later forward pass enter afterwards, and no
    # row enters twice.
    buffer.note(torch.tensor([104, 101]), logps[[4, 4]])
    buffer.settle({104: 1.0, 101: 0.125})
    assert numbers(buffer) == [3, 100, 101, 104]
    assert buffer.rows[2].weight == 0.125
    torch.testing.assert_close(buffer.rows[2].mu_logps, logps[1, :3])


def test_results_of_tools_have_no_log_mu():
    buffer = ReplayBuffer(9, "newest")
    buffer.begin(batch_of([1.0], tool_mask=torch.tensor([[1, 0, 1, 1]])), step=1)
    buffer.note(torch.tensor([100]), torch.full((1, 4), -0.5))
    buffer.settle({})
    (kept,) = buffer.rows
    assert kept.written.tolist() == [True, False, True]
    assert kept.mu_logps.tolist() == [-0.5, 0.0, -0.5]


def test_masked_tokens_between_trained_ones_are_refused():
    """Replay keeps no attention mask, so log π of such a row would be computed in another context than its log μ."""
    buffer = ReplayBuffer(9, "newest")
    buffer.begin(batch_of([1.0], completion_mask=torch.tensor([[1, 0, 1, 0]])), step=1)
    buffer.note(torch.tensor([100]), torch.full((1, 4), -0.5))
    with pytest.raises(ValueError, match=r"completion_mask .* `tool_mask`.* replay_share=0"):
        buffer.settle({})


def test_rows_are_noted_before_there_is_a_batch():
    """A row that is in the buffer before the first generation batch, such as a logged row, gets its new weight."""
    buffer = ReplayBuffer(9, "newest")
    buffer.settle({})
    buffer.add([row(3)])
    buffer.note(torch.tensor([3]), torch.zeros(1, 3))
    buffer.settle({3: 0.5})
    assert [(r.number, r.weight) for r in buffer.rows] == [(3, 0.5)]


def test_log_mu_that_is_unknown_is_set_where_it_is_needed():
    buffer = ReplayBuffer(9, "newest")
    unknown = torch.tensor([math.nan, -0.5, math.nan])
    buffer.add([replace(row(n, reward), mu_logps=unknown) for n, reward in enumerate((-1.0, 1.0, -1.0))] + [row(3)])
    needed = buffer.without_log_mu(PRESETS["topr"])  # the weight of a positive is 1
    assert [r.number for r in needed] == [0, 2]
    buffer.set_log_mu({0: torch.tensor([-1.0, -2.0, -3.0, -4.0]), 3: torch.tensor([-7.0, -8.0, -9.0])})
    torch.testing.assert_close(buffer.rows[0].mu_logps, torch.tensor([-1.0, -0.5, -3.0]))  # known values stay
    torch.testing.assert_close(buffer.rows[3].mu_logps, row(3).mu_logps)
    assert [r.number for r in buffer.without_log_mu(PRESETS["topr"])] == [2]
    buffer.remove(buffer.without_log_mu(PRESETS["topr"]))
    assert numbers(buffer) == [0, 1, 3]
