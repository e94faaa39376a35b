"""Check the generation settings of the user and of the model's `generation_config`.

TOPR compares π with the policy μ that wrote a completion. So completions must be samples of the policy. A filter may
leave tokens out, as the paper's `top_k` does. A setting that is not in the lists below is not allowed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from accelerate.utils import extract_model_from_parallel, is_peft_model
from transformers import GenerationConfig

from topr_trl.user_warnings import warn_user

# Settings that do not change the distribution of a token.
_FREE = frozenset({
    # Settings of transformers: caches, compilation and outputs.
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "transformers_version", "bos_token_id",
    # Settings of transformers for beams, assistant models and encoders. Samplers use none of these settings.
    "early_stopping", "length_penalty", "diversity_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "decoder_start_token_id",
    # Settings of vLLM.
    "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "detokenize", "ignore_eos",
})  # fmt: skip

# Values with which a setting has no effect. Other values are not allowed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_return_sequences", "n", "best_of", "num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("typical_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff"), (0.0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens", "logprobs"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("return_dict_in_generate", "token_healing", "remove_invalid_values", "is_assistant"), (False,)),
    "do_sample": (True,),
}

# Filters and the values with which they keep all tokens. Any other value is allowed if the trainer computes log μ.
FILTERS: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "structured_outputs": (), "vllm_structured_outputs_regex": (),
}  # fmt: skip
# Settings of the sampler or the trainer, which replace the model's settings.
_SET_BY_SAMPLER = frozenset({*FILTERS, "do_sample", "temperature", "max_length", "max_new_tokens"})

_DEFAULT_REMEDY = "Remove it: completions must be samples of the policy, in the form that TRL reads."
_REMEDIES = {
    **dict.fromkeys(
        ("eos_token_id", "stop_strings"),
        "TRL recognizes only the stop tokens of the tokenizer and the model. After a different stop token, padding "
        "would become part of the completion. Set model.generation_config.eos_token_id, which sampling also reads.",
    ),
    "pad_token_id": "Set tokenizer.pad_token: TRL pads with it.",
    **dict.fromkeys(
        ("num_return_sequences", "n", "best_of"), "TRL expects one completion for each row. Set num_generations."
    ),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "max_tokens"),
        "Set max_completion_length, which is compared with the model's context.",
    ),
    "temperature": "Set the trainer's `temperature`, at which log π is computed.",
    "seed": "Remove it: vLLM would draw each completion with this seed, so all completions of a prompt would be equal.",
}


def _not_allowed(given: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of settings that are not allowed. `allowed` adds values to those of `_NEUTRAL`.

    None is always allowed.
    """
    return [
        name
        for name, value in given.items()
        if value is not None
        and name not in _FREE
        and not any(value == harmless for harmless in (*_NEUTRAL.get(name, ()), *allowed.get(name, ())))
    ]


def refuse_sampling_settings(args: Any) -> None:
    """Raise a ValueError if settings of a trainer change the sampling policy, or make TRL misread completions.

    `FILTERS`, such as `top_k`, are allowed with `log_mu="trainer"`. Call this function after TRL has parsed
    `generation_kwargs`, which can be JSON. The function removes settings that are None from `generation_kwargs`.
    Otherwise, transformers and a vLLM server would replace None with settings of the model.
    """
    given: dict[str, Any] = {name: value for name, value in (args.generation_kwargs or {}).items() if value is not None}
    if args.generation_kwargs is not None:
        args.generation_kwargs = given
    length = args.max_completion_length
    own = {"temperature": (args.temperature,), "max_new_tokens": (length,), "max_tokens": (length,)}
    if wrong := _not_allowed({n: v for n, v in given.items() if n not in FILTERS}, own):
        raise _refusal(f"generation_kwargs with {_as_text(wrong, given)}", wrong)
    if args.repetition_penalty != 1:
        raise _refusal(f"repetition_penalty={args.repetition_penalty!r}", ["repetition_penalty"])
    filters = {name: given.get(name, getattr(args, name, None)) for name in FILTERS}
    if args.log_mu == "sampler" and (wrong := _not_allowed(filters, FILTERS)):
        raise ValueError(
            f"log_mu='sampler' with {_as_text(wrong, filters)}: the sampler's log-probabilities are then not over the "
            "whole vocabulary, as the trainer's are. Over a part of the vocabulary, they are larger, so every negative "
            "would start with a small weight. Leave these settings out, or set log_mu='trainer'."
        )


def _as_text(names: list[str], values: Mapping[str, Any]) -> str:
    return " and ".join(f"{name}={values[name]!r}" for name in names)


def _refusal(what: str, names: list[str]) -> ValueError:
    remedies = dict.fromkeys(_REMEDIES.get(name, _DEFAULT_REMEDY) for name in names)
    return ValueError(f"{what} cannot be used. {' '.join(remedies)}")


def _own_settings(own: GenerationConfig) -> dict[str, Any]:
    """Return the settings of a model's generation config, without the stop and pad tokens and private entries."""
    return {n: v for n, v in own.to_dict().items() if n not in ("eos_token_id", "pad_token_id") and n[0] != "_"}


def of_policy(own: GenerationConfig) -> GenerationConfig:
    """Return a copy of a model's generation config that has only special tokens and settings of `_FREE`."""
    config = copy(own)
    for name in _own_settings(own).keys() - _FREE:
        setattr(config, name, None)
    return config


def warn_of_own_settings(own: GenerationConfig) -> None:
    """Warn the user of settings in a model's generation config that would change the sampling policy.

    The warning does not name settings that the sampler or the trainer replaces.
    """
    values = _own_settings(own)
    if changed := [name for name in _not_allowed(values, {}) if name not in _SET_BY_SAMPLER]:
        warn_user(
            f"The model's generation_config has {_as_text(changed, values)}. Completions are drawn without this, "
            "because they must be samples of the policy. Wherever the model is used later, the setting counts. Remove "
            "it from model.generation_config if you do not want it there."
        )


@contextmanager
def replaced_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the generation config of a model in a `with` block. Restore the model's own config at the end.

    Without the replacement, `generate` would add settings of the model's own config, such as `no_repeat_ngram_size`.
    """
    model = extract_model_from_parallel(model)  # FSDP1's wrapper would keep the config, and the model its own.
    # PEFT's `generate` copies the config to the base model.
    owners = [model, model.get_base_model()] if is_peft_model(model) else [model]
    own_configs = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = config
    try:
        yield
    finally:
        for owner, own in zip(owners, own_configs, strict=True):
            owner.generation_config = own
