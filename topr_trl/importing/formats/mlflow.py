"""Read model calls in traces of MLflow, with assessments as rewards."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from topr_trl.importing.calls import (
    COLUMNS_OF_CALLS,
    Envelope,
    choices_of_request,
    first_choice,
    not_a_call,
    sampling_of,
)
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import Format, LeftOut, Record
from topr_trl.importing.rated_turns import as_rated
from topr_trl.importing.record_fields import rewards_in, value_at, values_by_name
from topr_trl.importing.row_table import Row

_CALLS = ("LLM", "CHAT_MODEL")
_SPANS = ("data.spans", "trace.data.spans", "spans")


def calls(record: Record) -> Iterator[Record]:
    """Yield each span of a trace, with the feedback on the span. A model call also has the feedback on the trace.

    Expectations, and feedback that later feedback replaced, do not count.

    Args:
        record (`Record`): Trace, or a row of a table of traces.
    """
    assessments = value_at(record, "info.assessments", "trace.info.assessments", "assessments") or []
    spans = [{**span, "attributes": _with_reason(span, _parsed(span["attributes"]))}
             for span in value_at(record, *_SPANS)]  # fmt: skip
    rates_spans = all(each.get("span_id") for each in assessments if each.get("feedback"))
    outer = {span.get("parent_span_id") for span in spans if _is_call(span)}
    for span in spans:
        # If two libraries recorded the same call, only the inner span is read.
        is_call, given = _is_call(span) and span["span_id"] not in outer, span["attributes"]
        # Feedback on the span replaces feedback with the same name on the trace.
        of_trace = _ratings(assessments, None) if is_call else {}
        found = {**of_trace, **_ratings(assessments, span["span_id"])}
        yield {
            **span, "is_call": is_call,
            "settings": {"model": value_at(given, "mlflow.llm.model", "model"), **sampling_of(given)},
            "trace_id": value_at(record, "info.trace_id", "info.request_id", "trace.info.trace_id", "trace_id"),
            "is_rated": rates_spans and bool(found), "assessments": found,
        }  # fmt: skip


def _ratings(assessments: Iterable[Record], span: str | None) -> Record:
    own = (each for each in assessments if each.get("span_id") == span and each.get("valid") is not False)
    return values_by_name(
        (each["assessment_name"], each["feedback"].get("value")) for each in own if each.get("feedback")
    )


def _parsed(attributes: Record) -> Record:
    """Return the attributes of a span, parsed from JSON text. A value that is not JSON text is unchanged."""
    found = dict(attributes)
    for name, value in attributes.items():
        with suppress(TypeError, ValueError, RecursionError):
            found[name] = json.loads(value)
    return found


def _with_reason(span: Record, attributes: Record) -> Record:
    """Return attributes whose answer has the finish reason of the stream. MLflow writes `stop` if the end is empty."""
    chunks = (value_at(event, "attributes.mlflow.chunk.value") for event in span.get("events") or ())
    reasons = [reason for chunk in chunks if (reason := first_choice(chunk, "finish_reason"))]
    answer: Any = attributes.get("mlflow.spanOutputs")
    if not reasons or first_choice(answer, "message") is None:
        return attributes
    choice = {**answer["choices"][0], "finish_reason": reasons[-1]}
    return {**attributes, "mlflow.spanOutputs": {**answer, "choices": [choice]}}


def _is_call(span: Record) -> bool:
    return span["attributes"].get("mlflow.spanType") in _CALLS


def _left_out(record: Record) -> LeftOut | None:
    if not record["is_call"]:
        return not_a_call(record["assessments"], "trace_id")
    is_failed = value_at(record, "status.code", "status_code") in ("STATUS_CODE_ERROR", "ERROR")
    return LeftOut.FAILED if is_failed else None


ENVELOPE = Envelope(
    request=("attributes.mlflow.spanInputs",), response=("attributes.mlflow.spanOutputs",),
    settings=("settings", "attributes.model_dict", "attributes.invocation_params"),
    tools=("attributes.mlflow.chat.tools",), dialects=DIALECTS, left_out=_left_out,
)  # fmt: skip


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return the row of a span. If a span has feedback and the trace itself has none, the row is marked as rated.

    Return `[LeftOut.FAILED]` for a failed call, and `[LeftOut.OTHER]` for a span that is not a model call. See
    `Envelope.rows` for an empty answer.

    Raises:
        NotOfFormat: see `Envelope.rows`.
        Unusable: a span that is not a model call has feedback, or see `Envelope.rows`.
    """
    found = ENVELOPE.rows(record)
    return as_rated(found) if record["is_rated"] else found


def _is_trace(record: Record) -> bool:
    spans = value_at(record, *_SPANS)
    given = spans[0].get("attributes") if isinstance(spans, list) and spans and isinstance(spans[0], Mapping) else None
    return isinstance(given, Mapping) and any(str(name).startswith("mlflow.") for name in given)


FORMAT = Format(
    source="MLflow 3 (mlflow/entities/trace.py, Trace.to_json; mlflow/entities/assessment.py)",
    test=_is_trace,
    rows=rows,
    rates_turns=True,
    rewards=rewards_in("assessments"),
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"attributes"}),
    choices=lambda record: choices_of_request(record, "attributes", "mlflow.spanInputs"),
    records=calls,
    loses="Only spans of the types CHAT_MODEL and LLM become rows. An assessment of a trace is the reward of all its "
    "model calls. To join these calls to one rollout, set --rollout_field trace_id.",
)
