"""The command `topr plan`: memory of a GPU and time of a step, before anything is started."""

from dataclasses import dataclass, field, fields
from textwrap import fill
from typing import Any

from tabulate import tabulate
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from topr_trl.cli.gpu_memory import (
    GIB,
    STATE_BYTES,
    STRATEGIES,
    Shape,
    cache_bytes,
    forward_flops,
    memory,
    training_flops,
)
from topr_trl.config import check_at_least, check_choice, check_types
from topr_trl.curation import CURATIONS, ROWS_PER_PROBLEM
from topr_trl.pipeline.arguments import IterateArguments

GSM8K_PROBLEMS = 7_473  # planned where no number is given: how many a data set has is known when it is loaded
OPTIMIZERS = (*STATE_BYTES, "adafactor")
# Shapes that need no download: those of Llama 3.1. Llama 3 has the same, and a context of 8,192.
_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
KNOWN = {
    "8b": LlamaConfig(hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                      **_LLAMA_3),
    "70b": LlamaConfig(hidden_size=8_192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
                       **_LLAMA_3),
}  # fmt: skip


@dataclass
class PlanArguments:
    """What is planned. Settings of the loop have its names and its defaults, so that its YAML can be planned."""

    model_name_or_path: str = field(
        default="8b",
        metadata={"help": "Hub name, folder, or '8b', '70b' (Llama 3.1's shapes).", "aliases": ["--model"]},
    )
    nodes: int = field(default=1, metadata={"help": "Nodes."})
    gpus: int = field(default=8, metadata={"help": "GPUs per node."})
    gpu_memory: float = field(default=80.0, metadata={"help": "GiB per GPU."})
    gpu_tflops: float = field(default=989.0, metadata={"help": "Peak of a GPU in bfloat16, TFLOPS (H100 SXM: 989)."})
    mfu: float = field(default=0.4, metadata={"help": "Share of the peak that is reached."})
    optim: str = field(default=IterateArguments.optim, metadata={"help": f"Optimizer: {', '.join(OPTIMIZERS)}."})
    use_peft: bool = field(default=IterateArguments.use_peft, metadata={"help": "Train an adapter (lora_parameters)."})
    lora_parameters: int | None = field(default=None, metadata={"help": "Trained parameters, if not all."})
    per_device_train_batch_size: int = field(
        default=IterateArguments.per_device_train_batch_size, metadata={"help": "Rows per GPU and batch."}
    )
    prompt_tokens: int = field(default=1_024, metadata={"help": "Tokens per prompt (the default: 8-shot GSM8K)."})
    max_new_tokens: int = field(default=IterateArguments.max_new_tokens, metadata={"help": "Tokens per completion."})
    gradient_checkpointing: bool = field(
        default=IterateArguments.gradient_checkpointing,
        metadata={"help": "Recompute activations; keep only layer inputs."},
    )
    num_train_problems: int | None = field(
        default=None, metadata={"help": f"Problems per iteration. Default: GSM8K's {GSM8K_PROBLEMS:,}."}
    )
    num_generations: int = field(
        default=IterateArguments.num_generations, metadata={"help": "Completions per problem."}
    )
    curation: str = field(default=IterateArguments.curation, metadata={"help": f"{', '.join(CURATIONS)}."})
    iteration_size: int | None = field(
        default=IterateArguments.iteration_size,
        metadata={"help": "Rows to train on per iteration, at most. Default: that of the curation."},
    )
    vllm_tensor_parallel_size: int = field(
        default=IterateArguments.vllm_tensor_parallel_size, metadata={"help": "GPUs per vLLM engine."}
    )

    def __post_init__(self) -> None:
        check_types(self, PlanArguments)
        counts = ("nodes", "gpus", "per_device_train_batch_size", "prompt_tokens", "max_new_tokens",
                  "num_train_problems", "num_generations", "iteration_size", "vllm_tensor_parallel_size")  # fmt: skip
        check_at_least(1, self, *counts)
        if self.use_peft and self.lora_parameters is None:
            raise ValueError("use_peft: set lora_parameters to the number of trained parameters.")
        if self.gpu_memory <= 0 or self.gpu_tflops <= 0 or not 0 < self.mfu <= 1:
            raise ValueError(
                "gpu_memory and gpu_tflops must be above 0 and mfu in (0, 1], not "
                f"{self.gpu_memory}, {self.gpu_tflops} and {self.mfu}."
            )
        if self.all_gpus % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} does not divide {self.nodes} x "
                f"{self.gpus} GPUs."
            )
        check_choice(self, optim=OPTIMIZERS, curation=CURATIONS)

    @property
    def all_gpus(self) -> int:
        return self.nodes * self.gpus

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens

    @property
    def problems(self) -> int:
        return self.num_train_problems or GSM8K_PROBLEMS

    @property
    def trained_rows(self) -> int:
        """Rows per iteration, at most: how many a rule finds is known when completions have their rewards."""
        sampled = self.problems * self.num_generations
        papers = round(ROWS_PER_PROBLEM * self.problems) if self.curation == "anna_karenina" else sampled
        return min(self.iteration_size or papers, sampled)


def plan_command(args: PlanArguments) -> None:
    """Print what is assumed, and tables of memory and time.

    Raises:
        ValueError: there is no such model, or the rows are longer than its context, so that the trainers refuse them.
    """
    config = _config_of(args.model_name_or_path)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and args.row_tokens > context:
        raise ValueError(
            f"{args.model_name_or_path} reads at most {context:,} tokens, and prompt_tokens + max_new_tokens is "
            f"{args.row_tokens:,}. Plan shorter rows, or name a model with a longer context."
        )
    shape = Shape.of(config)
    print(_heading(args, shape), _memory_table(args, shape), _times(args, shape), sep="\n\n")


def _config_of(model: str) -> PretrainedConfig:
    try:
        return KNOWN.get(model) or AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"There is no model {model!r}: name {' or '.join(KNOWN)}, a folder with a config.json, or a model of "
            "the Hub."
        ) from error


def _heading(args: PlanArguments, shape: Shape) -> str:
    trained = "" if args.lora_parameters is None else f", {args.lora_parameters / 1e6:,.0f} million trained"
    assumed = [f"{f.name}={f.default}" for f in fields(args) if f.default and getattr(args, f.name) == f.default]
    if args.num_train_problems is None:
        assumed.append(f"num_train_problems={GSM8K_PROBLEMS} (GSM8K's)")
    defaults = fill(f"Assumed, as by default: {', '.join(assumed)}", 120)
    return (
        f"{args.model_name_or_path}: {shape.total / 1e9:.2f} billion parameters{trained}; {args.nodes} x {args.gpus} "
        f"GPUs of {args.gpu_memory:g} GiB; {args.per_device_train_batch_size} x {args.row_tokens:,} tokens per GPU; "
        f"{args.optim}; gradient checkpointing {'on' if args.gradient_checkpointing else 'off'}\n"
        f"{defaults}"
    )


def _memory_table(args: PlanArguments, shape: Shape) -> str:
    header = ("GiB per GPU", "weights", "optimizer", "gradients", "buffers", "activations", "step", "peak",
              "log μ pass", "")  # fmt: skip
    tokens, rows = args.per_device_train_batch_size * args.row_tokens, []
    for strategy in STRATEGIES:
        m = memory(
            shape, strategy, args.all_gpus, args.optim, tokens, args.gradient_checkpointing, args.lora_parameters
        )
        parts = (m.weights, m.optimizer, m.gradients, m.buffers, m.activations, m.step, m.total, m.log_mu)
        fits = "fits" if m.total < 0.92 * GIB * args.gpu_memory else "too large"
        if args.optim == "adafactor" and strategy in ("fsdp2", "zero3_offload"):
            fits = "not with adafactor"
        rows.append([strategy, *(f"{part / GIB:.1f}" for part in parts), fits])
    trained = shape.total if args.lora_parameters is None else args.lora_parameters
    host = (16 * trained + 2 * shape.total) / args.nodes / GIB
    align = ("left", *["right"] * (len(header) - 2), "left")
    advice = "" if any(row[-1] == "fits" for row in rows) else fill(f"Nothing fits. {_advice(args)}", 120) + "\n"
    return (
        f"{tabulate(rows, header, disable_numparse=True, colalign=align)}\n{advice}"
        "Peak: weights and optimizer, and the larger of gradients + buffers + activations, and of the step.\n"
        f"zero3_offload: also {host:,.0f} GiB of each node's own memory.\n"
        "fsdp2: with sync_each_batch in accelerator_config; else unsharded gradients are accumulated, "
        f"{2 * trained / GIB:,.1f} GiB."
    )


def _advice(args: PlanArguments) -> str:
    """What would need less memory."""
    steps = {
        f"per_device_train_batch_size=1 (now {args.per_device_train_batch_size})": args.per_device_train_batch_size > 1,
        "gradient_checkpointing": not args.gradient_checkpointing,
        "optim=adamw_torch_fused, with which fsdp2 and zero3_offload can be used": args.optim == "adafactor",
        "more nodes, or GPUs with more memory": True,
        "an adapter (use_peft, lora_parameters)": args.lora_parameters is None,
        "shorter rows": True,
    }
    return f"Less memory is needed with {'; '.join(step for step, helps in steps.items() if helps)}."


def _times(args: PlanArguments, shape: Shape) -> str:
    engine_gpus, weights = args.vllm_tensor_parallel_size, 2 * shape.total
    free = 0.9 * args.gpu_memory * GIB * engine_gpus - weights
    sequences = int(free / (cache_bytes(shape) * args.row_tokens))
    room = f"room for {sequences:,} sequences of {args.row_tokens:,} tokens per engine"
    rate = args.gpu_tflops * 1e12 * args.mfu * args.all_gpus
    row = training_flops(shape, args.row_tokens, args.gradient_checkpointing) / rate
    row_of_log_mu = forward_flops(shape, args.row_tokens) / rate
    step = args.per_device_train_batch_size * args.all_gpus
    completions = args.problems * args.num_generations
    return (
        f"vLLM, {engine_gpus} GPU(s) per engine: weights {weights / engine_gpus / GIB:.1f} GiB per GPU, "
        f"{room if sequences > 0 else 'which does not fit: raise vllm_tensor_parallel_size'}\n"
        f"A step of {step:,} rows: {row * step:.2f} s at {args.mfu:.0%} of the peak\n"
        f"An iteration: {completions:,} completions, {completions * args.max_new_tokens / 1e6:,.0f} million tokens "
        f"sampled; log μ of at most {args.trained_rows:,} rows {args.trained_rows * row_of_log_mu / 3600:.2f} h; "
        f"training {args.trained_rows * row / 3600:.2f} h"
    )
