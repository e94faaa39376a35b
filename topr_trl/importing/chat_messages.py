"""Read runs as lists of messages, one run per line: `{"messages": [...], "tools": [...], "reward": 1}`."""

from topr_trl.importing.records import Format, Record, Row, message, row_of_run, tools_as_json


def rows(record: Record) -> list[Row]:
    """Return one row of messages with tool calls. Return [] if there is no turn of the assistant."""
    return row_of_run(list(map(message, record["messages"])), tools=tools_as_json(record.get("tools")))


FORMAT = Format(
    source="lists of messages in OpenAI's form",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=("problem_id", "tools"),
    required=frozenset({"messages"}),
    optional=None,  # Logs have further fields, such as times and users.
    loses="The trainer learns from the turns of the assistant. Turns of users and tools between them are context.",
)
