"""Trains a little under `accelerate launch` and writes losses, metrics and weights; see test_distributed.py."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoTokenizer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k

GLOBAL_BATCH = 8


def responses(prompts: list[str]) -> list[str]:
    """Some response to each prompt, a function of the prompt alone, so that any split of the rows gives the same."""
    return [f" {sum(prompt.encode()) % 97} + 1 = 7. The answer is {len(prompt) % 7}." for prompt in prompts]


def rewards(prompts: list[str], **_) -> list[float]:
    return [1.0 if sum(prompt.encode()) % 3 == 0 else -1.0 for prompt in prompts]


def trajectories(prompts: list[str], tokenizer) -> Dataset:
    """A rollout for each prompt, of whose completion some tokens are context; every third one is in two rows.

    A prompt may be there several times: its rollouts differ, and share its computation.
    """
    rows = []
    asked = [f"{prompt}{n}" for n, prompt in enumerate(prompts)]
    for n, (prompt, text, reward) in enumerate(zip(prompts, responses(asked), rewards(asked), strict=True)):
        read, written = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
        shared = {"prompt": prompt, "reward": reward, "problem_id": n, "rollout_id": None if n % 3 else n}
        mask = [int(k not in (2, 3)) for k in range(len(written))]
        rows.append({**shared, "prompt_ids": read, "completion_ids": written, "completion_mask": mask})
        if n % 3 == 0:
            rows.append({**shared, "prompt_ids": read[:9] + written[4:], "completion_ids": written[::-1],
                         "completion_mask": None})  # fmt: skip
    return Dataset.from_list(rows)


def make_trainer(kind: str, out: Path, **settings) -> OfflineTOPRTrainer | TOPRTrainer:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # comes to the CPU only if nothing asks for it
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    # 22 rows: neither a step nor a batch of evaluation is full at the end of an epoch.
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(22, seed=1), num_shots=0)
    shared = {
        "output_dir": str(out), "per_device_train_batch_size": GLOBAL_BATCH // processes, "max_steps": 3,
        "use_cpu": not deepspeed, "ddp_backend": "gloo" if deepspeed else None, "bf16": False,
        "gradient_checkpointing": False, "report_to": "none", "logging_steps": 1, "disable_tqdm": True,
        "save_strategy": "no", "learning_rate": 1e-3, "optim": "adamw_torch",
        "adam_epsilon": 1e-5,  # Otherwise, Adam's first steps magnify rounding where gradients are tiny.
        "per_device_eval_batch_size": GLOBAL_BATCH // processes,
        "model_init_kwargs": {"dtype": "float32"}, **settings,
    }  # fmt: skip
    model = str(arithmetic.CARELESS_MODEL)
    if kind == "offline":
        rows = trajectories((problems["prompt"][:6] * 4)[:22], tokenizer)
        few = {
            "few": trajectories(problems["prompt"][:3], tokenizer),
            "more": trajectories(problems["prompt"][:11], tokenizer),
        }
        return OfflineTOPRTrainer(model, OfflineTOPRConfig(**shared), rows, few, processing_class=tokenizer)

    def rollout(prompts, trainer):
        # Positions in the group differ between processes, so only the prompt may matter.
        ids = [tokenizer(text)["input_ids"] for text in responses(prompts)]
        return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}

    own = {
        "curated": {"curation": "uniform", "iteration_size": 8},
        # All rows of the batch before. At a higher rate some would be dead, and be replaced by others.
        "replayed": {"replay_share": 0.5, "replay_size": 2 * GLOBAL_BATCH, "learning_rate": 2e-4},
    }
    args = TOPRConfig(
        **{**shared, **own.get(kind, {})}, num_generations=2, num_iterations=2, steps_per_generation=2, preset="tis",
        baseline="mean", gradient_accumulation_steps=2,
    )  # fmt: skip
    logged = {"prompt": ["2 + 3 =", "2 + 4 ="] * 4, "completion": [" 5", " 7"] * 4, "reward": [1.0, -1.0] * 4}
    more = {"replay_dataset": Dataset.from_dict(logged)} if kind == "replayed" else {}
    return TOPRTrainer(
        model, rewards, args=args, train_dataset=problems, eval_dataset={"five": problems.select(range(5))},
        processing_class=tokenizer, rollout_func=rollout, **more,
    )  # fmt: skip


def main(kinds: list[str], out: Path) -> None:
    for kind in kinds:
        if kind == "offline" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # By a trainer of its own, sharded: the next one finds the parts, and trains as one process does.
            make_trainer(kind, out / kind, max_steps=4).compute_log_mu()
        # The run is resumed within the second epoch, which begins after three steps offline, and after four online.
        middle, last = (4, 5) if kind == "offline" else (6, 7)
        steps = {
            "save_strategy": "steps", "save_steps": middle, "max_steps": last, "eval_strategy": "steps",
            "eval_steps": last,
        }  # fmt: skip
        whole = make_trainer(kind, out / kind, **steps)
        whole.train()
        whole.save_model(str(out / kind / "whole"))
        resumed = make_trainer(kind, out / kind, max_steps=last)
        resumed.train(resume_from_checkpoint=str(out / kind / f"checkpoint-{middle}"))
        resumed.save_model(str(out / kind / "resumed"))
        if whole.accelerator.is_main_process:
            result = {
                "processes": whole.accelerator.num_processes,
                "distributed": str(whole.accelerator.distributed_type.value),
                "logs": [entry for entry in whole.state.log_history if "loss" in entry],
                "evaluated": [entry for entry in whole.state.log_history if any("eval_" in name for name in entry)],
                "resumed": [entry for entry in resumed.state.log_history if "loss" in entry],
            }
            (out / f"{kind}.json").write_text(json.dumps(result))
        # A process that leaves while another still talks to it can abort that one.
        whole.accelerator.wait_for_everyone()
    # gloo's destructors join a thread that may be waiting for Python's lock, which this thread holds: seen to hang once
    # in fifty runs on a busy machine, in torch 2.13, when all work was done. So nothing is taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate shards on accelerators alone; told that the processes are such, FSDP2 runs on the CPU as it is.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        torch.distributed.init_process_group("gloo")
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    main(sys.argv[2:], Path(sys.argv[1]))
