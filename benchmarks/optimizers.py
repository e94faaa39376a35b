"""Optimizers, by what they divide a gradient by: nothing, its own size, that of each tensor, of each coordinate."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from transformers import Adafactor, PreTrainedModel


class Optimizer(Protocol):
    """What the loop needs of one."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


class Normalized(torch.optim.SGD):
    """SGD on a gradient whose norm is 1: of all parameters together, or of each tensor."""

    def __init__(self, model: nn.Module, learning_rate: float, per_tensor: bool) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.per_tensor = per_tensor
        super().__init__(self.parameters, lr=learning_rate)

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for group in [[g] for g in gradients] if self.per_tensor else [gradients]:
            norm = nn.utils.get_total_norm(group)
            for gradient in group:
                gradient.div_(norm.clamp(min=1e-12))
        super().step()


class Several:
    """Optimizers of different parameters, stepped together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _muon(model: PreTrainedModel, rate: float) -> Optimizer:
    """Muon for the matrices inside, AdamW for embeddings and norms, as its authors ask; one rate serves both."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    matrices = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    return Several(
        torch.optim.Muon(inside, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, weight_decay=0.0),
    )


OPTIMIZERS: dict[str, Callable[[PreTrainedModel, float], Optimizer]] = {
    "sgd": lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
    "momentum": lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
    "whole": lambda model, rate: Normalized(model, rate, per_tensor=False),
    "tensors": lambda model, rate: Normalized(model, rate, per_tensor=True),
    "muon": _muon,
    "adamw": lambda model, rate: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0),
    # The paper's, as transformers' Trainer sets it up.
    "adafactor": lambda model, rate: Adafactor(
        model.parameters(), lr=rate, scale_parameter=False, relative_step=False, warmup_init=False
    ),
    # Adam without memory: the sign of each coordinate.
    "signs": lambda model, rate: torch.optim.Adam(model.parameters(), lr=rate, betas=(0.0, 0.0)),
}
