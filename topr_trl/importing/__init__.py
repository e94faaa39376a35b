"""Formats of other systems, by their name in `topr import --format`."""

from topr_trl.importing import (
    chat_messages,
    graded,
    nemo_rl,
    openai_chat,
    swe_trajectories,
    traces,
    trl_completions,
    verifiers_results,
    verl,
)
from topr_trl.importing.records import Format

FORMATS: dict[str, Format] = {
    "graded": graded.FORMAT, "messages": chat_messages.FORMAT, "nemo-rl": nemo_rl.FORMAT,
    "openai": openai_chat.FORMAT, "openhands": swe_trajectories.OPENHANDS, "swe-agent": swe_trajectories.SWE_AGENT,
    "trl": trl_completions.FORMAT, "verifiers": traces.FORMAT, "verifiers-results": verifiers_results.FORMAT,
    "verl": verl.FORMAT,
}  # fmt: skip
