"""Read Bedrock's logs of model invocations, whose calls are in the dialect of Converse or of the model."""

from topr_trl.importing.calls import Envelope, format_of_exports
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.record_fields import inner_value


def _left_out(record: Record) -> LeftOut | None:
    for place, name in (("input", "inputBodyS3Path"), ("output", "outputBodyS3Path")):
        if path := inner_value(record, place, name):
            raise Unusable(f"a part of its call is in {path}: write this file's JSON into {place}.{place}BodyJson")
    body = inner_value(record, "output", "outputBodyJson")
    actions = [
        inner_value(each, "amazon-bedrock-guardrailAction") for each in (body if isinstance(body, list) else [body])
    ]
    return LeftOut.FAILED if record.get("errorCode") or "INTERVENED" in actions else None


FORMAT = format_of_exports(
    Envelope(request=("input.inputBodyJson",), response=("output.outputBodyJson",), settings=("settings",),
             dialects=DIALECTS, left_out=_left_out),
    read=("input", "output"),
    source="Bedrock's logs of model invocations (user guide of Bedrock, model invocation logging)",
    rank=1,
    test=lambda record: inner_value(record, "input", "inputBodyJson") is not None,
    required=frozenset({"input"}),
    records=lambda record: [{**record, "settings": {"model": record.get("modelId")}}],
    loses="Thinking can be hidden. Text is tokenized again, which can give different tokens. A request without a "
    "temperature used the default of the model, which is assumed to be 1.",
)  # fmt: skip
