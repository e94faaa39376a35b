import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from topr_trl.trainers.log_mu import _starts, load_log_mu, rows_fingerprint, save_log_mu


def test_round_trip_and_mismatch(tmp_path):
    path = tmp_path / "log_mu.parquet"
    with pytest.raises(ValueError, match="missing"):
        load_log_mu(path, "m", "r")
    save_log_mu(path, pa.array([[-1.0, -0.5], None], pa.list_(pa.float32())), "m", "r")
    assert load_log_mu(path, "m", "r").to_pylist() == [[-1.0, -0.5], None]
    for model, rows in (("x", "r"), ("m", "x")):
        with pytest.raises(ValueError, match=r"of another run: its model, temperature, rows.*Restore the file"):
            load_log_mu(path, model, rows)


def test_parts_of_long_rows_have_fewer_rows():
    million = 1 << 20
    assert _starts(np.full(20_000, 100)) == [0, 8_192, 16_384]
    assert _starts(np.array([9, 4, 4, 4, 9, 9]) * million) == [0, 1, 3, 4, 5]


def test_rows_differ_by_tokens_masks_rewards_and_need():
    def rows(**changes):
        row = {"input_ids": [1, 2, 3], "prompt_length": 1, "reward": 1.0, **changes}
        return Dataset.from_list([row])

    def of(rows, needed=True):
        return rows_fingerprint(rows, np.array([needed]))

    assert of(rows()) == of(rows())
    different = [of(rows()), of(rows(), needed=False), of(rows(reward=-1.0)), of(rows(prompt_length=2)),
                 of(rows(input_ids=[1, 2, 4])), of(rows(mu_logps=[-1.0, -2.0])), of(rows(mu_logps=[-1.0, -3.0])),
                 of(rows(mu_logps=-3.0)), of(rows(completion_mask=[True, True])),
                 of(rows(completion_mask=[True, False])), of(rows(part_lengths=[3])),
                 of(rows(part_lengths=[1, 2]))]  # fmt: skip
    assert len(set(different)) == 12
