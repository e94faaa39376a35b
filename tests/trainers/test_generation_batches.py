"""Tests of trimming TRL's generation batches. `test_online.py` tests the choice of rows."""

import pytest
import torch

from topr_trl.trainers.generation_batches import trim_padding


def test_trimmed_columns():
    mask = torch.tensor([[1] * 5 + [0] * 11, [1] * 3 + [0] * 13])
    batch = {"completion_ids": torch.ones(2, 16, dtype=torch.long), "completion_mask": mask}
    widths = []
    for multiple in (None, 8):
        widths.append(trim_padding(dict(batch), multiple)["completion_ids"].size(1))
    assert widths == [5, 8]
    # With images, nothing is trimmed, because masked tokens can belong to an image that a tool returned.
    assert trim_padding({**batch, "pixel_values": torch.ones(1)}, None)["completion_ids"].size(1) == 16


@pytest.mark.parametrize("multiple", [None, 8])
def test_a_batch_that_trl_has_trimmed_stays_as_it_is(multiple):
    """Batches without excess padding stay as they are. huggingface/trl#7179 pads each micro-batch in this way."""
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    batch = {
        "completion_ids": torch.arange(10).view(2, 5), "completion_mask": mask,
        "old_per_token_logps": torch.rand(2, 5), "importance_sampling_ratio": torch.rand(2, 1),
        "token_type_ids": torch.ones(2, 4 + 5),
    }  # fmt: skip
    trimmed = trim_padding(dict(batch), multiple)
    assert trimmed.keys() == batch.keys()
    for name, value in batch.items():
        torch.testing.assert_close(trimmed[name], value, msg=name)
