"""`TOPRTrainer`: TRL's GRPOTrainer with TOPR's weights, rewards and curation."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm
from trl import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from topr_trl.baseline import BASELINES
from topr_trl.checkpoints import mu_fingerprint
from topr_trl.completions_log import WEIGHT_COLUMNS, Shown
from topr_trl.config import REPLAYED_BATCHES, TOPRConfig
from topr_trl.curation import Curated
from topr_trl.data.rows import refuse_images
from topr_trl.metrics import completion_means, warn_if_far
from topr_trl.replay import ReplayBuffer, ReplayRow, batch_of, check_columns, check_logged, logged_rows, with_rows
from topr_trl.rewards import checked
from topr_trl.trainer_base import TOPRMixin, say, settings_for

_POSITIONS = re.compile(r"\b(wpe|\w*position\w*)$")  # names of learned position embeddings


class TOPRTrainer(TOPRMixin, GRPOTrainer):
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
        ValueError: the dataset has no `prompt`, a prompt does not fit in the model's context, or a reward is infinite.
    """

    args: TOPRConfig
    _rows_trained_on = "generated while training"
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
            raise ValueError(f"The training dataset needs a column prompt; it has {dataset.column_names}. Rename one.")
        args = settings_for("TOPRTrainer", model, args, TOPRConfig)
        if replay_dataset is not None:
            if not args.replay_share:
                raise ValueError("replay_dataset has no meaning without replay_share. Set replay_share=0.5.")
            check_logged(replay_dataset, args.temperature)
        if args.replay_share and isinstance(dataset, Dataset):
            refuse_images(dataset, "Rows with images cannot be used again: only text is kept. Set replay_share=0.")
        self._loss_inputs: dict[str, Any] | None = None  # set while TRL's loss runs its own forward
        self._last_baseline = 0.0  # the last that was solved for `effective_positive_share`
        self._said_replay = self._any_signal = self._warned_of_silence = False
        self._rows_made = 0  # rows generated so far, all processes; they are numbered
        self._shown_weights: dict[int, list[Shown]] = {}  # of the rows of the table of completions
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
        self._replay = self._make_replay(replay_dataset) if args.replay_share else None
        # The loss of TRL that is `-A · ratio` averaged over the tokens of a completion and then over completions.
        self.loss_type = "grpo"

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, tokenized[0]), default=0)
        if context is not None and longest >= context:
            raise ValueError(
                f"A prompt has {longest} tokens; the model's context holds {context}. Drop or shorten such prompts."
            )
        return tokenized

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
        batch = super()._generate_and_score_completions(inputs)
        self.model.train(train)  # TRL's continuous batching leaves it in training, in an evaluation too
        if distances := self._metrics[self._mode].get("sampling/sampling_logp_difference/mean"):
            warn_if_far(distances[-1])  # TRL measures it with vLLM
        raw_rewards = self._raw_rewards(batch)
        rewards, curated = self._compose(raw_rewards, train)
        rewards_all = torch.full_like(raw_rewards, torch.nan)
        rewards_all[torch.from_numpy(curated.indices)] = torch.from_numpy(rewards).to(rewards_all)
        # R instead of the advantages in TRL's table of completions, which are not used here.
        shown = self._logs["advantages"]
        for _ in range(min(len(shown), len(rewards_all))):
            shown.pop()
        shown.extend(rewards_all.nan_to_num(0.0).tolist())

        start = self.accelerator.process_index * len(inputs)
        batch["topr_rewards"] = rewards_all[start : start + len(inputs)]
        batch["topr_rows"] = torch.arange(start, start + len(inputs)) + self._rows_made
        self._rows_made += len(raw_rewards)
        if train:
            # Under a mean as baseline, rewards that are all the same are normal, and say nothing of the next batch.
            self._any_signal = self._any_signal or bool(rewards.any())
            if rewards.any() or not len(rewards) or self.args.baseline not in BASELINES:
                self._warn_about_signs(curated, bool((raw_rewards == 0).any()), self.args)
            self._say_share(rewards, self.args)
            if self.args.curation != "none":
                self._metrics["train"]["topr/rows_kept"].append(len(curated.indices) / len(raw_rewards))
                batch = self._keep_rows(batch, curated, start, len(inputs))
            if self._replay is not None:
                batch = self._use_again(batch, self._replay)
        return batch

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

    def _show_weights_in_completions(self) -> None:
        """Put the weight and log-ratio that the loss last gave each row beside TRL's columns; NaN if it gave none."""
        # A row may have been seen before the last log, and is shown again.
        seen = self._shown_weights | {row: values for row, *values in self._row_weights.gather()}
        # TRL's table holds the rows generated last, in training or evaluation.
        rows = range(self._rows_made - len(self._logs["prompt"]), self._rows_made)
        self._shown_weights = {row: seen.get(row, [Shown(torch.nan)] * len(WEIGHT_COLUMNS)) for row in rows}
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

    def _make_replay(self, logged: Dataset | None) -> ReplayBuffer:
        """The buffer, with the logged rows of this process."""
        args, process, processes = self.args, self.accelerator.process_index, self.accelerator.num_processes
        # They would begin elsewhere in a batch that is padded to another width, and log μ is of where they began.
        if any(isinstance(m, nn.Embedding) and _POSITIONS.search(name) for name, m in self.model.named_modules()):
            raise ValueError(
                f"replay_share={args.replay_share} needs a model whose positions are relative: with learned ones, as "
                "here, log π depends on how a batch is padded. Set replay_share=0."
            )
        rows: list[ReplayRow] = []
        if logged is not None:
            config, fingerprint = self.model.config.get_text_config(), mu_fingerprint(self.model, args.temperature)
            with self.accelerator.main_process_first():
                rows = logged_rows(logged, self._tokenizer, config, fingerprint, args)
        size = args.replay_size or max(REPLAYED_BATCHES * args.generation_batch_size, len(rows))
        buffer = ReplayBuffer(size // processes, args.replay_rule)
        own = np.random.default_rng(args.seed).permutation(len(rows))[process::processes]
        buffer.add([rows[place] for place in own])
        return buffer

    def _use_again(self, batch: dict[str, Any], buffer: ReplayBuffer) -> dict[str, Any]:
        """The local generation batch with rows of earlier ones behind it, as many on every process."""
        check_columns(batch)
        args, steps = self.args, self.args.steps_per_generation
        step, processes, fresh = self.state.global_step, self.accelerator.num_processes, len(batch["completion_ids"])
        buffer.settle()
        if step == 0:
            self._compute_log_mu(buffer)
        kept = self._of_all(len(buffer))
        count = steps * min(args.rows_again(fresh // steps), int(min(kept)) // steps)
        rows = buffer.draw(count, [args.seed, self._rows_made, self.accelerator.process_index])
        buffer.begin(batch, step)
        metrics = self._metrics["train"]
        metrics["topr/replay/kept"].append(sum(kept))
        metrics["topr/replay/share"].append(count / (fresh + count))
        if not rows:
            return batch
        metrics["topr/replay/age"].append(sum(self._of_all(sum(step - row.step for row in rows))) / count / processes)
        if not self._said_replay:
            self._said_replay = True
            most = buffer.size * buffer.nbytes / len(buffer) / 2**20
            say(
                f"each process keeps at most {buffer.size} rows to use them again, about {most:.1f} MB if they are as "
                "long as those so far.",
                args,
            )
        # The loss is to be the mean over rows that were chosen or are used again; `topr_scale` makes up for the others.
        chosen = fresh * processes / float(batch.get("topr_scale", 1.0))
        scale = (fresh + count) * processes / (chosen + count * processes)
        batch = with_rows(batch, rows, self._tokenizer.pad_token_id)
        return {**batch, "topr_scale": torch.tensor(scale, device=self.accelerator.device)}

    @torch.no_grad()
    def _compute_log_mu(self, buffer: ReplayBuffer) -> None:
        """Compute log μ of logged rows that brought none, while the weights are those that training starts from."""
        size, pad = self.args.per_device_train_batch_size, self._tokenizer.pad_token_id
        unknown = buffer.without_log_mu(self.args.limits)
        one = torch.tensor([pad])
        blank = ReplayRow(one, one, one == pad, torch.zeros(1), reward=0.0, number=0, step=0)
        # Sharded weights need all processes, as often as the one with the most rows.
        starts = range(0, int(max(self._of_all(len(unknown)))), size)
        computed: dict[int, Tensor] = {}
        for start in tqdm(
            starts, "Computing log μ", disable=not (starts and self.is_world_process_zero()), leave=False
        ):
            rows = unknown[start : start + size]
            batch = batch_of(rows or [blank], pad, self.accelerator.device)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            length = batch["completion_ids"].size(1)
            logps_BT = self._get_per_token_logps_and_entropies(self.model, ids, mask, length, batch_size=size)[0]
            computed |= {row.number: logps_T for row, logps_T in zip(rows, logps_BT.float().cpu(), strict=False)}
        buffer.set_log_mu(computed)

    def _of_all(self, number: float) -> list[float]:
        """A number of each process."""
        return self.accelerator.gather(torch.tensor([float(number)], device=self.accelerator.device)).tolist()

    def _trim_padding(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Drop the trailing columns that no completion here needs: TRL pads to the longest of the generation batch."""
        if "pixel_values" in batch:  # a tool may have shown an image: its tokens have to stay, masked or not
            return batch
        full, step = batch["completion_ids"].size(1), self.args.pad_to_multiple_of or 1
        needed = max(int(batch["completion_mask"].sum(-1).max()), 1)
        excess = max(full - -(-needed // step) * step, 0)
        with_columns = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
                        "sampling_per_token_logps", "importance_sampling_ratio",
                        "token_type_ids", "mm_token_type_ids")  # fmt: skip
        for name in with_columns:
            if name in batch and batch[name].size(1) >= full:
                batch[name] = batch[name][:, : batch[name].size(1) - excess]
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # A copy: the buffered batch is used again with num_iterations > 1. Its width has to be known on the host, so
        # this waits for the device, as TRL's own metrics of each micro-batch do.
        self._loss_inputs = inputs = self._trim_padding(dict(inputs))
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:
            self._taper(self._loss_inputs, policy_logps_BT=output[0])
        return output

    def _taper(self, inputs: dict[str, Any], policy_logps_BT: Tensor) -> None:
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        mu_logps = inputs.pop("old_per_token_logps", None)
        if mu_logps is None:  # TRL computes none when the weights are still those that sampled
            mu_logps = policy_logps_BT.detach()
        elif "topr_fresh" in inputs:  # beside rows that are used again; TRL may have computed none of the fresh ones
            unknown = mu_logps.isnan() & inputs["topr_fresh"].unsqueeze(-1)
            mu_logps = torch.where(unknown, policy_logps_BT.detach(), mu_logps)
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
        if self._replay is not None and self.model.training:
            self._replay.note(inputs["topr_rows"], mu_logps, completion_means(weights, mask))

        signal_B = rewards_B.nan_to_num(0.0) * inputs.get("topr_scale", 1.0)
        if not self.args.length_normalization:  # TRL divides by the length; undo it
            signal_B = signal_B * mask.sum(-1)
        inputs["advantages"] = weights * (signal_B.unsqueeze(-1) if weights.dim() == 2 else signal_B)
        # TRL's own ratio is exp(log π - log π) = 1 without old log-probabilities, with the gradient of log π; and its
        # correction for vLLM would be a second one on top of the taper.
        if "importance_sampling_ratio" in inputs:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])

    def _save_rng_state(self, output_dir: str) -> None:
        """Keep the rows to be used again with the checkpoint; each process has its own."""
        if self._replay is not None:
            self._replay.settle()
            path = self._replay_file(output_dir)
            path.parent.mkdir(parents=True, exist_ok=True)  # the main process may not have made it yet
            torch.save({**self._replay.state(), "rows_made": self._rows_made}, path)
        super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._replay is None or checkpoint is None:
            return
        path, count = self._replay_file(checkpoint), len(list(Path(checkpoint).glob("replay_*.pt")))
        if count != self.accelerator.num_processes:
            warnings.warn(
                f"{checkpoint} has the rows of {count} processes to be used again, and now there are "
                f"{self.accelerator.num_processes}: what has no process, or no file, is left out.",
                stacklevel=2,
            )
        rows_made = self._rows_made
        if path.is_file():
            try:
                state = torch.load(path, weights_only=True)
            except Exception as error:
                raise ValueError(f"{path} is damaged ({error}). Put it back whole, or remove it.") from error
            self._replay.load(state)
            rows_made = state["rows_made"]
        else:  # the weights are no longer those that log μ of logged rows would be of
            self._replay.remove(self._replay.without_log_mu(self.args.limits))
        self._rows_made = int(max(self._of_all(rows_made)))

    def _replay_file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"replay_{self.accelerator.process_index}.pt"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics[self._mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # of GRPO's clipping, always 0 here
        if self.args.log_completions:
            self._show_weights_in_completions()
        if self._mode == "train" and self._rows_made and not (self._any_signal or self._warned_of_silence):
            self._warned_of_silence = True
            warnings.warn(
                f"All {self._rows_made} completions so far have R = 0 after baseline={self.args.baseline}: their "
                "rewards are all the same, and there is nothing to learn. Look at the reward functions.",
                stacklevel=2,
            )
        super().log(logs, start_time)
