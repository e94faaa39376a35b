"""Convert model answers that people rated or ranked in an annotation tool to records of the format `table`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from topr_trl.importing.format import IGNORED, Format, Record
from topr_trl.importing.record_fields import rewards_in, values_by_name

RATINGS = "ratings"  # field of a record that holds ratings by name


def rated(fields: Record, ratings: Sequence[tuple[str, Any]]) -> Record:
    """Return a record of the format `table`, with ratings in the field `ratings`. See `values_by_name`.

    Args:
        fields (`Record`): Fields that annotators saw, such as `prompt` and `response`.
        ratings (`Sequence[tuple[str, Any]]`): Name and value of each rating. A list with one value becomes this value.
    """
    single = [(name, value[0] if isinstance(value, list) and len(value) == 1 else value) for name, value in ratings]
    return {**fields, RATINGS: values_by_name(single)}


def ranked(
    fields: Record, texts: dict[str, Any], rankings: Sequence[tuple[str, list[list[str]]]], ratings: Sequence[Any]
) -> Iterator[Record]:
    """Yield a record of the format `table` for each answer.

    The rank of an answer becomes a rating: 1 for the best rank, -1 for the worst, and equal steps between them. A
    ranking in which all answers have the same rank gives no rating.

    Args:
        fields (`Record`): Fields with the prompt.
        texts (`dict[str, Any]`): Answers by their names.
        rankings (`Sequence[tuple[str, list[list[str]]]]`): Name of each ranking, and the names of the answers at each
            rank, from the best to the worst.
        ratings (`Sequence[Any]`): Name and value of each rating to add to all yielded records.
    """
    for answer, text in texts.items():
        places = [
            (name, 1 - 2 * n / (len(ranks) - 1) if len(ranks) > 1 else None)
            for name, ranks in rankings
            for n, rank in enumerate(ranks)
            if answer in rank
        ]
        yield rated({**fields, "completion": text}, [*places, *ratings])


def format_of_ratings(table: Format, **fields: Any) -> Format:
    """Return the format of an annotation tool. The format reads records as `table` does, and rewards from `ratings`.

    Args:
        table (`Format`): Format `table`.
        **fields (`Any`): Other fields of the new format, such as `source` and `test`.
    """
    table_choices = table.choices
    assert table_choices is not None
    return replace(
        table,
        rank=1,
        rows=lambda record: table.rows(record),  # With `table.rows` itself, errors could not suggest this format.
        rewards=rewards_in(RATINGS),
        required=frozenset({RATINGS}),
        # The settings for columns are only for tables.
        choices=lambda record: table_choices(record)._replace(
            completion=IGNORED.completion, prompt=IGNORED.prompt, read=(RATINGS,)
        ),
        **fields,
    )
