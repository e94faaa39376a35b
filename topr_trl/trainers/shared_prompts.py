"""Compute a prompt once for all of its completions in a batch.

A call of the model with TRL's fused head is computed on another layout and answered in the layout of the call, so the
collator and the trainers need not know about it. Inside, the rows of the batch are one sequence without padding:

    [shared | branch | branch | ...] [shared | branch | ...] ...

`shared` is the common beginning of a group of neighboring rows, without its last token. Each branch begins with that
token, whose output predicts the first token of the branch's own rest. A branch attends to `shared` and to itself.

Shape letters: B rows of at most T tokens, N tokens of the one sequence, M of them with a label to predict.
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

_ATTENTION = ("sdpa", "eager")  # implementations that can be replaced by `_attention`
_NAME = "shared_prompts_"  # prefix of the registered names
_INSTALLED = "_topr_shared_prompts"  # attribute of a model
_CONTEXT = -100  # the label of a token that is not predicted
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's fused head, by token

_LEAST_SHARED = 8  # tokens; attention of a shorter beginning costs more than it saves
LEAST_SAVED = 0.1  # part of the tokens; sharing less is not worth another layout

_active: ContextVar["Layout | None"] = ContextVar("shared_prompts", default=None)


@dataclass
class Layout:
    """Map a batch to one sequence, and its outputs back to rows.

    Attributes:
        input_ids: (1, N) tokens.
        position_ids: (1, N) position of each token in its rows.
        times: (1, N) number of rows that a token belongs to. It is the attention mask, which weights the auxiliary loss
            of a mixture of experts.
        groups: number of shared tokens, and of tokens of each branch.
        scored: (M,) positions in the sequence that predict a label.
        shift_labels: (1, M) the labels.
        places_BT: (B, T - 1) index of each row's token among the scored, M where there is no label.
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
    windows_asked: set[int | None] = field(default_factory=set)  # sliding windows of the masks that the model made
    windows_used: list[int | None] = field(default_factory=list)  # of each attention layer


def choose_groups(rows: Sequence[Sequence[int]], least: int = 1) -> list[tuple[int, int, int]]:
    """Group neighboring rows so that the fewest tokens are computed.

    Args:
        rows (`Sequence[Sequence[int]]`): token ids of each row.
        least (`int`, *optional*, defaults to `1`): number of tokens that a group must share.

    Returns:
        First row, end and number of shared tokens of each group.

    Example:
        >>> choose_groups([[1, 2, 3, 4], [1, 2, 3, 5], [7, 8]])
        [(0, 2, 2), (2, 3, 0)]
    """
    common = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(rows)
    ]
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]  # tokens saved, and groups, of the first rows
    for end in range(1, len(rows) + 1):
        found, shared = [], sys.maxsize
        for start in range(end - 1, -1, -1):
            if start < end - 1:
                # Each branch needs a token that predicts another.
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
    """Return the layout of a batch, padded or not.

    Args:
        input_ids_BT: (B, T) tokens; (1, T) without padding.
        labels_BT: tokens, and -100 where none is to be predicted.
        mask_BT: attention mask of a padded batch, or None.
        position_ids: (1, T) positions of a batch without padding, whose rows begin at 0.
        keep_last: whether to compute the last token of each row, which predicts nothing. The auxiliary loss counts it.
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
    place_of = torch.full((len(flat),), -1)  # in the one sequence
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
    """Compute common beginnings of rows once in a model's forward.

    A model has one at a time: a new one replaces the one that is there.

    Args:
        model (`PreTrainedModel`): causal language model with TRL's fused head, inside any adapter. It must not be
            wrapped by FSDP or DeepSpeed yet.

    Attributes:
        enabled (`bool`): whether beginnings are shared.

    Raises:
        ValueError: the attention of the model cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        remove_shared_prompts(model)
        self.model, self.enabled = model, True
        self.layout: Layout | None = None  # of the last batch that was shared
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
        """Restore the model's forward and attention. Nothing else may have wrapped the forward since."""
        self._hook.remove()
        self.model.forward = self._forward
        self.model.set_attn_implementation(self._base)
        delattr(self.model, _INSTALLED)

    @property
    def computed_part(self) -> float:
        """Number of tokens that the last forward computed, divided by the number of tokens of its rows."""
        return 1.0 if self.layout is None else self.layout.input_ids.numel() / self.layout.tokens

    def _shared_forward(self) -> Any:
        own = self._forward.__func__

        @wraps(own)  # `generate` reads the signature
        def shared(model: Any, *args: Any, **kwargs: Any) -> Any:
            forward = MethodType(own, model)  # a copy of the model computes with its own weights
            layout = self._layout_of(kwargs) if self.enabled and not args else None
            if layout is None:
                return forward(*args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("input_ids", "labels")}
            kwargs |= {"attention_mask": layout.times, "position_ids": layout.position_ids}
            token = _active.set(layout)
            try:
                # The layout is an argument too: checkpointing computes layers again, when it is no longer active.
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
        """Return the layout of a call, or None if the call is not TRL's fused head or would save too little."""
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
    """Remove what an earlier trainer installed in this model, if any; before the fused head is added again."""
    installed: SharedPrompts | None = getattr(model, _INSTALLED, None)
    if installed is not None:
        installed.remove()


def prompts_together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reorder the rows of TRL's micro-batches, so that rows of a prompt are neighbors.

    Args:
        batches: micro-batches of the same size and width, cut from one generation batch of text.
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
    """Return the part of the rows' tokens that sharing saves."""
    saved = sum(shared * (len(branches) - 1) for shared, branches in groups)
    tokens = sum(shared * len(branches) + sum(branches) for shared, branches in groups)
    return saved / max(tokens, 1)


@torch.no_grad()
def why_not_shared(shared: SharedPrompts, wrapped: Any, device: torch.device, tolerance: float) -> str | None:
    """Return why a model cannot share prompts, measured on three short rows; None if it can.

    Args:
        shared ([`SharedPrompts`]): installed in the model.
        wrapped: the model that computes; an adapter, FSDP or DeepSpeed may have wrapped it.
        device (`torch.device`): where its inputs are.
        tolerance (`float`): difference of log π in nats per token that rounding may cause.
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
        return f"only {used} of its {config.num_hidden_layers} layers are attention that can be replaced"
    if layout.windows_asked != set(layout.windows_used):
        return "its attention layers do not know their sliding window"
    gap = float((found[0] - found[1]).float().abs().mean())
    return None if gap <= tolerance else f"log π differs by {gap:.2g} nats per token"


# Functions that the model calls during its forward.


def _mask(base: str, **kwargs: Any) -> Any:
    """Return the original implementation's mask, or None for a layout."""
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
    """Compute attention; with a layout, compute each group separately."""
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
    """Causal attention of queries to all keys up to their own, of which `before` come before the first query.

    Args:
        q: (1, heads, L, size) queries.
        k, v: (1, key heads, before + L, size) keys and values.
        before: number of keys before the first query's own.
        scale: factor of the scores; None: one over the root of the size.
        window: number of keys that a query attends to, itself included; None: all.
        cap: limit of the scores by tanh (Gemma 2); None: no limit.
        masks: masks that were made for this layout.
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
    # Fold query heads that share a key head into the query dimension, so keys are not copied.
    q = q.reshape(1, kv, each * length, size)
    if cap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = (q @ k.transpose(-1, -2)) * (size**-0.5 if scale is None else scale)
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out.reshape(1, heads, length, v.size(-1))
