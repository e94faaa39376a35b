"""Settings and functions that are shared by sampling with transformers and with vLLM."""

import math
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Features, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from topr_trl.data.sampler_logps import GREEDY, LOGPROBS_MODE, RAW, SAMPLING, TEMPERATURE
from topr_trl.data.text_tokens import encode_prompt
from topr_trl.data.tokenization import encode_messages
from topr_trl.settings.checks import check_at_least, check_types

# Sampled rows have these columns in addition to the columns of the problem.
COLUMNS_OF_SAMPLER = ("sample_id", "completion", "prompt_ids", "completion_ids", "finish_reason", "sampler_logps",
                      LOGPROBS_MODE, *SAMPLING)  # fmt: skip


@dataclass
class SamplingArguments:
    """Settings for sampling completions.

    Except for `sampling_batch_size`, the defaults are the paper's (arXiv 2503.14286, Sec. 4.1).

    Example:

    ```python
    >>> from topr_trl import SamplingArguments

    >>> args = SamplingArguments(num_generations=64, max_new_tokens=256)
    >>> args.top_k
    500
    ```

    Parameters:
        num_generations (`int`, *optional*, defaults to `16`):
            Number of completions per prompt.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, above 0.
        top_p (`float`, *optional*, defaults to `1.0`):
            Probability mass of the most likely tokens to sample from, in (0, 1].
        top_k (`int`, *optional*, defaults to `500`):
            Number of most likely tokens to sample from. If the number is at least the size of the vocabulary,
            all tokens are kept.
        max_new_tokens (`int`, *optional*, defaults to `512`):
            Maximum length of a completion, in tokens.
        sampling_batch_size (`int`, *optional*, defaults to `512`):
            Number of completions that are generated together.
        greedy (`bool`, *optional*, defaults to `False`):
            Whether to generate one more completion per prompt at temperature 0. Greedy rows are for evaluation.
            Trainers and curation refuse them.

    Raises:
        ValueError: a setting has a wrong type or is outside its range.
    """

    num_generations: int = field(default=16, metadata={"help": "Number of completions per prompt."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature, above 0."})
    top_p: float = field(
        default=1.0, metadata={"help": "Probability mass of the most likely tokens to sample from, in (0, 1]."}
    )
    top_k: int = field(default=500, metadata={"help": "Number of most likely tokens to sample from."})
    max_new_tokens: int = field(default=512, metadata={"help": "Maximum length of a completion, in tokens."})
    sampling_batch_size: int = field(default=512, metadata={"help": "Number of completions generated together."})
    greedy: bool = field(
        default=False,
        metadata={
            "help": "Draw one more completion per prompt at temperature 0. These rows are for evaluation, and trainers "
            "refuse them."
        },
    )

    def __post_init__(self) -> None:
        check_types(self, SamplingArguments)
        check_at_least(1, self, "num_generations", "max_new_tokens", "sampling_batch_size")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be above 0, not {self.temperature}: completions of one prompt have to differ. Set "
                "greedy=True for one more completion at temperature 0."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}.")
        if self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1, not {self.top_k}. To keep all tokens, set it above the size of the "
                "vocabulary."
            )


def draws_of(args: SamplingArguments) -> list[tuple[float, int]]:
    """Return (temperature, completions per prompt) of the samples, and of the greedy completion if `args.greedy`."""
    return [(args.temperature, args.num_generations), *([(GREEDY, 1)] if args.greedy else [])]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Dataset, args: SamplingArguments, context: int | None
) -> list[list[int]]:
    """Return the token ids of the prompts.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        problems ([`~datasets.Dataset`]): Problems with the column `prompt`, as text or messages. Messages are
            formatted with the chat template. The template gets `tools` and `chat_template_kwargs` of a problem, if
            present.
        args ([`SamplingArguments`]): Sampling settings.
        context (`int`, *optional*): Context length of the model. With None, the length is not checked.

    Raises:
        ValueError: the longest prompt and `max_new_tokens` do not fit in the model's context, or a prompt cannot be
            formatted with the chat template.
    """
    names = [name for name in ("prompt", "tools", "chat_template_kwargs") if name in problems.column_names]
    ids = []
    for i, problem in enumerate(problems.with_format(None).select_columns(names)):
        prompt = problem["prompt"]
        try:
            is_text = isinstance(prompt, str)
            ids.append(encode_prompt(prompt, tokenizer) if is_text else encode_messages(prompt, tokenizer, problem))
        except ValueError as error:
            raise ValueError(f"The prompt of row {i} cannot be used: {error}.") from error
    longest = max(map(len, ids), default=0)
    if context is not None and longest + args.max_new_tokens > context:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={args.max_new_tokens} do not fit in the model's context "
            f"of {context}. Use fewer examples in the prompt, or a lower max_new_tokens."
        )
    return ids


def sampled_row(
    problem: dict[str, Any],
    sample_id: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    completion_ids: list[int],
    finish_reason: str,
    sampler_logps: list[float],
    args: SamplingArguments,
    temperature: float,
) -> dict[str, Any]:
    """Return a row with the columns of `topr_trl.data.rows`, without a reward.

    If the prompt is messages, the completion is one assistant message, as in TRL. A greedy row has the `top_p` and
    `top_k` of the samples, although they do not affect greedy completions.

    Args:
        problem (`dict`): Columns of the problem.
        sample_id (`int`): Position in the sampling order of the problem.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer that decodes the completion.
        prompt_ids (`list[int]`): Token ids of the prompt.
        completion_ids (`list[int]`): Token ids of the completion.
        finish_reason (`str`): `"stop"` or `"length"`.
        sampler_logps (`list[float]`): Log-probabilities of the model before temperature and filters, one per token.
        args ([`SamplingArguments`]): Sampling settings.
        temperature (`float`): Temperature of the completion. 0 means greedy.
    """
    text = tokenizer.decode(completion_ids, skip_special_tokens=True)
    return {
        **problem,
        "sample_id": sample_id,
        "completion": text if isinstance(problem["prompt"], str) else [{"role": "assistant", "content": text}],
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "finish_reason": finish_reason,
        "sampler_logps": sampler_logps,
        LOGPROBS_MODE: RAW,
        **{name: getattr(args, name) for name in SAMPLING},
        TEMPERATURE: temperature,
    }


def rows_as_dataset(rows: list[dict[str, Any]], problems: Dataset) -> Dataset:
    """Return sampled rows as a dataset in which the columns of the problems keep their types.

    Types that are inferred from the rows of one shard can differ between shards. For example, a column of text that is
    null in all rows of a shard would have the type null, and the shards could not be read together.

    Args:
        rows (`list[dict]`): Rows of `sampled_row`.
        problems ([`~datasets.Dataset`]): Problems of the rows.
    """
    types = Features({name: kind for name, kind in problems.features.items() if name not in COLUMNS_OF_SAMPLER})
    copied = Dataset.from_list([{name: row[name] for name in types} for row in rows], features=types)
    sampled = Dataset.from_list([{name: row[name] for name in COLUMNS_OF_SAMPLER} for row in rows])
    return concatenate_datasets([copied, sampled], axis=1)
