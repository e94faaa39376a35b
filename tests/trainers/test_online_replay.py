"""Tests of replay in `TOPRTrainer`: replayed rows keep log μ of their first forward pass."""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from reference import coin, logps_of, of_level, plain_logps

from topr_trl import TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.trainers.replay.buffer import ReplayBuffer

pytestmark = pytest.mark.slow


def config(tmp_path, **settings):
    defaults = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4,
        "max_completion_length": 24, "report_to": "none", "bf16": False, "use_cpu": True, "learning_rate": 1e-3,
        "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "replay_share": 0.5, "optim": "adamw_torch", "baseline": 0,
    }  # fmt: skip
    return TOPRConfig(**{**defaults, **settings})


@pytest.fixture
def make(tokenizer, tmp_path):
    """Return a function that makes a trainer with a new copy of the model."""
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(16, seed=1), num_shots=0)

    def made(replay_dataset=None, **settings):
        args = config(tmp_path / "run", **{"model_init_kwargs": {"dtype": "float32"}, **settings})
        return TOPRTrainer(
            str(arithmetic.CARELESS_MODEL), coin, args=args, train_dataset=problems, processing_class=tokenizer,
            replay_dataset=replay_dataset,
        )  # fmt: skip

    return made


@pytest.mark.parametrize("uses", [1, 2])
def test_a_row_that_is_used_again_has_the_weight_of_its_first_log_mu(make, uses):
    """The weight of a replayed row compares log π now with log π in the forward pass of its first use."""
    trainer = make(num_iterations=uses)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loader = iter(trainer.get_train_dataloader())
    first = trainer._prepare_inputs(next(loader))
    assert "old_per_token_logps" not in first
    at_first = dict(zip(first["topr_rows"].tolist(), plain_logps(trainer.model, first).sum(1).tolist(), strict=True))
    trainer.compute_loss(trainer.model, first)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    trainer._step = uses
    second = trainer._prepare_inputs(next(loader))
    again = second["topr_rows"] < 8
    assert again.sum() == 8
    trainer._row_log.discard("replay")
    trainer.compute_loss(trainer.model, second)
    weights = {number: weight for number, weight, _ in trainer._row_log.read("replay")}
    now = plain_logps(trainer.model, second).sum(1).tolist()
    changed = 0
    for number, logp, reward in zip(second["topr_rows"].tolist(), now, second["topr_rewards"].tolist(), strict=True):
        expected = 1.0 if reward > 0 or number >= 8 else min(math.exp(logp - at_first[number]), 1.0)
        assert weights[number] == pytest.approx(expected, rel=1e-3)
        changed += expected != 1.0
    assert changed > 1


def test_a_share_alone_is_enough(make, capsys):
    trainer = make(disable_tqdm=False)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "topr/replay/share" in entry]
    assert [entry["topr/replay/share"] for entry in logs] == [0.0, 0.5, 0.5, 0.5]
    assert [entry.get("topr/replay/age") for entry in logs][:2] == [None, 1.0]
    assert logs[-1]["topr/replay/age"] >= 1.0
    assert [entry["topr/replay/kept"] for entry in logs][:2] == [0.0, 8.0]
    printed = capsys.readouterr().out
    assert printed.count("a micro-batch grows from 8 rows to 16. Each process keeps at most 64 rows") == 1


@pytest.mark.parametrize(("steps", "scale"), [(1, 1.0), (2, 10 / 9)])
def test_all_rows_weigh_alike_also_where_some_were_not_chosen(make, steps, scale):
    """The gradient is that of the mean loss over the chosen and the replayed rows.

    With two micro-batches, one unchosen row is added to the five chosen rows, and four rows are replayed.
    """
    trainer = make(curation="uniform", iteration_size=5, preset="opr", steps_per_generation=steps)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batches = []
    for step, rows in zip(range(2 * steps), trainer.get_train_dataloader(), strict=False):
        trainer._step = step
        batches.append(trainer._prepare_inputs(rows))
        if step < steps:
            trainer.compute_loss(trainer.model, batches[-1])
    batches = batches[steps:]
    assert [float(batch["topr_scale"]) for batch in batches] == pytest.approx([scale] * steps)
    trainer.model.zero_grad()
    for batch in batches:
        (trainer.compute_loss(trainer.model, batch) / steps).backward()
    ours = [p.grad.clone() for p in trainer.model.parameters()]

    rewards = [batch["topr_rewards"].nan_to_num(0.0) for batch in batches]
    count = sum(int((of_batch != 0).sum()) for of_batch in rewards)
    assert count == {1: 10, 2: 9}[steps]
    trainer.model.zero_grad()
    for batch, of_batch in zip(batches, rewards, strict=True):
        mask = batch["completion_mask"]
        means = (plain_logps(trainer.model, batch) * mask).sum(1) / mask.sum(1)
        (-(of_batch * means).sum() / count).backward()
    for a, p in zip(ours, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=2e-3, atol=2e-6)


def test_rows_without_a_reward_count_as_they_do_without_replay(make, monkeypatch):
    scored = [1.0, -1.0, None, None, None, None, None, None]
    monkeypatch.setitem(globals(), "coin", lambda completions, **_: scored)
    trainer = make()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loader = iter(trainer.get_train_dataloader())
    trainer.compute_loss(trainer.model, trainer._prepare_inputs(next(loader)))
    trainer._step = 1
    second = trainer._prepare_inputs(next(loader))
    assert len(second["topr_rows"]) == 10
    assert float(second["topr_scale"]) == 1.0


def test_each_batch_draws_anew(make):
    trainer, seeds = make(), []
    trainer._replay.buffer.draw = lambda _, seed: seeds.append(tuple(seed)) or []
    trainer.train()
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("tokens", [1, 2])
def test_if_tokens_have_different_weights_a_row_still_has_one(make, tokens):
    trainer = make(**of_level("segment", tokens))
    trainer.train()
    assert trainer._replay.buffer.rows
    assert all(isinstance(row.weight, float) and 0 <= row.weight <= 1 for row in trainer._replay.buffer.rows)


def test_another_training_counts_its_steps_from_0(make):
    trainer = make(max_steps=2, learning_rate=1e-4)
    trainer.train()
    trainer.train()
    ages = [entry["topr/replay/age"] for entry in trainer.state.log_history if "topr/replay/age" in entry]
    assert min(ages) >= 0.0
    assert len(trainer._replay.buffer) > 16


def test_a_resumed_run_goes_on_with_the_same_rows(make, tmp_path):
    slow = {"learning_rate": 1e-4}  # so that no negative dies
    whole = make(save_strategy="steps", save_steps=2, **slow)
    whole.train()
    resumed = make(**slow)
    kept = []
    settle = ReplayBuffer.settle

    def spy(buffer, weights):
        settle(buffer, weights)
        kept.append([replace(r) for r in buffer.rows])

    resumed._replay.buffer.settle = lambda weights: spy(resumed._replay.buffer, weights)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    saved = torch.load(tmp_path / "run" / "checkpoint-2" / "replay_0.pt", weights_only=True)["rows"]
    assert len(saved) == 16  # both generation batches have had a forward pass
    assert [r.number for r in kept[0]] == [r["number"] for r in saved]
    assert all(torch.equal(r.mu_logps, s["mu_logps"]) for r, s in zip(kept[0], saved, strict=True))
    shares = [e["topr/replay/share"] for e in resumed.state.log_history if "topr/replay/share" in e]
    assert shares == [0.0, 0.5, 0.5, 0.5]  # the first two were logged before the checkpoint
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_rows_are_shared_out_among_another_number_of_processes(make, tmp_path, monkeypatch, recwarn, before, now):
    checkpoint = tmp_path / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "replay_1.pt").write_bytes(b"of an older run with two processes")
    make(save_strategy="steps", save_steps=2, max_steps=2, learning_rate=1e-4).train()
    assert [path.name for path in checkpoint.glob("replay_*.pt")] == ["replay_0.pt"]
    saved = torch.load(checkpoint / "replay_0.pt", weights_only=True)
    numbers = [row["number"] for row in saved["rows"]]
    parts = [saved["rows"][process::before] for process in range(before)]
    for process, rows in enumerate(parts):
        torch.save({**saved, "rows": rows}, checkpoint / f"replay_{process}.pt")
    resumed = make()
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: now))
    resumed._load_rng_state(str(checkpoint))
    assert [row.number for row in resumed._replay.buffer.rows] == numbers[::now]
    assert not [w for w in recwarn if "for replay" in str(w.message)]


def test_a_checkpoint_without_rows_is_said(make, tmp_path):
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    (tmp_path / "run" / "checkpoint-2" / "replay_0.pt").unlink()
    with pytest.warns(UserWarning, match="has no rows for replay"):
        make(max_steps=3).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_logged_rows_of_unknown_log_mu_are_left_out_where_it_cannot_be_known_any_more(make, tmp_path):
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    (tmp_path / "run" / "checkpoint-2" / "replay_0.pt").unlink()
    resumed = make(max_steps=3, replay_dataset=logged())
    with pytest.warns(UserWarning, match="no rows"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert {r.reward for r in resumed._replay.buffer.rows if r.number < 0} == {1.0}


def test_images_are_refused_before_a_model_is_loaded(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"], "image": [None]})
    with pytest.raises(ValueError, match="Rows with images cannot be replayed"):
        TOPRTrainer("nowhere", coin, config(tmp_path), rows)


def test_truncated_completions_do_not_enter(make):
    trainer = make(mask_truncated_completions=True, max_completion_length=4)
    trainer.train()
    assert len(trainer._replay.buffer) == 0


# Logged rows.


def logged(**columns):
    texts = {"prompt": ["2 + 3 =", "2 + 4 ="] * 4, "completion": [" 5", " 7"] * 4, "reward": [1.0, -1.0] * 4}
    return Dataset.from_dict({**texts, **columns})


def test_logged_rows_are_there_from_the_beginning_and_log_mu_is_of_the_starting_weights(make):
    trainer = make(replay_dataset=logged(), learning_rate=1e-4)
    assert [row.number for row in trainer._replay.buffer.rows] == list(range(-8, 0))
    negative = trainer._replay.buffer.rows[1]
    expected = logps_of(trainer.model, negative.prompt_ids.tolist(), negative.completion_ids.tolist()).detach()
    trainer.train()
    shares = [entry["topr/replay/share"] for entry in trainer.state.log_history if "topr/replay/share" in entry]
    assert shares == [0.5] * 4
    kept = {row.number: row for row in trainer._replay.buffer.rows}
    torch.testing.assert_close(kept[-7].mu_logps, expected, rtol=1e-4, atol=1e-5)
    assert kept[-8].mu_logps.isnan().all()  # a positive has weight 1, whatever its ratio


def test_equal_rewards_of_a_first_batch_are_not_warned_of_beside_logged_rows_or_in_a_resumed_run(
    make, tmp_path, recwarn, monkeypatch
):
    monkeypatch.setitem(globals(), "coin", lambda completions, **_: [0.0] * len(completions))

    def warned():
        return [str(w.message) for w in recwarn if "nothing to learn" in str(w.message)]

    trainer = make(replay_dataset=logged(), save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    assert not warned()
    trainer.create_model_card()
    assert (
        "; up to 50% of a step's rows come from earlier batches or 8 logged rows |"
        in (tmp_path / "run/README.md").read_text()
    )
    make(max_steps=3).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert not warned()
    make(max_steps=1).train()
    assert len(warned()) == 1


def test_logged_rows_keep_the_log_mu_that_they_bring(make):
    both = [[-0.5, -0.25, -1.0], None] * 4
    rows = logged(mu_logps=both, reward=[-1.0, 1.0] * 4)
    trainer = make(replay_dataset=rows)
    count = len(trainer._replay.buffer.rows[0].completion_ids)
    assert count == 3  # " ", the digit and the stop token
    trainer._replay._compute_log_mu()
    assert trainer._replay.buffer.rows[0].mu_logps.tolist() == [-0.5, -0.25, -1.0]
    assert trainer._replay.buffer.rows[1].mu_logps.isnan().all()
    sums = make(replay_dataset=logged(mu_logps=[-3.0] * 8, reward=[-1.0] * 8))._replay.buffer.rows[0]
    assert sums.mu_logps.tolist() == pytest.approx([-1.0] * 3)


def test_log_mu_of_what_logged_rows_were_computed_by(make):
    trainer = make(replay_dataset=logged(mu_logps=[-3.0] * 8, mu_fingerprint=["other"] * 8))
    with pytest.raises(ValueError, match="computed by another model"):
        trainer.train()
    with pytest.raises(ValueError, match=r"Row 1 of the replay dataset: log μ has 1 .* 3"):
        make(replay_dataset=logged(mu_logps=[[-3.0]] * 8))
    with pytest.raises(ValueError, match="sampled at temperature"):
        make(replay_dataset=logged(temperature=[0.5] * 8))
    with pytest.raises(ValueError, match="trajectories in several rows"):
        make(replay_dataset=logged(rollout_id=[0, 0, 1, 2, 3, 4, 5, 6], reward=[1.0] * 8))
    with pytest.raises(ValueError, match=r"replay_dataset .*replay_share above 0"):
        make(replay_dataset=logged(), replay_share=0.0)
    with pytest.raises(ValueError, match="replay dataset: it has images"):
        make(replay_dataset=logged(image=[None] * 8))


@pytest.mark.parametrize("theirs", [[-1.0], [-1.0, -1.0], [], [None, None, None]])
def test_wrong_log_mu_that_is_not_needed_does_not_matter(make, theirs):
    rows = make(replay_dataset=logged(mu_logps=[theirs, [-1.0, -1.0, -1.0]] * 4))._replay.buffer.rows
    assert {bool(r.mu_logps.isnan().all()) for r in rows if r.reward > 0} == {True}
    assert {r.mu_logps.sum().item() for r in rows if r.reward < 0} == {-3.0}


def test_logged_rows_of_another_scale_get_the_baseline(make):
    rows = logged(reward=[0.0, 1.0] * 4)
    assert {row.reward for row in make(replay_dataset=rows, baseline="mean")._replay.buffer.rows} == {-0.5, 0.5}
    assert len(make(replay_dataset=rows)._replay.buffer.rows) == 4  # rows with R = 0 are left out
    rows = rows.add_column("reward_after_baseline", [None, 0.25] * 4)
    assert [row.reward for row in make(replay_dataset=rows, baseline="mean")._replay.buffer.rows] == [0.25] * 4
    rows = rows.add_column("times_chosen", [0, 3] * 4)
    assert len(make(replay_dataset=rows)._replay.buffer.rows) == 4  # the buffer has each row once


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_share": 1.0}, "replay_share .*below 1"),
        ({"replay_share": "a half"}, "replay_share must be float"),
        ({"replay_share": 0.0, "replay_size": 8}, "replay_size=8 needs replay_share above 0"),
        ({"replay_rule": "oldest"}, "replay_rule .*newest, positives, negatives, anna_karenina"),
        ({"replay_size": 4}, "replay_share=0.5 .*8 rows"),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"replay_share": 0.05}, "adds no row to a micro-batch"),
        ({"beta": 0.1}, "KL term"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)
