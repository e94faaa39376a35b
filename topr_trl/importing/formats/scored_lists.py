"""Read prompts with a list of completions and their scores, such as UltraFeedback. Each completion is a row."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from topr_trl.importing.field_names import words_of
from topr_trl.importing.format import IGNORED, Format, Record
from topr_trl.importing.formats import table

_LISTS = ("completions", "responses", "answers", "candidates", "outputs", "generations", "samples")
_SYSTEM = "custom_system_prompt"  # UltraFeedback's field with the system prompt of a completion
_TEXTS = ("text", "content")  # fields with a completion's text, in addition to the names in `COMPLETIONS`


def _records(record: Record) -> Iterator[Record]:
    """Yield a record of the format `table` for each completion of a list.

    Each record has the fields of a completion and the fields beside the list. A record without a list of completions is
    yielded unchanged.
    """
    if (name := _list_in(record)) is None:
        yield record
        return
    beside = {field: value for field, value in record.items() if field != name}
    for each in record[name]:
        text = None if _has_completion(each) else next(field for field in _TEXTS if field in each)
        names = {_SYSTEM: "system", text: "completion"}
        yield {**beside, **{names.get(field, field): value for field, value in each.items()}}


def _list_in(record: Record) -> str | None:
    """Return the field with a list of completions that are objects. Return None if there is no such list."""
    return next((name for name in _LISTS if _is_list(record.get(name))), None)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, Mapping)
        and not {"role", "from", "message", "type"} & set(each)
        and (_has_completion(each) or any(name in each for name in _TEXTS))
        for each in value
    )  # fmt: skip


def _has_completion(each: Mapping[str, Any]) -> bool:
    return table.has_columns({"prompt": "", **each})


def _is_scored_list(record: Record) -> bool:
    one = {name: value for name, value in record.items() if not isinstance(value, list)}
    return _list_in(record) is not None and "messages" not in record and not table.has_columns(one)


def _rewards(record: Record) -> dict[str, Any]:
    """Return the scores that `table.rewards` finds, or else the numeric fields such as `overall_score`."""
    return table.rewards(record) or {
        name: value
        for name, value in record.items()
        if words_of(name)[-1:] in (["score"], ["rating"], ["reward"]) and isinstance(value, int | float)
    }


FORMAT: Format = replace(
    table.FORMAT,
    source="lists of completions with their scores, such as UltraFeedback",
    rank=4,
    test=_is_scored_list,
    records=_records,
    rewards=_rewards,
    # The settings for columns are only for tables.
    choices=lambda record: table.choices(record)._replace(completion=IGNORED.completion, prompt=IGNORED.prompt),
)
