"""Read records of Argilla, with responses of annotators as rewards."""

from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.importing.annotated_answers import format_of_ratings, ranked, rated
from topr_trl.importing.format import Record
from topr_trl.importing.formats import table

_END = ".responses"  # end of a column's name, in the flat layout


def records(record: Record) -> Iterator[Record]:
    """Yield a record of the format `table` with the responses as ratings.

    If answers were ranked, yield a record for each ranked answer. Yield a record of a different format unchanged.

    Args:
        record (`Record`): Record, as `to_list` or `to_json` of the package `argilla` writes it.
    """
    if not _is_record(record):
        yield record
        return
    flat = {name: value for name, value in record.items() if "." not in name}
    fields = {"id": record.get("id"), **record["fields"]} if "fields" in record else flat
    values = [
        (name, each.get("value") if isinstance(each, Mapping) else each)
        for name, given in _responses(record).items()
        for each in given or ()
    ]
    rankings = [(name, ranks) for name, value in values if (ranks := _ranks(value, fields))]
    others = [(name, value) for name, value in values if not _ranks(value, fields)]
    if not rankings:
        yield rated(fields, others)
        return
    texts = {name: fields[name] for _, ranks in rankings for rank in ranks for name in rank}
    yield from ranked({name: value for name, value in fields.items() if name not in texts}, texts, rankings, others)


def _responses(record: Record) -> dict[str, list[Any]]:
    """Return the responses to each question. In the flat layout, drafts and discarded responses are left out."""
    if isinstance(record.get("responses"), Mapping):
        return dict(record["responses"])
    found = {name: value for name, value in record.items() if name.endswith(_END)}
    return {
        name.removesuffix(_END): [
            value
            for value, status in zip(values, record.get(f"{name}.status") or [None] * len(values), strict=True)
            if status in (None, "submitted")
        ]
        for name, values in found.items()
        if values is not None
    }


def _ranks(value: Any, fields: Record) -> list[list[str]]:
    """Return the names of the fields at each rank of a ranking, from the best to the worst.

    Return [] for a response that is not a list of two or more names of `fields`. The names can have ranks.
    """
    if not isinstance(value, list) or len(value) < 2:
        return []
    if any(isinstance(each, Mapping) and not {"value", "rank"} <= each.keys() for each in value):
        return []
    places = [(each["value"], each["rank"]) if isinstance(each, Mapping) else (each, n)
              for n, each in enumerate(value)]  # fmt: skip
    if not all(name in fields for name, _ in places):
        return []
    return [[name for name, place in places if place == rank] for rank in sorted({place for _, place in places})]


def _is_record(record: Record) -> bool:
    is_nested = isinstance(record.get("fields"), Mapping) and isinstance(record.get("responses"), Mapping)
    return is_nested or any(name.endswith(f"{_END}.users") for name in record)


FORMAT = format_of_ratings(
    table.FORMAT,
    source="Argilla 2 (argilla/records/_io/_generic.py)",
    test=_is_record,
    records=records,
    loses="The reward is the response to a question: --reward_fields ratings.NAME. In a ranking, the best answer has "
    "the reward 1, and the worst -1. Suggestions are not read. Responses in the nested layout may be drafts.",
)
