"""Score completions with reward functions, which are called as in TRL's trainers."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, Value
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
)
from trl import apply_chat_template, is_conversational
from trl.trainer.utils import (
    get_callable_name,
    get_config_model_id,
    is_async_callable,
    start_event_loop_in_daemon,
)

from topr_trl.baseline import LARGEST_REWARD
from topr_trl.data.messages import plain_messages
from topr_trl.data.rows import OF_FUNCTION, need_columns, problem_column, text_column
from topr_trl.data.tokenization import template_options
from topr_trl.rewards.verdicts import CORRECT, VERDICTS, Judgement, check_rewards, text_of

RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., Any]

_AT_ONCE = 1_024  # maximum number of rows per call of a function, unless a single problem has more
_ROWS_PER_FORWARD = 16  # rows per forward pass of a reward model
# Columns that `_columns_to_pass` leaves out. `_score_chunk` passes the first three as `prompts`, `completions` and
# `completion_ids`. Only this package uses the remaining columns.
_NOT_PASSED = (
    "prompt", "completion", "completion_ids", "prompt_ids", "sampler_logps", "logprobs_mode", "mu_logps",
    "mu_fingerprint",
)  # fmt: skip
_OF_TRAINER = ("trainer_state", "log_extra", "log_metric")  # arguments that TRL passes in addition to columns


@dataclass(frozen=True)
class Reward:
    """Reward function, judge or reward model, checked by [`prepare_rewards`].

    Attributes:
        name (`str`): Name, as in TRL's metrics.
        call (`Callable` or [`~transformers.PreTrainedModel`], *optional*): Function, judge or model. `None` for a model
            that was not loaded.
        kind (`str`): `"function"`, `"judge"` or `"model"`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer of a loaded model.
    """

    name: str
    call: Any
    kind: str
    tokenizer: PreTrainedTokenizerBase | None = None


def reward_completions(
    rows: Dataset,
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    reward_weights: Sequence[float] | None = None,
    description: str = "Scoring",
) -> Dataset:
    """Score rows of completions with reward functions.

    The functions are called as in [`~trl.GRPOTrainer`]. They get `prompts`, `completions`, `completion_ids` and the
    other columns of the rows as keyword arguments. `trainer_state` is the state of a trainer before its first step.
    `log_extra` and `log_metric` have no effect. For each completion, a function returns a number, or `None` if the
    function does not apply. The reward of a completion is the weighted sum of the numbers.

    A judge, such as `topr_trl.tasks.gsm8k.judge`, can replace a function. Its two arguments are the texts of
    completions and their true answers. It returns a verdict and an answer for each completion. The reward is 1 for the
    verdict `"correct"` and -1 otherwise.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import reward_completions

    >>> def is_short(completions, **kwargs):
    ...     return [1.0 if len(text) < 6 else 0.0 for text in completions]

    >>> rows = Dataset.from_dict({"prompt": ["Say hi.", "Say hi."], "completion": ["Hi!", "Good morning!"]})
    >>> reward_completions(rows, is_short)["reward"][:]
    [1.0, 0.0]
    ```

    Args:
        rows ([`~datasets.Dataset`]):
            Rows with the columns `prompt` and `completion`, and `answer` for a judge.
        reward_funcs (`RewardFunc` or `Sequence[RewardFunc]`):
            Functions, asynchronous functions, judges, sequence classification models, or names of models.
        reward_weights (`Sequence[float]`, *optional*):
            Weight of each function. `None` uses 1 for each.
        description (`str`, *optional*, defaults to `"Scoring"`):
            Text beside the progress bar.

    Returns:
        [`~datasets.Dataset`]: the rows with a column `reward`, which is null if no function applies. With several
        functions, a column `rewards/NAME` holds the numbers of each function. With a judge, the columns `extracted`
        and `verdict` hold the answers and verdicts.

    Raises:
        ValueError: a column is missing; the rows already have a column of results; the weights do not match the
            functions; a function cannot be called, or fails; a judge or a reward model cannot read a completion; or a
            function does not return one finite number or `None` per completion.
        OSError: a model cannot be loaded.
    """
    one = isinstance(reward_funcs, str) or not isinstance(reward_funcs, Sequence)
    given: list[Any] = [reward_funcs] if one else list(reward_funcs)  # type: ignore[arg-type]
    need_columns(rows.column_names, ("prompt", "completion"), "Rows to score")
    results = ("reward", "verdict", "extracted")
    if taken := [name for name in rows.column_names if name in results or name.startswith(OF_FUNCTION)]:
        raise ValueError(f"The rows already have a column {taken[0]!r}. Remove or rename this column.")
    check_weights(given, reward_weights)
    rewards = prepare_rewards(given, rows.column_names)
    return score_rows(rows, rewards, reward_weights, description)


def check_weights(reward_funcs: Sequence[Any], reward_weights: Sequence[float] | None) -> None:
    """Raise a ValueError if there is no function, or if the weights are not one finite number per function."""
    if not reward_funcs:
        raise ValueError("reward_funcs is empty: name at least one function.")
    if reward_weights is not None and len(reward_weights) != len(reward_funcs):
        raise ValueError(
            f"reward_weights has {len(reward_weights)} values, and reward_funcs has {len(reward_funcs)}. Give one "
            "weight per function."
        )
    if reward_weights is not None and not all(isfinite(weight) for weight in reward_weights):
        raise ValueError(f"reward_weights must be finite numbers, not {list(reward_weights)}.")


def prepare_rewards(reward_funcs: Sequence[Any], columns: Collection[str], load: bool = True) -> list[Reward]:
    """Check that functions can be called with the columns of the rows, and load the reward models.

    Args:
        reward_funcs (`Sequence`): Functions, judges, models and names of models.
        columns (`Collection[str]`): Columns of the rows.
        load (`bool`, *optional*, defaults to `True`): Whether to load models that are given by name.

    Returns:
        `list[Reward]`: the functions, judges and models, in the given order.

    Raises:
        ValueError: a function needs a column that is missing, or cannot be called as TRL calls it; two functions have
            the same name; there are two judges; or a model is not a trained reward model.
        OSError: a model cannot be loaded.
    """
    rewards = [_prepare(each, columns, load) for each in reward_funcs]
    names = [reward.name for reward in rewards]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"reward_funcs has two functions with the name {repeated[0]!r}. Rename one of them.")
    if sum(reward.kind == "judge" for reward in rewards) > 1:
        raise ValueError("reward_funcs has two judges, but a completion has only one verdict. Keep one judge.")
    return rewards


def _prepare(given: Any, columns: Collection[str], load: bool) -> Reward:
    if isinstance(given, str) and not load:
        return Reward(Path(given).name or given, None, "model")
    if isinstance(given, str):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            given, num_labels=1, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):  # transformers initializes them at random
            raise ValueError(f"reward_funcs: {given} has no trained {missing[0]}. Name a trained reward model.")
        given = model.to(PartialState().device)
    if isinstance(given, PreTrainedModel):
        tokenizer = AutoTokenizer.from_pretrained(get_config_model_id(given.config), trust_remote_code=False)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model returns its score for the last token that is not padding, so it needs the padding token.
        given.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        return Reward(Path(get_config_model_id(given.config)).name, given.eval(), "model", tokenizer)
    if not callable(given):
        raise ValueError(f"reward_funcs must be functions, models or names of models, not {given!r}.")
    name = get_callable_name(given)
    kind = _kind_of(given, name, columns)
    if kind == "judge" and "answer" not in columns:
        raise ValueError(
            f"The judge {name!r} compares completions with the column `answer`, and the rows have {_shown(columns)}. "
            "Rename the column that holds the answers. If this is a reward function as in TRL, add **kwargs to its "
            "parameters."
        )
    return Reward(name, given, kind)


def _kind_of(function: Callable[..., Any], name: str, columns: Collection[str]) -> str:
    """Return `"judge"` or `"function"`, inferred from the parameters of a function.

    A judge takes no **kwargs and has exactly two required parameters. The second is not `prompts`, `completions` or
    `completion_ids`, and at least one differs from the names of all arguments that TRL passes.

    Raises:
        ValueError: a function that is not a judge cannot be called as TRL calls it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return "function"
    of_trl = {"prompts", "completions", "completion_ids"}
    passed = {*of_trl, *_columns_to_pass(columns), *_OF_TRAINER}
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    named = {each.name for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    rest = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is kinds.empty and each.kind not in rest]
    takes_all = any(each.kind == kinds.VAR_KEYWORD for each in parameters)
    if not takes_all and len(needed) == 2 and not set(needed) <= passed and needed[1] not in of_trl:
        return "judge"
    if missing := [each for each in needed if each not in passed]:
        raise ValueError(
            f"The reward function {name!r} needs the column {missing[0]!r}, and the rows have {_shown(columns)}. "
            "Rename a column, or give the parameter a default."
        )
    if not takes_all and (refused := sorted(passed - named)):
        raise ValueError(
            f"The reward function {name!r} does not take {', '.join(refused[:2])} and others, which TRL passes as "
            "keyword arguments. Add **kwargs to its parameters."
        )
    return "function"


def _shown(columns: Collection[str]) -> str:
    return ", ".join(sorted(set(_columns_to_pass(columns))))


def _columns_to_pass(columns: Collection[str]) -> list[str]:
    return [name for name in columns if name not in _NOT_PASSED]


def score_rows(
    rows: Dataset, rewards: Sequence[Reward], reward_weights: Sequence[float] | None, description: str = "Scoring"
) -> Dataset:
    """Score rows with the output of `prepare_rewards`, and add the columns that `reward_completions` describes.

    Raises:
        ValueError: there is a judge, and the column `answer` has a value that is not text; a judge or a reward model
            cannot read a completion; or a function fails, or returns a wrong number of rewards or a value that is
            neither a finite number nor None.
    """
    values_NF = np.full((len(rows), len(rewards)), np.nan)
    judgements: list[Judgement] = []
    if any(reward.kind == "judge" for reward in rewards):
        text_column(rows, "answer")  # Check all answers before any function is called.
    with tqdm(total=len(rows), desc=description, unit="row", delay=5) as progress:
        for start, end in _chunks(rows):
            part = rows.select(range(start, end)).with_format(None)
            values_NF[start:end], judged = _score_chunk(part, start, rewards)
            judgements += judged
            progress.update(end - start)
    weights_F = np.ones(len(rewards)) if reward_weights is None else np.array(reward_weights, dtype=np.float64)
    total_N = np.nansum(values_NF * weights_F, axis=1)
    total_N[np.isnan(values_NF).all(axis=1)] = np.nan  # the sum is 0 if no function applies, but there is no reward
    if judgements:
        rows = rows.add_column("extracted", [answer for _, answer in judgements], feature=Value("string"))
        rows = rows.add_column("verdict", [verdict for verdict, _ in judgements], feature=Value("string"))
    if len(rewards) > 1:
        for reward, values_N in zip(rewards, values_NF.T, strict=True):
            rows = rows.add_column(f"{OF_FUNCTION}{reward.name}", _with_none(values_N), feature=Value("float64"))
    return rows.add_column("reward", _with_none(total_N), feature=Value("float64"))


def _with_none(values_N: NDArray[np.float64]) -> list[float | None]:
    return [None if value != value else value for value in values_N.tolist()]


def _chunks(rows: Dataset) -> Iterator[tuple[int, int]]:
    """Yield the start and end positions of the rows of each call. Adjacent rows of a problem are in the same call."""
    if len(rows) <= _AT_ONCE:
        if len(rows):
            yield 0, len(rows)
        return
    problems = problem_column(rows)
    starts = [0, *(np.flatnonzero(problems[1:] != problems[:-1]) + 1).tolist(), len(rows)]
    first = 0
    for start, end in pairwise(starts):
        if end - first > _AT_ONCE and start > first:
            yield first, start
            first = start
    yield first, len(rows)


def _score_chunk(rows: Dataset, start: int, rewards: Sequence[Reward]) -> tuple[NDArray[np.float64], list[Judgement]]:
    """Return the values of F rewards, shape (N, F), and the judge's verdicts and answers.

    A value is NaN if the function returned None. Without a judge, the list of verdicts and answers is empty. Error
    messages count completions from `start`.
    """
    columns = rows[:]
    prompts = columns["prompt"]
    completions = [_as_trl_passes(p, c) for p, c in zip(prompts, columns["completion"], strict=True)]
    passed = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": columns.get("completion_ids"),
        **{name: columns[name] for name in _columns_to_pass(rows.column_names)},
        "trainer_state": TrainerState(),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    found: dict[str, Any] = {}
    judgements: list[Judgement] = []
    later = [reward for reward in rewards if reward.kind == "function" and is_async_callable(reward.call)]
    for reward in rewards:
        if reward.kind == "model":
            kwargs = columns.get("chat_template_kwargs")
            found[reward.name] = _score_by_model(reward, prompts, completions, kwargs, start)
        elif reward.kind == "judge":
            judgements = _judge(reward, columns["completion"], columns["answer"], start)
            found[reward.name] = [1.0 if verdict == CORRECT else -1.0 for verdict, _ in judgements]
        elif reward not in later:
            with _naming(reward):
                found[reward.name] = reward.call(**passed)
    if later:
        found |= asyncio.run_coroutine_threadsafe(_gather(later, passed), _event_loop()).result()
    values = [_as_numbers(reward.name, found[reward.name], len(rows), start) for reward in rewards]
    return np.array(values, dtype=np.float64).T.reshape(len(rows), len(rewards)), judgements


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing. This function replaces `log_extra` and `log_metric`, which need a trainer."""


def _as_trl_passes(prompt: Any, completion: Any) -> Any:
    """Return a completion as TRL passes it. A text after a prompt of messages becomes an assistant message."""
    if isinstance(completion, str) and is_conversational({"prompt": prompt}):
        return [{"role": "assistant", "content": completion}]
    return completion


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all asynchronous calls. A single loop lets a function reuse an async client."""
    loop: asyncio.AbstractEventLoop
    _, loop, ready = start_event_loop_in_daemon("topr-reward-functions")
    ready.wait()
    return loop


async def _gather(rewards: Sequence[Reward], passed: dict[str, Any]) -> dict[str, Any]:
    async def call(reward: Reward) -> Any:
        with _naming(reward):
            return await reward.call(**passed)

    return dict(zip((r.name for r in rewards), await asyncio.gather(*map(call, rewards)), strict=True))


@contextmanager
def _naming(reward: Reward) -> Iterator[None]:
    """Turn an error of a reward function into a ValueError with the name of the function."""
    try:
        yield
    except Exception as error:
        last = extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"The reward function {reward.name!r} failed with {type(error).__name__}: {error} "
            f"({Path(last.filename).name}, line {last.lineno})."
        ) from error


def _as_numbers(name: str, returned: Any, count: int, start: int) -> list[float]:
    values: list[Any] = check_rewards(returned, name, start)
    if len(values) != count:
        raise ValueError(
            f"The reward function {name!r} returned {len(values)} rewards for {count} completions. Return one reward "
            "per completion."
        )
    return [nan if value is None else _as_number(name, i, value) for i, value in enumerate(values, start)]


def _as_number(name: str, i: int, value: Any) -> float:
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # errors of `float` for other types and shapes
        number = float(value)
        if abs(number) <= LARGEST_REWARD:
            return number
    raise ValueError(
        f"The reward function {name!r} returned {str(value)[:60]} for completion {i}. Return a finite number "
        "(float32), or None if there is no reward."
    )


def _judge(reward: Reward, completions: Sequence[Any], answers: Sequence[str], start: int) -> list[Judgement]:
    texts = [text_of(completion, i) for i, completion in enumerate(completions, start)]
    with _naming(reward):
        judgements = list(reward.call(texts, answers))
    for i, each in enumerate(judgements, start):
        is_pair = isinstance(each, tuple | list) and len(each) == 2 and each[0] in VERDICTS
        if not is_pair or not isinstance(each[1], str | None):
            raise ValueError(
                f"The judge {reward.name!r} returned {each!r} for completion {i}. A judge takes texts and answers, and "
                f"returns pairs of a verdict ({', '.join(VERDICTS)}) and an answer or None. A reward function takes "
                "**kwargs, and returns numbers."
            )
    return [(verdict, answer) for verdict, answer in judgements]


@torch.inference_mode()
def _score_by_model(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], kwargs: Sequence[Any] | None, start: int
) -> list[float]:
    assert reward.tokenizer is not None
    texts = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if is_conversational({"prompt": prompt}):
            try:
                options = template_options({"chat_template_kwargs": kwargs[i] if kwargs else None})
                messages = {"messages": plain_messages([*prompt, *completion])}
            except ValueError as error:
                why = f"The reward model {reward.name!r} cannot read completion {start + i}: {error}."
                raise ValueError(why) from None
            texts.append(apply_chat_template(messages, reward.tokenizer, **options)["text"])
        else:
            texts.append(prompt + completion)
    values: list[float] = []
    for start in range(0, len(texts), _ROWS_PER_FORWARD):
        batch = reward.tokenizer(
            text=texts[start : start + _ROWS_PER_FORWARD], return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        ).to(reward.call.device)  # fmt: skip
        values += reward.call(**batch).logits[:, 0].float().tolist()
    return values
