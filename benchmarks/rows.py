"""Define rows for training (token ids, raw reward, problem, log μ), and compute log π of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from topr_trl.diagnosis import agreements


@dataclass(frozen=True)
class Rows:
    """N completions, with their prompts, rewards and log μ.

    Attributes:
        prompts, responses: token ids. A response includes its stop token.
        rewards: (N,) raw rewards, ±1.
        groups: (N,) id of each row's problem.
        mu_logps: float32 log μ of the tokens of each response, with shape (T,).
        group_means, group_deviations: (N,) mean and standard deviation of the rewards of the row's problem, over all
            sampled completions, including completions that are not selected for training.
        agreements: (N,) share of the problem's other completions with the same answer, or without an answer the same
            text.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    rewards: np.ndarray
    groups: np.ndarray
    mu_logps: list[Tensor]
    group_means: np.ndarray
    group_deviations: np.ndarray
    agreements: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset) -> "Rows":
        """Convert a dataset of scored completions to rows, with the sampler's log μ."""
        rewards, groups = np.array(dataset["reward"][:]), np.array(dataset["problem_id"][:])
        of_group = {group: rewards[groups == group] for group in np.unique(groups)}
        rows = cls(
            dataset["prompt_ids"][:],
            dataset["completion_ids"][:],
            rewards,
            groups,
            [torch.tensor(logps) for logps in dataset["sampler_logps"]],
            np.array([of_group[group].mean() for group in groups]),
            np.array([of_group[group].std(ddof=1) if len(of_group[group]) > 1 else 0.0 for group in groups]),
            agreements(
                groups, [a or text for a, text in zip(dataset["extracted"], dataset["completion"], strict=True)]
            ),
        )
        # Responses without tokens, which cannot be trained on, are dropped.
        return rows[np.array([len(response) > 0 for response in rows.responses]).nonzero()[0]]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that `torch.load(weights_only=True)` can read."""
        return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Rows":
        return cls(**{name: v.numpy() if isinstance(v, Tensor) else v for name, v in saved.items()})

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        return Rows(
            [self.prompts[i] for i in indices],
            [self.responses[i] for i in indices],
            self.rewards[indices],
            self.groups[indices],
            [self.mu_logps[i] for i in indices],
            self.group_means[indices],
            self.group_deviations[indices],
            self.agreements[indices],
        )

    @torch.no_grad()
    def scored_by(self, model: PreTrainedModel, top_k: int | None = None) -> "Rows":
        """Return the same rows with log μ of a model, or of its distribution after top-k."""
        was_training = model.training
        model.eval()
        logps: list[Tensor] = []
        for start in range(0, len(self), 256):
            chunk = range(start, min(start + 256, len(self)))
            policy_logps, mask = response_logps(
                model, [self.prompts[i] for i in chunk], [self.responses[i] for i in chunk], top_k
            )
            logps += [row[keep].float() for row, keep in zip(policy_logps, mask, strict=True)]
        model.train(was_training)
        return replace(self, mu_logps=logps)

    def mu_BT(self, mask_BT: Tensor) -> Tensor:
        """Return (B, T) log μ where the mask is true, and 0 elsewhere."""
        return torch.zeros(mask_BT.shape).masked_scatter(mask_BT, torch.cat(self.mu_logps))

    def group_advantages(self) -> np.ndarray:
        """Return (N,) GRPO's advantages: rewards minus the group mean, divided by the group's standard deviation."""
        return (self.rewards - self.group_means) / (self.group_deviations + 1e-4)


def response_logps(
    model: PreTrainedModel,
    prompts: list[list[int]],
    responses: list[list[int]],
    top_k: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (B, T) log π of each token except the first, and the mask of the completion's tokens.

    Tokens of the prompt have 0. With `top_k`, π is the distribution after top-k. Tokens outside the top k keep their
    original log π.
    """
    ids = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    input_ids = pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(row) for row in ids])[:, None]
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    position = torch.arange(input_ids.size(1))
    mask = ((position >= starts) & (position < lengths))[:, 1:]
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    hidden = causal.base_model(input_ids=input_ids, attention_mask=(position < lengths).long()).last_hidden_state
    logits = causal.get_output_embeddings()(hidden[:, :-1][mask]).float() / temperature
    tokens = input_ids[:, 1:][mask]
    if top_k is None:
        logps = -cross_entropy(logits, tokens, reduction="none")
    else:
        chosen, kept = logits.gather(-1, tokens[:, None]).squeeze(-1), logits.topk(top_k).values
        logps = chosen - torch.where(chosen >= kept[..., -1], kept.logsumexp(-1), logits.logsumexp(-1))
    return torch.zeros(mask.shape).masked_scatter(mask, logps), mask
