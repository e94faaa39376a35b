"""Plain reference computations to compare the trainers with, and replacements for code that needs a GPU."""

import copy
import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from topr_trl.tasks import arithmetic


@cache
def _loaded() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)


def fresh_model() -> PreTrainedModel:
    """Return a new copy of the bundled model, in float32. Loading it takes six times as long as copying it."""
    return copy.deepcopy(_loaded())


def logps_of(model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Return log π of each completion token, shape (T,), from a forward pass of the row alone."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def plain_logps(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return log π of the completion tokens of a batch of `GRPOTrainer`, shape (B, T). Padding has the value 0."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    logps = logits.gather(2, ids[:, 1:, None]).squeeze(2)[:, -batch["completion_ids"].size(1) :]
    return logps * batch["completion_mask"]


def dense_tree_attention(module, query, key, value, attention_mask, *, tree_kv_index, tree_cu_seqlens_q,
                         tree_cu_seqlens_k, tree_max_seqlen_q, tree_max_seqlen_k, scaling=None, **_):  # fmt: skip
    """Compute attention as TRL's kernel does. A token attends to its segment up to itself and the path before it."""
    tokens = query.shape[2]
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    bounds = [list(itertools.pairwise(cu.tolist())) for cu in (tree_cu_seqlens_q, tree_cu_seqlens_k)]
    for (start, end), (first, last) in zip(*bounds, strict=True):
        path = tree_kv_index[first:last]
        for n, token in enumerate(range(start, end)):
            sees[token, path[: len(path) - (end - start) + n + 1]] = True
    out = functional.scaled_dot_product_attention(query, key, value, sees, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def async_trainer_without_gpu(monkeypatch):
    """Replace the parts of AsyncGRPOTrainer that need a GPU: the attention kernel, and the peak FLOPS of the device."""
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    module = "trl.experimental.async_grpo.async_grpo_trainer"
    monkeypatch.setattr(
        f"{module}.register_tree_attention", lambda: AttentionInterface.register(TREE_ATTENTION, dense_tree_attention)
    )
    monkeypatch.setattr(f"{module}.get_peak_flops_per_device", lambda *_: None)


def of_level(ratio_level: str, segment_tokens: int) -> dict[str, Any]:
    """Return the settings for a ratio level. Only the level `segment` has a number of tokens."""
    return {"ratio_level": ratio_level} | ({"segment_tokens": segment_tokens} if ratio_level == "segment" else {})


def coin(completions: list[str], **_: Any) -> list[float]:
    """Return the rewards -1 and 1 in turn, whatever the completions, so that every batch has both signs."""
    return [1.0 if i % 2 else -1.0 for i in range(len(completions))]
