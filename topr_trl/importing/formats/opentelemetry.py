"""Read spans and logs that follow OpenTelemetry's conventions for generative AI, as OTLP JSON or printed by an SDK."""

from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import COLUMNS_OF_CALLS, Envelope
from topr_trl.importing.dialects import genai_parts
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, Unusable

_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_RESULT, _SCORE, _NAME = "gen_ai.evaluation.result", "gen_ai.evaluation.score.value", "gen_ai.evaluation.name"
# Attributes with messages in older conventions, which cannot be read.
_OLD = ("gen_ai.prompt", "gen_ai.completion", "gen_ai.prompt.0.content", "llm.prompts")


def calls(record: Record) -> Iterator[Record]:
    """Yield the spans and log records of a document, each with its evaluations.

    Args:
        record (`Record`): OTLP export, or a span as an SDK prints it.
    """
    if not {"resourceSpans", "resourceLogs"} & set(record):
        is_span = "attributes" in record
        yield _with_plain_attributes(record, _evaluations(record.get("events") or ())) if is_span else record
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
        yield _with_plain_attributes(each, own)


def _with_plain_attributes(record: Record, evaluations: Record) -> Record:
    attributes = _plain(record.get("attributes"))
    settings = {name: attributes.get(f"gen_ai.request.{name}") for name in SAMPLING}
    return {**record, "attributes": attributes, "settings": settings, "evaluations": evaluations}


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


def _left_out(record: Record) -> LeftOut | None:
    """Return `LeftOut.OTHER` for a record without output messages.

    Raises:
        NotOfFormat: the record follows older conventions.
        Unusable: the prompt was not captured.
    """
    attributes = record["attributes"]
    if _OUTPUT not in attributes:
        if found := [name for name in _OLD if name in attributes]:
            raise NotOfFormat(
                f"it has {found[0]}, an attribute of the conventions before 1.37. Upgrade the instrumentation"
            )
        return LeftOut.OTHER
    if _INPUT not in attributes:
        raise Unusable(f"it has {_OUTPUT} and no {_INPUT}: the prompt was not captured")
    return None


def _is_telemetry(record: Record) -> bool:
    attributes = record.get("attributes")
    keys = (
        [each.get("key") for each in attributes if isinstance(each, Mapping)]
        if isinstance(attributes, list)
        else attributes
    )
    is_export = bool({"resourceSpans", "resourceLogs"} & set(record))
    return is_export or any(str(key).startswith("gen_ai.") for key in keys or ())


ENVELOPE = Envelope(
    request=(f"attributes.{_INPUT}",),
    response=(f"attributes.{_OUTPUT}",),
    system=("attributes.gen_ai.system_instructions",),
    tools=("attributes.gen_ai.tool.definitions",),
    reasons=("attributes.gen_ai.response.finish_reasons",),
    settings=("settings",),
    dialects=(genai_parts.DIALECT,),
    has_several=True,
    left_out=_left_out,
)
FORMAT = Format(
    source="OpenTelemetry's conventions for generative AI (semantic-conventions-genai, model/gen-ai at 2b902ce)",
    test=_is_telemetry,
    rows=ENVELOPE.rows,
    rewards=lambda record: record["evaluations"],
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"attributes"}),
    records=calls,
    loses="Spans have messages only if content capture was on (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT). "
    "The reward is the score of gen_ai.evaluation.result.",
)
