"""Check the arguments of a trainer, its model, and the checkpoint to resume from, before training begins."""

import math
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.utils import get_config_model_id

from topr_trl.data.tokenized_rows import check_special_tokens
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.settings.unsupported import is_loss, needs_metric_for_best_model
from topr_trl.trainers.checkpoints import STATE, check_files, check_resumable, from_safetensors, refuse_adapter
from topr_trl.trainers.forward_checks import text_model
from topr_trl.user_warnings import warn_user

Config = TypeVar("Config", TOPRConfig, OfflineTOPRConfig)


def model_and_settings(trainer: str, model: Any, args: Config | None, kind: type[Config]) -> tuple[Any, Config]:
    """Return the model and the settings of a trainer, or default settings if `args` is None.

    A path becomes text, because TRL requires text. If the model is given by name, `model_init_kwargs` gets
    `use_safetensors=True`, unless it sets this argument itself.

    Args:
        trainer (`str`):
            Name of the trainer, for the error.
        model (`Any`):
            Model, name of a model on the Hub, or folder.
        args ([`TOPRConfig`], [`OfflineTOPRConfig`] or [`AsyncTOPRConfig`], *optional*):
            Settings. `None` creates default settings with the output folder `MODEL-TOPR`.
        kind (`type`):
            Class that the settings must have.

    Raises:
        TypeError: `args` is not an instance of `kind`.
        FileNotFoundError: `model` is the path of a folder that does not exist.
        ValueError: the folder has no usable weights (see `from_safetensors`), or only an adapter.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = kind(f"{name.split('/')[-1]}-TOPR")
    if not isinstance(args, kind):
        raise TypeError(f"{trainer} needs {kind.__name__} as args, not {type(args).__name__}.")
    if isinstance(model, str):
        refuse_adapter(model)
        args.model_init_kwargs = from_safetensors(model, args.model_init_kwargs)
    return model, args


def checked_checkpoint(
    checkpoint: str | bool | None, folder: str, model: nn.Module, is_deepspeed: bool, fsdp_type: str | None
) -> Path | None:
    """Check the checkpoint to resume from, and return its folder. Return None for a new run.

    Args:
        checkpoint (`str` or `bool`, *optional*):
            Folder of the checkpoint. `True` takes the last checkpoint in `folder`.
        folder (`str`):
            Output folder of the trainer.
        model (`torch.nn.Module`):
            Model of the trainer.
        is_deepspeed (`bool`):
            Whether the trainer uses DeepSpeed.
        fsdp_type (`str`, *optional*):
            `fsdp_state_dict_type` of the trainer, if it uses FSDP.

    Raises:
        ValueError: the checkpoint is missing, damaged or incomplete, has weights of a different shape, or was saved
            with another `fsdp_state_dict_type`.
    """
    if checkpoint is True and (checkpoint := get_last_checkpoint(folder)) is None:
        raise ValueError(f"There is no checkpoint in {folder} to resume from.")
    if not checkpoint:
        return None
    if not Path(checkpoint).is_dir():
        raise ValueError(f"There is no checkpoint {checkpoint} to resume from.")
    check_files(checkpoint, model)
    check_resumable(checkpoint, is_deepspeed, fsdp_type)
    return Path(checkpoint)


def warn_if_updates_vanish(model: nn.Module, is_deepspeed: bool) -> None:
    """Warn if the weights to train are float16 or bfloat16, where updates at the paper's learning rate round to 0.

    With an adapter, or under DeepSpeed, there is no warning.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    # Until it saves the model, DeepSpeed keeps a float32 copy of the weights.
    if trained and not is_deepspeed and not is_peft_model(model):
        warn_user(
            f"The weights to train are {trained.pop()}, without a float32 copy: updates smaller than about 1/256 of a "
            "weight round to nothing, and at a learning rate like 5e-7 nearly all updates are smaller. Load the "
            "model in float32 (the computation stays in bfloat16 with bf16=True), or use DeepSpeed."
        )


def refuse_unknown_experts(model: nn.Module, aux_loss: bool) -> None:
    """Raise a ValueError if TRL cannot find the number of experts for the auxiliary loss (huggingface/trl#5754)."""
    config = text_model(model).config.get_text_config()
    aux_loss = aux_loss or getattr(config, "output_router_logits", False)
    if aux_loss and not hasattr(config, "num_experts") and config.model_type != "gpt_oss":
        raise ValueError(
            f"{type(config).__name__} has no num_experts, which TRL's auxiliary loss reads. Set "
            "router_aux_loss_coef=0, and model.config.output_router_logits=False if it is on."
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise a ValueError if there is no pad token, or the model has no embedding for the pad token or stop token."""
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


def check_state_is_whole(checkpoint: Path, args: TOPRConfig, dataset: object) -> None:
    """Raise an error if a checkpoint lacks the reference model, and warn if it lacks an unfinished generation batch.

    Raises:
        ValueError: `sync_ref_model=True`, so the reference model changes during training.
    """
    if args.sync_ref_model:
        raise ValueError(
            "A run with sync_ref_model=True cannot be resumed: its checkpoints do not contain the reference model. "
            f"Start a new run with {checkpoint} as the model, in another output_dir."
        )
    uses, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    steps = uses // math.gcd(uses, accumulation)
    step = TrainerState.load_from_json(str(checkpoint / STATE)).global_step
    if isinstance(dataset, Dataset):  # The last step of an epoch can have fewer micro-batches.
        batches = len(dataset) // (args.generation_batch_size // args.num_generations)
        epoch = math.ceil(batches * uses / accumulation)
        step %= epoch
        steps = epoch if epoch % steps else steps
    if done := step * accumulation % uses:
        warn_user(
            f"{checkpoint} was saved after {done} of the {uses} micro-batches of a generation batch, and does not "
            "contain the batch. The run generates a new batch from these prompts, and uses it for all micro-batches. "
            f"To avoid this, set save_steps to a multiple of {steps}."
        )


def check_metric_for_best_model(args: TOPRConfig, eval_dataset: object) -> None:
    """Raise a ValueError if `metric_for_best_model` is `reward` or a loss, although the evaluation sets have names.

    Nothing is checked if no setting, such as `load_best_model_at_end`, needs the metric.
    """
    if not isinstance(eval_dataset, dict) or not needs_metric_for_best_model(args):
        return
    if is_loss(args.metric_for_best_model, eval_dataset) or args.metric_for_best_model in ("reward", "eval_reward"):
        names = ", ".join(f"eval_{name}_reward" for name in eval_dataset)
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is the loss, or names none of the evaluation sets. "
            f"Set it to one of {names}."
        )
