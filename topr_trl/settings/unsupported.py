"""Reject settings of TRL, transformers and Accelerate that TOPR cannot use, with advice on alternatives."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from topr_trl.limits import PRESETS

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules that depend on an evaluation metric


def needs_metric_for_best_model(args: Any) -> bool:
    """Whether the choice of checkpoints or the learning rate depends on an evaluation metric."""
    by_best = args.load_best_model_at_end or args.save_strategy == "best"
    return bool(by_best) or args.lr_scheduler_type in SCHEDULES_BY_METRIC


def set_direction_of_schedule(args: Any) -> None:
    """Tell a schedule that depends on a metric whether greater is better. Otherwise, it would assume a loss."""
    if args.lr_scheduler_type in SCHEDULES_BY_METRIC:
        args.lr_scheduler_kwargs = {
            "mode": "max" if args.greater_is_better else "min", **(args.lr_scheduler_kwargs or {})
        }  # fmt: skip


def is_loss(metric: str | None, sets: Iterable[str] = ()) -> bool:
    """Whether a metric for the best model is the evaluation loss, or the loss of one of the evaluation sets `sets`."""
    return str(metric).removeprefix("eval_") in ("loss", *(f"{name}_loss" for name in sets))


def offloads_optimizer(deepspeed: Any) -> bool:
    """Whether a DeepSpeed configuration (a `dict`, JSON text, a file or None) offloads the optimizer."""
    if isinstance(deepspeed, str) and deepspeed.lstrip().startswith("{"):
        deepspeed = json.loads(deepspeed)
    elif isinstance(deepspeed, str) and os.path.isfile(deepspeed):  # `Path.is_file` raises for long text.
        deepspeed = json.loads(Path(deepspeed).read_text())
    zero = (deepspeed.get("zero_optimization") if isinstance(deepspeed, dict) else None) or {}
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def refuse_adafactor(optim: str, fsdp2: bool, offloaded: bool) -> None:
    """Raise a ValueError if Adafactor would fail or would be silently replaced."""
    if optim != "adafactor":
        return
    if fsdp2:
        raise ValueError(
            "optim='adafactor' (the default) cannot step on weights that FSDP2 shards: it mixes plain tensors with "
            "DTensors. Set optim='adamw_torch_fused', or use DeepSpeed."
        )
    if offloaded:
        raise ValueError(
            "With an offloaded optimizer, DeepSpeed runs its own Adam instead of optim='adafactor' (the default). Set "
            "optim='adamw_torch'."
        )


def refuse_split_sequences(parallelism: Any) -> None:
    """Raise a ValueError if Accelerate splits a completion over processes.

    If `parallelism`, a `ParallelismConfig`, is None, the environment variables of Accelerate's launcher apply.
    """
    for name, what in (("cp_size", "Context"), ("sp_size", "Sequence")):
        launched = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")
        size = int(launched if parallelism is None else getattr(parallelism, name))
        if size > 1:
            raise ValueError(
                f"{what} parallelism ({name}={size}) splits a completion over processes, and its ratio needs the "
                "whole completion. For long rows, set per_device_train_batch_size=1 and gradient_checkpointing=True, "
                "and shard the model (ZeRO-3 or FSDP2); `topr plan` estimates the memory."
            )


def refuse_settings(
    args: object,
    parent: type,
    trainer: str,
    advice: dict[str, str],
    also_allowed: Mapping[str, Sequence[Any]],
) -> None:
    """Raise a ValueError with advice if settings that a TOPR trainer cannot use differ from their defaults.

    The function skips settings that the installed versions of TRL and transformers do not have.

    Args:
        args (`object`): Settings to check.
        parent (`type`): TRL's class of settings, which has the default values.
        trainer (`str`): Name of the trainer, for the message.
        advice (`dict[str, str]`): Advice for settings that cannot be used, by the name of the setting.
        also_allowed (`Mapping`): Values that are allowed in addition to the default, by the name of the setting.
    """
    allowed = {f.name: (f.default, *also_allowed.get(f.name, ())) for f in fields(parent)}
    there = [name for name in advice if name in allowed]
    foreign = {name: value for name in there if (value := getattr(args, name)) not in allowed[name]}
    if foreign:
        given = " and ".join(f"{name}={value!r}" for name, value in foreign.items())
        raise ValueError(
            f"{given} cannot be used with {trainer}. Remove {'it' if len(foreign) == 1 else 'them'}. "
            f"{' '.join(dict.fromkeys(advice[name] for name in foreign))}"
        )


def refuse_unsupported_order(args: Any) -> None:
    """Raise a ValueError if settings conflict with the order in which the offline trainer reads its rows.

    The sampler of `group_by_length` uses the global random generator (huggingface/transformers#48025), so a resumed
    run would read the rows in a different order. Rebalanced and dispatched batches do not work with the trainer's
    samplers in several processes.
    """
    strategy = getattr(args, "train_sampling_strategy", None)
    is_named = strategy in ("group_by_length", "batch_rebalance")
    if is_named or getattr(args, "group_by_length", False):
        given = f"train_sampling_strategy={strategy!r}" if is_named else "group_by_length=True"
        raise ValueError(
            f"{given}: this order cannot be resumed, or several processes cannot read it. Remove it. sort_by_length is "
            "on by default and groups rows of similar length."
        )
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config with dispatch_batches=True does not work with the order in which the trainer reads "
            "rows in several processes. Leave dispatch_batches out."
        )


def refuse_uneven_batches(args: Any) -> None:
    """Raise a ValueError if several processes could get different numbers of rows from Accelerate."""
    if not args.accelerator_config.even_batches and args.world_size > 1:
        raise ValueError(
            f"accelerator_config with even_batches=False: a process of {args.world_size} processes without rows would "
            "leave the others waiting. Leave even_batches out: rows that Accelerate adds do not count."
        )


def refuse_lost_weights_and_prompts(args: Any) -> None:
    """Raise a ValueError if online training would round its weights for generation, or never read some prompts."""
    if (args.bf16 or args.fp16) and args.use_transformers_continuous_batching and not args.use_vllm:
        raise ValueError(
            f"use_transformers_continuous_batching=True with bf16={args.bf16} and fp16={args.fp16}: TRL rounds the "
            "weights to 16 bits for generation and then trains them, so small updates are lost. Set bf16=False and "
            "fp16=False, or use_vllm=True."
        )
    if args.accelerator_config.split_batches and args.world_size > 1:
        raise ValueError(
            "accelerator_config with split_batches=True: a process then has only a part of its completions, and some "
            "prompts are never read. Leave split_batches out, and lower per_device_train_batch_size."
        )


def refuse_offloading_without_accelerator(args: Any) -> None:
    """Raise a ValueError if settings offload activations to the CPU while the model trains on the CPU."""
    if args.activation_offloading and args.device.type == "cpu":
        raise ValueError(
            "activation_offloading=True, but the model trains on the CPU. Leave it out, or use "
            "gradient_checkpointing=True."
        )


LIMITS_ADVICE = "The limits of a ratio are set by `preset`, or by `a_pos`, `b_pos`, `a_neg`, `b_neg`."
_TAPER_ADVICE = "The taper is the only correction; `log_mu` selects the source of log μ."
_NOISE = {"neftune_noise_alpha": "The noise changes log π but not log μ, so TOPR's weights would be wrong."}
_NO_NOISE = {"neftune_noise_alpha": (0,)}
# These values are accepted in addition to the defaults, because they do not conflict with TOPR.
LIKE_TOPR: dict[str, tuple[Any, ...]] = {"loss_type": ("topr", None), "scale_rewards": (False, "none"), **_NO_NOISE}
LIKE_OFFLINE_TOPR: dict[str, tuple[Any, ...]] = {
    "dataset_kwargs": ({}, {"skip_prepare_dataset": False}), **_NO_NOISE,
}  # fmt: skip
GRPO_ONLY = {
    "loss_type": f"The loss is TOPR's; related losses are presets: {', '.join(PRESETS)}.",
    **dict.fromkeys(
        ("epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
         "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), LIMITS_ADVICE),
    "importance_sampling_level": "TOPR uses the ratio of the whole completion; `ratio_level` has another level.",
    "scale_rewards": "TOPR uses the raw reward minus `baseline`; nothing is divided by a standard deviation.",
    "multi_objective_aggregation": "Rewards are summed with `reward_weights`, then `baseline` is subtracted.",
    "off_policy_mask_threshold": "TOPR tapers stale negatives by their ratio instead of masking them.",
    **{f"vllm_importance_sampling_{name}": _TAPER_ADVICE for name in ("mode", "clip_max", "clip_min", "cap")},
    **_NOISE,
}  # fmt: skip

SFT_ONLY = {
    "loss_type": "The loss is TOPR's; see `preset`.",
    **dict.fromkeys(("packing", "eval_packing"), "A completion is weighted as a whole, so rows are not packed."),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "TOPR learns from the completion alone."),
    "auto_find_batch_size": "Steps would have fewer rows. Lower `per_device_train_batch_size`, and raise "
    "`gradient_accumulation_steps`.",
    "label_smoothing_factor": "TOPR's loss has no label smoothing.",
    "dataset_text_field": "The columns are `prompt`, `completion` and `reward`.",
    "dataset_kwargs": "Rows are always prepared from `prompt`, `completion` and `reward`.",
    **_NOISE,
}
