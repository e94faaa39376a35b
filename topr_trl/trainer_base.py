"""What both trainers share: the paper on model cards, metrics of rows, warnings about settings that cannot learn."""

import math
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from topr_trl.checkpoints import StopAtNaN, check_files, check_finite, not_finite
from topr_trl.curation import Curated
from topr_trl.evaluation.estimates import Evaluation
from topr_trl.evaluation.plots import plot_evaluations
from topr_trl.loss import TruncationLimits
from topr_trl.metrics import RowMetrics
from topr_trl.model_card import PAPER, PICTURE, add_evaluation, model_card, training_facts


class TOPRMixin:
    """Goes before a trainer of TRL in the bases of a TOPR trainer.

    Attributes:
        evaluations (`Mapping[str, Evaluation]`): by name, such as `before` and `after`; for the model card.
    """

    _tag_names = ["trl", "topr"]
    _name = "TOPR"
    _paper = PAPER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._row_metrics = {"train": RowMetrics(), "eval": RowMetrics()}
        self._warned_about_signs: set[str] = set()
        self.evaluations: Mapping[str, Evaluation] = {}
        super().__init__(*args, **kwargs)
        self.add_callback(StopAtNaN(self))  # type: ignore[attr-defined]
        _warn_if_updates_vanish(self.model, self.is_deepspeed_enabled)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, if weights and checkpoint can be used; see `transformers.Trainer.train`.

        What was logged is in `output_dir/trainer_state.json` afterwards, however it ends.

        Raises:
            FloatingPointError: weights, loss or gradients are NaN or infinite.
            ValueError: a file of the checkpoint is damaged. Offline: rows carry log μ that is malformed or another
                model's; or the run is resumed, and its log μ is missing or of other rows.
        """
        check_finite(self.model, "The model to train")  # type: ignore[attr-defined]
        self._check_checkpoint(resume_from_checkpoint)
        self._before_training(resumed=bool(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]
        finally:
            if self.state.log_history:  # type: ignore[attr-defined]
                with suppress(OSError):  # a full disk would hide what has ended the training
                    self.save_state()  # type: ignore[attr-defined]

    def _check_checkpoint(self, checkpoint: Any) -> None:
        folder = self.args.output_dir  # type: ignore[attr-defined]
        if checkpoint is True and (checkpoint := get_last_checkpoint(folder)) is None:
            raise ValueError(f"There is no checkpoint in {folder} to resume from.")
        if checkpoint:
            if not Path(checkpoint).is_dir():
                raise ValueError(f"There is no checkpoint {checkpoint} to resume from.")
            check_files(checkpoint, self.model)  # type: ignore[attr-defined]

    def _before_training(self, resumed: bool) -> None:
        """For what a trainer does before a checkpoint is loaded."""

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model, if its weights are finite; see `transformers.Trainer.save_model`.

        Raises:
            FloatingPointError: they are not. Nothing is written, and no older checkpoint removed.
            OSError: the disk is full, say.
        """
        folder = output_dir or self.args.output_dir  # type: ignore[attr-defined]
        check_finite(self.model, f"The model is not saved to {folder}")  # type: ignore[attr-defined]
        try:
            super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
        except SafetensorError as error:
            raise OSError(f"The model cannot be written to {folder}: {error}") from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of `topr_trl.metrics.describe` to what TRL logs.

        Raises:
            FloatingPointError: the loss, or the norm of its gradient, is NaN or infinite.
        """
        # The scaler of float16 leaves out steps whose norm is infinite.
        scaled = self.accelerator.mixed_precision == "fp16"  # type: ignore[attr-defined]
        known = ["loss"] if scaled else ["loss", "grad_norm"]
        for name in known:
            if not math.isfinite(logs.get(name) or 0.0):
                what = f"`{name}` at step {self.state.global_step}"  # type: ignore[attr-defined]
                raise not_finite(what, self.args.output_dir)  # type: ignore[attr-defined]
        mode = "train" if self.model.training else "eval"  # type: ignore[attr-defined]
        for name, value in self._row_metrics[mode].flush(self.accelerator).items():  # type: ignore[attr-defined]
            self._metrics[mode][name].append(value)  # type: ignore[attr-defined]
        for values in self._metrics[mode].values():  # type: ignore[attr-defined]
            if values and isinstance(values[0], torch.Tensor):  # left on the device until now
                values[:] = [torch.stack(values).mean().item()]
        super().log(logs, start_time)  # type: ignore[misc]

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` in the output folder: the method, how and on what it was trained, limits, citations.

        With `evaluations` set, their table, and a picture if matplotlib is installed, are part of it.
        """
        super().create_model_card(model_name, dataset_name, tags)  # type: ignore[misc]
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        args, path = self.args, Path(self.args.output_dir) / "README.md"  # type: ignore[attr-defined]
        of_trl, curated = ModelCard.load(path), getattr(self, "curated", None)  # its metadata, and links to trackers
        of_trl.data.pop("licence")
        if is_peft_model(self.model):  # type: ignore[attr-defined]
            of_trl.data.library_name = "peft"
        rows = "generated while training" if curated is None else str(curated)
        facts = training_facts(args, rows, self.state.global_step, args.learning_rate, args.optim)  # type: ignore[attr-defined]
        card = model_card(
            of_trl.data,
            self.hub_model_id or model_name or args.output_dir,  # type: ignore[attr-defined]
            facts,
            problems=dataset_name and f"[{dataset_name}](https://huggingface.co/datasets/{dataset_name})",
            links="\n".join(re.findall(r"^\[<img .*", of_trl.text, re.MULTILINE)),
        )
        if self.evaluations:
            picture = find_spec("matplotlib") is not None
            if picture:
                plot_evaluations(self.evaluations, path.with_name(PICTURE))
            add_evaluation(card, self.evaluations, picture=picture)
        card.save(path)

    def _save_rng_state(self, output_dir: str) -> None:
        """Wait for the other processes: what is written next says that the checkpoint is whole."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]

    def _warn_about_signs(self, curated: Curated, zeros: bool, limits: TruncationLimits) -> None:
        """Warn, once each, of candidates that are all positive, all negative, or without a reward at all."""
        positives, negatives = curated.available_positives, curated.available_negatives
        if not positives and not negatives:
            sign = "no"
            message = "No response has a reward, so there is nothing to learn from them: the weights stay as they are."
            if getattr(self.args, "mask_truncated_completions", False):  # type: ignore[attr-defined]
                message += " Those that are cut at max_completion_length have none with mask_truncated_completions."
        elif positives and not negatives and limits.b_neg > 0:
            sign = "positive"
            message = (
                f"None of the {positives} candidates has a negative reward after the baseline: TOPR then is "
                "reward-weighted supervised fine-tuning."
            )
            if zeros:
                message += " Rewards of 0 are no negatives: set baseline=0.5, or effective_positive_share."
        elif negatives and not positives:
            sign = "negative"
            message = (
                f"All {negatives} candidates have a negative reward after the baseline: the model only learns what "
                "to avoid, and nothing says what to write instead. Add positives, or lower the baseline."
            )
        else:
            return
        if sign not in self._warned_about_signs:
            self._warned_about_signs.add(sign)
            warnings.warn(message, stacklevel=2)


def _warn_if_updates_vanish(model: nn.Module, is_deepspeed: bool) -> None:
    """Warn of weights in half precision: a step of the paper's size is below their resolution and is lost."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    # DeepSpeed keeps float32 weights of its own.
    if trained and not is_deepspeed and not is_peft_model(model):
        warnings.warn(
            f"The weights to train are {trained.pop()}, without a float32 copy: updates smaller than about 1/256 of a "
            "weight round to nothing, and at a learning rate like 5e-7 nearly all are. Load the model in float32 "
            "(the computation stays in bfloat16 with bf16=True), or use DeepSpeed.",
            stacklevel=2,
        )
