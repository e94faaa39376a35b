"""Draw candidate responses from a model with transformers' `generate`."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import is_peft_model
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
    set_seed,
)

from topr_trl.config import check_types
from topr_trl.weights import check_finite


@dataclass
class SamplingArguments:
    """How responses are drawn; the defaults are the paper's (arXiv 2503.14286, Sec. 4.1).

    Parameters:
        num_candidates (`int`, defaults to `16`): Responses a problem.
        temperature (`float`, defaults to `1.0`): Sampling temperature.
        top_p (`float`, defaults to `1.0`): Probability mass sampled from.
        top_k (`int`, defaults to `500`): Tokens sampled from.
        max_new_tokens (`int`, defaults to `512`): Longest response.
        sampling_batch_size (`int`, defaults to `512`): Responses generated at once.
    """

    num_candidates: int = field(default=16, metadata={"help": "Responses a problem."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature."})
    top_p: float = field(default=1.0, metadata={"help": "Probability mass sampled from."})
    top_k: int = field(default=500, metadata={"help": "Tokens sampled from."})
    max_new_tokens: int = field(default=512, metadata={"help": "Longest response, in tokens."})
    sampling_batch_size: int = field(default=512, metadata={"help": "Responses generated at once."})

    def __post_init__(self) -> None:
        check_types(self, SamplingArguments)
        for name in ("num_candidates", "max_new_tokens", "sampling_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be above 0, not {self.temperature}: candidates have to differ.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}.")
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}; one above the vocabulary keeps every token.")


@torch.no_grad()
def sample_candidates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Dataset,
    args: SamplingArguments,
    stop_strings: tuple[str, ...] = (),
    seed: int = 0,
    description: str = "Sampling",
) -> Dataset:
    """`args.num_candidates` responses for each problem of this process's share.

    Every process of `accelerate launch` takes a share of the problems; each gets its own rows back.

    Args:
        model: samples; its dropout is switched off meanwhile.
        problems: columns `problem_id` and `prompt` (text); other columns are carried along.
        stop_strings: end a response besides the model's stop tokens.
        seed: with the same seed and batch size the same responses are drawn.

    Returns:
        Rows of `topr_trl.candidates`, a problem's together and in sampling order, without a reward. `sampler_logps` are
        those of the model itself, before temperature, top_p and top_k.

    Raises:
        ValueError: a prompt and the longest response do not fit in the model's context, or there are fewer problems
            than processes.
        FloatingPointError: weights of the model are NaN or infinite.
    """
    check_finite(model, "The model to sample from")
    state = PartialState()
    if len(problems) < state.num_processes:
        raise ValueError(f"{len(problems)} problems are too few for {state.num_processes} processes; each needs one.")
    problems = problems.shard(state.num_processes, state.process_index, contiguous=True)
    text_config = model.config.get_text_config()
    prompt_ids = encode_prompts(tokenizer, problems, args, getattr(text_config, "max_position_embeddings", None))
    eos = stop_tokens(tokenizer, model.generation_config)
    config = GenerationConfig(
        do_sample=True,
        temperature=args.temperature,
        top_p=args.top_p,
        # Where it keeps every token, the filter would only sort the vocabulary at each step.
        top_k=args.top_k if args.top_k < text_config.vocab_size else 0,
        max_new_tokens=args.max_new_tokens,
        num_return_sequences=args.num_candidates,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        stop_strings=list(stop_strings) or None,
    )
    pad_is_foreign = tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in eos
    # Prompts of like length go together; the rows are put back in the order of the problems.
    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    step = max(args.sampling_batch_size // args.num_candidates, 1)
    rows: list[list[dict[str, Any]]] = [[] for _ in prompt_ids]
    others = {} if state.is_main_process else {"disable": True}  # said only there, TQDM_DISABLE keeps its say elsewhere
    progress = tqdm(total=len(order) * args.num_candidates, desc=description, **others)
    for start in range(0, len(order), step):
        set_seed(seed + 1_000_003 * state.process_index + start)
        batch = order[start : start + step]
        padded = tokenizer.pad({"input_ids": [prompt_ids[i] for i in batch]}, padding_side="left", return_tensors="pt")
        padded = {name: padded[name].to(model.device) for name in ("input_ids", "attention_mask")}
        recorder = _RecordLogps()
        processors = [recorder, *([SuppressTokensLogitsProcessor([tokenizer.pad_token_id])] if pad_is_foreign else [])]
        with _sampling_by(model, config):
            generated = model.generate(**padded, tokenizer=tokenizer, logits_processor=LogitsProcessorList(processors))
        responses = generated[:, padded["input_ids"].size(1) :].tolist()
        logps = recorder.finish(generated).tolist()
        batch_problems = problems.select(batch).to_list()
        for n, response in enumerate(responses):
            position, sample_id = divmod(n, args.num_candidates)
            i = batch[position]
            completion_ids, finish_reason = _cut(response, set(eos), tokenizer, stop_strings, args.max_new_tokens)
            rows[i].append(
                candidate_row(
                    batch_problems[position], sample_id, tokenizer, prompt_ids[i], completion_ids, finish_reason,
                    logps[n][: len(completion_ids)],
                )
            )  # fmt: skip
        progress.update(len(responses))
    progress.close()
    return Dataset.from_list([row for problem in rows for row in problem])


# What both backends share.


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Dataset, args: SamplingArguments, context: int | None
) -> list[list[int]]:
    """Token ids of the prompts.

    Raises:
        ValueError: a prompt and the longest response do not fit in the context.
    """
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in problems["prompt"]]
    longest = max(map(len, prompt_ids), default=0)
    if context is not None and longest + args.max_new_tokens > context:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={args.max_new_tokens} do not fit in the model's context "
            f"of {context}. Use fewer examples in the prompt, or a lower max_new_tokens."
        )
    return prompt_ids


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> list[int]:
    """The tokens that end a response: the tokenizer's and those of the model."""
    own = generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])} - {None})


def candidate_row(
    problem: dict[str, Any],
    sample_id: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    completion_ids: list[int],
    finish_reason: str,
    sampler_logps: list[float],
) -> dict[str, Any]:
    """A row of `topr_trl.candidates` without a reward."""
    return {
        **problem,
        "sample_id": sample_id,
        "completion": tokenizer.decode(completion_ids, skip_special_tokens=True),
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "finish_reason": finish_reason,
        "sampler_logps": sampler_logps,
    }


# transformers.


class _RecordLogps(LogitsProcessor):
    """Keeps the log-probability of each token under the model itself, before temperature and filters."""

    def __init__(self) -> None:
        self._logps: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None  # of the token that is being drawn

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._note_drawn(input_ids)
        self._scores = scores
        return scores

    def _note_drawn(self, input_ids: torch.Tensor) -> None:
        if self._scores is not None:
            drawn = self._scores.gather(1, input_ids[:, -1:]).squeeze(1)
            self._logps.append((drawn - self._scores.logsumexp(1)).float())

    def finish(self, generated: torch.Tensor) -> torch.Tensor:
        """(B, T) float32 of all tokens that were drawn."""
        self._note_drawn(generated)
        return torch.stack(self._logps, dim=1)


@contextmanager
def _sampling_by(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Let `generate` see no settings but ours: what is left out it takes from the model, a repetition penalty, say."""
    owners = [model, model.get_base_model()] if is_peft_model(model) else [model]
    own_configs, was_training = [owner.generation_config for owner in owners], model.training
    model.generation_config = config
    model.eval()
    try:
        yield
    finally:
        for owner, own in zip(owners, own_configs, strict=True):
            owner.generation_config = own
        model.train(was_training)


def _cut(
    response: list[int], eos: set[int], tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...], longest: int
) -> tuple[list[int], str]:
    """The response without the padding of its batch, and how it ended: its stop token or string stays."""
    ends = [n for n, token in enumerate(response) if token in eos or token == tokenizer.pad_token_id]
    if not ends:
        return response, "length" if len(response) >= longest else "stop"
    before = response[: ends[0]]
    # Where the pad token is also the stop token, only the text tells whether a stop string ended the response.
    stopped_by_string = any(stop in tokenizer.decode(before) for stop in stop_strings)
    return (before if stopped_by_string or response[ends[0]] not in eos else response[: ends[0] + 1]), "stop"
