"""`AsyncTOPRTrainer`: TRL's `AsyncGRPOTrainer` with TOPR's loss.

Experimental, as its base is: it uses private parts of TRL 1.16, which tests/test_async_trainer.py names.
"""

import math
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample, _AsyncRolloutLoop

from topr_trl.config import Baseline, LossArguments, parse_baseline
from topr_trl.loss import weighted_loss
from topr_trl.refused import GRPO_ONLY, LIKE_TOPR, refuse_settings
from topr_trl.trainer_base import TOPRMixin, path_as_text, settings_for

_MEAN_OF = 1_024  # rewards of the newest completions, of which baseline="mean" is the mean


@dataclass
class AsyncTOPRConfig(LossArguments, AsyncGRPOConfig):
    """Settings of [`AsyncTOPRTrainer`]: those of [`~trl.experimental.async_grpo.AsyncGRPOConfig`], and of
    [`LossArguments`].

    Parameters:
        baseline (`float` or `str`, defaults to `"mean"`):
            c in R = R0 - c: a number; `"mean"`, of the rewards of the last 1,024 completions; or `"group_mean"`, of the
            completions of the same prompt, which needs `num_generations` of 2 or more.
        log_mu (`str`, defaults to `"sampler"`):
            log μ is what the server reported when it wrote; there is no other.

    No row is dropped for its age. `max_staleness` is how many requests are in flight, in rows of so many optimizer
    steps, and how many adapters the server keeps.
    """

    baseline: Baseline = field(
        default="mean", metadata={"help": "c in R = R0 - c: a number, 'mean' (of the last 1,024) or 'group_mean'."}
    )
    log_mu: str = field(default="sampler", metadata={"help": "Always 'sampler'."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Log a loss that is NaN as 0."})
    # For the model card: it has no such settings.
    effective_positive_share = None
    curation = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.validate_loss()
        self.baseline = parse_baseline(self.baseline)
        if self.log_mu != "sampler":
            raise ValueError(
                f"log_mu={self.log_mu!r}: rows are written by older weights than those in training, and only the "
                "server knew their probabilities. Leave it out."
            )
        refuse_settings(self, AsyncGRPOConfig, "AsyncTOPRTrainer", ASYNC_ONLY, LIKE_TOPR)
        if self.baseline == "group_mean" and self.num_generations < 2:
            raise ValueError("baseline='group_mean' needs num_generations of 2 or more. Set baseline='mean', or 0.")


_WHOLE = "The server's log-probabilities would be of a part of the vocabulary, and the trainer's are of all of it."
# TRL 1.16 has few of GRPO's settings here. Others are refused as soon as it has them, with or without the prefix
# (huggingface/trl#7120).
ASYNC_ONLY = {
    **GRPO_ONLY,
    **{name.removeprefix("vllm_"): advice for name, advice in GRPO_ONLY.items()},
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _WHOLE),
}


class AsyncTOPRTrainer(TOPRMixin, AsyncGRPOTrainer):
    """[`~trl.experimental.async_grpo.AsyncGRPOTrainer`] with TOPR's loss: a server writes while this trains.

    The weight of a completion compares the model in training with the weights that wrote it, however old, so rows are
    not dropped for their age (`sample/staleness_mean`, `sample/staleness_max` say how old they are). The loss of an
    optimizer step is the mean over its completions, on all processes and over all micro-batches.

    A conversation that TRL splits into several rows has no single ratio; it is left out and counted
    (`topr/split_total`).

    Args:
        args: [`AsyncTOPRConfig`]; other arguments are those of `AsyncGRPOTrainer`. A `rollout_worker` of your own puts
            the raw reward of a sample into `metrics["reward"]`, and for `baseline="group_mean"` the standard deviation
            of its group into `metrics["reward_std"]`, by which its `advantage` is divided, as TRL's does.
    """

    args: AsyncTOPRConfig

    def __init__(
        self,
        model: str | os.PathLike[str],
        reward_funcs: Any = None,
        args: AsyncTOPRConfig | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        model = path_as_text(model)
        args = settings_for("AsyncTOPRTrainer", model, args, AsyncTOPRConfig)
        super().__init__(model, reward_funcs, args, *others, **named)
        self._rows_trained_on = "completions that a server wrote meanwhile"
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            if self.rollout_worker._loop_cls is not _AsyncRolloutLoop:
                raise ValueError(
                    f"{type(self.rollout_worker).__name__} may make several rows of a conversation, each with a ratio "
                    "of its own. Use AsyncRolloutWorker, or a worker that leaves such conversations out."
                )
            self.rollout_worker._loop_cls = _WholeConversations

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        if self._rollout_dataset is not None:  # on the main process
            self._rollout_dataset.max_staleness = math.inf
            self._rollout_dataset.queue = _AfterBaseline(self._rollout_dataset.queue, self.args.baseline)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        """Completions of an optimizer step, on all processes."""
        return round(sum(float(b["global_n_forward_tokens"][0] / b["mean_seq_len"][0]) for b in batch_samples))

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The part of this row of completions in the mean over those of the step.

        How a row is unpacked, and what is counted, is as in TRL's method: the completions of a row share the tokens of
        their prompts, and a position serves several of them.
        """
        row, selected = inputs["attention_mask"].bool(), inputs["token_index"] >= 0
        names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        tree: dict[str, Any] = {name: inputs[name][inputs[name] >= 0] for name in names}
        tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = inputs["tree_max_seqlens"][0].tolist()
        if self.aux_loss_enabled:
            tree["output_router_logits"] = True
        flat = {name: inputs[name][row].unsqueeze(0) for name in ("input_ids", "position_ids", "shift_labels")}
        started = time.time()
        outputs = model(**flat, fused_lm_head=True, **tree)
        self._step_forward_s += time.time() - started
        token_index = inputs["token_index"][selected]
        policy_logps_BT, mu_logps_BT, rewards_B, mask_BT = _by_completion(
            inputs["segment_id"][selected],
            outputs.log_probs.flatten()[token_index],
            inputs["old_log_probs"][selected],
            inputs["advantages"][selected],
        )
        # Detached: the gradient of a reward that is NaN would be NaN, too.
        weights_B = self._row_losses(policy_logps_BT.detach(), mu_logps_BT, rewards_B, mask_BT, None).weights
        losses_B = weighted_loss(
            policy_logps_BT, weights_B, rewards_B.nan_to_num(0.0), mask_BT, self.args.length_normalization
        )
        loss = losses_B.sum() * self.accelerator.num_processes / num_items_in_batch
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / self.current_gradient_accumulation_steps
        self._metrics["train"]["entropy"].append(outputs.entropy.flatten()[token_index].detach().mean())
        forwarded, length = float(inputs["global_n_forward_tokens"][0]), float(inputs["mean_seq_len"][0])
        self._step_forward_tokens += forwarded
        self._step_trained_tokens += float(inputs["global_n_tokens"][0])
        self._step_seq_len_weighted += length * forwarded
        self._step_samples += forwarded / length
        return loss


def _by_completion(
    segments_M: Tensor, policy_logps_M: Tensor, mu_logps_M: Tensor, rewards_M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, T) log π and log μ, (B,) R and the (B, T) mask of completions, from their tokens laid end to end."""
    counts_B = segments_M.bincount()
    starts_B = counts_B.cumsum(0) - counts_B
    places = (segments_M, torch.arange(len(segments_M), device=segments_M.device) - starts_B[segments_M])
    blank = policy_logps_M.new_zeros(len(counts_B), int(counts_B.max()))
    rewards_B = policy_logps_M.new_zeros(len(counts_B)).index_put((segments_M,), rewards_M.to(blank))
    mask_BT = blank.index_put(places, torch.ones_like(policy_logps_M))
    return (
        blank.index_put(places, policy_logps_M),
        blank.index_put(places, mu_logps_M.to(blank)),
        rewards_B,
        mask_BT,
    )


class _AfterBaseline:
    """A queue of samples whose `advantage` is R, the raw reward less the baseline; NaN where there is no reward."""

    def __init__(self, samples: Any, baseline: float | str) -> None:
        self.samples, self.baseline = samples, baseline
        self._rewards: deque[float] = deque(maxlen=_MEAN_OF)

    def get(self, timeout: float | None = None) -> RolloutSample:
        sample = self.samples.get(timeout=timeout)
        reward = sample.metrics["reward"]
        if math.isnan(reward):
            return replace(sample, advantage=math.nan)
        self._rewards.append(reward)
        if self.baseline == "group_mean":  # TRL has divided by the standard deviation of the group
            return replace(sample, advantage=sample.advantage * (sample.metrics["reward_std"] + 1e-8))
        baseline = float(np.mean(self._rewards)) if self.baseline == "mean" else float(self.baseline)
        return replace(sample, advantage=reward - baseline)

    def qsize(self) -> int:
        return self.samples.qsize()


class _WholeConversations(_AsyncRolloutLoop):
    """Leaves out conversations that became several rows: their ratio is of all of them together."""

    async def _score_group(self, group: Any) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        kept, place, left_out = [], 0, 0
        for rows in group.completions_sequences:
            if len(rows) == 1:
                kept.append(samples[place])
            left_out += len(rows) > 1
            place += len(rows)
        if left_out:
            self._push_metrics({"topr/split_total": float(left_out)})
        if samples and not kept:
            # A group without a row would never count as trained, and a resumed run would go back to it. Without a
            # reward its row has no gradient.
            kept = [replace(samples[0], metrics={**samples[0].metrics, "reward": math.nan})]
        return kept
