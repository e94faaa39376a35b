"""Build the trainers that are compared, all on the same rows."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.loss import sequence_logps
from topr_trl.tasks.arithmetic import CARELESS_MODEL

Rows = list[dict[str, Any]]

SAMPLES = 8  # completions of each problem
GENERATED = 64  # tokens of a completion that a trainer generates: GSM8K's median
USES = 4  # uses of a generation batch in variants with several uses
WORDS = 1_000  # token ids are below this number


@dataclass(frozen=True)
class Lengths:
    """Log-normal distribution of the number of tokens in prompts and completions.

    Attributes:
        prompt, response: mean and standard deviation of the logarithm.
        longest: maximum number of tokens.
    """

    prompt: tuple[float, float]
    response: tuple[float, float]
    longest: int = 2_048


# Fitted to GSM8K's 7,473 training problems and solutions. A token is a word, a punctuation mark or three digits.
GSM8K = Lengths((3.90, 0.36), (4.14, 0.45))
LONG_TAILS = Lengths((3.90, 0.36), (5.0, 1.0))


def even(tokens: int, prompt: float = 3.90) -> Lengths:
    """Return constant lengths. `prompt` is the logarithm of the prompts' length."""
    return Lengths((prompt, 0.0), (float(np.log(tokens)), 0.0), max(tokens, round(np.exp(prompt))))


def candidates(
    count: int, lengths: Lengths, vocabulary: int, positives: float = 0.5, seed: int = 0, samples: int = SAMPLES
) -> Rows:
    """Return rows of random token ids, with `samples` completions per problem."""
    rng = np.random.default_rng(seed)
    rows: Rows = []

    def draw(log_mean: float, log_std: float) -> list[int]:
        length = round(np.clip(np.exp(rng.normal(log_mean, log_std)), 1, lengths.longest))
        return rng.integers(2, vocabulary, length).tolist()

    for i in range(count):
        prompt = rows[-1]["prompt"] if i % samples else draw(*lengths.prompt)
        reward = 1.0 if (i * 0.618) % 1 < positives else -1.0  # evenly spread
        rows.append({"prompt": prompt, "completion": draw(*lengths.response), "reward": reward})
    return rows


@dataclass(frozen=True)
class Case:
    """Model shape, rows and settings of a run.

    Attributes:
        model: configuration of the model.
        rows: training rows. A run trains on each row once.
        micro_batch, accumulation: rows per forward pass, and forward passes per step.
        settings: settings of all trainers.
        device, dtype: device and dtype of a new model.
    """

    model: LlamaConfig
    rows: Rows
    micro_batch: int
    accumulation: int
    settings: dict[str, Any]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def arguments(self, folder: str) -> dict[str, Any]:
        return {
            "output_dir": folder, "per_device_train_batch_size": self.micro_batch, "num_train_epochs": 1,
            "gradient_accumulation_steps": self.accumulation, "per_device_eval_batch_size": self.micro_batch,
            "report_to": "none", "save_strategy": "no", "logging_steps": 1_000, "disable_tqdm": True,
            "learning_rate": 5e-7, "lr_scheduler_type": "constant", "optim": "adafactor", "seed": 1,
            "gradient_checkpointing": False, **self.settings,
        }  # fmt: skip

    def fresh_model(self) -> LlamaForCausalLM:
        """Return a model with random weights."""
        torch.manual_seed(0)
        # The config is copied, because trainers set `use_cache=False`, which would slow down generation by later
        # models.
        with torch.device(self.device):
            return LlamaForCausalLM._from_config(copy.deepcopy(self.model), dtype=self.dtype)


Build = Callable[[Case, str, list[TrainerCallback]], Any]


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CARELESS_MODEL)


def readable(rows: Rows) -> Rows:
    """Return rows whose prompts can be decoded and tokenized again without change, for trainers that generate."""
    tokenizer = _tokenizer()
    return [{**row, "prompt": tokenizer(tokenizer.decode(row["prompt"]))["input_ids"]} for row in rows]


def offline_topr(
    trainer: type[OfflineTOPRTrainer] = OfflineTOPRTrainer, brings_log_mu: bool = False, **more: Any
) -> Build:
    """Return a builder of `OfflineTOPRTrainer`, which computes log μ first unless `brings_log_mu` is set."""

    def build(case: Case, folder: str, callbacks: list[TrainerCallback]) -> Any:
        known = {"mu_logps": -1.0} if brings_log_mu else {}
        data = Dataset.from_list([
            {"prompt": "", "completion": "", "prompt_ids": row["prompt"], "completion_ids": row["completion"],
             "reward": row["reward"], **known} for row in case.rows
        ])  # fmt: skip
        args = OfflineTOPRConfig(**case.arguments(folder), baseline=0, **more)
        return trainer(case.fresh_model(), args, data, processing_class=_tokenizer(), callbacks=callbacks)

    return build


def rated_turns(turns: int, how: str) -> Build:
    """Return a builder of `OfflineTOPRTrainer` on completions of several turns, with a token of context between them.

    Args:
        turns (`int`): Number of turns.
        how (`str`): `"one reward"`, `"a reward per turn"`, or `"a row per turn"`.
    """

    def build(case: Case, folder: str, callbacks: list[TrainerCallback]) -> Any:
        rows = []
        for row in case.rows:
            prompt, ids = row["prompt"], row["completion"]
            ends = np.linspace(0, len(ids), turns + 1).astype(int).tolist()
            own = [int(n + 1 not in ends[:-1] or n == len(ids) - 1) for n in range(len(ids))]
            known = {"prompt": "", "prompt_ids": prompt, "completion_ids": ids, "completion_mask": own,
                     "mu_logps": [-5.0] * sum(own)}  # fmt: skip
            if how == "one reward":
                rows.append({**known, "reward": -1.0})
            elif how == "a reward per turn":
                rows.append({**known, "turn_rewards": [-1.0] * turns})
            else:
                for start, end in pairwise(ends):
                    last = end - (end < len(ids))
                    rows.append({"prompt": "", "prompt_ids": prompt + ids[:start], "completion_ids": ids[start:last],
                                 "mu_logps": [-5.0] * (last - start), "reward": -1.0})  # fmt: skip
        args = OfflineTOPRConfig(**case.arguments(folder), baseline=0)
        data = Dataset.from_list(rows)
        return OfflineTOPRTrainer(case.fresh_model(), args, data, processing_class=_tokenizer(), callbacks=callbacks)

    return build


class FrozenCopyTrainer(OfflineTOPRTrainer):
    """TOPR with a frozen copy of the model, which computes log μ of each row in each step."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self.frozen = LlamaForCausalLM(model.config).to(model.device, model.dtype).requires_grad_(False)
        self.frozen.load_state_dict(model.state_dict())
        add_fused_lm_head(self.frozen)
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        tokens = {name: value for name, value in inputs.items() if name not in ("reward", "mu_logps", "row")}
        with torch.no_grad():
            inputs["mu_logps"] = sequence_logps(*self._policy_logps(self.frozen, tokens)[:2])
        return super().compute_loss(model, inputs, *args, **kwargs)


def sft(**more: Any) -> Build:
    """Return a builder of TRL's `SFTTrainer` on the same tokens, of correct and wrong completions."""

    def build(case: Case, folder: str, callbacks: list[TrainerCallback]) -> Any:
        data = Dataset.from_list([
            {"input_ids": row["prompt"] + row["completion"],
             "completion_mask": [0] * len(row["prompt"]) + [1] * len(row["completion"])} for row in case.rows
        ])  # fmt: skip
        args = SFTConfig(**case.arguments(folder), completion_only_loss=True, max_length=None, **more)
        return SFTTrainer(
            case.fresh_model(), args, train_dataset=data, processing_class=_tokenizer(), callbacks=callbacks
        )

    return build


def online(trainer: type[GRPOTrainer], config: type[GRPOConfig], generates: bool = False, **more: Any) -> Build:
    """Return a builder of an online trainer whose rollouts are the rows of the case, without generation.

    With `generates`, the random model generates as many completions instead, and rarely stops before `GENERATED`
    tokens.
    """

    def build(case: Case, folder: str, callbacks: list[TrainerCallback]) -> Any:
        problems = case.rows[::SAMPLES]
        used = dict.fromkeys(range(len(problems)), 0)

        def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
            rows = []
            for prompt in map(int, prompts):
                rows.append(case.rows[prompt * SAMPLES + used[prompt] % SAMPLES])
                used[prompt] += 1
            return {"prompt_ids": [row["prompt"] for row in rows], "logprobs": None,
                    "completion_ids": [row["completion"] for row in rows],
                    "row_reward": [row["reward"] for row in rows]}  # fmt: skip

        def reward(completion_ids: list[list[int]], row_reward: list[float] | None = None, **_: Any) -> list[float]:
            return row_reward or [1.0 if ids[0] % 2 else -1.0 for ids in completion_ids]

        tokenizer = _tokenizer()
        prompts = tokenizer.batch_decode([row["prompt"] for row in problems]) if generates else list(map(str, used))
        args = config(
            **case.arguments(folder), **more, num_generations=SAMPLES, temperature=1.0, top_k=0,
            max_completion_length=GENERATED if generates else 2_048,
        )  # fmt: skip
        model = case.fresh_model()
        if "beta" in more:  # TRL loads the frozen copy from the model's folder
            model.save_pretrained(f"{folder}/model")
            model.config._name_or_path = f"{folder}/model"
        with warnings.catch_warnings(action="ignore"):
            return trainer(
                model, reward, args, train_dataset=Dataset.from_dict({"prompt": prompts}),
                processing_class=tokenizer, callbacks=callbacks, rollout_func=None if generates else rollout,
            )  # fmt: skip

    return build


VARIANTS: dict[str, Build] = {
    "topr": offline_topr(brings_log_mu=True),
    "topr, unsorted": offline_topr(brings_log_mu=True, sort_by_length=False),
    "topr, padding-free": offline_topr(brings_log_mu=True, padding_free=True),
    "topr, frozen copy": offline_topr(FrozenCopyTrainer, brings_log_mu=True),
    "sft": sft(),
    "sft, padding-free": sft(padding_free=True),
    "grpo": online(GRPOTrainer, GRPOConfig),
    "grpo, frozen copy": online(GRPOTrainer, GRPOConfig, beta=0.04),
    "online topr": online(TOPRTrainer, TOPRConfig),
    "grpo, generating": online(GRPOTrainer, GRPOConfig, generates=True),
    "online topr, generating": online(TOPRTrainer, TOPRConfig, generates=True),
    "grpo, generating, 4 uses": online(GRPOTrainer, GRPOConfig, generates=True, num_iterations=USES),
    "online topr, generating, 4 uses": online(TOPRTrainer, TOPRConfig, generates=True, num_iterations=USES),
}
