"""Identify a run by a JSON document in each checkpoint, and compare the document when the run is resumed.

`COMPARED` lists the values that are compared. All other settings may change when a run is resumed, because they change
only the place and the speed of the computation, or the logs, checkpoints and evaluations.
"""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate.utils import is_peft_model
from packaging.version import Version

from topr_trl.settings.unsupported import SCHEDULES_BY_METRIC
from topr_trl.trainers.fingerprints import base_fingerprint, mu_fingerprint
from topr_trl.user_warnings import warn_user

FILE = "topr_run.json"  # name of the document in a checkpoint
# Before this version, a resumed Trainer can use the micro-batch size of the checkpoint, but the new
# `gradient_accumulation_steps`.
RESTORES_MICRO_BATCH = Version(transformers.__version__) < Version("5.24")
Identity = dict[str, Any]  # values by name, as JSON


class Compared(NamedTuple):
    """Values that are compared when a run is resumed, and the consequence of a difference.

    Attributes:
        names (`tuple[str, ...]`):
            Names of settings, and of values that the trainers compute.
        consequence (`str`):
            Sentence for the error or the warning.
        refused (`bool`, *optional*, defaults to `True`):
            Whether a difference raises an error. Otherwise, a difference gives a warning.
    """

    names: tuple[str, ...]
    consequence: str
    refused: bool = True


# fmt: off
COMPARED = (
    Compared(
        ("rows_per_step", "rows_per_micro_batch", "rows_of_a_prompt_together", "split_batches", "seed", "data_seed",
         "shuffle_dataset", "train_sampling_strategy", "dataloader_drop_last", "generation_batch_size",
         "num_generations", "num_iterations"),
        "The run would read some rows twice, and others never.",
    ),
    Compared(
        ("trainer", "base_model", "adapter", "reference_model", "temperature", "limits", "ratio_level",
         "segment_tokens", "length_normalization", "log_mu", "baseline", "effective_positive_share", "curation",
         "iteration_size", "curation_positive_share", "replay_share", "replay_size", "replay_rule", "reward_functions",
         "reward_weights", "mask_truncated_completions", "beta", "use_bias_correction_kl", "sync_ref_model",
         "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min",
         "entropy_coef_max", "entropy_coef_delta", "entropy_target", "top_entropy_quantile", "router_aux_loss_coef"),
        "The objective would change.",
    ),
    Compared(
        ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_completion_length",
         "vllm_structured_outputs_regex", "chat_template", "chat_template_kwargs", "tools",
         "max_tool_calling_iterations", "fork_threshold_tokens"),
        "Completions would have another distribution.",
    ),
    Compared(
        ("optimizer", "optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay", "adam_beta1",
         "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
         "warmup_ratio"),
        "The state of optimizer and schedule in the checkpoint would replace some of these values, such as the "
        "learning rate.",
    ),
    Compared(
        ("rows",),
        "Rows, rewards and their order must stay the same. If the chat template writes today's date, make it write the "
        "date of the first start: with date_string in a column chat_template_kwargs (Llama 3.2), or with "
        "chat_template_path.",
    ),
    Compared(
        ("num_train_epochs", "max_steps"), "The schedule ends at another step, so the learning rate jumps.", False
    ),
    Compared(
        ("bf16", "fp16", "dtype", "attention", "cast_lm_head_to_fp32"),
        "Rounding of log π differs from before, and the weights differ from those of an uninterrupted run.", False,
    ),
)
# fmt: on
_SHOWN = {
    "rows": "rows (fingerprint of the rows and rewards)",
    "rows_per_step": "rows per step (per_device_train_batch_size * gradient_accumulation_steps * processes)",
    "rows_per_micro_batch": "rows per micro-batch (per_device_train_batch_size * processes)",
    "rows_of_a_prompt_together": "rows of a prompt that stay together (share_prompts)",
    "split_batches": "split_batches in accelerator_config",
    "base_model": "fingerprint of the base model",
    "adapter": "adapter (peft_config)",
    "reference_model": "reference model of beta",
    "limits": "limits of π/μ (preset, a_pos, b_pos, a_neg, b_neg)",
    "reward_functions": "reward functions (reward_funcs)",
    "chat_template": "fingerprint of the chat template",
    "optimizer": "optimizer that the script passes (optimizers, optimizer_cls_and_kwargs)",
    "dtype": "dtype of the weights",
    "attention": "attn_implementation",
}
_SCHEDULES_WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt", *SCHEDULES_BY_METRIC)
# Entries of a `peft_config` that do not change the function of a trained adapter. The trainers set dropout to 0.
_ADAPTER_FREE = re.compile(
    r"base_model_name_or_path|revision|inference_mode|task_type|auto_mapping|peft_version|ephemeral_gpu_offload"
    r"|init_\w+|\w*dropout|\w+_config"
)


def compared_settings(args: Any) -> Identity:
    """Return the settings in `COMPARED`. Settings that `args` or the installed libraries do not have are left out.

    `num_train_epochs` and `max_steps` are left out if the learning rate does not depend on the number of steps.

    Args:
        args ([`TOPRArguments`] or [`AsyncTOPRConfig`]):
            Settings of a trainer.
    """
    known = {field.name for field in fields(args)}
    is_share = 0 < args.warmup_steps < 1 or getattr(args, "warmup_ratio", None)  # newer releases have no ratio
    if args.lr_scheduler_type in _SCHEDULES_WITHOUT_END and not is_share:
        known -= {"num_train_epochs", "max_steps"}
    return {name: getattr(args, name) for compared in COMPARED for name in compared.names if name in known}


def identity_of_run(trainer: Any, checkpoint: Path | None, latest: Identity | None) -> Identity:
    """Return the identity of a run as JSON. Compare it with the identity in the checkpoint to resume from.

    The entry `model` identifies the starting model of the first run. A checkpoint has other weights, and so does the
    trainer's model if `train` is called again.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer of the run.
        checkpoint (`Path`, *optional*):
            Checkpoint to resume from. `None` for a new run.
        latest (`dict`, *optional*):
            Identity of the run that trained the weights of the trainer's model. `None` for the starting weights.

    Raises:
        ValueError: the identity in the checkpoint is missing, damaged or different.
    """
    there = None if checkpoint is None else read_identity(checkpoint)
    args = trainer.args
    identity = {
        **compared_settings(args),
        "trainer": trainer._kind,
        "base_model": base_fingerprint(trainer.model),
        "rows_per_step": trainer._rows_per_step,
        **({"rows_per_micro_batch": trainer._rows_per_micro_batch} if RESTORES_MICRO_BATCH else {}),
        "rows_of_a_prompt_together": trainer._sharing.together,
        "optimizer": trainer._given_optimizer,
        "limits": asdict(trainer._loss_settings["limits"]),
        "split_batches": args.accelerator_config.split_batches,
        "adapter": _adapter(trainer.model),
        "dtype": str(next((p.dtype for p in trainer.model.parameters() if p.requires_grad), None)),
        "attention": trainer.model.config._attn_implementation,
        **trainer._identity_values(),
    }
    run: Identity = json.loads(json.dumps(identity, default=_as_json))
    first = there or latest
    run["model"] = first["model"] if first else mu_fingerprint(trainer.model, run["temperature"])
    if checkpoint is not None and there is not None:
        check_identity(checkpoint, there, run)
    return run


def given_optimizer(trainer: Any) -> dict[str, Any]:
    """Return classes and arguments of the optimizer and the schedule that a script passed to a trainer.

    Call this function before the trainer creates an optimizer of its own.
    """
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    kind, arguments = trainer.optimizer_cls_and_kwargs or (type(optimizer), getattr(optimizer, "defaults", {}))
    return {
        "class": None if kind is type(None) else kind.__name__,
        "schedule": None if schedule is None else type(schedule).__name__,
        **arguments,
    }


def _adapter(model: Any) -> dict[str, Any]:
    """Return the entries of a model's `peft_config` that change the function of its adapter.

    Return {} if the model has no adapter.
    """
    if not is_peft_model(model):
        return {}
    entries = model.peft_config[model.active_adapter].to_dict()
    # Entries that are off are left out, because another release of PEFT may not have them.
    return {name: value for name, value in entries.items() if value and not _ADAPTER_FREE.fullmatch(name)}


def _as_json(value: Any) -> Any:
    """Convert a value that is not JSON: a dtype to text, a set to a list, any other object to the name of its class."""
    if isinstance(value, torch.dtype):
        return str(value)
    return sorted(value) if isinstance(value, set | frozenset) else type(value).__name__


def write_identity(checkpoint: str | Path, identity: Identity) -> None:
    """Write the identity of a run to a checkpoint.

    The entry `model`, the fingerprint of the starting model, is not compared: the weights come from the checkpoint.
    """
    (Path(checkpoint) / FILE).write_text(json.dumps(identity, indent=1))


def read_identity(checkpoint: Path) -> Identity:
    """Read the identity of a run from a checkpoint.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = checkpoint / FILE
    new_run = "To start a new run from its weights, use it as the model, with another output_dir."
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {FILE}: another trainer than TOPR's wrote it, or the file was removed. So it is "
            f"unknown whether its optimizer, schedule and step belong to this run. {new_run}"
        )
    try:
        identity: Identity = json.loads(path.read_text())
        identity["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}), so the checkpoint cannot be compared with this run. Restore "
            f"the file, or resume from another checkpoint. {new_run}"
        ) from error
    return identity


def check_identity(checkpoint: Path, there: Identity, now: Identity) -> None:
    """Compare the identity in a checkpoint with the identity of the run that resumes from the checkpoint.

    Warn if a value differs that `COMPARED` does not mark as `refused`. A value that one of the two identities lacks is
    not compared, because an installed library may be newer.

    Args:
        checkpoint (`Path`):
            Folder of the checkpoint.
        there (`dict`):
            Identity in the checkpoint.
        now (`dict`):
            Identity of the run.

    Raises:
        ValueError: a value differs that `COMPARED` marks as `refused`.
    """
    refused, said = (_differences(there, now, refused) for refused in (True, False))
    if refused:
        raise ValueError(
            f"{checkpoint} is from a run with other values: {refused} Resume with the values in the checkpoint. To "
            "start a new run with other values, use the checkpoint as the model, with another output_dir."
        )
    if said:
        warn_user(f"{checkpoint} is resumed with other values: {said} To avoid this, use the values in the checkpoint.")


def _differences(there: Identity, now: Identity, refused: bool) -> str:
    """Describe the values of `COMPARED` that differ, and the consequences. Return "" if no value differs."""
    found, consequences = [], []
    for compared in (each for each in COMPARED if each.refused == refused):
        for name in compared.names:
            if name in there and name in now and there[name] != now[name]:
                before, after = _where_they_differ(there[name], now[name])
                found.append(f"{_SHOWN.get(name, name)} is {before!r} in the checkpoint and {after!r} now")
                consequences.append(compared.consequence)
    return f"{'; '.join(found)}. {' '.join(dict.fromkeys(consequences))}" if found else ""


def _where_they_differ(before: Any, after: Any) -> tuple[Any, Any]:
    """Return only the entries that differ if both values are dictionaries. Otherwise return the values."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return before, after
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: before.get(name) for name in names}, {name: after.get(name) for name in names}
