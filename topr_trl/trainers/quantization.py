"""Train the adapter of a quantized model without losing gradients or precision."""

import torch
from torch import Tensor, nn


def adapter_weights(model: object) -> dict[str, Tensor]:
    """Return copies of the trainable weights of a quantized model, by name. Return `{}` for all other models."""
    if not isinstance(model, nn.Module) or not is_quantized(model):
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def keep_adapter_in_float32(model: nn.Module, given: dict[str, Tensor]) -> None:
    """Undo TRL's cast of a quantized model's adapter to bfloat16, because small updates in bfloat16 round to nothing.

    Args:
        model (`torch.nn.Module`):
            Model of the trainer, after TRL's cast.
        given (`dict[str, torch.Tensor]`):
            Result of `adapter_weights` before the cast. These weights keep their dtype. TRL created the adapter weights
            that are missing in `given`, and they become float32.
    """
    if not is_quantized(model):
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = given.get(name, parameter.data.float())


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers loaded a model with weights in 4 or 8 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def keep_gradients_of_4bit_layers(model: nn.Module) -> None:
    """Make bitsandbytes use the same kernel for evaluation and training on a CPU.

    By default, the first evaluation packs the weights for a kernel without gradients, and training then fails.

    Raises:
        ValueError: the weights are already packed, because the model has already run on the CPU.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"The 4-bit weights of {name} are packed for inference, because the model has already run on the "
                "CPU. Gradients do not pass through packed weights. Load the model again, or pass its name."
            )
