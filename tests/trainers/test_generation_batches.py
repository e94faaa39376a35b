"""Tests of choosing rows of TRL's generation batches, and of trimming them."""

import numpy as np
import pytest
import torch

from topr_trl.trainers.generation_batches import keep_rows, trim_padding


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ([0, 1, 5], [[0, 1], [1, 0]]),  # the second process keeps an unchosen row, so that both have two
        ([0, 1, 2], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # a multiple of two steps
        ([], [[0, 1], [0, 1]]),
    ],
)
def test_every_process_keeps_as_many_rows(chosen, kept):
    for process in range(2):
        batch = {
            "completion_ids": torch.arange(4)[:, None],
            "advantages": torch.arange(4.0),
            "num_items": torch.tensor(9),
        }
        found = keep_rows(batch, np.array(chosen, dtype=np.int64), 2, process, 2)
        assert found["completion_ids"][:, 0].tolist() == found["advantages"].tolist() == kept[process]
        assert found["num_items"] == 9
        # The sum over all rows times the scale, divided by their number, is the mean over the chosen rows.
        assert found["topr_scale"] == pytest.approx(2 * len(kept[process]) / max(len(chosen), 1))


def test_trimmed_columns():
    # The second row has masked tokens between trained ones, as a subclass can make them.
    mask = torch.tensor([[1] * 3 + [0] * 13, [0, 1, 0, 0, 1] + [0] * 11])
    batch = {"completion_ids": torch.ones(2, 16, dtype=torch.long), "completion_mask": mask}
    widths = []
    for multiple in (None, 8):
        widths.append(trim_padding(dict(batch), multiple)["completion_ids"].size(1))
    assert widths == [5, 8]
    batch["completion_mask"] = mask[:, :0]
    assert trim_padding({**batch, "completion_ids": mask[:, :0]}, None)["completion_ids"].size(1) == 0
    # With images, nothing is trimmed, because masked tokens can belong to an image that a tool returned.
    assert trim_padding({**batch, "pixel_values": torch.ones(1)}, None)["completion_ids"].size(1) == 16


@pytest.mark.parametrize("multiple", [None, 8])
def test_a_batch_that_trl_has_trimmed_stays_as_it_is(multiple):
    """Batches without excess padding stay as they are. huggingface/trl#7179 pads each micro-batch in this way."""
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    batch = {
        "completion_ids": torch.arange(10).view(2, 5), "completion_mask": mask,
        "old_per_token_logps": torch.rand(2, 5), "token_type_ids": torch.ones(2, 4 + 5),
    }  # fmt: skip
    trimmed = trim_padding(dict(batch), multiple)
    assert trimmed.keys() == batch.keys()
    for name, value in batch.items():
        torch.testing.assert_close(trimmed[name], value, msg=name)
