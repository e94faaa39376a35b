"""Read exports of Portkey's logs."""

from topr_trl.importing.calls import Envelope, format_of_exports
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record


def _left_out(record: Record) -> LeftOut | None:
    is_right = str(record.get("is_success", True)).lower() in ("1", "true")
    return None if is_right and int(record.get("response_status_code") or 200) == 200 else LeftOut.FAILED


FORMAT = format_of_exports(
    Envelope(request=("request.body", "request"), response=("response.body", "response"), dialects=DIALECTS,
             left_out=_left_out),
    read=("response", "response.body", "ai_org"),
    source="Portkey (documentation, logs export)",
    rank=1,
    test=lambda record: "ai_model" in record and bool({"request", "request.body"} & set(record)),
    required=frozenset({"ai_model"}),
    loses="Feedback is not in the export: write it to a file for --rewards, with --id_field trace_id.",
)  # fmt: skip
