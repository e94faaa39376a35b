"""Read exports of Langfuse: observations as CSV, JSON or parquet, and single traces as JSON."""

from collections.abc import Iterator

from topr_trl.importing.calls import Envelope, format_of_exports, not_a_call
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import value_at, values_by_name
from topr_trl.importing.streamed_answers import whole_answer

_NOT_A_COMPLETION = ("SPAN", "EVENT", "TOOL", "CHAIN", "AGENT", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")


def observations(record: Record) -> Iterator[Record]:
    """Yield each observation of a trace with its scores. A generation also has the scores of its trace.

    Scores of the observation replace scores of the trace with the same name. A streamed output becomes the whole
    answer. An exported observation is otherwise unchanged.

    Args:
        record (`Record`): Downloaded trace, or exported observation.
    """
    if not isinstance(record.get("observations"), list):
        yield {**record, **{name: whole_answer(value) for name, value in record.items() if name == "output"}}
        return
    scores = record.get("scores") or value_at(record, "trace.scores") or []
    for each in record["observations"]:
        found: Record = {}
        for place in (None, each["id"]) if _is_generation(each) else (each["id"],):
            found |= values_by_name(
                (score["name"], value_at(score, "value", "stringValue", "string_value"))
                for score in scores
                if value_at(score, "observationId", "observation_id") == place
            )
        yield {**each, "output": whole_answer(each.get("output")), "scores": found}


def _is_generation(record: Record) -> bool:
    return str(record.get("type") or "GENERATION").upper() not in _NOT_A_COMPLETION


def _left_out(record: Record) -> LeftOut | None:
    if not _is_generation(record):
        scores = record.get("scores")  # of an observation in a downloaded trace
        return not_a_call(scores if isinstance(scores, dict) else {}, "traceId")
    return LeftOut.FAILED if record.get("level") == "ERROR" else None if parsed_json(record["input"]) else LeftOut.EMPTY


def _is_observation(record: Record) -> bool:
    names = {name.replace("_", "").lower() for name in record}
    of_observation = {"input", "output"} <= names and bool({"traceid", "observationid"} & names)
    return of_observation or isinstance(record.get("observations"), list)


FORMAT = format_of_exports(
    Envelope(request=("input",), response=("output",), settings=("modelParameters", "model_parameters"),
             reasons=("metadata.finish_reason",), dialects=DIALECTS, left_out=_left_out),
    read=(),
    source="Langfuse (worker/src/features/database-read-stream/observation-stream.ts at 03b77af)",
    rank=1,
    test=_is_observation,
    required=frozenset({"input", "output"}),
    records=observations,
    loses="Only generations become rows. Choose a score with --reward_fields: NAME for exported tables, where each "
    "score is a column, and scores.NAME for downloaded traces.",
)  # fmt: skip
