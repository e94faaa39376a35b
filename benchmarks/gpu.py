"""Offline TOPR, SFT and GRPO on one GPU: tokens per second, share of the peak, memory.

    python -m benchmarks.gpu                      # 8 billion parameters, random weights, bfloat16, one 80 GB GPU
    python -m benchmarks.gpu --model 0.5b --rows 16
    python -m benchmarks.gpu --model tiny --cpu   # does the script work?

The trainers and rows are those of `benchmarks.performance`, with Adafactor and gradient checkpointing, two rounds
in turn. Writes `benchmarks/results/gpu-MODEL.json`. Padding-free variants need FlashAttention, and run if it is there.
"""

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.cells import versions
from benchmarks.performance.__main__ import quiet
from benchmarks.performance.timing import in_turn, peak_memory, seconds_per_step
from benchmarks.performance.work import GSM8K, LONG_TAILS, VARIANTS, WORDS, Case, candidates
from topr_trl.cli.gpu_memory import Shape, training_flops
from topr_trl.cli.memory_plan import KNOWN

MODELS = {
    "8b": KNOWN["8b"],
    "0.5b": LlamaConfig(hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True),
    "tiny": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=1_024),
}  # fmt: skip
VARIANTS_HERE = ["topr", "sft", "grpo", "online topr"]


def measure(case: Case, peak_tflops: float, repeats: int) -> dict[str, dict[str, float]]:
    """Each variant's seconds per step, tokens per second, share of the peak, and memory."""
    variants = list(VARIANTS_HERE)
    if case.attention.startswith("flash"):
        variants += ["topr, padding-free", "sft, padding-free"]
    seconds = in_turn(
        {name: lambda name=name: seconds_per_step(VARIANTS[name], case) for name in variants},  # type: ignore[misc]
        repeats, lambda name: print(name, flush=True),
    )  # fmt: skip
    step = case.micro_batch * case.accumulation
    prompt = sum(len(row["prompt"]) for row in case.rows) / len(case.rows)
    response = sum(len(row["completion"]) for row in case.rows) / len(case.rows)
    # What has to be computed: neither padding, nor what is recomputed to save memory.
    flops = step * training_flops(Shape.of(case.model), round(prompt) + round(response), checkpointing=False)
    two_steps = replace(case, rows=case.rows[: 2 * step])
    return {
        name: {
            "seconds_per_step": (typical := median(times)), "fastest": min(times), "slowest": max(times),
            "tokens_per_second": step * (prompt + response) / typical,
            "mfu": flops / typical / (peak_tflops * 1e12),
            "peak_memory_gib": peak_memory(VARIANTS[name], two_steps) / 2**30,
        }
        for name, times in seconds.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="8b")
    parser.add_argument("--rows", type=int, default=8, help="of a forward; default: 8")
    parser.add_argument("--accumulation", type=int, default=4, help="forwards of a step; default: 4")
    parser.add_argument("--steps", type=int, default=5, help="of a run, the first is not timed; default: 5")
    parser.add_argument("--repeats", type=int, default=2, help="rounds; default: 2")
    parser.add_argument("--long_tails", action="store_true", help="responses of up to 2,048 tokens")
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="bfloat16 peak of the GPU; default: H100 SXM")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu-MODEL.json")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("There is no GPU. --model tiny --cpu tries the script without one.")
    quiet()
    settings: dict[str, Any] = {"use_cpu": args.cpu, "bf16": not args.cpu, "gradient_checkpointing": True}
    rows = candidates(args.steps * args.rows * args.accumulation, LONG_TAILS if args.long_tails else GSM8K, WORDS)
    flash = not args.cpu and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    case = Case(MODELS[args.model], rows, args.rows, args.accumulation, settings, attention)
    results = measure(case, args.peak_tflops, args.repeats)
    print(f"{'':<20}{'s/step':>8}{'tokens/s':>11}{'MFU':>7}{'GiB':>8}{'/ sft':>7}")
    for name, found in results.items():
        print(
            f"{name:<20}{found['seconds_per_step']:>8.2f}{found['tokens_per_second']:>11,.0f}{found['mfu']:>7.1%}"
            f"{found['peak_memory_gib']:>8.1f}{found['seconds_per_step'] / results['sft']['seconds_per_step']:>7.2f}"
        )
    content = {
        "results": results, "device": "CPU" if args.cpu else torch.cuda.get_device_name(), "versions": versions(),
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
    }  # fmt: skip
    output = args.output or Path(__file__).parent / "results" / f"gpu-{args.model}.json"
    output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {output}")


if __name__ == "__main__":
    main()
