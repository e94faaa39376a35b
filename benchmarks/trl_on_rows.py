"""Train a pretrained model on stored rows with TRL's DPO, KTO or GRPO, with LoRA like the other methods."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from benchmarks.methods import mismatched, padded, with_tokens
from topr_trl.data.tables import shards_of

PAIRS = 16  # maximum pairs per problem, as in the paper


def train(kind: str, rows: Path, model: str, out: Path, arguments: dict[str, Any], step_rows: int) -> None:
    """Train a model, and save it with the adapter merged.

    Args:
        kind: `"dpo"`, `"kto"` or `"grpo"`.
        rows: folder of rows.
        model: folder or Hub name of the model.
        out: folder for the trained model.
        arguments: arguments of the trainer's config, such as learning rate, seed, micro-batch and number of steps.
        step_rows: rows of a step. A pair counts as two rows.
    """
    table = pq.read_table(shards_of(rows)[0])
    torch.manual_seed(arguments["seed"])
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass can return NaN
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear")
    settings = {
        **arguments, "optim": "adamw_torch", "lr_scheduler_type": "constant", "logging_steps": 1,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings["output_dir"] = folder
        trainer = _TRAINERS[kind](table.to_pylist(), base, tokenizer, lora, settings, step_rows)
        trainer.train()
        log = {"global_step": trainer.state.global_step, "log_history": trainer.state.log_history}
        trained = trainer.accelerator.unwrap_model(trainer.model)
    trained.merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "trainer_state.json").write_text(json.dumps(log))


def _dpo(rows: list[dict[str, Any]], base: Any, tokenizer: Any, lora: Any, settings: dict[str, Any], step: int) -> Any:
    """Return DPO on pairs of a correct and a wrong completion of a problem, repeated to fill all steps."""
    rng, by_problem = np.random.default_rng(settings["seed"]), defaultdict(list)
    for row in rows:
        by_problem[row["problem_id"]].append(row)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in by_problem.values():
        every = [(a, b) for a in group if a["reward"] > 0 for b in group if b["reward"] <= 0]
        pairs += [every[n] for n in rng.permutation(len(every))[:PAIRS]]
    pairs = [pairs[n] for n in np.resize(rng.permutation(len(pairs)), settings["max_steps"] * step // 2)]
    data = Dataset.from_list([
        {"prompt": "", "prompt_ids": a["prompt_ids"], "chosen_ids": a["completion_ids"],
         "rejected_ids": b["completion_ids"]} for a, b in pairs
    ])  # fmt: skip
    micro = settings["per_device_train_batch_size"] // 2
    args = DPOConfig(
        **{**settings, "per_device_train_batch_size": micro}, gradient_accumulation_steps=step // 2 // micro,
        precompute_ref_log_probs=True, max_length=None,
    )  # fmt: skip
    return with_tokens(DPOTrainer)(base, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora)


def _kto(rows: list[dict[str, Any]], base: Any, tokenizer: Any, lora: Any, settings: dict[str, Any], step: int) -> Any:
    """Return KTO with balanced classes, as TRL's warning recommends.

    The mismatched completions of the KL term come from the same batch, as in TRL, which reads rows in order. Therefore,
    rows are shuffled first.
    """
    rng = np.random.default_rng(settings["seed"])
    rows = [rows[n] for n in rng.permutation(len(rows))]
    right = sum(row["reward"] > 0 for row in rows)
    micro = settings["per_device_train_batch_size"]
    answers = [row["completion_ids"] for row in rows]
    data = Dataset.from_dict({
        "prompt": [""] * len(rows), "prompt_ids": [row["prompt_ids"] for row in rows], "completion_ids": answers,
        "KL_completion_ids": mismatched(answers, micro), "label": [row["reward"] > 0 for row in rows],
    })  # fmt: skip
    args = KTOConfig(
        **settings, gradient_accumulation_steps=step // micro,
        precompute_ref_log_probs=True, max_length=None, desirable_weight=(len(rows) - right) / max(right, 1),
    )  # fmt: skip
    return with_tokens(KTOTrainer)(base, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora)


class _GRPO:
    """Trainer with TRL's `GRPOTrainer._compute_loss` and its default loss, on stored completions."""

    def __init__(
        self, rows: list[dict[str, Any]], base: Any, tokenizer: Any, lora: Any, settings: dict[str, Any], step: int
    ) -> None:
        self.rows, self.step, self.settings, self.tokenizer = rows, step, settings, tokenizer
        self.micro = settings["per_device_train_batch_size"]
        self.accumulation = step // self.micro
        args = GRPOConfig(**settings, num_generations=2, gradient_accumulation_steps=self.accumulation)
        self.trainer = GRPOTrainer(
            get_peft_model(base, lora), lambda completions, **_: [0.0] * len(completions), args=args,
            train_dataset=Dataset.from_dict({"prompt": ["-"]}), processing_class=tokenizer,
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = self.accumulation
        self.model, self.accelerator, self.state = self.trainer.model, self.trainer.accelerator, self.trainer.state

    def train(self) -> None:
        """Train on each row once, in random order."""
        rewards = np.array([row["reward"] for row in self.rows])
        names, group = np.unique([row["problem_id"] for row in self.rows], return_inverse=True)
        mean = np.array([rewards[group == n].mean() for n in range(len(names))])[group]
        deviation = np.array([rewards[group == n].std(ddof=1) for n in range(len(names))])[group]
        advantages = torch.tensor((rewards - mean) / (deviation + 1e-4), dtype=torch.float32)
        optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], self.settings["learning_rate"], weight_decay=0.0
        )
        order = np.random.default_rng(self.settings["seed"]).permutation(len(self.rows))
        self.model.train()
        for start in range(0, self.settings["max_steps"] * self.step, self.step):
            chosen = order[start : start + self.step]
            tokens = sum(len(self.rows[i]["completion_ids"]) for i in chosen)
            for part in chosen.reshape(self.accumulation, self.micro):
                with torch.autocast(self.model.device.type, torch.bfloat16):
                    loss = self.trainer._compute_loss(self.model, self._inputs(part, advantages, tokens))
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.state.global_step += 1

    def _inputs(self, part: Any, advantages: torch.Tensor, tokens: int) -> dict[str, Any]:
        rows = [self.rows[i] for i in part]
        prompt_ids, prompt_mask = padded(self.tokenizer, [row["prompt_ids"] for row in rows], left=True)
        completion_ids, completion_mask = padded(self.tokenizer, [row["completion_ids"] for row in rows])
        mu_logps = pad_sequence([torch.tensor(row["sampler_logps"]) for row in rows], batch_first=True)
        inputs = {
            "prompt_ids": prompt_ids, "prompt_mask": prompt_mask,
            "completion_ids": completion_ids, "completion_mask": completion_mask,
            "advantages": advantages[torch.from_numpy(part)], "old_per_token_logps": mu_logps.float(),
            "num_items_in_batch": torch.tensor(tokens),
        }  # fmt: skip
        return {name: value.to(self.model.device) for name, value in inputs.items()}


_TRAINERS: dict[str, Any] = {"dpo": _dpo, "kto": _kto, "grpo": _GRPO}
