"""Read logs of OpenAI's evals, which `oaieval` writes. Each sampling with its result is a row."""

from collections.abc import Iterator
from typing import Any

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Format, LeftOut, Record, Unusable
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.openai_messages import check_roles, message
from topr_trl.importing.record_fields import DifferentRatings, inner_value, values_by_name
from topr_trl.importing.row_table import Row


def samplings(record: Record) -> Iterator[Record]:
    """Yield a record for each sampling of a sample, with the results that come before the next sampling.

    Events before the first sampling become a record without a sampling.

    Args:
        record (`Record`): Events of a sample.
    """
    groups: list[list[Record]] = []
    for event in record[LINES]:
        if event["type"] == "sampling" or not groups:
            groups.append([])
        groups[-1].append(event)
    for group in groups:
        first = group[0]
        yield {
            **first["data"], "sample_id": first["sample_id"], "run_id": first["run_id"],
            "is_sampling": first["type"] == "sampling", "has_error": any(each["type"] == "error" for each in group),
            "is_clear": len(groups) == 1 or all(map(_results, groups)),
            "results": values_by_name(pair for each in _results(group) for pair in each.items()),
        }  # fmt: skip


def _results(events: list[Record]) -> list[Record]:
    return [event["data"] for event in events if event["type"] in ("match", "metrics")]


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the row of a sampling.

    Return `[LeftOut.FAILED]` if there is an error, `[LeftOut.OTHER]` for events without a sampling, and [] for an
    empty list of completions.

    Raises:
        NotOfFormat: a message has no role.
        Unusable: the sample has several samplings and not all of them have a result, the sampling has several
            completions, or a message has an unknown role or a part without text.
    """
    if record["has_error"]:
        return [LeftOut.FAILED]
    if not record["is_sampling"]:
        return [LeftOut.OTHER]
    if not record["is_clear"]:
        raise Unusable(
            f"sample {record['sample_id']} has several samplings with one result, so which of them it is for is not "
            "known. Keep one sampling in the file, for instance not the one of a judge"
        )
    sampled = record["sampled"]
    texts = sampled if isinstance(sampled, list) else [sampled]
    if len(texts) > 1:
        raise Unusable(f"it has {len(texts)} completions and one result. Write one line per completion")
    prompt = text_or_messages(record["prompt"])
    check_roles(prompt)
    expected = record["results"].get("expected")
    return [
        {
            "prompt": prompt,
            "completion": text if isinstance(prompt, str) else [message({"role": "assistant", "content": text})],
            "problem_id": record["sample_id"], "model": record.get("model"),
            "answer": expected if isinstance(expected, str) else None,
        }
        for text in texts
    ]  # fmt: skip


def rewards(record: Record) -> dict[str, Any]:
    """Return the numeric results of a sampling by name, such as `results.correct`.

    Leave out `expected` and `picked`, which hold answers.
    """
    return {f"results.{name}": value for name, value in record["results"].items()
            if isinstance(value.values[0] if isinstance(value, DifferentRatings) else value, int | float)
            and name not in ("expected", "picked")}  # fmt: skip


def _sample_of(place: str, line: Record) -> Any:
    """Return the run and the sample of an event.

    Return `""` for a line without a sample, such as the first and the last line. Return None for a line of a different
    format.
    """
    if not _is_event(line):
        return None
    return (line["run_id"], line["sample_id"]) if line.get("sample_id") else ""


def _is_event(record: Record) -> bool:
    is_first = isinstance(inner_value(record, "spec", "completion_fns"), list)
    is_last = set(record) == {"final_report", "run_id"}
    return is_first or is_last or {"run_id", "event_id", "data"} <= set(record)


FORMAT = Format(
    source="OpenAI's evals 3 (evals/record.py)",
    rank=1,
    test=_is_event,
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "model", "answer"),
    required=frozenset({"sample_id", "results"}),
    join=joined_by("sample", _sample_of),
    records=samplings,
    loses="Logs lack the temperature, finish reasons and calls of tools. Do not train on a benchmark on which you "
    "report results.",
)
