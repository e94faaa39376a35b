"""Read exports of Helicone: logged requests with the bodies of the requests and responses."""

from topr_trl.importing.calls import Envelope, format_of_exports
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.record_fields import first_listed, listed, value_at


def rewards(record: Record) -> dict[str, object]:
    """Return the thumb and the scores of a request by name. Missing values are left out."""
    found = {"feedback_rating": record.get("feedback_rating")}
    found |= {f"scores.{name}": value for name, value in (value_at(record, "scores") or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def _left_out(record: Record) -> LeftOut | None:
    if not 200 <= int(record.get("response_status") or 200) < 300:
        return LeftOut.FAILED
    if not value_at(record, "response_body") and record.get("signed_body_url"):
        raise Unusable("its bodies are not in the file: export them with --include-body")
    return None


FORMAT = format_of_exports(
    Envelope(request=("request_body",), response=("response_body",), dialects=DIALECTS, left_out=_left_out),
    read=("response_body",),
    source="Helicone (API reference, HeliconeRequest)",
    rank=1,
    test=lambda record: {"request_body", "response_body", "response_status"} <= set(first_listed(record, "data")),
    rewards=rewards,
    required=frozenset({"request_body", "response_body"}),
    records=lambda record: listed(record, "data"),
    loses="Scores of sessions are not in the export.",
)
