"""What both trainers share: the paper on model cards, metrics of rows, warnings about settings that cannot learn."""

import math
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from topr_trl.curation import Curated
from topr_trl.limits import TruncationLimits
from topr_trl.metrics import RowMetrics
from topr_trl.weights import StopAtNaN, check_files, check_finite, not_finite

PAPER = {
    "title": "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    "id": "2503.14286",
    "citation": textwrap.dedent("""\
        @article{leroux2025topr,
            title  = {{Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs}},
            author = {Nicolas {Le Roux} and Marc G. Bellemare and Jonathan Lebensold and Arnaud Bergeron and
                      Joshua Greaves and Alex Fr{\\'e}chette and Carolyne Pelletier and Eric Thibodeau-Laufer and
                      S{\\'a}ndor Toth and Sam Work},
            year   = 2025,
            eprint = {arXiv:2503.14286},
        }"""),
}


class TOPRMixin:
    """Goes before a trainer of TRL in the bases of a TOPR trainer."""

    _tag_names = ["trl", "topr"]
    _name = "TOPR"
    _paper = PAPER

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, str):
            check_files(model)
        self._row_metrics = {"train": RowMetrics(), "eval": RowMetrics()}
        self._warned_about_signs: set[str] = set()
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        self.add_callback(StopAtNaN(self))  # type: ignore[attr-defined]
        _warn_if_updates_vanish(self.model, self.is_deepspeed_enabled)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, if weights and checkpoint can be used; see `transformers.Trainer.train`.

        Raises:
            FloatingPointError: weights, loss or gradients are NaN or infinite.
            ValueError: a file of the checkpoint is damaged.
        """
        check_finite(self.model, "The model to train")  # type: ignore[attr-defined]
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined]
        if checkpoint:
            check_files(checkpoint, self.model)  # type: ignore[attr-defined]
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]

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
        known = ["loss"] if self.accelerator.scaler is not None else ["loss", "grad_norm"]  # type: ignore[attr-defined]
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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card, and what was learned from which rows; see `trl.trainer.base_trainer._BaseTrainer`."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        path = Path(self.args.output_dir) / "README.md"  # type: ignore[attr-defined]
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            before, heading, after = path.read_text().partition("### Framework versions")
            path.write_text(f"{before}{self._how_it_was_trained()}\n\n{heading}{after}")

    def _how_it_was_trained(self) -> str:
        """A section of the model card."""
        settings = self.args  # type: ignore[attr-defined]
        limits = settings.limits
        share, curated = settings.effective_positive_share, getattr(self, "curated", None)
        facts = {
            "truncation limits": f"R >= 0: [{limits.a_pos:g}, {limits.b_pos:g}]; R < 0: [{limits.a_neg:g}, "
            f"{limits.b_neg:g}] (`{settings.preset}`)",
            "baseline": f"{settings.baseline}"
            if share is None
            else f"solved for an effective positive share of {share:g}",
            "curation": settings.curation,
            "rows": "generated while training" if curated is None else str(curated),
            "ratio": f"{settings.ratio_level}, log μ of the {settings.log_mu}",
            "steps": f"{self.state.global_step}, learning rate {settings.learning_rate:g}, {settings.optim}",  # type: ignore[attr-defined]
        }
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())])

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
