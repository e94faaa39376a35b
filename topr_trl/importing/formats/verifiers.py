"""Read `traces.jsonl` of verifiers (0.2 and later) and of prime-rl: trees of messages with their tokens.

A line is an episode with its traces, or a single trace (0.2). A trace is a tree of messages. Each path from the root to
a leaf is a sequence that the model read and wrote, with tokens if the sampler returned them. The paths of a trace are
rows of one rollout. If several paths share a turn of the model, only the row of the first path trains on this turn.
In the rows of the other paths, the turn is context.
"""

from itertools import groupby
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import CUT_TURN, Format, LeftOut, NotOfFormat, Record, Unusable, has
from topr_trl.importing.openai_messages import message, template_columns, tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout

# Conditions that stop a run before the model has finished.
_CUT = {"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"}
# Fields of an episode, and fields of a trace.
_OF_EPISODE = frozenset({
    "env", "errors", "group", "id", "is_timeout", "ok", "run", "task", "traces", "num_input_tokens",
    "num_output_tokens", "num_total_tokens",
})  # fmt: skip
_OF_TRACE = frozenset({
    "version", "id", "verifiers", "task", "agent", "tools", "nodes", "calls", "rewards", "metrics", "info",
    "root_reply", "extra_usage", "is_completed", "ok", "stop_condition", "is_timeout", "errors", "timing", "runtime",
    "run",
})  # fmt: skip


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the rows of all traces, one for each path with a turn to learn from.

    A trace gives a `LeftOut` instead if it comes from an evaluation, failed, belongs to an agent that was not trained,
    or has no turn to learn from.

    Raises:
        NotOfFormat: a trace lacks a field, its nodes are not in order, or a message has no role.
        Unusable: a node has the wrong number of values in `mask` or `logprobs`, the provider defines a tool, a
            message has a part without text, or a turn without token ids was cut before the end of its path.
    """
    found: list[Row | LeftOut] = []
    for trace in record.get("traces", [record]):
        if missing := {"nodes", "rewards"} - set(trace):
            raise NotOfFormat(f"a trace lacks {', '.join(sorted(missing))}; it has {', '.join(sorted(trace))}")
        if _is_evaluation(trace, record):
            found.append(LeftOut.EVALUATED)
        elif not trace.get("ok", True):
            found.append(LeftOut.FAILED)
        elif not (trace.get("agent") or {}).get("trainable", True):
            found.append(LeftOut.FROZEN)
        else:
            found += _rows_of_trace(trace, record) or [LeftOut.EMPTY]
    return found


def _is_evaluation(trace: Record, episode: Record) -> bool:
    """Return whether a trace comes from an evaluation. prime-rl logs training and evaluation in one file."""
    return "eval" in (inner_value(trace, "info", "kind"), inner_value(episode, "run", "work", "type"))


def _rows_of_trace(trace: Record, episode: Record) -> list[Row]:
    """Return a row for each path with a turn to learn from. Summaries of the context that were rejected have no row."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    links = [(n, link) for n, node in enumerate(nodes) for link in node.get("semantic_parents") or ()]
    attempts = {n for n, link in links if link["type"] == "compaction_attempt"}
    rejected = attempts - {link["node"] for _, link in links if link["type"] == "compaction"}  # summaries
    paths = [_path(nodes, leaf) for leaf in range(len(nodes)) if leaf not in parents | rejected]
    task = trace.get("task") or episode.get("task") or {}
    data = task.get("data") or {}
    group = (episode.get("group") or {}).get("id")
    problem = task.get("key") or task.get("hash") or group or data.get("id", data.get("idx"))
    answer = data.get("answer")
    shared = {
        "reward": _reward(trace), "problem_id": None if problem is None else str(problem),
        "answer": str(answer) if isinstance(answer, str | int | float) else None,
    }  # fmt: skip
    cut = {call.get("node") for call in trace.get("calls") or () if call.get("finish_reason") == "length"}
    made, seen = [], set[int]()
    for path in paths:
        row = _row_of_path(nodes, path, seen)
        if row is not None:
            call = _last_call(trace, nodes, path)
            if "completion_ids" not in row and cut & set(path) - seen - {call.get("node")}:
                raise Unusable(CUT_TURN)
            sampling = call.get("sampling") or {}
            made.append({
                **row, **template_columns(sampling), **shared, "finish_reason": _finish_reason(trace, call),
                "tools": tools_as_json(nodes[path[0]].get("tools") or trace.get("tools")),
                **{name: sampling.get(name) for name in SAMPLING},
            })  # fmt: skip
        seen |= set(path)
    return as_rollout(made, trace.get("id"), "a trace id")


def _path(nodes: list[Record], leaf: int) -> list[int]:
    """Return the indices of the nodes from the root to a leaf.

    Raises:
        NotOfFormat: the parent of a node does not come before the node.
    """
    path = [leaf]
    while (parent := nodes[path[-1]].get("parent")) is not None:
        if not 0 <= parent < path[-1]:
            raise NotOfFormat(f"node {path[-1]} has the parent {parent}, which does not come before it")
        path.append(parent)
    return path[::-1]


def _row_of_path(nodes: list[Record], path: list[int], seen: set[int]) -> Row | None:
    """Return a row with the messages of a path, and with tokens if all turns of the model have them.

    Return None if the path has nothing to learn from. `seen` has the indices of the nodes of earlier paths, which are
    context.

    Raises:
        NotOfFormat: a message has no role.
        Unusable: a node has the wrong number of values in `mask` or `logprobs`, or a message has a part without text.
    """
    own = [n for n in path if nodes[n].get("sampled") and n not in seen]
    if not own:
        return None
    start = path.index(own[0])
    messages = [message(nodes[n]["message"]) for n in path]
    row: Row = {"prompt": messages[:start], "completion": messages[start:]}
    runs = groupby(path, key=lambda n: bool(nodes[n].get("sampled")))
    # A message of the context may have no token ids if a message beside it has them. If no message of a context has
    # token ids, only the text is known.
    if not all((all if is_own else any)(nodes[n].get("token_ids") for n in run) for is_own, run in runs):
        return row
    ids, mask, logps = list[int](), list[int](), list[float | None]()
    for n in path:
        tokens, sampled, values = (nodes[n].get(name) or [] for name in ("token_ids", "mask", "logprobs"))
        if len(sampled) != len(tokens) or len(values) not in (0, sum(map(bool, sampled))):
            raise Unusable(
                f"node {n} has {len(tokens)} token_ids, {len(sampled)} values in mask and {len(values)} logprobs"
            )
        of_own = iter(values if n in own else ())  # one value per token with mask 1
        logps += [next(of_own, None) if in_mask else None for in_mask in sampled]
        ids += tokens
        mask += [int(bool(in_mask) and n in own) for in_mask in sampled]
    if 1 not in mask:
        return None
    first = mask.index(1)
    return {
        **row, "prompt_ids": ids[:first], "completion_ids": ids[first:], "completion_mask": mask[first:],
        "sampler_logps": logps[first:],
    }  # fmt: skip


def _reward(trace: Record) -> float | None:
    """Return the weighted sum of the scores, or None if all are null. Scores of version 0.2 are already weighted."""
    parts: list[Any] = [part for part in trace["rewards"].values() if part is not None]
    if not parts:
        return None
    return float(sum(part["score"] * part["weight"] if isinstance(part, dict) else part for part in parts))


def _last_call(trace: Record, nodes: list[Record], path: list[int]) -> Record:
    """Return the call that generated the last turn of a path. Return {} if the trace lacks this call."""
    last = next(n for n in reversed(path) if nodes[n].get("sampled"))
    calls: list[Record] = [call for call in trace.get("calls") or () if call.get("node") == last]
    return calls[-1] if calls else {}


def _finish_reason(trace: Record, call: Record) -> str:
    reason = call.get("finish_reason")
    cut = reason == "length" if reason else trace.get("stop_condition") in _CUT
    return "length" if cut else "stop"


FORMAT = Format(
    source="verifiers 0.2.0 to 0.4.0 (verifiers/v1: episode.py, trace.py, graph.py); prime-rl writes the same",
    test=lambda record: isinstance(record.get("traces"), list) or has("nodes", "rewards")(record),
    rows=rows,
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "reward", "problem_id", "rollout_id",
        "finish_reason", "answer", "tools", "chat_template_kwargs", *SAMPLING,
    ),
    required=frozenset({"id"}),
    optional=_OF_EPISODE | _OF_TRACE,
    loses="In verifiers 0.4.0 and later, log-probabilities have four decimals. Over 1,000 tokens, the rounding errors "
    "can sum to 0.05.",
)  # fmt: skip
