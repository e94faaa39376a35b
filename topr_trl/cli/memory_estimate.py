"""Memory of a GPU and operations of a step, computed from the shape of a model."""

from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig

GIB = 2**30
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")
DEEPSPEED_BUCKET = 500_000_000  # elements per bucket of gradients, its default
DEEPSPEED_LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps whole, its default
# Bytes of a parameter in 4 bits: half a byte, and a float32 scale for each block of 64.
FOUR_BIT = 0.5 + 4 / 64
# State of an optimizer in bytes per parameter; Adafactor's depends on the parameter's shape.
STATE_BYTES = {
    "adamw_torch": 8, "adamw_torch_fused": 8, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "adamw_torch_8bit": 2,
    "sgd": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Numbers of parameters and sizes of a model, on which its memory depends."""

    total: int  # parameters
    largest: int  # those of the largest module without its submodules, as DeepSpeed counts; mostly the embedding
    block: int  # those of a decoder layer
    factored: int  # elements of Adafactor's state: one row and one column of a matrix, a vector in full
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    queries: int  # width of all query heads
    keys: int  # width of all key heads
    linear: int = 0  # parameters of linear layers without the head, which QLoRA stores in 4 bits
    is_tied: bool = False  # the head is the embedding

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """The shape of a model, built on the meta device: nothing is allocated."""
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # they came apart on the meta device
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
            linear=sum(
                module.weight.numel()
                for module in model.modules()
                if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
            ),
            is_tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU that trains, with gradients accumulated over several batches."""

    weights: float  # as they are stored
    optimizer: float  # its state, and its own float32 weights where it keeps some
    gradients: float  # as they are accumulated
    buffers: float  # sharded weights gathered for use, casts, and buckets for reducing gradients
    activations: float  # what backward needs
    step: float  # all copies of gradients while the optimizer steps, and the step's temporary tensors
    log_mu: float  # the pass over the rows that computes log μ before training, weights included

    @property
    def total(self) -> float:
        """The larger of two peaks: during backward and during the optimizer step."""
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
    four_bit: bool = False,
) -> Memory:
    """Memory of one of `gpus` GPUs in bfloat16 mixed precision.

    DDP and FSDP2 keep float32 weights and cast them for computing. DeepSpeed keeps bfloat16 weights, and float32
    copies of weights and gradients for its step. It flattens parameters, so Adafactor has no matrices to factor.
    FSDP2 is counted with `sync_each_batch`: without it, it accumulates unsharded gradients, 2 bytes per parameter.

    Args:
        strategy: one of `STRATEGIES`.
        gpus: on all nodes.
        optim: one of `STATE_BYTES`, or `"adafactor"`.
        tokens: of the rows of one batch on one GPU, padding included.
        checkpointing: whether activations are recomputed, and only the inputs of layers kept.
        trained: number of trained parameters, if not all (LoRA). The others are stored in bfloat16.
        bucket: DeepSpeed's `reduce_bucket_size` in elements, allocated whatever the size of the model.
        four_bit: whether the frozen linear layers are stored in 4 bits (QLoRA).
    """
    t = float(shape.total if trained is None else trained)
    frozen_bytes = 2.0 * (shape.total - t)
    if four_bit:
        frozen_bytes -= (2 - FOUR_BIT) * shape.linear
    deepspeed = strategy.startswith("zero")
    shards = 1 if strategy == "ddp" else gpus
    own = t / shards
    factored = optim == "adafactor" and not deepspeed and trained is None
    state = 4 * shape.factored / shards if factored else own * (4 if optim == "adafactor" else STATE_BYTES[optim])
    # Adafactor has two float32 copies of a parameter while it steps on it; AdamW has one of all parameters.
    largest = min(own, shape.largest / shards)
    temporary = {"adafactor": 8 * (own if deepspeed else largest), "adamw_torch": 4 * own}.get(optim, 0)
    activations = tokens * activation_bytes(shape, checkpointing, autocast=strategy == "ddp")
    head = 4.0 * shape.vocabulary * shape.hidden if trained is None else 0.0  # its gradient is summed in float32
    if strategy == "ddp":  # autocast keeps its casts for backward; DDP's buckets are as large as the gradients
        buckets = 4 * t if gpus > 1 else 0.0
        weights, gradients, buffers = 4 * t + frozen_bytes, 4 * t, 2 * t + buckets
        step = gradients + buckets + temporary
    elif strategy == "fsdp2":  # the embedding; two layers and one being fetched, and their gradients
        weights, gradients = (4 * t + frozen_bytes) / gpus, 4 * own
        buffers = 2.0 * shape.largest + 6 * (1 + t / shape.total) * shape.block
        step = gradients + temporary
    else:
        state += 4 * own
        weights = (2 * t + frozen_bytes) / (1 if strategy in ("zero1", "zero2") else gpus)
        gradients = 2 * t if strategy == "zero1" else 2 * own
        buffers = 2.0 * bucket
        step = max(8 * own, 6 * own + temporary)  # gradients in bfloat16 and float32, briefly twice in bfloat16
        if strategy.startswith("zero3"):
            buffers += 2.0 * min(shape.total, DEEPSPEED_LIVE) + 4 * shape.largest
            step = 6 * own + buffers + temporary
        if strategy == "zero3_offload":
            weights = state = gradients = step = 0.0
    if four_bit:  # a matrix in bfloat16, while it is used
        buffers += 2.0 * shape.hidden * shape.intermediate
    layer = tokens * activation_bytes(shape, False, autocast=strategy == "ddp") / shape.layers
    log_mu = weights + (state if deepspeed else 0.0) + buffers + layer
    return Memory(weights, state, gradients, buffers + head, activations, step, log_mu)


def activation_bytes(shape: Shape, checkpointing: bool, autocast: bool) -> float:
    """Bytes per token that backward needs in bfloat16 with fused attention, counted on layers of Llama.

    With bfloat16 weights a layer keeps 16 hidden + 8 intermediate + 4 (queries + keys) bytes; with float32 weights
    under autocast 10 hidden more, since the residual stream is float32 then.
    """
    layer = (26 if autocast else 16) * shape.hidden + 8 * shape.intermediate + 4 * (shape.queries + shape.keys)
    layer_input = (4 if autocast else 2) * shape.hidden
    return layer_input * shape.layers + layer if checkpointing else layer * shape.layers


def forward_flops(shape: Shape, tokens: int) -> float:
    """Floating-point operations of a forward pass over one row (arXiv 2204.02311, App. B)."""
    looked_up = 0 if shape.is_tied else shape.vocabulary * shape.hidden  # that costs nothing
    weights = 2 * (shape.total - looked_up) * tokens
    return weights + 2 * shape.layers * shape.queries * tokens**2  # causal attention: half of 4 · width · length²


def training_flops(shape: Shape, tokens: int, checkpointing: bool) -> float:
    """Floating-point operations of one row's forward and backward pass, and of recomputation."""
    return forward_flops(shape, tokens) * (4 if checkpointing else 3)


def decoding_seconds(shape: Shape, sequences: int, tokens: float, bandwidth: float, flops: float) -> float:
    """Seconds in which an engine adds a token to each of its sequences: it reads weights and cache, and multiplies.

    Args:
        sequences: that it writes at the same time.
        tokens: in the cache of each, on average.
        bandwidth, flops: bytes and floating-point operations in a second, those that are reached, of all its GPUs.
    """
    read = 2 * shape.total + sequences * tokens * cache_bytes(shape)
    return max(read / bandwidth, 2 * shape.total * sequences / flops)


def cache_bytes(shape: Shape) -> int:
    """Bytes per token of keys and values in vLLM's cache, bfloat16."""
    return 2 * 2 * shape.layers * shape.keys
