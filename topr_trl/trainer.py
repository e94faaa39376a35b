"""`TOPRTrainer`: TRL's GRPOTrainer with TOPR's weights, rewards and curation.

In the order of a step: `_generate_and_score_completions` (R, curation, rows used again), `_compute_loss`, in it TRL's
forward by `_get_per_token_logps_and_entropies`, right after it `_write_weighted_rewards`, then TRL's loss. What these
pass on stands in TRL's batch of N rows:

| key | | |
|---|---|---|
| `topr_rewards` | (N,) float32 | R; NaN of a row without a reward |
| `topr_rows` | (N,) int64, on the CPU | numbers of the rows, over all processes |
| `topr_scale` | scalar | makes the loss the mean over the rows that count, with curation or rows used again |
| `topr_fresh` | (N,) bool | whether a row is of this generation batch, if there are rows used again |
| `topr_mu_logps` | (N, T) float32 | log μ by the trainer's weights, of the batch that the loss has just read |
"""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length
from trl import GRPOTrainer, is_conversational
from trl.trainer.utils import nanstd, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from topr_trl.baseline import BASELINES
from topr_trl.completions_log import WEIGHT_COLUMNS, DisplayedFloat
from topr_trl.config import TOPRConfig
from topr_trl.curation import Curated
from topr_trl.data.samplers import ReseededSampler
from topr_trl.data.tokenization import without_second_bos
from topr_trl.diagnostics import SilentBatches, warn_if_far
from topr_trl.forward_checks import count_positions_from_mask, learned_positions, text_model
from topr_trl.refused import needs_metric_for_best_model
from topr_trl.rewards import checked
from topr_trl.shared_prompts import prompts_together, remove_shared_prompts
from topr_trl.trainer_base import path_as_text, settings_for
from topr_trl.trainer_replay import ReplayMixin, check_replay

# What TRL's batch has for each token of the completions.
_OF_COMPLETIONS = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "token_type_ids", "mm_token_type_ids",
)  # fmt: skip


class TOPRTrainer(ReplayMixin, GRPOTrainer):
    """Tapered Off-Policy REINFORCE (arXiv 2503.14286) instead of GRPO.

    Takes what [`~trl.GRPOTrainer`] takes. What changes: a completion learns from its raw reward minus the baseline
    instead of a group-centered advantage, weighted by its own ratio π/μ, clipped to limits that depend on the sign of
    that reward; and `curation` can cut each generation batch to the rows worth a backward pass.

    How: TRL's loss with the ratio switched off is `-A · log π(y|x) / |y|` in its gradient, so with `A = w · R` it is
    Algorithm 1, and the other terms of TRL's loss (KL, entropy, MoE) stay TRL's. The weights need the policy's
    log-probabilities, so they are put in as soon as TRL's own forward has them. The *value* logged as `loss` is
    `-mean(w · R)`; its gradient is that of the paper's loss.

    A generation batch whose rewards are all the same cannot reach an `effective_positive_share`; it is trained on with
    the last baseline that was solved (0 before there is one, which after resuming is so again).

    Args:
        replay_dataset (`Dataset`, *optional*): with `replay_share`, logged rows that are used again from the beginning:
            what [`OfflineTOPRTrainer`] reads, one row per completion. Without a column `mu_logps`, log μ is computed
            with the starting weights.

    Raises:
        TypeError: `args` is not a `TOPRConfig`, or `replay_dataset` no `Dataset`.
        ValueError: the dataset has no row or no `prompt`, a prompt does not fit in the model's context, or a reward is
            infinite.
    """

    args: TOPRConfig
    _buffered_inputs: Any  # micro-batches of the generation batch at hand
    _rewards_per_func: Tensor  # raw rewards of the generation batch at hand, all processes

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TOPRConfig | None = None,
        *rest: Any,
        replay_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        dataset = rest[0] if rest else kwargs.get("train_dataset")
        writes_prompts = kwargs.get("environment_factory") is not None  # then the dataset need not have any
        if isinstance(dataset, Dataset) and "prompt" not in dataset.column_names and not writes_prompts:
            raise ValueError(
                f"The training dataset needs a column `prompt`; it has {dataset.column_names}. Rename the one with the "
                "prompts."
            )
        model = path_as_text(model)
        args = settings_for("TOPRTrainer", model, args, TOPRConfig)
        check_replay(args, dataset, replay_dataset)
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError("The training dataset has no row. Look at what filtered or split it.")
        _check_metric_for_best_model(args, rest[1] if rest[1:] else kwargs.get("eval_dataset"))
        self._loss_inputs: dict[str, Any] | None = None  # set while TRL's loss runs its own forward
        self._last_baseline = 0.0  # the last that was solved for `effective_positive_share`
        self._silent = SilentBatches(had_signal=replay_dataset is not None)
        self._warned_of_distance = False
        self._left_to_evaluate: float = math.inf  # completions of the evaluation set at hand
        self._evaluated: list[Tensor] = []  # raw rewards of its batches, in all and by function
        self._shown_weights: dict[int, list[DisplayedFloat]] = {}  # of the rows of the table of completions
        if isinstance(model, nn.Module):
            remove_shared_prompts(text_model(model))  # of an earlier trainer
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if self._tokenizer.pad_token_id is None:
            raise ValueError(
                "The tokenizer has neither a pad token nor a stop token, so completions cannot be padded to a batch. "
                "Set tokenizer.pad_token and tokenizer.eos_token."
            )
        self.reward_funcs: list[Any] = [
            function if isinstance(function, nn.Module) else checked(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        if args.log_completions:
            for name in self.reward_func_names:
                self._refuse_own_column(name, "A reward function")
        uses = f", each batch used {args.num_iterations} times" if args.num_iterations > 1 else ""
        self._rows_trained_on = f"generated while training, {args.num_generations} per prompt{uses}"
        self._positions = learned_positions(self.model)
        config = text_model(self.model).config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # generation fails with it; TRL asks for them where it needs them
        self._is_checked = self._is_ready  # else when training begins
        if self._is_checked:
            self._check_padding(self.model)
        self._share_prompts()
        self._begin_replay(replay_dataset)
        # The loss of TRL that is `-A · ratio` averaged over the tokens of a completion and then over completions.
        self.loss_type = "grpo"

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        if not is_conversational({"prompt": prompts[0]}):
            tokenized = ([without_second_bos(ids, self._tokenizer) for ids in tokenized[0]], *tokenized[1:])
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, tokenized[0]), default=0)
        if context is not None and longest >= context:
            raise ValueError(
                f"A prompt has {longest} tokens; the model's context holds {context}. Drop or shorten such prompts."
            )
        limit = self._positions or float("inf")
        if longest + self.max_completion_length > limit:
            raise ValueError(
                f"A prompt of {longest} tokens and max_completion_length={self.max_completion_length} do not fit in "
                f"the model's context of {limit} learned positions. Lower max_completion_length, or shorten such "
                "prompts."
            )
        return tokenized

    def _check_padding(self, model: Any) -> None:
        """Make sure that log π of a completion does not depend on how its prompt is padded.

        Raises:
            ValueError: log π depends on the padding even with `position_ids`.
        """
        if self._is_vlm:  # whose forward needs images
            return
        check = partial(
            self._depends_on_batch, model, partial(self._padded_log_probs, model), self._tokenizer, self.temperature
        )
        if not check():
            return
        for each in (self.model, self.ref_model):
            if each is not None:
                count_positions_from_mask(each)
        if check():
            raise ValueError(
                f"log π of {type(text_model(self.model)).__name__} depends on the padding of a batch, and TRL pads "
                "prompts on the left, so π/μ would be wrong. Train another model, or train this one offline."
            )

    def _padded_log_probs(self, model: Any, sequences: list[list[int]]) -> list[Tensor]:
        """Return log π of the tokens of each sequence but the first, in a batch that is padded as TRL's are."""
        width, pad = max(map(len, sequences)), self._tokenizer.pad_token_id
        device = self.accelerator.device
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in sequences], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in sequences], device=device)
        # Without TRL's profiling, which logs to trackers before they are set up.
        forward = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
        logps = forward(self, model, ids, mask, width - 1)[0]
        return [row[len(row) - len(tokens) + 1 :] for row, tokens in zip(logps, sequences, strict=True)]

    def _training_begins(self, model: Any) -> None:
        if not self._is_checked:
            self._check_padding(model)
            self._check_sharing(model)
            self._is_checked = True

    def _share_prompts(self) -> None:
        """Share prompts, if micro-batches can hold two completions of one."""
        args = self.args
        if not self._wants_sharing or min(self.num_generations, args.per_device_train_batch_size) < 2:
            return
        if self._is_vlm:
            self._say_not_shared("its rows may have images")
        elif args.use_transformers_continuous_batching:
            self._say_not_shared("continuous batching needs its own attention")
        else:
            self._install_sharing()
            if self._is_checked:
                self._check_sharing(self.model)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch. If prompts are shared, rows of a prompt are neighbors in an optimizer step."""
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        # These terms of TRL's loss are no sums over the rows of a step: they depend on which rows share a micro-batch.
        by_micro_batch = self.aux_loss_enabled or self.top_entropy_quantile < 1 or self._entropy_bonus_enabled
        is_old = not self.model.training or self._buffered_inputs is before
        if self._prompts is None or by_micro_batch or is_old:
            return inputs
        steps, batches = self.args.steps_per_generation, self._buffered_inputs
        # Within an optimizer step, so that each step keeps its rows.
        in_step = math.gcd(steps, self.args.gradient_accumulation_steps)
        self._buffered_inputs = [
            batch for start in range(0, steps, in_step) for batch in prompts_together(batches[start : start + in_step])
        ]
        return self._buffered_inputs[self._step % steps]

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        """Return TRL's sampler, reseeded in each epoch so that a resumed run repeats the order."""
        self._order = ReseededSampler(super()._get_train_sampler(dataset))
        return self._order

    def _before_training(self, checkpoint: Path | None) -> None:
        super()._before_training(checkpoint)
        _check_prompts(self.args, self.train_dataset)
        # TRL goes on in the middle of a generation batch that an interrupted training of this trainer has left: log μ
        # would be found after a step, and vLLM would have that training's weights.
        self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
        self._silent.had_signal |= checkpoint is not None

    # Rewards: TRL centers them by group; TOPR wants them raw.

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        infinite = rewards_per_func.isinf().any(dim=0).nonzero().flatten().tolist()
        if infinite:
            name = self.reward_func_names[infinite[0]]
            raise ValueError(f"The reward function {name!r} returned an infinite reward. Return a finite one, or None.")
        self._rewards_per_func = rewards_per_func
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        train = self.model.training
        # For a batch that is used several times, TRL computes log μ with a forward of its own. Where the first use is
        # one optimizer step, the forward of that use finds it, so the condition is that of a batch that is used once.
        uses = self.num_iterations  # type: ignore[has-type]  # TRL's, without a type
        self.num_iterations = 1
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = uses
        self.model.train(train)  # TRL's continuous batching leaves it in training, in an evaluation too
        distances = self._metrics[self._mode].get("sampling/sampling_logp_difference/mean")  # TRL's, with vLLM
        if distances and not self._warned_of_distance:
            self._warned_of_distance = warn_if_far(distances[-1])
        raw_rewards = self._raw_rewards(batch)
        if not train:
            self._count_evaluated(raw_rewards)
        rewards, curated = self._compose(raw_rewards, train)
        rewards_all = torch.full_like(raw_rewards, torch.nan)
        rewards_all[torch.from_numpy(curated.indices)] = torch.from_numpy(rewards).to(rewards_all)
        self._show_rewards_in_completions(rewards_all)
        start = self.accelerator.process_index * len(inputs)
        batch["topr_rewards"] = rewards_all[start : start + len(inputs)]
        batch["topr_rows"] = torch.arange(start, start + len(inputs)) + self._rows_made
        self._rows_made += len(raw_rewards)
        if train:
            self._silent.add(rewards, raw_rewards)
            # Under a mean as baseline, rewards that are all the same are normal, and say nothing of the next batch.
            if rewards.any() or not len(rewards) or self.args.baseline not in BASELINES:
                self._warn_about_signs(curated, bool((raw_rewards == 0).any()), self.args)
            self._say_share(rewards, self.args)
            if self.args.curation != "none":
                self._metrics["train"]["topr/rows_kept"].append(len(curated.indices) / len(raw_rewards))
                batch = self._keep_rows(batch, curated, start, len(inputs))
            # Without curation, rows that nobody scored count in the mean, too, as in TRL.
            counted = len(raw_rewards) if self.args.curation == "none" else len(curated.indices)
            batch = self._with_replayed_rows(batch, counted)
        return batch

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one dataset; reward metrics count each completion once."""
        rows = len(dataloader.dataset) * self.num_generations_eval if has_length(dataloader.dataset) else math.inf
        self._left_to_evaluate, self._evaluated = rows, []
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _count_evaluated(self, raw_rewards_N: Tensor) -> None:
        """Keep the rewards of an evaluation batch, and set the rewards of padding rows to NaN.

        Accelerate repeats rows so that each process has a full batch (huggingface/accelerate#1674).
        """
        count = min(len(raw_rewards_N), self._left_to_evaluate)
        self._left_to_evaluate -= count
        self._evaluated.append(torch.cat([raw_rewards_N[:count, None], self._rewards_per_func[:count]], dim=1))
        raw_rewards_N[count:] = torch.nan

    def _log_evaluated(self) -> None:
        """Replace TRL's means over batches, which differ in size, by those over completions."""
        if not self._evaluated:
            return
        columns = torch.cat(self._evaluated).cpu().double().T
        self._evaluated = []
        metrics = self._metrics["eval"]
        functions = [(f"rewards/{name}/mean", f"rewards/{name}/std") for name in self.reward_func_names]
        for (mean, std), values in zip([("reward", "reward_std"), *functions], columns, strict=True):
            metrics[mean], metrics[std] = [values.nanmean().item()], [nanstd(values).item()]

    def _raw_rewards(self, batch: dict[str, Any]) -> Tensor:
        """(N,) weighted sums of the rewards of all processes; NaN where no function gave one, or the row is masked."""
        rewards = self._rewards_per_func
        raw = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        masked = self.accelerator.gather(batch["completion_mask"].sum(dim=1) == 0)
        return raw.masked_fill(rewards.isnan().all(dim=1) | masked, torch.nan)

    def _compose(self, raw_rewards: Tensor, train: bool) -> tuple[NDArray[np.float64], Curated]:
        """R and the chosen rows of a generation batch; every process must choose alike, and each step again."""
        raw = raw_rewards.cpu().double().numpy()
        changes: dict[str, Any] = {} if train else {"rule": "none"}
        share = self.args.effective_positive_share
        if share is not None and len(np.unique(raw[~np.isnan(raw)])) < 2:
            # No baseline reaches the share on rewards that are all the same, and such batches are normal.
            share = None
            changes |= {"baseline": self._last_baseline, "effective_positive_share": None}
        problems = np.arange(len(raw)) // (self.num_generations if train else self.num_generations_eval)
        rewards, curated = self.args.choose(raw, problems, self.args.seed + self.state.global_step, **changes)
        if share is not None and train:
            self._last_baseline = float(raw[curated.indices[0]] - rewards[0])
        return rewards, curated

    def _show_rewards_in_completions(self, rewards_N: Tensor) -> None:
        """Show R instead of the advantages in TRL's table, which are not used here."""
        shown = self._logs["advantages"]
        for _ in range(min(len(shown), len(rewards_N))):
            shown.pop()
        shown.extend(rewards_N.nan_to_num(0.0).tolist())

    def _show_weights_in_completions(self) -> None:
        """Put the weight and log-ratio that the loss last gave each row beside TRL's columns; NaN if it gave none."""
        # A row may have been seen before the last log, and is shown again.
        seen = self._shown_weights | {row: values for row, *values in self._row_weights.gather()}
        # TRL's table holds the rows generated last, in training or evaluation.
        rows = range(self._rows_made - len(self._logs["prompt"]), self._rows_made)
        self._shown_weights = {row: seen.get(row, [DisplayedFloat(torch.nan)] * len(WEIGHT_COLUMNS)) for row in rows}
        columns = zip(*self._shown_weights.values(), strict=True)
        self._logs["extra"].update(zip(WEIGHT_COLUMNS, map(list, columns), strict=bool(rows)))

    def _log_completion_extra(self, column: str, values: list[Any]) -> None:
        if self.args.log_completions:
            self._refuse_own_column(column, "log_extra")
        super()._log_completion_extra(column, values)

    @staticmethod
    def _refuse_own_column(name: str, who: str) -> None:
        if name in WEIGHT_COLUMNS:
            raise ValueError(f"{who} names a column {name!r} of the table of completions, which TOPR fills. Rename it.")

    def _keep_rows(self, batch: dict[str, Any], curated: Curated, start: int, rows: int) -> dict[str, Any]:
        """Cut the local generation batch to the chosen rows.

        Every process must end up with the same number of rows, a multiple of `steps_per_generation`: those with fewer
        keep some unchosen rows, with R = 0, and `topr_scale` makes the loss the mean over the chosen rows alone.
        """
        steps, processes = self.args.steps_per_generation, self.accelerator.num_processes
        is_unchosen = torch.ones(processes * rows, dtype=torch.uint8)
        is_unchosen[torch.from_numpy(curated.indices)] = 0
        most = rows - int(is_unchosen.view(processes, rows).sum(1).min())
        count = min(max(-(-most // steps), 1) * steps, rows)
        keep = is_unchosen[start : start + rows].argsort(stable=True)[:count]

        # The per-image tensors of a vision batch have no row axis until TRL splits them; then they are lists by row.
        batch = split_pixel_values_by_grid(batch)
        for name, value in batch.items():
            if isinstance(value, list):
                batch[name] = [value[i] for i in keep.tolist()]
            elif isinstance(value, Tensor) and value.dim() > 0:
                batch[name] = value[keep.to(value.device)]
        batch = unsplit_pixel_values_by_grid(batch)
        scale = count * processes / max(len(curated.indices), 1)
        batch["topr_scale"] = torch.tensor(scale, device=self.accelerator.device)
        return batch

    def _trim_padding(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Drop the trailing columns that no completion here needs: TRL pads to the longest of the generation batch."""
        if "pixel_values" in batch:  # a tool may have shown an image: its tokens have to stay, masked or not
            return batch
        full, step = batch["completion_ids"].size(1), self.args.pad_to_multiple_of or 1
        needed = max(int(batch["completion_mask"].sum(-1).max()), 1)
        excess = max(full - -(-needed // step) * step, 0)
        for name in _OF_COMPLETIONS:
            if name in batch and batch[name].size(1) >= full:
                batch[name] = batch[name][:, : batch[name].size(1) - excess]
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # A copy: the buffered batch is used again with num_iterations > 1. Its width has to be known on the host, so
        # this waits for the device, as TRL's own metrics of each micro-batch do.
        self._loss_inputs = of_loss = self._trim_padding(dict(inputs))
        try:
            loss = super()._compute_loss(model, of_loss)
        finally:
            self._loss_inputs = None
        if self.num_iterations > 1:  # what the first use found is log μ of the next ones
            inputs["old_per_token_logps"] = of_loss["topr_mu_logps"]
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:
            self._add_computed_tokens()
            self._write_weighted_rewards(self._loss_inputs, policy_logps_BT=output[0])
        return output

    def _write_weighted_rewards(self, inputs: dict[str, Any], policy_logps_BT: Tensor) -> None:
        """Put w · R into a batch as TRL's advantages: (B,), or (B, T) with a ratio per token.

        Raises:
            ValueError: log μ is to be the sampler's, and the rollout has none.
        """
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        mu_logps = inputs.pop("old_per_token_logps", None)
        if mu_logps is None:  # there is none when the weights are still those that sampled
            mu_logps = policy_logps_BT.detach()
        elif "topr_fresh" in inputs:  # beside rows that are used again; TRL may have computed none of the fresh ones
            unknown = mu_logps.isnan() & inputs["topr_fresh"].unsqueeze(-1)
            mu_logps = torch.where(unknown, policy_logps_BT.detach(), mu_logps)
        inputs["topr_mu_logps"] = mu_logps
        if self.args.log_mu == "sampler":
            sampler_logps = inputs.get("sampling_per_token_logps")
            if sampler_logps is None:
                raise ValueError("log_mu='sampler', but the rollout gave no log-probabilities. Set log_mu='trainer'.")
            # NaN where the sampler could not tell: the trainer's own value, as without that token's mismatch.
            mu_logps = torch.where(sampler_logps.isnan(), mu_logps, sampler_logps)
        rewards_B = inputs["topr_rewards"]
        shown = inputs["topr_rows"] if self.args.log_completions else None
        # Detached: TRL computes the losses from the weights.
        weights = self._row_losses(policy_logps_BT.detach(), mu_logps, rewards_B, mask, shown).weights
        self._note_for_replay(inputs, mu_logps, weights, mask)

        signal_B = rewards_B.nan_to_num(0.0) * inputs.get("topr_scale", 1.0)
        if not self.args.length_normalization:  # TRL divides by the length; undo it
            signal_B = signal_B * mask.sum(-1)
        inputs["advantages"] = weights * (signal_B.unsqueeze(-1) if weights.dim() == 2 else signal_B)
        # TRL's own ratio is exp(log π - log π) = 1 without old log-probabilities, with the gradient of log π; and its
        # correction for vLLM would be a second one on top of the taper.
        if "importance_sampling_ratio" in inputs:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics[self._mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # of GRPO's clipping, always 0 here
        if self.args.log_completions:
            self._show_weights_in_completions()
        if self._mode == "train":
            self._silent.warn(self.args.baseline)
        else:
            self._log_evaluated()
        super().log(logs, start_time)


def _check_prompts(args: TOPRConfig, dataset: Any) -> None:
    """Raise a ValueError if a training dataset has fewer prompts than a generation batch (huggingface/trl#3477)."""
    needed = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"A generation batch needs {needed} prompts, and the training dataset has {len(dataset)}. The batch has "
            f"generation_batch_size={args.generation_batch_size} completions, num_generations={args.num_generations} "
            "per prompt. Add prompts, raise num_generations, or lower per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )


def _check_metric_for_best_model(args: TOPRConfig, eval_dataset: Any) -> None:
    """Raise a ValueError if the metric for the best model is a reward without the name of its set, or a loss."""
    if not isinstance(eval_dataset, dict) or not needs_metric_for_best_model(args):
        return
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    if metric in ("reward", *(f"{name}_loss" for name in eval_dataset)):
        names = ", ".join(f"eval_{name}_reward" for name in eval_dataset)
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is the loss, or names none of the evaluation sets. "
            f"Set it to one of {names}."
        )
