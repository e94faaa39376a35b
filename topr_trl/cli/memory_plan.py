"""What a run needs: memory of a GPU and time of a step, from a model's configuration, before anything is started."""

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from topr_trl.config import check_types

GIB = 2**30
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")
DEEPSPEED_BUCKET = 500_000_000  # elements that gradients are reduced in, its default
DEEPSPEED_LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps whole, its default
# What an optimiser keeps of a parameter, in bytes; Adafactor's depends on the parameter's shape.
STATE_BYTES = {"adamw_torch": 8, "adamw_torch_fused": 8, "adamw_bnb_8bit": 2, "sgd": 0}
# Shapes that need no download: those of Llama 3.
_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 8_192}
KNOWN = {
    "8b": LlamaConfig(hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                      **_LLAMA_3),
    "70b": LlamaConfig(hidden_size=8_192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
                       **_LLAMA_3),
}  # fmt: skip


@dataclass
class PlanArguments:
    """What is planned. What the loop has, too, is called as it is there, so that its YAML can be planned.

    What a YAML leaves out has the defaults below, which are not the loop's: the plan says what it counts with.

    Parameters:
        model_name_or_path (`str`, defaults to `"8b"`): A name on the Hub, a folder, or `"8b"`, `"70b"` (Llama 3's).
        nodes, gpus (`int`, default to `1` and `8`): Nodes, and GPUs of each.
        gpu_memory (`float`, defaults to `80`): GiB of a GPU.
        gpu_tflops (`float`, defaults to `989`): Its bfloat16 peak, in 10^12 a second (H100 SXM).
        mfu (`float`, defaults to `0.4`): Share of the peak that is reached.
        optim (`str`, defaults to `"adamw_torch_fused"`): Optimiser.
        use_peft (`bool`, defaults to `False`): An adapter is trained, of `lora_parameters`.
        lora_parameters (`int`, *optional*): Trained parameters, if not all.
        per_device_train_batch_size (`int`, defaults to `1`): Rows a GPU holds at once.
        prompt_tokens, max_new_tokens (`int`, default to `1024` and `512`): Of a prompt and a response (8-shot GSM8K).
        gradient_checkpointing (`bool`, defaults to `True`): Keep the borders of layers alone.
        num_train_problems, num_candidates, iteration_size (`int`): Of an iteration; the paper's on GSM8K. Where they
            are `None`, 7,473 problems, and all candidates.
        vllm_tensor_parallel_size (`int`, defaults to `1`): GPUs of a vLLM engine.
    """

    model_name_or_path: str = field(
        default="8b", metadata={"help": "Hub name, folder, or '8b', '70b' (Llama 3's shapes).", "aliases": ["--model"]}
    )
    nodes: int = field(default=1, metadata={"help": "Nodes."})
    gpus: int = field(default=8, metadata={"help": "GPUs of a node."})
    gpu_memory: float = field(default=80.0, metadata={"help": "GiB of a GPU."})
    gpu_tflops: float = field(default=989.0, metadata={"help": "bfloat16 peak of a GPU (H100 SXM: 989)."})
    mfu: float = field(default=0.4, metadata={"help": "Share of the peak that is reached."})
    optim: str = field(default="adamw_torch_fused", metadata={"help": f"{', '.join(STATE_BYTES)} or adafactor."})
    use_peft: bool = field(default=False, metadata={"help": "Train an adapter; see lora_parameters."})
    lora_parameters: int | None = field(default=None, metadata={"help": "Trained parameters, if not all."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows a GPU holds at once."})
    prompt_tokens: int = field(default=1_024, metadata={"help": "Tokens of a prompt."})
    max_new_tokens: int = field(default=512, metadata={"help": "Tokens of a response."})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "Keep the borders of layers alone."})
    num_train_problems: int | None = field(default=7_473, metadata={"help": "Problems of an iteration."})
    num_candidates: int = field(default=16, metadata={"help": "Candidates of a problem."})
    iteration_size: int | None = field(default=50_000, metadata={"help": "Rows trained on in an iteration, at most."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs of a vLLM engine."})

    def __post_init__(self) -> None:
        check_types(self, PlanArguments)
        counts = ("nodes", "gpus", "per_device_train_batch_size", "prompt_tokens", "max_new_tokens",
                  "num_train_problems", "num_candidates", "iteration_size", "vllm_tensor_parallel_size")  # fmt: skip
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        if self.use_peft and self.lora_parameters is None:
            raise ValueError("use_peft: name the number of parameters that are trained with lora_parameters.")
        if self.gpu_memory <= 0 or self.gpu_tflops <= 0 or not 0 < self.mfu <= 1:
            raise ValueError(
                "gpu_memory and gpu_tflops must be above 0 and mfu in (0, 1], not "
                f"{self.gpu_memory}, {self.gpu_tflops} and {self.mfu}."
            )
        if self.gpus * self.nodes % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} does not divide {self.nodes} x "
                f"{self.gpus} GPUs."
            )
        if self.optim not in (*STATE_BYTES, "adafactor"):
            raise ValueError(f"optim must be one of {', '.join(STATE_BYTES)} or adafactor, not {self.optim!r}.")


@dataclass(frozen=True)
class Shape:
    """What of a model its memory depends on: numbers of parameters, and sizes.

    Attributes:
        total: parameters.
        largest: parameters of the largest module without those in it, as DeepSpeed counts; the embedding, mostly.
        block: parameters of a decoder layer.
        factored: elements of Adafactor's state: a row and a column of a matrix, the whole of a vector.
        hidden, intermediate, layers, vocabulary: sizes.
        queries, keys: width of all heads of queries, and of keys.
    """

    total: int
    largest: int
    block: int
    factored: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    queries: int
    keys: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """Of the model on the meta device: nothing is allocated."""
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        text, parameters = config.get_text_config(), list(model.parameters())
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        heads = text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            total=sum(p.numel() for p in parameters),
            largest=max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()),
            block=max((sum(p.numel() for p in layer.parameters()) for layers in lists for layer in layers), default=0),
            factored=sum(
                p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else p.numel() for p in parameters
            ),
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            layers=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            queries=heads * head,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * head,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU that trains. Gradients are accumulated over several batches.

    Attributes:
        weights: as they are stored.
        optimizer: its state, and the float32 weights that it steps on where there are any.
        gradients: as they are accumulated.
        buffers: sharded weights that are whole while they are used, casts, and buckets that gradients are reduced in.
        activations: what backward needs.
        step: while the optimiser steps, gradients in all copies, and what its step needs besides.
        log_mu: the pass over the rows before training, weights included.
    """

    weights: float
    optimizer: float
    gradients: float
    buffers: float
    activations: float
    step: float
    log_mu: float

    @property
    def total(self) -> float:
        """The larger of its two peaks, of backward and of the step."""
        return self.weights + self.optimizer + max(self.gradients + self.buffers + self.activations, self.step)


def memory(
    shape: Shape,
    strategy: str,
    gpus: int,
    optim: str = "adamw_torch_fused",
    tokens: int = 1_536,
    checkpointing: bool = True,
    trained: int | None = None,
    bucket: int = DEEPSPEED_BUCKET,
) -> Memory:
    """Memory of one of `gpus` GPUs in bfloat16 mixed precision.

    DDP and FSDP2 keep float32 weights and cast them while they compute. DeepSpeed keeps bfloat16 weights, and float32
    copies of weights and gradients for its step. It flattens parameters, so that Adafactor has no matrices to factor.
    FSDP2 is counted with `sync_each_batch`: without it, it accumulates gradients that are whole, 2 bytes a parameter.

    Args:
        shape: of the model.
        strategy: one of `STRATEGIES`.
        gpus: of all nodes.
        optim: one of `STATE_BYTES`, or `"adafactor"`.
        tokens: of the rows that a GPU holds at once, padding included.
        checkpointing: whether only the borders of layers are kept for backward.
        trained: parameters that are trained, if not all (LoRA). The others are stored in bfloat16.
        bucket: elements of DeepSpeed's `reduce_bucket_size`, which it allocates whatever the model's size.
    """
    t = float(shape.total if trained is None else trained)
    frozen = shape.total - t
    deepspeed = strategy.startswith("zero")
    shards = 1 if strategy == "ddp" else gpus
    own = t / shards
    factored = optim == "adafactor" and not deepspeed and trained is None
    state = 4 * shape.factored / shards if factored else own * (4 if optim == "adafactor" else STATE_BYTES[optim])
    # Adafactor has two float32 copies of a parameter while it steps on it; AdamW has one of all parameters.
    temporary = {"adafactor": 8 * (own if deepspeed else shape.largest / shards), "adamw_torch": 4 * own}.get(optim, 0)
    activations = tokens * activation_bytes(shape, checkpointing, autocast=strategy == "ddp")
    head = 4.0 * shape.vocabulary * shape.hidden if trained is None else 0.0  # its gradient is summed in float32
    if strategy == "ddp":  # autocast keeps its casts for backward; DDP has buckets as large as the gradients
        buckets = 4 * t if gpus > 1 else 0.0
        weights, gradients, buffers = 4 * t + 2 * frozen, 4 * t, 2 * t + buckets
        step = gradients + buckets + temporary
    elif strategy == "fsdp2":  # the embedding; two layers and one on its way, and so for their gradients
        weights, gradients = (4 * t + 2 * frozen) / gpus, 4 * own
        buffers = 2.0 * shape.largest + 6 * (1 + t / shape.total) * shape.block
        step = gradients + temporary
    else:
        state += 4 * own
        weights = 2.0 * shape.total if strategy in ("zero1", "zero2") else 2.0 * shape.total / gpus
        gradients = 2 * t if strategy == "zero1" else 2 * own
        buffers = 2.0 * bucket
        step = max(8 * own, 6 * own + temporary)  # gradients in bfloat16 and float32, for a moment twice in bfloat16
        if strategy.startswith("zero3"):
            buffers += 2.0 * min(shape.total, DEEPSPEED_LIVE) + 4 * shape.largest
            step = 6 * own + buffers + temporary
        if strategy == "zero3_offload":
            weights = state = gradients = step = 0.0
    layer = tokens * activation_bytes(shape, False, autocast=strategy == "ddp") / shape.layers
    log_mu = weights + (state if deepspeed else 0.0) + buffers + layer
    return Memory(weights, state, gradients, buffers + head, activations, step, log_mu)


def activation_bytes(shape: Shape, checkpointing: bool, autocast: bool) -> float:
    """Bytes a token that backward needs in bfloat16, attention being fused; counted on layers of Llama.

    With bfloat16 weights a layer keeps 16 hidden + 8 intermediate + 4 (queries + keys) bytes; with float32 weights
    under autocast 10 hidden more, since what runs along the layers is float32 then.
    """
    layer = (26 if autocast else 16) * shape.hidden + 8 * shape.intermediate + 4 * (shape.queries + shape.keys)
    border = (4 if autocast else 2) * shape.hidden
    return border * shape.layers + layer if checkpointing else layer * shape.layers


def training_flops(shape: Shape, prompt: int, response: int, checkpointing: bool) -> float:
    """Floating-point operations of a row's forward and backward pass (arXiv 2204.02311, App. B), and recomputation."""
    tokens = prompt + response
    forward = 2 * (shape.total - shape.vocabulary * shape.hidden) * tokens  # looking up an embedding costs nothing
    forward += 2 * shape.layers * shape.queries * tokens**2  # causal attention: half of 4 · width · length²
    return forward * (4 if checkpointing else 3)


def cache_bytes(shape: Shape) -> int:
    """Bytes a token of keys and values in vLLM's cache, bfloat16."""
    return 2 * 2 * shape.layers * shape.keys


def describe(args: PlanArguments) -> str:
    """Tables of memory and time, as text."""
    model, rows, response_tokens = args.model_name_or_path, args.per_device_train_batch_size, args.max_new_tokens
    tensor_parallel = args.vllm_tensor_parallel_size
    candidates = (args.num_train_problems or 7_473) * args.num_candidates
    trained_rows = min(args.iteration_size or candidates, candidates)
    try:
        config = KNOWN.get(model) or AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"There is no model {model!r}: name {' or '.join(KNOWN)}, a folder with a config.json, or a model of "
            "the Hub."
        ) from error
    shape, gpus = Shape.of(config), args.nodes * args.gpus
    length = args.prompt_tokens + response_tokens
    trained = "" if args.lora_parameters is None else f", {args.lora_parameters / 1e6:,.0f} million trained"
    lines = [
        f"{model}: {shape.total / 1e9:.2f} billion parameters{trained}; {args.nodes} x {args.gpus} GPUs of "
        f"{args.gpu_memory:g} GiB; {rows} x {length:,} tokens a GPU; {args.optim}; gradient checkpointing "
        f"{'on' if args.gradient_checkpointing else 'off'}",
        "",
        f"{'GiB a GPU':<15}"
        + "".join(
            f"{n:>12}"
            for n in ("weights", "optimiser", "gradients", "buffers", "activations", "step", "peak", "log μ pass")
        ),
        "─" * 123,
    ]
    for strategy in STRATEGIES:
        m = memory(
            shape,
            strategy,
            gpus,
            args.optim,
            rows * length,
            args.gradient_checkpointing,
            args.lora_parameters,
        )
        parts = (m.weights, m.optimizer, m.gradients, m.buffers, m.activations, m.step, m.total, m.log_mu)
        fits = "fits" if m.total < 0.92 * GIB * args.gpu_memory else "too large"
        if args.optim == "adafactor" and strategy in ("fsdp2", "zero3_offload"):
            fits = "not with adafactor"
        lines.append(f"{strategy:<15}" + "".join(f"{x / GIB:>12.1f}" for x in parts) + f"   {fits}")
    trained_parameters = shape.total if args.lora_parameters is None else args.lora_parameters
    host = (16 * trained_parameters + 2 * shape.total) / args.nodes / GIB
    whole = 2 * trained_parameters / GIB
    lines += [
        "Peak: weights and optimiser, and the larger of gradients + buffers + activations, and of the step.",
        f"zero3_offload: and {host:,.0f} GiB of a node's own memory.",
        f"fsdp2: with sync_each_batch in accelerator_config; else gradients are accumulated whole, {whole:,.1f} GiB.",
    ]
    engine = args.gpu_memory * GIB * 0.9 - 2 * shape.total / tensor_parallel
    sequences = max(int(engine * tensor_parallel / (cache_bytes(shape) * length)), 0)
    peak = args.gpu_tflops * 1e12 * args.mfu * gpus
    row = training_flops(shape, args.prompt_tokens, response_tokens, args.gradient_checkpointing)
    forward = training_flops(shape, args.prompt_tokens, response_tokens, False) / 3
    hours = trained_rows * row / peak / 3600
    lines += [
        "",
        f"vLLM, {tensor_parallel} GPU(s) an engine: weights "
        f"{2 * shape.total / tensor_parallel / GIB:.1f} GiB a GPU, "
        + (
            f"room for {sequences:,} sequences of {length:,} tokens an engine"
            if sequences
            else "which does not fit: raise vllm_tensor_parallel_size"
        ),
        f"A step of {rows * gpus:,} rows: {row * rows * gpus / peak:.2f} s at {args.mfu:.0%} of the peak",
        f"An iteration: {candidates:,} candidates, {candidates * response_tokens / 1e6:,.0f} million tokens sampled; "
        "log μ of at most "
        f"{trained_rows:,} rows {trained_rows * forward / peak / 3600:.2f} h; training {hours:.2f} h",
    ]
    return "\n".join(lines)
