"""Read Bedrock's logs of model invocations, whose calls are in the dialect of Converse or of the model."""

from topr_trl.importing.calls import COLUMNS_OF_CALLS, Envelope
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import IGNORED, Format, LeftOut, Record, Unusable
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

ENVELOPE = Envelope(
    request=("input.inputBodyJson",), response=("output.outputBodyJson",), dialects=DIALECTS,
    left_out=lambda record: LeftOut.FAILED if record.get("errorCode") else None,
)  # fmt: skip


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return the row of a call, or `[LeftOut.FAILED]` for a failed call. See `Envelope.rows` for an empty answer.

    Raises:
        NotOfFormat: see `Envelope.rows`.
        Unusable: the request or the response is in a separate file, or see `Envelope.rows`.
    """
    for place, name in (("input", "inputBodyS3Path"), ("output", "outputBodyS3Path")):
        if path := inner_value(record, place, name):
            raise Unusable(f"a part of its call is in {path}: write this file's JSON into {place}.{place}BodyJson")
    found = ENVELOPE.rows(record)
    return [{**row, "model": record.get("modelId") or row.get("model")} if isinstance(row, dict) else row
            for row in found]  # fmt: skip


FORMAT = Format(
    source="Bedrock's logs of model invocations (user guide of Bedrock, model invocation logging)",
    rank=1,
    test=lambda record: inner_value(record, "input", "inputBodyJson") is not None,
    rows=rows,
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"input"}),
    choices=lambda record: IGNORED._replace(read=("input", "output")),
    loses="Thinking can be hidden. Text is tokenized again, which can give different tokens. A request without a "
    "temperature used the default of the model, which is assumed to be 1.",
)
