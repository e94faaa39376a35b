import numpy as np
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler

from topr_trl.step_order import StepsSortedByLength


def orders(epoch, rows=4, count=12):
    lengths = np.random.default_rng(0).integers(1, 100, count)
    plain, sorted_ = (SeedableRandomSampler(range(count), data_seed=3) for _ in range(2))
    sorted_ = StepsSortedByLength(sorted_, lengths, rows)
    for sampler in (plain, sorted_):
        sampler.set_epoch(epoch)
    assert len(sorted_) == count
    return lengths, list(plain), list(sorted_)


def test_steps_hold_the_same_rows_longest_first():
    lengths, plain, in_order = orders(epoch=0)
    for start in (0, 4, 8):
        step = in_order[start : start + 4]
        assert sorted(step) == sorted(plain[start : start + 4])
        assert list(lengths[step]) == sorted(lengths[step], reverse=True)


def test_what_does_not_fill_a_step_is_left_alone():
    # Accelerate fills the last batches with the first rows, or drops some: the same ones as without sorting.
    _lengths, plain, in_order = orders(epoch=0, count=14)
    assert in_order[:4] == plain[:4]
    assert in_order[12:] == plain[12:]
    assert in_order[4:12] != plain[4:12]
    for processes, drop_last in ((1, True), (2, True), (2, False)):
        kept = []
        for order in (plain, in_order):
            batches = [
                BatchSamplerShard(BatchSampler(order, 2, drop_last), processes, process) for process in range(processes)
            ]
            kept.append(sorted(row for batch in batches for rows in batch for row in rows))
        assert kept[0] == kept[1]


def test_every_epoch_has_an_order_of_its_own_that_can_be_had_again():
    assert orders(epoch=1)[2] != orders(epoch=0)[2]
    assert orders(epoch=1)[2] == orders(epoch=1)[2]


def test_rows_of_one_length_keep_their_random_order():
    plain, same = (SeedableRandomSampler(range(200), data_seed=3) for _ in range(2))
    plain, in_order = list(plain), list(StepsSortedByLength(same, np.arange(200) % 2, 200))
    assert in_order == [row for row in plain if row % 2] + [row for row in plain if not row % 2]
