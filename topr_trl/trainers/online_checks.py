"""Check settings, datasets and checkpoints of the online trainer."""

import math
from pathlib import Path

from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerState

from topr_trl.data.tokenized_rows import check_special_tokens
from topr_trl.settings.config import TOPRConfig
from topr_trl.settings.unsupported import needs_metric_for_best_model
from topr_trl.trainers.checkpoints import STATE
from topr_trl.user_warnings import warn_user


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise a ValueError if there is no token for padding, or the model has no embedding for it."""
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "The tokenizer has neither a pad token nor a stop token, so completions cannot be padded to a batch. "
            "Set tokenizer.pad_token and tokenizer.eos_token."
        )
    check_special_tokens(tokenizer, config)


def check_prompts(args: TOPRConfig, dataset: object) -> None:
    """Raise a ValueError if a training dataset has fewer prompts than a generation batch (huggingface/trl#3477)."""
    needed = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"A generation batch needs {needed} prompts, and the training dataset has {len(dataset)}. The batch has "
            f"generation_batch_size={args.generation_batch_size} completions, num_generations={args.num_generations} "
            "per prompt. Add prompts, raise num_generations, or lower generation_batch_size (if you set it), "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )


def check_state_is_whole(checkpoint: Path, args: TOPRConfig) -> None:
    """Raise an error if a checkpoint lacks the reference model. Warn if it lacks a part of a generation batch.

    Raises:
        ValueError: `sync_ref_model=True`, so the reference model changes during training.
    """
    if args.sync_ref_model:
        raise ValueError(
            "A run with sync_ref_model=True cannot be resumed: its checkpoints do not contain the reference model. "
            f"Start a new run with {checkpoint} as the model, in another output_dir."
        )
    micro_batches = args.steps_per_generation * args.num_iterations
    steps = micro_batches // math.gcd(micro_batches, args.gradient_accumulation_steps)
    done = TrainerState.load_from_json(str(checkpoint / STATE)).global_step % steps
    if done:
        warn_user(
            f"{checkpoint} was saved after {done} of the {steps} steps of a generation batch, and does not contain the "
            "batch. The run generates a new batch from these prompts, and uses it for all steps. To avoid this, set "
            f"save_steps to a multiple of {steps}."
        )


def check_metric_for_best_model(args: TOPRConfig, eval_dataset: object) -> None:
    """Raise a ValueError if `metric_for_best_model` is `reward` or a loss, although the evaluation sets have names."""
    if not isinstance(eval_dataset, dict) or not needs_metric_for_best_model(args):
        return
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    if metric in ("reward", *(f"{name}_loss" for name in eval_dataset)):
        names = ", ".join(f"eval_{name}_reward" for name in eval_dataset)
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is the loss, or names none of the evaluation sets. "
            f"Set it to one of {names}."
        )
