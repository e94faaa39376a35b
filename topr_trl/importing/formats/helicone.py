"""Read exports of Helicone: requests with their bodies."""

from collections.abc import Iterator

from topr_trl.importing.calls import COLUMNS_OF_CALLS, Envelope
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import IGNORED, Format, LeftOut, Record, Unusable
from topr_trl.importing.record_fields import value_at


def requests(record: Record) -> Iterator[Record]:
    """Yield each request of a page of the API, or the request itself.

    Args:
        record (`Record`): Request, or a page with `data`.
    """
    yield from record["data"] if isinstance(record.get("data"), list) else [record]


def rewards(record: Record) -> dict[str, object]:
    """Return the thumb and the scores of a request, without empty ones."""
    found = {"feedback_rating": record.get("feedback_rating")}
    found |= {f"scores.{name}": value for name, value in (value_at(record, "scores") or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def _left_out(record: Record) -> LeftOut | None:
    if not 200 <= int(record.get("response_status") or 200) < 300:
        return LeftOut.FAILED
    if not value_at(record, "response_body") and record.get("signed_body_url"):
        raise Unusable("its bodies are not in the file: export them with --include-body")
    return None


def _is_request(record: Record) -> bool:
    first = next(iter(record["data"]), {}) if isinstance(record.get("data"), list) else record
    return isinstance(first, dict) and {"request_body", "response_body", "response_status"} <= set(first)


ENVELOPE = Envelope(request=("request_body",), response=("response_body",), dialects=DIALECTS, left_out=_left_out)
FORMAT = Format(
    source="Helicone (API reference, HeliconeRequest)",
    rank=1,
    test=_is_request,
    rows=ENVELOPE.rows,
    rewards=rewards,
    columns=COLUMNS_OF_CALLS,
    required=frozenset({"request_body", "response_body"}),
    records=requests,
    choices=lambda record: IGNORED._replace(read=("response_body",)),
    loses="Scores of sessions are not in the export.",
)
