"""Make log π in training comparable with log μ: no noise, the model's own head, and rows that do not see each other.

The ratio π/μ compares two forward passes. Dropout, another output head, or a neighbor in the batch would change it
although the weights are the same.
"""

import re
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_NOISE = re.compile(r"drop|jitter|noise")
# Two sequences of different length: a layout that mixes rows, or counts padding, changes the second one.
_PROBES = (
    "Ana has 3 pens and finds 4 more, then gives 2 of them to Ben. How many pens does Ana have now? The answer is 5.",
    "Ben has 9 coins and gives away 2. The answer is 7.",
)
_LONGEST_PROBE = 64  # tokens

LogProbs = Callable[[list[list[int]]], list[Tensor]]


def text_model(model: Any) -> Any:
    """Return the model itself, or the one inside an adapter."""
    return model.get_base_model() if is_peft_model(model) else model


def turn_off_noise(model: nn.Module) -> list[str]:
    """Set dropout, stochastic depth and router jitter of all modules to 0.

    Returns:
        Names of what was above 0, for example `lora_dropout=0.05`.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        is_dropout = "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            noise = _NOISE.search(name) or (is_dropout and name == "p")
            if noise and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                # The probability of `lora_dropout.default` is its `p`, of `attn_dropout` too.
                owner = [part for part in path.split(".") if _NOISE.search(part)][-1:] if name == "p" else []
                found[f"{(owner or [name])[0]}={value:g}"] = None
    return list(found)


def count_positions_from_mask(model: nn.Module) -> None:
    """Let a model with learned positions count them from the attention mask, so that padding on the left has no effect.

    TRL passes no `position_ids` (huggingface/trl#6800). `generate` passes its own, which stay as they are.
    """
    inner = text_model(model)
    forward = inner.forward

    @wraps(forward)  # `generate` reads the signature
    def counted(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return forward(*args, **kwargs)

    inner.forward = counted


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has learned, or None if its positions are relative."""
    inner = text_model(model)
    context = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    tokens = inner.get_input_embeddings()
    tables = [m for m in inner.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    return context if context and any(table.num_embeddings >= context for table in tables) else None


def probes(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of two short texts that fit in the model's context together, the longer one first."""
    context = getattr(text_model(model).config.get_text_config(), "max_position_embeddings", None)
    longest = min(_LONGEST_PROBE, (context or 2 * _LONGEST_PROBE) // 2)
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"][:longest] for text in _PROBES]
    return sorted(sequences, key=len, reverse=True)


@torch.no_grad()
def forward_differences(model: Any, log_probs: LogProbs, sequences: list[list[int]], temperature: float) -> list[float]:
    """Compare log π as a trainer computes it for a batch with the logits of each sequence alone.

    Args:
        model: computes logits from `input_ids`.
        log_probs: computes, for the sequences of one batch, log π of all their tokens but the first.
        sequences: token ids, two or more of each.
        temperature: the logits are divided by it.

    Returns:
        For each sequence the mean absolute difference in nats per token.
    """
    was_training = model.training
    try:
        model.train()  # what differs between training and evaluation is noise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # checkpointing warns where nothing needs a gradient
            together = log_probs(sequences)
        model.eval()
        return [
            float((logps.float() - _log_probs_alone(model, ids, temperature, logps.device)).abs().mean())
            for ids, logps in zip(sequences, together, strict=True)
        ]
    finally:
        model.train(was_training)


def _log_probs_alone(model: Any, ids: list[int], temperature: float, device: torch.device) -> Tensor:
    tokens = torch.tensor([ids], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def is_off(difference: float, is_half: bool) -> bool:
    """Whether log π in training differs from that of the model's logits by more than rounding explains."""
    return not difference < (0.2 if is_half else 2e-3)


def depends_on_batch(differences: list[float], is_half: bool) -> bool:
    """Whether log π of the second, shorter sequence depends on the first, or on padding.

    The first sequence is affected by neither, so its difference is rounding.
    """
    first, second = differences
    return not second < 5 * first + (0.05 if is_half else 2e-3)
