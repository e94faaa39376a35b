"""Validate rows. A row is a prompt, a completion and a reward, in files and in the offline trainer.

| column | type | meaning |
|---|---|---|
| `prompt` | text, messages or token ids | required |
| `completion` | text, messages or token ids | required without `completion_ids` |
| `reward` | float | required for training, unless there is a `label` or `turn_rewards`; finite in float32 |
| `turn_rewards` | floats, one per turn of the model | instead of `reward`; null for a turn without a rating |
| `turn_discount` | float | `turn_rewards` are returns with this discount, so means are taken per turn index |
| `reward_after_baseline` | float | R, as `topr curate` writes it: reward minus baseline; null in rows to skip |
| `times_chosen` | int | with `reward_after_baseline`: how often each epoch trains on the row; default 1 |
| `label` | bool | used if there is no `reward`, as in KTO's datasets: true is +1, false is -1 |
| `prompt_ids`, `completion_ids` | token ids | tokens that the sampler read and wrote, including the stop token |
| `problem_id` | number or text | id that the completions of one prompt share; not null in any row |
| `sample_id` | int | position of the row in the sampling order of its problem |
| `completion_mask` | 1 or 0, one per token of `completion_ids` | 1 for a token that the model wrote, 0 for context |
| `rollout_id` | number or text | id that the parts of one trajectory share, see `topr_trl.data.trajectories` |
| `finish_reason` | `"stop"` or `"length"` | whether the completion ended by itself or was cut |
| `sampler_logps` | floats, one per token | log-probabilities that the sampler reported; null for context |
| `mu_logps` | floats, one per token, or their sum | log μ: log-probabilities under the policy that wrote the row |
| `mu_fingerprint` | text | fingerprint of the model that computed `mu_logps` |
| `temperature`, `top_p`, `top_k` | numbers | sampling settings, see `topr_trl.data.sampler_logps` |
| `logprobs_mode` | `"raw_logprobs"` or `"processed_logprobs"` | kind of `sampler_logps`, in vLLM's terms |
| `extracted` | text | answer that a judge found in the completion; answers are compared for a diagnosis only |
| `tools`, `chat_template_kwargs` | as in TRL, or as JSON | arguments of the chat template |

Token ids take precedence over text. Text has no stop token, and tokenizing it again can give different tokens.

A row with temperature 0 has a greedy completion. Greedy rows are for evaluation, and training refuses them.

A float of 2**53 or more cannot be an id, because different ids may have been rounded to it.

A wrong value in a column raises a ValueError with the column, the first wrong row and the value.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from datasets import Dataset, Value
from numpy.typing import NDArray

from topr_trl.baseline import LARGEST_REWARD, FloatArray, is_missing, is_rounded


class MalformedRow(ValueError):
    """Error for a row that cannot be used, with its position and the reason."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(row, why)
        self.row, self.why = row, why


ROLLOUT = "rollout_id"
AFTER_BASELINE = "reward_after_baseline"
ANSWER = "extracted"  # answer that a judge found in a completion
TIMES_CHOSEN = "times_chosen"
TURN_REWARDS, TURN_DISCOUNT = "turn_rewards", "turn_discount"
_LONG_ID = 64  # characters
OF_FUNCTION = "rewards/"  # prefix of columns that hold the rewards of one function


def need_columns(columns: Collection[str], needed: Sequence[str | Sequence[str]], what: str, remedy: str = "") -> None:
    """Raise a ValueError if a column is missing, and ask whether a column with a similar name is meant.

    Args:
        columns (`Collection[str]`): Names of the existing columns.
        needed (`Sequence`): Needed columns: names, or lists of names of which one is enough.
        what (`str`): Start of the message, for instance `"Rows to choose from"`.
        remedy (`str`, *optional*, defaults to `""`): Text at the end of the message.
    """
    groups = [[names] if isinstance(names, str) else names for names in needed]
    missing = [names for names in groups if not set(names) & set(columns)]
    if missing:
        listed, lacking = (", ".join(" or ".join(names) for names in each) for each in (groups, missing))
        others = [name for name in columns if not any(name in names for names in groups)]
        similar = {name: get_close_matches(name, others, 1) for name, *_ in missing}
        hint = "".join(f" Is {found[0]!r} meant to be {name!r}?" for name, found in similar.items() if found)
        raise ValueError(f"{what} need the columns {listed}; found {list(columns)}; missing: {lacking}.{hint}{remedy}")


def checked_column(
    rows: Dataset, name: str, is_right: Callable[[Any], bool], expected: str, remedy: str = "Fix or drop such rows."
) -> list[Any]:
    """Return the values of a column as Python objects.

    Raises:
        ValueError: a value does not satisfy `is_right`. In the message, `expected` describes the condition, and
            `remedy` tells the user what to do.
    """
    values: list[Any] = rows.with_format(None)[name][:]
    wrong = [i for i, value in enumerate(values) if not is_right(value)]
    if wrong:
        more = f" (the first of {len(wrong)} such rows)" if wrong[1:] else ""
        raise ValueError(
            f"Column `{name}` must hold {expected}; row {wrong[0]} holds {values[wrong[0]]!r}{more}. {remedy}"
        )
    return values


def text_column(rows: Dataset, name: str, may_be_empty: bool = False) -> list[Any]:
    """Return the texts of a column. With `may_be_empty`, a value may be None."""
    types = (str, type(None)) if may_be_empty else (str,)
    in_python = f'rows.cast_column("{name}", Value("string"))'
    remedy = f'Fill or drop such rows. Write numbers as text: "42" instead of 42 in JSON, or {in_python} in Python.'
    return checked_column(rows, name, lambda value: isinstance(value, types), "text", remedy)


def id_column(rows: Dataset, name: str) -> NDArray[np.generic]:
    """Return the ids in a column, which are all numbers or all texts, shape (N,). Each row must have an id."""
    ids = checked_ids(rows, name, may_be_missing=False)
    if len({isinstance(each, str) for each in ids}) == 2:
        raise ValueError(f"Column `{name}` holds text and numbers, so 1 could be '1'. Write all as text.")
    # An array of text has the size of the longest text in each row.
    is_long = any(isinstance(each, str) and len(each) > _LONG_ID for each in ids)
    return np.array(ids, dtype=object if is_long else None)


def checked_ids(rows: Dataset, name: str, may_be_missing: bool) -> list[Any]:
    """Return the ids in a column. A missing id, which is None or NaN, becomes None.

    Raises:
        ValueError: an id is neither a number nor text, or is missing and must not be, or may be rounded.
    """
    ids = checked_column(
        rows, name, lambda v: may_be_missing if is_missing(v) else isinstance(v, int | float | str), "numbers or text",
        "Fill or drop the column.",
    )  # fmt: skip
    if rounded := [row for row, value in enumerate(ids) if is_rounded(value)]:
        raise ValueError(
            f"Column `{name}` holds {ids[rounded[0]]:.0f} in row {rounded[0]}. A float does not tell such a number "
            "from its neighbors, so different ids may have become equal. Write the column as int64 or as text."
        )
    return [None if is_missing(value) else value for value in ids]


def order_column(rows: Dataset, name: str) -> NDArray[np.generic]:
    """Return a column of numbers that order the rows, shape (N,). Text is refused, because "10" comes before "9"."""
    return np.asarray(checked_column(
        rows, name, lambda v: isinstance(v, int | float) and not is_missing(v), "numbers", "Fix or drop the column."
    ))  # fmt: skip


def reward_column(rows: Dataset, may_be_missing: bool = False) -> NDArray[np.float64]:
    """Return the rewards of rows to learn from, shape (N,), float64. A label counts as 1 or -1.

    A null reward becomes NaN. It is allowed with `may_be_missing`, or with a column `reward_after_baseline`.

    Raises:
        ValueError: there is no row, a required column is missing, or a row has a wrong reward or label.
    """
    check_trainable_columns(rows.column_names)
    columns = set(rows.column_names)
    if len(rows) == 0:
        raise ValueError("there is no row to learn from.")
    # Rows that `topr curate` left out can lack a reward.
    return finite_rewards(rows, may_be_missing or AFTER_BASELINE in columns)


def turn_rewards_column(rows: Dataset) -> list[FloatArray | None] | None:
    """Return the column `turn_rewards`: an array per row, with NaN for null, or None for a row without a list.

    Return None if no row has a list.

    Raises:
        ValueError: a value is neither null nor a nonempty list of rewards and nulls; a row has both a reward (or label)
            and `turn_rewards`, or neither; or there is also a column `reward_after_baseline`.
    """
    lists = checked_column(
        rows, TURN_REWARDS,
        lambda v: v is None or (isinstance(v, list) and bool(v) and all(is_missing(x) or _is_reward(x) for x in v)),
        "lists with a finite number (float32) or null for each turn of the model, or null in rows with a `reward`",
    )  # fmt: skip
    if all(turns is None for turns in lists):
        return None
    if AFTER_BASELINE in rows.column_names:
        raise ValueError(
            f"The rows have both {TURN_REWARDS} and {AFTER_BASELINE}. The trainer chooses turns itself: drop "
            f"{AFTER_BASELINE}, and give the trainer the settings of the choice."
        )
    names = [name for name in ("reward", "label") if name in rows.column_names][:1]
    wholes = rows.with_format(None)[names[0]][:] if names else [None] * len(rows)
    for row, (turns, whole) in enumerate(zip(lists, wholes, strict=True)):
        if (turns is None) == is_missing(whole):
            found = "neither" if turns is None else "both"
            raise ValueError(
                f"Row {row} has {found} of `{names[0] if names else 'reward'}` and `{TURN_REWARDS}`. Give each row "
                "exactly one of the two, and null for the other."
            )
    return [None if turns is None else np.array(turns, dtype=np.float64) for turns in lists]


def are_returns(rows: Dataset, lists: Sequence[FloatArray | None]) -> bool:
    """Return whether `turn_rewards` are returns: the rows that have them also have the same `turn_discount`.

    Raises:
        ValueError: a discount is not in (0, 1], or rows with `turn_rewards` have different discounts.
    """
    if TURN_DISCOUNT not in rows.column_names:
        return False
    values = checked_column(
        rows, TURN_DISCOUNT, lambda v: is_missing(v) or (_is_reward(v) and 0 < v <= 1), "numbers in (0, 1], or null"
    )
    found = {None if is_missing(v) else v for v, turns in zip(values, lists, strict=True) if turns is not None}
    if len(found) > 1:
        raise ValueError(
            f"Column `{TURN_DISCOUNT}` holds {sorted(map(str, found))} in rows with {TURN_REWARDS}, so their numbers "
            "cannot be compared. Compute all returns with the same discount, or train on the rows apart."
        )
    return found != {None}


def have_rewards(columns: Collection[str]) -> bool:
    """Return whether rows with these columns have rewards: a column `reward`, `label` or `turn_rewards`."""
    return bool({"reward", "label", TURN_REWARDS} & set(columns))


def check_trainable_columns(columns: Sequence[str]) -> None:
    """Check the columns of rows to learn from.

    Raises:
        ValueError: a required column is missing.
    """
    if {"chosen", "rejected"} <= set(columns) and not have_rewards(columns):
        raise ValueError(
            f"The rows are preference pairs, with the columns {columns}. Make two rows of each pair: with "
            "topr import, or with trl.unpair_preference_dataset. If chosen and rejected start with the prompt, first "
            "split it off with dataset.map(trl.extract_prompt)."
        )
    need_columns(
        columns, ["prompt", ["completion", "completion_ids"], ["reward", "label", TURN_REWARDS]], "Rows to learn from",
        " Rename the columns in the file, or in Python with `dataset.rename_column`. Commands also take names of "
        "columns: --prompt_field, --completion_field, --reward_fields. If there are no rewards, score the rows with "
        "topr score. topr import reads lists of messages, and logs from other systems.",
    )  # fmt: skip


def finite_rewards(rows: Dataset, may_be_missing: bool = False) -> NDArray[np.float64]:
    """Return the rewards as (N,) float64, with NaN for null if rewards may be missing. A label counts as 1 or -1.

    Rewards must be finite in float32.
    """
    if not {"reward", "label"} & set(rows.column_names):
        if not may_be_missing:
            raise ValueError(f"Column `{TURN_REWARDS}` is null in all rows, and there is no other reward. Fill it.")
        return np.full(len(rows), np.nan)
    if "reward" not in rows.column_names:
        remedy = _remedy(rows, "label", "Fill or cast the column.")
        labels = checked_column(
            rows, "label", lambda v: isinstance(v, bool) or (v is None and may_be_missing), "true or false", remedy
        )
        return np.array([np.nan if label is None else 1.0 if label else -1.0 for label in labels])
    remedy = _remedy(rows, "reward", "Fill or drop such rows.")
    rewards = checked_column(
        rows, "reward", lambda v: (v is None and may_be_missing) or _is_reward(v), "finite numbers (float32)", remedy
    )
    return np.array(rewards, dtype=np.float64)


def _remedy(rows: Dataset, name: str, remedy: str) -> str:
    """Return the remedy for a wrong value in a column of rewards. A column of text must be converted to numbers."""
    feature = rows.features[name]
    if not (isinstance(feature, Value) and feature.dtype.endswith("string")):
        return remedy
    return (
        "Write numbers instead of text. Commands also read words, if you give the number of each word: --label_values "
        "good=1 bad=-1. They then convert text to chat messages, unless you set --chat false."
    )


def after_baseline_column(rows: Dataset) -> NDArray[np.float64]:
    """Return the column `reward_after_baseline` as (N,) float64, with NaN for null. Rows with null are not chosen."""
    known = checked_column(
        rows, AFTER_BASELINE, lambda value: value is None or _is_reward(value),
        "finite numbers (float32), or null in rows to skip", "Fix or drop the column.",
    )  # fmt: skip
    return np.array(known, dtype=np.float64)


def times_column(rows: Dataset) -> NDArray[np.int64]:
    """Return the column `times_chosen` as (N,) int64, with 1 for null. Rows with 0 are not chosen."""
    known = checked_column(
        rows, TIMES_CHOSEN, lambda value: value is None or (_is_reward(value) and value >= 0 and value == int(value)),
        "whole numbers from 0", "Fix or drop the column.",
    )  # fmt: skip
    return np.array([1 if value is None else value for value in known], dtype=np.int64)


def _is_reward(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD


def problem_column(rows: Dataset) -> NDArray[np.generic]:
    """Return the problem of each row, shape (N,).

    Without a column `problem_id`, a hash of the prompt identifies the problem. `prompt_ids` take precedence over
    `prompt`, as in tokenization.
    """
    rows = rows.with_format(None)
    if "problem_id" in rows.column_names:
        return id_column(rows, "problem_id")
    if "prompt_ids" not in rows.column_names:
        return hash_prompts(rows["prompt"])
    return hash_prompts(ids or prompt for ids, prompt in zip(rows["prompt_ids"], rows["prompt"], strict=True))


def rollout_column(rows: Dataset) -> list[Any]:
    """Return the column `rollout_id`, or only None without this column. None marks a row that is a whole rollout."""
    # pandas stores whole numbers as floats if a value is missing, and NaN marks a missing value.
    return checked_ids(rows, ROLLOUT, may_be_missing=True) if ROLLOUT in rows.column_names else [None] * len(rows)


def training_temperatures(rows: Dataset) -> set[float | None]:
    """Return the distinct temperatures of rows to train on. None is an unknown temperature.

    Raises:
        ValueError: a temperature is neither null nor a finite number above 0. Greedy completions, whose temperature is
            0, are for evaluation.
    """
    if "temperature" not in rows.column_names:
        return {None}
    values = checked_column(
        rows, "temperature", lambda v: v is None or (isinstance(v, int | float) and 0 < v < float("inf")),
        "numbers above 0", "Drop greedy rows (temperature 0), which are for evaluation and not for training. If the "
        "rows were sampled, drop the column: log π is then computed at temperature 1.",
    )  # fmt: skip
    return set(values)


def hash_prompts(prompts: Iterable[Any]) -> NDArray[np.str_]:
    """Return a short hash of each prompt (text, messages or token ids), which takes less memory than the prompt.

    The ids of tool calls are ignored, because each call has a different id.

    Raises:
        ValueError: a prompt is missing. Without the error, all rows without a prompt would be one problem.
    """
    hashes = []
    for row, prompt in enumerate(prompts):
        if prompt is None or prompt != prompt:  # NaN differs from itself.
            raise ValueError(
                f"Column `prompt`: row {row} has no prompt. Fill or drop such rows, or add a column problem_id."
            )
        hashes.append(hashlib.blake2b(repr(_without_call_ids(prompt)).encode(), digest_size=8).hexdigest())
    return np.array(hashes, dtype=str)


def _without_call_ids(prompt: Any) -> Any:
    if not isinstance(prompt, list) or not any(
        isinstance(each, dict) and (each.get("tool_calls") or each.get("tool_call_id")) for each in prompt
    ):
        return prompt
    return [
        {
            name: [{**call, "id": None} for call in value] if name == "tool_calls" and value else value
            for name, value in each.items()
            if name != "tool_call_id"
        }
        for each in prompt
    ]


def refuse_images(rows: Dataset, why: str) -> None:
    """Raise a ValueError with the message `why` if there is a column of images."""
    if {"image", "images"} & set(rows.column_names):
        raise ValueError(why)


FINISH_REASONS = ("stop", "length", None)
_OTHER_SIGNS = ("truncated", "is_truncated")  # columns of other systems that can mean a finish reason of length


def check_finish_reasons(rows: Dataset) -> None:
    """Raise a ValueError for a finish reason other than stop, length and null, or a truncated row without a reason.

    A row is truncated if `truncated` or `is_truncated` is true. Without the finish reason `length`, the completion of a
    truncated row would get a stop token.
    """
    remedy = "Write `length` where a completion was truncated, else `stop`; or drop the column."
    reasons = rows.with_format(None)["finish_reason"] if "finish_reason" in rows.column_names else [None] * len(rows)
    for name in _OTHER_SIGNS:
        values = rows.with_format(None)[name] if name in rows.column_names else []
        for row, (value, reason) in enumerate(zip(values, reasons, strict=False)):
            if value is True and reason is None:
                raise ValueError(f"Column `{name}` is true in row {row}, which has no `finish_reason`. {remedy}")
    if "finish_reason" in rows.column_names:
        checked_column(rows, "finish_reason", lambda value: value in FINISH_REASONS, "stop or length", remedy)
