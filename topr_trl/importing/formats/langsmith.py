"""Read exports of LangSmith: runs of the type llm, as JSON, JSON lines or parquet."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topr_trl.importing.calls import COLUMNS_OF_CALLS, Envelope, choices_of_request, is_answer, not_a_call
from topr_trl.importing.dialects import gemini, langchain, openai_responses
from topr_trl.importing.format import Format, LeftOut, Record, has
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.rated_turns import as_rated
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row


def _left_out(record: Record) -> LeftOut | None:
    if record["run_type"] != "llm":
        return not_a_call({name: mean for name, mean in rewards(record).items() if mean is not None}, "trace_id")
    return LeftOut.FAILED if record.get("error") else None if parsed_json(record["inputs"]) else LeftOut.EMPTY


def rewards(record: Record) -> dict[str, Any]:
    """Return the mean feedback for each feedback key. The mean is None if the feedback of a key has no numbers."""
    stats = parsed_json(record.get("feedback_stats")) or {}
    return {f"feedback_stats.{key}.avg": each.get("avg") for key, each in stats.items() if isinstance(each, dict)}


def _trace_of(place: str, record: Record) -> Any:
    """Return the trace id of a model call that has feedback. Return None for all other runs, which are not joined."""
    is_rated = record.get("run_type") == "llm" and any(each is not None for each in rewards(record).values())
    return record.get("trace_id") if is_rated else None


ENVELOPE = Envelope(
    request=("inputs",), response=("outputs.message", "outputs.output", "outputs.messages", "outputs"),
    settings=("extra.options", "extra.invocation_params", "inputs.model_parameters"),
    dialects=(langchain.DIALECT,), left_out=_left_out,
)  # fmt: skip
# Calls of the Responses API. Their answer is the whole response: `outputs.output` lacks its status.
_RESPONSES = replace(ENVELOPE, response=("outputs",), dialects=(openai_responses.DIALECT,))


def _with_config(record: Record) -> Record:
    """Return a run with the system prompt, the tools and the settings that `wrap_gemini` logs in `config`."""
    inputs: Any = parsed_json(record.get("inputs"))
    config = parsed_json(inner_value(inputs, "config"))
    if not (isinstance(config, Mapping) and isinstance(inputs.get("messages"), list)):
        return record
    found = gemini.prompt({"contents": [], **config})
    messages = [*found.pop("prompt"), *inputs["messages"]]
    return {**record, "inputs": {**found, **inputs, "messages": messages}}


def _rows(record: Record) -> list[Row | LeftOut | None]:
    record = _with_config(record) if record["run_type"] == "llm" else record
    is_response = is_answer(openai_responses.DIALECT, parsed_json(record.get("outputs")))
    return as_rated((_RESPONSES if is_response else ENVELOPE).rows(record))


FORMAT = Format(
    source="LangSmith's run data format (langsmith 0.15, schemas.py; langchain-core 1.8, tracers/core.py)",
    test=has("run_type", "inputs"),
    rows=_rows,
    records=lambda record: record.get(LINES, [record]),
    join=joined_by("trace", _trace_of),
    rates_turns=True,
    rewards=rewards,
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"run_type", "inputs"}),
    choices=lambda record: choices_of_request(record, "inputs"),
    loses="Only runs of the type llm become rows. The reward is the mean feedback on a run. Feedback on a whole trace "
    "is in its root run: write this feedback to a file for --rewards, and set --id_field trace_id.",
)
