"""Read spans and logs of model calls, as OTLP JSON, printed by an SDK, or exported by Phoenix.

`SPELLINGS` has the attributes of OpenTelemetry's conventions for generative AI, of OpenInference, of versions of
OpenLLMetry that do not follow these conventions, of the Vercel AI SDK, and of Logfire.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import COLUMNS_OF_CALLS, Dialect, Envelope, not_a_call
from topr_trl.importing.dialects import genai_parts, openai, openai_completions, openai_responses, vercel
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json, split_parts
from topr_trl.importing.record_fields import inner_value, rewards_in, value_at, values_by_name
from topr_trl.importing.row_table import Row
from topr_trl.importing.span_attributes import attributes_of, missing_in, nested

_RESULT = "gen_ai.evaluation.result"
_OUTPUT = "attributes.gen_ai.output.messages"


def calls(record: Record) -> Iterator[Record]:
    """Yield the spans and log records of a document, each with its evaluations.

    Leave out evaluations, log records that repeat the messages of their span, and spans whose messages are only in a
    log record. A record that is neither an export nor a span is yielded unchanged.

    Args:
        record (`Record`): OTLP export, or a span as an SDK or Phoenix writes it.
    """
    if (listed := _listed(record)) is not None:
        for span in listed:
            yield from calls(span)
        return
    if not {"resourceSpans", "resourceLogs"} & set(record):
        yield _with_attributes(record, []) if _is_span(record) else record
        return
    spans = [span for group in record.get("resourceSpans") or () for scope in group.get("scopeSpans") or ()
             for span in scope.get("spans") or ()]  # fmt: skip
    logs = [log for group in record.get("resourceLogs") or () for scope in group.get("scopeLogs") or ()
            for log in scope.get("logRecords") or ()]  # fmt: skip
    evaluated = defaultdict[Any, list[Record]](list)  # evaluations in spans and log records, by span id
    for log in logs:
        if _is_result(log):
            evaluated[log.get("spanId")].append({**log, "name": _RESULT})
    for span in spans:
        evaluated[span.get("spanId")] += filter(_is_result, span.get("events") or ())
    logs = [log for log in logs if not _is_result(log)]
    spans, logs = ([_with_attributes(each, evaluated[each.get("spanId")]) for each in part] for part in (spans, logs))
    captured, logged = ({each.get("spanId") for each in part if value_at(each, _OUTPUT)} for part in (spans, logs))
    yield from (span for span in spans if span.get("spanId") not in logged - captured)
    yield from (log for log in logs if log.get("spanId") not in captured)


def _is_result(record: Record) -> bool:
    return (record.get("eventName") or record.get("name")) == _RESULT


def _listed(record: Record) -> list[Record] | None:
    """Return the spans in a trace of Phoenix or a response of its API. Return None for any other record."""
    for name in ("spans", "data"):
        listed = record.get(name)
        if isinstance(listed, list) and listed and inner_value(listed[0], "context", "span_id") is not None:
            return listed
    return None


def _with_attributes(record: Record, events: list[Record]) -> Record:
    """Return a span or a log record with nested attributes, settings, evaluations, and the names of missing attributes.

    `events` are evaluations in other records.
    """
    attributes = attributes_of(record)
    llm = attributes.get("llm") or {}
    for name in {"input_messages", "output_messages"} & set(llm):  # Phoenix's tables have dots in inner names.
        llm[name] = [nested(each) for each in llm[name]]
    bodies = {name: inner_value(attributes, name, "value") for name in ("input", "output")}  # JSON text
    is_call = value_at(attributes, "openinference.span.kind") == "LLM" and value_at(bodies, "input.input") is not None
    if is_call and value_at(bodies, "output.object") == "response":
        attributes["bodies"] = bodies  # The output messages do not show that their items are one answer.
    asked = inner_value(attributes, "gen_ai", "request") or {}
    model = {"model": asked.get("model") or llm.get("model_name")}
    settings = {**model, **{name: asked.get(name) for name in SAMPLING}}
    evaluations = _evaluations({**record, "events": [*(record.get("events") or ()), *events]})
    rest = {name: value for name, value in record.items() if not name.startswith("attributes.")}
    return {**rest, "attributes": attributes, "settings": settings, "evaluations": evaluations,
            "missing": missing_in(record)}  # fmt: skip


def _evaluations(record: Record) -> dict[str, Any]:
    """Return the scores in the evaluation events and in Phoenix's annotations of a span, by their names.

    If an event or an annotation has no score, its label counts as the score.
    """
    events = [attributes_of(event)["gen_ai"]["evaluation"] for event in record.get("events") or ()
              if event.get("name") == _RESULT]  # fmt: skip
    results = [(each["name"], each.get("result") or each) for each in record.get("annotations") or ()]
    return values_by_name([
        *((str(each.get("name", "score")), value_at(each, "score.value", "score.label")) for each in events),
        *((name, each.get("label") if each.get("score") is None else each["score"]) for name, each in results),
    ])  # fmt: skip


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return a row for each answer in a span.

    Return `[LeftOut.OTHER]` for a span that is not a model call, `[LeftOut.FAILED]` for a failed call, and [] for a
    call without an answer.

    Raises:
        NotOfFormat: the span follows OpenTelemetry's conventions before version 1.37, or see `Envelope.rows`.
        Unusable: the prompt or all messages were not captured, attributes were dropped, a span that is not a model call
            has evaluations, or see `Envelope.rows`.
    """
    status = value_at(record, "status.code", "status.status_code", "status_code")
    is_failed = str(status) in ("2", "ERROR", "STATUS_CODE_ERROR")
    for path in ("gen_ai.prompt", "gen_ai.completion"):
        if isinstance(value_at(record, f"attributes.{path}"), str):
            raise NotOfFormat(
                f"it has {path}, an attribute of the conventions before 1.37. Upgrade the instrumentation"
            )
    # An agent's span repeats the messages of its calls.
    operation = value_at(record, "attributes.gen_ai.operation.name")
    is_agent = operation in ("create_agent", "invoke_agent", "invoke_workflow")
    for name, each in ({} if is_agent else SPELLINGS).items():
        is_asked, is_answered = (value_at(record, *places) is not None for places in (each.request, each.response))
        if is_failed and (is_asked or is_answered):
            return [LeftOut.FAILED]
        if (is_asked or is_answered) and each.left_out(record) is None:
            _check_whole(record, (*each.request, *each.response, *each.tools))
        if is_answered:
            found = each.rows(record) if is_asked else each.left_out(record)
            if found is None:
                raise Unusable(f"it has an answer ({name}) and no {each.request[0]}: the prompt was not captured")
            return found if isinstance(found, list) else [found]
        if is_asked:
            return []
    # Logfire with `version=1`, Google's ADK, and events of Strands.
    unread = [name for name in ("events", _OF_ADK) if value_at(record, f"attributes.{name}") is not None]
    names = (str(event.get("name")) for event in record.get("events") or ())
    unread += [name for name in names if name.startswith("gen_ai.") and name != _RESULT]
    if _CHOICE in (record.get("eventName"), value_at(record, "attributes.event.name")):
        unread.append(_CHOICE)
    is_call = any(value_at(record, f"attributes.{path}") in values for path, values in _CALLS.items())
    if is_call or {_OF_ADK, _CHOICE} & {*unread}:
        if is_failed:
            return [LeftOut.FAILED]
        if unread:
            raise Unusable(
                f"its messages are in {unread[0]}, which is not read. Write them to gen_ai.input.messages and "
                "gen_ai.output.messages, or leave the span out"
            )
        raise Unusable(
            "it is a model call without messages: turn on the capture of content. If the messages are in a log record "
            "of another line, leave the span out"
        )
    return [not_a_call(record.get("evaluations") or {}, "traceId or context.trace_id")]


_OF_ADK = "gcp.vertex.agent.llm_request"
_CHOICE = "gen_ai.choice"  # log record of the conventions before 1.37


def _check_whole(record: Record, paths: tuple[str, ...]) -> None:
    """Check that the SDK dropped no attribute of a span, and that the lists at the given paths are complete.

    Raises:
        Unusable: an attribute was dropped, or a list at one of the paths lacks an item.
    """
    places = tuple(path.removeprefix("attributes.") for path in paths)
    lost = [name for name in record.get("missing") or () if name.startswith(places) or " " in name]
    response = value_at(record, "attributes.llm.invocation_parameters")
    # For OpenAI's Agents SDK, OpenInference reserves index 0 for instructions. Its settings hold the response's fields.
    starts_at_1 = bool(inner_value(response, "id")) and not inner_value(response, "instructions")
    if lost and not (starts_at_1 and lost == ["llm.input_messages.0"]):
        raise Unusable(
            f"it lacks {', '.join(lost)}. To record whole calls, raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT in the program "
            "that writes the spans"
        )


# Attributes that mark a model call, even if its content was not captured.
_CALLS = {
    "openinference.span.kind": ("LLM",), "llm.request.type": ("chat",),
    "gen_ai.operation.name": ("chat", "generate_content", "text_completion"),
}  # fmt: skip


def _of_openinference(given: Record) -> Record:
    """Convert a message of OpenInference, such as `{"message": {"role": ...}}`, to a message of OpenAI's API."""
    message = dict(given.get("message", given))
    calls = [nested(nested(each)["tool_call"]) for each in message.get("tool_calls") or ()]
    if message.get("contents"):
        text, thinking = split_parts([nested(part)["message_content"] for part in message["contents"]])
        message |= {"content": text, "reasoning_content": thinking or None}
    name = message.get("function_call_name")  # OpenInference's name for OpenAI's `function_call`.
    if name and message.get("role") == "assistant":
        message["function_call"] = {"name": name, "arguments": message.get("function_call_arguments_json")}
    return {**message, "tool_calls": calls}


def _of_openllmetry(given: Record) -> Record:
    """Parse the content of a message of OpenLLMetry, which writes a list of parts as JSON text.

    The model can write JSON, so an assistant message without calls is parsed only if it has thinking of Bedrock. A
    message whose content is not a list of parts is returned unchanged.
    """
    parts = parsed_json(given.get("content"))
    if not isinstance(parts, list) or not parts:
        return given
    has_thinking = any(inner_value(part, "reasoningContent") is not None for part in parts)
    may_be_json = given.get("role") == "assistant" and not given.get("tool_calls")
    are_parts = not may_be_json and all(inner_value(part, "type") is not None for part in parts)
    return {**given, "content": parts} if has_thinking or are_parts else given


def _like_openai(message: Callable[[Record], Record], tool: Callable[[Record], Record]) -> Dialect:
    """Return a variant of OpenAI's dialect. `message` and `tool` convert a message and a tool to OpenAI's format."""

    def prompt(asked: Record) -> Row:
        tools = [tool(each) for each in asked.get("tools") or ()]
        messages = [message(each) for each in asked["messages"]]
        # Settings of some calls have the system prompt, which can also be the first message.
        is_first = bool(messages) and messages[0].get("role") == "system"
        system = None if is_first else asked.get("instructions") or asked.get("system")
        return openai.prompt({**asked, "messages": messages, "tools": tools, "instructions": system})

    def answers(body: Record, asked: Record) -> list[Row | None]:
        choices = [{**choice, "message": message(choice["message"])} for choice in body["choices"]]
        found = openai.answers({"choices": choices}, asked)
        if others := {turn["role"] for row in found if row for turn in row["completion"]} - {"assistant"}:
            raise Unusable(f"its answer has the role {others.pop()}")
        return found

    return openai.DIALECT._replace(prompt=prompt, answers=answers)


def _tool_of_openinference(given: Record) -> Record:
    schema: Record = parsed_json(inner_value(nested(given), "tool", "json_schema"))
    return schema or given


def _tool_of_openllmetry(given: Record) -> Record:
    schemas = ("parameters", "input_schema")
    return {name: parsed_json(value) if name in schemas else value for name, value in given.items()}


def _is_inner(record: Record) -> LeftOut | None:
    """Return `LeftOut.OTHER` for a span of the Vercel AI SDK that wraps calls of the model, and None for a call."""
    operation = str(value_at(record, "attributes.ai.operationId"))
    return None if operation.endswith((".doGenerate", ".doStream")) else LeftOut.OTHER


SPELLINGS = {
    "OpenTelemetry": Envelope(
        request=("attributes.gen_ai.input.messages",), response=(_OUTPUT,),
        system=("attributes.gen_ai.system_instructions",), tools=("attributes.gen_ai.tool.definitions",),
        reasons=("attributes.gen_ai.response.finish_reasons",), settings=("settings",),
        dialects=(genai_parts.DIALECT,), has_several=True,
    ),
    "OpenAI's Responses API in OpenInference": Envelope(
        request=("attributes.bodies.input",), response=("attributes.bodies.output",),
        settings=("settings", "attributes.llm.invocation_parameters"), dialects=(openai_responses.DIALECT,),
    ),
    "OpenInference": Envelope(
        request=("attributes.llm.input_messages",), response=("attributes.llm.output_messages",),
        tools=("attributes.llm.tools",),
        # Older versions have the reason only in the response of OpenAI's or Anthropic's API, or of LangChain.
        reasons=("attributes.llm.finish_reason", "attributes.output.value.choices.0.finish_reason",
                 "attributes.output.value.stop_reason",
                 "attributes.output.value.generations.0.0.generation_info.finish_reason"),
        settings=("settings", "attributes.llm.invocation_parameters"),
        dialects=(_like_openai(_of_openinference, _tool_of_openinference),),
    ),
    "OpenLLMetry": Envelope(
        request=("attributes.gen_ai.prompt",), response=("attributes.gen_ai.completion",),
        tools=("attributes.llm.request.functions",), settings=("settings",),
        dialects=(_like_openai(_of_openllmetry, _tool_of_openllmetry),),
    ),
    "Vercel AI SDK": Envelope(
        request=("attributes.ai.prompt.messages",), response=("attributes.ai.response",),
        tools=("attributes.ai.prompt.tools",), settings=("settings",), dialects=(vercel.DIALECT,), left_out=_is_inner,
    ),
    # Logfire 4 and `version=1` of later releases. By default, Logfire 5 follows OpenTelemetry's conventions.
    "Logfire": Envelope(
        request=("attributes.request_data",),
        response=("attributes.response_data.message", "attributes.response_data.text"),
        reasons=("attributes.gen_ai.response.finish_reasons",),
        dialects=(_like_openai(dict, dict), openai_completions.DIALECT),
    ),
}  # fmt: skip


def _is_span(record: Record) -> bool:
    return "attributes" in record or any(str(name).startswith("attributes.") for name in record)


def _is_telemetry(record: Record) -> bool:
    if {"resourceSpans", "resourceLogs"} & set(record):
        return True
    if (listed := _listed(record)) is not None:
        return _is_telemetry(listed[0])
    attributes = parsed_json(record.get("attributes"))
    if isinstance(attributes, list):
        names = [each.get("key") for each in attributes if isinstance(each, Mapping)]
    else:
        given = attributes if isinstance(attributes, Mapping) else ()
        names = [*given, *(name.removeprefix("attributes.") for name in record if "attributes." in name)]
    return any(str(name).startswith(_PREFIXES) for name in names)


_PREFIXES = ("gen_ai.", "llm.", "openinference", "traceloop.", "ai.operationId", "ai.prompt", "ai.response")
FORMAT = Format(
    source="OpenTelemetry's conventions for generative AI (semantic-conventions-genai, model/gen-ai at 2b902ce); "
    "OpenInference (semantic-conventions 0.1.42); OpenLLMetry 0.46; Vercel AI SDK 5; "
    "Logfire 5",
    test=_is_telemetry,
    rows=rows,
    rewards=rewards_in("evaluations"),
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"attributes"}),
    records=calls,
    loses="Spans have messages only if content capture was on (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT). "
    "The reward is the score of gen_ai.evaluation.result, or of an annotation of the span in Phoenix. The Vercel AI "
    "SDK, and OpenInference for some models, leave out the thinking.",
)
