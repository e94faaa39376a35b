"""Read Nebius' public dataset of runs of OpenHands, with the outcome of the tests."""

from topr_trl.importing.format import Format, Record, has
from topr_trl.importing.formats.swe_agent import outcome
from topr_trl.importing.openai_messages import message, row_of_run, tools_as_json
from topr_trl.importing.row_table import Row


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn.

    Raises:
        NotOfFormat: see `openai_messages.message`.
        Unusable: the provider defines a tool, or see `openai_messages.message`.
    """
    messages = list(map(message, record["trajectory"]))
    return row_of_run(messages, problem_id=record["instance_id"], tools=tools_as_json(record["tools"]))


FORMAT = Format(
    source="the card of nebius/SWE-rebench-openhands-trajectories",
    test=has("instance_id", "resolved", "trajectory", "tools"),
    rows=rows,
    rewards=lambda record: {"resolved": outcome(record["resolved"])},
    columns=("problem_id", "tools"),
    required=frozenset({"instance_id", "resolved", "trajectory", "tools"}),
    optional=frozenset({
        "trajectory_id", "repo", "model_patch", "exit_status", "gen_tests_correct", "pred_passes_gen_tests"
    }),
)  # fmt: skip
