"""Sample completions from a model with transformers' `generate`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from accelerate import PartialState
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from topr_trl.data.sampler_logps import GREEDY
from topr_trl.data.text_tokens import stop_tokens
from topr_trl.data.tokenized_rows import check_ids, check_special_tokens
from topr_trl.generation.settings import Draw, SamplingArguments, draws_of, encode_prompts, rows_of_draws
from topr_trl.settings.sampling import replaced_generation_config, warn_of_own_settings
from topr_trl.trainers.checkpoints import check_finite
from topr_trl.trainers.forward_checks import without_cudnn_attention


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Dataset,
    args: SamplingArguments,
    stop_strings: tuple[str, ...] = (),
    seed: int = 0,
    description: str = "Sampling",
) -> Dataset:
    """Sample completions for each problem, as rows without rewards.

    Under `accelerate launch`, each process samples for its part of the problems, and returns the rows of this part. The
    sizes of the parts differ by at most one problem.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import SamplingArguments, sample_completions
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype="float32")
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
    >>> problems = Dataset.from_dict({"problem_id": [0, 1], "prompt": ["3 + 4 = ", "2 + 6 = "]})
    >>> rows = sample_completions(model, tokenizer, problems, SamplingArguments(4, max_new_tokens=8))
    >>> len(rows)
    8
    ```

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model to sample from. It is in evaluation mode during sampling.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        problems ([`~datasets.Dataset`]):
            Problems with a column `prompt` (text or messages). Other columns are copied to the rows, unless the
            sampler writes a column of the same name.
        args ([`SamplingArguments`]):
            Sampling settings.
        stop_strings (`tuple[str, ...]`, *optional*, defaults to `()`):
            Texts that end a completion, in addition to the stop tokens of the model.
        seed (`int`, *optional*, defaults to `0`):
            Seed. With the same settings and number of processes, the same seed gives the same completions. The global
            random state is not changed.
        description (`str`, *optional*, defaults to `"Sampling"`):
            Text beside the progress bar.

    Returns:
        [`~datasets.Dataset`]: rows as in `topr_trl.data.rows`, without a reward. The rows of a problem are adjacent, in
        the order in which they were sampled. With `args.greedy`, the last row of each problem is greedy and has
        temperature 0. `sampler_logps` are the log-probabilities of the model before temperature, top_p and top_k.

    Raises:
        ValueError: the longest prompt and `max_new_tokens` do not fit in the model's context, a prompt cannot be
            formatted with the chat template, there are fewer problems than processes, the tokenizer has neither a pad
            token nor a stop token, or the model has no embedding for a token.
        FloatingPointError: a weight of the model is NaN or infinite.
    """
    check_finite(model, "The model to sample from")
    warn_of_own_settings(model.generation_config)
    state = PartialState()
    if len(problems) < state.num_processes:
        raise ValueError(
            f"{len(problems)} problems are too few for {state.num_processes} processes. Use at most one process per "
            "problem."
        )
    problems = problems.shard(state.num_processes, state.process_index, contiguous=True)
    model_config = model.config.get_text_config()
    check_special_tokens(tokenizer, model_config)
    prompt_ids = encode_prompts(tokenizer, problems, args, getattr(model_config, "max_position_embeddings", None))
    check_ids("A prompt", prompt_ids, model_config)
    most = args.sampling_batch_size
    draws = [  # number of the draw, temperature, completions per prompt
        (n, temperature, part, _generation_config(model, tokenizer, args, stop_strings, temperature, part))
        for temperature, count in draws_of(args)
        for n, part in enumerate(min(most, count - k) for k in range(0, count, most))
    ]
    # Prompts are sorted by length, so that a batch needs little padding.
    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    drawn: list[list[Draw]] = [[] for _ in prompt_ids]
    bar = {} if state.is_main_process else {"disable": True}  # `disable=None` would override TQDM_DISABLE
    total = len(order) * sum(count for _, _, count, _ in draws)
    with without_cudnn_attention(), _restored_generators(), tqdm(total=total, desc=description, **bar) as progress:
        for draw, temperature, count, config in draws:
            step = most // count
            for start in range(0, len(order), step):
                # The large factor gives the batches of all processes, and the draws of a prompt, different seeds.
                stream = state.process_index + draw * state.num_processes
                torch.manual_seed(seed + 1_000_003 * stream + start)
                batch = order[start : start + step]
                completions, logps = _generate(model, tokenizer, [prompt_ids[i] for i in batch], config)
                for n, tokens in enumerate(completions):
                    ids, reason = _trim(tokens, config.eos_token_id, tokenizer, stop_strings, args.max_new_tokens)
                    drawn[batch[n // count]].append(Draw(ids, reason, logps[n][: len(ids)], temperature))
                progress.update(len(completions))
    return rows_of_draws(drawn, problems, prompt_ids, tokenizer, args)


def _generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: SamplingArguments,
    stop_strings: tuple[str, ...],
    temperature: float,
    count: int,
) -> GenerationConfig:
    vocabulary = model.config.get_text_config().vocab_size
    if (pad := tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id) is None:
        raise ValueError("The tokenizer has neither a pad token nor a stop token: set tokenizer.eos_token.")
    sampling = {
        "temperature": temperature,
        "top_p": args.top_p,
        # A `top_k` that keeps all tokens would only cost time at each step.
        "top_k": args.top_k if args.top_k < vocabulary else 0,
    }
    return GenerationConfig(
        do_sample=temperature != GREEDY,
        **({} if temperature == GREEDY else sampling),
        max_new_tokens=args.max_new_tokens,
        num_return_sequences=count,
        eos_token_id=stop_tokens(tokenizer, model.generation_config),
        pad_token_id=pad,
        stop_strings=list(stop_strings) or None,
    )


def _restored_generators() -> AbstractContextManager[None]:
    """Return a context manager that restores torch's global random state, which `generate` changes."""
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"  # Without devices, any type works.
    return torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=kind)


def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[list[int]], config: GenerationConfig
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the sampled tokens, with padding, and their log-probabilities for a batch of prompts."""
    recorder, pad, width = _RecordLogps(), config.pad_token_id, max(map(len, prompt_ids))
    # Pad without `tokenizer.pad`, which fails if the tokenizer has no pad token.
    padded = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=model.device)
    processors = LogitsProcessorList([recorder])
    if pad not in config.eos_token_id:  # `_trim` would mistake a sampled pad token for padding.
        processors.append(SuppressTokensLogitsProcessor([pad]))
    with _only_config(model, config):
        generated = model.generate(padded, attention_mask=mask, tokenizer=tokenizer, logits_processor=processors)
    return generated[:, width:].tolist(), recorder.finish(generated).tolist()


class _RecordLogps(LogitsProcessor):
    """Record the log-probability of each token under the model, before temperature and filters."""

    def __init__(self) -> None:
        self._logps: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None  # scores of the last step, whose token is not known yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._record_last_token(input_ids)
        self._scores = scores
        return scores

    def _record_last_token(self, input_ids: torch.Tensor) -> None:
        if self._scores is not None:
            drawn = self._scores.gather(1, input_ids[:, -1:]).squeeze(1)
            self._logps.append((drawn - self._scores.logsumexp(1)).float())

    def finish(self, generated: torch.Tensor) -> torch.Tensor:
        """Return (B, T) float32 log-probabilities of all sampled tokens."""
        self._record_last_token(generated)
        return torch.stack(self._logps, dim=1)


@contextmanager
def _only_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Put the model in evaluation mode, and replace its generation config. Restore both at the end."""
    was_training = model.training
    model.eval()
    try:
        with replaced_generation_config(model, config):
            yield
    finally:
        model.train(was_training)


def _trim(
    tokens: list[int], eos: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...], longest: int
) -> tuple[list[int], str]:
    """Return a completion without padding, and its finish reason. Stop tokens and stop strings are kept."""
    ends = [n for n, token in enumerate(tokens) if token in eos or token == tokenizer.pad_token_id]
    before = tokens[: ends[0]] if ends else tokens
    # A stop string can end a completion at the limit. If the pad token is also the stop token, only the text shows
    # whether a stop string ended the completion.
    stopped_by_string = any(stop in tokenizer.decode(before) for stop in stop_strings)
    if not ends:
        return tokens, "length" if len(tokens) >= longest and not stopped_by_string else "stop"
    return (before if stopped_by_string or tokens[ends[0]] not in eos else tokens[: ends[0] + 1]), "stop"
