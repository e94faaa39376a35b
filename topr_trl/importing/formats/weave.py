"""Read exports of Weave: calls as JSON, with their feedback."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.importing.calls import Envelope, format_of_exports, is_answer, not_a_call
from topr_trl.importing.dialects import DIALECTS
from topr_trl.importing.format import LeftOut, Record, has
from topr_trl.importing.record_fields import rewards_in, value_at, values_by_name

_VALUES = ("value", "emoji", "output", "score", "rating")  # fields of the payload of feedback that may be the rating
_CLASS = ("_type", "_class_name", "_bases")  # fields that Weave adds to a logged object
_OMITTED = re.compile(r"NOT_GIVEN|<\w[\w.]* object at 0x\w+>")  # an argument that the user left out


def calls(record: Record) -> Iterator[Record]:
    """Yield a call with its feedback by name, and without the class names that Weave adds to logged objects.

    The inputs lack `self`, and arguments that the user left out.

    Args:
        record (`Record`): Call.
    """
    given, output = (_plain(value_at(record, name)) for name in ("inputs", "output"))
    inputs = {name: value for name, value in (given or {}).items()
              if name != "self" and not _OMITTED.fullmatch(str(value))}  # fmt: skip
    feedback = value_at(record, "summary.weave.feedback", "feedback") or []
    is_call = value_at(record, "attributes.weave.kind") == "llm" or any(
        each.asks in inputs and is_answer(each, output) for each in DIALECTS
    )
    named = values_by_name(pair for each in feedback if (pair := _rating(each)) is not None)
    yield {**record, "inputs": inputs, "output": output, "is_call": is_call, "feedback": named}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _plain(inner) for name, inner in value.items() if name not in _CLASS}


def _rating(given: Record) -> tuple[str, Any] | None:
    """Return the name and the value of a feedback item. Return None for a note."""
    payload = given.get("payload") or {}
    if (name := str(given["feedback_type"])) == "wandb.note.1":
        return None
    value = next((payload[key] for key in _VALUES if key in payload), payload)
    return "reaction" if name == "wandb.reaction.1" else name.removeprefix("wandb."), value


def _left_out(record: Record) -> LeftOut | None:
    if not record["is_call"]:
        return not_a_call(record["feedback"], "trace_id")
    return LeftOut.FAILED if record.get("exception") else None


FORMAT = format_of_exports(
    Envelope(request=("inputs",), response=("output",), dialects=DIALECTS, left_out=_left_out),
    read=("output",),
    source="Weave (weave 0.54, trace/call.py and trace/feedback.py)",
    test=has("op_name", "inputs", "trace_id"),
    rewards=rewards_in("feedback"),
    required=frozenset({"op_name", "inputs"}),
    records=calls,
    loses="Only calls of models become rows: their inputs are a request, and their output is a response.",
)
