"""Train a little under `accelerate launch`, and save losses, metrics and weights. See trainers/test_distributed.py."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from topr_on_gloo import messages_over_gloo
from transformers import AutoTokenizer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k

GLOBAL_BATCH = 8


def responses(prompts: list[str]) -> list[str]:
    """Return a completion for each prompt. It depends only on the prompt, and not on the split over processes."""
    return [f" {sum(prompt.encode()) % 97} + 1 = 7. The answer is {len(prompt) % 7}." for prompt in prompts]


def rewards(prompts: list[str], **_) -> list[float]:
    return [1.0 if sum(prompt.encode()) % 3 == 0 else -1.0 for prompt in prompts]


def trajectories(prompts: list[str], tokenizer) -> Dataset:
    """Return a rollout for each prompt, with some context tokens in its completion.

    Every third rollout has two rows, and every fourth has a reward for each turn.

    If a prompt is given several times, its rollouts differ, and the trainer computes the shared prompt once.
    """
    rows = []
    asked = [f"{prompt}{n}" for n, prompt in enumerate(prompts)]
    for n, (prompt, text, reward) in enumerate(zip(prompts, responses(asked), rewards(asked), strict=True)):
        read, written = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
        shared = {"prompt": prompt, "problem_id": n, "rollout_id": None if n % 3 else n}
        first = second = {"reward": reward, "turn_rewards": None}
        if n % 4 == 1:
            first, second = ({"reward": None, "turn_rewards": each} for each in ([reward, -1.0], [1.0]))
        mask = [int(k not in (2, 3)) for k in range(len(written))]
        rows.append({**shared, **first, "prompt_ids": read, "completion_ids": written, "completion_mask": mask})
        if n % 3 == 0:
            rows.append({**shared, **second, "prompt_ids": read[:9] + written[4:], "completion_ids": written[::-1],
                         "completion_mask": None})  # fmt: skip
    return Dataset.from_list(rows)


def make_trainer(kind: str, out: Path, **settings) -> OfflineTOPRTrainer | TOPRTrainer:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # it selects the CPU by itself, without use_cpu
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    # With 22 problems, the last step of an epoch and the last batch of an evaluation are not full.
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
        # The completion may depend only on the prompt, because the position in the group differs between processes.
        ids = [tokenizer(text)["input_ids"] for text in responses(prompts)]
        return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}

    own = {
        "curated": {"curation": "uniform", "iteration_size": 8},
        # Replay all rows of the previous batch. At a higher learning rate, some would be dead and would be replaced.
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


def in_process(kinds: list[str], out: Path, environment: dict[str, str], log: Path) -> None:
    """Run `main` in a forked process."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    main(kinds, out)


def train_in_bfloat16(out: Path) -> None:
    """Train a step in bfloat16, and save which part of log π of its tokens is not rounded to bfloat16."""
    trainer = make_trainer("offline", out / "bfloat16", bf16=True, max_steps=1)
    compute, precise = trainer._compute_losses, []

    def spy(logps, mu_logps, rewards, mask, numbers):
        own = logps.detach()[mask]
        precise.append((own != own.bfloat16()).float().mean().item())
        return compute(logps, mu_logps, rewards, mask, numbers)

    trainer._compute_losses = spy
    trainer.train()
    if trainer.accelerator.is_main_process:
        (out / "bfloat16.json").write_text(json.dumps(precise))
    trainer.accelerator.wait_for_everyone()


def main(kinds: list[str], out: Path) -> None:
    for kind in kinds:
        if kind == "bfloat16":
            train_in_bfloat16(out)
            continue
        if kind == "offline" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # A separate trainer, which may shard the model, computes log μ and saves it. The next trainer finds the
            # saved values, and gives the same results as a single process.
            make_trainer(kind, out / kind, max_steps=4).compute_log_mu()
        # Resume in the middle of the second epoch, which starts after three steps offline and after four steps online.
        middle, last = (4, 5) if kind == "offline" else (6, 7)
        steps = {
            "save_strategy": "steps", "save_steps": middle, "max_steps": last, "eval_strategy": "steps",
            "eval_steps": last,
        }  # fmt: skip
        whole = make_trainer(kind, out / kind, **steps)
        logged = gather_object([row.number for row in whole._replay.buffer.rows]) if kind == "replayed" else []
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
                "logged rows": sorted(logged),
                "resumed": [entry for entry in resumed.state.log_history if "loss" in entry],
            }
            (out / f"{kind}.json").write_text(json.dumps(result))
        # If a process exits while another one still communicates with it, the other one can abort.
        whole.accelerator.wait_for_everyone()
    # Exit without destructors. Those of gloo join a thread that may wait for Python's lock, which this thread holds.
    # With torch 2.13 on a busy machine, one of fifty runs hung there after all work was done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        messages_over_gloo()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate only uses FSDP2 with accelerators. If Accelerate assumes GPUs, FSDP2 also runs on the CPU.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        torch.distributed.init_process_group("gloo")
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    main(sys.argv[2:], Path(sys.argv[1]))
