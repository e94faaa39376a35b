"""Read spans and logs that follow OpenTelemetry's conventions for generative AI, as OTLP JSON or printed by an SDK."""

import json
from collections.abc import Iterator
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import assistant, call, other, parsed_json
from topr_trl.importing.openai_messages import finish_reason, tools_as_json
from topr_trl.importing.row_table import Row

_INPUT, _OUTPUT, _SYSTEM = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"
_TOOLS, _REASONS = "gen_ai.tool.definitions", "gen_ai.response.finish_reasons"
_RESULT, _SCORE, _NAME = "gen_ai.evaluation.result", "gen_ai.evaluation.score.value", "gen_ai.evaluation.name"
# Attributes with messages in older conventions, which cannot be read.
_OLD = ("gen_ai.prompt", "gen_ai.completion", "gen_ai.prompt.0.content", "llm.prompts")


def calls(record: Record) -> Iterator[Record]:
    """Yield the spans and log records of a document, each with its evaluations.

    Args:
        record (`Record`): OTLP export, or a span as an SDK prints it.
    """
    if not {"resourceSpans", "resourceLogs"} & set(record):
        yield {
            **record,
            "evaluations": _evaluations(record.get("events") or ()),
            "attributes": _plain(record["attributes"]),
        }
        return
    spans = [span for group in record.get("resourceSpans") or () for scope in group.get("scopeSpans") or ()
             for span in scope.get("spans") or ()]  # fmt: skip
    logs = [log for group in record.get("resourceLogs") or () for scope in group.get("scopeLogs") or ()
            for log in scope.get("logRecords") or ()]  # fmt: skip
    evaluated: dict[Any, dict[str, Any]] = {}
    for log in logs:
        if (log.get("eventName") or log.get("name")) == _RESULT:
            evaluated.setdefault(log.get("spanId"), {}).update(_evaluations([{**log, "name": _RESULT}]))
    captured = {span.get("spanId") for span in spans if _OUTPUT in _plain(span.get("attributes"))}
    # Leave out logs that repeat the messages of their span.
    for each in (*spans, *(log for log in logs if log.get("spanId") not in captured)):
        own = {**evaluated.get(each.get("spanId"), {}), **_evaluations(each.get("events") or ())}
        yield {**each, "attributes": _plain(each.get("attributes")), "evaluations": own}


def _evaluations(events: Any) -> dict[str, Any]:
    """Return the scores in the evaluation events of a list, by the name of the evaluation."""
    found = {}
    for event in events:
        if event.get("name") == _RESULT:
            attributes = _plain(event.get("attributes"))
            found[str(attributes.get(_NAME, "score"))] = attributes.get(_SCORE)
    return found


def _plain(attributes: Any) -> Any:
    """Convert OTLP's list of attributes to an object. Return an object unchanged."""
    if isinstance(attributes, list):
        return {each["key"]: _value(each.get("value") or {}) for each in attributes}
    return attributes or {}


def _value(given: Record) -> Any:
    if "arrayValue" in given:
        return [_value(each) for each in given["arrayValue"].get("values") or ()]
    if "kvlistValue" in given:
        return _plain(given["kvlistValue"].get("values") or [])
    if "intValue" in given:
        return int(given["intValue"])
    return next(iter(given.values()), None)


def rows(record: Record) -> list[Row | LeftOut]:
    """Return a row of messages for each output message. Return `[LeftOut.OTHER]` for a record without output messages.

    Raises:
        NotOfFormat: the record follows older conventions.
        Unusable: the prompt was not captured, the provider ran a tool itself, or a part of a message cannot become
            text, for instance an image.
    """
    attributes = record["attributes"]
    if _OUTPUT not in attributes:
        if found := [name for name in _OLD if name in attributes]:
            raise NotOfFormat(
                f"it has {found[0]}, an attribute of the conventions before 1.37. Upgrade the instrumentation"
            )
        return [LeftOut.OTHER]
    if _INPUT not in attributes:
        raise Unusable(f"it has {_OUTPUT} and no {_INPUT}: the prompt was not captured")
    instructions = parsed_json(attributes.get(_SYSTEM))
    prompt = [other("system", instructions)] if instructions else []
    prompt += [each for given in parsed_json(attributes[_INPUT]) for each in _messages(given)]
    reasons = parsed_json(attributes.get(_REASONS)) or []
    sampling = {name: attributes.get(f"gen_ai.request.{name}") for name in SAMPLING}
    made: list[Row | LeftOut] = []
    for n, given in enumerate(parsed_json(attributes[_OUTPUT])):
        reason = given.get("finish_reason") or (reasons[n] if n < len(reasons) else None)
        made.append({
            "prompt": prompt, "completion": _messages(given),
            "finish_reason": finish_reason(_REASON.get(str(reason), reason)),
            "tools": tools_as_json(_functions(parsed_json(attributes.get(_TOOLS)))), **sampling,
        })  # fmt: skip
    return made


_REASON = {"tool_call": "tool_calls"}  # finish reason in OpenTelemetry's conventions, and in OpenAI's API


def _functions(tools: Any) -> Any:
    return [{name: value for name, value in tool.items() if name != "type"} if "function" not in tool else tool
            for tool in tools or ()] or None  # fmt: skip


def _messages(given: Record) -> list[Row]:
    """Convert a message to messages of a row. Each tool result becomes a separate message."""
    parts = given["parts"]
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    if given["role"] != "assistant":
        made = [other("tool", _text(part.get("response", part.get("result"))), tool_call_id=part.get("id"))
                for part in results]  # fmt: skip
        rest = [part for part in parts if part not in results]
        return [*made, other(given["role"], rest)] if rest or not results else made
    if results:
        raise Unusable("an assistant message has the result of a tool that the provider ran itself")
    asked = [call(part["name"], part.get("arguments"), part.get("id")) for part in parts if part["type"] == "tool_call"]
    return [assistant(parts, asked)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


FORMAT = Format(
    source="OpenTelemetry's conventions for generative AI (semantic-conventions-genai, model/gen-ai at 2b902ce)",
    suffix="",
    rows=rows,
    rewards=lambda record: record["evaluations"],
    columns=("problem_id", "finish_reason", "tools", *SAMPLING),
    required=frozenset({"attributes"}),
    optional=None,
    records=calls,
    loses="Spans have messages only if content capture was on (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT). "
    "The reward is the score of gen_ai.evaluation.result.",
)
