"""Read exports of Opik: traces with their spans, as `opik export` writes them, and single spans."""

from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.importing.calls import Envelope, format_of_exports, not_a_call
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record
from topr_trl.importing.record_fields import first_listed, listed, rewards_in, value_at, values_by_name


def spans(record: Record) -> Iterator[Record]:
    """Yield each span of a trace with its feedback scores. A model call also has the feedback scores of its trace.

    Scores of the span replace scores of the trace with the same name. Opik writes some fields of a response into the
    metadata, such as `stop_reason`, so an output that is an object also gets the fields of the metadata.

    Args:
        record (`Record`): Exported trace, or a span.
    """
    for span in listed(record, "spans"):
        of_trace = _scores(value_at(record, "trace.feedback_scores")) if span.get("type") == "llm" else {}
        scores = {**of_trace, **_scores(span.get("feedback_scores"))}
        output = value_at(span, "output")
        if isinstance(output, Mapping):
            output = {**(value_at(span, "metadata") or {}), **output}
        others = {name: value for name, value in span.items() if name != "feedback_scores"}
        yield {**others, "output": output, "scores": scores}


def _scores(given: Any) -> Record:
    return values_by_name((each["name"], each.get("value")) for each in given or ())


def _left_out(record: Record) -> LeftOut | None:
    if record.get("type") != "llm":
        return not_a_call(record["scores"], "trace_id")
    return LeftOut.FAILED if record.get("error_info") else None


def _is_export(record: Record) -> bool:
    first = first_listed(record, "spans")
    names = set(first)
    is_span = {"trace_id", "type", "input", "output"} <= names and bool({"start_time", "feedback_scores"} & names)
    return is_span and first["type"] in ("general", "llm", "tool", "guardrail")


FORMAT = format_of_exports(
    # LangChain's tracer and LiteLLM have the settings inside the metadata.
    Envelope(
        request=("input",),
        response=("output",),
        settings=("metadata.options", "metadata.invocation_params", "metadata.model_parameters", "metadata"),
        dialects=DIALECTS,
        left_out=_left_out,
    ),
    read=("metadata", "output"),
    source="Opik 2 (opik/rest_api/types/span_public.py; opik/cli/exports)",
    test=_is_export,
    rewards=rewards_in("scores"),
    required=frozenset({"type", "input", "output"}),
    records=spans,
    loses="Only spans of the type llm become rows. A score of a trace is the reward of all its model calls: to join "
    "them to one rollout, set --rollout_field trace_id.",
)
