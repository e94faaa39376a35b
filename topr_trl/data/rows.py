"""Candidate rows: what a response to learn from looks like, on disk and in the trainer.

| column | type | |
|---|---|---|
| `prompt` | text, messages or token ids | required |
| `completion` | text, messages or token ids | required, unless `completion_ids` is there |
| `reward` | float | required by the trainer; finite in float32 |
| `label` | bool | in the place of `reward`, as in KTO's data sets: true is +1, false -1 |
| `prompt_ids`, `completion_ids` | token ids | what the sampler really read and wrote, stop token included |
| `problem_id`, `sample_id` | int | the problem, and the position in its sampling order |
| `finish_reason` | `"stop"` or `"length"` | whether the response ended by itself |
| `sampler_logps` | floats, one a token | log-probabilities as the sampler reported them |
| `mu_logps` | floats, one a token, or their sum | log μ |
| `mu_fingerprint` | text | fingerprint of the model that scored `mu_logps` |
| `tools`, `chat_template_kwargs` | | for the chat template, as in TRL |

Token ids win over text: text that is tokenised anew loses the stop token and need not give the same tokens.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray


def reward_column(dataset: Dataset) -> NDArray[np.float64]:
    """The rewards of candidate rows, checked.

    Returns:
        (N,) float64.

    Raises:
        ValueError: there is no row, a required column is missing, or a reward is None, NaN, infinite (in float32, too)
            or no number (a label no truth value).
    """
    columns = set(dataset.column_names)
    if "prompt" not in columns or not {"completion", "completion_ids"} & columns or not {"reward", "label"} & columns:
        raise ValueError(
            "Candidate rows need the columns prompt, completion (or completion_ids) and reward (or label); found "
            f"{dataset.column_names}. Rename them with `dataset.rename_column`, or score the rows first."
        )
    if len(dataset) == 0:
        raise ValueError("The dataset of candidates has no row.")
    if "reward" not in columns:
        labels = dataset.with_format(None)["label"][:]
        wrong = next((i for i, label in enumerate(labels) if not isinstance(label, bool)), None)
        if wrong is not None:
            raise ValueError(
                f"Column `label` must hold true or false; row {wrong} holds {labels[wrong]!r}. Fill or cast it."
            )
        return np.where(labels, 1.0, -1.0)
    return finite_rewards(dataset)


def finite_rewards(dataset: Dataset) -> NDArray[np.float64]:
    """(N,) float64: the column `reward`, checked.

    Raises:
        ValueError: a reward is None, NaN, infinite (in float32, too) or no number.
    """
    rewards = dataset.with_format(None)["reward"][:]
    wrong = [
        i
        for i, reward in enumerate(rewards)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST
    ]
    if wrong:
        more = f" (the first of {len(wrong)} such rows)" if wrong[1:] else ""
        raise ValueError(
            f"Column `reward` must hold finite numbers (float32); row {wrong[0]} holds {rewards[wrong[0]]!r}{more}. "
            "Fill or drop such rows."
        )
    return np.array(rewards, dtype=np.float64)


_LARGEST = float(np.finfo(np.float32).max)  # beyond it a reward is infinite in the loss


def problem_column(dataset: Dataset) -> NDArray[Any]:
    """(N,) the problem of each row: `problem_id` if there, else rows with equal prompts share a problem.

    Raises:
        ValueError: a row has no `problem_id`, or one that is neither a number nor text.
    """
    if "problem_id" in dataset.column_names:
        return id_column(dataset, "problem_id")
    return np.unique(hash_prompts(dataset["prompt"]), return_inverse=True)[1]


def id_column(dataset: Dataset, name: str) -> NDArray[Any]:
    """(N,) numbers or texts.

    Raises:
        ValueError: a row has none, or something else.
    """
    values = dataset.with_format(None)[name][:]
    wrong = next((i for i, value in enumerate(values) if not isinstance(value, int | float | str)), None)
    if wrong is not None:
        raise ValueError(
            f"Column `{name}` must hold numbers or text; row {wrong} holds {values[wrong]!r}. Fill or drop the column."
        )
    return np.asarray(values)


def check_finish_reasons(dataset: Dataset) -> None:
    """Refuse reasons that are none: a response that was cut would be taught to stop there.

    Raises:
        ValueError: the column `finish_reason`, if there is one, holds something else than `"stop"` or `"length"`.
    """
    if "finish_reason" in dataset.column_names:
        reasons = dataset.with_format(None)["finish_reason"][:]
        wrong = next((i for i, reason in enumerate(reasons) if reason not in (*FINISH_REASONS, None)), None)
        if wrong is not None:
            raise ValueError(
                f"Column `finish_reason` must hold {' or '.join(FINISH_REASONS)}; row {wrong} holds "
                f"{reasons[wrong]!r}. Write `length` where a response was cut, else `stop`; or drop the column."
            )


FINISH_REASONS = ("stop", "length")


def hash_prompts(prompts: Iterable[Any]) -> NDArray[np.str_]:
    """A short hash of each prompt (text, messages or token ids): prompts themselves would take much memory."""
    return np.array(
        [hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest() for prompt in prompts], dtype=str
    )


def text_column(rows: Dataset, name: str, may_be_empty: bool = False) -> list[Any]:
    """A column of text, checked.

    Returns:
        N texts; None where a row has none and `may_be_empty`.

    Raises:
        ValueError: the column holds something else, or rows lack it that may not.
    """
    column: list[Any] = rows.with_format(None)[name][:]
    found = next((i for i, value in enumerate(column) if value is not None and not isinstance(value, str)), None)
    if found is not None:
        raise ValueError(
            f"Column `{name}` must hold text; row {found} holds {column[found]!r}. Write it as text, as in "
            f'rows.cast_column("{name}", Value("string")).'
        )
    if not may_be_empty and (missing := sum(value is None for value in column)):
        raise ValueError(f"Column `{name}` is empty in {missing} of {len(column)} rows. Fill them, or drop them.")
    return column
