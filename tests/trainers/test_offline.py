import math
import warnings
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from reference import fresh_model, logps_of, of_level
from transformers import GenerationConfig, ProcessorMixin, TrainerCallback

from topr_trl import PRESETS, OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.data.batch_samplers import StepsSortedByLength
from topr_trl.data.tokenization import tokenizer_of
from topr_trl.limits import RATIO_LEVELS
from topr_trl.loss import topr_loss
from topr_trl.tasks import arithmetic
from topr_trl.trainers import log_mu
from topr_trl.trainers.fingerprints import mu_fingerprint

SETTINGS = {
    "per_device_train_batch_size": 4, "report_to": "none", "bf16": False, "use_cpu": True, "learning_rate": 1e-3,
    "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "baseline": 0,
}  # fmt: skip


@pytest.fixture
def make(model, tokenizer, rows, tmp_path):
    """Return a function that makes a trainer with the given settings, by default for the bundled model and `rows`."""

    def make(data=rows, evaluation=None, model=model, folder=tmp_path, peft_config=None, callbacks=None, **settings):
        if "effective_positive_share" in settings:
            settings["baseline"] = "mean"
        args = OfflineTOPRConfig(str(folder), **{**SETTINGS, **settings})
        parts = {"processing_class": tokenizer, "peft_config": peft_config, "callbacks": callbacks}
        return OfflineTOPRTrainer(model, args, data, evaluation, **parts)

    return make


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_logps(model, tokenizer, row):
    """Return log π of each completion token, from a plain forward pass."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    return logps_of(model, prompt, completion)


def test_rewards_and_log_mu_stay_in_float32_with_deepspeed(make, monkeypatch):
    """Test that Trainer, which casts all numbers of a batch to DeepSpeed's dtype, does not round log μ."""
    trainer = make(ratio_level="segment")
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    given = {"input_ids": torch.tensor([1]), "mu_logps": torch.tensor([-257.3]), "reward": torch.tensor([0.1])}
    found = trainer._prepare_inputs(given)
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in given.items()}


def test_whole_numbers_as_log_mu(make, rows):
    make(rows.add_column("mu_logps", [-12] * len(rows))).train()


def test_every_parameter_moves_and_every_metric_is_there(make, model):
    start = flat(model)
    trainer = make(num_train_epochs=3)
    trainer.train()
    assert (flat(model) != start).float().mean() > 0.9
    log = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    for name in ("topr/weight_mean", "topr/negatives_tapered", "topr/negatives_dead", "topr/positive_share",
                 "topr/effective_positive_share", "topr/log_ratio/negatives/q50", "grad_norm",
                 "topr/logps/negatives/token", "topr/logps/negatives/completion"):  # fmt: skip
        assert math.isfinite(log[name]), name
    assert log["topr/weight_mean_negatives"] < 1
    name = "topr/logps/positives/token"
    positives = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert positives[-1] > positives[0]  # the model learns the positives


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_loss_and_gradient_are_those_of_the_pure_loss(make, model, tokenizer, rows, preset, level):
    torch.manual_seed(0)
    mu = [[-0.5 * torch.rand(()).item() for _ in plain_logps(model, tokenizer, row)] for row in rows]
    trainer = make(rows.add_column("mu_logps", mu), preset=preset, **of_level(level, 3))
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    ours = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    lookup = {tuple(ids): i for i, ids in enumerate(trainer.train_dataset["input_ids"])}
    expected = []
    for ids, attention in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        i = lookup[tuple(ids[attention.bool()].tolist())]
        logps = plain_logps(model, tokenizer, rows[i])[None]
        reward = torch.tensor([rows[i]["reward"]])
        ones = torch.ones_like(logps)
        losses = topr_loss(logps, torch.tensor([mu[i]]), reward, ones, PRESETS[preset], level, segment_tokens=3)
        expected.append(losses.losses_B)
    expected = torch.cat(expected).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    for a, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=2e-4, atol=2e-6)


def test_log_mu_is_computed_once_for_the_rows_that_need_it(make, model, tokenizer, rows, tmp_path):
    expected = [plain_logps(model, tokenizer, row).tolist() for row in rows]
    trainer = make(max_steps=1)
    trainer.train()
    computed = pq.read_table(tmp_path / "log_mu.parquet")["mu_logps"].to_pylist()
    for reward, mu, reference in zip(rows["reward"], computed, expected, strict=True):
        if reward > 0:
            assert mu is None
        else:
            assert mu == pytest.approx(reference, abs=1e-4)
    metadata = pq.read_schema(tmp_path / "log_mu.parquet").metadata
    assert metadata[b"model"].decode() == mu_fingerprint(fresh_model(), 1.0)
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["topr/log_ratio/negatives/mean"] == pytest.approx(0, abs=1e-3)  # π = μ at the first step
    assert "topr/log_ratio/positives/mean" not in first


def test_log_mu_is_the_same_computed_in_several_parts(make, tmp_path, monkeypatch):
    computed = []
    for at_once in (8_192, 2):
        monkeypatch.setattr(log_mu, "_AT_ONCE", at_once)
        trainer = make(model=fresh_model(), preset="tis")
        trainer.compute_log_mu()
        computed.append(pq.read_table(tmp_path / "log_mu.parquet")["mu_logps"].to_pylist())
        assert trainer.state.global_step == 0
    for whole, parts in zip(*computed, strict=True):
        assert whole == pytest.approx(parts, abs=1e-4)


@pytest.mark.slow
def test_computing_log_mu_alone_trains_nothing_and_leaves_no_trace(make, rows, tmp_path, capsys):
    settings = {"eval_on_start": True, "lr_scheduler_type": "polynomial", "max_steps": 1}
    whole, model = fresh_model(), fresh_model()
    make(evaluation=rows, model=whole, folder=tmp_path / "whole", **settings).train()
    capsys.readouterr()
    trainer = make(evaluation=rows, model=model, folder=tmp_path / "apart", **settings)
    args = trainer.args
    assert trainer.compute_log_mu() == {}
    assert torch.equal(flat(model), flat(fresh_model()))
    assert trainer.args is args
    assert (args.max_steps, args.eval_on_start, args.lr_scheduler_type) == (1, True, "polynomial")
    assert trainer.state.log_history == []
    assert "train_runtime" not in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "apart").iterdir()) == [
        "log_mu.parquet", "log_mu_eval.parquet", "log_mu_eval_parts", "log_mu_parts"
    ]  # fmt: skip
    before = (tmp_path / "apart" / "log_mu.parquet").stat().st_mtime_ns
    trainer.train()
    assert (tmp_path / "apart" / "log_mu.parquet").stat().st_mtime_ns == before  # not computed again
    assert torch.equal(flat(model), flat(whole))
    assert trainer.state.log_history[0]["eval_loss"] is not None


def test_a_callback_may_evaluate_when_training_begins(make, rows):
    class Evaluate(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.found = trainer.evaluate()

    evaluate = Evaluate()
    trainer = make(evaluation=rows, max_steps=1, callbacks=[evaluate])
    trainer.train()
    expected = make(evaluation=rows, model=fresh_model()).evaluate()
    assert evaluate.found["eval_loss"] == pytest.approx(expected["eval_loss"])


def test_the_distance_to_the_sampler_is_logged_once(make, model, tokenizer, rows):
    counts = [len(plain_logps(model, tokenizer, row)) for row in rows]
    sampled = rows.add_column("sampler_logps", [[-0.2] * n for n in counts])
    trainer = make(sampled, max_steps=2)
    with pytest.warns(UserWarning, match="sampler's log-probabilities differ"):
        trainer.train()
    (logged,) = (entry for entry in trainer.state.log_history if "topr/sampler_distance/token" in entry)
    assert logged["topr/sampler_distance/response"] == trainer.sampler_distance["response"] > 0.1


def test_rows_of_several_datasets_are_not_taken_for_each_other(make, tokenizer, rows):
    # Three datasets have different rows 0. The third is passed to `evaluate`, and has the name of the second, `eval`.
    evaluation, later = rows.select([1, 0]), rows.select([2])
    trainer = make(evaluation=evaluation)
    trainer.evaluate(later)
    trainer.compute_log_mu()
    expected = {
        (dataset, row): plain_logps(fresh_model(), tokenizer, rows[place]).sum().item()
        for dataset, row, place in ((0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 2))
    }
    found = trainer.data_collator.log_mu
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-3)


def test_the_model_is_saved_with_the_stop_tokens_that_it_learns(make, model, tokenizer, tmp_path):
    """Base models such as Qwen2.5's have a chat template with another stop token than their EOS."""
    stop = tokenizer.pad_token  # in the model's vocabulary
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.role + m.content + '{stop}' }}}}{{% endfor %}}"
    make().save_model()
    saved = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert saved == sorted((tokenizer.eos_token_id, tokenizer.pad_token_id))


def test_rows_in_messages_are_those_that_were_given(make, rows):
    evaluation = rows.select([0, 1, 2]).add_column("mu_logps", [-5.0, -5.0, 0.5])
    trainer = make(evaluation={"held_out": evaluation})
    with pytest.raises(ValueError, match=r"^Row 2 of the held_out dataset: log μ .* 0\.5"):
        trainer.train()
    chosen = rows.select([3, 7, 4]).add_column("mu_logps", [-5.0, -5.0, 0.5])
    trainer = make(chosen, curation="positive_share", curation_positive_share=0.0)
    with pytest.raises(ValueError, match=r"^Row 2 of the train dataset: log μ"):
        trainer.train()


def test_shuffled_rows_are_read_in_another_order(make):
    rows = [make(shuffle_dataset=shuffle).train_dataset["row"][:] for shuffle in (False, True)]
    assert rows[0] == sorted(rows[1])
    assert rows[0] != rows[1]


def test_log_mu_is_not_computed_with_trained_weights(make):
    trainer = make()
    trainer.train()
    with pytest.raises(ValueError, match="log μ needs the starting weights"):
        trainer.compute_log_mu()


def test_rows_may_be_shuffled_before_training(make, tmp_path):
    computed = []
    for shuffle in (False, True):
        trainer = make(folder=tmp_path / str(shuffle))
        if shuffle:
            trainer.train_dataset = trainer.train_dataset.shuffle(seed=1)
        trainer.compute_log_mu()
        computed.append(trainer.data_collator.log_mu)
    assert computed[0] == pytest.approx(computed[1], abs=1e-3)
    assert len(computed[0]) == 6


@pytest.mark.slow
def test_computing_that_was_killed_goes_on(make, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(log_mu, "_AT_ONCE", 2)
    forward, calls = OfflineTOPRTrainer._policy_logps, []

    def dies_in_the_third_part(self, model, batch):
        if self._log_mu.planned:  # not in the check that runs when a trainer is made
            calls.append(len(batch["input_ids"]))
            if len(calls) == 3:
                raise KeyboardInterrupt
        return forward(self, model, batch)

    def compute(out, model):
        make(model=model, folder=out, preset="tis", per_device_eval_batch_size=2).compute_log_mu()
        return pq.read_table(out / "log_mu.parquet")["mu_logps"].to_pylist()

    expected = compute(tmp_path / "whole", fresh_model())
    monkeypatch.setattr(OfflineTOPRTrainer, "_policy_logps", dies_in_the_third_part)
    with pytest.raises(KeyboardInterrupt):
        compute(tmp_path / "killed", fresh_model())
    assert compute(tmp_path / "killed", fresh_model()) == expected
    assert len(calls) == 3 + len(rows) // 2 - 2
    assert compute(tmp_path / "killed", fresh_model()) == expected
    assert len(calls) == 3 + len(rows) // 2 - 2  # all parts were already saved

    calls[:] = [0]
    with pytest.raises(KeyboardInterrupt):
        compute(tmp_path / "other", fresh_model())
    calls[:] = [0] * 3
    moved = fresh_model()
    with torch.no_grad():
        moved.lm_head.weight.mul_(1.1)
    compute(tmp_path / "other", moved)  # saved parts from other weights are not used
    assert len(calls) == 3 + len(rows) // 2


@pytest.mark.parametrize("change", ["bf16", "dtype", "attention", "rope"])
def test_saved_parts_of_another_forward_pass_are_not_used(make, monkeypatch, change):
    compute, parts = log_mu._per_token_logps, []
    monkeypatch.setattr(log_mu, "_per_token_logps", lambda *given: parts.append(1) or compute(*given))
    for _ in range(2):
        make(model=fresh_model().bfloat16().float()).compute_log_mu()
    assert len(parts) == 1
    model = fresh_model().bfloat16().float()
    if change == "dtype":
        model.bfloat16()
    elif change == "attention":
        model.set_attn_implementation("eager")
    elif change == "rope":
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}
    make(model=model, bf16=change == "bf16").compute_log_mu()
    assert len(parts) == 2


def test_rows_without_reward_after_the_baseline_have_no_log_mu(make, tmp_path):
    trainer = make(baseline=-1, max_steps=1, preset="tis")
    trainer.train()
    computed = pq.read_table(tmp_path / "log_mu.parquet")["mu_logps"].to_pylist()
    assert [mu is not None for mu in computed] == [False, False, False, True] * 2


def test_accumulation_weighs_rows_like_one_big_batch(make, rows):
    # Completions differ in length. Micro-batches of 3 + 3 + 2 rows must give the same step as 8 rows at once, even if
    # the model sets `accepts_loss_kwargs=False`: Trainer would then divide the loss by the number of micro-batches.
    rows = rows.select(range(8))
    weights = []
    for settings in ({"per_device_train_batch_size": 8},
                     {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}):  # fmt: skip
        model = fresh_model()
        model.accepts_loss_kwargs = False
        make(rows, model=model, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **settings).train()
        weights.append(flat(model))
    assert (weights[0] - flat(fresh_model())).abs().max() > 1e-3
    torch.testing.assert_close(*weights, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("share", [3, 8])
def test_rows_with_no_gradient_are_left_out_and_count(make, rows, share):
    # With share=3, 3 of 8 rows have R = 0, and with share=8, 7 of them. If all rows of a micro-batch have R = 0, one of
    # its rows is still computed.
    rewards = [0.0] * 3 + [-1.0, 1.0] * 3 if share == 3 else [0.0] * 7 + [-1.0]
    rows = rows.remove_columns("reward").add_column("reward", rewards[:8])
    weights, logs, losses = [], [], []
    for keep in (True, False):
        model = fresh_model()
        trainer = make(
            rows, rows, model=model, num_train_epochs=2, optim="sgd", learning_rate=0.3, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, sort_by_length=False,
        )  # fmt: skip
        trainer.data_collator.skip_zeros = not keep
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        weights.append(flat(model))
        logs.append([row for row in trainer.state.log_history if "topr/reward" in row])
    assert (weights[0] - flat(fresh_model())).abs().max() > 1e-3
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    same = ("loss", "topr/reward", "topr/positive_share", "topr/weight_mean", "topr/negatives_tapered")
    for kept, left_out in zip(*logs, strict=True):
        assert {name: kept.get(name) for name in same} == pytest.approx({n: left_out.get(n) for n in same}, abs=1e-3)
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert (len(batch["input_ids"]), len(batch["reward"])) == (5 if share == 3 else 1, 8)


@pytest.mark.slow
@pytest.mark.parametrize("ratio_level", ["sequence", "segment"])
def test_fast_paths_train_the_same_weights(make, tmp_path, ratio_level):
    # The plain, the sorted and the padding-free path use the same rows in each step. Each path computes its own log μ.
    weights = {}
    for name, settings in {"plain": {"sort_by_length": False}, "sorted": {},
                           "padding_free": {"padding_free": True}}.items():  # fmt: skip
        model = fresh_model()
        trainer = make(
            model=model, folder=tmp_path / name, num_train_epochs=2, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, optim="sgd", learning_rate=0.3, b_neg=0.9,
            **of_level(ratio_level, 3), **settings,
        )  # fmt: skip
        trainer.train()
        weights[name] = flat(model)
        logs = trainer.state.log_history
        assert any(row.get("topr/negatives_tapered", 0) > 0 for row in logs)  # so log μ matters
    assert (weights["plain"] - flat(fresh_model())).abs().max() > 1e-3
    torch.testing.assert_close(weights["plain"], weights["sorted"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights["plain"], weights["padding_free"], rtol=1e-4, atol=1e-5)


def test_same_seed_same_weights_and_resume_equals_uninterrupted(make, tmp_path):
    args = {"num_train_epochs": 3, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3}
    whole = fresh_model()
    make(model=whole, folder=tmp_path / "whole", **args).train()
    again = fresh_model()
    make(model=again, folder=tmp_path / "again", **args).train()
    assert torch.equal(flat(whole), flat(again))

    resumed = fresh_model()
    trainer = make(model=resumed, folder=tmp_path / "whole", **args)
    before = (tmp_path / "whole" / "log_mu.parquet").stat().st_mtime_ns
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert (tmp_path / "whole" / "log_mu.parquet").stat().st_mtime_ns == before  # read, not computed again
    assert torch.equal(flat(whole), flat(resumed))


@pytest.mark.slow
def test_a_run_is_resumed_in_another_folder(make, rows, tmp_path):
    args = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    whole = fresh_model()
    make(model=whole, evaluation={"a/b": rows}, folder=tmp_path / "first", **args).train()
    for checkpoint in ("first/checkpoint-1", "second/checkpoint-2"):
        resumed = fresh_model()
        trainer = make(model=resumed, evaluation={"a/b": rows}, folder=tmp_path / "second", **args)
        trainer.train(resume_from_checkpoint=str(tmp_path / checkpoint))
        assert torch.equal(flat(whole), flat(resumed))
    with pytest.raises(ValueError, match=r"first/checkpoint-1 .* rows \(fingerprint.*\bsame\b"):
        make(rows.select(range(4)), folder=tmp_path / "third", **args).train(
            resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1")
        )


@pytest.mark.slow
def test_resuming_takes_the_weights_of_the_checkpoint(make, tmp_path):
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    whole = fresh_model()
    make(model=whole, **args).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    other = fresh_model()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(0.01)
    for model in (other, checkpoint):
        trainer = make(model=model, **args)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert torch.equal(flat(trainer.model), flat(whole))


def test_log_mu_in_memory_is_not_used_for_another_run(make, tmp_path, monkeypatch):
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    start, checkpoint = fresh_model(), str(tmp_path / "checkpoint-1")
    make(model=start, **args).train()
    saved = (tmp_path / "log_mu.parquet").read_bytes()
    trainer = make(model=fresh_model(), **args)
    with monkeypatch.context() as patch:
        patch.setattr(log_mu, "_per_token_logps", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.compute_log_mu()
    trainer.train(resume_from_checkpoint=checkpoint)  # computes no log μ with the weights of the checkpoint
    assert (tmp_path / "log_mu.parquet").read_bytes() == saved
    trainer = make(model=checkpoint, **args)
    with pytest.warns(UserWarning, match="old_1_log_mu.parquet"):
        trainer.compute_log_mu()
    with pytest.raises(ValueError, match="log μ of another run"):
        trainer.train(resume_from_checkpoint=checkpoint)


def test_a_training_log_after_an_evaluation_has_the_metrics_of_training(make, rows):
    trainer = make(evaluation=rows, eval_strategy="epoch", logging_steps=99)
    trainer.train()
    *_, evaluation, summary = trainer.state.log_history
    assert evaluation["eval_topr/positive_share"] == summary["topr/positive_share"] == 0.25
    assert "train_runtime" in summary
    assert not trainer.model.training


def test_evaluation_and_curation(make, rows):
    trainer = make(
        evaluation=rows, curation="anna_karenina", iteration_size=4, eval_strategy="steps", eval_steps=1, max_steps=1
    )
    assert (len(trainer.train_dataset), trainer.curated.chosen_positives) == (4, 2)
    assert len(trainer.eval_dataset) == len(rows)
    trainer.train()
    evaluation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluation["eval_topr/positive_share"] == 0.25
    assert math.isfinite(evaluation["eval_loss"])


def test_peft(make):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make(num_train_epochs=2, peft_config=lora)
    trainer.train()
    assert any(p.abs().sum() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)
    assert not any(p.requires_grad for n, p in trainer.model.named_parameters() if "lora" not in n)


def test_when_steps_are_sorted(make, model, moe):
    def is_sorted(model, **settings):
        trainer = make(model=model, share_prompts=False, **settings)
        return isinstance(trainer._get_train_sampler(), StepsSortedByLength)

    assert is_sorted(model)
    assert not is_sorted(moe, router_aux_loss_coef=0.01)  # an auxiliary loss is not a sum over rows
    newer = hasattr(OfflineTOPRConfig, "train_sampling_strategy")
    order = [{"train_sampling_strategy": "sequential"}] if newer else []
    for plain in ({"sort_by_length": False}, {"padding_free": True}, *order,
                  {"accelerator_config": {"split_batches": True}}):  # fmt: skip
        assert not is_sorted(model, **plain)


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, "25%"), ({"effective_positive_share": 0.5}, "50%"), ({"preset": "positives_only"}, None),
     ({"disable_tqdm": True}, None), ({"curation": "positives"}, None), ({"column": 1.0}, None)],
)  # fmt: skip
def test_the_first_line_says_how_much_negatives_weigh(make, rows, capsys, settings, share):
    settings = {"disable_tqdm": False, "max_steps": 1, **settings}
    if settings.pop("column", None):  # No setting changes these rewards.
        rows = rows.add_column("reward_after_baseline", rows["reward"])
    trainer = make(rows, **settings)
    trainer.compute_log_mu()
    assert "the effective share of positives" not in capsys.readouterr().out
    trainer.train()
    said = capsys.readouterr().out
    assert (f"the effective share of positives is {share}," in said) == (share is not None)
    assert said.count("the effective share of positives is") == (share is not None)


@pytest.mark.parametrize(("preset", "is_warned"), [("topr", True), ("positives_only", False)])
def test_dead_negatives_are_warned_about_once_and_early(make, rows, recwarn, preset, is_warned):
    """With log μ = 0, the ratio is the probability of the completion, so negatives are dead at the first step."""
    rows = rows.add_column("mu_logps", [0.0] * len(rows))
    make(rows, preset=preset, max_steps=20, learning_rate=0.0).train()
    assert sum("below 0.01 at step 1 of 20" in str(each.message) for each in recwarn) == is_warned


def test_mixture_of_experts(make, moe):
    trainer = make(model=moe, router_aux_loss_coef=0.01, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] > 0
    # The auxiliary loss counts once per step. With four micro-batches, each adds a quarter of it.
    batch, losses = trainer.data_collator([trainer.train_dataset[0]]), {}
    for steps in (1, 4):
        trainer.current_gradient_accumulation_steps = steps
        losses[steps] = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(1)).item()
    aux = trainer._metrics["train"]["aux_loss"][-1].item()
    assert losses[1] - losses[4] == pytest.approx(0.01 * aux * 3 / 4, rel=1e-2)


def test_given_log_mu(make, model, tokenizer, rows, tmp_path):
    lengths = [len(plain_logps(model, tokenizer, row)) for row in rows]
    sums = rows.add_column("mu_logps", [-10.0] * 8)
    trainer = make(sums, max_steps=1)
    trainer.train()
    assert not (tmp_path / "log_mu.parquet").exists()  # nothing was computed
    ratio = next(entry for entry in trainer.state.log_history if "loss" in entry)["topr/log_ratio/negatives/mean"]
    assert abs(ratio) > 0.5

    own = rows.add_column("mu_logps", [[-0.1] * n for n in lengths])
    good = own.add_column("mu_fingerprint", [mu_fingerprint(fresh_model(), 1.0)] * 8)
    make(good, model=fresh_model(), max_steps=1).train()


def test_rows_that_need_no_log_mu_may_bring_anything(make, rows, tmp_path):
    completion = make(ratio_level="segment").train_dataset
    counts = [len(row["input_ids"]) - row["prompt_length"] for row in completion]
    mu_logps = [[-1.0] * n if reward < 0 else [] for n, reward in zip(counts, rows["reward"], strict=True)]
    given = rows.add_column("mu_logps", mu_logps)
    trainer = make(given, ratio_level="segment")
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert len(batch["mu_logps"]) == sum(counts)
    trainer.train()


def test_the_model_card_tells_of_the_rows(make, tmp_path):
    make(effective_positive_share=0.5, max_steps=1, save_strategy="steps", save_steps=1).train()
    card = (tmp_path / "README.md").read_text()  # written with the checkpoint
    assert "| baseline | solved for an effective positive share of 0.5 |" in card
    assert "| rows | 8 rows, 25.0% positive" in card
    assert "| steps | 1, learning rate" in card


@pytest.mark.slow
def test_sampler_log_mu(make, model, tokenizer, rows, tmp_path):
    lengths = [len(plain_logps(model, tokenizer, row)) for row in rows]
    sampled = rows.add_column("sampler_logps", [[-0.2] * n for n in lengths])
    trainer = make(sampled, log_mu="sampler", max_steps=1)
    trainer.train()
    assert trainer.train_dataset["mu_logps"][0] == pytest.approx([-0.2] * lengths[0])
    # With log_mu="sampler", a column mu_logps is not used, so its fingerprint is not checked.
    other = sampled.add_column("mu_logps", [[-9.0] * n for n in lengths]).add_column("mu_fingerprint", ["other"] * 8)
    make(other, log_mu="sampler", max_steps=1).train()


def test_evaluation_before_and_after_training(make, rows):
    trainer = make(evaluation={"a": rows.select(range(4))}, max_steps=1)
    before = trainer.evaluate()
    assert math.isfinite(before["eval_a_loss"])
    # Before training, π = μ, so every weight is 1.
    logged = next(entry for entry in trainer.state.log_history if "eval_a_topr/weight_mean" in entry)
    assert logged["eval_a_topr/weight_mean"] == pytest.approx(1, abs=1e-3)
    direct = trainer.evaluate(rows.select(range(4)))
    assert direct["eval_loss"] == pytest.approx(before["eval_a_loss"], rel=1e-5)
    both = trainer.evaluate({"a": trainer.eval_dataset["a"], "b": rows.select(range(4))})
    assert both["eval_b_loss"] == pytest.approx(both["eval_a_loss"], rel=1e-5)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_a_loss"])
    with pytest.raises(ValueError, match="rows of eval need log μ of the starting weights"):
        trainer.evaluate(rows.select(range(2)))
    trainer.args.preset = "tis"  # It needs log μ of positives, too, and the weights are no longer those of μ.
    with pytest.raises(ValueError, match=r"rows of train need log μ.*new trainer"):
        trainer.train()


@pytest.mark.slow
def test_other_rows_to_evaluate_leave_the_files_of_the_trainers_own(make, rows, tmp_path):
    own, args = rows.select(range(4)), {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make(evaluation=own, model=fresh_model(), **args)
    trainer.evaluate()
    trainer.evaluate(rows.select(range(2, 8)))
    trainer.train()
    resumed = make(evaluation=own, model=fresh_model(), **args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_rows_to_evaluate_later_are_checked_as_at_the_start(make, rows):
    trainer = make()
    chosen = trainer.curated
    with pytest.raises(ValueError, match=r"'train' .*another name"):
        trainer.evaluate({"train": rows.select(range(4))})
    with pytest.raises(TypeError, match=r"datasets\.Dataset.*IterableDataset"):
        trainer.evaluate(rows.to_iterable_dataset())
    with pytest.raises(ValueError, match=r"`finish_reason` .*stop"):
        trainer.evaluate(rows.add_column("finish_reason", ["eos"] * len(rows)))
    assert trainer.curated is chosen


def test_an_evaluation_set_gets_the_baseline_of_the_training_set(make, rows):
    right = rows.filter(lambda row: row["reward"] > 0)
    trainer = make(evaluation=right, effective_positive_share=0.5)
    rewards = torch.tensor(trainer.train_dataset["reward"][:])
    assert rewards.clamp(min=0).sum() / rewards.abs().sum() == pytest.approx(0.5)
    # p = 1/4 and p~ = 1/2: c = -1/2.
    assert trainer.eval_dataset["reward"][:] == [pytest.approx(1.5)] * 2


def test_balanced_rows_are_half_right_and_half_wrong(make, rows):
    """`curation="balanced"` alone gives R of one size to both halves, and to an evaluation set."""
    rows = rows.map(lambda row: {"reward": 0.5 if row["reward"] > 0 else 0.0})
    trainer = make(rows, evaluation=rows, curation="balanced", baseline="mean")
    assert sorted(trainer.train_dataset["reward"][:]) == [-0.25] * 4 + [0.25] * 4
    assert set(trainer.eval_dataset["reward"][:]) == {-0.25, 0.25}
    assert len(set(trainer.curated.indices)) == 6  # two right rows twice, and four of six wrong rows


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, True), ({"curation": "repeated_positives"}, False), ({"baseline": -1.0}, False),
     ({"preset": "positives_only"}, False), ({"effective_positive_share": 0.5}, False)],
)  # fmt: skip
def test_few_right_answers_name_the_recipes(make, capsys, settings, named):
    make(**{"baseline": "mean", "disable_tqdm": False, **settings})
    said = capsys.readouterr().out
    assert ("25% of the completions are right" in said and "curation='repeated_positives'" in said) == named


def test_the_agreement_of_wrong_answers_is_printed(make, rows, capsys):
    """No completion of the second problem is right."""

    def change(row, n):
        return {"reward": row["reward"] if n < 4 else -1.0, "extracted": "7"}

    make(rows.map(change, with_indices=True), disable_tqdm=False)
    assert "agree in 100%). What helps: several iterations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "reads"),
    [({"num_train_epochs": 13}, None), ({"max_steps": 28}, 14),
     ({"curation": "repeated_positives", "num_train_epochs": 4}, 16)],
)  # fmt: skip
def test_many_readings_of_a_right_answer_are_warned_about(make, settings, reads):
    """Two of eight rows are right. `repeated_positives` reads each of them four times per epoch."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make(**settings)
    said = [str(each.message) for each in warned if "reads a right answer" in str(each.message)]
    assert len(said) == (reads is not None)
    assert all(f"up to {reads} times" in text and "iteration_size" in text for text in said)


@pytest.mark.parametrize("are_repeated", [False, True])
def test_right_answers_that_curate_repeated_are_no_warning(make, rows, are_repeated):
    chosen = rows.select([0, 0]).add_column("reward_after_baseline", [1.0, 1.0])
    if are_repeated:
        chosen = chosen.add_column("times_chosen", [2, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(chosen)
    assert any("supervised fine-tuning" in str(warning.message) for warning in caught) != are_repeated


def test_an_evaluation_set_gets_a_known_baseline(make, rows):
    """With `reward_after_baseline`, raw rewards can be missing. The baseline then comes from rows that have both."""
    raw = [None, *rows["reward"][1:]]
    curated = rows.remove_columns("reward").add_column("reward", raw)
    curated = curated.add_column("reward_after_baseline", [1.0] + [reward - 0.5 for reward in raw[1:]])
    trainer = make(curated, evaluation=rows, effective_positive_share=0.5)
    assert trainer.eval_dataset["reward"][:] == [reward - 0.5 for reward in rows["reward"]]


def test_settings_reach_the_curation(make, rows):
    def chosen(data, **settings):
        trainer = make(data, model=fresh_model(), curation="anna_karenina", iteration_size=3, **settings)
        return {tuple(ids) for ids in trainer.train_dataset["input_ids"]}

    assert chosen(rows, seed=1) == chosen(rows.select(range(7, -1, -1)), seed=1)  # sample_id decides, not the order
    assert len({frozenset(chosen(rows, seed=seed)) for seed in range(6)}) > 1


def test_a_column_named_labels_is_nothing_special(make, rows):
    labelled = rows.add_column("labels", ["good"] * 8)
    trainer = make(labelled, max_steps=1)
    trainer.train()


@pytest.mark.slow
def test_another_runs_log_mu_is_not_replaced_in_silence(make, rows, tmp_path):
    def train(rows):
        make(rows, model=str(arithmetic.CARELESS_MODEL), save_strategy="steps", save_steps=1, max_steps=1).train()

    train(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(rows)  # the same rows again
    with pytest.warns(UserWarning, match=r"log_mu\.parquet .*old_1_log_mu\.parquet"):
        train(rows.select(range(4)))
    with pytest.warns(UserWarning, match="old_2_log_mu.parquet"):
        train(rows.select(range(2)))
    for k, count in ((1, len(rows)), (2, 4)):
        assert pq.read_table(tmp_path / f"old_{k}_log_mu.parquet").num_rows == count


def test_a_processor_is_used_by_its_tokenizer(tokenizer):
    processor, own = ProcessorMixin(), tokenizer.chat_template
    processor.tokenizer, processor.chat_template = tokenizer, "of the processor"
    assert tokenizer_of(processor) is tokenizer
    assert tokenizer.chat_template == own
    tokenizer_of(processor, template_was_set=True)
    assert tokenizer.chat_template == "of the processor"
    tokenizer.chat_template, processor.chat_template = None, own
    assert tokenizer_of(processor).chat_template == own


def test_the_tokenizer_of_mistral_common_is_refused():
    backend = type("MistralCommonBackend", (), {"tokenizer": object()})()
    with pytest.raises(ValueError, match=r"processing_class: .* mistral_format=False"):
        tokenizer_of(backend)


def test_log_mu_is_computed_in_no_larger_batches_than_training_has(make, model, monkeypatch):
    forward, sizes = OfflineTOPRTrainer._policy_logps, []

    def noted(self, model, inputs):
        sizes.append(len(inputs["input_ids"]))
        return forward(self, model, inputs)

    monkeypatch.setattr(OfflineTOPRTrainer, "_policy_logps", noted)
    make(per_device_train_batch_size=2).compute_log_mu()
    assert max(sizes) == 2


def test_the_training_set_can_be_evaluated_before_training(make):
    trainer = make()
    found = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(found["eval_loss"])
    assert found["eval_topr/log_ratio/negatives/mean"] == pytest.approx(0.0, abs=1e-5)
    trainer.train()


def test_log_mu_is_of_the_weights_that_are_evaluated(make, rows):
    # With shared prompts, rounding depends on the other rows of a batch, so sharing is off.
    trainer = make(evaluation=rows, bf16_full_eval=True, share_prompts=False)
    assert trainer.evaluate()["eval_topr/log_ratio/negatives/mean"] == pytest.approx(0.0, abs=1e-5)
