"""Trains a little under `accelerate launch` and writes losses, metrics and weights; see test_processes.py."""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k

GLOBAL_BATCH = 8


def responses(prompts: list[str]) -> list[str]:
    """Some response to each prompt, a function of the prompt alone, so that any split of the rows gives the same."""
    return [f" {sum(prompt.encode()) % 97} + 1 = 7. The answer is {len(prompt) % 7}." for prompt in prompts]


def rewards(prompts: list[str], **_) -> list[float]:
    return [1.0 if sum(prompt.encode()) % 3 == 0 else -1.0 for prompt in prompts]


def main(kind: str, out: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(24, seed=1), num_shots=0)
    shared = {
        "output_dir": str(out / f"run-{processes}"), "per_device_train_batch_size": GLOBAL_BATCH // processes,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "logging_steps": 1,
        "save_strategy": "no", "learning_rate": 1e-3, "max_steps": 3, "disable_tqdm": True,
    }  # fmt: skip
    if kind == "offline":
        prompts = problems["prompt"][:]
        rows = Dataset.from_dict(
            {"prompt": prompts, "completion": responses(prompts), "reward": rewards(prompts), "problem_id": range(24)}
        )
        trainer = OfflineTOPRTrainer(model, OfflineTOPRConfig(**shared), rows, processing_class=tokenizer)
    else:

        def rollout(prompts, trainer):
            # Positions in the group differ between processes, so only the prompt may matter.
            ids = [tokenizer(text)["input_ids"] for text in responses(prompts)]
            return {
                "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts],
                "completion_ids": ids,
                "logprobs": None,
            }

        settings = {"curation": "uniform", "iteration_size": 8} if kind == "curated" else {}
        args = TOPRConfig(
            **shared, **settings, num_generations=2, num_iterations=2, steps_per_generation=2, preset="tis",
            baseline="mean", gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = TOPRTrainer(
            model, rewards, args=args, train_dataset=problems, processing_class=tokenizer, rollout_func=rollout
        )
    trainer.train()
    if trainer.accelerator.is_main_process:
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        result = {
            "processes": trainer.accelerator.num_processes,
            "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
            "weights": float(torch.cat([p.detach().flatten() for p in unwrapped.parameters()]).double().abs().sum()),
        }
        (out / f"{kind}-{processes}.json").write_text(json.dumps(result))
        torch.save(unwrapped.state_dict(), out / f"{kind}-{processes}.pt")
    # A process that leaves while another still talks to it can abort that one.
    trainer.accelerator.wait_for_everyone()
    # gloo's destructors join a thread that may be waiting for Python's lock, which this thread holds: seen to hang once
    # in fifty runs on a busy machine, in torch 2.13, when all work was done. So nothing is taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
