"""Test whether a model computes the same log π if prompts are shared."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from topr_trl.trainers.shared_prompts.attention import SharedPrompts
from topr_trl.trainers.shared_prompts.layout import CONTEXT


@torch.no_grad()
def why_not_shared(shared: SharedPrompts, wrapped: nn.Module, device: torch.device, tolerance: float) -> str | None:
    """Test on three short rows whether a model can share prompts.

    Return None if the model can share prompts. Otherwise, return the reason.

    Args:
        shared ([`SharedPrompts`]):
            Instance that is installed in the model.
        wrapped ([`torch.nn.Module`]):
            Model to call: the model in `shared`, or the adapter, FSDP or DeepSpeed model that wraps it.
        device (`torch.device`):
            Device of the inputs.
        tolerance (`float`):
            Largest mean difference of log π that counts as rounding, in nats per token.
    """
    config = shared.model.config.get_text_config()
    # Multiplying by a prime spreads the token ids over the vocabulary. The three rows share their first 20 tokens.
    tokens = (torch.arange(5, 45) * 7919 % config.vocab_size).to(device)
    rows = [tokens[:30], torch.cat([tokens[:20], tokens[30:]]), torch.cat([tokens[:20], tokens[25:].flip(0)])]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    call = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, CONTEXT), "attention_mask": mask}
    found = []
    try:
        for shared.enabled in (False, True):
            found.append(wrapped(**call, use_cache=False, fused_lm_head=True).log_probs)
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about sharing
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shared.enabled = True
    if (layout := shared.layout) is None or len(layout.windows_used) != config.num_hidden_layers:
        used = 0 if layout is None else len(layout.windows_used)
        return f"only {used} of its {config.num_hidden_layers} layers have attention that can be replaced"
    if layout.windows_asked != set(layout.windows_used):
        return "its attention layers do not get their sliding window"
    gap = float((found[0] - found[1]).float().abs().mean())
    return None if gap <= tolerance else f"log π differs by {gap:.2g} nats per token"
