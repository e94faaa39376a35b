"""Models, checkpoints, reward functions and tokenizers that cannot be used, and training that comes to NaN.

See `bad_input.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import NO_SHARD, NOTHING_WRITTEN, NOWHERE, SETTINGS, UNCHANGED, Case, Kept, Kit, cases, kit
from datasets import Dataset
from test_bad_files import SAMPLE
from test_bad_rows import NOT_LOADED, with_columns
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRTrainer
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
    """The folder of an offline run of two steps, with a checkpoint each."""
    folder = tmp_path_factory.mktemp("run")
    rows = Dataset.from_list(ROWS)
    settings = {**SETTINGS, **STEPS, "per_device_train_batch_size": 2}
    OfflineTOPRTrainer(str(arithmetic.CARELESS_MODEL), OfflineTOPRConfig(str(folder), **settings), rows).train()
    return folder


def resumed(given: str, message: str, damage: Any, **settings: Any) -> Case:
    """The run goes on from its first checkpoint, unless the settings say otherwise."""

    def do(kit: Kit) -> None:
        shutil.copytree(kit["run"], kit.out)
        damage(kit)
        kit.note()
        kit.offline(Dataset.from_list(ROWS), **{"resume": str(kit.out / "checkpoint-1"), **settings})

    return Case(given, do, message, UNCHANGED)


def _another(kit: Kit) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=402, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(kit.out / "checkpoint-1")


MODELS = [
    Case(
        "a model that is not there",
        lambda kit: kit.topr(*SAMPLE, "--model_name_or_path", "./nowhere"),
        "topr sample: There is no folder ./nowhere: name one with a model, or a model of the Hub.",
        NO_SHARD,
        SystemExit,
    ),
    Case(
        "a model whose weights were cut, for sampling",
        lambda kit: kit.topr(*SAMPLE, "--model_name_or_path", cut(a_copy(kit))),
        "topr sample: …/copy/model.safetensors cannot be read (…): it is damaged, or was not written to its "
        "end. Write or download it again, or use an earlier checkpoint.",
        NO_SHARD,
        SystemExit,
    ),
    Case(
        "a model whose weights were cut, for training",
        lambda kit: kit.offline(kit["rows"], str(cut(a_copy(kit)))),
        "…/copy/model.safetensors cannot be read (…): it is damaged, or was not written to its end. Write or "
        "download it again, or use an earlier checkpoint.",
        NOT_LOADED,
    ),
    Case(
        "a model without weights",
        lambda kit: [(a_copy(kit) / "model.safetensors").unlink(), kit.offline(kit["rows"], str(kit.folder / "copy"))],
        "Error no file named model.safetensors found in directory …/copy.",
        NOTHING_WRITTEN,
        OSError,
    ),
    Case(
        "a model with NaN, for sampling",
        lambda kit: [with_nan(kit).save_pretrained(a_copy(kit)), kit.topr(*SAMPLE, "--model_name_or_path", "copy")],
        "topr sample: The model to sample from: 1 of its parameters hold NaN or infinite values, the first is "
        "model.layers.1.mlp.up_proj.weight. Start from a checkpoint from before that.",
        NO_SHARD,
        SystemExit,
    ),
    Case(
        "a model with NaN, for offline training",
        lambda kit: kit.offline(kit["rows"], with_nan(kit)),
        "The model to train: 1 of its parameters hold NaN or infinite values, the first is "
        "model.layers.1.mlp.up_proj.weight. Start from a checkpoint from before that.",
        NOTHING_WRITTEN,
        FloatingPointError,
    ),
    Case(
        "a model with NaN, for online training",
        lambda kit: kit.online(coin, model=with_nan(kit)),
        "The model to train: 1 of its parameters hold NaN or infinite values, the first is "
        "model.layers.1.mlp.up_proj.weight. Start from a checkpoint from before that.",
        NOTHING_WRITTEN,
        FloatingPointError,
    ),
    resumed(
        "resuming from a folder that is not there",
        "There is no checkpoint nowhere to resume from.",
        lambda kit: None,
        resume="nowhere",
    ),
    resumed(
        "resuming from the last checkpoint, and there is none",
        "There is no checkpoint in …/out to resume from.",
        lambda kit: [shutil.rmtree(path) for path in kit.out.glob("checkpoint-*")],
        resume=True,
    ),
    resumed(
        "resuming from a checkpoint whose weights were cut",
        "…/out/checkpoint-1/model.safetensors cannot be read (…): it is damaged, or was not written to its "
        "end. Write or download it again, or use an earlier checkpoint.",
        lambda kit: cut(kit.out / "checkpoint-1"),
    ),
    resumed(
        "resuming from the last checkpoint, whose weights were cut",
        "…/out/checkpoint-2/model.safetensors cannot be read (…): it is damaged, or was not written to its "
        "end. Write or download it again, or use an earlier checkpoint.",
        lambda kit: cut(kit.out / "checkpoint-2"),
        resume=True,
    ),
    resumed(
        "resuming from a checkpoint of another model",
        "…/out/checkpoint-1/model.safetensors belongs to another model: model.embed_tokens.weight has shape "
        "(402, 32) there, (409, 96) here.",
        _another,
    ),
    resumed(
        "resuming without the log μ of the start",
        "log μ of the run to resume is missing: …/out/log_mu.parquet. It is of the weights that the run "
        "started with, so it cannot be computed now. Put the file back, or start again.",
        lambda kit: (kit.out / "log_mu.parquet").unlink(),
    ),
    resumed(
        "resuming with a log μ that was cut",
        "…/out/log_mu.parquet is damaged (…). Put it back whole, or start again.",
        lambda kit: (kit.out / "log_mu.parquet").write_bytes(b"PAR1"),
    ),
    resumed(
        "resuming with other limits",
        "…/out/log_mu.parquet holds log μ of another set of rows, rewards or limits: fingerprint …, expected "
        "…. Resume with the model, rows and settings that the run started with, or start again in another "
        "output_dir.",
        lambda kit: None,
        preset="tis",
    ),
]


# NaN.


def _stopped_in_time(kit: Kit) -> None:
    """The weights are those of the last checkpoint, which can be loaded."""
    step = kit.trainer.state.global_step
    assert step >= 1
    assert [path.name for path in kit.out.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    checkpoint = kit.out / f"checkpoint-{step}"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert equal(list(saved.parameters()), weights(kit))
    assert all(parameter.isfinite().all() for parameter in saved.parameters())


GRADIENT_NOT_FINITE = (
    "The gradient of step … is NaN or infinite, so training stops. Checkpoints in …/out are from before that. Look for "
    "extreme rewards or log μ in the rows, lower learning_rate, or compute in float32 or bfloat16."
)
STOPPED_IN_TIME = Kept("the weights of the step before, and their checkpoint", _stopped_in_time)


def _before_that(kit: Kit) -> None:
    step = kit.trainer.state.global_step
    assert step >= 2
    assert [path.name for path in kit.out.glob("checkpoint-*")] == [f"checkpoint-{step - 1}"]


def extreme(kit: Kit, reward: float = 3e38) -> None:
    """The loss of one row is infinite in float32."""
    rewards = [1.0] * 8
    rewards[3] = reward
    kit.offline(with_columns(kit["rows"], reward=rewards), **STEPS, save_total_limit=1, sort_by_length=False)


def coin(completions: list[str], **_: Any) -> list[float]:
    return [1.0 if i % 2 else -1.0 for i in range(len(completions))]


def extreme_later(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    return [3e38 if trainer_state.global_step else 1.0] * len(completions)


def _no_checkpoint(kit: Kit) -> None:
    assert not list(kit.out.glob("checkpoint-*"))


NO_CHECKPOINT = Kept("no checkpoint of those weights is written", _no_checkpoint)

NAN = [
    Case(
        "a step whose gradient is too large for its norm",
        lambda kit: extreme(kit, 1e30),
        "`grad_norm` at step … is NaN or infinite, so training stops. Checkpoints in …/out are from before "
        "that. Look for extreme rewards or log μ in the rows, lower learning_rate, or compute in float32 or "
        "bfloat16.",
        Kept("the checkpoint of the step before", _before_that),
        FloatingPointError,
    ),
    Case(
        "offline, a step whose gradient is not finite",
        extreme,
        GRADIENT_NOT_FINITE,
        STOPPED_IN_TIME,
        FloatingPointError,
    ),
    Case(
        "online, a step whose gradient is not finite",
        lambda kit: kit.online(extreme_later, save_strategy="steps", save_steps=1, save_total_limit=1, baseline=0),
        GRADIENT_NOT_FINITE,
        STOPPED_IN_TIME,
        FloatingPointError,
    ),
    Case(
        "a step that throws the weights out of float32",
        lambda kit: kit.offline(kit["rows"], **STEPS, optim="sgd", learning_rate=3e38, max_grad_norm=0.0),
        "The model is not saved to …/out/checkpoint-1: … of its parameters hold NaN or infinite values, the "
        "first is model.embed_tokens.weight. Start from a checkpoint from before that.",
        NO_CHECKPOINT,
        FloatingPointError,
    ),
]


# Rewards.


def raising_later(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step:
        raise ConnectionError("the judge does not answer")
    return coin(completions)


async def late_text(completions: list[str], **_: Any) -> list[Any]:
    return ["good"] * len(completions)


def _untrained(kit: Kit) -> None:
    fresh = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    assert equal(list(fresh.parameters()), weights(kit))


UNTRAINED = Kept("the weights", _untrained)


def rewarded(given: str, message: str, reward: Any, error: Any = ValueError) -> Case:
    return Case(given, lambda kit: kit.online(reward), message, UNTRAINED, error)


def _hanging(kit: Kit) -> None:
    """A judge in worker processes, which hangs on two of eight completions."""
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
        _untrained(kit)


REWARDS = [
    Case(
        "a function that raises",
        lambda kit: kit.online(raising_later, save_strategy="steps", save_steps=1),
        "the judge does not answer",
        STOPPED_IN_TIME,
        ConnectionError,
    ),
    rewarded(
        "a function that returns one reward too few",
        "The reward function '<lambda>' returned 7 rewards, but 8 were expected (one per prompt-completion "
        "pair). Make sure the reward function returns exactly one reward per completion.",
        lambda completions, **_: [1.0] * (len(completions) - 1),
    ),
    rewarded(
        "a function that returns text",
        "The reward function '<lambda>' returned 'good' for completion 0. Return a number, or None where there "
        "is no reward.",
        lambda completions, **_: ["good"] * len(completions),
    ),
    rewarded(
        "an async function that returns text",
        "The reward function 'late_text' returned 'good' for completion 0. Return a number, or None where there "
        "is no reward.",
        late_text,
    ),
    rewarded(
        "a function that returns a number",
        "The reward function '<lambda>' returned 1.0, not a list with one reward per completion.",
        lambda completions, **_: 1.0,
    ),
    rewarded(
        "a function that returns nothing",
        "The reward function '<lambda>' returned None, not a list with one reward per completion.",
        lambda completions, **_: None,
    ),
    rewarded(
        "a function that returns an infinite reward",
        "The reward function '<lambda>' returned an infinite reward. Return a finite one, or None.",
        lambda completions, **_: [float("inf")] * len(completions),
    ),
    rewarded(
        "a function that returns None for all",
        "No completion has a reward, so there is nothing to learn from them: the weights stay as they are.",
        lambda completions, **_: [None] * len(completions),
        UserWarning,
    ),
    Case(
        "a judge in a `WorkerPool` that hangs on two of eight completions",
        _hanging,
        "",
        Kept("the other six, which are learned from", _six_of_eight),
        None,
    ),
    rewarded(
        "no function",
        "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment "
        "defines a `get_reward` method.",
        None,
    ),
]


# Prompts, tokenizers.


def without(kit: Kit, *tokens: str) -> Any:
    tokenizer = kit["tokenizer"]
    for token in tokens:
        setattr(tokenizer, token, None)
    return tokenizer


def _trained(kit: Kit) -> None:
    assert kit.trainer.state.global_step == kit.trainer.state.max_steps == 2


TRAINED = Kept("training, which goes on", _trained)
MESSAGES = [{"role": "user", "content": "3 + 4 ="}]
ANSWER = [{"role": "assistant", "content": "7"}]


def dialogues(kit: Kit) -> Any:
    return with_columns(kit["rows"], prompt=[MESSAGES] * 8, completion=[ANSWER] * 8)


TOKENIZERS = [
    Case(
        "text, and a tokenizer without a stop token",
        lambda kit: kit.offline(kit["rows"], tokenizer=without(kit, "eos_token")),
        "Row 0 of the train dataset: the completion needs a stop token, and the tokenizer has none. Set "
        "tokenizer.eos_token, or give completion_ids. Fix or drop it.",
        NOTHING_WRITTEN,
    ),
    Case(
        "a tokenizer with neither pad nor stop token, offline",
        lambda kit: kit.offline(kit["rows"], tokenizer=without(kit, "pad_token", "eos_token")),
        "The specified `pad_token` ('None') is not found in the vocabulary of the given `processing_class` "
        "(…). Ensure that the `pad_token` exists in the vocabulary before using it as a padding "
        "token.",
        NOTHING_WRITTEN,
    ),
    Case(
        "a tokenizer with neither pad nor stop token, online",
        lambda kit: kit.online(coin, tokenizer=without(kit, "pad_token", "eos_token")),
        "The tokenizer has neither a pad token nor a stop token, so completions cannot be padded to a batch. "
        "Set tokenizer.pad_token and tokenizer.eos_token.",
        NOTHING_WRITTEN,
    ),
    Case(
        "messages, and no chat template, offline",
        lambda kit: kit.offline(dialogues(kit), tokenizer=without(kit, "chat_template")),
        "Row 0 of the train dataset: it holds messages, and the tokenizer has no chat template to write them "
        "with. Set chat_template_path (or tokenizer.chat_template), or give prompts and completions as text. "
        "Fix or drop it.",
        NOTHING_WRITTEN,
    ),
    Case(
        "messages, and no chat template, online",
        lambda kit: kit.online(coin, {"prompt": [MESSAGES] * 2}, tokenizer=without(kit, "chat_template")),
        "Cannot use chat template functions because tokenizer.chat_template is not set and no template "
        "argument was passed! For information about writing templates and setting the tokenizer.chat_template "
        "attribute, please see the documentation at "
        "https://huggingface.co/docs/transformers/main/en/chat_templating",
        UNTRAINED,
    ),
    Case(
        "online, no column `prompt`",
        lambda kit: kit.online(coin, {"question": ["a"] * 2}, NOWHERE),
        "The training dataset needs a column `prompt`; it has ['question']. Rename the one with the prompts.",
        NOT_LOADED,
    ),
    Case(
        "online, no row",
        lambda kit: kit.online(coin, {"prompt": []}, NOWHERE),
        "The training dataset has no row. Look at what filtered or split it.",
        NOT_LOADED,
    ),
    Case(
        "online, a prompt longer than the context",
        lambda kit: kit.online(coin, {"prompt": ["a" * 4_000] * 2}),
        "A prompt has 4000 tokens; the model's context holds 2048. Drop or shorten such prompts.",
        UNTRAINED,
    ),
    Case(
        "prompt and longest completion longer than the context",
        lambda kit: kit.topr(*SAMPLE, "--max_new_tokens", 2_040),
        "topr sample: A prompt of 38 tokens and max_new_tokens=2040 do not fit in the model's context of "
        "2048. Use fewer examples in the prompt, or a lower max_new_tokens.",
        NO_SHARD,
        SystemExit,
    ),
    Case(
        "settings of GRPO for TOPR",
        lambda kit: TOPRTrainer(NOWHERE, coin, GRPOConfig(str(kit.out), bf16=False)),
        "TOPRTrainer needs TOPRConfig as args, not GRPOConfig.",
        NOT_LOADED,
        TypeError,
    ),
    Case(
        "settings of TOPR for offline TOPR",
        lambda kit: OfflineTOPRTrainer(NOWHERE, GRPOConfig(str(kit.out), bf16=False), kit["rows"]),
        "OfflineTOPRTrainer needs OfflineTOPRConfig as args, not GRPOConfig.",
        NOT_LOADED,
        TypeError,
    ),
    Case(
        "rewards that are never negative",
        lambda kit: kit.offline(with_columns(kit["rows"], reward=[1.0, 0.0] * 4), baseline=0),
        "None of the 8 rows has a negative reward after the baseline: TOPR then is reward-weighted "
        "supervised fine-tuning. Rewards of 0 are not negatives: set baseline='mean', or 0.5.",
        TRAINED,
        UserWarning,
    ),
    Case(
        "rewards that are never positive",
        lambda kit: kit.offline(with_columns(kit["rows"], reward=[-1.0] * 8), baseline=0),
        "All 8 rows have a negative reward after the baseline: the model only learns what to avoid, and "
        "nothing says what to write instead. Add positives, or lower the baseline.",
        TRAINED,
        UserWarning,
    ),
]


# Rows that are used again.


def replayed(given: str, message: str, rows: Any, error: Any = ValueError, kept: Kept = NOT_LOADED) -> Case:
    model = NOWHERE if kept is NOT_LOADED else None
    return Case(
        given,
        lambda kit: kit.online(coin, model=model, replayed=rows(kit["rows"]), replay_share=0.5),
        message,
        kept,
        error,
    )


def _damaged_rows(kit: Kit) -> None:
    settings = {"replay_share": 0.5, "save_strategy": "steps", "save_steps": 1}
    kit.online(coin, **settings)
    (kit.out / "checkpoint-1" / "replay_0.pt").write_bytes(b"PK")
    kit.trainer.train(resume_from_checkpoint=str(kit.out / "checkpoint-1"))


def _has_weights(checkpoint: Path) -> None:
    assert (checkpoint / "model.safetensors").stat().st_size > 1_000


REPLAY = [
    replayed(
        "`replay_dataset` without rewards",
        "The replay dataset: Rows to learn from need the columns prompt, completion (or completion_ids) and reward (or "
        "label); found ['prompt', 'completion']. Rename them with `dataset.rename_column`, score the rows first, or "
        "make rows of another system's logs with topr import.",
        lambda rows: rows.select_columns(["prompt", "completion"]),
    ),
    replayed(
        "`replay_dataset` without a row", "The replay dataset: The dataset has no row.", lambda rows: rows.select([])
    ),
    replayed(
        "a list as `replay_dataset`",
        "replay_dataset must be a datasets.Dataset, not list. Name a split of a dictionary; load a stream, or a list, "
        "into a Dataset.",
        lambda rows: rows.to_list(),
        TypeError,
    ),
    replayed(
        "`replay_dataset` whose rewards are all the same",
        "Each reward of the replay dataset is 0 after baseline=mean: there is nothing to learn. Add rows with other "
        "rewards, or set baseline to a number below these, which the generated rows then have, too.",
        lambda rows: with_columns(rows, reward=[1.0] * 8),
        kept=NOTHING_WRITTEN,
    ),
    Case(
        "a checkpoint whose rows to be used again are damaged",
        _damaged_rows,
        "…replay_0.pt is damaged (…). Put it back whole, or remove it.",
        Kept("the checkpoint", lambda kit: _has_weights(kit.out / "checkpoint-1")),
    ),
]

DOORS = {
    "Models and checkpoints": MODELS,
    "NaN": NAN,
    "Rewards": REWARDS,
    "Prompts and tokenizers": TOKENIZERS,
    "Rows that are used again": REPLAY,
}


@cases([case for door in DOORS.values() for case in door])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
