"""Check completions of imported rows, cut them to some of their turns, and drop incomplete log-probabilities."""

import json
import math
import re
from typing import Any

from topr_trl.data.chat_templates import is_learned, learned_turns
from topr_trl.data.masks import runs_of
from topr_trl.data.rows import ROLLOUT, TURN_REWARDS
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.openai_messages import message
from topr_trl.importing.row_table import Row

# Tokens that start a turn in common chat templates. A user's own text is unlikely to have them.
_TEMPLATE_TOKENS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "[INST]", "<|user|>",
                    "<|User|>", "<\uff5cUser\uff5c>", "<|turn>")  # fmt: skip
# Tags and tokens that start a turn of a user or a tool.
_OTHERS_MARK = re.compile(
    r"<tool_response>|<\|im_start\|>(?:user|tool|system)|<\|start_header_id\|>(?:user|ipython|tool)|<start_of_turn>user"
    r"|<\|(?:user|User|observation)\|>|\[INST\]|\n\nHuman:"
)
# Header of such a turn, after a decoder has removed special tokens.
_OTHERS_HEADER = re.compile(r"(?:^|\n)(?:user|tool|ipython|observation)\n")
PARTIAL = "partial"  # key of a row: whether only some of its `reward_fields` have a value
_WRITTEN = ("content", "reasoning_content", "tool_calls")  # fields of an assistant turn that the model writes


def holds_completion(row: Row) -> bool:
    """Return whether a row has completion token ids, completion text, or a non-empty assistant turn to learn from.

    Raises:
        NotOfFormat: the completion is a list with a value that is not an object.
    """
    completion = row["completion"]
    if isinstance(completion, list):
        if not all(isinstance(turn, dict) for turn in completion):
            raise NotOfFormat(f"its completion is {json.dumps(completion)[:60]}, and must be text or messages")
        completion = any(turn.get(name) for turn in completion if is_learned(turn) for name in _WRITTEN)
    return bool(row.get("completion_ids") or completion)


def notes_of(row: Row) -> list[str]:
    """Return the reasons for which the summary of an import mentions a row.

    `several_turns`: the row has several turns to learn from, and no `turn_rewards`. `ends_with_user`: the completion
    ends with a user message, which is not learned. `placeholder`: the prompt or the completion is a text such as `nan`,
    which programs write for a missing value. `printed`: the completion looks like a printed Python object. `redacted`:
    text was blanked out. `partial`: some of the `reward_fields` are null, so the reward is the sum of the other fields.
    """
    completion = row["completion"]
    found = {
        "several_turns": turns_of(row) > 1 and row.get(TURN_REWARDS) is None,
        "ends_with_user": isinstance(completion, list) and bool(completion) and completion[-1]["role"] == "user",
        "printed": bool(_PRINTED.match(_content(completion))),
        "placeholder": _is_placeholder(row["prompt"]) or _is_placeholder(completion),
        "redacted": row.get("redacted", False),
        "partial": row.get(PARTIAL, False),
    }
    return [name for name, is_true in found.items() if is_true]


def _content(given: Any) -> str:
    """Return a text, or the content of a single message. Return "" for other values."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], dict):
        given = given[0].get("content")
    return given if isinstance(given, str) else ""


# Text that Python prints for an object, a dictionary or a list, such as `ChatCompletionMessage(content='4')`.
_PRINTED = re.compile(r"\w+\(\w+=|\{'\w+': |\['.*'\]$|content=['\"]", re.DOTALL)


def _is_placeholder(given: Any) -> bool:
    """Return whether a text, or the content of a single message, is a word for a missing value."""
    return _content(given).strip().strip("#<>[]!?").lower() in _PLACEHOLDERS


_PLACEHOLDERS = ("nan", "none", "null", "nil", "undefined", "n/a", "na", "error", "ref", "value", "name", "div/0",
                 "object object", "deleted", "removed", "-", "redacted-by-litellm")  # fmt: skip


def as_chat(row: Row) -> Row:
    """Convert a text prompt to a user message, and a text completion to an assistant message.

    A prompt with marks of turns becomes several messages, see `split_turns`.

    Args:
        row (`Row`): Row. Messages, rows with `completion_ids`, and completions of rows without a prompt do not change.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if row.get("completion_ids"):
        return row
    if isinstance(prompt, str):
        row = {**row, "prompt": [message({"role": role, "content": text}) for role, text in split_turns(prompt)]}
    if isinstance(completion, str) and isinstance(row.get("prompt"), list):
        row = {**row, "completion": [message({"role": "assistant", "content": completion})]}
    return row


def split_turns(prompt: str) -> list[tuple[str, str]]:
    """Return the role and the text of each turn of a prompt. Text without marks of turns is one turn of the user.

    Args:
        prompt (`str`): Text, perhaps with the marks of HelpSteer2 (`<extra_id_1>User`) or of Nectar (`Human:`).
    """
    is_dialogue = prompt.startswith("\n\nHuman:") and prompt.rstrip().endswith("\n\nAssistant:")
    marks = r"\n\n(Human|Assistant): ?" if is_dialogue else r"\n<extra_id_1>(User|Assistant)\n"
    parts = ["user", *re.split(marks, prompt)]
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    return [turn for turn in turns if turn[1].strip()] or turns[:1]


def check_not_rendered(row: Row) -> None:
    """Check that no chat template was applied to the prompt of a row, because the trainer would apply one again.

    Args:
        row (`Row`): Row. Messages, and rows with `completion_ids`, are not checked.

    Raises:
        NotOfFormat: the prompt is text with the special tokens of a chat template.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or row.get("completion_ids"):
        return
    if token := next((each for each in _TEMPLATE_TOKENS if each in prompt), None):
        raise NotOfFormat(
            f"its prompt has {token}, so a chat template was already applied. To keep the text as it is, set --chat "
            "false. To apply the template to it, set --chat true"
        )


def check_one_turn(text: str, is_decoded: bool = False) -> None:
    """Check that a completion has no turns of users or tools.

    Args:
        text (`str`): Text of the completion.
        is_decoded (`bool`, defaults to `False`): Whether a trainer decoded the tokens of a rollout without special
            tokens. The model itself may then have written other marks, such as `[INST]`.

    Raises:
        Unusable: the text has such a turn, so the model would learn to write it.
    """
    has_mark = "<tool_response>" in text if is_decoded else _OTHERS_MARK.search(text)
    if has_mark or _OTHERS_HEADER.search(text, 0, max(text.rfind("assistant\n"), 0)):
        raise Unusable(
            "its completion has tool or user messages, which cannot be distinguished from the model's text, so the "
            "model would learn to write them. In a table, write the completion as a list of messages. Of a trainer, "
            "log token ids and masks"
        )


def turns_of(row: Row) -> int:
    """Return the number of turns to learn from in the completion of a row. A text without token ids is one turn."""
    if row.get("completion_ids"):
        return len(runs_of(row.get("completion_mask") or [1]))
    completion = row["completion"]
    return len(learned_turns(completion)) if isinstance(completion, list) else 1


def check_last_turn(row: Row) -> None:
    """Check that a row can be cut to its last turn.

    Raises:
        Unusable: the row is one of several rows of a run, or its messages do not show where the last turn starts.
    """
    if row.get(ROLLOUT) is not None:
        raise Unusable("it is one of several rows of a run, so --completion last_turn cannot find the last turn")
    completion = row["completion"]
    if (
        turns_of(row) > 1
        and isinstance(completion, list)
        and not (isinstance(row["prompt"], list) and learned_turns(completion))
    ):
        raise Unusable(
            "its prompt is not a list of messages, or its completion has no assistant turn, so --completion last_turn "
            "cannot find the last turn"
        )


def cut_turns(row: Row, first: int, last: int | None = None) -> Row:
    """Return a row whose completion has only the turns of the model from `first` to `last`, and the context between.

    Earlier turns become part of the prompt. If a row has token ids, and its text or messages do not have as many
    turns, only the ids are cut. The trainer uses the ids instead of the text.

    Args:
        row (`Row`): Row.
        first (`int`): Number of the first turn, counted from 0.
        last (`int`, *optional*): Number of the last turn. By default, the completion keeps its end.

    Raises:
        Unusable: the row has token ids of the completion, and none of the prompt.
    """
    row, count = dict(row), turns_of(row)
    if last is not None and last < count - 1:
        row["finish_reason"] = None  # The reason belongs to the last turn, which is removed.
    if row.get("completion_ids"):
        if row.get("prompt_ids") is None:
            raise Unusable("it has completion_ids and no prompt_ids, so earlier turns cannot become part of the prompt")
        runs = runs_of(row.get("completion_mask") or [1] * len(row["completion_ids"]))
        start, end = runs[first][0], None if last is None else runs[last][1]
        row["prompt_ids"] = [*row["prompt_ids"], *row["completion_ids"][:start]]
        for name in ("completion_ids", "completion_mask", "sampler_logps"):
            if row.get(name) is not None:
                row[name] = row[name][start:end]
    if isinstance(completion := row["completion"], list) and len(learned := learned_turns(completion)) == count:
        row["prompt"] = [*row["prompt"], *completion[: learned[first]]]
        row["completion"] = completion[learned[first] : None if last is None else learned[last] + 1]
    return row


def without_unknown_logps(row: Row) -> Row:
    """Return a row. Set `sampler_logps` to None if the log-probability of a token that the model wrote is unknown.

    Servers write an unknown log-probability as null, NaN, minus infinity or -9999.

    Raises:
        Unusable: `completion_mask` and `sampler_logps` have different lengths.
    """
    logps = row.get("sampler_logps")
    if not isinstance(logps, list) or not logps:
        return row
    mask = row.get("completion_mask") or [1] * len(logps)
    if len(mask) != len(logps):
        raise Unusable(f"it has {len(mask)} values in completion_mask and {len(logps)} in sampler_logps")
    if all(is_known(value) for value, own in zip(logps, mask, strict=True) if own):
        return row
    return {**row, "sampler_logps": None}


def is_known(logp: float | None) -> bool:
    """Return whether a logged log-probability is a finite number above -9999, which vLLM writes for minus infinity."""
    return logp is not None and math.isfinite(logp) and logp > _UNKNOWN


_UNKNOWN = -9999.0
