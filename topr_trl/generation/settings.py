"""Settings and functions that are shared by sampling with transformers and with vLLM."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from datasets import Dataset, Features, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from topr_trl.data.sampler_logps import GREEDY, LOGPROBS_MODE, RAW, SAMPLING, TEMPERATURE, TOP_K, TOP_P
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
                f"temperature must be above 0, not {self.temperature}: completions of one prompt have to differ. For "
                "one more completion at temperature 0, set greedy=True. topr evaluate, iterate and trial draw it, too."
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


class Draw(NamedTuple):
    """Completion that a sampler drew for a prompt.

    Attributes:
        ids (`list[int]`): Token ids of the completion, including its stop token.
        finish_reason (`str`): `"stop"` or `"length"`.
        logps (`list[float]`): Log-probability of each token under the model, before temperature and filters.
        temperature (`float`): Temperature of the completion. 0 means greedy.
    """

    ids: list[int]
    finish_reason: str
    logps: list[float]
    temperature: float


def rows_of_draws(
    draws: list[list[Draw]],
    problems: Dataset,
    prompt_ids: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    args: SamplingArguments,
) -> Dataset:
    """Return a row for each draw, with the columns of `topr_trl.data.rows`, without a reward.

    If the prompt is messages, the completion is one assistant message, as in TRL. A greedy row has the `top_p` and
    `top_k` of the samples, although they do not affect greedy completions.

    The columns of the problems keep their types. Types that are inferred from the rows of one shard can differ between
    shards. For example, a column of text that is null in all rows of a shard would have the type null, and the shards
    could not be read together.

    Args:
        draws (`list[list[Draw]]`): Draws for each problem, in their sampling order.
        problems ([`~datasets.Dataset`]): Problems.
        prompt_ids (`list[list[int]]`): Token ids of the prompt of each problem.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer that decodes the completions.
        args ([`SamplingArguments`]): Sampling settings.
    """
    types = Features({name: kind for name, kind in problems.features.items() if name not in COLUMNS_OF_SAMPLER})
    copied, sampled = [], []
    for problem, ids, of_problem in zip(problems.with_format(None), prompt_ids, draws, strict=True):
        copied += [{name: problem[name] for name in types}] * len(of_problem)
        for number, draw in enumerate(of_problem):
            text = tokenizer.decode(draw.ids, skip_special_tokens=True)
            sampled.append({
                "sample_id": number,
                "completion": text if isinstance(problem["prompt"], str) else [{"role": "assistant", "content": text}],
                "prompt_ids": ids,
                "completion_ids": draw.ids,
                "finish_reason": draw.finish_reason,
                "sampler_logps": draw.logps,
                LOGPROBS_MODE: RAW,
                TEMPERATURE: draw.temperature,
                TOP_P: args.top_p,
                TOP_K: args.top_k,
            })  # fmt: skip
    return concatenate_datasets([Dataset.from_list(copied, features=types), Dataset.from_list(sampled)], axis=1)
