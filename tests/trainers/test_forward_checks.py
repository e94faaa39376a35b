"""Tests that log π in training equals log π of the logits for the row alone, or that the model is refused."""

import pytest
import torch
from datasets import Dataset
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from reference import fresh_model, logps_of
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    XGLMConfig,
)

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.trainers.forward_checks import count_positions_from_mask, learned_positions, probes, turn_off_noise

IDS = {"pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}
ROPE = {
    **IDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
OPT = {
    **IDS, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "word_embed_proj_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**ROPE),
    "gemma2": lambda: Gemma2Config(**ROPE, sliding_window=16, query_pre_attn_scalar=16),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt_neo": lambda: GPTNeoConfig(
        **IDS, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2,
        max_position_embeddings=512,
    ),
    "gpt_oss": lambda: GptOssConfig(**ROPE, num_local_experts=4, num_experts_per_tok=2),
    "opt": lambda: OPTConfig(**OPT, layerdrop=0.5),
    "xglm": lambda: XGLMConfig(**IDS, d_model=32, ffn_dim=64, num_layers=2, attention_heads=2),
    "bloom": lambda: BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=2),
    "falcon": lambda: FalconConfig(**IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    "mamba": lambda: MambaConfig(**IDS, hidden_size=32, num_hidden_layers=2, state_size=8),
    "mixtral": lambda: MixtralConfig(
        **{**ROPE, "num_key_value_heads": 2}, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.3
    ),
}  # fmt: skip
REWARDS = {"prompt": ["3 + 4 =", "3 + 4 ="], "completion": [" 7.", " 8. The answer is 8."], "reward": [1.0, -1.0]}
SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "router_aux_loss_coef": None,
    "save_strategy": "no",
}  # fmt: skip


def random_model(config, tokenizer):
    """Return a model with random weights so large that each token clearly changes log π."""
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def offline(model, tokenizer, folder, **settings):
    args = OfflineTOPRConfig(str(folder), **{**SETTINGS, **settings})
    return OfflineTOPRTrainer(model, args, Dataset.from_dict(REWARDS), processing_class=tokenizer)


def online(model, tokenizer, folder, **settings):
    few = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 1}
    args = TOPRConfig(str(folder), **{**SETTINGS, **few, **settings})
    prompts = Dataset.from_dict({"prompt": ["Ana", "Question: Ana has 3 pens. How many are there?\nAnswer:"]})
    return TOPRTrainer(
        model, lambda completions, **_: [float(len(text) % 3) for text in completions], args, prompts,
        processing_class=tokenizer,
    )  # fmt: skip


def alone(model, prompt, completion):
    return logps_of(model.eval(), prompt, completion).sum().item()


# These models mix the rows of a flat batch.
LEAKING = ("gpt_oss", "opt", "xglm", "bloom", "mamba")
# gpt_neo and falcon are left out, because they leak with some releases of transformers.
APART = [name for name in CONFIGS if name not in (*LEAKING, "gpt_neo", "falcon")]


@pytest.mark.parametrize(("name", "bf16"), [*((name, False) for name in LEAKING), ("gpt_oss", True), ("opt", True)])
def test_models_that_leak_are_refused_without_padding(name, bf16, tokenizer, tmp_path):
    model = random_model(CONFIGS[name](), tokenizer)
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*padding_free=False"):
        offline(model, tokenizer, tmp_path, padding_free=True, bf16=bf16, router_aux_loss_coef=0.0)


@pytest.mark.parametrize(
    ("name", "padding_free"), [*((name, False) for name in CONFIGS), *((name, True) for name in APART)]
)
def test_offline_rows_do_not_depend_on_their_batch(name, padding_free, tokenizer, tmp_path):
    model = random_model(CONFIGS[name](), tokenizer)
    trainer = offline(model, tokenizer, tmp_path, padding_free=padding_free, router_aux_loss_coef=0.0)
    rows = [trainer.train_dataset[k] for k in range(2)]
    model.train()
    with torch.no_grad():
        logps, mask, _ = trainer._policy_logps(model, trainer.data_collator.collate_tokens(rows))
        for k, row in enumerate(rows):
            expected = alone(model, row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
            assert (logps[k] * mask[k]).sum().item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("mamba", "mixtral")])
def test_online_rows_do_not_depend_on_the_padding_of_prompts(name, tokenizer, tmp_path):
    model = random_model(CONFIGS[name](), tokenizer)
    settings = {"router_aux_loss_coef": 0.0} if name == "gpt_oss" else {}
    trainer = online(model, tokenizer, tmp_path, learning_rate=1e-12, gradient_checkpointing=False, **settings)
    seen, original = {}, trainer._write_weighted_rewards

    def keep(inputs, policy_logps_BT):
        seen.update(inputs, logps=policy_logps_BT.detach())
        return original(inputs, policy_logps_BT)

    trainer._write_weighted_rewards = keep
    trainer.train()
    assert len(seen["prompt_mask"].sum(1).unique()) == 2
    for k in range(len(seen["prompt_ids"])):
        prompt = seen["prompt_ids"][k][seen["prompt_mask"][k] == 1].tolist()
        completion = seen["completion_ids"][k][seen["completion_mask"][k] == 1].tolist()
        with torch.no_grad():
            expected = alone(model, prompt, completion)
        assert (seen["logps"][k] * seen["completion_mask"][k]).sum().item() == pytest.approx(expected, abs=1e-3)


def test_a_model_that_positions_do_not_help_is_refused_online(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("topr_trl.trainers.online.count_positions_from_mask", lambda model: None)
    with pytest.raises(ValueError, match="GPT2LMHeadModel depends on the padding"):
        online(random_model(CONFIGS["gpt2"](), tokenizer), tokenizer, tmp_path)


def test_learned_positions_can_be_used_again(tokenizer, tmp_path):
    model = random_model(CONFIGS["gpt2"](), tokenizer)
    online(model, tokenizer, tmp_path, replay_share=0.5).train()


def test_a_prompt_and_its_completion_fit_in_learned_positions(tokenizer, tmp_path):
    model = random_model(GPT2Config(**{**GPT2, "n_positions": 64}), tokenizer)
    with pytest.raises(ValueError, match=r"max_completion_length=60.*64 learned positions"):
        online(model, tokenizer, tmp_path, max_completion_length=60).train()


def lora_with_dropout(model, tokenizer):
    config = LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return adapted


NOISY = {
    "lora": lambda model, tokenizer: lora_with_dropout(model, tokenizer),
    "gpt2": lambda _, tokenizer: random_model(CONFIGS["gpt2"](), tokenizer),
    "opt": lambda _, tokenizer: random_model(CONFIGS["opt"](), tokenizer),
    "mixtral": lambda _, tokenizer: random_model(CONFIGS["mixtral"](), tokenizer),
    "llama": lambda _, tokenizer: random_model(LlamaConfig(**ROPE, attention_dropout=0.3), tokenizer),
}


@pytest.mark.parametrize("name", NOISY)
def test_noise_is_off_in_training(name, model, tokenizer, tmp_path, capsys):
    noisy = NOISY[name](model, tokenizer)
    ids = torch.tensor([tokenizer("Ana has 3 pens and finds 4 more.")["input_ids"]])

    def changes():
        """Whether two forward passes with the same weights differ."""
        return not torch.equal(*(noisy.train()(input_ids=ids).logits for _ in range(2)))

    assert changes()
    args = {"learning_rate": 1e-12, "logging_steps": 1, "disable_tqdm": False, "router_aux_loss_coef": 0.0}
    trainer = offline(noisy, tokenizer, tmp_path, baseline=0.0, **args)
    assert "set to 0" in capsys.readouterr().out
    assert not changes()
    trainer.train()
    weights = [log["topr/weight_mean_negatives"] for log in trainer.state.log_history if "loss" in log]
    assert weights == [pytest.approx(1, abs=1e-3)]


def test_names_of_what_was_noisy():
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(2, 2))
    model[1].attention_dropout, model[1].router_jitter_noise, model[1].dropout = 0.5, 0.1, 0.0
    assert turn_off_noise(model) == ["p=0.25", "attention_dropout=0.5", "router_jitter_noise=0.1"]
    assert turn_off_noise(model) == []


def test_noise_that_stays_on_is_refused(tokenizer, tmp_path):
    """Falcon is refused, because it reads its dropout from the config in each forward pass."""
    model = random_model(
        FalconConfig(**IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.5), tokenizer
    )
    with pytest.raises(ValueError, match=r"FalconForCausalLM differs.*model\.config"):
        offline(model, tokenizer, tmp_path)


@pytest.mark.parametrize("make", [offline, online])
def test_an_adapted_head_is_refused(make, model, tokenizer, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"trainable_token_indices.*modules_to_save"):
        make(get_peft_model(model, config), tokenizer, tmp_path)


@pytest.mark.parametrize("make", [offline, online])
@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"]])
def test_a_head_that_is_trained_in_full_is_not(make, saved, model, tokenizer, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    make(get_peft_model(model, config), tokenizer, tmp_path).train()


@pytest.mark.parametrize("make", [offline, online])
def test_a_scaled_head_is_refused(make, model, tokenizer, tmp_path):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * forward(hidden)  # TRL's fused head reads only the weights
    with pytest.raises(ValueError, match="differs from log π of the logits"):
        make(model, tokenizer, tmp_path)


@pytest.mark.parametrize("make", [offline, online])
def test_experts_under_another_name(make, tokenizer, tmp_path):
    def model():
        return random_model(GraniteMoeConfig(**ROPE, num_local_experts=4, num_experts_per_tok=2), tokenizer)

    with pytest.raises(ValueError, match="router_aux_loss_coef=0"):
        make(model(), tokenizer, tmp_path, router_aux_loss_coef=0.001)
    make(model(), tokenizer, tmp_path, router_aux_loss_coef=0.0).train()


@pytest.mark.parametrize("make", [offline, online])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_frozen_adapter_is_refused_before_log_mu(make, checkpointing, model, tokenizer, tmp_path):
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(fresh_model(), tmp_path)
    trainer = make(frozen, tokenizer, tmp_path / "run", gradient_checkpointing=checkpointing)
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer.train()
    assert not (tmp_path / "run" / "log_mu.parquet").exists()
    if make is offline:
        trainer.compute_log_mu()  # needs no gradient
        assert (tmp_path / "run" / "log_mu.parquet").is_file()


@pytest.mark.parametrize("make", [offline, online])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_bfloat16_is_no_fault(make, temperature, model, tokenizer, tmp_path):
    warm = {"temperature": temperature} if make is online else {}
    make(model, tokenizer, tmp_path, bf16=True, **warm)
    llama = random_model(LlamaConfig(**{**ROPE, "num_hidden_layers": 8}), tokenizer)
    make(llama, tokenizer, tmp_path, bf16=True, **warm)


@pytest.mark.parametrize("make", [offline, online])
def test_the_check_runs_as_the_trainers_forward_does(make, model, tokenizer, tmp_path, monkeypatch):
    """The check runs under autocast. Without it, weights are float32, which FlashAttention refuses."""
    forward = type(model).forward

    def in_half(self, *args, **kwargs):
        assert torch.is_autocast_enabled("cpu")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", in_half)
    make(model, tokenizer, tmp_path, bf16=True)


@pytest.mark.parametrize("make", [offline, online])
def test_cudnn_attention_is_off_in_all_passes_of_a_trainer_and_as_before_afterwards(make, model, tokenizer, tmp_path):
    """The backward pass of cuDNN's attention can return NaN on an H100 (pytorch/pytorch#196678)."""
    states = []
    model.register_forward_pre_hook(lambda *_: states.append(torch.backends.cuda.cudnn_sdp_enabled()))
    weight = next(model.parameters())
    weight.register_hook(lambda _: states.append(torch.backends.cuda.cudnn_sdp_enabled()))  # in the backward pass
    for was_on in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(was_on)
        trainer = make(model, tokenizer, tmp_path)
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
    trainer.train()
    trainer.evaluate(trainer.train_dataset)
    assert states
    assert not any(states)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("make", [offline, online])
def test_a_tuned_prompt(make, model, tokenizer, tmp_path):
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    make(tuned, tokenizer, tmp_path)


@pytest.mark.parametrize("make", [offline, online])
def test_a_tuned_prefix(make, model, tokenizer, tmp_path):
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    trainer = make(tuned, tokenizer, tmp_path, gradient_checkpointing=False)
    before = [p.detach().clone() for p in tuned.parameters() if p.requires_grad]
    trainer.train()
    after = [p for p in tuned.parameters() if p.requires_grad]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_positions_from_the_mask_follow_a_prefix(tokenizer):
    gpt2 = random_model(CONFIGS["gpt2"](), tokenizer)
    tuned = get_peft_model(gpt2, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    torch.nn.init.normal_(tuned.prompt_encoder.default.embedding.weight)
    ids = torch.tensor([[5, 6, 7]])
    alone = tuned(input_ids=ids).logits
    count_positions_from_mask(tuned)
    padded = tuned(input_ids=torch.tensor([[1, 1, 5, 6, 7]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1]])).logits
    torch.testing.assert_close(padded[:, 2:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [offline, online])
def test_virtual_tokens_need_room_in_the_context(make, tokenizer, tmp_path):
    model = random_model(CONFIGS["gpt2"](), tokenizer)  # with 512 positions
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=500))
    with pytest.raises(ValueError, match=r"context.* 12\b"):
        make(tuned, tokenizer, tmp_path).train()


def test_a_tokenizer_that_holds_another(model, tokenizer, tmp_path):
    tokenizer.tokenizer = object()  # as in Mistral's own tokenizer
    online(model, tokenizer, tmp_path)


@pytest.mark.parametrize("config", [LoHaConfig, LoKrConfig])
def test_noise_by_adapter_is_off(config, model, tokenizer, tmp_path):
    settings = {"rank_dropout": 0.3, "module_dropout": 0.2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, config(r=4, init_weights=False, **settings))
    offline(adapted, tokenizer, tmp_path)
    ids = torch.tensor([tokenizer("Ana has 3 pens and finds 4 more.")["input_ids"]])
    assert torch.equal(*(adapted.train()(input_ids=ids).logits for _ in range(2)))


@pytest.mark.parametrize("tokens", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}])
def test_wrapped_tokens_are_no_positions(tokens, tokenizer):
    model = random_model(LlamaConfig(**{**ROPE, "max_position_embeddings": 64}), tokenizer)
    assert learned_positions(model) is None
    assert learned_positions(get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"], **tokens}))) is None
    assert learned_positions(random_model(CONFIGS["gpt2"](), tokenizer)) == 512


def test_router_logits_of_the_config_do_not_reach_generation(moe, tokenizer, tmp_path):
    moe.config.output_router_logits = True
    online(moe, tokenizer, tmp_path).train()


def test_reference_model_counts_positions_too(tokenizer, tmp_path):
    random_model(CONFIGS["gpt2"](), tokenizer).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    trainer = online(model, tokenizer, tmp_path / "run", beta=0.1)
    sequences = probes(trainer.model, tokenizer)
    with torch.no_grad():
        together = trainer._padded_log_probs(trainer.ref_model, sequences)[1]
        (alone_,) = trainer._padded_log_probs(trainer.ref_model, sequences[1:])
    torch.testing.assert_close(together, alone_, atol=1e-4, rtol=0)
