"""Compute a prompt once for all of its completions in a batch.

The module replaces the method `forward` of a model. For a call with TRL's fused head, the new method converts the batch
to another layout, and converts the outputs back. So the collator and the trainers need not know the layout. In the
layout, the rows of the batch form one sequence without padding. Adjacent rows with a common prefix form a group:

    [shared | branch | branch | ...] [shared | branch | ...] ...

`shared` is the common prefix of a group, without the last token of the prefix. Each branch starts with this last token,
because its output predicts the first token after the prefix. A branch attends to `shared` and to itself.

Shape letters: B rows of at most T tokens, N tokens in the sequence, M positions that predict a label.
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

_ATTENTION = ("sdpa", "eager")  # attention implementations that `_attention` can replace
_NAME = "shared_prompts_"  # prefix of the name under which `_attention` is registered
_INSTALLED = "_topr_shared_prompts"  # attribute of a model that stores its `SharedPrompts`
_CONTEXT = -100  # label of a token that is not predicted
_FIELDS = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
)  # outputs of TRL's fused head with a value per token

LEAST_SHARED = 8  # minimum number of shared tokens; sharing fewer tokens costs more than it saves
LEAST_SAVED = 0.1  # minimum share of tokens that a layout must save; below it, the conversion is not worthwhile

# Layout of the forward pass that is running, or None if it does not share prompts.
_active: ContextVar["Layout | None"] = ContextVar("shared_prompts", default=None)


@dataclass
class Layout:
    """Layout of a batch as one sequence, with the indices that map outputs back to rows.

    Attributes:
        input_ids (`torch.Tensor`):
            Tokens, shape (1, N).
        position_ids (`torch.Tensor`):
            Position of each token in its rows, shape (1, N).
        times (`torch.Tensor`):
            Number of rows that a token belongs to, shape (1, N). The model gets it as the attention mask, because the
            mask weights tokens in the auxiliary loss of a mixture of experts.
        groups (`list[tuple[int, list[int]]]`):
            For each group, the number of shared tokens, and the number of tokens of each branch.
        scored (`torch.Tensor`):
            Positions in the sequence that predict a label, shape (M,).
        shift_labels (`torch.Tensor`):
            Labels of the positions in `scored`, shape (1, M).
        places_BT (`torch.Tensor`):
            For each token after the first column of the batch, the index into `scored` of the position that predicts
            the token, shape (B, T - 1). M if the token has no label. In a flattened batch, B is 1.
        tokens (`int`):
            Number of tokens of all rows, before sharing.
        masks (`dict`):
            Attention masks that were already made for this layout. Other layers use them again.
        windows_asked (`set[int | None]`):
            Sliding windows of the masks that the model requested. None is full attention.
        windows_used (`list[int | None]`):
            Sliding window that each attention layer used.
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
    windows_asked: set[int | None] = field(default_factory=set)
    windows_used: list[int | None] = field(default_factory=list)


def choose_groups(rows: Sequence[Sequence[int]], least: int = 1) -> list[tuple[int, int, int]]:
    """Group adjacent rows by common prefixes, so that as few tokens as possible are computed.

    Example:

    ```python
    >>> choose_groups([[1, 2, 3, 4], [1, 2, 3, 5], [7, 8]])
    [(0, 2, 2), (2, 3, 0)]
    ```

    Args:
        rows (`Sequence[Sequence[int]]`):
            Token ids of each row.
        least (`int`, *optional*, defaults to `1`):
            Minimum number of tokens that a group of several rows shares.

    Returns:
        `list[tuple[int, int, int]]`: for each group, the first row, the row after the last, and the number of shared
        tokens. A group of one row shares 0 tokens.
    """
    # Number of equal tokens at the start of each row and the next row.
    common = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(rows)
    ]
    # Dynamic programming: `best[n]` has the number of saved tokens and the groups of the best solution for n rows.
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
    """Return the layout of a batch, either padded or flattened (padding-free).

    Args:
        input_ids_BT (`torch.Tensor`):
            Tokens, shape (B, T). In a flattened batch, B is 1.
        labels_BT (`torch.Tensor`):
            Labels of the same shape. -100 marks a token that is not predicted.
        mask_BT (`torch.Tensor`, *optional*):
            Attention mask of a padded batch, shape (B, T). `None` for a flattened batch.
        position_ids (`torch.Tensor`, *optional*):
            Positions of a flattened batch, shape (1, T). They start at 0 in each row. Not used with `mask_BT`.
        keep_last (`bool`):
            Whether to compute the last token of each row. It predicts nothing, but the auxiliary loss counts it.
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
    place_of = torch.full((len(flat),), -1)  # position in the sequence of each token of the batch; -1 if left out
    ids: list[int] = []
    positions: list[int] = []
    times: list[int] = []
    groups: list[tuple[int, list[int]]] = []
    for start, end, shared in choose_groups(rows, LEAST_SHARED):
        first = len(ids)
        lengths: list[int] = []
        ids += rows[start][:shared]
        positions += range(shared)
        times += [end - start] * shared
        for row, of_row in zip(rows[start:end], cells[start:end], strict=True):
            # Leave out the last token, which predicts nothing. But keep the only token of a row.
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
        """Return the layout of a call. Return None without TRL's fused head, or if sharing saves too few tokens."""
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
    """Remove the `SharedPrompts` of an earlier trainer from a model, if there is one.

    Call this function before TRL's fused head is added again, because the head also replaces `forward`.
    """
    installed: SharedPrompts | None = getattr(model, _INSTALLED, None)
    if installed is not None:
        installed.remove()


def prompts_together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reorder the rows of TRL's micro-batches, so that rows of a prompt are adjacent.

    If all prompts are too short to be shared, the order does not change. Rows can move from one micro-batch to
    another. So pass only micro-batches of the same optimizer step.

    Args:
        batches (`list[dict[str, Any]]`):
            Micro-batches without images, of equal size and width.

    Returns:
        `list[dict[str, Any]]`: new micro-batches of the same size. The given ones are not changed.
    """
    prompts = [
        ids[mask.bool()].tolist()
        for batch in batches for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]  # fmt: skip
    if max(map(len, prompts), default=0) <= LEAST_SHARED:  # The last token of a prompt is not shared.
        return batches
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
    """Return the share of all rows' tokens that need not be computed. `groups` has the form of `Layout.groups`."""
    saved = sum(shared * (len(branches) - 1) for shared, branches in groups)
    tokens = sum(shared * len(branches) + sum(branches) for shared, branches in groups)
    return saved / max(tokens, 1)


@torch.no_grad()
def why_not_shared(shared: SharedPrompts, wrapped: nn.Module, device: torch.device, tolerance: float) -> str | None:
    """Test on three short rows whether a model can share prompts.

    Return None if it can. Otherwise, return the reason why it cannot.

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
    call = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, _CONTEXT), "attention_mask": mask}
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
    """Keep only the hidden states that predict a label, as a hook after the base model."""
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
