"""Read Nebius' public datasets of runs of SWE-agent and OpenHands, with the outcome of the tests."""

from typing import Any

from topr_trl.importing.format import Format, Record
from topr_trl.importing.openai_messages import message, row_of_run, tools_as_json
from topr_trl.importing.row_table import Row

_ROLES = {"system": "system", "user": "user", "ai": "assistant"}


def _outcome(value: Any) -> float | None:
    """Return 1 if the tests passed, -1 if they failed, and None if they did not run."""
    return None if value is None else 1.0 if value else -1.0


def rows_of_swe_agent(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn."""
    messages = [
        message({"role": _ROLES[each["role"]], "content": each["text"] or each["system_prompt"]})
        for each in record["trajectory"]
    ]
    return row_of_run(messages, problem_id=record["instance_id"])


def rows_of_openhands(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn."""
    messages = list(map(message, record["trajectory"]))
    return row_of_run(messages, problem_id=record["instance_id"], tools=tools_as_json(record["tools"]))


SWE_AGENT = Format(
    source="the card of nebius/SWE-agent-trajectories",
    suffix=".parquet",
    rows=rows_of_swe_agent,
    rewards=lambda record: {"target": _outcome(record["target"])},
    columns=("problem_id",),
    required=frozenset({"instance_id", "target", "trajectory"}),
    optional=frozenset({"model_name", "exit_status", "generated_patch", "eval_logs"}),
)

OPENHANDS = Format(
    source="the card of nebius/SWE-rebench-openhands-trajectories",
    suffix=".parquet",
    rows=rows_of_openhands,
    rewards=lambda record: {"resolved": _outcome(record["resolved"])},
    columns=("problem_id", "tools"),
    required=frozenset({"instance_id", "resolved", "trajectory", "tools"}),
    optional=frozenset({
        "trajectory_id", "repo", "model_patch", "exit_status", "gen_tests_correct", "pred_passes_gen_tests"
    }),
)  # fmt: skip
