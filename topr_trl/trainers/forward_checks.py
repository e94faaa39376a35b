"""Check that log π in training is comparable with log μ.

The ratio π/μ compares two forward passes. Dropout, a different output head, padding, or other rows of the batch can
change one of the results although the weights are the same.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_NOISE = re.compile(r"drop|jitter|noise")
# Texts of different length. A layout that mixes rows, or that counts padding, changes log π of the shorter one.
_PROBES = (
    "Ana has 3 pens and finds 4 more, then gives 2 of them to Ben. How many pens does Ana have now? The answer is 5.",
    "Ben has 9 coins and gives away 2. The answer is 7.",
)
_LONGEST_PROBE = 64  # tokens

# Function from the token ids of sequences in a batch to log π of their tokens, except the first token of each.
LogProbs = Callable[[list[list[int]]], list[Tensor]]


def text_model(model: Any) -> Any:
    """Return the base model of an adapter, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def avoid_cudnn_attention() -> None:
    """Let torch compute attention without cuDNN in this process.

    With a mask, cuDNN's backward can return NaN on an H100 or H200 (pytorch/pytorch#196678, torch 2.11 to 2.13), and
    cuDNN makes a plan for each new shape, which takes up to a second. Flash and memory-efficient attention have neither
    problem.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def turn_off_noise(model: nn.Module) -> list[str]:
    """Set dropout, stochastic depth and router jitter of all modules to 0.

    Returns:
        `list[str]`: settings that were above 0, for example `lora_dropout=0.05`.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        for name, values, key in _probabilities(module):
            # The path names the setting if a module, such as `lora_dropout.default`, only has the probability `p`.
            owner = [part for part in path.split(".") if _NOISE.search(part)][-1:] if name == "p" else []
            found[f"{(owner or [name])[0]}={values[key]:g}"] = None
            values[key] = 0.0
    return list(found)


def _probabilities(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each noise setting above 0: its name, and the dict and key that hold its value."""
    is_dropout = "Dropout" in type(module).__name__
    for name, value in list(vars(module).items()):
        if _NOISE.search(name) or (is_dropout and name == "p"):
            values = value if isinstance(value, dict) else vars(module)
            for key in list(value) if isinstance(value, dict) else [name]:
                if isinstance(values[key], float) and values[key] > 0:
                    yield name, values, key


def count_positions_from_mask(model: nn.Module) -> None:
    """Make a model compute `position_ids` from the attention mask, so that left padding has no effect.

    TRL does not pass `position_ids` (huggingface/trl#6800). The `position_ids` that `generate` passes are not changed.
    """
    inner = text_model(model)
    own = inner.forward.__func__

    @wraps(own)  # `generate` reads the signature
    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return own(model, *args, **kwargs)

    inner.forward = MethodType(counted, inner)


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of learned positions of a model, or None if it learns no positions."""
    inner = text_model(model)
    context = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    tokens = set(inner.get_input_embeddings().modules())  # An adapter may wrap the embeddings.
    tables = [module for module in inner.modules() if isinstance(module, nn.Embedding) and module not in tokens]
    return context if context and any(table.num_embeddings >= context for table in tables) else None


def probes(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of two short texts that fit in the model's context together. The longer text is first."""
    context = getattr(text_model(model).config.get_text_config(), "max_position_embeddings", None)
    longest = min(_LONGEST_PROBE, (context or 2 * _LONGEST_PROBE) // 2)
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"][:longest] for text in _PROBES]
    return sorted(sequences, key=len, reverse=True)


@torch.no_grad()
def depends_on_batch(
    model: nn.Module,
    wrapped: nn.Module,
    log_probs: LogProbs,
    sequences: list[list[int]],
    temperature: float,
    is_half: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Whether log π of a sequence depends on the other sequence in its batch, or on padding.

    Args:
        model: model whose config is read.
        wrapped: model that computes. FSDP or DeepSpeed may have wrapped it.
        log_probs: function that computes log π as the trainer does.
        sequences: token ids of two sequences. The longer sequence is first.
        temperature: divisor of the logits.
        is_half: whether the forward pass rounds to bfloat16 or float16.
        autocast: context of the trainer's forward pass.

    Raises:
        ValueError: log π differs between training and evaluation mode, or between the fused head and the logits.
    """
    name, was_training = type(text_model(model)).__name__, wrapped.training
    with autocast(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checkpointing warns where nothing needs a gradient
        try:
            wrapped.train()
            (training,) = log_probs(sequences[:1])
            wrapped.eval()
            alone = [log_probs([ids])[0] for ids in sequences]
            together = log_probs(sequences)
            of_logits = _of_logits(wrapped, sequences[0], temperature, training.device)
        finally:
            wrapped.train(was_training)
    # `not <=` instead of `>`, which would be false for a NaN difference.
    if not (noise := _difference(training, alone[0], temperature)) <= 1e-3:
        raise ValueError(
            f"log π of {name} differs by {noise:.2g} nats per token between training and evaluation, so π/μ would be "
            "wrong. Look for noise that is on in training, and set it to 0 (dropout values in model.config)."
        )
    if not (other := _difference(alone[0], of_logits, temperature)) <= (0.2 if is_half else 2e-3):
        raise ValueError(
            f"log π of {name} in training differs from log π of the logits by {other:.2g} nats per token, so π/μ "
            "would be wrong. Look for an adapter or a scale on the output head, which TRL's fused head does not read."
        )
    # The first sequence has no padding and no row before it, so its difference is only rounding.
    first, second = (_difference(a, b, temperature) for a, b in zip(together, alone, strict=True))
    return not second < 5 * first + tolerance(is_half)


def tolerance(is_half: bool) -> float:
    """Return the difference of log π that rounding can cause, in nats per token.

    In bfloat16 with left padding, SmolLM2-135M has a difference of 0.006, and a model of 0.3 million parameters 0.011.
    The limit is higher than these values, because users cannot override a failed check.
    """
    return 0.05 if is_half else 2e-3


def _difference(one: Tensor, other: Tensor, temperature: float) -> float:
    """Return the mean absolute difference of log-probabilities at temperature 1, in nats per token."""
    return float((one.float() - other.float()).abs().mean()) * temperature


def _of_logits(model: Any, ids: list[int], temperature: float, device: torch.device) -> Tensor:
    tokens = torch.tensor([ids], device=device)
    # With prompt tuning, virtual tokens precede the given tokens.
    logits = model(input_ids=tokens, use_cache=False).logits[0, -len(ids) : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
