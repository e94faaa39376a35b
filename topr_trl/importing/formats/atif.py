"""Read trajectories in the format ATIF, which Harbor and NeMo-Gym write."""

from itertools import accumulate
from typing import Any

from topr_trl.data.chat_templates import is_learned
from topr_trl.importing.completions import turns_of
from topr_trl.importing.format import GRADED, Format, Record, Unusable
from topr_trl.importing.message_parts import assistant, call, other, text_of
from topr_trl.importing.openai_messages import row_of_run, tools_as_json
from topr_trl.importing.record_fields import inner_value, value_at
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout, join_turns, turn_of


def rows(record: Record) -> list[Row]:
    """Return the rows of a trajectory and of the trajectories of its subagents, as parts of one rollout.

    A trajectory becomes one row of messages. If each step of the model has token ids, the trajectory becomes one or
    more rows with token ids. Steps that were copied from an earlier trajectory, and steps that no model wrote, are
    context. A trajectory without a step to learn from gives no row.

    Raises:
        Unusable: several rows have no id that joins them, the file lacks token ids or text that the model read or
            wrote, a step stands for several calls of the model, a step has lists of different lengths or a reward whose
            turn is not known, the provider defines a tool, or a message has a part without text.
    """
    trajectories = _with_subagents(record)
    found = [row for each in trajectories for row in _rows_of_trajectory(each)]
    name = record.get("trajectory_id") or record.get("session_id")
    return as_rollout(found, name, "a session_id or a trajectory_id")


def _with_subagents(record: Record) -> list[Record]:
    inner = record.get("subagent_trajectories") or ()
    return [record, *(found for each in inner for found in _with_subagents(each))]


def rewards(record: Record) -> dict[str, Any]:
    """Return the rewards of a step by name. ATIF defines no field for rewards, so they are in `extra`.

    A trajectory has no reward as a whole. For a trajectory, return `{"reward of a step": None}` if the model wrote a
    step with a reward in the trajectory or in the trajectory of a subagent, and {} otherwise.

    Args:
        record (`Record`): Step, or a trajectory.
    """
    if "steps" in record:
        own = (step for each in _with_subagents(record) for step in each["steps"] if _is_own(step))
        return {"reward of a step": None} if any(map(rewards, own)) else {}
    return {path: value for path in _REWARDS if (value := value_at(record, path)) is not None}


_REWARDS = ("extra.reward", "metrics.extra.reward")


def _rows_of_trajectory(record: Record) -> list[Row]:
    agent, steps = record["agent"], record["steps"]
    own = [step for step in steps if _is_own(step)]
    if any((step.get("llm_call_count") or 1) > 1 for step in own):
        raise Unusable("a step has llm_call_count above 1, so the text of each call of the model is not known")
    messages = [(message, step) for step in steps for message in _messages(step)]
    made = row_of_run(
        [message for message, _ in messages],
        tools=tools_as_json(agent.get("tool_definitions")),
        model=next(filter(None, (step.get("model_name") for step in own)), agent.get("model_name")),
        temperature=inner_value(agent, "extra", "temperature"),
    )
    if not made:
        return []
    if all(inner_value(step, "metrics", "completion_token_ids") for step in own):
        return _graded([{**made[0], **part} for part in join_turns([_tokens(step["metrics"]) for step in own])], own)
    _check_text(agent, steps)
    return _graded(made, [step for message, step in messages if is_learned(message)][-turns_of(made[0]) :])


def _graded(parts: list[Row], steps: list[Record]) -> list[Row]:
    """Return the rows of a trajectory, each with the steps of its turns in the field `GRADED`.

    If no tokens separate two steps, the rows have fewer turns than steps, and do not get this field.

    Raises:
        Unusable: the rows have fewer turns than steps, and a step has a reward.
    """
    ends = list(accumulate(map(turns_of, parts)))
    if ends[-1] == len(steps):
        return [{**row, GRADED: steps[end - turns_of(row) : end]} for row, end in zip(parts, ends, strict=True)]
    if any(map(rewards, steps)):
        raise Unusable(f"{len(steps)} steps have the tokens of {ends[-1]} turns, so the turn of a reward is not known")
    return parts


def _is_own(step: Record) -> bool:
    """Return whether the model wrote a step in this trajectory, and not in an earlier trajectory."""
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _messages(step: Record) -> list[Row]:
    """Return the messages of a step. Observations are tool messages if the step has calls, or else user messages."""
    calls = [
        call(each["function_name"], each["arguments"], each["tool_call_id"]) for each in step.get("tool_calls") or ()
    ]
    if step["source"] != "agent":
        found = [other(step["source"], step["message"])] if text_of(step["message"]) else []
    elif step["message"] or calls or step.get("reasoning_content"):
        weight = {} if _is_own(step) else {"weight": 0}
        found = [assistant(step["message"], calls, step.get("reasoning_content"), **weight)]
    else:
        found = []
    results = inner_value(step, "observation", "results") or ()
    role = "tool" if calls else "user"
    read = [each for each in results if each.get("content") is not None]
    return found + [other(role, each["content"], tool_call_id=each.get("source_call_id")) for each in read]


def _tokens(metrics: Record) -> dict[str, Any]:
    """Return the tokens of a step for `join_turns`.

    Raises:
        Unusable: the step has token ids of its completion, and none of its prompt.
    """
    if not metrics.get("prompt_token_ids"):
        raise Unusable("a step has completion_token_ids without prompt_token_ids, so what the model read is not known")
    return turn_of(metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics.get("logprobs"))


def _check_text(agent: Record, steps: list[Record]) -> None:
    """Check that the messages of a trajectory are what the model read and wrote.

    Raises:
        Unusable: the agent Terminus parsed the answers of the model, or the context was summarized.
    """
    if agent["name"].startswith("terminus") and any(step.get("tool_calls") for step in steps):
        raise Unusable(
            "Terminus wrote parsed answers, not the text of the model. Run Harbor with collect_rollout_details, which "
            "adds token ids, or with raw_content in trajectory_config"
        )
    for step in steps:
        results = inner_value(step, "observation", "results") or ()
        if step["source"] == "system" and any(each.get("subagent_trajectory_ref") for each in results):
            raise Unusable("its context was summarized, so later steps had a different context")


FORMAT = Format(
    source="ATIF 1.0 to 1.8 (harbor 0.26.0, harbor/models/trajectories)",
    test=lambda record: str(record.get("schema_version")).startswith("ATIF"),
    rows=rows,
    rewards=rewards,
    rates_turns=True,
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id", "rollout_id", "tools",
        "model", "temperature",
    ),
    required=frozenset({"schema_version", "agent", "steps"}),
    loses="Steps can have rewards (extra.reward). For a reward of the whole trajectory, see --rewards and --id_field "
    "session_id. Text of agents that Harbor converted can differ from the text of the model. Subagents in other files "
    "are not joined to the run.",
)  # fmt: skip
