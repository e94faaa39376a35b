import copy
import math
import warnings

import pytest
import torch
from datasets import Dataset, IterableDataset
from reference import coin, fresh_model, of_level, plain_logps
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from topr_trl import PRESETS, TOPRConfig, TOPRTrainer
from topr_trl.data.tokenization import tokenize_row
from topr_trl.loss import topr_loss
from topr_trl.rewards import answer_reward
from topr_trl.tasks import arithmetic, gsm8k

REWARD = answer_reward(gsm8k.judge)


SETTINGS = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2, "max_completion_length": 16,
    "report_to": "none", "bf16": False, "use_cpu": True, "learning_rate": 1e-3, "gradient_checkpointing": False,
    "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "baseline": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def problems():
    return gsm8k.prepare(arithmetic.arithmetic_dataset(16, seed=1), num_shots=0)


@pytest.fixture
def make(model, tokenizer, problems, tmp_path):
    """Return a function that makes a trainer. Arguments that are not settings of `TOPRConfig` go to the trainer."""

    def make(
        reward=coin, data=problems, evaluation=None, model=model, tokenizer=tokenizer, kind=TOPRTrainer, **settings
    ):
        parts = {name: settings.pop(name) for name in [*settings] if name not in TOPRConfig.__dataclass_fields__}
        if "effective_positive_share" in settings:
            settings["baseline"] = "mean"
        args = TOPRConfig(str(tmp_path), **{**SETTINGS, **settings})
        return kind(model, reward, args, data, evaluation, processing_class=tokenizer, **parts)

    return make


@pytest.fixture
def train(make):
    """Return a function that trains, and returns the trainer, its training logs and the weights before training."""

    def train(*args, **kwargs):
        trainer = make(*args, **kwargs)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert logs
        assert all(math.isfinite(v) for entry in logs for v in entry.values() if isinstance(v, float))
        return trainer, logs, before

    return train


def longer_and_longer(prompts, trainer):
    """Return completions of three tokens and more, with log-probabilities, as a rollout function."""
    ids = [[7 + i] * (3 + i) for i in range(len(prompts))]
    return {"prompt_ids": [[5]] * len(prompts), "completion_ids": ids, "logprobs": [[-1.0] * len(c) for c in ids]}


def moved(trainer, before):
    return [name for name, p in trainer.model.named_parameters() if name in before and not torch.equal(p, before[name])]


def test_every_parameter_moves_and_every_metric_is_there(train):
    trainer, logs, before = train()
    assert len(moved(trainer, before)) == len(before)
    logps = [f"topr/logps/{of}/{per}" for of in ("positives", "negatives") for per in ("token", "completion")]
    always = ("topr/positive_share", "topr/effective_positive_share", "topr/reward", "grad_norm", "reward", *logps)
    of_ratio = ("topr/weight_mean", "topr/weight_mean_negatives", "topr/negatives_tapered", "topr/negatives_dead",
                "topr/weight_not_one", "topr/realized_positive_share", "topr/log_ratio/negatives/q05",
                "topr/log_ratio/positives/q95")  # fmt: skip
    for name in always:
        assert name in logs[-1], name
    # Each batch is used once, so π = μ, and metrics of the ratio are not logged.
    assert not set(of_ratio) & set(logs[-1])
    _, logs, _ = train(model=fresh_model(), num_iterations=2)
    for name in of_ratio:
        assert name in logs[-1], name
    assert logs[1]["topr/log_ratio/negatives/mean"] != 0  # the second pass is off-policy
    assert not any(name.startswith("clip_ratio") for name in logs[-1])
    assert logs[-1]["topr/positive_share"] == 0.5


OWN_SETTINGS = {"no_repeat_ngram_size": 1, "min_p": 0.9, "top_p": 0.1, "suppress_tokens": [5, 6, 7, 8]}


def test_settings_of_the_model_s_generation_config_do_not_change_the_samples(make, capsys):
    """The completions stay as they are, also in evaluation."""

    def completions(**own):
        model, seen = fresh_model(), []
        for name, value in own.items():
            setattr(model.generation_config, name, value)
        config = model.generation_config

        def reward(completion_ids, **_):
            seen.extend(completion_ids)
            return [float(i) for i in range(len(completion_ids))]

        trainer = make(reward, model=model, max_steps=1, top_k=0, evaluation=Dataset.from_list([{"prompt": "2 + 3 ="}]))
        trainer.train()
        trainer.evaluate()
        assert trainer.model.generation_config is config
        return seen

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert completions(**OWN_SETTINGS) == completions()
    said = " ".join(str(warning.message) for warning in told)
    for name in OWN_SETTINGS:
        assert (f"{name}=" in said) != (name in ("min_p", "top_p")), name


def test_same_seed_same_weights(train, request):
    weights = []
    for _ in range(2):
        trainer, _, _ = train(model=fresh_model())
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("level", "normalize"),
    [("sequence", True), ("sequence", False), ("segment", True)],
)
def test_gradient_is_that_of_the_pure_loss(make, model, level, normalize):
    # With num_iterations=2, the batch keeps log μ of its first use. Then noise makes μ differ from π.
    trainer = make(**of_level(level, 3), length_normalization=normalize, num_iterations=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, batch)
    batch["old_per_token_logps"] += 0.3 * torch.randn(batch["completion_ids"].shape)
    logps = plain_logps(model, batch)
    for preset in ("topr", "tis", "reinforce", "positives_only", "opr"):
        trainer._loss_settings["limits"] = PRESETS[preset]
        buffered = dict(batch)
        model.zero_grad()
        trainer.compute_loss(trainer.model, batch).backward()
        ours = [p.grad.clone() for p in model.parameters()]
        assert batch.keys() == buffered.keys()
        torch.testing.assert_close(batch["old_per_token_logps"], buffered["old_per_token_logps"])

        model.zero_grad()
        topr_loss(
            logps, batch["old_per_token_logps"], batch["topr_rewards"], batch["completion_mask"], PRESETS[preset],
            level, normalize, 3,
        ).losses_B.mean().backward(retain_graph=True)  # fmt: skip
        for a, p in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=2e-4, atol=5e-6, msg=lambda said, of=preset: f"{of}: {said}")


def test_rewards_are_raw_rewards_minus_the_baseline_of_a_prompt(make):
    trainer = make(lambda completions, **_: [float(i) for i in range(len(completions))], baseline="group_mean")
    rewards = torch.cat([batch["topr_rewards"] for batch in generation_batch(trainer)])
    assert sorted(rewards.tolist()) == [-1.5, -1.5, -0.5, -0.5, 0.5, 0.5, 1.5, 1.5]


def test_curation_cuts_the_batch_before_the_backward_pass(make):
    def second_is_right(completions, **_):
        return [1.0 if i % 4 == 1 else -1.0 for i in range(len(completions))]

    trainer = make(
        second_is_right, curation="anna_karenina", iteration_size=6, per_device_train_batch_size=8,
        steps_per_generation=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    batches = trainer._buffered_inputs
    assert [len(b["completion_ids"]) for b in batches] == [3, 3]  # 16 rows were generated
    rewards = torch.cat([b["topr_rewards"] for b in batches])
    assert sorted(rewards.tolist()) == [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    assert all(b["topr_scale"] == 1 for b in batches)
    assert max(b["completion_mask"].sum(-1).max() for b in batches) == batches[0]["completion_ids"].size(1)
    trainer.train()


def test_filler_rows_of_a_curated_batch_have_no_weight(make, model):
    # Three of eight rows are chosen. Two micro-batches of equal size need a fourth row, but the loss is the mean over
    # the three chosen rows.
    trainer = make(
        curation="uniform", iteration_size=3, per_device_train_batch_size=4, steps_per_generation=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    rewards = torch.cat([b["topr_rewards"] for b in trainer._buffered_inputs])
    assert (len(rewards), int(rewards.isnan().sum())) == (4, 1)
    # Both micro-batches together give the gradient of the mean over the three rows.
    trainer.current_gradient_accumulation_steps = 2
    expected = torch.zeros(())
    for batch in trainer._buffered_inputs:
        trainer.compute_loss(trainer.model, batch).backward()
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for batch in trainer._buffered_inputs:
        logps = plain_logps(model, batch)
        losses = topr_loss(
            logps, logps.detach(), batch["topr_rewards"].nan_to_num(0.0), batch["completion_mask"], PRESETS["topr"]
        ).losses_B
        expected = expected + losses.sum() / 3
    expected.backward()
    torch.testing.assert_close(ours, torch.cat([p.grad.flatten() for p in model.parameters()]), rtol=1e-3, atol=2e-6)
    model.zero_grad()
    trainer.train()
    assert [e for e in trainer.state.log_history if "topr/reward" in e]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 4, "gradient_accumulation_steps": 1},
        {"beta": 0.1},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True},
        {"mask_truncated_completions": True, "max_completion_length": 32},
        {"gradient_checkpointing": True},
        {"optim": "adafactor", "learning_rate": 5e-7},
    ],
    ids=lambda s: next(iter(s)),
)
def test_features_of_grpo_keep_working(train, settings):
    trainer, logs, before = train(**settings)
    if settings.get("beta"):
        assert "kl" in logs[-1]
    if not settings.get("mask_truncated_completions"):
        assert moved(trainer, before)


@pytest.mark.parametrize("settings", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_log_mu_of_a_batch_that_is_used_again_costs_no_forward(make, model, tmp_path, settings):
    """A reused batch takes log μ from the forward pass of its first use, so it needs no extra forward pass."""
    rows = Dataset.from_dict({"prompt": [f"{i}" for i in range(8)]})
    at_first, seen = copy.deepcopy(model), []
    trainer = make(data=rows, rollout_func=longer_and_longer, num_iterations=3, max_steps=6, **settings)
    forward = trainer.model.forward

    def watched(*args, **kwargs):
        seen.append(trainer._loss_inputs)
        return forward(*args, **kwargs)

    trainer.model.forward = watched
    trainer.train()
    accumulation = settings.get("gradient_accumulation_steps", 1)
    assert len(seen) == 6 * accumulation
    for inputs in seen[accumulation : 3 * accumulation]:  # later uses of the first batch
        there = inputs["completion_mask"].bool()
        torch.testing.assert_close(inputs["topr_mu_logps"][there], plain_logps(at_first, inputs).detach()[there])


@pytest.mark.slow
@pytest.mark.parametrize("uses", [1, 2])
def test_a_training_after_an_interrupted_one_begins_with_a_new_batch(make, model, tmp_path, uses):
    """TRL would continue in the middle of the old batch, and compute its log μ after an optimizer step."""
    rows = Dataset.from_dict({"prompt": [f"{i}" for i in range(24)]})
    trainer = make(data=rows, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=uses)
    generate, step, ratios = trainer._generate_and_score_completions, trainer.training_step, []

    def interrupted(*args):
        if trainer._step == 1:
            trainer.training_step = step
            raise KeyboardInterrupt
        return step(*args)

    def generated(inputs):
        trainer.wrote = copy.deepcopy(model.state_dict())
        return generate(inputs)

    losses = trainer._compute_losses

    def watched(policy, mu, rewards, mask, numbers):
        writer = fresh_model()
        writer.load_state_dict(trainer.wrote)
        ratios.append((mu - plain_logps(writer, trainer._loss_inputs).detach())[mask.bool()].abs().max())
        return losses(policy, mu, rewards, mask, numbers)

    trainer._generate_and_score_completions, trainer.training_step = generated, interrupted
    trainer._compute_losses = watched
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert len(ratios) == 1 + 4
    assert max(ratios) < 1e-4


def test_a_prompt_has_one_bos_token_online_as_offline(make, bos_tokenizer):
    prompt = f"{bos_tokenizer.bos_token}3 + 4 ="
    rows = Dataset.from_dict({"prompt": [prompt] * 4})
    trainer = make(data=rows, tokenizer=bos_tokenizer)
    ids, *_ = trainer._tokenize_prompts([prompt, "3 + 4 ="])
    assert ids == [tokenize_row({"prompt": prompt, "completion": "7"}, bos_tokenizer).prompt_ids] * 2
    stop = (bos_tokenizer.eos_token, bos_tokenizer.eos_token_id)
    bos_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {stop[0]}", special_tokens=[stop])
    assert trainer._tokenize_prompts([prompt])[0] == ids[:1]  # without the stop token
    bos_tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": prompt}]
    ids, *_ = trainer._tokenize_prompts([chat])
    assert ids == [tokenize_row({"prompt": chat, "completion": "7"}, bos_tokenizer).prompt_ids]


def test_incomplete_groups_of_an_evaluation_batch_are_refused(make, problems):
    trainer = make(num_generations_eval=3)
    with pytest.raises(ValueError, match=r"per_device_eval_batch_size=8.*groups of 3.*num_generations_eval"):
        trainer.evaluate(problems.select(range(4)))
    assert math.isfinite(trainer.evaluate(problems.select(range(2)))["eval_loss"])  # one batch


def test_iterable_dataset_and_evaluation(train, problems):
    stream = IterableDataset.from_generator(lambda: iter(problems.to_list()))
    trainer, _, _ = train(
        REWARD, stream, problems.select(range(2)), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
        num_generations_eval=2,
    )  # fmt: skip
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations
    assert "eval_topr/reward" in evaluations[-1]


def test_a_training_log_after_an_evaluation_has_the_metrics_of_training(make, problems):
    trainer = make(evaluation=problems.select(range(2)), eval_strategy="steps", eval_steps=2, logging_steps=99)
    trainer.train()
    *_, summary = trainer.state.log_history
    assert {"train_runtime", "topr/reward"} <= summary.keys()
    assert not [name for name in summary if name.startswith("clip_ratio")]


def test_peft_trains_the_adapter_alone(train):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer, _, _ = train(peft_config=lora)
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert any(p.abs().sum() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_reward_model(train, tokenizer, tmp_path):
    small = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForSequenceClassification(small).save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    train(scorer, reward_processing_classes=tokenizer)


@pytest.mark.slow
def test_the_first_line_says_how_much_negatives_weigh(train, capsys):
    train(disable_tqdm=False, baseline=-0.5)
    said = capsys.readouterr().out
    assert said.count("TOPR: the effective share of positives is 75%, so negatives have 25% of the weight") == 1
    assert "effective_positive_share sets this share.\n" in said
    train(disable_tqdm=False)
    assert "the loss is 0 while all weights are 1" in capsys.readouterr().out


def test_mixture_of_experts(train, moe):
    _, logs, _ = train(model=moe, router_aux_loss_coef=0.01)
    assert logs[-1]["aux_loss"] > 0


@pytest.mark.parametrize("log_mu", ["trainer", "sampler"])
def test_rollout_function_with_tokens_of_an_environment(train, tokenizer, log_mu):
    def rollout(prompts, trainer):
        # The completion ends with two tokens of the environment, as after a tool call. The loss leaves them out.
        ids = tokenizer("4 + 3 = 7.")["input_ids"]
        return {
            "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": [ids] * len(prompts),
            "logprobs": [[-2.0] * len(ids)] * len(prompts) if log_mu == "sampler" else None,
            "env_mask": [[1] * (len(ids) - 2) + [0, 0]] * len(prompts),
        }  # fmt: skip

    rows = Dataset.from_dict({"prompt": [f"What is {i} + 1?" for i in range(8)]})

    def mostly_right(completions, **_):  # with `coin`, the equal completions would cancel
        return [1.0 if i % 4 else -1.0 for i in range(len(completions))]

    trainer, _, before = train(mostly_right, rows, rollout_func=rollout, log_mu=log_mu)
    assert moved(trainer, before)


@pytest.mark.parametrize("curation", ["none", "uniform"])
def test_vision(train, tokenizer, curation):
    image_module = pytest.importorskip("PIL.Image")
    clip = pytest.importorskip(
        "transformers.models.clip.image_processing_pil_clip",
        reason="this transformers has image processors for torchvision only",
    )
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    template = (
        "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} assistant:"
    )
    processor = LlavaProcessor(
        clip.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer, patch_size=14, vision_feature_select_strategy="default", chat_template=template,
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token_id)
    )
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "What?"}], "image": image_module.new("RGB", (28, 28), (30 * i, 0, 0))}
         for i in range(8)]
    )  # fmt: skip
    settings = {"curation": curation, "iteration_size": 4} if curation != "none" else {}
    trainer, _, before = train(data=rows, model=model, tokenizer=processor, **settings)
    assert any("language_model" in name for name in moved(trainer, before))
    assert any("multi_modal_projector" in name for name in moved(trainer, before))
    assert len(trainer._buffered_inputs[0]["pixel_values"]) == (4 if settings else 8)


def test_model_card_names_the_paper(make, tmp_path):
    trainer = make()
    trainer.create_model_card("tiny")
    card = (tmp_path / "README.md").read_text()
    assert "| truncation limits | R >= 0: [1, 1]; R < 0: [0, 1] (`topr`) |" in card
    assert "| rows | generated during training, 4 per prompt |" in card
    assert card.index("| steps |") < card.index("### Framework versions")
    assert "2503.14286" in card
    assert "topr" in card


def test_sampler_log_mu_is_used(make):
    # With vLLM, TRL's batch has the sampler's log-probabilities.
    trainer = make(preset="tis")
    trainer.args.log_mu = "sampler"
    mask = torch.tensor([[1, 1, 0]])
    policy = torch.tensor([[-1.0, -1.0, -9.0]])
    inputs = {
        "completion_mask": mask, "topr_rewards": torch.tensor([-1.0]), "topr_rows": torch.tensor([0]),
        "old_per_token_logps": policy * 3,
        "sampling_per_token_logps": torch.tensor([[-0.5, -0.5, -7.0]]),
    }  # fmt: skip
    trainer._write_weighted_rewards(inputs, policy)
    assert inputs["advantages"].tolist() == [pytest.approx(-math.exp(-1))]
    assert "old_per_token_logps" not in inputs


@pytest.mark.parametrize(("accumulation", "is_kept"), [(2, False), (1, True)])
def test_with_vllm_mu_is_pi_until_the_weights_change(make, accumulation, is_kept):
    """With vLLM, TRL always computes log μ in another batch than the loss, where it can round differently."""
    trainer = make(rollout_func=longer_and_longer, steps_per_generation=2, gradient_accumulation_steps=accumulation)
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    batches = generation_batch(trainer)
    assert all(("old_per_token_logps" in batch) == is_kept for batch in batches)
    assert all(batch["importance_sampling_ratio"] == 1 for batch in batches)  # TRL's correction is off
    trainer.model.eval()
    assert "old_per_token_logps" not in trainer._prepare_inputs([{"prompt": "3 + 4 ="}] * 4)
    assert trainer._metrics["eval"]["sampling/sampling_logp_difference/mean"]


def test_a_push_that_publishes_rows_warns(make, monkeypatch):
    monkeypatch.setattr(TOPRTrainer, "init_hf_repo", lambda self: None)
    with pytest.warns(UserWarning, match=r"completions/\*.parquet"):
        make(push_to_hub=True, log_completions=True)


def test_quiet_when_all_is_well(train):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    assert not [w for w in caught if w.filename == __file__ or "negative" in str(w.message)]


# The tests below check exact values, not only that weights moved.


def generation_batch(trainer):
    """Return the micro-batches of the first generation batch."""
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return trainer._buffered_inputs


def test_weighted_sum_of_rewards_leaves_none_out(make):
    def some(completions, **_):
        return [None, None, 1.0, 1.0] * 2

    def others(completions, **_):
        return [None, 2.0, None, 2.0] * 2

    batches = generation_batch(make([some, others], reward_weights=[1.0, 10.0]))
    rewards = torch.cat([b["topr_rewards"] for b in batches])
    assert int(rewards.isnan().sum()) == 2
    assert sorted(rewards[~rewards.isnan()].tolist()) == [1.0, 1.0, 20.0, 20.0, 21.0, 21.0]


@pytest.mark.parametrize(("extends", "expected"), [(True, {-3.0, -1.0}), (False, {4.0})])
def test_a_subclass_can_change_the_rewards(make, extends, expected):
    class Own(TOPRTrainer):
        def _calculate_rewards(self, inputs, prompts, *rest):
            if extends:
                return super()._calculate_rewards(inputs, prompts, *rest) - 2
            return torch.full((len(prompts), 1), 4.0)

    batches = generation_batch(make(kind=Own))
    assert {value for b in batches for value in b["topr_rewards"].tolist()} == expected


def test_masked_tokens_are_in_neither_the_ratio_nor_the_length(make):
    trainer = make(preset="tis", length_normalization=False)
    policy = torch.tensor([[-1.0, -1.0, -5.0, -9.0]])
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 1, 0]]), "tool_mask": torch.tensor([[1, 1, 0, 1]]),
        "topr_rewards": torch.tensor([-1.0]), "topr_rows": torch.tensor([0]),
        "old_per_token_logps": torch.tensor([[-0.5, -0.5, -1.0, -1.0]]),
    }  # fmt: skip
    trainer._write_weighted_rewards(inputs, policy)
    # The ratio of the model's own two tokens is e^-1. TRL divides by their number, so w · R is multiplied by 2.
    assert inputs["advantages"].item() == pytest.approx(-2 * math.exp(-1))


def test_truncated_completions_that_are_masked_are_no_rows(make):
    # No completion ends within 12 tokens.
    trainer = make(mask_truncated_completions=True, max_completion_length=12, curation="uniform", iteration_size=8)
    with (
        pytest.warns(UserWarning, match="too few rows"),
        pytest.warns(UserWarning, match=r"No completion has a reward.*max_completion_length"),
    ):
        batches = generation_batch(trainer)
    assert torch.cat([b["topr_rewards"] for b in batches]).isnan().all()


def test_padding_of_other_rows_is_cut(make, tmp_path):
    def rollout(prompts, trainer):
        ids = [[7] * (3 if i % 2 else 20) for i in range(len(prompts))]
        return {"prompt_ids": [[5]] * len(prompts), "completion_ids": ids, "logprobs": None}

    def short_is_right(completion_ids, **_):
        return [1.0 if len(ids) == 3 else -1.0 for ids in completion_ids]

    rows = Dataset.from_dict({"prompt": [f"{i}" for i in range(8)]})
    # TRL computes log μ of a batch that is used for several steps, and pads all its rows to the same width.
    settings = {"curation": "positives", "preset": "tis", "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    trainer, widths = make(short_is_right, rows, rollout_func=rollout, **settings), []
    forward = trainer.model.forward

    def seen(*args, **kwargs):
        if trainer._loss_inputs is not None:
            widths.append(kwargs["input_ids"].size(1))
            assert trainer._loss_inputs["old_per_token_logps"].size(1) == 3
        return forward(*args, **kwargs)

    trainer.model.forward = seen
    trainer.train()
    assert set(widths) == {1 + 3}  # the long completions were not chosen


def test_evaluation_is_not_curated_and_groups_by_its_own_size(make, problems):

    def by_position(completions, **_):
        return [float(i) for i in range(len(completions))]

    trainer = make(
        by_position, evaluation=problems.select(range(4)), curation="positives", baseline="group_mean",
        num_generations_eval=2, per_device_eval_batch_size=8, eval_strategy="steps",
    )  # fmt: skip
    trainer.model.eval()
    batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
    assert batch["topr_rewards"].tolist() == [-0.5, 0.5] * 4


def test_every_round_chooses_again(make):
    trainer = make(curation="uniform", iteration_size=4)
    raw = torch.tensor([-1.0, 1.0] * 4)
    chosen = []
    for step in range(6):
        trainer.state.global_step = step
        chosen.append(tuple(trainer._compose(raw, train=True)[1].indices))
    assert len(set(chosen)) > 1


def test_the_length_of_completions_need_not_be_limited(train):
    train(max_completion_length=None, max_steps=1)


def test_table_of_completions_shows_our_rewards(train):
    trainer, _, _ = train(log_completions=True, baseline=-3)
    assert sorted(set(trainer._logs["advantages"])) == [2.0, 4.0]


def test_a_batch_of_equal_rewards_does_not_end_a_run_with_a_target_share(train):
    calls = []

    def later_all_wrong(completions, **_):
        calls.append(1)
        return coin(completions) if len(calls) == 1 else [-1.0] * len(completions)

    with pytest.warns(UserWarning, match="All 8 completions have a negative reward"):
        trainer, logs, _ = train(later_all_wrong, effective_positive_share=0.2)
    # p = 1/2 and p~ = 0.2 give c = 0.6. The second batch uses the same c, so R = -1 - 0.6 = -1.6.
    assert [round(entry["topr/reward"], 6) for entry in logs] == [-0.6, -1.6]
    assert trainer._last_baseline == pytest.approx(0.6)


def test_a_share_of_1_has_no_negatives_if_all_rewards_are_equal(make):
    trainer = make(lambda completions, **_: [-1.0] * len(completions), effective_positive_share=1.0)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert batch["topr_rewards"].tolist() == [0.0] * 8


def test_rewards_of_one_sign_warn(train):
    with pytest.warns(UserWarning, match="set baseline='mean', or baseline=0.5"):
        train(lambda completions, **_: [0.0, 1.0] * 4, max_steps=1, baseline=0)


def test_too_few_rows_are_said_once(train, recwarn):
    batches = iter([[None, *[1.0] * 7], [1.0] * 8])
    train(lambda completions, **_: next(batches), curation="uniform", iteration_size=100)
    assert sum("too few rows" in str(warning.message) for warning in recwarn) == 1


def test_rewards_of_another_scale_are_said_once(train):
    with pytest.warns(UserWarning, match="magnitude of about 1") as caught:
        train(lambda completions, **_: [0.0, 10.0] * 4)
    assert sum("magnitude of about 1" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("baseline", [0, "mean"])
def test_completions_without_a_reward_teach_nothing_and_are_said_once(train, baseline):
    with pytest.warns(UserWarning, match=r"No completion has a reward.*weights") as caught:
        trainer, logs, before = train(lambda completions, **_: [None] * 8, baseline=baseline)
    assert not any("have R = 0" in str(warning.message) for warning in caught)
    assert not moved(trainer, before)
    assert {name for name in logs[-1] if name.startswith("topr/")} == {"topr/computed_tokens"}


def test_equal_rewards_with_a_mean_as_baseline_give_one_warning(train):
    """With equal rewards and a mean as baseline, R = 0. The trainer does not also warn about the sign of rewards."""
    with pytest.warns(UserWarning, match="have R = 0 after baseline=group_mean") as caught:
        train(lambda completions, **_: [0.7] * 8, max_steps=1, baseline="group_mean")
    assert not [warning for warning in caught if "negative" in str(warning.message)]


def test_completions_of_an_evaluation_do_not_silence_the_warning(train, problems):
    some = problems.select(range(2))
    with pytest.warns(UserWarning, match=r"All 8 completions .*R = 0 .*baseline=mean"):
        train(
            lambda completions, **_: [0.5] * len(completions), evaluation=some, max_steps=1, baseline="mean",
            eval_strategy="steps", eval_on_start=True,
        )  # fmt: skip


def test_sampler_log_mu_survives_tokens_it_could_not_score(make):
    trainer = make(preset="tis")
    trainer.args.log_mu = "sampler"
    inputs = {
        "completion_mask": torch.tensor([[1, 1]]), "topr_rewards": torch.tensor([-1.0]), "topr_rows": torch.tensor([0]),
        "sampling_per_token_logps": torch.tensor([[float("nan"), -0.5]]),
    }  # fmt: skip
    batch = dict(inputs)
    trainer._write_weighted_rewards(batch, torch.tensor([[-1.0, -1.0]]))
    assert batch["advantages"].item() == pytest.approx(-math.exp(-0.5))  # only the ratio of the known token
    with pytest.raises(ValueError, match="gave no log-probabilities"):
        trainer._write_weighted_rewards({**inputs, "sampling_per_token_logps": None}, torch.tensor([[-1.0, -1.0]]))


def test_half_precision_weights_warn(make, model):
    with pytest.warns(UserWarning, match="without a float32 copy"):
        make(model=model.to(torch.bfloat16))


def test_an_evaluation_is_none_of_training_whatever_generation_leaves_behind(make, tokenizer, problems):
    """TRL's continuous batching leaves the model in training mode. Evaluation still does not count as training."""

    def rollout(prompts, trainer):
        trainer.model.train()
        ids = tokenizer([" The answer is 4."] * len(prompts))["input_ids"]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    trainer = make(
        evaluation=problems, curation="uniform", iteration_size=4, replay_share=0.5, num_generations_eval=4,
        per_device_eval_batch_size=8, rollout_func=rollout,
    )  # fmt: skip
    found = trainer.evaluate()
    assert len(trainer._replay.buffer) == 0
    assert not trainer.model.training
    assert "eval_topr/reward" in found
