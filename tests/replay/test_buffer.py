"""Which rows are kept to be used again, with which log μ."""

import math

import torch
from replay_rows import batch_of, row

from topr_trl.replay import ReplayBuffer


def numbers(buffer):
    return [row.number for row in buffer.rows]


def test_the_newest_are_kept_and_the_size_is_a_bound():
    buffer = ReplayBuffer(3, "newest")
    for n in range(10):
        buffer.add([row(n, reward=(-1.0) ** n)])
        assert len(buffer) <= 3
    assert numbers(buffer) == [7, 8, 9]
    assert buffer.nbytes == 3 * (2 * 4 + 3 * 4 + 3 + 3 * 4)


def test_dead_negatives_leave_and_positives_cannot_be_dead():
    buffer = ReplayBuffer(9, "newest")
    buffer.add([row(0, weight=0.009), row(1, weight=0.011), row(2, reward=1.0, weight=0.0)])
    assert numbers(buffer) == [1, 2]


def test_only_negatives():
    buffer = ReplayBuffer(2, "negatives")
    buffer.add([row(n, reward=1.0 if n == 2 else -1.0) for n in range(5)])
    assert numbers(buffer) == [3, 4]


def test_anna_karenina_keeps_the_newest_positive_of_each_prompt():
    buffer = ReplayBuffer(4, "anna_karenina")
    buffer.add([row(0, 1.0), row(1, 1.0, prompt=(5,)), row(2), row(3, 1.0), row(4), row(5)])
    assert numbers(buffer) == [2, 3, 4, 5]  # 0 has the prompt of 3; 1 is older than the others


def test_anna_karenina_does_not_end_in_positives_alone():
    buffer = ReplayBuffer(64, "anna_karenina")
    for n in range(40):
        buffer.add([row(4 * n + k, 1.0 if k < 2 else -1.0, prompt=(n, k)) for k in range(4)])
    assert sum(r.reward < 0 for r in buffer.rows) == 32


def test_a_checkpoint_forgets_what_was_generated_since():
    buffer = ReplayBuffer(9, "newest")
    buffer.add([row(3)])
    state = buffer.state()
    buffer.begin(batch_of([1.0, -1.0]), step=1)
    buffer.note(torch.tensor([100, 101]), torch.zeros(2, 4), torch.tensor([1.0, 0.5]))
    buffer.load(state)
    buffer.settle()
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
    buffer.note(torch.tensor([103, 101, 100]), logps[[3, 1, 0]], torch.ones(3))
    buffer.note(torch.tensor([101, 3]), logps[[2, 2]], torch.tensor([0.5, 0.25]))
    buffer.settle()
    assert numbers(buffer) == [3, 100, 101]  # 102 has R = 0, 103 none, 104 was not forwarded
    old, first, second = buffer.rows
    assert (old.weight, old.step, first.weight, second.weight, second.step) == (0.25, 0, 1.0, 0.5, 17)
    assert second.prompt_ids.tolist() == [3, 4]
    assert second.completion_ids.tolist() == [7, 8, 9]
    torch.testing.assert_close(second.mu_logps, logps[1, :3])
    # A checkpoint in the middle of a batch: what was forwarded afterwards enters, too, and nothing twice.
    buffer.note(torch.tensor([104, 101]), logps[[4, 4]], torch.tensor([1.0, 0.125]))
    buffer.settle()
    assert numbers(buffer) == [3, 100, 101, 104]
    assert buffer.rows[2].weight == 0.125
    torch.testing.assert_close(buffer.rows[2].mu_logps, logps[1, :3])
