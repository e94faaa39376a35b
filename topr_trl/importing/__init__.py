"""File formats that `topr import` can read, by their name in `--format`."""

from topr_trl.importing import (
    chat_messages,
    graded,
    inspect_logs,
    langfuse,
    langsmith,
    lm_eval,
    nemo_gym,
    nemo_rl,
    openai_chat,
    openhands_output,
    opentelemetry,
    preference_pairs,
    prompt_tables,
    recordings,
    responses_api,
    sharegpt,
    swe_trajectories,
    text_completions,
    traces,
    trl_completions,
    verifiers_results,
    verl,
)
from topr_trl.importing.format import Format

FORMATS: dict[str, Format] = {
    "graded": graded.FORMAT, "inspect": inspect_logs.FORMAT, "langfuse": langfuse.FORMAT,
    "langsmith": langsmith.FORMAT, "lm-eval": lm_eval.FORMAT, "messages": chat_messages.FORMAT,
    "nemo-gym": nemo_gym.FORMAT, "nemo-rl": nemo_rl.FORMAT, "openai": openai_chat.FORMAT,
    "openai-completions": text_completions.FORMAT, "openai-responses": responses_api.FORMAT,
    "openhands": swe_trajectories.OPENHANDS, "openhands-output": openhands_output.FORMAT,
    "opentelemetry": opentelemetry.FORMAT, "pairs": preference_pairs.FORMAT, "recording": recordings.FORMAT,
    "sharegpt": sharegpt.FORMAT, "swe-agent": swe_trajectories.SWE_AGENT, "table": prompt_tables.FORMAT,
    "trl": trl_completions.FORMAT, "verifiers": traces.FORMAT, "verifiers-results": verifiers_results.FORMAT,
    "verl": verl.FORMAT,
}  # fmt: skip
