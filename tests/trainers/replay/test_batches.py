"""Tests of the conversion of replayed rows to TRL's generation batches."""

import pytest
import torch
from replay_rows import batch_of, row

from topr_trl.trainers.replay.batches import batch_of as batch_of_rows
from topr_trl.trainers.replay.batches import check_columns, with_rows


def test_rows_stand_behind_a_batch_as_they_were():
    own = [row(1, prompt=(5, 6, 7, 8), completion=(4, 4, 4, 4, 4), written=[True, True, False, True, True]), row(2)]
    found = with_rows(batch_of([1.0, -1.0]), own, pad_token_id=1)
    assert found["prompt_ids"].tolist() == [[1, 0, 3, 4]] * 2 + [[5, 6, 7, 8], [1, 1, 5, 6]]
    assert found["prompt_mask"].tolist() == [[0, 0, 1, 1]] * 2 + [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert found["completion_ids"][2:].tolist() == [[4] * 5, [7, 8, 9, 1, 1]]
    assert found["completion_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5, [1, 1, 1, 0, 0]]
    assert found["tool_mask"].tolist() == [[1] * 5] * 2 + [[1, 1, 0, 1, 1], [1] * 5]
    assert found["old_per_token_logps"][:2, :4].isnan().all()
    torch.testing.assert_close(found["old_per_token_logps"][3], torch.cat([own[1].mu_logps, torch.zeros(2)]))
    assert found["advantages"].tolist() == [0.0] * 4
    assert found["topr_rewards"].tolist() == [1.0, -1.0, -1.0, -1.0]
    assert found["topr_rows"].tolist() == [100, 101, 1, 2]
    assert found["num_items_in_batch"].dim() == 0
    assert found["topr_fresh"].tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="Rows with pixel_values cannot be replayed"):
        check_columns(batch_of([1.0], pixel_values=torch.zeros(1, 3)))


def test_widths_stay_multiples():
    own = [row(1, prompt=(5,) * 5, completion=(4,) * 7)]
    fresh = batch_of([1.0])
    fresh |= {name: fresh[name][:, -2:] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    found = with_rows(fresh, own, pad_token_id=1, multiple=2)
    assert [found[name].size(1) for name in ("prompt_ids", "completion_ids", "old_per_token_logps")] == [6, 8, 8]
    assert found["prompt_ids"][1].tolist() == [1, 5, 5, 5, 5, 5]
    alone = batch_of_rows(own, 1, torch.device("cpu"), multiple=4)
    assert [alone[name].size(1) for name in ("prompt_ids", "completion_mask")] == [8, 8]


def test_types_are_those_of_the_batch():
    own = torch.zeros(1, 4, dtype=torch.bfloat16)
    batch = batch_of([1.0], sampling_per_token_logps=own, ref_per_token_logps=None)
    found = with_rows(batch, [row(2)], pad_token_id=1)
    assert found["topr_fresh"].dtype == torch.bool
    assert found["old_per_token_logps"].dtype == torch.float32
    assert {name: found[name].dtype for name in batch if name in found} == {
        name: values.dtype for name, values in batch.items() if values is not None
    }
    assert "ref_per_token_logps" not in found
    assert "tool_mask" not in found  # the model wrote all tokens


def test_rows_alone():
    device = torch.device("cpu")
    found = batch_of_rows([row(1, prompt=(5,)), row(2, completion=(4,))], 9, device)
    assert {name: values.tolist() for name, values in found.items()} == {
        "prompt_ids": [[9, 5], [5, 6]], "prompt_mask": [[0, 1], [1, 1]],
        "completion_ids": [[7, 8, 9], [4, 9, 9]], "completion_mask": [[1, 1, 1], [1, 0, 0]],
    }  # fmt: skip
    assert all(values.dtype == torch.long for values in found.values())
    assert batch_of_rows([row(1)], 9, torch.device("meta"))["prompt_ids"].is_meta
