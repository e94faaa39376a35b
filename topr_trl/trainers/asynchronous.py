"""Train with TOPR while a server generates completions: `AsyncTOPRTrainer`.

The trainer is experimental, like its base class `AsyncGRPOTrainer`. This module uses private parts of TRL 1.16.
tests/trainers/test_asynchronous.py lists these parts.
"""

import math
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample, _AsyncRolloutLoop
from trl.trainer.utils import get_callable_name

from topr_trl.baseline import subtract_baseline
from topr_trl.settings.sampling import FILTERS
from topr_trl.settings.shared import Baseline, LossArguments, parse_baseline
from topr_trl.settings.unsupported import GRPO_ONLY, LIKE_TOPR, refuse_settings
from topr_trl.trainers.base import TOPRMixin
from topr_trl.trainers.fingerprints import prompts_fingerprint, text_fingerprint
from topr_trl.trainers.start_checks import model_and_settings

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import RewardFunc

_MEAN_OF = 1_024  # baseline="mean" is the mean reward of this many newest completions


@dataclass
class AsyncTOPRConfig(LossArguments, AsyncGRPOConfig):
    """Settings for [`AsyncTOPRTrainer`], in addition to those of [`~trl.experimental.async_grpo.AsyncGRPOConfig`].

    R is the reward after the baseline is subtracted. π is the policy in training, and μ is the policy that wrote the
    completion. The trainer keeps rows of any age. So `max_staleness` only sets the default of `max_inflight_tasks` and
    the number of adapters that the server keeps. In the tables of `log_completions`, `advantage` is GRPO's, and not R.

    Example:

    ```python
    >>> from topr_trl.experimental import AsyncTOPRConfig

    >>> args = AsyncTOPRConfig("out", preset="tis", baseline="group_mean", use_cpu=True, bf16=False)
    >>> args.limits
    TruncationLimits(a_pos=0.0, b_pos=1.0, a_neg=0.0, b_neg=1.0)
    ```

    Parameters:
        preset (`str`, *optional*, defaults to `"topr"`):
            Name of a set of truncation limits (arXiv 2503.14286, Table 1): `"topr"`, `"positives_only"`,
            `"reinforce"`, `"opr"` or `"tis"`. See [`TOPRConfig`].
        a_pos (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R >= 0 (a+ in Eq. 7). `None` uses the preset's limit.
        b_pos (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R >= 0 (b+ in Eq. 7). `None` uses the preset's limit.
        a_neg (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R < 0 (a- in Eq. 7). `None` uses the preset's limit.
        b_neg (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R < 0 (b- in Eq. 7). `None` uses the preset's limit.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio π/μ is computed: `"sequence"` (the paper's), or `"segment"` for long completions.
            See [`TOPRConfig`].
        segment_tokens (`int`, *optional*, defaults to `64`):
            Number of tokens in a segment, with `ratio_level="segment"`, which needs log μ of each token. Tokens that
            the model did not write, such as tool results, do not count.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, *optional*, defaults to `"sampler"`):
            Always `"sampler"`. Only the server knows the log-probabilities of the weights that wrote a completion.
        baseline (`float` or `str`, *optional*, defaults to `"mean"`):
            Baseline c, which is subtracted from each reward: R = R0 - c. Can be a number, `"mean"` (the mean reward of
            the last 1,024 completions) or `"group_mean"` (the mean reward of the completions of the same prompt).
            `"group_mean"` needs `num_generations` of at least 2. A number given as text becomes a `float`.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether to leave NaN and infinite losses out of the logged loss. With `False`, a NaN or infinite loss stops
            training at the next log.
    """

    baseline: Baseline = field(
        default="mean",
        metadata={"help": "Baseline c in R = R0 - c: a number, 'mean' (of the last 1,024) or 'group_mean'."},
    )
    log_mu: str = field(default="sampler", metadata={"help": "Always 'sampler'."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Leave NaN and infinite losses out of the logged loss."}
    )
    # Constants for the model card, which reads these settings from every config. Users cannot set them.
    effective_positive_share = None
    curation = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.validate_loss()
        self.baseline = parse_baseline(self.baseline)
        if self.log_mu != "sampler":
            raise ValueError(
                f"log_mu={self.log_mu!r}: older weights wrote the completions, and only the server knows their "
                "log-probabilities under these weights. Leave log_mu out."
            )
        refuse_settings(self, AsyncGRPOConfig, "AsyncTOPRTrainer", ASYNC_ONLY, {**LIKE_TOPR, "min_p": (0.0,)})
        self.min_p = 0.0  # With None, the server uses the `min_p` of the model's generation_config.
        if self.baseline == "group_mean" and self.num_generations < 2:
            raise ValueError(
                "baseline='group_mean' needs num_generations of 2 or more. Raise num_generations, or set "
                "baseline='mean'."
            )


_FILTER = "The server's log-probabilities would belong to a different distribution than the trainer's."
# TRL 1.16 has only some of these settings. Each missing setting is refused once TRL adds it, with or without the prefix
# `vllm_` (huggingface/trl#7120).
ASYNC_ONLY = {
    **GRPO_ONLY,
    **{name.removeprefix("vllm_"): advice for name, advice in GRPO_ONLY.items()},
    **dict.fromkeys((*FILTERS, "repetition_penalty", "generation_kwargs"), _FILTER),
}


class AsyncTOPRTrainer(TOPRMixin, AsyncGRPOTrainer):
    """Trainer for Tapered Off-Policy REINFORCE (TOPR), on completions that a server generates during training.

    The trainer takes the arguments of [`~trl.experimental.async_grpo.AsyncGRPOTrainer`] and replaces its loss with
    Algorithm 1 of [Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for
    LLMs](https://huggingface.co/papers/2503.14286). The trainer is experimental.

    The ratio π/μ compares the current weights with the weights that wrote the completion. So the trainer keeps rows of
    any age, and logs the age as `sample/staleness_mean` and `sample/staleness_max`. The loss of an optimizer step is
    the mean over the completions of all processes and micro-batches. TRL can split a conversation into several rows.
    A split conversation has no single ratio, so the trainer drops it and counts it in `topr/split_total`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl.rewards import accuracy_reward
    >>> from topr_trl.experimental import AsyncTOPRTrainer

    >>> trainer = AsyncTOPRTrainer(  # doctest: +SKIP
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```

    Args:
        model (`str` or `os.PathLike`):
            Model to train: a model id on the Hub, or a folder written by `save_pretrained`. The server must serve it
            under the same name.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, whose sum is the reward. They run in another process, so each must be picklable. Can be
            omitted if the environment of `environment_factory` has rewards.
        args ([`AsyncTOPRConfig`], *optional*):
            Settings. `None` creates default settings with the output folder `MODEL-TOPR`.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Prompts in a column `prompt`, as text or messages. Can be omitted if the environment of
            `environment_factory` makes the prompts.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, with padding on the left. `None` loads the model's tokenizer.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks that are added to the default ones.
        optimizers (`tuple[Optimizer | None, LambdaLR | None]`, *optional*, defaults to `(None, None)`):
            Optimizer and schedule. `None` creates them from `args`.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train. `None` adds no adapter to the model.
        tools (`list[Callable]`, *optional*):
            Functions that the model can call during generation. They run in another process.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Function that returns an environment with tools, and optionally with prompts and rewards. A dictionary holds
            such functions by name, and the column `environment` of the dataset then has the name for each prompt.
        rollout_worker (`RolloutWorkerProtocol`, *optional*):
            Worker that generates and scores completions. `None` creates TRL's worker. Your own worker must put the
            raw reward of a sample into `metrics["reward"]`, or NaN for a sample without a reward. For
            `baseline="group_mean"`, `advantage` must be computed as in TRL's worker: the reward minus the group's mean,
            divided by the group's standard deviation plus 1e-8. `metrics["reward_std"]` must be this standard
            deviation.
        weight_transfer (`WeightTransferProtocol`, *optional*):
            Object that sends weights to the server. `None` sends them over NCCL.

    Raises:
        TypeError: `args` is not an [`AsyncTOPRConfig`].
        FileNotFoundError: `model` is the path of a folder that does not exist.
        ValueError: the folder `model` has no usable weights, or the `rollout_worker` can split conversations into
            several rows.
    """

    _kind = "asynchronous"
    args: AsyncTOPRConfig

    def __init__(
        self,
        model: str | os.PathLike[str],
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: AsyncTOPRConfig | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        model, args = model_and_settings("AsyncTOPRTrainer", model, args, AsyncTOPRConfig)
        super().__init__(model, reward_funcs, args, *others, **named)
        self._rows_trained_on = "completions that a server wrote during training"
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._reward_names = [get_callable_name(function) for function in functions if function is not None]
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            if self.rollout_worker._loop_cls is not _AsyncRolloutLoop:
                raise ValueError(
                    f"{type(self.rollout_worker).__name__} may split a conversation into several rows, and then the "
                    "conversation has no single ratio. Use AsyncRolloutWorker, or a worker that drops such "
                    "conversations."
                )
            self.rollout_worker._loop_cls = _WholeConversations

    def _identity_values(self) -> dict[str, Any]:
        return {
            "rows": prompts_fingerprint(self.train_dataset),
            "reward_functions": self._reward_names,
            "chat_template": text_fingerprint(self.processing_class.chat_template),
        }

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return TRL's dataloader, with R in place of the advantages, and samples of any age."""
        loader = super().get_train_dataloader()
        if self._rollout_dataset is not None:  # Only the main process has this dataset.
            self._rollout_dataset.max_staleness = math.inf
            self._rollout_dataset.queue = _AfterBaseline(self._rollout_dataset.queue, self.args.baseline)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        """Count the completions of an optimizer step, over all processes."""
        # TRL's batches do not have this count. `mean_seq_len` is the number of forwarded tokens divided by the count.
        return round(sum(float(b["global_n_forward_tokens"][0] / b["mean_seq_len"][0]) for b in batch_samples))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: int | None = None,
    ) -> Tensor:
        """Compute the part of an optimizer step's mean loss that comes from one packed row.

        The unpacking and the counters follow TRL's method. A packed row has the common prefix of several completions
        only once, so a position can belong to several completions.

        Args:
            model (`torch.nn.Module`):
                Model that computes log π.
            inputs (`dict[str, torch.Tensor]`):
                Packed row of this process.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Not used.
            num_items_in_batch (`int`, *optional*):
                Number of completions of the optimizer step, over all processes. Trainer always passes it.

        Returns:
            `torch.Tensor`: the loss, a scalar.
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
        numbers_B = torch.arange(len(rewards_B))  # Nothing reads the numbers of these rows.
        losses_B = self._compute_losses(policy_logps_BT, mu_logps_BT, rewards_B, mask_BT, numbers_B).losses_B
        # Gradients are averaged over processes, so the factor turns the average into a sum.
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
    """Return (B, T) log π and log μ, (B,) R and the (B, T) mask from the M concatenated tokens of the completions."""
    counts = segments_M.bincount().tolist()
    policy_logps_BT, mu_logps_BT, rewards_BT, mask_BT = (
        pad_sequence(list(torch.split(values_M, counts)), batch_first=True)
        for values_M in (policy_logps_M, mu_logps_M, rewards_M, torch.ones_like(policy_logps_M))
    )
    return policy_logps_BT, mu_logps_BT, rewards_BT[:, 0], mask_BT


class _AfterBaseline:
    """Queue that replaces the `advantage` of each sample of TRL's queue with R. Without a reward, R is NaN."""

    def __init__(self, samples: Any, baseline: float | str) -> None:
        self.samples, self.baseline = samples, baseline
        self._rewards: deque[float] = deque(maxlen=_MEAN_OF)

    def get(self, timeout: float | None = None) -> RolloutSample:
        sample = self.samples.get(timeout=timeout)
        reward = sample.metrics["reward"]
        if math.isnan(reward):
            return replace(sample, advantage=math.nan)
        self._rewards.append(reward)
        if self.baseline == "group_mean":  # Undo TRL's division by the group's standard deviation plus 1e-8.
            return replace(sample, advantage=sample.advantage * (sample.metrics["reward_std"] + 1e-8))
        return replace(sample, advantage=float(subtract_baseline(list(self._rewards), self.baseline)[-1]))

    def qsize(self) -> int:
        return self.samples.qsize()


class _WholeConversations(_AsyncRolloutLoop):
    """Rollout loop that drops conversations split into several rows, since the ratio needs the whole conversation."""

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
            # TRL never counts a group without rows as trained, so a resumed run would repeat the group. Keep one row
            # without a reward, which has no gradient.
            kept = [replace(samples[0], metrics={**samples[0].metrics, "reward": math.nan})]
        return kept
