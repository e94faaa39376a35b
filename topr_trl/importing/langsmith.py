"""Read exports of LangSmith: runs of the type llm, as JSON, JSON lines or parquet."""

from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import Format, LeftOut, Record, Unusable
from topr_trl.importing.message_parts import assistant, call, other, parsed_json, split_parts
from topr_trl.importing.openai_messages import finish_reason, text_or_messages, tools_as_json
from topr_trl.importing.row_table import Row

_ROLES = {
    "human": "user", "HumanMessage": "user", "user": "user", "ai": "assistant", "AIMessage": "assistant",
    "AIMessageChunk": "assistant", "assistant": "assistant", "system": "system", "SystemMessage": "system",
    "developer": "system", "tool": "tool", "ToolMessage": "tool", "function": "tool", "FunctionMessage": "tool",
}  # fmt: skip


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of messages, or of text for a completion model.

    Return [] if the request or the answer is missing, `[LeftOut.FAILED]` if the run failed, and `[LeftOut.OTHER]` if
    the type of the run is not llm.

    Raises:
        Unusable: a run has several requests or answers, its messages or its answer are not known, or a tool call was
            not parsed.
    """
    inputs, outputs = parsed_json(record["inputs"]), parsed_json(record.get("outputs"))
    if record["run_type"] != "llm":
        return [LeftOut.OTHER]
    if record.get("error"):
        return [LeftOut.FAILED]
    if not inputs or not outputs:
        return []
    extra = parsed_json(record.get("extra")) or {}
    settings = {**(extra.get("options") or {}), **(extra.get("invocation_params") or {})}
    answer, reason = _answer(outputs)
    if answer is None:
        return []
    if "messages" in inputs:
        prompt: Any = [_message(each) for each in _unwrapped(inputs["messages"])]
        completion: Any = [_message(answer)] if isinstance(answer, dict) else [assistant(answer)]
    else:
        prompts = inputs["prompts"] if "prompts" in inputs else [inputs["prompt"]] if "prompt" in inputs else []
        if len(prompts) != 1:
            raise Unusable(f"it has {len(prompts)} prompts and no messages; its inputs have {', '.join(inputs)}")
        if isinstance(answer, dict) and _name(answer) in _ROLES:
            raise Unusable("its inputs are the text of a chat, so the messages that the model read are not known")
        prompt, completion = prompts[0], text_or_messages(answer)
    return [
        {
            "prompt": prompt, "completion": completion, "finish_reason": finish_reason(reason),
            "tools": tools_as_json(settings.get("tools") or inputs.get("tools")),
            **{name: settings.get(name, inputs.get(name)) for name in SAMPLING},
        }
    ]  # fmt: skip


def rewards(record: Record) -> dict[str, Any]:
    """Return the mean feedback for each feedback key. The mean is None for feedback without numbers."""
    stats = parsed_json(record.get("feedback_stats")) or {}
    return {key: each.get("avg") for key, each in stats.items() if isinstance(each, dict)}


def _unwrapped(messages: Any) -> Any:
    """Return the messages of a request. LangChain logs the request inside a list with one element."""
    if messages and isinstance(messages[0], list):
        if len(messages) > 1:
            raise Unusable(f"it has {len(messages)} requests in one run")
        return messages[0]
    return messages


def _answer(outputs: Any) -> tuple[Any, str | None]:
    """Return the answer (a message, text, or None) and its finish reason."""
    if "generations" in outputs:
        generations = outputs["generations"]
        made = generations[0] if generations and isinstance(generations[0], list) else generations
        if not made:
            return None, None
        if len(made) > 1:
            raise Unusable(f"it has {len(made)} generations in one run")
        info = made[0].get("generation_info") or {}
        return made[0].get("message") or made[0].get("text"), info.get("finish_reason")
    if "choices" in outputs:
        if len(outputs["choices"]) > 1:
            raise Unusable(f"it has {len(outputs['choices'])} choices in one run")
        choice = outputs["choices"][0] if outputs["choices"] else {}
        return choice.get("message") or choice.get("text"), choice.get("finish_reason")
    for name in ("message", "output", "messages"):
        if name in outputs:
            found = outputs[name]
            if not isinstance(found, list):
                return found, None
            if len(found) != 1:
                raise Unusable(f"its outputs have {len(found)} {name}, so the answer is not known")
            return found[0], None
    if "role" in outputs or "content" in outputs:
        return {"role": "assistant", **outputs}, None
    raise Unusable(f"its outputs have no known field for the answer; they have {', '.join(outputs)}")


def _name(given: Record) -> str:
    """Return the class name, type or role of a message, to look up in `_ROLES`."""
    if isinstance(given.get("id"), list) and given.get("lc"):
        return str(given["id"][-1])
    return str(given.get("type") if given.get("type") in _ROLES else given.get("role") or given.get("type"))


def _message(given: Record) -> Row:
    role = _ROLES.get(_name(given))
    if role is None:
        raise Unusable(f"a message has the unknown type or role {_name(given)}")
    inner = given.get("kwargs") or given.get("data") or given
    more = inner.get("additional_kwargs") or {}
    if role != "assistant":
        return other(role, inner.get("content"), tool_call_id=inner.get("tool_call_id"))
    if inner.get("invalid_tool_calls"):
        raise Unusable("it has a tool call that could not be parsed")
    calls = [
        asked if "function" in asked else call(asked["name"], asked["args"], asked.get("id"))
        for asked in inner.get("tool_calls") or more.get("tool_calls") or ()
    ]
    thinking = more.get("reasoning_content") or inner.get("reasoning_content")
    if thinking and split_parts(inner.get("content"))[1]:
        thinking = None  # The parts of the content repeat this thinking.
    return assistant(inner.get("content"), calls, thinking)


FORMAT = Format(
    source="LangSmith's run data format (langsmith 0.15, schemas.py; langchain-core 1.8, tracers/core.py)",
    suffix="",
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "finish_reason", "tools", *SAMPLING),
    required=frozenset({"run_type", "inputs"}),
    optional=None,
    loses="Only runs of the type llm become rows. The reward is the mean feedback on a run. Feedback on a whole trace "
    "is in its root run: write this feedback to a file for --rewards, and set --id_field trace_id.",
)
