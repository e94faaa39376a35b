import itertools
import math

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import BatchSampler
from trl.trainer.utils import RepeatSampler

from topr_trl.data.batch_samplers import (
    FilledRows,
    FilledSampler,
    ReseededSampler,
    StepsOfGroups,
    StepsSortedByLength,
    rows_together,
)


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


def test_rows_that_do_not_fill_a_step_are_left_alone():
    # With drop_last, Accelerate drops the same rows with and without sorting.
    _lengths, plain, in_order = orders(epoch=0, count=14)
    assert in_order[12:] == plain[12:]
    assert in_order[:12] != plain[:12]
    for processes in (1, 2):
        kept = []
        for order in (plain, in_order):
            batches = [
                BatchSamplerShard(BatchSampler(order, 2, drop_last=True), processes, k) for k in range(processes)
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


# Rows of a prompt that stay together.


def grouped(epoch=0, rows=32, groups=20, of_group=10, sort=True):
    count = groups * of_group
    groups_N = np.random.default_rng(1).permutation(np.arange(count) % groups)
    lengths_N = np.random.default_rng(0).integers(1, 100, count) if sort else None
    sampler = StepsOfGroups(SeedableRandomSampler(range(count), data_seed=3), groups_N, lengths_N, rows)
    sampler.set_epoch(epoch)
    assert len(sampler) == count
    return groups_N, lengths_N, list(sampler)


def test_how_many_rows_of_a_prompt_stay_together():
    assert [rows_together(rows) for rows in (1, 16, 33, 64, 128, 4_096)] == [1, 1, 2, 4, 8, 8]


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("rows", [8, 32, 64, 128, 1_000])
def test_an_epoch_reads_each_row_once_and_rows_of_a_prompt_together(rows, sort):
    groups_N, _, order = grouped(rows=rows, sort=sort)
    assert sorted(order) == list(range(200))
    together = rows_together(rows)
    neighbors = sum(groups_N[a] == groups_N[b] for a, b in itertools.pairwise(order))
    # Every row but the first of a piece follows a row of its group. The end of a step may cut a piece in two.
    pieces = 20 * math.ceil(10 / together) + 200 // rows
    assert neighbors >= 200 - pieces if together > 1 else neighbors < 60


def test_small_groups_are_not_read_last():
    """Half of the rows are single, and the others are in groups of eight. Single rows are spread evenly."""
    groups_N = np.concatenate([np.repeat(np.arange(100), 8), np.arange(100, 900)])
    sampler = StepsOfGroups(SeedableRandomSampler(range(1_600), data_seed=3), groups_N, None, 128)
    places = np.argsort(list(sampler))
    assert places[800:].mean() / 1_600 == pytest.approx(0.5, abs=0.05)


def test_the_groups_of_a_step_are_sorted_by_their_longest_row():
    groups_N, lengths_N, order = grouped(rows=50)
    for start in range(0, 200, 50):
        step = order[start : start + 50]
        seen = [group for group, _ in itertools.groupby(groups_N[step])]
        assert len(seen) == len(set(seen))  # a group has one place in a step
        longest = [max(lengths_N[row] for row in step if groups_N[row] == group) for group in seen]
        assert longest == sorted(longest, reverse=True)


def test_groups_are_cut_and_shuffled_anew_in_each_epoch():
    assert grouped(epoch=1)[2] == grouped(epoch=1)[2]
    first, second = (
        {frozenset(order[k : k + 2]) for k in range(0, 200, 2)}
        for order in (grouped(epoch=epoch, rows=32, sort=False)[2] for epoch in (0, 1))
    )
    assert len(first & second) < 40  # By chance, one of nine pieces of two rows is the same.


def test_an_epoch_of_prompts_does_not_depend_on_the_epochs_before():
    def epochs(*numbers):
        sampler, orders = ReseededSampler(RepeatSampler(range(20), 1, seed=3)), []
        for epoch in numbers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        return orders

    zero, one, two = epochs(0, 1, 2)
    assert zero == list(RepeatSampler(range(20), 1, seed=3))  # The first epoch has TRL's order.
    assert zero != one == list(RepeatSampler(range(20), 1, seed=4)) != two
    assert epochs(2) == [two]
    assert epochs(1, 2) == [one, two]
    in_order = ReseededSampler(RepeatSampler(range(20), 1, shuffle=False))
    in_order.set_epoch(1)
    assert list(in_order) == list(range(20))


@pytest.mark.parametrize("count", [1, 2, 7, 12, 13])
def test_each_row_counts_once_in_two_processes(count):
    rows = FilledRows(Dataset.from_dict({"row": list(range(count)), "reward": [1.0] * count}))
    sampler = FilledSampler(range(count), 3 * 2)
    shards = [list(BatchSamplerShard(BatchSampler(sampler, 3, drop_last=False), 2, k)) for k in range(2)]
    assert len(shards[0]) == len(shards[1]) == math.ceil(count / 6)
    read = [row for batches in shards for batch in batches for row in rows.__getitems__(batch)]
    assert sorted(row["row"] for row in read if row["reward"] == 1) == list(range(count))
    assert sum(math.isnan(row["reward"]) for row in read) == len(read) - count
    assert (rows[0]["reward"], math.isnan(rows[count]["reward"])) == (1, True)
    assert len(rows) == count  # Accelerate computes the remainder from this length.


def test_a_filled_order_is_shuffled_as_the_order_in_it():
    filled, plain = (SeedableRandomSampler(range(10), data_seed=3) for _ in range(2))
    filled = FilledSampler(filled, 4)
    for sampler in (filled, plain):
        sampler.set_epoch(2)
    assert list(filled) == [*plain, 10, 11]
