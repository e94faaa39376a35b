"""Read Nebius' public dataset of runs of SWE-agent, with the outcome of the tests."""

from topr_trl.importing.format import Format, Record, has
from topr_trl.importing.openai_messages import check_roles, message, row_of_run
from topr_trl.importing.row_table import Row


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
    rewards=lambda record: {"target": record["target"]},
    columns=("problem_id",),
    required=frozenset({"instance_id", "target", "trajectory"}),
    optional=frozenset({"model_name", "exit_status", "generated_patch", "eval_logs"}),
)
