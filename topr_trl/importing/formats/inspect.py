"""Read logs of inspect_ai: `.eval` archives and `.json` files."""

from collections.abc import Iterator
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import first_choice, sampling_of
from topr_trl.importing.format import CUT_TURN, Format, LeftOut, Record, Unusable
from topr_trl.importing.message_parts import assistant, call, other
from topr_trl.importing.openai_messages import finish_reason, tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

_ATTACHED = "attachment://"


def samples(record: Record) -> Iterator[Record]:
    """Yield each sample of a JSON log, with the log's fields `eval` and `plan`.

    Args:
        record (`Record`): Log, or sample of an archive, which already has these fields.
    """
    for sample in record.get("samples", [record]) or ():
        yield {**sample, "eval": record.get("eval"), "plan": record.get("plan")}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of messages. Return `[LeftOut.FAILED]` for a failed sample, and [] without a generated turn.

    Raises:
        Unusable: an attachment is missing, a message has a part without text, the provider ran a tool itself,
            inspect_ai could not parse a tool call, the finish reason is unknown, an assistant turn that the model
            did not write follows a turn of the model, a turn before the last one was cut at the limit of tokens, or it
            has assistant turns without a source and none that the model wrote.
    """
    if record.get("error"):
        return [LeftOut.FAILED]
    attached = record.get("attachments") or {}
    found = [(_is_generated(each), _message(_resolved(each, attached))) for each in record["messages"]]
    first = next((n for n, (is_generated, _) in enumerate(found) if is_generated), None)
    if first is None:
        if any(each["role"] == "assistant" and not each.get("source") for each in record["messages"]):
            raise Unusable('an assistant turn has no source. Set it to "generate" in turns that the model wrote')
        return []
    cut = {
        inner_value(choice, "message", "id")
        for event in record.get("events") or ()
        for choice in inner_value(event, "output", "choices") or ()
        if choice.get("stop_reason") in ("max_tokens", "model_length")
    }
    if any(each.get("id") in cut - {None} for each in [*filter(_is_generated, record["messages"])][:-1]):
        raise Unusable(CUT_TURN)
    messages = [each for _, each in found]
    if any(each["role"] == "assistant" and not is_generated for is_generated, each in found[first:]):
        raise Unusable("it has an assistant turn that the model did not write, after turns of the model")
    target, task = record.get("target"), inner_value(record, "eval", "task")
    of_eval = inner_value(record, "eval", "model_generate_config") or {}
    of_plan = inner_value(record, "plan", "config") or {}
    tools = tools_as_json(_resolved(_tools(record), attached))
    return [
        {
            "prompt": messages[:first], "completion": messages[first:], "tools": tools,
            "problem_id": f"{task}/{record['id']}" if task else str(record["id"]),
            "answer": target if isinstance(target, str) else None,
            "finish_reason": finish_reason(first_choice(record.get("output"), "stop_reason")),
            **sampling_of({**of_eval, **of_plan}),
        }
    ]  # fmt: skip


def rewards(record: Record) -> dict[str, Any]:
    """Return the scores of a sample, by their paths."""
    found: dict[str, Any] = {}
    for name, score in (record.get("scores") or {}).items():
        value, path = score["value"], f"scores.{name}.value"
        parts = {f"{path}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {path: value}
        found |= {part: each for part, each in parts.items() if isinstance(each, str | int | float)}
    return found


def _is_generated(given: Record) -> bool:
    return given["role"] == "assistant" and given.get("source") == "generate"


def _resolved(value: Any, attached: Record) -> Any:
    """Replace each reference to an attachment with the attachment's text.

    Raises:
        Unusable: an attachment is missing.
    """
    if isinstance(value, str) and value.startswith(_ATTACHED):
        name = value.removeprefix(_ATTACHED)
        if name not in attached:
            raise Unusable(f"its attachment {name} is missing")
        return attached[name]
    if isinstance(value, dict):
        return {name: _resolved(each, attached) for name, each in value.items()}
    return [_resolved(each, attached) for each in value] if isinstance(value, list) else value


def _message(given: Record) -> Row:
    if given["role"] != "assistant":
        more = {"tool_call_id": given.get("tool_call_id")}
        content = given["content"]
        if given["role"] == "tool" and given.get("error"):
            content = f"Error: {given['error']['message']}"  # the text that inspect_ai sends to OpenAI's API
        return other(given["role"], content, **more)
    calls = []
    for asked in given.get("tool_calls") or ():
        if asked.get("parse_error"):
            raise Unusable("it has a tool call that inspect_ai could not parse, so the model's own text is not known")
        calls.append(call(asked["function"], asked["arguments"], asked.get("id")))
    if isinstance(given["content"], list) and any(part["type"] == "tool_use" for part in given["content"]):
        raise Unusable("it has a call of a tool that the provider ran itself")
    return assistant(given["content"], calls)


def _tools(record: Record) -> list[Record] | None:
    """Return the tools of the last request that has tools. Return None if no request has tools.

    Later requests without tools can come from a scorer.
    """
    asked = [event for event in record.get("events") or () if event.get("event") == "model" and event.get("tools")]
    return asked[-1]["tools"] if asked else None


def _is_log(record: Record) -> bool:
    is_whole = isinstance(record.get("samples"), list) and "eval" in record
    return is_whole or {"id", "epoch", "messages", "target"} <= set(record)


FORMAT = Format(
    source="inspect_ai 0.3 (inspect_ai/log/_log.py, EvalSample)",
    test=_is_log,
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "answer", "finish_reason", "tools", *SAMPLING),
    required=frozenset({"id", "epoch", "messages"}),
    records=samples,
    labels={"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0},  # correct, incorrect, partial, no answer
    loses="Logs have messages, not token ids. If a solver rewrote messages, the row does not show the messages "
    "that the model read. Do not train on a benchmark on which you report results.",
)
