"""Read results of tau2-bench: an agent, a simulated user, and tools that each of them calls."""

from collections.abc import Iterator
from typing import Any

from topr_trl.data.chat_templates import thinking_of
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.completions import cut_turns, turns_of
from topr_trl.importing.format import Format, LeftOut, Record, Unusable, has
from topr_trl.importing.message_parts import assistant, other
from topr_trl.importing.openai_messages import finish_reason, row_of_run
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

# Reasons for the end of a simulation that say nothing about the agent's answers.
_FAILED = ("infrastructure_error", "context_window_exceeded", "unexpected_error", "user_error")
_STOP = "###STOP###"  # tau2 writes this text in place of an agent's last call if there is no simulated user.


def simulations(record: Record) -> Iterator[Record]:
    """Yield the simulations of a file, each with the file's `info`, and with the first messages of its task as `given`.

    Args:
        record (`Record`): Results, or a single simulation.
    """
    starts = {
        task.get("id"): inner_value(task, "initial_state", "message_history") for task in record.get("tasks") or ()
    }
    for each in record.get("simulations", [record]):
        yield {**each, "info": record.get("info"), "given": starts.get(each.get("task_id")) or []}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of the messages that the agent read and wrote. Return [] if there is no turn of the agent.

    tau2 does not send an agent its thinking. If a turn before the last one has thinking, or was cut at the limit of
    tokens, each turn is a row of one rollout, and the prompts have no thinking.

    Messages with calls of the simulated user, and the results of these calls, are left out. The messages with which a
    task starts are context. Without such messages, a greeting of the agent at the start is context. Return
    `[LeftOut.FAILED]` if the simulation ended for a reason in `_FAILED`.

    Raises:
        Unusable: the messages are null or audio, the context of a turn was truncated, or the finish reason is unknown.
    """
    if record.get("termination_reason") in _FAILED:
        return [LeftOut.FAILED]
    given = record["messages"]
    if given is None or any(each.get("is_audio") for each in given):
        raise Unusable("its messages are audio: offline training supports only text")
    if any(each.get("context_truncation") for each in given if each["role"] == "assistant"):
        raise Unusable("its context was truncated, so later turns had a different context")
    is_greeted = bool(given) and given[0]["role"] == "assistant" and not given[0].get("tool_calls")
    fixed = len(record["given"]) or int(is_greeted)
    turns = [_turn(each, n < fixed) for n, each in enumerate(given) if _is_read(each)]
    environment, agent = (inner_value(record, "info", f"{name}_info") or {} for name in ("environment", "agent"))
    policy, domain = record.get("policy") or environment.get("policy"), environment.get("domain_name")
    own = [each for each in given[fixed:] if each["role"] == "assistant" and each.get("content") != _STOP]
    reasons = [finish_reason(_choice(each).get("finish_reason")) for each in own]
    found = row_of_run(
        [*([other("system", policy)] if policy else []), *turns],
        problem_id="/".join(map(str, filter(None, (domain, str(record["task_id"]))))),
        finish_reason=reasons[-1] if own else None,
        model=agent.get("llm"),
        **{name: inner_value(agent, "llm_args", name) for name in SAMPLING},
    )
    if not found or not (any(map(thinking_of, turns[:-1])) or "length" in reasons[:-1]):
        return [*found]
    parts = [cut_turns(found[0], n, n) for n in range(turns_of(found[0]))]
    return [
        {**part, "prompt": [{**each, "reasoning_content": None} for each in part["prompt"]], "finish_reason": reason,
         "rollout_id": str(record["id"])}
        for part, reason in zip(parts, reasons[-len(parts) :], strict=True)
    ]  # fmt: skip


def _choice(message: Record) -> Record:
    """Return the choice in the response of the server. Older versions of tau2 write only the choice."""
    raw: Record = message.get("raw_data") or {}
    choices: list[Record] = raw.get("choices") or [raw]
    return choices[0]


def _is_read(message: Record) -> bool:
    """Return whether the agent reads or writes a message."""
    role = message["role"]
    return (
        role == "assistant"
        or (role == "user" and not message.get("tool_calls"))
        or (role == "tool" and message.get("requestor", "assistant") == "assistant")
    )


def _turn(message: Record, is_fixed: bool) -> Row:
    if message["role"] != "assistant":
        return other(message["role"], message["content"], tool_call_id=message.get("id"))
    weight = {"weight": 0} if is_fixed or message.get("content") == _STOP else {}
    thinking = inner_value(_choice(message), "message", "reasoning_content")
    return assistant(message.get("content"), message.get("tool_calls") or (), thinking, **weight)


def rewards(record: Record) -> dict[str, Any]:
    """Return the reward of a simulation. Return {} if the simulation was not evaluated."""
    reward = inner_value(record, "reward_info", "reward")
    return {} if reward is None else {"reward_info.reward": reward}


FORMAT = Format(
    source="tau2-bench (src/tau2/data_model/simulation.py, message.py)",
    test=lambda record: (
        isinstance(record.get("simulations"), list) or has("task_id", "reward_info", "messages")(record)
    ),
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "rollout_id", "finish_reason", "model", *SAMPLING),
    required=frozenset({"id", "task_id", "messages"}),
    records=simulations,
    loses="The system prompt is the policy of the domain, without the instructions that tau2 writes around it. Results "
    "lack the tools.",
)
