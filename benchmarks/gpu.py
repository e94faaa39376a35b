"""Offline TOPR against SFT on one GPU: tokens a second, share of the peak, memory, at the paper's size.

    python -m benchmarks.gpu                      # 8B-shaped random weights in bfloat16, one 80 GB GPU
    python -m benchmarks.gpu --model tiny --cpu   # does the script work?

Both trainers take the same rows (half of them negative) through the same model, with Adafactor and gradient
checkpointing; TOPR's log μ is given, and scored once more apart to time it. Writes `benchmarks/results/gpu.json`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.cells import versions
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.plan import KNOWN, Shape, training_flops
from topr_trl.tasks.arithmetic import CARELESS_MODEL

TINY = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=2, vocab_size=512)  # fmt: skip
WARM_UP = 3  # steps that are not timed


def make_rows(count: int, prompt: int, response: int, vocabulary: int) -> list[dict[str, Any]]:
    """Random token ids, responses between half and all of `response` long, every second reward negative."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        length = int(rng.integers(response // 2, response + 1))
        ids = rng.integers(2, vocabulary, prompt + length).tolist()
        rows.append({"prompt": ids[:prompt], "completion": ids[prompt:], "reward": 1.0 if i % 2 else -1.0})
    return rows


class Clock(TrainerCallback):
    """Times the steps after the warm-up."""

    def __init__(self) -> None:
        self.start, self.seconds, self.steps = 0.0, 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == WARM_UP:
            _synchronize()
            self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            _synchronize()
            self.seconds, self.steps = time.perf_counter() - self.start, state.max_steps - WARM_UP


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(method: str, args: argparse.Namespace, rows: list[dict[str, Any]], config: LlamaConfig) -> dict[str, Any]:
    """Train `args.steps` steps and tell what they took."""
    on_gpu = torch.cuda.is_available() and not args.cpu
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    tokenizer, clock = AutoTokenizer.from_pretrained(CARELESS_MODEL), Clock()
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "output_dir": folder, "per_device_train_batch_size": args.rows, "max_steps": WARM_UP + args.steps,
            "optim": "adafactor", "gradient_checkpointing": True, "bf16": on_gpu, "use_cpu": not on_gpu,
            "learning_rate": 5e-7, "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no",
            "logging_steps": 1_000, "per_device_eval_batch_size": args.rows, "max_length": None,
        }  # fmt: skip
        if method == "topr":
            data = Dataset.from_list([
                {"prompt": "", "completion": "", "prompt_ids": r["prompt"], "completion_ids": r["completion"],
                 "reward": r["reward"]} for r in rows
            ])  # fmt: skip
            trainer: Any = OfflineTOPRTrainer(
                model, OfflineTOPRConfig(**shared), data, processing_class=tokenizer, callbacks=[clock]
            )
            _synchronize()
            start = time.perf_counter()
            trainer.score_log_mu()
            _synchronize()
            scoring = time.perf_counter() - start
        else:
            data = Dataset.from_list([
                {"input_ids": r["prompt"] + r["completion"],
                 "completion_mask": [0] * len(r["prompt"]) + [1] * len(r["completion"])} for r in rows
            ])  # fmt: skip
            trainer = SFTTrainer(
                model, SFTConfig(**shared, completion_only_loss=True), train_dataset=data, processing_class=tokenizer,
                callbacks=[clock],
            )  # fmt: skip
            scoring = 0.0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    batch = args.rows * clock.steps
    response = int(np.mean([len(row["completion"]) for row in rows]))
    flops = training_flops(Shape.of(config), args.prompt_tokens, response, checkpointing=False)  # recomputing is no use
    return {
        "tokens_per_second": batch * (args.prompt_tokens + response) / clock.seconds,
        "mfu": batch * flops / clock.seconds / (args.peak_tflops * 1e12),
        "seconds_per_step": clock.seconds / clock.steps,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "scoring_seconds_per_row": scoring / (len(rows) / 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--rows", type=int, default=4, help="a step; default: 4")
    parser.add_argument("--steps", type=int, default=20, help="that are timed; default: 20")
    parser.add_argument("--prompt_tokens", type=int, default=1_024, help="default: 1024 (8-shot GSM8K)")
    parser.add_argument("--response_tokens", type=int, default=512, help="longest; default: 512")
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="bfloat16 peak of the GPU; default: H100 SXM")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    args = parser.parse_args()
    config = KNOWN["8b"] if args.model == "8b" else TINY
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("There is no GPU. --model tiny --cpu tries the script without one.")
    count = (WARM_UP + args.steps) * args.rows
    rows = make_rows(count, args.prompt_tokens, args.response_tokens, config.vocab_size)
    results: dict[str, Any] = {}
    for method in ("topr", "sft"):
        results[method] = measure(method, args, rows, config)
        print(method, json.dumps(results[method]), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    results["seconds_per_step, topr / sft"] = results["topr"]["seconds_per_step"] / results["sft"]["seconds_per_step"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    args.output.write_text(
        json.dumps({**results, "device": device, "settings": settings, "versions": versions()}, indent=1)
    )
    print(f"Written to {args.output}.")


if __name__ == "__main__":
    main()
