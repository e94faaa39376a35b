"""Read exports of Langfuse: observations as CSV, JSON or parquet, and single traces as JSON."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from topr_trl.importing.calls import COLUMNS_OF_CALLS, Envelope, not_a_call
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import IGNORED, Choices, Format, LeftOut, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import first_listed, inner_value, listed, value_at, values_by_name
from topr_trl.importing.streamed_answers import whole_answer

_NOT_A_COMPLETION = ("SPAN", "EVENT", "TOOL", "CHAIN", "AGENT", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")


def observations(record: Record) -> Iterator[Record]:
    """Yield each observation of a trace with its scores. A generation also has the scores of its trace.

    Scores of the observation replace scores of the trace with the same name. A streamed output becomes the whole
    answer, and tools among the messages become a field of the input. The field `settings` has the model. An exported
    observation is otherwise unchanged.

    Args:
        record (`Record`): Downloaded trace, exported observation, or page of the observations API.
    """
    if not isinstance(record.get("observations"), list):
        yield from map(_whole, listed(record, "data"))
        return
    scores = record.get("scores") or value_at(record, "trace.scores") or []
    for each in record["observations"]:
        of_trace = _scores_of(scores, None) if _is_generation(each) else {}
        yield {**_whole({"output": None, **each}), "scores": {**of_trace, **_scores_of(scores, each["id"])}}


def _scores_of(scores: list[Record], observation: str | None) -> Record:
    """Return the scores of an observation by name, or of the trace if `observation` is None."""
    own = (score for score in scores if value_at(score, "observationId", "observation_id") == observation)
    return values_by_name((score["name"], _value_of(score)) for score in own)


def _value_of(score: Record) -> Any:
    """Return the value of a score. For a category, it is the text, unless a configuration gives the category a number.

    Langfuse's API gives all other categories the number 0.
    """
    names = ["value", "stringValue", "string_value"]
    is_text = value_at(score, "dataType", "data_type") == "CATEGORICAL" and not value_at(score, "configId", "config_id")
    return value_at(score, *(reversed(names) if is_text else names))


def _whole(record: Record) -> Record:
    """Return an observation with its tools beside the messages, the whole streamed answer, and the model."""
    changes = {"input": _with_tools, "output": whole_answer}
    found = {name: changes[name](value) if name in changes else value for name, value in record.items()}
    return {**found, "settings": {"model": value_at(record, "model", "providedModelName", "provided_model_name")}}


def _with_tools(given: Any) -> Any:
    """Return an input with its tools beside the messages. LangChain's handler adds tools as messages at the end."""
    messages = parsed_json(given)
    if not isinstance(messages, list):
        return given
    tools = list(takewhile(_is_tool, reversed(messages)))[::-1]
    rest = messages[: len(messages) - len(tools)]
    return {"messages": rest, "tools": [each["content"] for each in tools]} if tools else given


def _is_tool(given: Any) -> bool:
    content = inner_value(given, "content")
    is_definition = isinstance(content, Mapping) and bool({"function", "input_schema", "parameters"} & set(content))
    return is_definition and inner_value(given, "role") == "tool"


def _is_generation(record: Record) -> bool:
    return str(record.get("type") or "GENERATION").upper() not in _NOT_A_COMPLETION


def _left_out(record: Record) -> LeftOut | None:
    if not _is_generation(record):
        scores = record.get("scores")  # of an observation in a downloaded trace
        return not_a_call(scores if isinstance(scores, dict) else {}, "traceId")
    if record.get("level") == "ERROR":
        return LeftOut.FAILED
    count, output = value_at(record, "modelParameters.n", "model_parameters.n"), parsed_json(record["output"])
    if str(count) not in ("None", "1") and isinstance(output, str) and output:
        raise Unusable(f"its modelParameters.n is {count}, and Langfuse joins the choices of a stream to one text")
    return None if parsed_json(record["input"]) else LeftOut.EMPTY


def _is_observation(record: Record) -> bool:
    names = {name.replace("_", "").lower() for name in first_listed(record, "data")}
    of_observation = {"input", "output"} <= names and bool({"traceid", "observationid"} & names)
    return of_observation or isinstance(record.get("observations"), list)


def _choices(record: Record) -> Choices:
    """Return the rules for unread text. Attributes of spans repeat the messages, except for system prompts and tools.

    Their names can have words such as `ai`, which name the text of a model elsewhere.
    """
    given = value_at(record, "metadata.attributes")
    names = [name for name in given if not name.endswith(_ASKED)] if isinstance(given, Mapping) else []
    return IGNORED._replace(read=("modelParameters", "model_parameters", "metadata.resourceAttributes",
                                  *(f"metadata.attributes.{name}" for name in names)))  # fmt: skip


_ASKED = ("instructions", "definitions", "tools", "prompt")
ENVELOPE = Envelope(
    request=("input",), response=("output",), settings=("settings", "modelParameters", "model_parameters"),
    dialects=DIALECTS, left_out=_left_out,
    reasons=("metadata.finish_reason", "modelParameters.finishReason", "model_parameters.finishReason",
             "metadata.attributes.gen_ai.response.finish_reasons", "metadata.attributes.ai.response.finishReason"),
)  # fmt: skip
FORMAT = Format(
    source="Langfuse (worker/src/features/database-read-stream/observation-stream.ts at 03b77af)",
    rank=1,
    test=_is_observation,
    rows=ENVELOPE.rows,
    columns=COLUMNS_OF_CALLS,
    choices=_choices,
    required=frozenset({"input", "output"}),
    records=observations,
    loses="Only generations become rows. Choose a score with --reward_fields: NAME for exported tables, where each "
    "score is a column, and scores.NAME for downloaded traces.",
)
