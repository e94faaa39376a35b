"""Compute fingerprints of models and prompts, to detect log μ or checkpoints of a different model or other prompts."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from datasets import Dataset
from datasets.features.features import require_decoding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Maximum number of hashed elements per parameter. Training changes nearly all elements, so a sample is enough.
_SAMPLED = 512
_SAMPLED_ROWS = 10_000  # maximum number of hashed rows of a dataset of prompts


def _is_used(name: str, parameter: nn.Parameter) -> bool:
    """Whether the model uses a parameter. It does not use the module that PEFT's `modules_to_save` replaces."""
    return ".original_module." not in name


def model_fingerprint(model: nn.Module, is_included: Callable[[str, nn.Parameter], bool] = _is_used) -> str:
    """Return a short hash of a model's weights: names, shapes and evenly spaced values of its parameters.

    Equal weights have equal fingerprints, for any sharding and after a cast to a wider dtype. A new LoRA adapter, whose
    matrix B is 0, is ignored, because it does not change the model. All processes must call this function together.
    They get the result of the main process, because other processes may not have loaded the weights yet.

    Args:
        model (`torch.nn.Module`):
            Model, with or without an adapter.
        is_included (`Callable[[str, nn.Parameter], bool]`, *optional*):
            Function that takes the name of a parameter and the parameter, and returns whether to include it. By
            default, all parameters that the model uses are included.

    Returns:
        `str`: hash of 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    new = _new_adapters(model)
    for name, parameter in sorted(model.named_parameters()):
        if not is_included(name, parameter) or _owner_of_lora(name) in new:
            continue
        with _whole(parameter) as whole:
            flat = whole.detach().reshape(-1)
            count = min(len(flat), _SAMPLED)
            digest.update(f"{_base_name(name)}{tuple(whole.shape)}".encode())
            if not flat.is_meta:
                # Integer arithmetic, because float32 cannot represent all indices above 2^24.
                sample = flat[torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)]
                digest.update(sample.float().cpu().numpy().tobytes())
    result: str = broadcast_object_list([digest.hexdigest()[:16]])[0]
    return result


def _base_name(name: str) -> str:
    """Return the name of a parameter in the model without an adapter."""
    return re.sub(r"(\.base_layer)+(?=\.)|\.modules_to_save\.[^.]+", "", name.removeprefix("base_model.model."))


def _owner_of_lora(name: str) -> tuple[str, str] | None:
    """Return the names of the layer and the adapter of a LoRA parameter. Return None for other parameters."""
    layer, found, rest = name.partition(".lora_")
    return (layer, rest.split(".")[1]) if found else None


def _new_adapters(model: nn.Module) -> set[tuple[str, str] | None]:
    """Return the layer and adapter names of each pair of LoRA matrices whose product B·A is still 0."""
    is_new: dict[tuple[str, str] | None, bool] = {}
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".lora_embedding_A." in name:  # peft initializes these factors to 0
            with _whole(parameter) as whole:
                is_zero = not whole.is_meta and not bool(whole.detach().any())
            owner = _owner_of_lora(name)
            is_new[owner] = is_new.get(owner, True) and is_zero
    return {owner for owner, new in is_new.items() if new}


def mu_fingerprint(model: nn.Module, temperature: float) -> str:
    """Return the fingerprint of the policy μ: a short hash of the fingerprint of its model and of its temperature."""
    return text_fingerprint(f"{model_fingerprint(model)} {temperature:g}")


def text_fingerprint(text: object) -> str:
    """Return a short hash of an object as text."""
    return hashlib.sha256(str(text).encode()).hexdigest()[:16]


def prompts_fingerprint(dataset: object) -> str | None:
    """Return a short hash of the number of rows and of up to 10,000 evenly spaced rows.

    Columns with images, audio or video are left out, because they can hold paths, which change if files move. Return
    None if `dataset` is not a `datasets.Dataset`, for instance an `IterableDataset`.
    """
    if not isinstance(dataset, Dataset):
        return None
    count = min(len(dataset), _SAMPLED_ROWS)
    names = sorted(name for name, kind in dataset.features.items() if not require_decoding(kind, True))
    some = dataset.select_columns(names).select(np.arange(count) * (len(dataset) - 1) // max(count - 1, 1))
    digest = hashlib.sha256(str(len(dataset)).encode())
    for rows in some.with_format("arrow").iter(batch_size=1_000):
        digest.update(json.dumps(rows.to_pylist(), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def base_fingerprint(model: Any) -> str:
    """Return the fingerprint of the base model of an adapter, or `""` for a model without an adapter."""
    if not is_peft_model(model):
        return ""
    adapters = [f".{name}." for name in model.peft_config]

    def is_base(name: str, parameter: nn.Parameter) -> bool:
        # Leave out trained biases of the base model, because the checkpoint of the adapter contains them.
        return not parameter.requires_grad and not any(adapter in f"{name}." for adapter in adapters)

    return model_fingerprint(model, is_base)


@contextmanager
def _whole(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Yield the full tensor of a parameter, which FSDP2 or ZeRO-3 may have sharded."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
