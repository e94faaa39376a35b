"""Settings of TRL, transformers and Accelerate that do not go with TOPR, and what to use instead."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from topr_trl.loss import PRESETS

LOSS_METRICS = ("loss", "eval_loss")


def needs_metric_for_best_model(args: Any) -> bool:
    """Whether checkpoints or the learning rate depend on an evaluation."""
    return bool(args.load_best_model_at_end) or args.lr_scheduler_type == "reduce_lr_on_plateau"


def offloads_optimizer(deepspeed: Any) -> bool:
    """Whether settings of DeepSpeed, or a file of them, keep the optimizer in the host's memory."""
    if isinstance(deepspeed, str) and Path(deepspeed).is_file():
        deepspeed = json.loads(Path(deepspeed).read_text())
    zero = (deepspeed.get("zero_optimization") if isinstance(deepspeed, dict) else None) or {}
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def refuse_adafactor(optim: str, fsdp2: bool, offloaded: bool) -> None:
    """Raise a ValueError where Adafactor fails, or is silently replaced."""
    if optim != "adafactor":
        return
    if fsdp2:
        raise ValueError(
            "optim='adafactor' (the default) cannot step on weights that FSDP2 shards: it mixes plain tensors with "
            "DTensors. Set optim='adamw_torch_fused', or use DeepSpeed."
        )
    if offloaded:
        raise ValueError(
            "With its optimizer offloaded, DeepSpeed runs its own Adam whatever optim says, here 'adafactor' (the "
            "default). Set optim='adamw_torch'."
        )


def refuse_split_sequences(parallelism: Any) -> None:
    """Raise a ValueError if settings of Accelerate (`ParallelismConfig`) split a completion over processes."""
    for name, what in (("cp_size", "Context"), ("sp_size", "Sequence")):
        launched = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")
        size = int(launched if parallelism is None else getattr(parallelism, name))
        if size > 1:
            raise ValueError(
                f"{what} parallelism ({name}={size}) splits a completion over processes, and its ratio is that of all "
                "of it. For long rows set per_device_train_batch_size=1 and gradient_checkpointing=True, and shard the "
                "model (ZeRO-3 or FSDP2); `topr plan` says what that needs."
            )


def refuse_settings(
    args: object,
    parent: type,
    trainer: str,
    advice: dict[str, str],
    also_allowed: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Raise a ValueError for settings of the parent's own loss that are not at their defaults; says what to do."""
    allowed = {f.name: (f.default, *(also_allowed or {}).get(f.name, ())) for f in fields(parent)}
    foreign = {name: value for name in advice if (value := getattr(args, name)) not in allowed[name]}
    if foreign:
        given = " and ".join(f"{name}={value!r}" for name, value in foreign.items())
        one = len(foreign) == 1
        raise ValueError(
            f"{given} belong{'s' * one} to another loss and ha{'s' if one else 've'} no meaning for {trainer}. "
            f"Remove {'it' if one else 'them'}. {' '.join(dict.fromkeys(advice[name] for name in foreign))}"
        )


def refuse_filters(args: Any) -> None:
    """Raise a ValueError for settings by which vLLM's log-probabilities, as TRL asks for them, are not those of π.

    TRL has parsed `generation_kwargs` by now; they go to vLLM last.
    """
    given = {name: getattr(args, name, None) for name in _UNFILTERED} | (args.generation_kwargs or {})
    allowed = {**_UNFILTERED, "temperature": (args.temperature,)}
    wrong = [
        f"{name}={value!r}"
        for name, value in given.items()
        if value is not None and name not in _HARMLESS and value not in allowed.get(name, ())
    ]
    if wrong:
        raise ValueError(
            f"log_mu='sampler' with {' and '.join(wrong)}: the sampler's log-probabilities are then not those of "
            "the whole vocabulary at `temperature`, which the trainer computes. Those of a part of it are larger, "
            "and every negative would begin with a small weight. Leave that out, or set log_mu='trainer'."
        )


# With these values nothing but the temperature changes what vLLM samples from; nothing else may be set, but what is
# harmless. None is vLLM's default.
_UNFILTERED: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "vllm_structured_outputs_regex": (),
}  # fmt: skip
_HARMLESS = frozenset({
    "seed", "stop", "stop_token_ids", "max_tokens", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "ignore_eos",
})  # fmt: skip

LIMITS_ADVICE = "How far a ratio counts is set by `preset`, or by `a_pos`, `b_pos`, `a_neg`, `b_neg`."
_TAPER_ADVICE = "The taper is the only correction; see `log_mu`."
# What TOPR does, in GRPO's words.
LIKE_TOPR: dict[str, tuple[Any, ...]] = {"loss_type": ("topr", None), "scale_rewards": (False, "none")}
GRPO_ONLY = {
    "loss_type": f"TOPRTrainer has a loss of its own; related ones are presets: {', '.join(PRESETS)}.",
    **dict.fromkeys(("epsilon", "epsilon_high", "delta"), LIMITS_ADVICE),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), LIMITS_ADVICE),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), LIMITS_ADVICE),
    "importance_sampling_level": "The ratio is that of the whole completion; see `ratio_level`.",
    "scale_rewards": "TOPR uses the raw reward minus `baseline`; nothing is divided by a standard deviation.",
    "multi_objective_aggregation": "Rewards are summed with `reward_weights`, then `baseline` is subtracted.",
    "off_policy_mask_threshold": "TOPR tapers stale negatives by their ratio instead of masking them.",
    "vllm_importance_sampling_mode": "The taper is the only correction; `log_mu` says against whose log-probabilities.",
    "vllm_importance_sampling_clip_max": _TAPER_ADVICE,
    "vllm_importance_sampling_clip_min": _TAPER_ADVICE,
    "vllm_importance_sampling_cap": _TAPER_ADVICE,
}

SFT_ONLY = {
    "loss_type": "The loss is TOPR's; see `preset`.",
    **dict.fromkeys(("packing", "eval_packing"), "A completion is weighted as a whole, so rows are not packed."),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "TOPR learns from the completion alone."),
    "label_smoothing_factor": "It would change log π.",
    "dataset_text_field": "The columns are `prompt`, `completion` and `reward`.",
}
