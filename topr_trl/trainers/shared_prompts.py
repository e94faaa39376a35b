"""Compute a prompt once for all of its completions in a batch.

The module replaces the method `forward` of a model. For a call with TRL's fused head, the new method converts the batch
to another layout, and converts the outputs back. The collator and the trainers do not depend on this layout. In the
layout, the rows of the batch form one sequence without padding:

    [shared | branch | branch | ...] [shared | branch | ...] ...

`shared` is the common prefix of a group of adjacent rows, without its last token. Each branch starts with this last
token, whose output predicts the first token after the prefix. A branch attends to `shared` and to itself.

Shape letters: B rows of at most T tokens, N tokens of the sequence, M tokens with a label to predict.
"""

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ATTENTION = ("sdpa", "eager")  # implementations that `_attention` can replace
_NAME = "shared_prompts_"  # prefix of the registered names
_INSTALLED = "_topr_shared_prompts"  # attribute of a model
_CONTEXT = -100  # label of a token that is not predicted
_FIELDS = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
)  # outputs of TRL's fused head with a value per token

_LEAST_SHARED = 8  # number of tokens; sharing a shorter prefix costs more than it saves
LEAST_SAVED = 0.1  # share of the tokens; saving less is not worth the conversion

_active: ContextVar["Layout | None"] = ContextVar("shared_prompts", default=None)


@dataclass
class Layout:
    """Map a batch to one sequence, and its outputs back to rows.

    Attributes:
        input_ids: (1, N) tokens.
        position_ids: (1, N) position of each token in its rows.
        times: (1, N) number of rows that a token belongs to. It is passed as the attention mask, because the mask
            weights the auxiliary loss of a mixture of experts.
        groups: number of shared tokens, and of tokens of each branch, for each group.
        scored: (M,) positions in the sequence that predict a label.
        shift_labels: (1, M) labels.
        places_BT: (B, T - 1) index of each row's token among the scored positions. M if the token has no label.
        tokens: number of tokens of the rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    times: Tensor
    groups: list[tuple[int, list[int]]]
    scored: Tensor
    shift_labels: Tensor
    places_BT: Tensor
    tokens: int
    masks: dict[Any, Tensor] = field(default_factory=dict)
    windows_asked: set[int | None] = field(default_factory=set)  # sliding windows of the masks that the model requested
    windows_used: list[int | None] = field(default_factory=list)  # sliding window of each attention layer


def choose_groups(rows: Sequence[Sequence[int]], least: int = 1) -> list[tuple[int, int, int]]:
    """Group adjacent rows so that as few tokens as possible are computed.

    Example:

    ```python
    >>> choose_groups([[1, 2, 3, 4], [1, 2, 3, 5], [7, 8]])
    [(0, 2, 2), (2, 3, 0)]
    ```

    Args:
        rows (`Sequence[Sequence[int]]`):
            Token ids of each row.
        least (`int`, *optional*, defaults to `1`):
            Minimum number of tokens that a group shares.

    Returns:
        `list[tuple[int, int, int]]`: first row, row after the last, and number of shared tokens of each group.
    """
    common = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(rows)
    ]
    # Saved tokens and groups for the first 0, 1, ... rows.
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]
    for end in range(1, len(rows) + 1):
        found, shared = [], sys.maxsize
        for start in range(end - 1, -1, -1):
            if start < end - 1:
                # Each branch needs at least two tokens: one that predicts, and one that is predicted.
                shared = min(shared, common[start] - 1, len(rows[start]) - 2, len(rows[end - 1]) - 2)
                if shared < least:
                    break
            kept = shared if end - start > 1 else 0
            found.append((best[start][0] + (end - start - 1) * kept, [*best[start][1], (start, end, kept)]))
        best.append(max(found, key=lambda each: each[0]))
    return best[-1][1]


def build_layout(
    input_ids_BT: Tensor, labels_BT: Tensor, mask_BT: Tensor | None, position_ids: Tensor | None, keep_last: bool
) -> Layout:
    """Return the layout of a batch, which can be padded or not.

    Args:
        input_ids_BT: (B, T) tokens, or (1, T) without padding.
        labels_BT: labels of the same shape. -100 marks a token that is not predicted.
        mask_BT: attention mask of a padded batch, or None.
        position_ids: (1, T) positions of a batch without padding. The positions of each row start at 0.
        keep_last: whether to compute the last token of each row. It predicts nothing, but the auxiliary loss counts it.
    """
    flat = input_ids_BT.flatten().tolist()
    if mask_BT is not None:
        width = input_ids_BT.size(1)
        cells = [(row.nonzero()[:, 0] + i * width).tolist() for i, row in enumerate(mask_BT.cpu())]
    else:
        assert position_ids is not None
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        cells = [list(range(a, b)) for a, b in pairwise([*starts, len(flat)])]
    rows = [[flat[cell] for cell in row] for row in cells]
    place_of = torch.full((len(flat),), -1)  # position in the sequence
    ids: list[int] = []
    positions: list[int] = []
    times: list[int] = []
    groups: list[tuple[int, list[int]]] = []
    for start, end, shared in choose_groups(rows, _LEAST_SHARED):
        first = len(ids)
        lengths: list[int] = []
        ids += rows[start][:shared]
        positions += range(shared)
        times += [end - start] * shared
        for row, of_row in zip(rows[start:end], cells[start:end], strict=True):
            stop = len(row) if keep_last else max(len(row) - 1, min(len(row), 1))
            place_of[of_row[:shared]] = torch.arange(first, first + shared)
            place_of[of_row[shared:stop]] = torch.arange(len(ids), len(ids) + stop - shared)
            ids += row[shared:stop]
            positions += range(shared, stop)
            times += [1] * (stop - shared)
            lengths.append(stop - shared)
        groups.append((shared, lengths))
    labels = labels_BT[:, 1:].cpu()
    has_label = labels != _CONTEXT
    scored, inverse = torch.unique(place_of.view(input_ids_BT.shape)[:, :-1][has_label], return_inverse=True)
    shift_labels = torch.empty_like(scored).scatter_(0, inverse, labels[has_label])
    places = torch.full(has_label.shape, len(scored)).masked_scatter(has_label, inverse)
    device = input_ids_BT.device
    return Layout(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        times=torch.tensor([times], device=device),
        groups=groups,
        scored=scored.to(device),
        shift_labels=shift_labels[None].to(device),
        places_BT=places.to(device),
        tokens=sum(map(len, rows)),
    )


class SharedPrompts:
    """Compute common prefixes of rows once in the forward pass of a model.

    A new instance replaces the one that is installed in the model.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model with TRL's fused head, without an adapter around it. FSDP or DeepSpeed must not have
            wrapped it yet.

    Attributes:
        enabled (`bool`):
            Whether prefixes are shared.

    Raises:
        ValueError: the attention of the model cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        remove_shared_prompts(model)
        self.model, self.enabled = model, True
        self.layout: Layout | None = None  # layout of the last shared batch
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
        """Restore `forward` and the attention of the model. `forward` must not have been wrapped since."""
        self._hook.remove()
        self.model.forward = self._forward
        self.model.set_attn_implementation(self._base)
        delattr(self.model, _INSTALLED)

    @property
    def computed_part(self) -> float:
        """Number of tokens that the last forward pass computed, divided by the number of tokens of its rows."""
        return 1.0 if self.layout is None else self.layout.input_ids.numel() / self.layout.tokens

    def _shared_forward(self) -> Any:
        own = self._forward.__func__

        @wraps(own)  # `generate` reads the signature
        def shared(model: Any, *args: Any, **kwargs: Any) -> Any:
            forward = MethodType(own, model)  # A copy of the model must compute with its own weights.
            layout = self._layout_of(kwargs) if self.enabled and not args else None
            if layout is None:
                return forward(*args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("input_ids", "labels")}
            kwargs |= {"attention_mask": layout.times, "position_ids": layout.position_ids}
            token = _active.set(layout)
            try:
                # Gradient checkpointing computes layers again after this call, so the layout is also an argument.
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
        """Return the layout of a call, or None if the call does not use TRL's fused head or would save too little."""
        self.layout = None
        ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not kwargs.get("fused_lm_head") or ids is None or labels is None or (mask is None and positions is None):
            return None
        layout = build_layout(ids, labels, mask, positions, keep_last=bool(kwargs.get("output_router_logits")))
        if saved_part(layout.groups) < LEAST_SAVED:
            return None
        self.layout = layout
        return layout


def remove_shared_prompts(model: nn.Module) -> None:
    """Remove the `SharedPrompts` of an earlier trainer from a model. Call it before the fused head is added again."""
    installed: SharedPrompts | None = getattr(model, _INSTALLED, None)
    if installed is not None:
        installed.remove()


def prompts_together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reorder the rows of TRL's micro-batches, so that rows of a prompt are adjacent.

    Args:
        batches: micro-batches of equal size and width, from one generation batch of text.
    """
    prompts = [
        ids[mask.bool()].tolist()
        for batch in batches for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]  # fmt: skip
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    size = len(order) // len(batches)
    places = [order[start : start + size] for start in range(0, len(order), size)]
    together: list[dict[str, Any]] = [dict(batch) for batch in batches]
    for name, value in batches[0].items():
        if isinstance(value, list):
            rows = [row for batch in batches for row in batch[name]]
            for batch, own in zip(together, places, strict=True):
                batch[name] = [rows[i] for i in own]
        elif isinstance(value, Tensor) and value.dim() > 0:
            joined = torch.cat([batch[name] for batch in batches])
            for batch, own in zip(together, places, strict=True):
                batch[name] = joined[own]
    return together


def saved_part(groups: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Return the share of the rows' tokens that sharing saves."""
    saved = sum(shared * (len(branches) - 1) for shared, branches in groups)
    tokens = sum(shared * len(branches) + sum(branches) for shared, branches in groups)
    return saved / max(tokens, 1)


@torch.no_grad()
def why_not_shared(shared: SharedPrompts, wrapped: nn.Module, device: torch.device, tolerance: float) -> str | None:
    """Return why a model cannot share prompts, measured on three short rows. Return None if it can.

    Args:
        shared ([`SharedPrompts`]):
            Instance that is installed in the model.
        wrapped ([`torch.nn.Module`]):
            Model that computes. An adapter, FSDP or DeepSpeed may have wrapped it.
        device (`torch.device`):
            Device of the inputs.
        tolerance (`float`):
            Difference of log π, in nats per token, that rounding can cause.
    """
    config = shared.model.config.get_text_config()
    tokens = (torch.arange(5, 45) * 7919 % config.vocab_size).to(device)
    rows = [tokens[:30], torch.cat([tokens[:20], tokens[30:]]), torch.cat([tokens[:20], tokens[25:].flip(0)])]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    call = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, _CONTEXT), "attention_mask": mask}
    found = []
    try:
        for shared.enabled in (False, True):
            found.append(wrapped(**call, use_cache=False, fused_lm_head=True).log_probs)
    except torch.OutOfMemoryError:
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


# Functions that the model calls in its forward pass.


def _mask(base: str, **kwargs: Any) -> Any:
    """Return the mask of the original implementation. Return None for a shared batch."""
    layout = _active.get()
    if layout is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](**kwargs)
    layout.windows_asked.add(kwargs.get("local_size") or None)
    return None


def _keep_scored(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Keep the positions whose next token has a label."""
    if (layout := _active.get()) is not None:
        outputs.last_hidden_state = outputs.last_hidden_state[:, layout.scored]
    return outputs


def _attention(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any,
    shared_prompts: Layout | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention. In a shared batch, compute each group separately."""
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
    """Compute causal attention of L queries to `before + L` keys. Each query attends to the keys up to its own.

    Args:
        q: (1, heads, L, size) queries.
        k: (1, key heads, before + L, size) keys.
        v: (1, key heads, before + L, size) values.
        before: number of keys before the key of the first query.
        scale: factor of the scores. None is one over the square root of the size.
        window: number of keys that a query attends to, including its own. None is all.
        cap: limit of the scores by tanh (Gemma 2). None is no limit.
        masks: masks that were already made for this layout.
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
    # Query heads that share a key head become part of the query dimension, so keys are not copied.
    q = q.reshape(1, kv, each * length, size)
    if cap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = (q @ k.transpose(-1, -2)) * (size**-0.5 if scale is None else scale)
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out.reshape(1, heads, length, v.size(-1))
