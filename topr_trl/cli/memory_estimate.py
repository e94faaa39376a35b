"""Estimate GPU memory, floating-point operations and decoding time from the shape of a model."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

GIB = 2**30
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")
DEEPSPEED_BUCKET = 500_000_000  # DeepSpeed's default number of elements in a bucket of gradients
DEEPSPEED_LIVE = 1_000_000_000  # DeepSpeed's default maximum number of parameters that ZeRO-3 keeps gathered
# Names of the width of the feed-forward layers. Without any of these names, 4 times `hidden_size` is assumed.
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
# Bytes per parameter in 4 bits: half a byte, and one float32 scale per block of 64 parameters.
FOUR_BIT = 0.5 + 4 / 64
# Optimizer state in bytes per parameter. Adafactor is not listed, because its state depends on parameter shapes.
STATE_BYTES = {
    "adamw_torch": 8, "adamw_torch_fused": 8, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "adamw_torch_8bit": 2,
    "sgd": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Parameter counts and sizes of a model that determine its memory.

    Attributes:
        total (`int`): Number of parameters.
        largest (`int`): Number of parameters of the largest module, usually the embedding. As in DeepSpeed, the
            parameters of submodules do not count.
        block (`int`): Number of parameters of the largest decoder layer.
        factored (`int`): Number of elements of Adafactor's state. A matrix needs one row and one column, and a vector
            needs all its elements.
        hidden (`int`): Width of the hidden states.
        intermediate (`int`): Width of the feed-forward layers.
        layers (`int`): Number of decoder layers.
        vocabulary (`int`): Number of tokens in the vocabulary.
        queries (`int`): Total width of the query heads.
        keys (`int`): Total width of the key heads.
        linear (`int`, defaults to `0`): Number of parameters of the linear layers, except the output layer. QLoRA
            stores them in 4 bits.
        is_tied (`bool`, defaults to `False`): Whether the output layer shares the weights of the embedding.
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
    linear: int = 0
    is_tied: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """Return the shape of a model. The model is built on the meta device, which allocates no memory.

        Raises:
            ValueError: the config has no `num_attention_heads` or no `hidden_size`.
        """
        text = config.get_text_config()
        heads, hidden = _largest(text, "num_attention_heads"), _largest(text, "hidden_size")
        if not heads or not hidden:
            raise ValueError(
                f"topr plan has no estimate for models of type {config.model_type}: their config has no "
                "num_attention_heads or no hidden_size. Measure one step, or plan a similar model."
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # transformers 5.0 does not tie weights on the meta device.
        parameters = list(model.parameters())
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        head = _largest(text, "head_dim") or hidden // heads
        key_heads = _largest(text, "num_key_value_heads") or _largest(text, "num_kv_heads") or heads
        if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
            key_heads = 1  # Falcon 7B
        intermediate = next((size for name in _INTERMEDIATE if (size := _largest(text, name))), 4 * hidden)
        return cls(
            total=sum(p.numel() for p in parameters),
            largest=max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()),
            block=max((sum(p.numel() for p in layer.parameters()) for layers in lists for layer in layers), default=0),
            factored=sum(
                p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else p.numel() for p in parameters
            ),
            hidden=hidden,
            intermediate=intermediate,
            layers=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            queries=heads * head,
            keys=key_heads * head,
            linear=sum(
                module.weight.numel()
                for module in model.modules()
                if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
            ),
            is_tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        )


def _largest(config: PretrainedConfig, name: str) -> int | None:
    """Return a size of a model, or the largest one if layers differ. Return None if the config has no such size."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # Layers differ (Gemma 4).
        return max(getattr(layer, name) for layer in config.per_layer_config)


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one GPU during training, in bytes.

    The estimate assumes that gradients are accumulated over several batches.

    Attributes:
        weights (`float`): Stored weights.
        optimizer (`float`): Optimizer state, and the optimizer's float32 copy of the weights if it has one.
        gradients (`float`): Accumulated gradients.
        buffers (`float`): Gathered weights, bfloat16 copies of float32 weights, buckets for reducing gradients, and
            the float32 gradient of the output layer.
        activations (`float`): Activations that the backward pass needs.
        step (`float`): Gradients, their copies, buffers and temporary tensors during the optimizer step.
        log_mu (`float`): Memory of the pass that computes log μ before training, including weights.
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
        """Return the peak memory, which is reached in the backward pass or in the optimizer step."""
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
    """Estimate the memory of each GPU in bfloat16 mixed precision.

    DDP and FSDP2 keep float32 weights and cast them for computation. DeepSpeed keeps bfloat16 weights, and float32
    copies of weights and gradients for its step. DeepSpeed flattens parameters, so Adafactor has no matrices to factor.
    With `zero3_offload`, the GPU holds only buffers and activations. The estimate for FSDP2 assumes `sync_each_batch`.
    Without this setting, FSDP2 accumulates unsharded gradients, which take 2 bytes per trained parameter.

    Args:
        shape (`Shape`): Shape of the model.
        strategy (`str`): One of `STRATEGIES`.
        gpus (`int`): Number of GPUs on all nodes.
        optim (`str`, defaults to `"adamw_torch_fused"`): One of `STATE_BYTES`, or `"adafactor"`.
        tokens (`int`, defaults to `1536`): Number of tokens in one batch on one GPU, including padding.
        checkpointing (`bool`, defaults to `True`): Whether to keep only the inputs of layers, and recompute the other
            activations.
        trained (`int`, *optional*): Number of trained parameters (LoRA). The frozen parameters are stored in bfloat16,
            or in 4 bits with `four_bit`. `None` means that all parameters are trained.
        bucket (`int`, defaults to `DEEPSPEED_BUCKET`): DeepSpeed's `reduce_bucket_size` in elements. DeepSpeed
            allocates the full bucket even for a small model.
        four_bit (`bool`, defaults to `False`): Whether the frozen linear layers are stored in 4 bits (QLoRA).

    Returns:
        [`Memory`]: the estimate.
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
    # Temporary float32 tensors in the optimizer step. Adafactor needs two copies of the largest parameter, or of all
    # parameters if DeepSpeed flattens them. adamw_torch needs one copy of all parameters.
    largest = min(own, shape.largest / shards)
    temporary = {"adafactor": 8 * (own if deepspeed else largest), "adamw_torch": 4 * own}.get(optim, 0)
    activations = tokens * activation_bytes(shape, checkpointing, autocast=strategy == "ddp")
    head = 4.0 * shape.vocabulary * shape.hidden if trained is None else 0.0  # float32 gradient of the output layer
    if strategy == "ddp":  # Autocast keeps bfloat16 copies. DDP's buckets are as large as the gradients.
        buckets = 4 * t if gpus > 1 else 0.0
        weights, gradients, buffers = 4 * t + frozen_bytes, 4 * t, 2 * t + buckets
        step = gradients + buckets + temporary
    elif strategy == "fsdp2":  # Buffers: the embedding, and three layers (one is prefetched) with their gradients.
        weights, gradients = (4 * t + frozen_bytes) / gpus, 4 * own
        buffers = 2.0 * shape.largest + 6 * (1 + t / shape.total) * shape.block
        step = gradients + temporary
    else:
        state += 4 * own
        weights = (2 * t + frozen_bytes) / (1 if strategy in ("zero1", "zero2") else gpus)
        gradients = 2 * t if strategy == "zero1" else 2 * own
        buffers = 2.0 * bucket
        # Bytes per parameter: 6 for float32 and bfloat16 gradients, and for a short time 2 for another bfloat16 copy.
        step = max(8 * own, 6 * own + temporary)
        if strategy.startswith("zero3"):
            buffers += 2.0 * min(shape.total, DEEPSPEED_LIVE) + 4 * shape.largest
            step = 6 * own + buffers + temporary
        if strategy == "zero3_offload":
            weights = state = gradients = step = 0.0
    if four_bit:  # the matrix in use, dequantized to bfloat16
        buffers += 2.0 * shape.hidden * shape.intermediate
    layer = tokens * activation_bytes(shape, False, autocast=strategy == "ddp") / shape.layers
    log_mu = weights + (state if deepspeed else 0.0) + buffers + layer
    return Memory(weights, state, gradients, buffers + head, activations, step, log_mu)


def activation_bytes(shape: Shape, checkpointing: bool, autocast: bool) -> float:
    """Return the bytes of activations per token that the backward pass needs in bfloat16 with fused attention.

    The formulas come from counting the saved tensors of a Llama layer. With bfloat16 weights, a layer keeps
    16 · hidden + 8 · intermediate + 4 · (queries + keys) bytes. With float32 weights under autocast, the residual
    stream is float32, so a layer keeps 10 · hidden more bytes.

    Args:
        shape (`Shape`): Shape of the model.
        checkpointing (`bool`): Whether to keep only the inputs of layers, and recompute the other activations.
        autocast (`bool`): Whether the weights are float32, and autocast converts them to bfloat16.
    """
    layer = (26 if autocast else 16) * shape.hidden + 8 * shape.intermediate + 4 * (shape.queries + shape.keys)
    layer_input = (4 if autocast else 2) * shape.hidden
    return layer_input * shape.layers + layer if checkpointing else layer * shape.layers


def forward_flops(shape: Shape, tokens: int) -> float:
    """Return the floating-point operations of a forward pass over one row (arXiv 2204.02311, App. B)."""
    looked_up = 0 if shape.is_tied else shape.vocabulary * shape.hidden  # looking up an embedding costs no operations
    weights = 2 * (shape.total - looked_up) * tokens
    return weights + 2 * shape.layers * shape.queries * tokens**2  # Causal attention needs half of 4 · width · length².


def training_flops(shape: Shape, tokens: int, checkpointing: bool) -> float:
    """Return the floating-point operations of training on one row. Checkpointing repeats the forward pass."""
    return forward_flops(shape, tokens) * (4 if checkpointing else 3)


def decoding_seconds(shape: Shape, sequences: int, tokens: float, bandwidth: float, flops: float) -> float:
    """Return the seconds that a vLLM engine needs to add one token to each of its sequences.

    This is the time to read the weights and caches, or the time of the matrix products, whichever is longer.

    Args:
        shape (`Shape`): Shape of the model.
        sequences (`int`): Number of sequences that the engine samples at the same time.
        tokens (`float`): Mean number of tokens in the cache of a sequence.
        bandwidth (`float`): Bytes per second that all GPUs of the engine read in practice.
        flops (`float`): Floating-point operations per second that all GPUs of the engine reach in practice.
    """
    read = 2 * shape.total + sequences * tokens * cache_bytes(shape)
    return max(read / bandwidth, 2 * shape.total * sequences / flops)


def cache_bytes(shape: Shape) -> int:
    """Return the bytes per token of the bfloat16 keys and values in vLLM's cache."""
    return 2 * 2 * shape.layers * shape.keys
