"""Join the tokens of the turns of a rollout into rows."""

from typing import Any

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
        known = parts[-1]["prompt_ids"] + parts[-1]["completion_ids"] if parts else None
        if known is None or turn["prompt_ids"][: len(known)] != known:
            parts.append({"prompt_ids": turn["prompt_ids"], "completion_ids": [], "completion_mask": [],
                          "sampler_logps": []})  # fmt: skip
            read: list[int] = []
        else:
            read = turn["prompt_ids"][len(known) :]
        last = parts[-1]
        last["completion_ids"] += read + ids
        last["completion_mask"] += [0] * len(read) + [int(own) for own in mask]
        last["sampler_logps"] += [None] * len(read)
        last["sampler_logps"] += [value if own else None for own, value in zip(mask, logps, strict=True)]
    return [*({**part, "finish_reason": None} for part in parts[:-1]), *parts[-1:]]
