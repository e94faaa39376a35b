"""Training loops of the benchmarks match the package's trainer, and use the intended rows."""

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset

from benchmarks.loops import offline, rounds, stale
from benchmarks.loops.online import OnlineArm
from benchmarks.loops.training import batches, train
from benchmarks.methods import METHODS
from benchmarks.rows import Rows
from benchmarks.setting import BUNDLED, ONE_WORDING, PROFILES, base_model, problems, sample, tokenizer
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.tasks import arithmetic


@pytest.fixture(scope="module")
def rows():
    model = base_model("main")
    return Rows.of(sample(model, "main", problems("main", 12, 7), 8, seed=3)).scored_by(model)


@pytest.mark.slow
def test_the_loop_is_the_offline_trainer(rows, tmp_path):
    """The training loop of the benchmarks gives the same weights as `OfflineTOPRTrainer`."""
    chosen = rows[np.arange(16)]
    ours, theirs = base_model("main"), base_model("main")
    objective = METHODS["topr"].make(ours, chosen, chosen)
    train(ours, objective, 3, 1e-3, seed=0)  # A step has 32 rows: each of the 16 rows twice.
    dataset = Dataset.from_dict(
        {
            "prompt": [""] * 16,
            "prompt_ids": chosen.prompts,
            "completion_ids": chosen.responses,
            "reward": chosen.rewards,
        }
    )
    args = OfflineTOPRConfig(
        str(tmp_path), baseline=0, per_device_train_batch_size=16, num_train_epochs=3, learning_rate=1e-3,
        optim="adamw_torch", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=1.0,
    )  # fmt: skip
    OfflineTOPRTrainer(theirs, args, dataset, processing_class=tokenizer("main")).train()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=name)
    start = base_model("main")
    assert max((a - b).abs().max() for a, b in zip(ours.parameters(), start.parameters(), strict=True)) > 1e-3


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing(rows):
    model = base_model("main")
    before = copy.deepcopy(model.state_dict())

    class Broken:
        size, rows_per_item = len(rows), 1

        def loss(self, indices):
            return next(model.parameters()).sum() * torch.tensor(torch.inf)

    trained = train(model, Broken(), 2, 1e-3, seed=0)
    assert not np.isfinite(trained["gradient_norms"]).any()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batches_are_shuffled_epochs():
    order = batches(10, 4, seed=1)
    drawn = np.concatenate([next(order) for _ in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert not np.array_equal(drawn[:10], drawn[10:])


@pytest.mark.slow
def test_a_run_of_several_epochs_is_tested_along_the_way(rows, monkeypatch):
    monkeypatch.setattr(offline, "epoch_rows", lambda *_: (rows, rows))
    monkeypatch.setattr(offline, "evaluate", lambda *_: None)
    monkeypatch.setattr(offline, "summary", lambda _: {"pass@1": 0.5})
    _, found = offline.trained("main", METHODS["topr_default"], PROFILES["quick"], 0, 1e-4, epochs=2)
    assert found["steps"] == 2 * (len(rows) // 32)
    assert [point["step"] for point in found["curve"]] == [2, 3, 6]  # 0.5, 1 and 2 epochs of 3 steps
    assert found["p"] == (rows.rewards > 0).mean()


@pytest.mark.slow
@pytest.mark.parametrize("curation", ["positives", rounds.REPEATED])
def test_rounds(monkeypatch, curation):
    """A round trains on right answers with its own seed. `REPEATED` repeats them up to the paper's number of rows."""
    seen = []
    monkeypatch.setattr(rounds, "PROBLEMS", 6)
    monkeypatch.setattr(
        rounds, "train", lambda model, objective, steps, rate, seed: seen.append((objective.rows, steps, seed))
    )
    after = []
    rounds.trained("main", 1.0, curation, 2, 1e-4, 3, lambda model, number, count: after.append((number, count)))
    assert [number for number, _ in after] == [1, 2]
    assert [seed for _, _, seed in seen] == [301, 302]
    size = round(rounds.ROWS_PER_PROBLEM * 6)
    for chosen, steps, _ in seen:
        assert (chosen.rewards > 0).all()
        assert len(chosen) == size if curation == rounds.REPEATED else len(chosen) <= size
        assert steps == -(-len(chosen) // 32)


def test_stale_rows_are_of_the_policy_of_that_age(monkeypatch):
    """Rows come from the policy eight updates before their block, or from the base model.

    Each fake update adds 1 to a parameter, which therefore counts updates.
    """
    drawn = []

    def count(model):
        return int(next(model.parameters()).flatten()[0])

    def base(_):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        return model

    def update(model, *_):
        with torch.no_grad():
            next(model.parameters()).add_(1)

    fake = type("Objective", (), {"renew": lambda self, rows: None, "loss": lambda self, indices: None})()
    groups = type("Rows", (), {"groups": np.repeat(np.arange(8), 4)})()
    monkeypatch.setattr(stale, "base_model", base)
    monkeypatch.setattr(stale, "update", update)
    monkeypatch.setattr(stale, "BLOCK", 4)
    monkeypatch.setattr(stale, "sample", lambda sampler, *_: drawn.append(count(sampler)))
    monkeypatch.setattr(stale.Rows, "of", lambda _: groups)
    monkeypatch.setitem(stale.METHODS, "topr", stale.METHODS["topr"]._replace(make=lambda *_: fake))
    after = []
    stale.trained("topr", 8, 20, 1e-4, 0, 400, lambda model, updates: after.append((updates, count(model))))
    assert drawn == [0, 0, 0, 4, 8]
    assert after == [(n, n) for n in (0, 4, 8, 12, 16, 20)]


def test_completions_of_an_online_arm():
    often, again = (OnlineArm("main", "topr_mean", uses, share, 1e-4, 6_144) for uses, share in ((4, 0.0), (1, 0.75)))
    assert (often.fresh_rows, often.steps) == (32, 64)
    assert (again.fresh_rows, again.steps) == (8, 64)
    assert often.tested_after[-1] == again.tested_after[-1] == 6_144


def test_tasks_are_the_packages_own():
    asked = problems("hard", 3, 1)["prompt"][:]
    assert [row.count(".") for row in asked] == [6, 6, 6]  # the start and five steps
    assert arithmetic.arithmetic_dataset(3, 1, 5, ONE_WORDING)["question"][0] in asked[0]
    assert arithmetic.arithmetic_dataset(3, 1)["question"][0] in problems(BUNDLED, 3, 1)["prompt"][0]
