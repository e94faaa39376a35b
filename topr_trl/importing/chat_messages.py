"""Runs as lists of messages, one per line: `{"messages": [...], "tools": [...], "reward": 1}`."""

from topr_trl.importing.records import Format, Record, Row, message, row_of_run, tools_as_json


def rows(record: Record) -> list[Row]:
    """One row of messages, with calls of tools; none without a turn of the assistant."""
    return row_of_run(list(map(message, record["messages"])), tools=tools_as_json(record.get("tools")))


FORMAT = Format(
    source="lists of messages in OpenAI's form",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=("problem_id", "tools"),
    required=frozenset({"messages"}),
    optional=None,  # logs have times, users and more
    loses="The turns of the assistant are learned from; what the user or a tool said between them is context.",
)
