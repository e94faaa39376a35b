"""Draw candidate responses from a model with transformers' `generate`."""

from collections.abc import Iterator
from contextlib import contextmanager
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

from topr_trl.checkpoints import check_finite
from topr_trl.generation.sampling import SamplingArguments, candidate_row, encode_prompts, stop_tokens


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
        Rows of `topr_trl.data.rows`, a problem's together and in sampling order, without a reward. `sampler_logps` are
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
