"""Replace the method `forward` and the attention of a model, so that a prompt is computed once in a batch.

For a call with TRL's fused head, the new method converts the batch to a `Layout`, and converts the outputs back. So the
collator and the loss need not know the layout.
"""

import sys
from contextvars import ContextVar
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from topr_trl.trainers.shared_prompts.layout import LEAST_SAVED, Layout, build_layout, saved_part

_ATTENTION = ("sdpa", "eager")  # attention implementations that `_attention` can replace
_NAME = "shared_prompts_"  # prefix of the name under which `_attention` is registered
_INSTALLED = "_topr_shared_prompts"  # attribute of a model that stores its `SharedPrompts`
# Outputs of TRL's fused head with a value per token.
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Layout of the forward pass that is running, or None if it does not share prompts.
_active: ContextVar[Layout | None] = ContextVar("shared_prompts", default=None)


class SharedPrompts:
    """Replacement for a model's `forward` and attention that computes common prefixes of rows once.

    A new instance installs itself in the model, and removes an earlier instance.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model with TRL's fused head. For a model with an adapter, this is the base model. FSDP or
            DeepSpeed must not have wrapped the model yet.

    Attributes:
        enabled (`bool`):
            Whether prefixes are shared. If not, the model computes batches with its own `forward` and attention.
        layout (`Layout` or `None`):
            Layout of the last forward pass while `enabled` was `True`. `None` if that pass did not share prefixes.

    Raises:
        ValueError: the attention of the model cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        remove_shared_prompts(model)
        self.model, self.enabled = model, True
        self.layout: Layout | None = None
        self._base = base = str(model.config._attn_implementation)
        if base not in _ATTENTION:
            raise ValueError(f"attention {base} is not supported; it needs {' or '.join(_ATTENTION)}")
        AttentionInterface.register(_NAME + base, lambda *args, **kwargs: _attention(base, *args, **kwargs))
        AttentionMaskInterface.register(_NAME + base, lambda **kwargs: _mask(base, **kwargs))
        model.set_attn_implementation(_NAME + base)
        self._hook = model.base_model.register_forward_hook(_keep_scored)
        self._forward = model.forward
        model.forward = self._shared_forward()
        setattr(model, _INSTALLED, self)

    def remove(self) -> None:
        """Restore the model's `forward` and attention. FSDP or DeepSpeed must not have wrapped `forward` yet."""
        self._hook.remove()
        self.model.forward = self._forward
        self.model.set_attn_implementation(self._base)
        delattr(self.model, _INSTALLED)

    @property
    def computed_part(self) -> float:
        """Number of tokens that the last forward pass computed, divided by the number of tokens of its rows."""
        return 1.0 if self.layout is None else self.layout.input_ids.numel() / self.layout.tokens

    def _shared_forward(self) -> Any:
        """Return the method that replaces `forward`."""
        own = self._forward.__func__

        @wraps(own)  # `generate` reads the signature of `forward`
        def shared(model: Any, *args: Any, **kwargs: Any) -> Any:
            forward = MethodType(own, model)  # A copy of the model must compute with its own weights.
            layout = self._layout_of(kwargs) if self.enabled and not args else None
            if layout is None:
                return forward(*args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("input_ids", "labels")}
            kwargs |= {"attention_mask": layout.times, "position_ids": layout.position_ids}
            token = _active.set(layout)
            try:
                # Gradient checkpointing computes layers again after this call, when `_active` is no longer set. So the
                # layout is also passed as an argument.
                outputs = forward(
                    input_ids=layout.input_ids, shift_labels=layout.shift_labels, shared_prompts=layout, **kwargs
                )
            finally:
                _active.reset(token)
            for name in _FIELDS:
                if (values := getattr(outputs, name, None)) is not None:
                    setattr(outputs, name, pad(values[0], (0, 1))[layout.places_BT])
            outputs.label_mask = layout.places_BT < len(layout.scored)
            return outputs

        return MethodType(shared, self.model)

    def _layout_of(self, kwargs: dict[str, Any]) -> Layout | None:
        """Return the layout of a call, or None to compute the call without sharing.

        A call is not shared if it does not use TRL's fused head, has no labels, or a label after a masked token, or if
        sharing saves too few tokens.
        """
        self.layout = None
        ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not kwargs.get("fused_lm_head") or ids is None or labels is None or (mask is None and positions is None):
            return None
        layout = build_layout(ids, labels, mask, positions, keep_last=bool(kwargs.get("output_router_logits")))
        # After a masked token, no position predicts the next label, and positions would not count the masked token.
        if saved_part(layout.groups) < LEAST_SAVED or bool((layout.scored < 0).any()):
            return None
        self.layout = layout
        return layout


def remove_shared_prompts(model: nn.Module) -> None:
    """Remove the `SharedPrompts` of an earlier trainer from a model, if there is one.

    Call this function before TRL's fused head is added again, because the head also replaces `forward`.
    """
    installed: SharedPrompts | None = getattr(model, _INSTALLED, None)
    if installed is not None:
        installed.remove()


# The model calls the next three functions in its forward pass. A layout tells them that the batch shares prompts:
# `_mask` and `_keep_scored` read the layout from `_active`, and `_attention` gets it as an argument.


def _mask(base: str, **kwargs: Any) -> Any:
    """Return the attention mask of the implementation `base`.

    Return None for a shared batch, because `_attend` makes the masks of such a batch.
    """
    layout = _active.get()
    if layout is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](**kwargs)
    layout.windows_asked.add(kwargs.get("local_size") or None)
    return None


def _keep_scored(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Keep only the hidden states that predict a label, if the batch shares prompts. The base model calls this hook."""
    if (layout := _active.get()) is not None:
        outputs.last_hidden_state = outputs.last_hidden_state[:, layout.scored]
    return outputs


def _attention(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any,
    shared_prompts: Layout | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as the implementation `base` does. In a shared batch, compute each group separately."""
    if shared_prompts is None:
        if base == "eager":
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[base]
        return attend(module, query, key, value, attention_mask, *args, **kwargs)
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError("its attention has sinks or a position bias")
    scale, window, cap = (kwargs.get(name) or None for name in ("scaling", "sliding_window", "softcap"))
    shared_prompts.windows_used.append(window)
    outputs, start = [], 0
    for shared, lengths in shared_prompts.groups:
        sizes = [shared, *lengths]
        end = start + sum(sizes)
        (q0, *qs), (k0, *ks), (v0, *vs) = (torch.split(x[:, :, start:end], sizes, dim=2) for x in (query, key, value))
        start = end
        if shared:
            outputs.append(_attend(q0, k0, v0, 0, scale, window, cap, shared_prompts.masks))
        for q, k, v in zip(qs, ks, vs, strict=True):
            k, v = torch.cat([k0, k], dim=2), torch.cat([v0, v], dim=2)
            outputs.append(_attend(q, k, v, shared, scale, window, cap, shared_prompts.masks))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, before: int, scale: float | None, window: int | None, cap: float | None,
    masks: dict[Any, Tensor],
) -> Tensor:  # fmt: skip
    """Compute causal attention of L queries to `before + L` keys. Each query attends to keys up to its own position.

    Args:
        q: (1, heads, L, size) queries.
        k: (1, key heads, before + L, size) keys.
        v: (1, key heads, before + L, size) values.
        before: number of keys before the key of the first query.
        scale: factor of the attention scores. None means one over the square root of the size.
        window: number of keys that a query attends to, including its own. None means all.
        cap: limit for the attention scores, applied with tanh (Gemma 2's softcap). None means no limit.
        masks: masks that were already made for this layout. New masks are added.
    """
    (_, heads, length, size), kv, total = q.shape, k.size(1), k.size(2)
    each = heads // kv
    window = None if window is None or total <= window else window
    if not before and window is None and cap is None:
        k, v = (x.repeat_interleave(each, dim=1) if each > 1 else x for x in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    name = (length, before, window)
    if (mask := masks.get(name)) is None:
        at = torch.arange(length, device=q.device)[:, None] + before
        of = torch.arange(total, device=q.device)
        mask = of <= at
        if window is not None:
            mask &= of > at - window
        mask = masks[name] = mask.repeat(each, 1)
    # Stack the query heads that share a key head along the query dimension, so that keys need not be copied.
    q = q.reshape(1, kv, each * length, size)
    if cap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = (q @ k.transpose(-1, -2)) * (size**-0.5 if scale is None else scale)
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out.reshape(1, heads, length, v.size(-1))
