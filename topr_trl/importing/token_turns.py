"""Join the turns of a rollout into rows."""

from collections.abc import Sequence
from typing import Any

from topr_trl.data.rows import ROLLOUT
from topr_trl.importing.format import Unusable
from topr_trl.importing.row_table import Row


def turn_of(prompt_ids: list[int], ids: list[int], logps: list[float] | None) -> dict[str, Any]:
    """Return a turn for `join_turns`. The model wrote all tokens of `ids`.

    Args:
        prompt_ids (`list[int]`): Token ids that the model read.
        ids (`list[int]`): Token ids that the model wrote.
        logps (`list[float]`, *optional*): Log-probability of each token in `ids`.
    """
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "completion_mask": [1] * len(ids),
            "completion_logprobs": logps or [None] * len(ids)}  # fmt: skip


def join_turns(turns: list[dict[str, Any]]) -> list[Row]:
    """Join the turns of a rollout, and return the token columns of each row.

    A turn extends the previous row if its prompt starts with all tokens of that row. Otherwise, the turn starts a new
    row. A turn whose mask has only zeros is skipped. All rows except the last also get the finish reason None, because
    the reason of a rollout is for its last row.

    Args:
        turns (`list[dict]`): Tokens of each turn: `prompt_ids`, `completion_ids`, `completion_mask` and
            `completion_logprobs`.

    Raises:
        Unusable: the mask or the log-probabilities of a turn do not have one value per token of its completion.
    """
    parts: list[Row] = []
    for turn in turns:
        ids, mask, logps = (turn[f"completion_{name}"] for name in ("ids", "mask", "logprobs"))
        if not len(ids) == len(mask) == len(logps):
            raise Unusable(
                f"a turn has {len(ids)} completion_ids, {len(mask)} values in completion_mask and {len(logps)} "
                "completion_logprobs"
            )
        if not any(mask):
            continue
        row = {"prompt_ids": turn["prompt_ids"], "completion_ids": ids, "completion_mask": [int(own) for own in mask],
               "sampler_logps": [value if own else None for own, value in zip(mask, logps, strict=True)]}  # fmt: skip
        joined = extended(parts[-1], row) if parts else None
        if joined is None:
            parts.append(row)
        else:
            parts[-1] = joined
    return [*({**part, "finish_reason": None} for part in parts[:-1]), *parts[-1:]]


def extended(row: Row, later: Row) -> Row | None:
    """Return the token columns of a row that a later turn extends.

    The tokens that the model read between them are context. Return None if the prompt of the later turn does not start
    with all tokens of the row.

    Args:
        row (`Row`): Row with token ids.
        later (`Row`): Row of the later turn.
    """
    known = [*row["prompt_ids"], *row["completion_ids"]]
    if later["prompt_ids"][: len(known)] != known:
        return None
    context = later["prompt_ids"][len(known) :]
    first, last = (each.get("completion_mask") or [1] * len(each["completion_ids"]) for each in (row, later))
    logps, later_logps = row["sampler_logps"], later["sampler_logps"]
    return {
        "prompt_ids": row["prompt_ids"],
        "completion_ids": [*row["completion_ids"], *context, *later["completion_ids"]],
        "completion_mask": [*first, *[0] * len(context), *last],
        "sampler_logps": [*logps, *[None] * len(context), *later_logps] if logps and later_logps else None,
    }


def as_rollout(rows: Sequence[Row], name: Any, field: str = "") -> list[Row]:
    """Return the rows of a rollout. Several rows get the name of the rollout as `rollout_id`.

    Args:
        rows (`Sequence[Row]`): Rows.
        name (`Any`): Name of the rollout, or None.
        field (`str`, *optional*): Field of the record with the name, for the error message.

    Raises:
        Unusable: there are several rows and no name.
    """
    if len(rows) < 2:
        return [*rows]
    if name is None:
        raise Unusable(f"it has several rows, and needs {field} that joins them")
    return [{**row, ROLLOUT: str(name)} for row in rows]
