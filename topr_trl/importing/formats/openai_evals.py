"""Read output items of runs of OpenAI's Evals API. Each item is a row."""

from collections.abc import Iterator

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Format, LeftOut, Record
from topr_trl.importing.openai_messages import check_roles, finish_reason
from topr_trl.importing.record_fields import first_listed, rewards_in, values_by_name
from topr_trl.importing.row_table import Row


def items(record: Record) -> Iterator[Record]:
    """Yield each item of a list, or a single item, with the scores of the item's graders by name.

    If a grader gives no score, `passed` counts as the score.

    Args:
        record (`Record`): List of output items, as the API returns it, or an item.
    """
    for item in record["data"] if record.get("object") == "list" else [record]:
        named = [(each["name"], each["passed"] if each.get("score") is None else each["score"])
                 for each in item.get("results") or ()]  # fmt: skip
        yield {**item, "scores": values_by_name(named)}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the row of an item. Return `[LeftOut.FAILED]` for an item with an error, and [] without an output.

    Raises:
        NotOfFormat: a message has no role.
        Unusable: the finish reason is unknown, or a message has an unknown role or a part without text.
    """
    sample = record.get("sample") or {}
    if any((sample.get("error") or {}).values()) or record.get("status") in ("error", "errored"):
        return [LeftOut.FAILED]
    prompt = text_or_messages(sample["input"])
    check_roles(prompt)
    settings = {name: sample.get(name) for name in ("model", "temperature", "top_p")}
    completion = text_or_messages(
        [{**each, "role": each.get("role") or "assistant"} for each in sample["output"] or ()]
    )
    return [{"prompt": prompt, "completion": completion, "finish_reason": finish_reason(sample.get("finish_reason")),
             **settings}] if completion else []  # fmt: skip


FORMAT = Format(
    source="OpenAI's Evals API (openai-python 3, types/evals/runs/output_item_list_response.py)",
    test=lambda record: first_listed(record, "data").get("object") == "eval.run.output_item",
    rows=rows,
    rewards=rewards_in("scores"),
    columns=("problem_id", "finish_reason", "model", "temperature", "top_p"),
    required=frozenset({"sample", "scores"}),
    records=items,
    loses="Items lack tools and calls of tools. Do not train on a benchmark on which you report results.",
)
