"""Steps of the trainers at the shape of large models: time, share of the peak, and memory beside what is planned."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig

from benchmarks import memory as processes
from benchmarks.cells import Cell, Store
from benchmarks.performance.timing import in_turn, peak_memory, scoring_seconds, seconds_per_step
from benchmarks.performance.work import GSM8K, VARIANTS, WORDS, Build, Case, candidates, even, offline_topr
from topr_trl.cli.gpu_memory import Shape, memory, training_flops
from topr_trl.cli.memory_plan import KNOWN
from topr_trl.tasks import gsm8k
from topr_trl.tasks.arithmetic import arithmetic_dataset

SHAPES = {
    "8b": KNOWN["8b"],
    "3b": LlamaConfig(hidden_size=3_072, intermediate_size=8_192, num_hidden_layers=28, num_attention_heads=24,
                      num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True),
    "0.5b": LlamaConfig(hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True),
    "tiny": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=1_024),
}  # fmt: skip
PADDED = ("topr", "sft", "grpo", "online topr")
PADDING_FREE = ("topr, padding-free", "sft, padding-free")  # need FlashAttention
GENERATING = ("grpo, generating", "online topr, generating", "grpo, generating, 4 uses",
              "online topr, generating, 4 uses")  # fmt: skip
LENGTHS = {"GSM8K": (GSM8K, 8, 4), "4,096 tokens": (even(4_096), 1, 8), "16 tokens": (even(16), 4, 2)}


@dataclass(frozen=True)
class Machine:
    """Where it runs.

    Attributes:
        peak: operations per second in bfloat16, of the GPU's data sheet.
        flash: whether FlashAttention is there.
        gsm8k: where its rows are: a data set of the Hub, or a folder with gsm8k_train.jsonl and gsm8k_test.jsonl.
    """

    use_cpu: bool
    peak: float
    flash: bool
    gsm8k: str = "openai/gsm8k"

    @property
    def device(self) -> str:
        return "cpu" if self.use_cpu else "cuda"

    def gsm8k_rows(self, split: str) -> Dataset:
        """GSM8K's; tiny, generated ones of its shape."""
        if self.use_cpu:
            return arithmetic_dataset(24, seed=len(split))
        folder = Path(self.gsm8k)
        return gsm8k.load(str(folder / f"gsm8k_{split}.jsonl") if folder.is_dir() else self.gsm8k, split)


def cells(tiny: bool, store: Store) -> list[Cell]:
    shape, small, lengths = ("tiny", "tiny", ["16 tokens"]) if tiny else ("8b", "0.5b", ["GSM8K", "4,096 tokens"])
    found: list[Cell] = []
    for length in lengths:
        for checkpointing in (True, False):
            found += [
                {"claim": "steps", "what": "offline", "model": shape, "rows": length, "checkpointing": checkpointing},
                {"claim": "steps", "what": "memory", "model": "tiny" if tiny else "3b", "rows": length,
                 "checkpointing": checkpointing},
            ]  # fmt: skip
    if find_spec("deepspeed"):
        found.append({"claim": "steps", "what": "offload", "model": "tiny" if tiny else "3b",
                      "rows": f"{processes.ROWS} of {processes.PROMPT + processes.RESPONSE} tokens",
                      "checkpointing": True})  # fmt: skip
    return [
        *found,
        {"claim": "steps", "what": "log μ", "model": shape, "rows": lengths[0], "checkpointing": True},
        {"claim": "steps", "what": "online", "model": small, "rows": lengths[0], "checkpointing": False},
    ]


def work(cell: Cell, machine: Machine) -> dict[str, Any]:
    if cell["what"] == "offload":
        return _offload(SHAPES[cell["model"]], on_gpu=not machine.use_cpu)
    lengths, micro_batch, accumulation = LENGTHS[cell["rows"]]
    is_online = cell["what"] == "online"
    steps = 3 if machine.use_cpu else 5
    rows = candidates(steps * micro_batch * accumulation, lengths, min(WORDS, SHAPES[cell["model"]].vocab_size))
    settings = {
        "use_cpu": machine.use_cpu, "bf16": not machine.use_cpu, "gradient_checkpointing": cell["checkpointing"],
    }  # fmt: skip
    attention = "flash_attention_2" if machine.flash else "sdpa"
    case = Case(SHAPES[cell["model"]], rows, micro_batch, accumulation, settings, attention)
    if cell["what"] == "memory":
        return _memory(case)
    if cell["what"] == "log μ":
        return _log_mu(case)
    variants = GENERATING if is_online else (*PADDED, *(PADDING_FREE if machine.flash else ()))
    return {name: _step(name, times, case, machine) for name, times in _times(case, variants).items()}


def _times(case: Case, variants: tuple[str, ...]) -> dict[str, list[float]]:
    measures = {name: lambda name=name: seconds_per_step(VARIANTS[name], case) for name in variants}
    return in_turn(measures, 2, lambda name: print(f"  {name}", flush=True))  # type: ignore[arg-type]


def _step(name: str, times: list[float], case: Case, machine: Machine) -> dict[str, float]:
    step = case.micro_batch * case.accumulation
    tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in case.rows) / len(case.rows)
    # What has to be computed: neither padding, nor what is recomputed to save memory.
    flops = step * training_flops(Shape.of(case.model), round(tokens), checkpointing=False)
    two_steps = replace(case, rows=case.rows[: 2 * step])
    found = {"seconds": median(times), "fastest": min(times), "slowest": max(times),
             "peak_gib": peak_memory(VARIANTS[name], two_steps) / 2**30}  # fmt: skip
    if name in GENERATING:  # whose completions are others, and cost operations of their own
        return found
    return {**found, "tokens_per_second": step * tokens / median(times), "mfu": flops / median(times) / machine.peak}


def _memory(case: Case) -> dict[str, Any]:
    """Of offline TOPR on float32 weights, beside what `topr plan` says of one GPU."""
    rows = case.rows[: 2 * case.micro_batch * case.accumulation]
    longest = max(len(row["prompt"]) + len(row["completion"]) for row in rows)
    checkpointing = bool(case.settings["gradient_checkpointing"])
    planned = memory(
        Shape.of(case.model), "ddp", 1, "adafactor", tokens=case.micro_batch * longest, checkpointing=checkpointing
    )
    two_steps = replace(case, rows=rows, dtype=torch.float32)
    build: Build = offline_topr(brings_log_mu=True, sort_by_length=False)
    return {"measured_gib": peak_memory(build, two_steps) / 2**30, "planned_gib": planned.total / 2**30}


def _offload(model: LlamaConfig, on_gpu: bool) -> dict[str, Any]:
    """Of ZeRO-3 with weights and optimizer in the host's memory; a CPU has no second memory, and does without."""
    config, tokens = "zero3_offload" if on_gpu else "zero3", processes.ROWS * (processes.PROMPT + processes.RESPONSE)
    planned = memory(Shape.of(model), config, 1, "adamw_torch", tokens)
    measured = processes.run(config, "adamw_torch", True, model, on_gpu)
    return {"measured_gib": measured / 2**30, "planned_gib": planned.total / 2**30}


def _log_mu(case: Case) -> dict[str, Any]:
    """Of the pass that computes log μ, for rows half of which are negative, beside a step of training on all."""
    seconds = scoring_seconds(offline_topr(), case)
    steps = len(case.rows) / (case.micro_batch * case.accumulation)
    return {"share": seconds / (seconds_per_step(VARIANTS["topr"], case) * steps), "seconds": seconds}
