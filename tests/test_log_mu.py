import pytest
import torch

from topr_trl.log_mu import fingerprint, load_log_mu, save_log_mu


def test_fingerprint(model):
    first = fingerprint(model)
    assert first == fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16)) == first  # it was saved in bfloat16
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    assert fingerprint(model) != first


def test_one_training_step_changes_the_fingerprint(model):
    first = fingerprint(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    assert fingerprint(model) != first


def test_round_trip_and_mismatch(tmp_path):
    path = tmp_path / "log_mu.parquet"
    assert load_log_mu(path, "m", "r") is None
    save_log_mu(path, [[-1.0, -0.5], None], "m", "r")
    assert load_log_mu(path, "m", "r") == [[-1.0, -0.5], None]
    with pytest.raises(ValueError, match="another model: fingerprint m, expected x"):
        load_log_mu(path, "x", "r")
    with pytest.raises(ValueError, match="another set of rows"):
        load_log_mu(path, "m", "x")
