"""Read logs of Braintrust: spans, as its API returns them."""

from collections.abc import Iterator
from typing import Any

from topr_trl.importing.calls import Envelope, format_of_exports, not_a_call
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import first_listed, listed, rewards_in, value_at


def spans(record: Record) -> Iterator[Record]:
    """Yield each span in a response of the API, or a single span, without scores that are null.

    The wrapper of Anthropic's client logs the system prompt as the last message. If the answer has blocks of content,
    as in Anthropic's API, a last message with the role `system` is therefore moved to the start.

    Args:
        record (`Record`): Span, or a list of spans in the field `events` (of the API) or `data` (of a query).
    """
    for span in listed(record, "events", "data"):
        given: Any = parsed_json(span.get("input"))
        output = value_at(span, "output")
        is_claude = isinstance(value_at(output, "content"), list)
        if is_claude and isinstance(given, list) and given and value_at(given[-1], "role") == "system":
            given = [given[-1], *given[:-1]]
        # For OpenAI's Responses API, `output` has only the items. The rest of the response is in `metadata`.
        if value_at(span, "metadata.object") == "response":
            given, output = {"input": given}, {**parsed_json(span["metadata"]), "output": output}
        scores = {name: value for name, value in (value_at(span, "scores") or {}).items() if value is not None}
        yield {**span, "input": given, "output": output, "scores": scores}


def _left_out(record: Record) -> LeftOut | None:
    if value_at(record, "span_attributes.type") != "llm":
        return not_a_call(record["scores"], "root_span_id")
    return LeftOut.FAILED if record.get("error") else None


FORMAT = format_of_exports(
    # LangChain's handler and LiteLLM have the settings inside the metadata.
    Envelope(
        request=("input",),
        response=("output",),
        settings=("metadata.invocation_params", "metadata.model_parameters", "metadata"),
        dialects=DIALECTS,
        left_out=_left_out,
    ),
    read=("metadata", "output"),
    source="Braintrust (braintrust 0.48, logger.py and integrations; API reference, project logs)",
    test=lambda record: {"span_attributes", "root_span_id", "input"} <= set(first_listed(record, "events", "data")),
    rewards=rewards_in("scores"),
    required=frozenset({"input", "span_attributes"}),
    records=spans,
    loses="Only spans of the type llm become rows. Scores are often on other spans of their trace: write them to a "
    "file for --rewards, with --id_field root_span_id.",
)
