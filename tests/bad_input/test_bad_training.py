"""Unusable models, checkpoints, reward functions and tokenizers, and training that runs into NaN.

See `bad_input.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import NOWHERE, SETTINGS, Case, Kit, cases, kit, no_shard, nothing_written, unchanged
from datasets import Dataset
from peft import CPTConfig, LoraConfig, PeftConfig, PolyConfig, PrefixTuningConfig, get_peft_model
from reference import coin, fresh_model
from test_bad_files import SAMPLE
from test_bad_rows import not_loaded, with_columns
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, SamplingArguments, TOPRTrainer, sample_completions
from topr_trl.sandbox.worker_pool import WorkerPool
from topr_trl.tasks import arithmetic

__all__ = ["kit"]

STEPS = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1, "baseline": 0}


def weights(kit: Kit) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in kit["model"].parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Models and checkpoints.

ROWS = [{"prompt": "3 + 4 =", "completion": str(n), "reward": 1.0 if n == 7 else -1.0} for n in (5, 6, 7, 8)]


def a_copy(kit: Kit, name: str = "copy") -> Path:
    return Path(shutil.copytree(arithmetic.CARELESS_MODEL, kit.folder / name))


def cut(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1_000])
    return folder


def with_nan(kit: Kit) -> Any:
    kit["model"].model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    return kit["model"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an offline run of two steps, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("run")
    rows = Dataset.from_list(ROWS)
    settings = {**SETTINGS, **STEPS, "per_device_train_batch_size": 2}
    OfflineTOPRTrainer(str(arithmetic.CARELESS_MODEL), OfflineTOPRConfig(str(folder), **settings), rows).train()
    return folder


def resumed(given: str, words: str, damage: Any, **settings: Any) -> Case:
    """After `damage`, the run resumes from its first checkpoint, unless `settings` name another."""

    def do(kit: Kit) -> None:
        shutil.copytree(kit["run"], kit.out)
        damage(kit)
        kit.note()
        same = {**STEPS, "per_device_train_batch_size": 2, "resume": str(kit.out / "checkpoint-1")}
        kit.offline(Dataset.from_list(ROWS), **{**same, **settings})

    return Case(given, do, words, unchanged)


def _another(kit: Kit) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=402, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(kit.out / "checkpoint-1")


def adapted(kit: Kit, config: PeftConfig, **options: Any) -> Any:
    return get_peft_model(kit["model"], config, **options)


_CPT = CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
_POLY = PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], n_tasks=2)
_PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
_LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])

# fmt: off
MODELS = [
    Case("a folder without a model", lambda kit: kit.topr(SAMPLE, "--model_name_or_path", str(a_copy(kit).parent)),
        "holds no model, config.json, models in, copy", no_shard, SystemExit),
    Case("a model whose weights were cut, for training", lambda kit: kit.offline(kit["rows"], str(cut(a_copy(kit)))),
        "copy/model.safetensors, download, earlier checkpoint", not_loaded),
    Case("a model without weights",
        lambda kit: [(a_copy(kit) / "model.safetensors").unlink(), kit.offline(kit["rows"], str(kit.folder / "copy"))],
        "model.safetensors, copy", nothing_written, OSError),
    Case("a model with NaN, for sampling",
        lambda kit: [with_nan(kit).save_pretrained(a_copy(kit)), kit.topr(SAMPLE, "--model_name_or_path", "copy")],
        "NaN, 1, model.layers.1.mlp.up_proj.weight, checkpoint", no_shard, SystemExit),
    Case("a model with NaN, for offline training", lambda kit: kit.offline(kit["rows"], with_nan(kit)),
        "NaN, 1, model.layers.1.mlp.up_proj.weight, checkpoint", nothing_written, FloatingPointError),
    Case("a model with NaN, for online training", lambda kit: kit.online(coin, model=with_nan(kit)),
        "NaN, 1, model.layers.1.mlp.up_proj.weight, checkpoint", nothing_written, FloatingPointError),
    Case("an adapter with a forward pass of its own", lambda kit: kit.offline(kit["rows"], adapted(kit, _CPT)),
        "CPT, logits, LoRA", nothing_written),
    Case("an adapter that needs task ids", lambda kit: kit.online(coin, model=adapted(kit, _POLY)),
        "POLY, task id, LoRA", nothing_written),
    Case("prefix tuning and gradient checkpointing",
        lambda kit: kit.offline(kit["rows"], adapted(kit, _PREFIX), gradient_checkpointing=True),
        "PREFIX_TUNING, cache, gradient_checkpointing=False", nothing_written),
    Case("mixed adapters", lambda kit: kit.offline(kit["rows"], adapted(kit, _LORA, mixed=True)),
        "mixed, get_peft_model", nothing_written),
    resumed("resuming from a folder that is not there", "no checkpoint, nowhere", lambda kit: None, resume="nowhere"),
    resumed("resuming from the last checkpoint, and there is none", "no checkpoint, out",
        lambda kit: [shutil.rmtree(path) for path in kit.out.glob("checkpoint-*")], resume=True),
    resumed("resuming from the last checkpoint, whose weights were cut",
        "out/checkpoint-2/model.safetensors, download, earlier checkpoint", lambda kit: cut(kit.out / "checkpoint-2"),
        resume=True),
    resumed("resuming from a checkpoint of another model",
        "out/checkpoint-1/model.safetensors, another model, embed_tokens, (402, 32), (409, 96)", _another),
    resumed("resuming without the log μ of the start",
        "log μ, missing, out/log_mu.parquet, restore the file, start again",
        lambda kit: (kit.out / "log_mu.parquet").unlink()),
    resumed("resuming with a log μ that was cut", "out/log_mu.parquet, damaged, restore, start again",
        lambda kit: (kit.out / "log_mu.parquet").write_bytes(b"PAR1")),
    resumed("resuming with other limits", "out/checkpoint-1, limits, preset, 0.0, 1.0, another output_dir",
        lambda kit: None, preset="tis"),
    resumed("resuming with another learning rate", "out/checkpoint-1, learning_rate, as the model", lambda kit: None,
        learning_rate=1e-5),
    resumed("resuming with another batch size",
        "out/checkpoint-1, rows per step, per_device_train_batch_size, 2 in the checkpoint, 4 now, twice",
        lambda kit: None, per_device_train_batch_size=4),
    resumed("resuming a checkpoint whose trainer_state.json was cut",
        "out/checkpoint-1, no training state, another checkpoint",
        lambda kit: (kit.out / "checkpoint-1" / "trainer_state.json").write_text('{"trai')),
]
# fmt: on


# NaN.


def stopped_in_time(kit: Kit) -> None:
    """Assert that the only checkpoint can be loaded, equals the model's weights and is finite."""
    step = kit.trainer.state.global_step
    assert step >= 1
    assert [path.name for path in kit.out.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    checkpoint = kit.out / f"checkpoint-{step}"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert equal(list(saved.parameters()), weights(kit))
    assert all(parameter.isfinite().all() for parameter in saved.parameters())


def _before_that(kit: Kit) -> None:
    step = kit.trainer.state.global_step
    assert step >= 2
    assert [path.name for path in kit.out.glob("checkpoint-*")] == [f"checkpoint-{step - 1}"]


def extreme(kit: Kit, reward: float = 3e38) -> None:
    """Train with an extreme reward for one row. By default, its gradient is not finite in float32."""
    rewards = [1.0] * 8
    rewards[3] = reward
    kit.offline(with_columns(kit["rows"], reward=rewards), **STEPS, save_total_limit=1, sort_by_length=False)


def extreme_later(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    return [3e38 if trainer_state.global_step else 1.0] * len(completions)


def no_checkpoint(kit: Kit) -> None:
    assert not list(kit.out.glob("checkpoint-*"))


# fmt: off
NAN = [
    Case("a step whose gradient is too large for its norm", lambda kit: extreme(kit, 1e30),
        "grad_norm, NaN, out, learning_rate, float32", _before_that,
        FloatingPointError),
    Case("offline, a step whose gradient is not finite", extreme, "gradient, NaN, out, learning_rate, float32",
        stopped_in_time, FloatingPointError),
    Case("online, a step whose gradient is not finite",
        lambda kit: kit.online(extreme_later, save_strategy="steps", save_steps=1, save_total_limit=1, baseline=0),
        "gradient, NaN, out, learning_rate, float32", stopped_in_time, FloatingPointError),
    Case("a step that throws the weights out of float32",
        lambda kit: kit.offline(kit["rows"], **STEPS, optim="sgd", learning_rate=3e38, max_grad_norm=0.0),
        "not saved, out/checkpoint-1, NaN, model.embed_tokens.weight, checkpoint", no_checkpoint, FloatingPointError),
]
# fmt: on


# Rewards.


def raising_later(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step:
        raise ConnectionError("the judge does not answer")
    return coin(completions)


async def late_text(completions: list[str], **_: Any) -> list[Any]:
    return ["good"] * len(completions)


def untrained(kit: Kit) -> None:
    assert equal(list(fresh_model().parameters()), weights(kit))


def rewarded(given: str, words: str, reward: Any) -> Case:
    return Case(given, lambda kit: kit.online(reward), words, untrained)


def _hanging(kit: Kit) -> None:
    """Train with a judge in worker processes that hangs on two of eight completions."""
    (kit.folder / "judge.py").write_text(
        "import time\n\ndef judge(item):\n    time.sleep(60 * (item in (2, 7)))\n    return 1.0 if item % 2 else -1.0\n"
    )
    pool = WorkerPool(kit.folder / "judge.py", "judge", workers=2, seconds=0.5)
    kit.rewards = []

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        kit.rewards.append(pool.map(list(range(len(completions)))))
        return kit.rewards[-1]

    try:
        kit.online(reward, max_steps=1)
    finally:
        pool.close()


def _six_of_eight(kit: Kit) -> None:
    assert [i for i, reward in enumerate(kit.rewards[0]) if reward is None] == [2, 7]
    assert kit.trainer.state.global_step == 1
    with pytest.raises(AssertionError):
        untrained(kit)


# fmt: off
REWARDS = [
    Case("a function that raises", lambda kit: kit.online(raising_later, save_strategy="steps", save_steps=1),
        "the judge does not answer", stopped_in_time, ConnectionError),
    rewarded("a function that returns one reward too few", "'<lambda>', 7, 8, one reward per completion",
        lambda completions, **_: [1.0] * (len(completions) - 1)),
    rewarded("an async function that returns text", "'late_text', 'good', completion 0, number, None", late_text),
    rewarded("a function that returns nothing", "'<lambda>', None, one reward per completion",
        lambda completions, **_: None),
    rewarded("a function that returns an infinite reward", "'<lambda>', infinite, finite, None",
        lambda completions, **_: [float("inf")] * len(completions)),
    Case("a judge in a `WorkerPool` that hangs on two of eight completions", _hanging, "",
        _six_of_eight, None),
    rewarded("no function", "reward_funcs, environment_factory", None),
]
# fmt: on


# Prompts and tokenizers.


def without(kit: Kit, *tokens: str) -> Any:
    tokenizer = kit["tokenizer"]
    for token in tokens:
        setattr(tokenizer, token, None)
    return tokenizer


def trained(kit: Kit) -> None:
    assert kit.trainer.state.global_step == kit.trainer.state.max_steps == 2


MESSAGES = [{"role": "user", "content": "3 + 4 ="}]
ANSWER = [{"role": "assistant", "content": "7"}]


def with_token(kit: Kit, name: str = "") -> Any:
    """Return a tokenizer with one token that the model does not have, as the token `name`."""
    tokenizer, size = kit["tokenizer"], kit["model"].config.vocab_size
    tokenizer.add_tokens([f"<unused{n}>" for n in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({name: "<new>"} if name else {"additional_special_tokens": ["<new>"]})
    return tokenizer


def dialogues(kit: Kit) -> Any:
    return with_columns(kit["rows"], prompt=[MESSAGES] * 8, completion=[ANSWER] * 8)


# fmt: off
TOKENIZERS = [
    Case("a tokenizer with neither pad nor stop token, offline",
        lambda kit: kit.offline(kit["rows"], tokenizer=without(kit, "pad_token", "eos_token")), "pad_token, 'None'",
        nothing_written),
    Case("a tokenizer with neither pad nor stop token, online",
        lambda kit: kit.online(coin, tokenizer=without(kit, "pad_token", "eos_token")),
        "tokenizer.pad_token, tokenizer.eos_token", nothing_written),
    Case("a pad token that the model does not have, offline",
        lambda kit: kit.offline(kit["rows"], tokenizer=with_token(kit, "pad_token")),
        "tokenizer.pad_token, '<new>', 409, 0 to 408, model.resize_token_embeddings", nothing_written),
    Case("a pad token that the model does not have, online",
        lambda kit: kit.online(coin, tokenizer=with_token(kit, "pad_token")),
        "tokenizer.pad_token, '<new>', 409, 0 to 408, model.resize_token_embeddings", nothing_written),
    Case("a stop token that the model does not have",
        lambda kit: kit.online(coin, tokenizer=with_token(kit, "eos_token")),
        "tokenizer.eos_token, '<new>', 409, 0 to 408, model.resize_token_embeddings", nothing_written),
    Case("online, a prompt with a token that the model does not have",
        lambda kit: kit.online(coin, {"prompt": ["<new>3 + 4 ="] * 2}, tokenizer=with_token(kit)),
        "prompt, 409, 0 to 408, model.resize_token_embeddings", untrained),
    Case("sampling, a prompt with a token that the model does not have",
        lambda kit: sample_completions(
            kit["model"], with_token(kit), Dataset.from_dict({"problem_id": [0], "prompt": ["<new>3 + 4 ="]}),
            SamplingArguments()),
        "prompt, 409, 0 to 408, model.resize_token_embeddings", nothing_written),
    Case("messages, and no chat template, offline",
        lambda kit: kit.offline(dialogues(kit), tokenizer=without(kit, "chat_template")),
        "row 0, messages, chat template, chat_template_path, text", nothing_written),
    Case("messages, and no chat template, online",
        lambda kit: kit.online(coin, {"prompt": [MESSAGES] * 2}, tokenizer=without(kit, "chat_template")),
        "tokenizer.chat_template", untrained),
    Case("online, no column `prompt`", lambda kit: kit.online(coin, {"question": ["a"] * 2}, NOWHERE),
        "prompt, 'question', rename", not_loaded),
    Case("online, no row", lambda kit: kit.online(coin, {"prompt": []}, NOWHERE), "training dataset, no row",
        not_loaded),
    Case("online, the sampler's log μ without vLLM", lambda kit: kit.online(coin, model=NOWHERE, log_mu="sampler"),
        "log_mu='sampler', use_vllm=True, rollout_func, log_mu='trainer'", not_loaded),
    Case("online, a prompt longer than the context", lambda kit: kit.online(coin, {"prompt": ["a" * 4000] * 2}),
        "prompt, 4000, 2048, shorten", untrained),
    Case("settings of GRPO for TOPR", lambda kit: TOPRTrainer(NOWHERE, coin, GRPOConfig(str(kit.out), bf16=False)),
        "TOPRTrainer, TOPRConfig, GRPOConfig", not_loaded, TypeError),
    Case("settings of GRPO for offline TOPR",
        lambda kit: OfflineTOPRTrainer(NOWHERE, GRPOConfig(str(kit.out), bf16=False), kit["rows"]),
        "OfflineTOPRTrainer, OfflineTOPRConfig, GRPOConfig", not_loaded, TypeError),
    Case("rewards that are never negative",
        lambda kit: kit.offline(with_columns(kit["rows"], reward=[1.0, 0.0] * 4), baseline=0),
        "8 completions, negative reward, baseline='mean'", trained, UserWarning),
    Case("rewards that are never positive",
        lambda kit: kit.offline(with_columns(kit["rows"], reward=[-1.0] * 8), baseline=0),
        "8 completions, negative reward, add positives, baseline", trained, UserWarning),
]
# fmt: on


# Replayed rows.


def replayed(given: str, words: str, rows: Any, error: Any = ValueError, kept: Any = not_loaded) -> Case:
    model = NOWHERE if kept is not_loaded else None
    return Case(
        given, lambda kit: kit.online(coin, model=model, replayed=rows(kit["rows"]), replay_share=0.5), words, kept,
        error,
    )  # fmt: skip


def _damaged_rows(kit: Kit) -> None:
    settings = {"replay_share": 0.5, "save_strategy": "steps", "save_steps": 1}
    kit.online(coin, **settings)
    (kit.out / "checkpoint-1" / "replay_0.pt").write_bytes(b"PK")
    kit.trainer.train(resume_from_checkpoint=str(kit.out / "checkpoint-1"))


def _has_weights(checkpoint: Path) -> None:
    assert (checkpoint / "model.safetensors").stat().st_size > 1_000


# fmt: off
REPLAY = [
    replayed("`replay_dataset` without rewards", "replay dataset, reward, label, found, 'completion', topr import",
        lambda rows: rows.select_columns(["prompt", "completion"])),
    replayed("`replay_dataset` whose rewards are all the same",
        "replay dataset, 0, baseline=mean, other rewards, baseline", lambda rows: with_columns(rows, reward=[1.0] * 8),
        kept=nothing_written),
    Case("a checkpoint whose rows to be used again are damaged", _damaged_rows,
        "replay_0.pt, damaged, restore, remove",
        lambda kit: _has_weights(kit.out / "checkpoint-1")),
]
# fmt: on


@cases([*MODELS, *NAN, *REWARDS, *TOKENIZERS, *REPLAY])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
