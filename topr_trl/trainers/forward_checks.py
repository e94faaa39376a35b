"""Check that log π in training is comparable with log μ.

The ratio π/μ compares two forward passes. Even with the same weights, their results can differ: because of dropout, a
different output head, padding, or other rows in the batch.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_NOISE = re.compile(r"drop|jitter|noise")  # parts of the names of settings that add noise
# Texts of different length. If rows of a batch affect each other, or if padding shifts positions, log π of the shorter
# text changes.
_PROBES = (
    "Ana has 3 pens and finds 4 more, then gives 2 of them to Ben. How many pens does Ana have now? The answer is 5.",
    "Ben has 9 coins and gives away 2. The answer is 7.",
)
_LONGEST_PROBE = 64  # maximum length in tokens

# Function that takes a batch of token ids, and returns for each sequence log π of all tokens but the first.
LogProbs = Callable[[list[list[int]]], list[Tensor]]


def text_model(model: Any) -> Any:
    """Return the base model of an adapter. Return a model without an adapter unchanged."""
    return model.get_base_model() if is_peft_model(model) else model


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Switch off cuDNN's attention in a `with` block, so that torch uses its other implementations.

    With a mask, cuDNN's backward pass can return NaN on an H100 or H200 (pytorch/pytorch#196678, torch 2.11 to 2.13).
    cuDNN also makes a plan for each new shape, which takes up to a second. Flash and memory-efficient attention have
    neither problem.
    """
    was_on = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def turn_off_noise(model: nn.Module) -> list[str]:
    """Set dropout, stochastic depth and router jitter of all modules to 0.

    Returns:
        `list[str]`: settings that were above 0, for example `lora_dropout=0.05`.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        for name, values, key in _probabilities(module):
            # A dropout module calls its probability `p`. A readable name, such as `lora_dropout`, is in its path.
            owner = [part for part in path.split(".") if _NOISE.search(part)][-1:] if name == "p" else []
            found[f"{(owner or [name])[0]}={values[key]:g}"] = None
            values[key] = 0.0
    return list(found)


def _probabilities(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each noise setting above 0: its name, and the dict and the key that store its value."""
    is_dropout = "Dropout" in type(module).__name__
    for name, value in list(vars(module).items()):
        if _NOISE.search(name) or (is_dropout and name == "p"):
            values = value if isinstance(value, dict) else vars(module)
            for key in list(value) if isinstance(value, dict) else [name]:
                if isinstance(values[key], float) and values[key] > 0:
                    yield name, values, key


def count_positions_from_mask(model: nn.Module) -> None:
    """Make a model compute `position_ids` from the attention mask, so that left padding does not shift positions.

    TRL does not pass `position_ids` (huggingface/trl#6800). If a caller passes `position_ids`, as `generate` does, the
    model uses the given values.
    """
    inner = text_model(model)
    own = inner.forward.__func__

    @wraps(own)  # `generate` reads the signature of `forward`
    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and kwargs.get("position_ids") is None:
            tokens = args[0] if args else kwargs.get("input_ids")
            width = mask.size(1) if tokens is None else tokens.size(1)  # The mask of prefix tuning covers the prefix.
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -width:]
        return own(model, *args, **kwargs)

    inner.forward = MethodType(counted, inner)


# Adapters of PEFT that the trainers cannot train, by type, with the reason.
_UNSUPPORTED_ADAPTERS = {
    "CPT": "its forward pass computes a loss of its own, from logits",
    "ADAPTION_PROMPT": "its forward pass does not reach TRL's fused head",
    "POLY": "each row needs a task id",
    "MULTITASK_PROMPT_TUNING": "each row needs a task id",
}
_WITH_PREFIX = ("PREFIX_TUNING", "CARTRIDGE")  # adapters that pass keys and values of virtual tokens as a cache


def refuse_adapters(model: Any, checkpointing: bool) -> None:
    """Raise a ValueError for an adapter with which log π cannot be computed.

    Args:
        model (`torch.nn.Module`):
            Model with or without an adapter.
        checkpointing (`bool`):
            Whether the trainer uses gradient checkpointing.
    """
    if type(model).__name__ == "PeftMixedModel":
        raise ValueError("A model with mixed adapters cannot be trained. Use get_peft_model without mixed=True.")
    if not is_peft_model(model):
        return
    kind = str(model.active_peft_config.peft_type.value)
    if why := _UNSUPPORTED_ADAPTERS.get(kind):
        raise ValueError(
            f"The adapter {kind} cannot be trained with TOPR: {why}. Use an adapter in the model's layers, such as "
            "LoRA, or prompt tuning."
        )
    if kind in _WITH_PREFIX and checkpointing:
        raise ValueError(
            f"The adapter {kind} passes its prefix as a cache, which gradient checkpointing computes wrongly. Set "
            "gradient_checkpointing=False."
        )
    if hasattr(text_model(model).get_output_embeddings(), "token_adapter"):
        raise ValueError(
            "trainable_token_indices with tied embeddings also adapts the output head, and log π is computed "
            "without this adapter. Remove trainable_token_indices, or train the embeddings in full with "
            "modules_to_save."
        )


def virtual_tokens(model: Any) -> int:
    """Return the number of virtual tokens that prompt tuning and similar adapters add to each sequence."""
    if not is_peft_model(model) or not model.active_peft_config.is_prompt_learning:
        return 0
    return int(model.active_peft_config.num_virtual_tokens)


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of positions with a learned embedding, or None if the model has no such embeddings."""
    inner = text_model(model)
    context = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    tokens = set(inner.get_input_embeddings().modules())  # An adapter may wrap the embeddings.
    tables = [module for module in inner.modules() if isinstance(module, nn.Embedding) and module not in tokens]
    return context if context and any(table.num_embeddings >= context for table in tables) else None


def probes(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of two short texts, the longer text first. Together, they fit in the model's context."""
    context = getattr(text_model(model).config.get_text_config(), "max_position_embeddings", None)
    context = context - virtual_tokens(model) if context else 2 * _LONGEST_PROBE
    longest = min(_LONGEST_PROBE, context // 2)
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"][:longest] for text in _PROBES]
    return sorted(sequences, key=len, reverse=True)


@torch.no_grad()
def depends_on_batch(
    trainer: Any, model: nn.Module, log_probs: LogProbs, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> bool:
    """Whether log π of a text depends on the other text in its batch, or on padding.

    Return False without a measurement if a text has fewer than two tokens, and so no log π.

    Args:
        trainer (`TOPRMixin`):
            Trainer, whose precision is used.
        model (`torch.nn.Module`):
            Model that computes, which FSDP or DeepSpeed may have wrapped.
        log_probs (`LogProbs`):
            Function that computes log π as the trainer does.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the texts.
        temperature (`float`):
            Divisor of the logits.

    Raises:
        ValueError: log π differs between training and evaluation mode, or between the fused head and the logits.
    """
    sequences, is_half = probes(trainer.model, tokenizer), trainer._is_half
    if min(map(len, sequences)) < 2:
        return False
    name, was_training = type(text_model(trainer.model)).__name__, model.training
    with trainer.accelerator.autocast(), without_cudnn_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradient checkpointing warns under no_grad
        try:
            model.train()
            (training,) = log_probs(sequences[:1])
            model.eval()
            alone = [log_probs([ids])[0] for ids in sequences]
            together = log_probs(sequences)
            of_logits = _of_logits(model, sequences[0], temperature, training.device)
        finally:
            model.train(was_training)
    # The same computation runs in both modes, so rounding stays below 1e-3. `not <=` also catches a NaN difference.
    if not (noise := _difference(training, alone[0], temperature)) <= 1e-3:
        raise ValueError(
            f"log π of {name} differs by {noise:.2g} nats per token between training and evaluation, so π/μ would be "
            "wrong. Look for noise that is on in training, and set it to 0 (dropout values in model.config)."
        )
    # In 16 bits, the fused head and the logits round differently, so the limit is higher.
    if not (other := _difference(alone[0], of_logits, temperature)) <= (0.2 if is_half else 2e-3):
        raise ValueError(
            f"log π of {name} in training differs from log π of the logits by {other:.2g} nats per token, so π/μ "
            "would be wrong. Look for an adapter or a scale on the output head, which TRL's fused head does not read."
        )
    # The first sequence has no padding and no row before it, so its difference is only rounding. The second sequence
    # may have five times this rounding, plus the tolerance.
    first, second = (_difference(a, b, temperature) for a, b in zip(together, alone, strict=True))
    return not second < 5 * first + tolerance(is_half)


def tolerance(is_half: bool) -> float:
    """Return the largest difference of log π that counts as rounding, in nats per token.

    In bfloat16 with left padding, the measured difference was 0.006 for SmolLM2-135M, and 0.011 for a model of 0.3
    million parameters. The limit is higher than these values, because users cannot override a failed check.
    """
    return 0.05 if is_half else 2e-3


def _difference(one: Tensor, other: Tensor, temperature: float) -> float:
    """Return the mean absolute difference of log-probabilities in nats per token, rescaled to temperature 1."""
    return float((one.float() - other.float()).abs().mean()) * temperature


def _of_logits(model: Any, ids: list[int], temperature: float, device: torch.device) -> Tensor:
    """Return log π of all tokens but the first, computed from the model's logits."""
    tokens = torch.tensor([ids], device=device)
    # With prompt tuning, virtual tokens precede the given tokens.
    logits = model(input_ids=tokens, use_cache=False).logits[0, -len(ids) : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
