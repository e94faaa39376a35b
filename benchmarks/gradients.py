"""Gradients of single rows at the base model, and which share of positives they predict to be best.

A row's gradient is that of the loss: u = ∇ log π(y|x) / |y|. A step of B rows with R = ±1 and baseline c has the mean
m(c) = p (1 - c) E[u | right] - (1 - p) (1 + c) E[u | wrong] and the variance v(c) / B. Accuracy rises along
∇A = p (1 - p) (E[∇ log π | right] - E[∇ log π | wrong]), the gradient of the expected accuracy.

Of the steps U that an optimizer makes of such gradients, ⟨∇A, E U⟩² / E‖U‖² is how much a step at the best rate can
raise the accuracy if all directions are curved alike. The best c is where that is largest. For SGD ⟨∇A, m⟩ hardly
depends on c, and E‖U‖² is the second moment, which is least at the classic baseline E[R G] / E[G], G = ‖u‖². An
optimizer that divides each coordinate by its own size has another E U, and another best c.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.rows import Rows


@dataclass(frozen=True)
class Moments:
    """Of the gradients of rows of one sign, in float64; D parameters, in two halves of the problems.

    Attributes:
        means_2D: E[u].
        squares_2D: E[u²], coordinate by coordinate.
        whole_means_2D: E[∇ log π], not divided by the length.
        norms_N: ‖u‖² of each row.
        logit_norms_N: Σ_t ‖e_y - π_t‖² / |y|², the same for the logits, without a backward pass.
        token_norms_N: Σ_t (1 - π_t(y))² / |y|², from log-probabilities alone.
    """

    means_2D: Tensor
    squares_2D: Tensor
    whole_means_2D: Tensor
    norms_N: np.ndarray
    logit_norms_N: np.ndarray
    token_norms_N: np.ndarray

    @property
    def variances_D(self) -> Tensor:
        """E[u²] - E[u]², coordinate by coordinate; the two halves make E[u]² unbiased."""
        return self.squares_2D.mean(0) - self.means_2D.prod(0)


def moments(model: PreTrainedModel, rows: Rows) -> Moments:
    """Of all rows, one after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    sums = {name: torch.zeros(2, size, dtype=torch.float64) for name in ("u", "square", "whole")}
    norms, logit_norms, token_norms = [], [], []
    model.eval()
    for n in range(len(rows)):
        prompt, response = rows.prompts[n], rows.responses[n]
        logits_TV = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        logps_TV = logits_TV.log_softmax(-1)
        own = logps_TV.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        gradients = torch.autograd.grad(own.sum(), parameters)
        whole = torch.cat([g.flatten() for g in gradients])
        u = whole / len(response)
        half = int(rows.groups[n]) % 2  # by problem: right answers to one problem may be the same
        sums["u"][half] += u
        sums["square"][half] += u.square()
        sums["whole"][half] += whole
        norms.append(float(u.square().sum()))
        p, chosen = logps_TV.detach().exp(), own.detach().exp()
        logit_norms.append(float((p.square().sum(-1) - 2 * chosen + 1).sum()) / len(response) ** 2)
        token_norms.append(float((1 - chosen).square().sum()) / len(response) ** 2)
    counts = torch.tensor([[int((rows.groups % 2 == half).sum())] for half in (0, 1)]).clamp(min=1)
    return Moments(
        sums["u"] / counts, sums["square"] / counts, sums["whole"] / counts, np.array(norms), np.array(logit_norms),
        np.array(token_norms),
    )  # fmt: skip


def share_of_second_moment(right: float, wrong: float) -> float:
    """p~ at which the second moment of a gradient is least, from the mean squared norms by sign."""
    return wrong / (right + wrong)


def shares_of_least_noise(right: Moments, wrong: Moments, p: float, batch_rows: int = 32) -> dict[str, float]:
    """p~ at which a measure of noise is least: second moments of single rows, and variances around the mean of a sign.

    `"scaled"`: each coordinate divided by its second moment in a batch with p~ = 50%, as AdamW does.
    """
    a, b = 0.5 / p, 0.5 / (1 - p)
    mean = 0.5 * (right.means_2D - wrong.means_2D).mean(0)
    second = p * a**2 * right.squares_2D.mean(0) + (1 - p) * b**2 * wrong.squares_2D.mean(0)
    scale_D = (mean.square() + second / batch_rows).clamp(min=1e-30)
    measured = {
        "gradients": [rows.norms_N.mean() for rows in (right, wrong)],
        "logits": [rows.logit_norms_N.mean() for rows in (right, wrong)],
        "log-probabilities": [rows.token_norms_N.mean() for rows in (right, wrong)],
        "variance": [rows.variances_D.sum() for rows in (right, wrong)],
        "scaled gradients": [(rows.squares_2D.mean(0) / scale_D).sum() for rows in (right, wrong)],
        "scaled variance": [(rows.variances_D / scale_D).sum() for rows in (right, wrong)],
    }
    return {name: share_of_second_moment(*map(float, sides)) for name, sides in measured.items()}


def gains(
    right: Moments, wrong: Moments, p: float, shares: np.ndarray, sizes: list[int], batch_rows: int = 32
) -> dict[str, np.ndarray]:
    """By optimizer, for each share: how much a step at the best rate can raise accuracy, up to a factor.

    Args:
        sizes: numbers of parameters of each tensor, in order.
    """
    found: dict[str, list[float]] = {name: [] for name in ("whole", "tensors", "adamw", "signs")}
    for share in shares:
        # Weights of a right and of a wrong row, up to a common factor: p a / (p a + (1 - p) b) = share.
        a, b = share / p, (1 - share) / (1 - p)
        parts: dict[str, list[float]] = {name: [] for name in found}
        for here, there in ((0, 1), (1, 0)):  # the direction from one half of the rows, the step from the other
            up = p * (1 - p) * (right.whole_means_2D[there] - wrong.whole_means_2D[there])
            mean = p * a * right.means_2D[here] - (1 - p) * b * wrong.means_2D[here]
            second = p * a**2 * right.squares_2D[here] + (1 - p) * b**2 * wrong.squares_2D[here]
            variance = (second - mean.square()).clamp(min=0) / batch_rows
            size = (mean.square() + variance).clamp(min=1e-30)
            parts["whole"].append(float(up @ mean) / sqrt(float(size.sum())))
            tensors = [
                float(u @ m) / sqrt(float(s.sum()))
                for u, m, s in zip(up.split(sizes), mean.split(sizes), size.split(sizes), strict=True)
            ]
            parts["tensors"].append(sum(tensors) / sqrt(len(sizes)))
            parts["adamw"].append(float(up @ (mean / size.sqrt())) / sqrt(len(up)))
            deviation = variance.sqrt().clamp(min=1e-15)
            parts["signs"].append(float(up @ torch.erf(mean / deviation / sqrt(2))) / sqrt(len(up)))
        for name, values in parts.items():
            found[name].append(float(np.mean(values)))
    return {name: np.array(values) for name, values in found.items()}
