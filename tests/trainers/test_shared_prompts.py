"""Tests that computing a prompt once for all its rows changes neither log π nor gradients."""

import copy
import itertools
import pickle
import re

import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from reference import fresh_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl.trainer.utils import add_fused_lm_head

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.data.batch_samplers import StepsOfGroups
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.trainers.shared_prompts.attention import SharedPrompts
from topr_trl.trainers.shared_prompts.check import why_not_shared
from topr_trl.trainers.shared_prompts.layout import build_layout, choose_groups, prompts_together, saved_part

pytestmark = pytest.mark.slow

VOCABULARY, CPU = 64, torch.device("cpu")
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**{name: value for name, value in SMALL.items() if name != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "gemma2": lambda: Gemma2Config(**SMALL, sliding_window=9, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=9),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=2,
                               eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}  # fmt: skip
REFUSED = {
    "bloom": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "falcon_h1": lambda: FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
    "gpt_oss": lambda: GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
    "mamba": lambda: MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8),
}


def random_model(config, attention="sdpa"):
    """Return a model with TRL's fused head, and with weights so large that each token clearly changes log π."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    add_fused_lm_head(model)
    return model


def batch_of(prompts, branches, seed=0):
    """Return a padded batch. For each prompt length, `branches` has the lengths of its completions."""
    generator = torch.Generator().manual_seed(seed)
    rows, labels = [], []
    for prompt, lengths in zip(prompts, branches, strict=True):
        shared = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
        for length in lengths:
            own = torch.randint(3, VOCABULARY, (length,), generator=generator)
            rows.append(torch.cat([shared, own]))
            labels.append(torch.cat([torch.full((prompt,), -100), own]))
    return padded(rows, labels)


def padded(rows, labels):
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }


COUNTED, OTHER = [*range(3, 23)], [*range(3, 20), 5, 6, 7]
BATCH = batch_of([20, 12, 16], [[7, 3, 11], [5], [9, 9]])


def results(model, call, **settings):
    """Return log π, its mask, and the gradients of a weighted sum."""
    model.zero_grad()
    outputs = model(**call, use_cache=False, fused_lm_head=True, **settings)
    weights = torch.linspace(-1, 1, outputs.log_probs.numel()).view_as(outputs.log_probs)
    loss = (outputs.log_probs * weights).sum()
    if settings.get("output_router_logits"):
        loss = loss + outputs.aux_loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.log_probs.detach(), outputs.label_mask.bool(), gradients


def check_equal(model, call, **settings):
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    logps, mask, gradients = results(model, call, **settings)
    prompts = SharedPrompts(inner)
    shared_logps, shared_mask, shared_gradients = results(model, call, **settings)
    assert prompts.computed_part < 0.8
    prompts.remove()
    again, _, _ = results(model, call, **settings)
    assert torch.equal(logps, again)  # `remove` restores the model
    assert torch.equal(mask, shared_mask)
    torch.testing.assert_close(shared_logps[mask], logps[mask], rtol=0, atol=1e-5)
    assert not shared_logps[~mask].any()
    assert gradients.keys() == shared_gradients.keys()
    for name, gradient in gradients.items():
        assert (shared_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_and_gradients_stay(name, attention):
    config = CONFIGS[name]()
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("transformers computes Gemma 2's limit of the scores with eager attention alone")
    check_equal(random_model(config, attention).train(), BATCH)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_with_an_adapter_and_checkpointing(name):
    model = random_model(CONFIGS[name]())
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(model.train(), BATCH)


def test_the_auxiliary_loss_of_experts_stays():
    check_equal(random_model(CONFIGS["qwen3_moe"]()).train(), BATCH, output_router_logits=True)


def test_rows_without_padding():
    mask = BATCH["attention_mask"].bool()
    positions = torch.cat([torch.arange(int(n)) for n in mask.sum(1)])[None]
    labels = BATCH["labels"].clone()
    labels[:, 0] = -100
    call = {"input_ids": BATCH["input_ids"][mask][None], "labels": labels[mask][None], "position_ids": positions}
    check_equal(random_model(CONFIGS["llama"]()).train(), call)


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([[5] * 20, [5] * 20], [[-100] * 10 + [5] * 10] * 2),  # equal rows
        ([[5] * 20, [5] * 14], [[-100] * 10 + [5] * 10, [-100] * 10 + [5] * 4]),  # one is a prefix of the other
        ([COUNTED, OTHER], [[-100] * 4 + COUNTED[4:], [-100] * 4 + OTHER[4:]]),
        ([COUNTED, OTHER], [[-100] * 20, [-100] * 17 + OTHER[17:]]),  # a row without a label
    ],
)  # fmt: skip
def test_labels_in_the_shared_beginning(rows, labels):
    call = padded([torch.tensor(row) for row in rows], [torch.tensor(row) for row in labels])
    check_equal(random_model(CONFIGS["llama"]()).train(), call)


def test_log_probabilities_of_a_call_without_labels_are_the_models_own():
    model = random_model(CONFIGS["llama"]()).eval()
    call = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**call).logits
        written = model.generate(**call, max_new_tokens=5, do_sample=False)
        SharedPrompts(model)
        assert torch.equal(model(**call).logits, logits)
        assert torch.equal(model.generate(**call, max_new_tokens=5, do_sample=False), written)


def test_a_batch_that_saves_little_is_computed_as_before():
    model = random_model(CONFIGS["llama"]()).eval()
    call = batch_of([12, 12, 12], [[9], [9], [9]])
    # The token before a label is masked, as a subclass of `TOPRTrainer` can mask it, so no token of a layout predicts
    # the label.
    masked = {**BATCH, "attention_mask": BATCH["attention_mask"].clone()}
    masked["attention_mask"][0, 22] = 0
    prompts = SharedPrompts(model)
    with torch.no_grad():
        for each in (call, masked):
            model(**each, fused_lm_head=True)
            assert (prompts.layout, prompts.computed_part) == (None, 1.0)
        model(**BATCH, fused_lm_head=True)
    # Not computed: the last token of each of the 6 rows, two copies of 19 shared tokens, and one copy of 15.
    tokens = 3 * 20 + 21 + 12 + 5 + 2 * 16 + 18
    assert prompts.computed_part == pytest.approx((tokens - 6 - 2 * 19 - 15) / tokens)


def test_a_copy_computes_with_its_own_weights():
    model = random_model(CONFIGS["llama"]()).eval()
    SharedPrompts(model)
    other = copy.deepcopy(model)
    pickle.dumps(model)  # the pickled copy has no fused head, as without sharing
    with torch.no_grad():
        before = model(**BATCH, fused_lm_head=True).log_probs
        for parameter in model.parameters():
            parameter.mul_(2)
        assert not torch.allclose(model(**BATCH, fused_lm_head=True).log_probs, before)
        torch.testing.assert_close(other(**BATCH, fused_lm_head=True).log_probs, before)


# Models that can share, and models that cannot.


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "only 0 of its 2 layers"),
        ("falcon_h1", "log π differs|layers have attention"),  # with transformers 5.24 | 5.0
        ("gpt_oss", "sinks"),
        ("mamba", "only 0 of its 2 layers"),
    ],
)
def test_models_that_cannot_share_say_why(name, reason):
    model = random_model(REFUSED[name](), "sdpa" if name == "falcon_h1" else "eager").eval()
    assert re.search(reason, why_not_shared(SharedPrompts(model), model, CPU, 2e-3))


def test_other_attention_is_refused():
    model = random_model(CONFIGS["llama"]())
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"flex_attention.*sdpa or eager"):
        SharedPrompts(model)


# Groups.


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 3))
def test_groups_save_most(rows, least):
    def saved(groups):
        return sum((end - start - 1) * shared for start, end, shared in groups)

    def shared_by(part):
        if len(part) == 1:
            return 0
        equal = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*part, strict=False))
        shared = min(len(list(equal)) - 1, *(len(row) - 2 for row in part))
        return shared if shared >= least else None

    def every(start):
        """Yield every division of the rows from `start` on into groups that share enough tokens."""
        if start == len(rows):
            yield []
        for end in range(start + 1, len(rows) + 1):
            if (shared := shared_by(rows[start:end])) is not None:
                yield from ([(start, end, shared), *rest] for rest in every(end))

    groups = choose_groups(rows, least)
    assert [start for start, _, _ in groups] + [len(rows)] == [0, *(end for _, end, _ in groups)]
    assert all(shared_by(rows[start:end]) == shared for start, end, shared in groups)
    assert saved(groups) == max(map(saved, every(0)))


def test_part_that_is_saved():
    # Two rows with 10 + 4 and 10 + 6 tokens are computed as 10 + 4 + 6 tokens.
    assert saved_part([(10, [4, 6])]) == pytest.approx(10 / 30)
    assert saved_part([(0, [5])]) == 0


def test_the_layout_of_a_batch():
    ids = torch.tensor([[*range(10, 20), 1, 2], [*range(10, 20), 3, 0]])
    labels = torch.tensor([[-100] * 10 + [1, 2], [-100] * 10 + [3, -100]])
    mask = torch.tensor([[1] * 12, [1] * 11 + [0]])
    layout = build_layout(ids, labels, mask, None, keep_last=False)
    # The shared part stops before the prompt's last token, 19. Each branch starts with this token.
    assert layout.groups == [(9, [2, 1])]
    assert layout.input_ids.tolist() == [[*range(10, 19), 19, 1, 19]]
    assert layout.position_ids.tolist() == [[*range(9), 9, 10, 9]]
    assert layout.times.tolist() == [[2] * 9 + [1] * 3]
    assert layout.scored.tolist() == [9, 10, 11]
    assert layout.shift_labels.tolist() == [[1, 2, 3]]
    assert layout.places_BT[:, 9:].tolist() == [[0, 1], [2, 3]]  # 3: no label
    assert layout.tokens == 23


# The trainer.

PROMPTS = [
    "Question: Ana has 3 pens and finds 4 more.\nAnswer:",
    "Question: Ben has 9 coins and gives away 2.\nAnswer:",
]
ROWS = Dataset.from_list(
    [
        {"prompt": prompt, "completion": f" The answer is {n}.", "reward": float(n % 3 == 0)}
        for n in range(8)
        for prompt in PROMPTS
    ]
)
SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3,
    "optim": "adamw_torch", "save_strategy": "no", "logging_steps": 1, "max_steps": 3,
}  # fmt: skip


def trained(tokenizer, folder, rows=ROWS, **settings):
    model = fresh_model()
    args = OfflineTOPRConfig(str(folder), **{**SETTINGS, "per_device_train_batch_size": 16, **settings})
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    trainer.train()
    return trainer


def test_training_stays(tokenizer, tmp_path):
    """Sharing changes neither weights nor log μ. Each step uses all rows, so their order does not matter."""
    sgd = {"optim": "sgd", "learning_rate": 0.1}
    shared, apart = (
        trained(tokenizer, tmp_path / str(share), share_prompts=share, gradient_checkpointing=share, **sgd)
        for share in (True, False)
    )
    for (name, one), other in zip(shared.model.named_parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    mu = [trainer._log_mu.values for trainer in (shared, apart)]
    assert mu[0] == pytest.approx(mu[1], abs=1e-4)
    parts = [entry["topr/computed_tokens"] for entry in shared.state.log_history if "loss" in entry]
    assert len(parts) == 3
    assert all(0.2 < part < 0.9 for part in parts)
    assert not any("topr/computed_tokens" in entry for entry in apart.state.log_history)


def test_messages_of_the_trainer(tokenizer, tmp_path, capsys):
    def said(rows=ROWS, **settings):
        trained(tokenizer, tmp_path, rows, max_steps=1, disable_tqdm=False, **settings)
        return capsys.readouterr().out

    assert "only where its rows are already adjacent" in said()
    assert "in groups of up to 4. Micro-batches of 16 rows save about" in said(gradient_accumulation_steps=4)
    assert "of 1 rows save about 0%" in said(per_device_train_batch_size=1, gradient_accumulation_steps=64)
    assert "computed once" not in said(share_prompts=False)
    assert "computed once" not in said(ROWS.select([0, 3]))  # no prompt has two rows
    assert "computed once" in said(per_device_train_batch_size=1, share_prompts=True)
    assert "computed once" not in said(per_device_train_batch_size=1)
    short = ROWS.map(lambda row: {"prompt": row["prompt"][:10]})  # 3 tokens
    assert "computed once" not in said(short)
    # Sharing that is asked for does not move the rows of short prompts.
    assert "keeps the order" in said(short, share_prompts=True, gradient_accumulation_steps=4)


@pytest.mark.skipif(not hasattr(OfflineTOPRConfig, "train_sampling_strategy"), reason="random order only")
def test_rows_in_the_order_of_the_data_share_if_asked(tokenizer, tmp_path):
    rows = ROWS.sort("prompt").add_column("mu_logps", [-5.0] * len(ROWS))
    trainer = trained(tokenizer, tmp_path, rows, share_prompts=True, train_sampling_strategy="sequential")
    assert trainer.state.log_history[0]["topr/computed_tokens"] < 0.4


def test_the_order_of_rows_does_not_depend_on_the_micro_batch(tokenizer, tmp_path):
    orders = []
    for size in (4, 32):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 64 // size}
        args = OfflineTOPRConfig(str(tmp_path), **{**SETTINGS, **settings})
        trainer = OfflineTOPRTrainer(fresh_model(), args, ROWS, processing_class=tokenizer)
        orders.append(list(trainer._get_train_sampler()))
        assert isinstance(trainer._get_train_sampler(), StepsOfGroups)
    assert orders[0] == orders[1]


def test_a_second_trainer_of_the_same_model_shares_too(tokenizer, tmp_path):
    model = fresh_model()
    for _ in range(2):
        args = OfflineTOPRConfig(str(tmp_path), **{**SETTINGS, "per_device_train_batch_size": 16, "max_steps": 1})
        trainer = OfflineTOPRTrainer(model, args, ROWS, processing_class=tokenizer)
        trainer.train()
        assert trainer.state.log_history[-2]["topr/computed_tokens"] < 0.9


def test_trajectories_of_several_parts(tokenizer, tmp_path):
    rows = Dataset.from_list(
        [
            {"prompt": PROMPTS[0] + " 7 pens." * part, "completion": f" So {n}.", "reward": float(n % 3 == 0),
             "rollout_id": n, "problem_id": 0}
            for n in range(6)
            for part in range(2)
        ]
    )  # fmt: skip
    found = [
        trained(tokenizer, tmp_path / str(share), rows, share_prompts=share, optim="sgd", learning_rate=0.1)
        for share in (True, False)
    ]
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert found[0].state.log_history[-2]["topr/computed_tokens"] < 0.8


def test_a_model_that_cannot_share_trains_all_the_same(tokenizer, tmp_path, capsys):
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4)
    args = OfflineTOPRConfig(str(tmp_path), **{**SETTINGS, "disable_tqdm": False, "max_steps": 1})
    model = AutoModelForCausalLM.from_config(config)
    attention = model.config._attn_implementation
    trainer = OfflineTOPRTrainer(model, args, ROWS, processing_class=tokenizer)
    trainer.train()
    assert "BloomForCausalLM cannot share them" in capsys.readouterr().out
    assert trainer.model.config._attn_implementation == attention


def learned_online(tokenizer, folder, share, lora=None, model=None, **settings):
    """Return an online trainer with a reward that depends only on the tokens of a completion."""
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(16, seed=1), num_shots=0)
    settings = {"max_steps": 3, "save_strategy": "no", "gradient_checkpointing": False, **settings}
    args = TOPRConfig(
        str(folder), share_prompts=share, per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
        optim="sgd", learning_rate=0.1, report_to="none", bf16=False, use_cpu=True, logging_steps=1,
        **{"disable_tqdm": True, **settings},
    )  # fmt: skip

    def odd(completion_ids, **_):
        return [1.0 if sum(ids) % 2 else -0.5 for ids in completion_ids]

    return TOPRTrainer(
        model or fresh_model(), odd, args, problems, problems.select(range(2)), tokenizer, peft_config=lora
    )


def logs_of(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4, "gradient_checkpointing": True},
        pytest.param({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, marks=pytest.mark.weekly),
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
        {"replay_share": 0.5, "gradient_accumulation_steps": 2},
        {"beta": 0.1, "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
        pytest.param({"beta": 0.1, "top_entropy_quantile": 0.5}, marks=pytest.mark.weekly),
    ],
)
def test_training_online_stays(tokenizer, tmp_path, settings):
    trainers = []
    for share in (True, False):
        torch.manual_seed(0)
        trainers.append(learned_online(tokenizer, tmp_path / str(share), share, **settings))
        trainers[-1].train()
    shared, apart = trainers
    for (name, one), other in zip(shared.model.named_parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    # With top_entropy_quantile, rows stay in random order, so fewer neighbors share a prompt.
    most = 0.95 if "top_entropy_quantile" in settings else 0.7
    assert all(log["topr/computed_tokens"] < most and log["grad_norm"] > 0 for log in logs_of(shared))
    assert not any("topr/computed_tokens" in log for log in logs_of(apart))


def test_a_mixture_of_experts_keeps_the_order_of_its_micro_batches(tokenizer, tmp_path):
    def model():
        torch.manual_seed(0)
        config = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        config |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**SMALL, **EXPERTS, **config}))

    weights = []
    for share in (True, False):
        settings = {"router_aux_loss_coef": 0.1, "gradient_accumulation_steps": 2}
        trainer = learned_online(tokenizer, tmp_path / str(share), share, model=model(), **settings)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_rows_of_a_prompt_become_neighbors():
    def batch(prompts):
        ids = torch.tensor([[0, *[5] * 8, p] for p in prompts])
        return {
            "prompt_ids": ids, "prompt_mask": (ids > 0).long(), "names": [f"{p}" for p in prompts],
            "scale": torch.tensor(2.0), "nothing": None,
        }  # fmt: skip

    first, second = prompts_together([batch([3, 4, 3]), batch([4, 3, 4])])
    assert (first["names"], second["names"]) == (["3", "3", "3"], ["4", "4", "4"])
    assert first["prompt_ids"].tolist() == [[0, *[5] * 8, 3]] * 3
    assert (second["scale"], second["nothing"]) == (2.0, None)


def test_rows_of_short_prompts_do_not_move():
    ids = torch.tensor([[5] * 7 + [p] for p in (4, 3, 4)])
    batches = [{"prompt_ids": ids, "prompt_mask": torch.ones_like(ids)}]
    assert prompts_together(batches) is batches


def test_online_trainers_that_share_prompts(tokenizer, tmp_path, capsys):
    def said(**settings):
        learned_online(tokenizer, tmp_path, **{"share": None, **settings})
        return capsys.readouterr().out

    def eager():
        model = fresh_model()
        model.set_attn_implementation("eager")
        return model

    on = {"disable_tqdm": False}
    assert "computed once" in said(**on)
    assert "computed once" in said(model=eager(), **on)
    assert "computed once" not in said(share=False, **on)
    if Version(transformers.__version__) >= Version("5.8"):  # TRL needs it for continuous batching
        assert "continuous batching" in said(use_transformers_paged=True, **on)
    with pytest.raises(ValueError, match="share_prompts=True"):
        TOPRConfig(
            str(tmp_path), share_prompts=True, per_device_train_batch_size=1, gradient_accumulation_steps=8,
            use_cpu=True, bf16=False,
        )  # fmt: skip
