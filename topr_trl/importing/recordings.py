"""Read recordings of `topr record`: rollouts of one or more calls, with their rewards.

A call whose prompt starts with the whole earlier call extends its row, and the tokens between the two are context. Any
other call starts a new row of the same rollout: the application or the chat template changed the earlier turns.
"""

import json
from contextlib import suppress
from typing import Any

from topr_trl.data.rows import ROLLOUT
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing import openai_chat, text_completions
from topr_trl.importing.format import Format, LeftOut, Record
from topr_trl.importing.row_table import Row
from topr_trl.recording.answers import CHAT, choice_of, prompt_of
from topr_trl.recording.store import State

_OF_WRITER = "model", "served_model", "model_revision"
_SAME = ("tools", "chat_template_kwargs", *_OF_WRITER, *SAMPLING)
_IDS = ("prompt_ids", "completion_ids", "sampler_logps")


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the rows of a rollout. A rollout without a reward gives no row."""
    if all(reward is None for reward in record["rewards"].values()):
        return [LeftOut.UNGRADED]
    made: list[Row] = []
    found = [row for call in record["calls"] if (row := _row_of_call(call)) is not None]
    by_tokens = all(row["prompt_ids"] and row["completion_ids"] for row in found)
    for row in found:
        later = row if by_tokens else {**row, **dict.fromkeys(_IDS)}
        for n, earlier in reversed(list(enumerate(made))):  # Several conversations can take turns in a rollout.
            if (joined := _joined(earlier, later)) is not None:
                made[n] = joined
                break
        else:
            made.append(later)
    if len(made) > 1:
        made = [{**row, ROLLOUT: record["rollout_id"]} for row in made]
    return [*made] or [LeftOut.FAILED]


def rewards(record: Record) -> dict[str, Any]:
    """Return all rewards of the recording by name, such as `rewards.rating`. A missing reward is None."""
    return {f"rewards.{name}": reward for name, reward in record["rewards"].items()}


def _row_of_call(call: Record) -> Row | None:
    """Return the row of a call. Return None if the call has no answer, or an empty one."""
    choice = choice_of(call)
    if choice is None:
        return None
    if call["state"] == State.CUT and choice.get("finish_reason") is None:
        choice = {**choice, "finish_reason": "length"}  # The beginning of an answer has no stop token.
    asked, response = call["request"], {**call["response"], "choices": [choice]}
    request = {**asked, **{name: _number(asked[name]) for name in SAMPLING if name in asked}}
    if call["endpoint"] == CHAT:
        (row,) = openai_chat.rows({"request": request, "response": response})
    else:
        request = {**request, "prompt": prompt_of(request, call["choice"]), "n": 1}
        (row,) = text_completions.rows({"request": request, "response": response})
    if row is None or isinstance(row, LeftOut):
        return None
    return {**row, "model": request.get("model"), **{name: call[name] for name in _OF_WRITER[1:]}}


def _number(value: Any) -> Any:
    """Return a number that the application sent as text, which servers accept."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _joined(row: Row, later: Row) -> Row | None:
    """Return a row that continues with a later call. Return None if the later call does not continue it."""
    if any(row.get(name) != later.get(name) for name in _SAME) or not isinstance(later["prompt"], type(row["prompt"])):
        return None
    if row.get("completion_ids"):
        read, before = [*row["prompt_ids"], *row["completion_ids"]], later["prompt_ids"]
        if before[: len(read)] != read:
            return None
        context = before[len(read) :]
        own = row.get("completion_mask") or [1] * len(row["completion_ids"])
        logps = row["sampler_logps"] and later["sampler_logps"] and [
            *row["sampler_logps"], *[None] * len(context), *later["sampler_logps"]
        ]  # fmt: skip
        tokens = {
            "completion_ids": [*row["completion_ids"], *context, *later["completion_ids"]],
            "completion_mask": [*own, *[0] * len(context), *[1] * len(later["completion_ids"])],
            "sampler_logps": logps,
        }
        return {**later, **tokens, "prompt_ids": row["prompt_ids"], **_joined_text(row, later)}
    is_chat = isinstance(row["prompt"], list)
    return {**later, **_joined_text(row, later)} if is_chat and _is_continued(row, later) else None


def _joined_text(row: Row, later: Row) -> Row:
    """Return the prompt of the first call, and all messages or all text since then."""
    if not isinstance(row["prompt"], list):
        since = later["prompt"].removeprefix(row["prompt"])  # with special tokens, which completions do not show
        return {"prompt": row["prompt"], "completion": since + later["completion"]}
    read = len(row["prompt"]) + len(row["completion"])
    return {
        "prompt": row["prompt"],
        "completion": [*row["completion"], *later["prompt"][read:], *later["completion"]],
    }


def _is_continued(row: Row, later: Row) -> bool:
    """Return whether the messages of a later call start with all messages of a row."""
    read = [*row["prompt"], *row["completion"]]
    return list(map(_shown, later["prompt"][: len(read)])) == list(map(_shown, read))


def _shown(message: Row) -> Row:
    """Return a message without the difference between empty and missing fields."""
    return {name: value for name, value in message.items() if value}


FORMAT = Format(
    source="recordings of topr record",
    suffix=".sqlite",
    rows=rows,
    rewards=rewards,
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id", ROLLOUT, "finish_reason",
        "tools", "chat_template_kwargs", *SAMPLING, *_OF_WRITER,
    ),
    required=frozenset({"rollout_id", "calls", "rewards"}),
    optional=None,
    skips_unrewarded=True,
    loses="To add rollouts that are recorded later, import again with a different --output_dir. A request without a "
    "temperature used the default of the server, which is assumed to be 1.",
)  # fmt: skip
