"""Read Nebius' public dataset of runs of SWE-agent, with the outcome of the tests."""

from typing import Any

from topr_trl.importing.format import Format, Record, has
from topr_trl.importing.openai_messages import check_roles, message, row_of_run
from topr_trl.importing.row_table import Row


def outcome(value: Any) -> float | None:
    """Return 1 if the tests passed, -1 if they failed, and None if they did not run."""
    return None if value is None else 1.0 if value else -1.0


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn.

    Raises:
        Unusable: a turn has an unknown role.
    """
    messages = [message({"role": each["role"], "content": each["text"] or each["system_prompt"]})
                for each in record["trajectory"]]  # fmt: skip
    check_roles(messages)
    return row_of_run(messages, problem_id=record["instance_id"])


FORMAT = Format(
    source="the card of nebius/SWE-agent-trajectories",
    test=has("instance_id", "target", "trajectory"),
    rows=rows,
    rewards=lambda record: {"target": outcome(record["target"])},
    columns=("problem_id",),
    required=frozenset({"instance_id", "target", "trajectory"}),
    optional=frozenset({"model_name", "exit_status", "generated_patch", "eval_logs"}),
)
