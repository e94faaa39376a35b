"""Read exports of Langfuse: observations as CSV, JSON or parquet, and single traces as JSON."""

from collections.abc import Iterator
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import IGNORED, Format, LeftOut, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import message, text_or_messages, tools_as_json
from topr_trl.importing.prompt_tables import check_roles
from topr_trl.importing.row_table import Row

_NOT_A_COMPLETION = ("SPAN", "EVENT", "TOOL", "CHAIN", "AGENT", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")


def observations(record: Record) -> Iterator[Record]:
    """Yield each observation of a trace, with the scores of the observation and of the trace.

    Yield an exported observation unchanged.

    Args:
        record (`Record`): Downloaded trace, or exported observation.
    """
    if not isinstance(record.get("observations"), list):
        yield record
        return
    trace = record.get("trace") or record
    scores = record.get("scores") or trace.get("scores") or []
    for each in record["observations"]:
        own = [score for score in scores if _get(score, "observationId", "observation_id") in (None, each["id"])]
        yield {**each, "scores": {score["name"]: score.get("value") for score in own}}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of messages or text. Return [] for an empty input or output.

    Return `[LeftOut.OTHER]` for an observation that is not a generation, and `[LeftOut.FAILED]` for a failed one.

    Raises:
        Unusable: the input has no messages or prompt, a message has an unknown role, or the output is not one answer.
    """
    if str(record.get("type") or "GENERATION").upper() in _NOT_A_COMPLETION:
        return [LeftOut.OTHER]
    if record.get("level") == "ERROR":
        return [LeftOut.FAILED]
    given, output = parsed_json(record["input"]), parsed_json(record["output"])
    if not given or not output:
        return []
    asked = given if isinstance(given, dict) else {"messages": given}
    settings = parsed_json(_get(record, "modelParameters", "model_parameters")) or {}
    prompt = asked.get("messages", asked.get("prompt"))
    if not isinstance(prompt, str | list):
        raise Unusable(f"its input has no messages; it has {', '.join(asked)}")
    completion = _completion(output, isinstance(prompt, list))
    check_roles(prompt)
    return [
        {
            "prompt": text_or_messages(prompt), "completion": completion,
            "tools": tools_as_json(asked.get("tools") or settings.get("tools")),
            **{name: _number(settings.get(name)) for name in SAMPLING},
        }
    ]  # fmt: skip


def _completion(output: Any, is_chat: bool) -> Any:
    """Return the completion: text if both the prompt and the output are text, otherwise a list of one message."""
    if isinstance(output, dict) and "choices" in output:
        if len(output["choices"]) > 1:
            raise Unusable(f"it has {len(output['choices'])} choices in one observation")
        output = output["choices"][0]["message"]
    if isinstance(output, dict) and isinstance(output.get("message"), dict):
        output = output["message"]
    if isinstance(output, list) and len(output) == 1 and isinstance(output[0], dict):
        output = output[0].get("message", output[0])
    if isinstance(output, str):
        return text_or_messages([{"role": "assistant", "content": output}]) if is_chat else output
    if not isinstance(output, dict) or not {"content", "tool_calls"} & set(output):
        raise Unusable(f"its output is {str(output)[:60]}, and must be text or one assistant message")
    return [message({"role": "assistant", **output})]


def _get(record: Record, *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _number(value: Any) -> Any:
    """Convert text to a number, because some exports write numbers as text. Return None for other text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return None


FORMAT = Format(
    source="Langfuse (worker/src/features/database-read-stream/observation-stream.ts at 03b77af)",
    suffix="",
    rows=rows,
    rewards=None,
    columns=("problem_id", "tools", *SAMPLING),
    required=frozenset({"input", "output"}),
    optional=None,
    choices=lambda record: IGNORED,
    records=observations,
    loses="Only generations become rows. Choose a score with --reward_fields: NAME for exported tables, where each "
    "score is a column, and scores.NAME for downloaded traces.",
)
