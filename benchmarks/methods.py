"""Methods that are compared, by name.

A `Method` makes an objective for a model and rows. The objective returns the loss of a batch.

The paper compares TOPR with "positives only" by one protocol: it removes wrong answers, and makes one pass over the
other rows. Other protocols are equally fair, and lead to different rankings. Each method has a protocol:

| protocol | rows for positives only | steps, relative to TOPR |
|---|---|---|
| `"removed"` | correct answers, once | p, the share of correct answers |
| `"steps"` | all rows once, with weight 0 for wrong answers | 1 |
| `"rows"` | correct answers, 1/p times | 1 |
| `"half"` | correct answers, 1/(2p) times | 1/2 |

TOPR uses all rows once (`"steps"`), or `"balanced"` rows: as many rows, half of them with correct answers. There, the
less frequent kind of answers is repeated.
"""

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.ratios import tapered_loss
from benchmarks.rows import Rows, response_logps
from benchmarks.setting import tokenizer
from topr_trl import PRESETS, baseline_for_positive_share, topr_loss
from topr_trl.loss import sequence_logps


class Objective(Protocol):
    """Loss over `size` items. `rows_per_item` is 2 for pairs, so that all methods use equally many rows per step."""

    size: int
    rows_per_item: int

    def loss(self, indices: np.ndarray) -> Tensor: ...


class Direct:
    """Loss that is a function of log π, log μ and R: `loss(logps_BT, mu_BT, mask_BT, rewards_B)`."""

    rows_per_item = 1

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        loss: Callable[..., Tensor],
        rewards: Callable[[Rows], np.ndarray],
        temperature: float = 1.0,
    ) -> None:
        self.model, self.function, self.reward_function, self.temperature = model, loss, rewards, temperature
        self.renew(rows)

    def renew(self, rows: Rows) -> None:
        """Replace the rows."""
        self.rows, self.size = rows, len(rows)
        self.rewards = torch.tensor(self.reward_function(rows), dtype=torch.float32)

    def loss(self, indices: np.ndarray) -> Tensor:
        rows = self.rows[indices]
        logps_BT, mask_BT = response_logps(self.model, rows.prompts, rows.responses, temperature=self.temperature)
        return self.function(logps_BT, rows.mu_BT(mask_BT), mask_BT, self.rewards[indices])


# Functions that return R for a loss, from raw rewards of ±1.


def raw(rows: Rows) -> np.ndarray:
    return rows.rewards


def asymre_rewards(rows: Rows) -> np.ndarray:
    """Return rewards minus a baseline slightly below the group mean (AsymRE, arXiv 2506.20520, δ = -0.1)."""
    return rows.rewards - (rows.group_means - 0.1)


def whitened(rows: Rows) -> np.ndarray:
    return rows.group_advantages()


def at_share(share: float | str) -> Callable[[Rows], np.ndarray]:
    """Return a function that computes R for an effective share of positives.

    Args:
        share: share of positives, "p" (the paper's c = 0), or the baseline "mean" or "group_mean".
    """

    def rewards(rows: Rows) -> np.ndarray:
        if share == "group_mean":
            return rows.rewards - rows.group_means
        if share == "mean":
            return rows.rewards - rows.rewards.mean()
        if share == "p" or rows.rewards.min() == rows.rewards.max():
            return rows.rewards
        return rows.rewards - baseline_for_positive_share(rows.rewards, float(share))

    return rewards


# Rows and steps, by protocol.


def read(rows: Rows, protocol: str, batch_rows: int, seed: int) -> tuple[Rows, int]:
    """Return the rows of a protocol for one pass, and the number of steps."""
    steps, right = len(rows) // batch_rows, np.flatnonzero(rows.rewards > 0)
    if protocol == "steps":
        return rows, steps
    if protocol == "balanced":
        chosen = balanced(rows, seed)
        return rows[chosen], len(chosen) // batch_rows
    return rows[right], {"removed": -(-len(right) // batch_rows), "half": steps // 2, "rows": steps}[protocol]


def balanced(rows: Rows, seed: int) -> np.ndarray:
    """Return places of rows, half right and half wrong. There are none if all rows are of one kind."""
    sides = [np.flatnonzero((rows.rewards > 0) == sign) for sign in (True, False)]
    rng, half = np.random.default_rng(seed), len(rows) // 2 if all(map(len, sides)) else 0
    return np.concatenate([np.resize(rng.permutation(side), half) for side in sides])


# Losses.


def tapered(preset: str) -> Callable[..., Tensor]:
    def loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
        return topr_loss(logps_BT, mu_BT, rewards_B, mask_BT, PRESETS[preset]).losses_B.mean()

    return loss


def tapered_at(level: str) -> Callable[..., Tensor]:
    def loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor) -> Tensor:
        return tapered_loss(logps_BT, mu_BT, rewards_B, mask_BT, "topr", level).mean()

    return loss


def ppo_loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor, epsilon: float = 0.2) -> Tensor:
    """Return PPO's loss with the ratio of the whole completion (arXiv 2503.14286, Eq. 6), divided by the length."""
    log_ratio_B = sequence_logps(logps_BT, mask_BT) - sequence_logps(mu_BT, mask_BT)
    return (-ppo_objective(log_ratio_B.clamp(max=40.0).exp(), rewards_B, epsilon) / mask_BT.sum(-1)).mean()


def ppo_objective(ratio_B: Tensor, rewards_B: Tensor, epsilon: float) -> Tensor:
    return torch.minimum(ratio_B * rewards_B, ratio_B.clamp(1 - epsilon, 1 + epsilon) * rewards_B)


def m2po_loss(logps_BT: Tensor, mu_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor, limit: float = 0.04) -> Tensor:
    """Return the loss of M2PO (arXiv 2510.01161), which drops tokens with large squared log-ratios.

    Tokens are dropped until the mean square of the others is at most `limit`. As in PPO's clipping, only tokens whose
    ratio has moved in the direction of the advantage are dropped and enter this mean. The loss is the token-level
    importance-weighted loss with group-normalized advantages, averaged over all tokens.
    """
    log_ratio_BT = (logps_BT - mu_BT).masked_fill(~mask_BT, 0.0)
    keep_BT = mask_BT.clone()
    with torch.no_grad():
        pushed_BT = mask_BT & (log_ratio_BT * rewards_B[:, None] > 0)
        squares = log_ratio_BT[pushed_BT].square()
        order = squares.argsort(descending=True)
        rest = squares.sum() - squares[order].cumsum(0)  # sum after dropping one, two, ... tokens
        left = torch.arange(len(squares) - 1, -1, -1)
        enough = torch.cat([squares.sum()[None] <= limit * len(squares), rest <= limit * left])
        drop = order[: int(enough.int().argmax())]
        flags = torch.ones(len(squares), dtype=torch.bool)
        flags[drop] = False
        keep_BT[pushed_BT] = flags
    surrogate_BT = log_ratio_BT.clamp(max=40.0).exp() * rewards_B[:, None]
    return -(surrogate_BT * keep_BT).sum() / mask_BT.sum()


# Losses of TRL's trainers.


class TRLPolicy:
    """Loss of TRL's `GRPOTrainer._compute_loss`, on stored completions."""

    rows_per_item = 1

    def __init__(self, model: PreTrainedModel, rows: Rows, **settings: Any) -> None:
        from trl import GRPOConfig, GRPOTrainer

        args = GRPOConfig(
            **SMALL, **settings, output_dir=_scratch(), per_device_train_batch_size=2, num_generations=2,
            steps_per_generation=1,
        )  # fmt: skip
        self.trainer = GRPOTrainer(
            model, lambda completions, **_: [0.0] * len(completions), args=args,
            train_dataset=Dataset.from_dict({"prompt": ["-"]}), processing_class=_tokenizer(model),
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = 1  # train() would set it
        self.model, self.tokenizer = model, _tokenizer(model)
        self.renew(rows)

    def renew(self, rows: Rows) -> None:
        """Replace the rows."""
        self.rows, self.size = rows, len(rows)
        self.advantages = torch.tensor(rows.group_advantages(), dtype=torch.float32)

    def loss(self, indices: np.ndarray) -> Tensor:
        rows = self.rows[indices]
        prompt_ids, prompt_mask = padded(self.tokenizer, rows.prompts, left=True)
        completion_ids, completion_mask = padded(self.tokenizer, rows.responses)
        inputs = {
            "prompt_ids": prompt_ids, "prompt_mask": prompt_mask,
            "completion_ids": completion_ids, "completion_mask": completion_mask,
            "advantages": self.advantages[indices], "old_per_token_logps": rows.mu_BT(completion_mask.bool()),
            "num_items_in_batch": completion_mask.sum(),
        }  # fmt: skip
        self.trainer._metrics["train"].clear()
        return self.trainer._compute_loss(self.model, inputs)


def with_tokens(trainer: type) -> type:
    """Return one of TRL's trainers for datasets of token ids. TRL would add a stop token to cut-off completions."""
    return type(trainer.__name__, (trainer,), {"_prepare_dataset": lambda self, dataset, *_: dataset})


class TRLPreference:
    """Loss of TRL's trainer for DPO or KTO on datasets of token ids, with the trainer's collator.

    An item is `per_item` consecutive rows of the trainer's dataset, which must be in the same batch.
    """

    def __init__(self, model: PreTrainedModel, trainer: Any, rows_per_item: int, per_item: int = 1) -> None:
        self.model, self.trainer, self.rows_per_item, self.per_item = model, trainer, rows_per_item, per_item
        self.items, self.size = trainer.train_dataset, len(trainer.train_dataset) // per_item

    def loss(self, indices: np.ndarray) -> Tensor:
        chosen = [int(i) * self.per_item + n for i in indices for n in range(self.per_item)]
        batch = self.trainer.data_collator([self.items[i] for i in chosen])
        self.trainer._metrics["train"].clear()
        return self.trainer.compute_loss(self.model, batch)


def dpo(model: PreTrainedModel, rows: Rows, pool: Rows, pairs_a_problem: int = 16, beta: float = 0.1) -> TRLPreference:
    """Return DPO on pairs of a correct and a wrong completion, with up to 16 pairs per problem as in the paper.

    The pairs come from the whole pool. One epoch has at most as many rows as for the other methods.
    """
    from trl import DPOConfig, DPOTrainer

    rng = np.random.default_rng(0)
    pairs: list[tuple[int, int]] = []
    for group in np.unique(pool.groups):
        right, wrong = (np.flatnonzero((pool.groups == group) & (pool.rewards * sign > 0)) for sign in (1, -1))
        every = [(int(i), int(j)) for i in right for j in wrong]
        pairs += [every[n] for n in rng.permutation(len(every))[:pairs_a_problem]]
    pairs = [pairs[n] for n in rng.permutation(len(pairs))[: len(rows) // 2]]
    dataset = Dataset.from_dict({
        "prompt": [""] * len(pairs),  # TRL looks for this column, and reads the ids
        "prompt_ids": [pool.prompts[i] for i, _ in pairs],
        "chosen_ids": [pool.responses[i] for i, _ in pairs],
        "rejected_ids": [pool.responses[j] for _, j in pairs],
    })  # fmt: skip
    args = DPOConfig(
        **SMALL, beta=beta, output_dir=_scratch(), per_device_train_batch_size=32, precompute_ref_log_probs=True
    )
    trainer = with_tokens(DPOTrainer)(model, args=args, train_dataset=dataset, processing_class=_tokenizer(model))
    return TRLPreference(model, trainer, rows_per_item=2)


def kto(model: PreTrainedModel, rows: Rows, pool: Rows, beta: float = 0.1) -> TRLPreference:
    """Return KTO with balanced classes, as TRL's warning recommends.

    The mismatched answers of the KL term come from the same block of 32 consecutive rows, as in TRL. Therefore, rows
    are shuffled once before the split into blocks, so that a block has several problems.
    """
    from trl import KTOConfig, KTOTrainer

    block = 32
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    dataset = Dataset.from_dict({
        "prompt": [""] * len(rows),  # TRL looks for this column, and reads the ids
        "prompt_ids": rows.prompts,
        "completion_ids": rows.responses,
        "KL_completion_ids": mismatched(rows.responses, block),
        "label": [bool(reward > 0) for reward in rows.rewards],
    })  # fmt: skip
    args = KTOConfig(
        **SMALL, beta=beta, output_dir=_scratch(), per_device_train_batch_size=block, precompute_ref_log_probs=True,
        desirable_weight=float((rows.rewards < 0).sum() / max((rows.rewards > 0).sum(), 1)),
    )  # fmt: skip
    trainer = with_tokens(KTOTrainer)(model, args=args, train_dataset=dataset, processing_class=_tokenizer(model))
    return TRLPreference(model, trainer, rows_per_item=block, per_item=block)


def mismatched(responses: list[list[int]], block: int) -> list[list[int]]:
    """Return for each completion its predecessor in its block (for the first, the last), for KTO's KL term."""
    count = len(responses)
    return [responses[i] for n in range(0, count, block) for i in np.roll(np.arange(n, min(n + block, count)), 1)]


@lru_cache
def _scratch() -> str:
    """Return an output folder for the trainers of this process. It stays empty."""
    return tempfile.mkdtemp(prefix="topr-benchmarks-")


# Settings in TRL's documentation for reproducing each paper.
TRL_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl_dapo": ("TRL's default (DAPO)", {}),
    "trl_grpo": ("TRL's GRPO", {"loss_type": "grpo"}),
    "trl_gspo": ("TRL's GSPO", {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    "trl_cispo": ("TRL's CISPO", {"loss_type": "cispo", "epsilon_high": 5.0}),
    "trl_vespo": ("TRL's VESPO", {"loss_type": "vespo"}),
}  # fmt: skip
SMALL: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True
}  # fmt: skip


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    return tokenizer(Path(model.name_or_path).name)


def padded(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], left: bool = False) -> tuple[Tensor, Tensor]:
    """Return padded ids, and their mask."""
    side = "left" if left else "right"
    batch = tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def _direct(loss: Callable[..., Tensor], rewards: Callable[[Rows], np.ndarray] = raw) -> Callable[..., Objective]:
    return lambda model, rows, pool: Direct(model, rows, loss, rewards)


def _trl(**settings: Any) -> Callable[..., Objective]:
    return lambda model, rows, pool: TRLPolicy(model, rows, **settings)


class Method(NamedTuple):
    """Method with a label, a function that makes its objective, and a protocol.

    The arguments of the function are the model, the rows and the pool that they were selected from.
    """

    label: str
    make: Callable[[PreTrainedModel, Rows, Rows], Objective]
    protocol: str = "steps"


def topr(share: float | str, protocol: str = "steps", label: str = "") -> Method:
    """Return TOPR at an effective share of positives. A share of 1.0 is positives only."""
    return Method(label, _direct(tapered("topr"), at_share(share)), protocol)


METHODS: dict[str, Method] = {
    "topr_default": topr("mean", label="TOPR (default)"),
    "topr": Method("TOPR, c = 0", _direct(tapered("topr"))),
    "positives_only": Method("positives only, as many steps", _direct(tapered("positives_only"))),
    "positives_repeated": topr(1.0, "rows", "positives repeated"),
    "reinforce": Method("naive REINFORCE", _direct(tapered("reinforce"))),
    "opr": Method("plain IS", _direct(tapered("opr"))),
    "tis": Method("TIS", _direct(tapered("tis"))),
    "ppo": Method("PPO (sequence)", _direct(ppo_loss)),
    "dpo": Method("DPO", dpo),
    "kto": Method("KTO", kto),
    **{name: Method(label, _trl(**settings)) for name, (label, settings) in TRL_LOSSES.items()},
    "asymre": Method("AsymRE", _direct(tapered("reinforce"), asymre_rewards)),
    "m2po": Method("M2PO", _direct(m2po_loss, whitened)),
    # Variants that other libraries call TOPR.
    "topr_token": Method("“TOPR” per token", _direct(tapered_at("token"))),
    "topr_geometric": Method("“TOPR”, geometric mean", _direct(tapered_at("geometric"))),
    "topr_group_sign": Method("“TOPR”, GRPO's advantages", _direct(tapered("topr"), whitened)),
}  # fmt: skip
