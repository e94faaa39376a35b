import math

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from topr_trl.data.collator import Collator, join_sequences, select_units, unflatten


def collator(per_token=False, skip_zeros=True, log_mu=None):
    return Collator(DataCollatorForLanguageModeling(pad_token_id=0), per_token, skip_zeros, log_mu or {})


def row(number=0, reward=1.0, ids=(5, 6, 7), prompt_length=1, dataset=0, **columns):
    return {
        "dataset": dataset, "row": number, "reward": reward, "input_ids": list(ids), "prompt_length": prompt_length,
        **columns,
    }  # fmt: skip


def test_flat_values_become_rows_again():
    # Rows of 3, 1 and 2 tokens. The last value of a row belongs to the first token of the next row.
    # This value must be ignored.
    flat = torch.arange(1.0, 6.0)[None]
    assert unflatten(flat, [3, 1, 2]).tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]]
    padded = torch.arange(1.0, 8.0)[None]  # two places of padding, as with pad_to_multiple_of
    assert unflatten(padded, [3, 1, 2]).tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]


def test_only_the_completion_has_labels():
    batch = collator()([row(), row(1, -1.0, (5, 6), 1)])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 6, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, 6, -100]]
    assert batch["lengths"] == [3, 2]
    assert batch["reward"].tolist() == [1.0, -1.0]
    whole = collator(True)([row(reward=1, mu_logps=[-1, -2])])  # A table can hold integers.
    assert whole["reward"].dtype == whole["mu_logps"].dtype == torch.float32


def test_rows_without_a_gradient_are_skipped_and_come_last():
    rows = [row(0, 0.0, (1, 2)), row(1, 2.0), row(2, 0.0)]
    batch = collator()(rows)
    assert (batch["row"][:, 0].tolist(), batch["reward"].tolist(), batch["lengths"]) == (
        [1, 0, 2],
        [2.0, 0.0, 0.0],
        [3],
    )
    whole = collator(skip_zeros=False)(rows)
    assert (whole["row"][:, 0].tolist(), whole["reward"].tolist()) == ([0, 1, 2], [0.0, 2.0, 0.0])
    assert whole["lengths"] == [2, 3, 3]
    alone = collator()([rows[0], rows[2]])  # One row is kept, because a forward pass needs a row.
    assert (alone["reward"].tolist(), alone["lengths"]) == ([0.0, 0.0], [2])


def test_log_mu_that_a_row_does_not_need_may_be_incomplete():
    for known in ([None, -1.0], [], [-1.0, -2.0, -3.0]):
        assert collator()([row(mu_logps=known)])["mu_logps"].isnan().all()


def test_log_mu_comes_from_the_row_or_from_what_was_computed():
    collate = collator(log_mu={(0, 1): -4.0, (0, 2): -5.0, (1, 1): -6.0})
    rows = [
        row(0, mu_logps=[-1.0, -2.0]), row(1), row(2, mu_logps=-7.0), row(3), row(4, mu_logps=[]),
        row(5, mu_logps=None), row(1, dataset=1),
    ]  # fmt: skip
    assert collate(rows)["mu_logps"].tolist() == pytest.approx([-3.0, -4.0, -7.0, *[math.nan] * 3, -6.0], nan_ok=True)


def test_log_mu_of_turns_needs_a_value_for_each_token():
    """The sum over the row is log μ of no turn."""
    turns = {"ids": (1, 2, 3, 4, 5), "completion_mask": [True, True, False, True], "reward": [1.0, -1.0]}
    rows = [row(0, mu_logps=[-1.0, -2.0, -4.0], **turns), row(1, mu_logps=-7.0, **turns), row(2, mu_logps=-7.0)]
    expected = [-3.0, -4.0, math.nan, math.nan, -7.0]
    assert collator()(rows)["mu_logps"].tolist() == pytest.approx(expected, nan_ok=True)
    long = np.array([-3_000.0, *[-1e-4] * 3_000], dtype=np.float32)  # In float32, -3000 - 1e-4 is -3000.
    first = {**row(0, mu_logps=long), "input_ids": [1] * (len(long) + row(0)["prompt_length"])}
    assert collator()([first])["mu_logps"].tolist() == pytest.approx([-3_000.3], abs=1e-3)


def test_log_mu_of_tokens_follows_the_completions():
    """Values of log μ are concatenated. A row without one value for each of its tokens has only NaN."""
    collate = collator(True, log_mu={(0, 1): np.array([-4.0, -5.0])})
    rows = [
        row(0, mu_logps=[-1.0, -2.0]), row(1), row(2, mu_logps=[-7.0]), row(3, prompt_length=2), row(4, mu_logps=-3.0),
        row(5, mu_logps=[None, -1.0]),
    ]  # fmt: skip
    expected = [-1.0, -2.0, -4.0, -5.0, *[math.nan] * 7]
    assert collate(rows)["mu_logps"].tolist() == pytest.approx(expected, nan_ok=True)


def test_context_has_no_labels_and_no_log_mu():
    masked = {"ids": (1, 2, 3, 4), "completion_mask": [True, False, True]}
    batch = collator(True)([row(0, mu_logps=[-1.0, -2.0], **masked), row(1, mu_logps=[-1.0, -2.0, -3.0], **masked)])
    assert batch["labels"].tolist() == [[-100, 2, -100, 4]] * 2
    assert batch["mu_logps"].tolist() == pytest.approx([-1.0, -2.0, math.nan, math.nan], nan_ok=True)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        collator()([row(ids=(1, 2, 3, 4), completion_mask=[True])])


def test_the_parts_of_a_rollout_are_sequences_of_their_own():
    mask = [True] + [False] * 2 + [True]
    rollout = row(ids=(1, 2, 1, 2, 3), part_lengths=[2, 3], completion_mask=mask)
    batch = collator().collate_tokens([rollout, row(1)])
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3], [5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, -100, 3], [-100, 6, 7]]
    assert (batch["lengths"], batch["parts"]) == ([2, 3, 3], [2, 1])
    values = torch.arange(1.0, 7.0).view(3, 2)
    assert join_sequences(values, [2, 1]).tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert join_sequences(values, [1, 1, 1]) is values


def test_rated_turns_are_units():
    """The first row has turns of two, one and one tokens. The second turn has no reward."""
    mask = [True, True, False, True, False, True]
    turns = row(0, [1.0, math.nan, -1.0], range(7), completion_mask=mask, mu_logps=[-1.0, -2.0, -3.0, -4.0])
    rows = [turns, row(1, -0.5, mu_logps=-7.0)]
    batch = collator()(rows)
    assert batch["row"].tolist() == [[0, 0], [0, 2], [1, -1]]
    assert batch["reward"].tolist() == [1.0, -1.0, -0.5]
    assert batch["mu_logps"].tolist() == [-3.0, -4.0, -7.0]
    assert (batch["place"].tolist(), batch["lengths"]) == ([0, 0, 1], [7, 3])
    by_token = collator(True)(rows)["mu_logps"].tolist()
    assert by_token == pytest.approx([-1.0, -2.0, -4.0, math.nan, math.nan], nan_ok=True)
    assert "place" not in collator()(rows[1:])
    assert "place" in collator()([{**turns, "reward": [1.0, math.nan, math.nan]}])
    masks = torch.tensor([mask, [True] * 3 + [False] * 3])
    values, own = select_units(torch.arange(12).view(2, 6), masks, batch["place"], batch["row"][:, 1])
    assert values[:, 0].tolist() == [0, 0, 6]
    assert [value[one].tolist() for value, one in zip(values, own, strict=True)] == [[0, 1], [5], [6, 7, 8]]


def test_rows_that_fill_a_batch_do_not_count():
    blank = row(9, math.nan)
    batch = collator()([row(1), blank, row(2, 0.0)])
    assert (batch["row"][:, 0].tolist(), batch["reward"].tolist()) == ([1, 2], [1.0, 0.0])
    only = collator()([blank, blank])
    assert only["reward"].isnan().tolist() == [True]
    assert len(only["input_ids"]) == 1
