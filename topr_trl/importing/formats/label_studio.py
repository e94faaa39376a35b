"""Read exports of Label Studio as JSON, with annotations as rewards."""

from collections.abc import Iterator, Mapping
from typing import Any

from topr_trl.importing.annotated_answers import format_of_ratings, ranked, rated
from topr_trl.importing.format import NotOfFormat, Record
from topr_trl.importing.formats import table

_SIDES = ("left", "right")


def records(record: Record) -> Iterator[Record]:
    """Yield a record of the format `table` with the annotations as ratings.

    If answers were compared or ranked, yield a record for each of these answers. Skipped annotations, and texts that
    annotators wrote, do not count. Yield a record of a different format unchanged.

    Args:
        record (`Record`): Task with its annotations.

    Raises:
        NotOfFormat: the data lacks an answer that was compared or ranked, or see `_ranks`.
    """
    if not _is_task(record):
        yield record
        return
    data = record["data"]
    given = [each for annotation in record["annotations"] if not annotation.get("was_cancelled")
             for each in annotation["result"]]  # fmt: skip
    ranks = [(each["from_name"], _ranks(each)) for each in given if each["type"] in ("pairwise", "ranker")]
    others = [(each["from_name"], each["value"].get(each["type"])) for each in given
              if each["type"] not in ("pairwise", "ranker", "textarea")]  # fmt: skip
    if not ranks:
        yield rated(data, others)
        return
    texts, names = _texts(data), {name for _, found in ranks for rank in found for name in rank}
    if missing := names - set(texts):
        raise NotOfFormat(
            f"its data has no {', '.join(sorted(missing))}, which was ranked. Give each text in the labeling interface "
            "the name of its field"
        )
    rest = {name: value for name, value in data.items() if name not in names and not isinstance(value, list)}
    yield from ranked(rest, {name: texts[name] for name in texts if name in names}, ranks, others)


def _is_task(record: Record) -> bool:
    return isinstance(record.get("data"), Mapping) and isinstance(record.get("annotations"), list)


def _ranks(result: Record) -> list[list[str]]:
    """Return the names of the answers at each rank, from the best to the worst.

    Raises:
        NotOfFormat: the buckets of a ranking are all empty, or several buckets have answers.
    """
    if result["type"] == "pairwise":
        names, better = result["to_name"].split(","), _SIDES.index(result["value"]["selected"])
        return [[names[better].strip()], [names[1 - better].strip()]]
    ranking = result["value"]["ranker"]
    lists = [ranking] if isinstance(ranking, list) else [found for name, found in ranking.items() if found]
    if len(lists) != 1:
        raise NotOfFormat(f"its {result['from_name']} has several buckets, whose order is not known: {ranking}")
    return [[str(name)] for name in lists[0]]


def _texts(data: Record) -> dict[str, Any]:
    """Return the texts of a task by their names.

    In a list of items, the name of an item is its `id`, and the text is its `body`, `html` or `title`.
    """
    items = [each for value in data.values() if isinstance(value, list) for each in value if isinstance(each, Mapping)]
    inner = {
        str(each["id"]): each.get("body") or each.get("html") or each.get("title") for each in items if "id" in each
    }
    return {**data, **inner}


FORMAT = format_of_ratings(
    table.FORMAT,
    source="Label Studio's JSON export (labelstud.io, guide/export; tags pairwise, ranker, rating, choices and number)",
    test=_is_task,
    records=records,
    loses="The reward is the result of a control tag: --reward_fields ratings.NAME. In a comparison or a ranking, the "
    "best answer has the reward 1, and the worst -1. Predictions and texts that annotators wrote are not read.",
)
