"""Compute a prompt once for all of its completions in a batch.

The trainers import only from this module. `layout.py` converts batches, `attention.py` changes the forward pass of the
model, and `check.py` tests whether log π stays the same.

On a CPU, a step with shared prompts was 1.6 to 4.9 times faster. On a GPU, the step was faster in one of four measured
cases, so sharing is off by default on a GPU. To share prompts, the trainers replace the attention of the model by
an implementation that knows the groups of a batch.
"""

from math import gcd
from typing import Any

from accelerate.utils import gather_object
from torch import nn

from topr_trl.data.batch_samplers import rows_together
from topr_trl.data.tokenized_rows import part_saved_by_sharing, prompt_groups
from topr_trl.trainers.forward_checks import text_model, tolerance, without_cudnn_attention
from topr_trl.trainers.messages import say
from topr_trl.trainers.shared_prompts.attention import SharedPrompts, remove_shared_prompts
from topr_trl.trainers.shared_prompts.check import why_not_shared
from topr_trl.trainers.shared_prompts.layout import LEAST_SAVED, LEAST_SHARED, prompts_together

__all__ = ["PromptSharing", "remove_shared_prompts", "share_generated", "share_stored"]

_EXACT = 1e-4  # largest allowed difference of log π from sharing prompts, in float32 on a CPU, in nats per token


class PromptSharing:
    """Sharing of prompts in one trainer. It is off until `install` is called.

    Args:
        trainer (`TOPRMixin`):
            Trainer with its model.

    Attributes:
        together (`int`):
            Number of rows of a prompt that training keeps together.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._shared: SharedPrompts | None = None
        self.together = 1

    @property
    def is_on(self) -> bool:
        """Whether the model shares prompts."""
        return self._shared is not None

    @property
    def is_wanted(self) -> bool:
        """Whether to share prompts. If the setting `share_prompts` is None, prompts are shared only on a CPU."""
        args = self._trainer.args
        return bool(args.device.type == "cpu" if args.share_prompts is None else args.share_prompts)

    def install(self) -> None:
        """Share prompts between adjacent rows. If the model's attention cannot be replaced, print the reason."""
        try:
            self._shared = SharedPrompts(text_model(self._trainer.model))
        except ValueError as error:
            self.say_why_not(str(error))
        else:
            what = f"prompts of more than {LEAST_SHARED} tokens are computed once for adjacent completions."
            say(what, self._trainer.args)

    def check(self, model: nn.Module) -> None:
        """Stop sharing prompts if sharing fails or changes log π on any process.

        Args:
            model (`torch.nn.Module`):
                Model to call, which FSDP or DeepSpeed may have wrapped.
        """
        if self._shared is None:
            return
        trainer, was_training = self._trainer, model.training
        model.eval()
        # In float32 on a CPU, rounding stays below `_EXACT`. This tight limit also finds small errors: for instance,
        # older releases of transformers ignore the softcap of Gemma 2 with "sdpa".
        is_exact = trainer.args.device.type == "cpu" and not trainer._is_half
        with trainer.accelerator.autocast(), without_cudnn_attention():
            limit = _EXACT if is_exact else tolerance(trainer._is_half)
            found = why_not_shared(self._shared, model, trainer.args.device, limit)
        model.train(was_training)
        why_not = next((why for why in gather_object([found]) if why is not None), None)
        if why_not is not None:
            if trainer._is_checked:
                self._shared.remove()
            # A model that FSDP or DeepSpeed has wrapped keeps the replaced `forward`. While `enabled` is False, this
            # `forward` shares no prompts.
            self._shared.enabled = False
            self._shared, self.together = None, 1
            self.say_why_not(why_not)

    def say_why_not(self, why: str) -> None:
        """Print why prompts are not shared."""
        name = type(text_model(self._trainer.model)).__name__
        what = f"prompts are computed again for each completion, because {name} cannot share them: {why}."
        say(what, self._trainer.args)

    def log_tokens(self, metrics: dict[str, list[Any]]) -> None:
        """Log the share of a batch's tokens that the last forward pass computed, if prompts are shared."""
        if self._shared is not None:
            metrics["topr/computed_tokens"].append(self._shared.computed_part)

    def arrange(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Make rows of a prompt adjacent within each optimizer step of a generation batch.

        Each step trains on the same rows as without sharing.

        Args:
            batches (`list[dict[str, Any]]`):
                Micro-batches of a generation batch of a `TOPRTrainer`.
        """
        if self._shared is None:
            return batches
        in_step = gcd(len(batches), self._trainer.args.gradient_accumulation_steps)
        starts = range(0, len(batches), in_step)
        return [batch for start in starts for batch in prompts_together(batches[start : start + in_step])]


def share_generated(trainer: Any) -> PromptSharing:
    """Share prompts of a `TOPRTrainer` if sharing is wanted, and a micro-batch can hold two rows of a prompt."""
    sharing, args = PromptSharing(trainer), trainer.args
    if not sharing.is_wanted or min(trainer.num_generations, args.per_device_train_batch_size) < 2:
        return sharing
    if trainer._is_vlm:
        sharing.say_why_not("its rows may have images")
    elif args.use_transformers_continuous_batching:
        sharing.say_why_not("continuous batching needs its own attention")
    else:
        sharing.install()
    return sharing


def share_stored(trainer: Any) -> PromptSharing:
    """Share prompts of an `OfflineTOPRTrainer`, and decide whether training keeps the rows of a prompt together.

    If the setting `share_prompts` is None, prompts are shared only on a CPU, and only if sharing saves at least
    `LEAST_SAVED` of the tokens in training or for log μ.
    """
    sharing, args, rows = PromptSharing(trainer), trainer.args, trainer.train_dataset
    if not sharing.is_wanted:
        return sharing
    groups = prompt_groups(rows)
    # `together` and `saved` depend neither on the number of processes nor on the size of a micro-batch, so neither
    # does the order of the rows.
    together = rows_together(trainer._rows_per_step)
    saved = part_saved_by_sharing(rows, groups, together, LEAST_SHARED)
    batch = min(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    has_log_mu = "mu_logps" in rows.column_names
    saved_log_mu = 0.0 if has_log_mu else part_saved_by_sharing(rows, groups, batch, LEAST_SHARED)
    if args.share_prompts is None and max(saved, saved_log_mu) < LEAST_SAVED:
        return sharing
    sharing.install()
    if not sharing.is_on:
        return sharing
    if saved < LEAST_SAVED:
        say("training keeps the order of rows, so a prompt is shared only where its rows are already adjacent.", args)
        return sharing
    in_a_batch = min(together, args.per_device_train_batch_size)  # Rows share a prompt within a micro-batch.
    saved_in_batches = part_saved_by_sharing(rows, groups, in_a_batch, LEAST_SHARED)
    sharing.together = together
    say(
        f"rows of a prompt are read in groups of up to {together}. Micro-batches of "
        f"{args.per_device_train_batch_size} rows save about {saved_in_batches:.0%} of the tokens.",
        args,
    )
    return sharing
