"""Read `results.jsonl` of verifiers up to 0.3.1, which `vf-eval --save-results` writes.

Before 0.1.14, the number of an example is in `id` instead of `example_id`, and the tools are in `info.oai_tools`.
"""

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record
from topr_trl.importing.openai_messages import tools_as_json
from topr_trl.importing.record_fields import value_at
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout, join_turns


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of text or messages. If each turn has token ids, return one or more rows with token ids.

    Return `[LeftOut.FAILED]` for a rollout with an error, and `[LeftOut.EMPTY]` for an empty completion.

    The state column `trajectory` can have the tokens of each turn. `join_turns` joins these turns into rows.

    Raises:
        NotOfFormat: the number of the example is missing, or a message has no role.
        Unusable: a turn has lists of different lengths, the provider defines a tool, or a message has a part without
            text.
    """
    if record.get("error"):
        return [LeftOut.FAILED]
    if not record["completion"]:
        return [LeftOut.EMPTY]
    example = record.get("example_id", record.get("id"))
    if example is None:
        raise NotOfFormat(f"it lacks example_id; it has {', '.join(sorted(record))}")
    prompt, completion = (text_or_messages(record[name]) for name in ("prompt", "completion"))
    answer = record.get("answer")
    shared = {
        "problem_id": str(example), "answer": answer if isinstance(answer, str) else None,
        "finish_reason": "length" if record.get("is_truncated") else "stop",
        "tools": tools_as_json(record.get("tool_defs") or value_at(record, "info.oai_tools")),
    }  # fmt: skip
    turns = record.get("trajectory") or []
    if not turns or not all(turn.get("tokens") for turn in turns):
        return [{**shared, "prompt": prompt, "completion": completion}]
    parts = as_rollout(join_turns([turn["tokens"] for turn in turns]), turns[0].get("trajectory_id"), "a trajectory_id")
    return [{**shared, "prompt": prompt, "completion": completion, **part} for part in parts]


def _is_rollout(record: Record) -> bool:
    own = {"example_id", "generation_ms", "oai_tools", "tool_defs", "is_completed"}
    return {"prompt", "completion", "reward"} <= set(record) and bool(own & set(record))


FORMAT = Format(
    source="verifiers up to 0.3.1 (verifiers/utils/save_utils.py)",
    rank=3,
    test=_is_rollout,
    rows=rows,
    rewards=lambda record: {"reward": record["reward"]},
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id", "rollout_id",
        "finish_reason", "answer", "tools",
    ),
    required=frozenset({"prompt", "completion", "reward"}),
    loses="Tokens are included only if the state column trajectory was saved (vf-eval -C trajectory). The temperature "
    "is in metadata.json: set --temperature if it was not 1.",
)  # fmt: skip
