"""Read events of PostHog: generations (`$ai_generation`)."""

from collections.abc import Iterator
from typing import Any

from topr_trl.importing.calls import Envelope, format_of_exports, not_a_call
from topr_trl.importing.dialects import DIALECTS, gemini, openai_responses
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.record_fields import value_at

_CALL = "$ai_generation"
_METRIC = ("properties.$ai_metric_name", "properties.$ai_metric_value")


def events(record: Record) -> Iterator[Record]:
    """Yield a generation whose messages have Anthropic's blocks in place of PostHog's. Yield other events unchanged.

    Items of OpenAI's Responses API become messages. The generation gets the fields `input`, `output`, `settings`
    and `tools` from its properties.

    Args:
        record (`Record`): Event. Some exports have the properties as JSON text, or one column per property.

    Raises:
        Unusable: see `gemini.functions` and `openai_responses.messages_of`.
    """
    if record.get("event") != _CALL:
        yield record
        return
    parts = (value_at(record, f"properties.$ai_{name}") for name in ("input", "output_choices", "model", "tools"))
    given, said, model, tools = parts
    settings = {"model": model, "temperature": value_at(record, "properties.$ai_temperature"),
                **(value_at(record, "properties.$ai_model_parameters") or {})}  # fmt: skip
    yield {**record, "input": _with_blocks(given), "output": _with_blocks(said), "settings": settings,
           "tools": [each for tool in tools or () for each in _functions(tool)]}  # fmt: skip


def _functions(tool: Any) -> list[Record]:
    return gemini.functions(tool) if {"function_declarations", "functionDeclarations"} & {*tool} else [tool]


def _with_blocks(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    if not all("role" in each for each in messages):
        return openai_responses.messages_of(messages)
    return [{**each, "content": [_block(part) for part in each["content"]]}
            if isinstance(value_at(each, "content"), list) else each for each in messages]  # fmt: skip


def _block(part: Any) -> Any:
    if value_at(part, "type") != "function":
        return part
    if "function" not in part:  # The part is the result of a function of Gemini.
        return {"type": "tool_result", "tool_use_id": part.get("tool_use_id"), "content": part.get("content")}
    called = part["function"]
    return {"type": "tool_use", "id": part.get("id"), "name": called["name"], "input": called.get("arguments")}


def _left_out(record: Record) -> LeftOut | None:
    if record["event"] != _CALL:
        name, value = (value_at(record, path) for path in _METRIC)
        return not_a_call({} if name is None else {name: value}, "'properties.$ai_trace_id'")
    if value_at(record, "properties.$ai_is_error") in (True, "true"):
        return LeftOut.FAILED
    if (record["settings"].get("n") or 1) != 1:
        raise Unusable("its request has n, and PostHog joins the choices to one")
    return None


FORMAT = format_of_exports(
    Envelope(request=("input",), response=("output",), settings=("settings",), dialects=DIALECTS, tools=("tools",),
             reasons=("properties.$ai_stop_reason",), left_out=_left_out),
    read=("properties",), source="PostHog (posthog 7, posthog/ai/utils.py)",
    test=lambda record: str(record.get("event")).startswith("$ai_"), required=frozenset({"event"}), records=events,
    loses="Feedback and metrics are events of their own: write them to a file for --rewards, with --id_field "
    "'properties.$ai_trace_id'.",
)  # fmt: skip
