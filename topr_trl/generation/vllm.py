"""Sample completions with vLLM's offline engine, which is faster than transformers and returns the same columns."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig

from topr_trl.data.text_tokens import stop_tokens
from topr_trl.generation.settings import Draw, SamplingArguments, draws_of, encode_prompts, rows_of_draws
from topr_trl.settings.checks import check_types
from topr_trl.settings.sampling import warn_of_own_settings
from topr_trl.trainers.checkpoints import read_adapter_config


@dataclass
class VLLMArguments:
    """Settings for the vLLM engine. The first three settings have the same names in TRL's `GRPOConfig`."""

    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "Number of GPUs that share a model."})
    vllm_gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "Share of a GPU's memory that the engine uses."}
    )
    vllm_max_model_length: int | None = field(
        default=None,
        metadata={"help": "Maximum length of prompt and completion, in tokens. Default: the model's context."},
    )
    vllm_dtype: str = field(
        default="auto",
        metadata={"help": "Dtype: auto, bfloat16, float32, ... With auto, float32 checkpoints use half precision."},
    )
    vllm_enforce_eager: bool = field(
        default=False, metadata={"help": "Skip compilation. The engine starts faster and runs slower."}
    )

    def __post_init__(self) -> None:
        check_types(self, VLLMArguments)


# Chunked prefill rewinds the random generator of a request, which a CPU generator does not support. Without chunked
# prefill, a batch must have room for a whole prompt.
_ON_THE_CPU = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8_192}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts as `max_lora_rank`


def refuse_adapter_of_vllm(config: Mapping[str, Any]) -> None:
    """Raise a ValueError if vLLM cannot load an adapter with this configuration."""
    wrong = [f"{name}={config[name]}" for name in ("use_dora", "modules_to_save") if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA":
        wrong.append(f"peft_type={config['peft_type']}")
    if (rank := _rank(config)) > _RANKS[-1]:
        wrong.append(f"rank {rank} (at most {_RANKS[-1]})")
    if wrong:
        raise ValueError(
            f"vLLM cannot load an adapter with {' and '.join(wrong)}. Set sampling_backend='transformers'. Or set "
            "vllm_dtype='float32', which reads the merged weights of topr train."
        )


def _rank(config: Mapping[str, Any]) -> int:
    """Return the largest rank in the configuration of a LoRA adapter."""
    return max(config.get("r") or 1, *(config.get("rank_pattern") or {}).values(), 1)


def _adapter_options(model: str, adapter: Path) -> dict[str, Any]:
    """Return the engine's arguments for a base model with an adapter. The tokenizer is in the folder `model`."""
    config = read_adapter_config(adapter)
    refuse_adapter_of_vllm(config)
    return {
        "model": config["base_model_name_or_path"], "revision": config.get("revision"), "tokenizer": model,
        "enable_lora": True, "max_lora_rank": next(most for most in _RANKS if most >= _rank(config)),
    }  # fmt: skip


def start_engine(
    model: str,
    args: VLLMArguments,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
) -> Any:
    """Return a new `vllm.LLM` for a model in safetensors format. The engine's memory is freed when this process ends.

    With several GPUs, vLLM spawns a process for each. A script then needs `if __name__ == "__main__":`.

    Args:
        model (`str`): Folder of the model, or its name on the Hub.
        args (`VLLMArguments`): Settings of the engine.
        seed (`int`, *optional*, defaults to `0`): Seed of the engine.
        revision (`str`, *optional*): Revision of a model on the Hub.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run code that comes with the model.
        adapter (`Path`, *optional*): Folder of an adapter. The engine then loads the adapter's base model instead of
            `model`. Also pass the adapter to `sample_completions_with_vllm`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM cannot load the adapter.
        FileNotFoundError: the base model of the adapter is a local folder that does not exist.
    """
    which = {"model": model, "revision": revision} if adapter is None else _adapter_options(model, adapter)
    # The engine runs in this process, because a child process would outlive a killed parent and keep its memory.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.vllm_tensor_parallel_size > 1:
        # Many functions, such as torch.cuda.is_available, make CUDA unusable in forked workers.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError('Sampling with vLLM needs vLLM: run pip install ".[vllm]" in the clone.') from error
    return LLM(
        **which,
        seed=seed,
        dtype=args.vllm_dtype,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_len=args.vllm_max_model_length,
        enforce_eager=args.vllm_enforce_eager,
        trust_remote_code=trust_remote_code,
        load_format="safetensors",
        **({} if torch.accelerator.is_available() else _ON_THE_CPU),
    )


def sample_completions_with_vllm(
    engine: Any,
    problems: Dataset,
    args: SamplingArguments,
    stop_strings: tuple[str, ...] = (),
    seed: int = 0,
    adapter: Path | None = None,
) -> Dataset:
    """Sample completions for each problem, as `topr_trl.sample_completions` does in a single process.

    Under `accelerate launch`, the problems are not split: each process samples for all of them.

    Args:
        engine (`vllm.LLM`):
            Engine from `start_engine`. Its `logprobs_mode` must be `"raw_logprobs"`, which is vLLM's default.
        problems ([`~datasets.Dataset`]):
            Problems with a column `prompt` (text or messages). Other columns are copied to the rows, unless the
            sampler writes a column of the same name.
        args ([`SamplingArguments`]):
            Sampling settings. The engine forms its own batches, so `sampling_batch_size` is not used.
        stop_strings (`tuple[str, ...]`, *optional*, defaults to `()`):
            Texts that end a completion, in addition to the stop tokens of the model.
        seed (`int`, *optional*, defaults to `0`):
            Seed. The same seed, settings and problems give the same completions if the engine's kernels are
            deterministic.
        adapter (`Path`, *optional*):
            Folder of the adapter that was passed to `start_engine`.

    Returns:
        [`~datasets.Dataset`]: rows as in `topr_trl.data.rows`, without a reward.

    Raises:
        ValueError: the longest prompt and `max_new_tokens` do not fit in the engine's context, or a prompt cannot be
            formatted with the chat template.
    """
    from vllm import SamplingParams

    tokenizer, config = engine.get_tokenizer(), engine.llm_engine.model_config
    prompt_ids = encode_prompts(tokenizer, problems, args, config.max_model_len)
    try:
        generation_config = GenerationConfig.from_pretrained(config.model, revision=config.revision)
    except OSError:  # The model has no generation config.
        generation_config = GenerationConfig()
    warn_of_own_settings(generation_config)
    eos = stop_tokens(tokenizer, generation_config)
    pad = tokenizer.pad_token_id
    # Never sample the pad token, as in `topr_trl.sample_completions`.
    logit_bias = {pad: -100} if pad is not None and pad not in eos else None
    # Use one call for all draws, so that greedy completions share batches with the samples.
    requests = [(i, temperature, count) for temperature, count in draws_of(args) for i in range(len(prompt_ids))]
    params = [
        SamplingParams(
            n=count,
            temperature=temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=args.max_new_tokens,
            stop=list(stop_strings) or None,
            include_stop_str_in_output=True,
            stop_token_ids=eos,
            logit_bias=logit_bias,
            logprobs=0,  # only the log-probabilities of sampled tokens
            seed=seed + i * args.num_generations,  # The engine adds 0, 1, ..., n - 1 to this seed.
            flat_logprobs=True,
        )
        for i, temperature, count in requests
    ]
    prompts = [{"prompt_token_ids": prompt_ids[i]} for i, _, _ in requests]
    lora = {}
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        lora = {"lora_request": LoRARequest(adapter.name, 1, str(adapter))}
    outputs = engine.generate(prompts, params, **lora)
    draws: list[list[Draw]] = [[] for _ in prompt_ids]
    for (i, temperature, _), output in zip(requests, outputs, strict=True):
        for sample in output.outputs:
            reason = "length" if sample.finish_reason == "length" else "stop"
            draws[i].append(Draw(list(sample.token_ids), reason, list(sample.logprobs.logprobs), temperature))
    return rows_of_draws(draws, problems, prompt_ids, tokenizer, args)
