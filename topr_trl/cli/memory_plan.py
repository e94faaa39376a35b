"""Run `topr plan`, which estimates GPU memory and the times of sampling and training without loading a model."""

from dataclasses import dataclass, field
from inspect import get_annotations
from textwrap import fill
from typing import Any, get_type_hints

from tabulate import tabulate
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from topr_trl.cli.memory_estimate import (
    GIB,
    STATE_BYTES,
    STRATEGIES,
    Memory,
    Shape,
    cache_bytes,
    decoding_seconds,
    forward_flops,
    memory,
    training_flops,
)
from topr_trl.curation import REPEATING, ROWS_PER_PROBLEM
from topr_trl.pipeline.settings import IterateArguments
from topr_trl.settings.checks import check_at_least, check_choice, check_model_folder, check_types

GSM8K_TESTS = 1_319
GSM8K_PROBLEMS = 7_473  # default, because the size of a dataset is unknown before it is loaded
OPTIMIZERS = (*STATE_BYTES, "adafactor")
# Model configurations that need no download: Llama 3.1 (8b, 70b) and Qwen3 (14b). Llama 3 has the same sizes as
# Llama 3.1, but a context of 8,192 tokens.
_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
KNOWN = {
    "8b": LlamaConfig(hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                      **_LLAMA_3),
    "14b": Qwen3Config(vocab_size=151_936, hidden_size=5_120, intermediate_size=17_408, num_hidden_layers=40,
                       num_attention_heads=40, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960),
    "70b": LlamaConfig(hidden_size=8_192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
                       **_LLAMA_3),
}  # fmt: skip


@dataclass
class PlanArguments(IterateArguments):
    """Settings of `topr plan`: the settings of the loop in `PLAN_SETTINGS`, and the settings of the machines.

    The command also accepts the YAML file of `topr iterate`, and ignores settings that are not in `PLAN_SETTINGS`.
    """

    model_name_or_path: str = field(
        default="8b",
        metadata={"help": "Hub name, folder, or '8b', '70b' (Llama 3.1), '14b' (Qwen3).", "aliases": ["--model"]},
    )
    nodes: int = field(default=1, metadata={"help": "Number of nodes."})
    gpus: int = field(default=8, metadata={"help": "Number of GPUs per node."})
    gpu_memory: float = field(default=80.0, metadata={"help": "Memory of a GPU in GiB."})
    gpu_tflops: float = field(default=989.0, metadata={"help": "Peak TFLOPS of a GPU in bfloat16 (H100 SXM: 989)."})
    mfu: float = field(default=0.4, metadata={"help": "Share of the peak TFLOPS that a GPU reaches."})
    gpu_bandwidth: float = field(default=3.35, metadata={"help": "Memory bandwidth of a GPU in TB/s (H100 SXM: 3.35)."})
    mbu: float = field(default=0.6, metadata={"help": "Share of the bandwidth that sampling reaches."})
    lora_parameters: int | None = field(default=None, metadata={"help": "Number of trained parameters. Default: all."})
    prompt_tokens: int = field(
        default=1_024, metadata={"help": "Number of tokens per prompt. The default is for 8-shot GSM8K."}
    )
    gradient_checkpointing: bool = field(  # transformers 6 will remove this setting
        default=True, metadata={"help": "Keep only the inputs of layers, and recompute other activations."}
    )
    num_train_problems: int | None = field(
        default=None, metadata={"help": f"Number of problems per iteration. Default: GSM8K's {GSM8K_PROBLEMS:,}."}
    )
    num_test_problems: int | None = field(
        default=None, metadata={"help": f"Number of test problems. Default: GSM8K's {GSM8K_TESTS:,}."}
    )

    def __post_init__(self) -> None:
        check_types(self, PlanArguments, but=set(get_type_hints(PlanArguments)) - set(PLAN_SETTINGS))
        counts = ("nodes", "gpus", "per_device_train_batch_size", "prompt_tokens", "max_new_tokens",
                  "num_train_problems", "num_generations", "iteration_size", "vllm_tensor_parallel_size",
                  "num_generations_eval")  # fmt: skip
        check_at_least(1, self, *counts)
        check_at_least(0, self, "overlap", "num_test_problems")
        if self.use_peft and self.lora_parameters is None:
            raise ValueError("use_peft: set lora_parameters to the number of trained parameters.")
        if self.load_in_4bit and not self.use_peft:
            raise ValueError("load_in_4bit: weights in 4 bits cannot be trained. Set use_peft to train an adapter.")
        for name in ("gpu_memory", "gpu_tflops", "gpu_bandwidth"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        for name in ("mfu", "mbu"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)}.")
        if self.all_gpus % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} does not divide the number of "
                f"GPUs, {self.nodes} x {self.gpus}. Set it to a divisor."
            )
        if self.overlap and self.gpus % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} does not divide the {self.gpus} GPUs of a "
                "node. With overlap, each node must hold whole engines. Set it to a divisor."
            )
        check_choice(self, optim=OPTIMIZERS)
        self.validate_curation()

    @property
    def all_gpus(self) -> int:
        """Return the number of GPUs on all nodes."""
        return self.nodes * self.gpus

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the sharding strategies to plan for. With 4-bit weights, return only DDP: the rest are untested."""
        return STRATEGIES[:1] if self.load_in_4bit else STRATEGIES

    def memory(self, shape: Shape, strategy: str, gpus: int) -> Memory:
        """Estimate the memory of each GPU if `gpus` GPUs train with these settings."""
        tokens = self.per_device_train_batch_size * self.row_tokens
        return memory(
            shape, strategy, gpus, self.optim, tokens, self.gradient_checkpointing, self.lora_parameters,
            four_bit=self.load_in_4bit,
        )  # fmt: skip

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens in a row: the prompt and the longest completion."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def problems(self) -> int:
        """Return the number of problems per iteration."""
        return self.num_train_problems or GSM8K_PROBLEMS

    @property
    def completions(self) -> tuple[int, int]:
        """Return the number of completions per iteration for the problems, and for the test problems."""
        tested = GSM8K_TESTS if self.num_test_problems is None else self.num_test_problems
        return self.problems * self.num_generations, tested * (self.num_generations_eval + self.greedy)

    @property
    def trained_rows(self) -> int:
        """Return the maximum number of trained rows per iteration. The exact number depends on the rewards."""
        sampled = self.problems * self.num_generations
        if self.curation in REPEATING:
            return self.iteration_size or sampled
        largest = round(ROWS_PER_PROBLEM * self.problems) if self.curation == "anna_karenina" else sampled
        return min(self.iteration_size or largest, sampled)


PLAN_SETTINGS = (
    *get_annotations(PlanArguments), "optim", "use_peft", "load_in_4bit", "per_device_train_batch_size",
    "max_new_tokens", "num_generations", "curation", "iteration_size", "num_generations_eval", "greedy", "overlap",
    "vllm_tensor_parallel_size",
)  # fmt: skip


def plan_command(args: PlanArguments) -> None:
    """Print the settings, a table of memory, and estimates of time.

    With `overlap`, also print a table of ways to divide the GPUs.

    Args:
        args (`PlanArguments`): Settings of the command.

    Raises:
        ValueError: the model does not exist, there is no estimate for its type, or its context is shorter than a row.
        FileNotFoundError: there is no such folder.
    """
    config = _load_config(args.model_name_or_path)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and args.row_tokens > context:
        raise ValueError(
            f"{args.model_name_or_path} reads at most {context:,} tokens, and prompt_tokens + max_new_tokens is "
            f"{args.row_tokens:,}. Plan shorter rows, or a model with a longer context."
        )
    shape = Shape.of(config)
    parts = [_describe_settings(args, shape), _memory_table(args, shape), _describe_times(args, shape)]
    print(*parts, *([_describe_divisions(args, shape)] if args.overlap else []), sep="\n\n")


def _load_config(model: str) -> PretrainedConfig:
    if model in KNOWN:
        return KNOWN[model]
    check_model_folder(model)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"There is no model {model!r}, or its config cannot be read. Use one of {', '.join(KNOWN)}, a folder with "
            "a config.json, or a model on the Hub that you can read."
        ) from error


def _describe_settings(args: PlanArguments, shape: Shape) -> str:
    trained = "" if args.lora_parameters is None else f", {args.lora_parameters / 1e6:,.0f} million trained"
    trained += ", linear layers in 4 bits" * args.load_in_4bit
    defaults = {name: getattr(PlanArguments, name) for name in PLAN_SETTINGS}
    assumed = [f"{name}={value}" for name, value in defaults.items() if value and getattr(args, name) == value]
    if args.num_train_problems is None:
        assumed.append(f"num_train_problems={GSM8K_PROBLEMS} (GSM8K)")
    return (
        f"{args.model_name_or_path}: {shape.total / 1e9:.2f} billion parameters{trained}; {args.nodes} x {args.gpus} "
        f"GPUs of {args.gpu_memory:g} GiB; {args.per_device_train_batch_size} x {args.row_tokens:,} tokens per GPU; "
        f"{args.optim}; gradient checkpointing {'on' if args.gradient_checkpointing else 'off'}\n"
        + fill(f"Defaults: {', '.join(assumed)}", 120)
    )


def _memory_table(args: PlanArguments, shape: Shape) -> str:
    header = ("GiB per GPU", "weights", "optimizer", "gradients", "buffers", "activations", "step", "peak",
              "log μ pass", "")  # fmt: skip
    rows = []
    for strategy in args.strategies:
        m = args.memory(shape, strategy, args.all_gpus)
        parts = (m.weights, m.optimizer, m.gradients, m.buffers, m.activations, m.step, m.total, m.log_mu)
        fits = "fits" if m.total < _usable_bytes(args) else "too large"
        if not _supports_optimizer(strategy, args.optim):
            fits = f"not with {args.optim}"
        rows.append([strategy, *(f"{part / GIB:.1f}" for part in parts), fits])
    trained = shape.total if args.lora_parameters is None else args.lora_parameters
    host = (16 * trained + 2 * shape.total) / args.nodes / GIB
    align = ("left", *["right"] * (len(header) - 2), "left")
    advice = (
        "" if any(row[-1] == "fits" for row in rows) else fill(f"Nothing fits. {_advise_less_memory(args)}", 120) + "\n"
    )
    table = (
        f"{tabulate(rows, header, disable_numparse=True, colalign=align)}\n{advice}"
        "Peak: weights + optimizer + the larger of (gradients + buffers + activations) and step.\n"
    )
    if args.load_in_4bit:
        return f"{table}FSDP2 and ZeRO have not been tested with load_in_4bit."
    return (
        f"{table}zero3_offload: each node also needs {host:,.0f} GiB of host memory.\n"
        "fsdp2: set sync_each_batch in accelerator_config. Without it, each GPU accumulates unsharded gradients, "
        f"{2 * trained / GIB:,.1f} GiB."
    )


def _advise_less_memory(args: PlanArguments) -> str:
    """Return a sentence with settings that need less memory."""
    steps = {
        f"per_device_train_batch_size=1 (now {args.per_device_train_batch_size})": args.per_device_train_batch_size > 1,
        "gradient_checkpointing": not args.gradient_checkpointing,
        "optim=adamw_torch, which fsdp2 and zero3_offload support": args.optim == "adafactor",
        "more nodes, or GPUs with more memory": True,
        "an adapter (use_peft, lora_parameters)": args.lora_parameters is None,
        "load_in_4bit": args.use_peft and not args.load_in_4bit,
        "shorter rows": True,
    }
    return f"Less memory is needed with {'; '.join(step for step, helps in steps.items() if helps)}."


def _describe_times(args: PlanArguments, shape: Shape) -> str:
    engine_gpus, weights = args.vllm_tensor_parallel_size, 2 * shape.total
    sequences = _sequences_per_engine(args, shape)
    room = f"room for {sequences:,} sequences of {args.row_tokens:,} tokens per engine"
    step = args.per_device_train_batch_size * args.all_gpus
    completions, tested = args.completions
    sampling, log_mu, training = _hours(args, shape, args.all_gpus, completions)
    lines = [
        f"vLLM, {engine_gpus} {'GPU' if engine_gpus == 1 else 'GPUs'} per engine: weights "
        f"{weights / engine_gpus / GIB:.1f} GiB per GPU, "
        f"{room if sequences > 0 else 'which does not fit: raise vllm_tensor_parallel_size'}",
        f"A step of {step:,} rows: {training * 3600 * step / args.trained_rows:.2f} s at {args.mfu:.0%} of the peak",
        f"An iteration: {completions:,} completions, {completions * args.max_new_tokens / 1e6:,.0f} million tokens "
        f"sampled; log μ of at most {args.trained_rows:,} rows {log_mu:.2f} h; "
        f"training {training:.2f} h",
    ]
    if sequences > 0:
        lines.append(
            f"Sampling at {args.mbu:.0%} of the bandwidth, all completions of full length: {sampling:.2f} h, and "
            f"{_hours(args, shape, args.all_gpus, tested)[0]:.2f} h for {tested:,} test completions"
        )
    return "\n".join(lines)


def _describe_divisions(args: PlanArguments, shape: Shape) -> str:
    """Return a table of ways to divide the GPUs between sampling and training. The table shows waiting times."""
    if _sequences_per_engine(args, shape) <= 0:
        return "Sampling does not fit, so no division of the GPUs can be planned."
    # Divide a single node into whole engines, and several nodes into whole nodes.
    unit = args.vllm_tensor_parallel_size if args.nodes == 1 else args.gpus
    found = {
        n: _hours_of_sides(args, shape, n, args.all_gpus - n)
        for n in range(unit, args.all_gpus, unit)
        if _fits_divided(args, shape, n, args.all_gpus - n)
    }
    if not found:
        return (
            f"The GPUs ({args.all_gpus}) cannot be divided so that an engine "
            f"(vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}) and log μ fit on one side, and training on "
            "the other."
        )
    best = min(found, key=lambda n: max(found[n]))
    near = [n for n in found if abs(n - best) <= 3 * unit]
    rows = [
        [f"{args.all_gpus - n} + {n}" + (" *" if n == best else ""), f"{sampling:.2f}", f"{training:.2f}",
         f"{max(sampling, training):.2f}",
         f"{'training' if sampling > training else 'sampling'} waits {abs(sampling - training):.2f}"]
        for n in near for sampling, training in [found[n]]
    ]  # fmt: skip
    turns = sum(_hours_of_sides(args, shape, args.all_gpus, args.all_gpus))
    table = tabulate(rows, ("GPUs: sampling + training", "sampling, log μ, test", "training", "iteration, hours", ""),
                     disable_numparse=True, colalign=("left", "right", "right", "right", "left"))  # fmt: skip
    ends = fill(
        f"* marks the best division. Without overlap, both sides take turns on all GPUs: {turns:.2f} hours, plus the "
        "time to start processes and engines, which overlap hides. If both sides scale as assumed here, overlap saves "
        "only this start time. If one side cannot use the GPUs of the other, overlap saves up to half of the time.",
        120,
    )
    return f"{table}\n{ends}"


def _usable_bytes(args: PlanArguments) -> float:
    """Return the usable bytes of a GPU. CUDA, NCCL and fragmentation take about 8% of its memory."""
    return 0.92 * GIB * args.gpu_memory


def _supports_optimizer(strategy: str, optim: str) -> bool:
    """Whether an optimizer works with a sharding strategy (see `topr_trl.settings.unsupported.refuse_adafactor`)."""
    return optim != "adafactor" or strategy not in ("fsdp2", "zero3_offload")


def _fits_divided(args: PlanArguments, shape: Shape, training_gpus: int, sampling_gpus: int) -> bool:
    """Whether training fits on the training GPUs, and the log μ pass on the sampling GPUs, without offloading."""

    def by_strategy(gpus: int) -> list[Memory]:
        # Offloading nearly always fits, but the time estimates do not apply to it.
        strategies = [s for s in args.strategies if s != "zero3_offload" and _supports_optimizer(s, args.optim)]
        return [args.memory(shape, s, gpus) for s in strategies]

    most = _usable_bytes(args)
    return any(m.total < most for m in by_strategy(training_gpus)) and any(
        m.log_mu < most for m in by_strategy(sampling_gpus)
    )


def _hours_of_sides(args: PlanArguments, shape: Shape, training: int, sampling: int) -> tuple[float, float]:
    """Return the hours per iteration of the two sides: sampling with log μ and tests, and training."""
    hours = _hours(args, shape, sampling, sum(args.completions))
    return hours[0] + hours[1], _hours(args, shape, training, 0)[2]


def _sequences_per_engine(args: PlanArguments, shape: Shape) -> int:
    """Return the number of full-length sequences that fit in an engine's cache, or a number below 1 if none fits."""
    # 0.9 is the default of vllm_gpu_memory_utilization.
    free = 0.9 * args.gpu_memory * GIB * args.vllm_tensor_parallel_size - 2 * shape.total
    return int(free / (cache_bytes(shape) * args.row_tokens))


def _hours(args: PlanArguments, shape: Shape, gpus: int, completions: int) -> tuple[float, float, float]:
    """Return the hours that GPUs need to sample the completions, to compute log μ, and to train.

    The hours of sampling are 0 if there are no completions, or if an engine has no room for a sequence.
    """
    flops, engine_gpus = args.gpu_tflops * 1e12 * args.mfu, args.vllm_tensor_parallel_size
    rows = args.trained_rows / (flops * gpus) / 3600
    log_mu = rows * forward_flops(shape, args.row_tokens)
    training = rows * training_flops(shape, args.row_tokens, args.gradient_checkpointing)
    sequences = min(_sequences_per_engine(args, shape), -(-completions * engine_gpus // gpus))
    if sequences <= 0:
        return 0.0, log_mu, training
    seconds = decoding_seconds(
        shape, sequences, args.prompt_tokens + args.max_new_tokens / 2,
        args.gpu_bandwidth * 1e12 * args.mbu * engine_gpus, flops * engine_gpus,
    )  # fmt: skip
    return completions / sequences * args.max_new_tokens * seconds / (gpus / engine_gpus) / 3600, log_mu, training
