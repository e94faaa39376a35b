"""Read spans of Datadog's LLM Observability: responses of its export API, and single spans."""

from collections.abc import Iterator
from typing import Any

from topr_trl.importing.calls import Envelope, format_of_exports, not_a_call
from topr_trl.importing.dialects import openai
from topr_trl.importing.format import LeftOut, Record
from topr_trl.importing.record_fields import first_listed, listed, rewards_in, value_at


def spans(record: Record) -> Iterator[Record]:
    """Yield the spans of a response, each with the fields of its `attributes` and its `meta` beside the others.

    Args:
        record (`Record`): Response of the export API, its element, or a span of the SDK.
    """
    for given in listed(record, "data"):
        span = given.get("attributes") or given
        inner = span.get("meta") or {}
        merged = {**span, **inner, "span_kind": value_at(span, *_KINDS)}
        evaluations = merged.pop("evaluation", None) or {}
        yield {name: value for name, value in merged.items() if name not in ("meta", "kind")} | {
            "scores": {name: value_at(each, "value") for name, each in evaluations.items()},
            "tools": [_tool(each) for each in merged.get("tool_definitions") or ()],
            "settings": {**(merged.get("metadata") or {}), "model": merged.get("model_name")},
        }


def _tool(given: Record) -> Record:
    return {("parameters" if name == "schema" else name): value for name, value in given.items()}


def _prompt(asked: Record) -> Record:
    return openai.prompt({**asked, "messages": [turn for each in asked["messages"] for turn in _turns(each)]})


def _answers(body: Record, asked: Record) -> list[Any]:
    turns = [_turns(choice["message"])[-1] for choice in body["choices"]]
    return openai.answers({"choices": [{"message": turn} for turn in turns]}, asked)


def _turns(given: Record) -> list[Record]:
    """Return a message with the ids of its calls under OpenAI's name, or a message for each result of a tool."""
    results = given.get("tool_results") or ()
    if results:
        return [
            {"role": "tool", "content": each.get("result"), "tool_call_id": each.get("tool_id")} for each in results
        ]
    calls = [{**each, "id": each.get("tool_id")} for each in given.get("tool_calls") or ()]
    return [{**given, "tool_calls": calls}]


def _left_out(record: Record) -> LeftOut | None:
    if record["span_kind"] != "llm":
        return not_a_call(record["scores"], "trace_id")
    return LeftOut.FAILED if record.get("status") == "error" else None


def _is_export(record: Record) -> bool:
    first = first_listed(record, "data")
    span = first.get("attributes") or first
    return isinstance(span, dict) and {"span_id", "trace_id"} <= set(span) and value_at(span, *_KINDS) is not None


_KINDS = ("span_kind", "meta.kind", "meta.span.kind")
FORMAT = format_of_exports(
    Envelope(
        request=("input.messages",),
        response=("output.messages",),
        tools=("tools",),
        settings=("settings",),
        dialects=(openai.DIALECT._replace(prompt=_prompt, answers=_answers),),
        left_out=_left_out,
    ),
    read=("input", "output", "metadata", "tool_definitions"),
    source="Datadog's LLM Observability (documentation, Export API)",
    rank=1,
    test=_is_export,
    rewards=rewards_in("scores"),
    required=frozenset({"span_kind", "scores"}),
    records=spans,
    loses="Only spans of the kind llm become rows. The finish reason and thinking are not in the export.",
)
