"""Read trajectories of mini-swe-agent 1.1 and later: objects with messages."""

from topr_trl.importing.dialects.openai_responses import messages_of
from topr_trl.importing.format import Format, Record
from topr_trl.importing.openai_messages import message, row_of_run
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn.

    Raises:
        NotOfFormat: see `openai_messages.message`.
        Unusable: see `openai_messages.message` and `openai_responses.messages_of`.
    """
    return row_of_run(
        [each for given in record["messages"] for each in _messages(given)],
        problem_id=record.get("instance_id"),
        model=inner_value(record, "info", "config", "model", "model_name"),
    )


def _messages(given: Record) -> list[Row]:
    """Convert a message of the file to messages of a row. Return [] for the last message, with the role `exit`.

    With the Responses API, the file has a whole response as an answer, and an item of the API as a tool result.
    """
    if given.get("object") == "response":
        return messages_of(given["output"])
    if given.get("type") == "function_call_output":
        return messages_of([given])
    return [] if given["role"] == "exit" else [message(given)]


FORMAT = Format(
    source="mini-swe-agent 1.1 to 2.4 (minisweagent/agents/default.py, serialize)",
    test=lambda record: str(record.get("trajectory_format")).startswith("mini-swe-agent"),
    rows=rows,
    columns=("problem_id", "model"),
    required=frozenset({"messages"}),
    loses="Trajectories lack the tools. They have no rewards: see --reward_fields, or --rewards and --id_field.",
)
