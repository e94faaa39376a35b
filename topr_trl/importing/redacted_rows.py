"""Blank out personal data in imported rows."""

import json

from topr_trl.importing.format import Unusable
from topr_trl.importing.row_table import JSON_COLUMNS, Row
from topr_trl.recording.redaction import Redactor

_TEXT = ("prompt", "completion", "answer")
_TOKENS = ("prompt_ids", "completion_ids", "completion_mask", "sampler_logps")


def redact_row(row: Row, redactor: Redactor) -> None:
    """Blank out the matches of a redactor in the text of a row, and set `redacted` if there is a match.

    A row with a match loses its token ids and log-probabilities, which would reveal the text. A redactor
    without patterns neither checks nor changes the row.

    Args:
        row (`Row`): Row, which this function changes.
        redactor (`Redactor`): Redactor.

    Raises:
        Unusable: the row has token ids without text, or it has a match, and only its `completion_mask` separates the
            model's text from context.
    """
    if not redactor:
        return
    if any(row.get(f"{name}_ids") and not row.get(name) for name in ("prompt", "completion")):
        raise Unusable("redact is set, and its token ids have no text in which to look for matches")
    for name in (*_TEXT, *JSON_COLUMNS):
        is_json = name in JSON_COLUMNS and row.get(name) is not None
        given = json.loads(row[name]) if is_json else row.get(name)
        if (value := redactor(given)) != given:
            row |= {name: json.dumps(value) if is_json else value, "redacted": True}
    if not row.get("redacted"):
        return
    if isinstance(row["completion"], str) and 0 in (row.get("completion_mask") or ()):
        raise Unusable("redact blanked out text of a row whose token ids mark context, so the row cannot be kept")
    row.update(dict.fromkeys(_TOKENS))
