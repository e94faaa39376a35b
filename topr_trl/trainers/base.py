"""Define the base class of the trainers: losses, the row log, checkpoints, evaluation and logging."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback

from topr_trl.loss import LossOutputs, topr_loss
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.trainers.checkpoints import (
    StopAtNaN,
    check_finite,
    fsdp_plugin,
    not_finite,
    whole_fsdp_weights,
    writing_to,
)
from topr_trl.trainers.forward_checks import refuse_adapters, text_model, turn_off_noise, without_cudnn_attention
from topr_trl.trainers.messages import print_log_lines, say
from topr_trl.trainers.metrics import RowLog, row_values, without_ratio
from topr_trl.trainers.model_card import CardSection, complete_card, training_facts
from topr_trl.trainers.quantization import (
    adapter_weights,
    keep_adapter_in_float32,
    keep_gradients_of_4bit_layers,
)
from topr_trl.trainers.run_identity import Identity, given_optimizer, identity_of_run, write_identity
from topr_trl.trainers.shared_prompts import PromptSharing, remove_shared_prompts
from topr_trl.trainers.start_checks import checked_checkpoint, refuse_unknown_experts, warn_if_updates_vanish
from topr_trl.trainers.training_warnings import warn_of_pushed_rows, warn_of_weights


class TOPRMixin(Trainer):
    """Base class of the TOPR trainers. In a list of base classes, it must precede TRL's trainer.

    Attributes:
        evaluations (`CardSection`, *optional*):
            Evaluations for the model card, for instance `topr_trl.Evaluations(before=..., after=...)`.
    """

    _tag_names = ["trl", "topr"]
    _kind: str  # name of the kind of trainer, for the identity of the run
    _run: Identity  # identity of the latest run; see `topr_trl.trainers.run_identity`
    args: TOPRConfig | OfflineTOPRConfig
    _rows_trained_on: str  # description of the training rows, for the model card
    _order: Sampler[int] | None = None  # sampler of the training rows
    _sharing: PromptSharing
    _log_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None  # see `LogCompletions.add_tokens`
    _is_checked = True  # whether the checks of `_check_model` have run, or the trainer has none

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._row_log = RowLog()
        # Readers of the row log that get the rows of training or of evaluation. Subclasses add more readers.
        self._row_readers = {"train": ["train"], "eval": ["eval"]}
        self._said: set[object] = set()  # messages and warnings that are given only once
        self.evaluations: CardSection | None = None
        self._metric_prefix = "eval"  # metric prefix of the current evaluation
        self._sharing = PromptSharing(self)
        model = args[0] if args else kwargs.get("model")
        adapter = adapter_weights(model)
        if isinstance(model, nn.Module):
            remove_shared_prompts(text_model(model))  # An earlier trainer may have installed shared prompts.
        super().__init__(*args, **kwargs)
        self._loss_settings = self.args.loss_settings
        self._given_optimizer = given_optimizer(self)
        refuse_adapters(self.model, self.args.gradient_checkpointing)
        refuse_unknown_experts(self.model, getattr(self, "aux_loss_enabled", False))
        keep_gradients_of_4bit_layers(self.model)
        keep_adapter_in_float32(self.model, adapter)
        if noise := turn_off_noise(self.model):
            say(f"{', '.join(noise)} set to 0: noise in log π would change π/μ.", self.args)
        print_log_lines(self)
        self.add_callback(StopAtNaN(self))
        self.add_callback(_Beginning(self))
        warn_if_updates_vanish(self.model, self.is_deepspeed_enabled)
        if self._kind != "asynchronous":  # Its tables are only printed.
            warn_of_pushed_rows(self.args)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which keeps the dtype of the model's outputs under FSDP2.

        Otherwise, Accelerate would round log π of each token to bfloat16.
        """
        super().create_accelerator_and_postprocess()
        plugin = fsdp_plugin(self.accelerator)
        policy: Any = getattr(plugin, "mixed_precision_policy", None)
        if getattr(policy, "output_dtype", None) is not None:  # FSDP1's policy has no output_dtype.
            plugin.mixed_precision_policy = replace(policy, output_dtype=None)

    def _compute_losses(
        self, policy_logps_BT: Tensor, mu_logps: Tensor, rewards_N: Tensor, mask_BT: Tensor, numbers_N: Tensor
    ) -> LossOutputs:
        """Compute losses and weights with the settings of this trainer, and add the rows to the row log.

        Args:
            policy_logps_BT: (B, T) log π.
            mu_logps: (B, T) or (B,) log μ.
            rewards_N: (N,) R of N >= B rows. NaN marks a row that does not count, whose loss is 0. The forward pass
                skipped the rows after the first B, because R is 0 in these rows.
            mask_BT: (B, T) completion mask.
            numbers_N: (N,) row numbers, or (N, 2) with a second number.
        """
        mode = self._mode
        self._sharing.log_tokens(self._metrics[mode])
        rewards_B = rewards_N[: len(policy_logps_BT)].nan_to_num(0.0)
        outputs = topr_loss(policy_logps_BT, mu_logps, rewards_B, mask_BT, **self._loss_settings)
        self._row_log.add(self._row_readers[mode], numbers_N, row_values(outputs, rewards_N, mask_BT))
        if self._log_tokens is not None:
            self._log_tokens(numbers_N, policy_logps_BT.detach() - mu_logps, outputs.weights, mask_BT)
        return outputs

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _mode_of(self, logs: dict[str, float]) -> str:
        """Return the mode of a log. An evaluation leaves the model in evaluation mode, also for logs of training."""
        return "train" if {"loss", "train_runtime"} & logs.keys() else self._mode

    @property
    def _ratio_is_one(self) -> bool:
        """Whether π = μ for every row in the current mode (`train` or `eval`). If so, ratios are not logged."""
        return False

    @property
    def _is_ready(self) -> bool:
        """Whether the model can compute before training begins. If not, training first shards or moves the model."""
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        return not sharded and next(self.model.parameters()).device.type == self.args.device.type

    @property
    def _is_half(self) -> bool:
        """Whether the forward pass rounds to bfloat16 or float16."""
        dtype = next(self.model.parameters()).dtype
        return self.accelerator.mixed_precision != "no" or dtype not in (torch.float32, torch.float64)

    def _check_model(self, share: Callable[[Any], PromptSharing]) -> None:
        """Check log π of the model, and share prompts.

        If the model cannot compute before training begins, `_training_begins` runs the checks.
        """
        self._is_checked = self._is_ready
        if self._is_checked:
            check_finite(self.model, "The model to train")
            self._check_rows(self.model)
        self._sharing = share(self)
        if self._is_checked:
            self._sharing.check(self.model)

    def _check_rows(self, model: nn.Module) -> None:
        """Check that log π of a row does not depend on its batch. Subclasses override this method."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train the model. See `transformers.Trainer.train`.

        The log is written to `output_dir/trainer_state.json`, even after an error.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Checkpoint to resume from. `True` takes the last checkpoint in `output_dir`.
            **kwargs (`Any`):
                Other arguments of `transformers.Trainer.train`.

        Returns:
            `TrainOutput`: number of steps, mean training loss and metrics, as `transformers.Trainer.train` returns.

        Raises:
            FloatingPointError: a weight, loss or gradient is NaN or infinite.
            ValueError: no parameter can be trained. Or the checkpoint is missing, damaged, incomplete, or from a run
                with a different model, other rows, or other settings (see `topr_trl.trainers.run_identity`). Or log μ
                of stored rows is malformed or from a different model, or log μ of the resumed run is missing.
        """
        check_finite(self.model, "The model to train")
        if self._will_train and not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "No parameter of the model requires a gradient, so nothing would be trained. Load an adapter with "
                "PeftModel.from_pretrained(..., is_trainable=True), or unfreeze the weights to train."
            )
        checkpoint, folder = resume_from_checkpoint, self.args.output_dir
        plugin = fsdp_plugin(self.accelerator)
        fsdp_type = plugin and plugin.state_dict_type.name
        self._before_training(checked_checkpoint(checkpoint, folder, self.model, self.is_deepspeed_enabled, fsdp_type))
        try:
            with without_cudnn_attention():
                return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            if self.state.log_history:
                with suppress(OSError):  # An error here, such as a full disk, would hide the first error.
                    self.save_state()

    @property
    def _will_train(self) -> bool:
        """Whether `train` will run optimizer steps. Otherwise, `train` only computes log μ."""
        return bool(self.args.num_train_epochs) or self.args.max_steps > 0

    def _before_training(self, checkpoint: Path | None) -> None:
        """Prepare a new run (`checkpoint` is None), or a run to resume. Subclasses extend this method."""
        self._loss_settings = self.args.loss_settings  # The user can change `args` after creating the trainer.
        self._run = identity_of_run(self, checkpoint, self._run if self.state.global_step > 0 else None)

    def _identity_values(self) -> dict[str, Any]:
        """Return the values that only this kind of trainer adds to the identity of a run, by names in `COMPARED`."""
        return {}

    @property
    def _rows_per_micro_batch(self) -> int:
        """Number of rows that all processes read for one forward pass."""
        return self._rows_per_step // self.args.gradient_accumulation_steps

    @property
    def _rows_per_step(self) -> int:
        """Number of rows per optimizer step, over all processes and micro-batches."""
        return int(self.get_total_train_batch_size(self.args))

    def _training_begins(self, model: nn.Module) -> None:
        """Run tasks that need the model on its device, sharded under FSDP and ZeRO. Subclasses extend this method."""
        if not self._is_checked:
            self._check_rows(model)
            self._sharing.check(model)
            self._is_checked = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of the next optimizer step. See `transformers.Trainer.get_batch_samples`.

        After the last step, return no micro-batches. Otherwise, Trainer would take one more step if a run is resumed
        from its last checkpoint, and that checkpoint is not at the end of an epoch.

        Args:
            epoch_iterator (`Iterator`):
                Iterator over the micro-batches of the epoch.
            num_batches (`int`):
                Number of micro-batches of an optimizer step.
            device (`torch.device`):
                Device of the number of items.

        Returns:
            `tuple`: list of micro-batches, and the number of items for the loss, or None.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the dataloader of an evaluation set.

        The dataloader always keeps an incomplete last batch. The workers end with the evaluation, because Trainer
        caches a dataloader with persistent workers, and could evaluate the first dataset again instead of the second.
        """
        args_before, self.args = self.args, copy(self.args)
        self.args.dataloader_drop_last = self.args.dataloader_persistent_workers = False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args = args_before

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate one dataset. The row metrics are logged with the same prefix as the loss."""
        self._metric_prefix = metric_key_prefix
        self._row_log.discard("eval")  # `predict` does not log, so rows of a prediction may be left over.
        self._metrics["eval"].clear()
        with without_cudnn_attention():
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model if its weights are finite. See `transformers.Trainer.save_model`.

        Under FSDP, the weights are saved whole. With `fsdp_state_dict_type: SHARDED_STATE_DICT`, only checkpoints are
        sharded.

        Args:
            output_dir (`str`, *optional*):
                Folder to write to. `None` uses the output folder of the trainer.
            *args (`Any`):
                Other arguments of `transformers.Trainer.save_model`.
            **kwargs (`Any`):
                Other arguments of `transformers.Trainer.save_model`.

        Raises:
            FloatingPointError: a weight is NaN or infinite. Nothing is written, and no checkpoint is removed.
            OSError: the model cannot be written. The disk may be full.
        """
        folder = output_dir or self.args.output_dir
        check_finite(self.model, f"The model is not saved to {folder}")
        is_checkpoint = output_dir is not None and kwargs.get("_internal_call", False)
        with writing_to(folder), nullcontext() if is_checkpoint else whole_fsdp_weights(self.accelerator):
            super().save_model(output_dir, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with writing_to(Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state and the identity of the run, and wait until all processes have saved their state.

        The next file that Trainer writes, `trainer_state.json`, marks the checkpoint as complete.
        """
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            write_identity(output_dir, self._run)
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of `topr_trl.trainers.metrics.row_metrics` to TRL's log.

        Args:
            logs (`dict[str, float]`):
                Metrics that Trainer logs. See `transformers.Trainer.log`.
            start_time (`float`, *optional*):
                Start time of training. See `transformers.Trainer.log`.

        Raises:
            FloatingPointError: the loss or the norm of its gradient is NaN or infinite. With float16 mixed precision,
                only the loss is checked.
        """
        if "train_runtime" in logs and not self.state.global_step:
            return  # Skip the summary of a run without a step. See OfflineTOPRTrainer.compute_log_mu.
        # With float16, an infinite norm is normal: the loss scaler skips the step.
        scaled = self.accelerator.mixed_precision == "fp16"
        for name in ["loss"] if scaled else ["loss", "grad_norm"]:
            if not math.isfinite(logs.get(name) or 0.0):
                raise not_finite(f"`{name}` at step {self.state.global_step}", self.args.output_dir)
        mode, was_training = self._mode_of(logs), self.model.training
        self.model.train(mode == "train")  # Callbacks and TRL read the mode of the model.
        collected, found = self._metrics[mode], self._row_log.read_metrics(mode, self.accelerator)
        if self._ratio_is_one:
            found = without_ratio(found)
        for name, value in found.items():
            collected[name].append(value)
        # If the two limits for negatives are equal, weights of 0 are intended.
        if mode == "train" and self._loss_settings["limits"].ratio_matters_neg:
            warn_of_weights(found, self.state, self.args.ratio_level, self._said)
        for values in collected.values():
            if values and isinstance(values[0], Tensor):  # Wait for the device once, not for each value.
                values[:] = [torch.stack(values).mean().item()]
        if mode == "eval":  # TRL would give the metrics of all evaluation sets the same names.
            logs.update({f"{self._metric_prefix}_{name}": _mean(values) for name, values in collected.items()})
            collected.clear()
        super().log(logs, start_time)
        self.model.train(was_training)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card `README.md` to the output folder.

        The card has the method, the settings, the training rows, limitations and citations. If `evaluations` is set,
        the card has their table, and a plot if matplotlib is installed.

        Args:
            model_name (`str`, *optional*):
                Name of the model, used only if the trainer has no `hub_model_id`. `None` uses the output folder.
            dataset_name (`str`, *optional*):
                Id of the dataset of problems on the Hub.
            tags (`str` or `list[str]`, *optional*):
                Tags that are added to the metadata.
        """
        super().create_model_card(model_name, dataset_name, tags)
        if not self.is_world_process_zero():
            return
        args = self.args
        facts = training_facts(
            args, self._rows_trained_on, self.state.global_step, self._kind == "offline", self._given_optimizer
        )
        name = self.hub_model_id or model_name or args.output_dir
        complete_card(Path(args.output_dir), name, facts, dataset_name, is_peft_model(self.model), self.evaluations)


def _mean(values: list[float]) -> Any:
    """Return the mean of the values that are not NaN. If all are NaN, return None, because JSON has no NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


class _Beginning(TrainerCallback):
    """Callback that calls `_training_begins` of the trainer, and passes the number of each epoch to the row sampler.

    Accelerate does not pass the number if a run with several processes is resumed, because Accelerate then wraps the
    dataloader to skip batches.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._training_begins(self.trainer.model_wrapped)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if hasattr(self.trainer._order, "set_epoch"):
            self.trainer._order.set_epoch(int(state.epoch or 0))
