"""Read `samples_{task}_{time}.jsonl`, which lm-evaluation-harness writes with `--log_samples`."""

import json
from typing import Any

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Format, NotOfFormat, Record, Unusable, has
from topr_trl.importing.row_table import Row

# Fields of a sample that are not metrics. All other fields can be metrics if a sample does not list its `metrics`.
_OF_SAMPLE = frozenset({
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash", "prompt", "response",
})  # fmt: skip


def rows(record: Record) -> list[Row]:
    """Return one row of text, or of messages for a chat API. Return [] for an empty response.

    Raises:
        NotOfFormat: the task compares the likelihoods of given answers, so the model wrote no response; the prompt is
            not text; or a message has no role.
        Unusable: the sample has several responses or none, or a message has a part without text.
    """
    requests, responses = record["arguments"], record["resps"]
    if isinstance(requests, dict):
        requests = list(requests.values())
    asked = [list(request.values()) if isinstance(request, dict) else request for request in requests]
    if len(asked) != 1 or len(responses) != 1 or not isinstance(asked[0][1], dict):
        raise NotOfFormat(
            "its task compares the likelihoods of given answers, so the model wrote no completion. Import samples of a "
            "task of the type generate_until"
        )
    if len(responses[0]) != 1:
        raise Unusable(
            f"it has {len(responses[0])} responses and one score. Run the task with repeats: 1, or write one line per "
            "response"
        )
    prompt, text, settings = _prompt(asked[0][0]), responses[0][0], asked[0][1]
    completion = text if isinstance(prompt, str) else text_or_messages([{"role": "assistant", "content": text}])
    temperature = 0.0 if settings.get("do_sample") is False else settings.get("temperature")
    return [
        {
            "prompt": prompt, "completion": completion, "problem_id": str(record.get("doc_hash") or record["doc_id"]),
            "answer": str(record["target"]), "temperature": temperature,
        }
    ] if text else []  # fmt: skip


def _prompt(given: Any) -> Any:
    """Return a prompt. A prompt for a chat API was logged as JSON and becomes messages. Other prompts are text.

    Raises:
        NotOfFormat: the prompt is not text, or a message has no role.
        Unusable: a message has a part without text.
    """
    text = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(text, str):
        raise NotOfFormat(f"its prompt is {str(given)[:60]}, and must be text")
    if isinstance(given, list) or text.startswith('[{"role"'):
        return text_or_messages(json.loads(text))
    return text


def rewards(record: Record) -> dict[str, Any]:
    """Return the numeric metrics of a sample, by name."""
    names = record.get("metrics") or sorted(set(record) - _OF_SAMPLE)
    found = {name: record.get(name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


FORMAT = Format(
    source="lm-evaluation-harness 0.4 (lm_eval/evaluator.py, lm_eval/loggers/evaluation_tracker.py)",
    test=has("doc_id", "doc", "arguments", "resps"),
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "answer", "temperature"),
    required=frozenset({"doc_id", "doc", "target", "arguments", "resps"}),
    same="filter",
    loses="The harness cuts responses at its stop sequences. Each row ends at the cut, with the model's stop token. "
    "Logs do not show whether a response was cut at the token limit. The harness decodes greedily by default, so "
    "rows without a temperature may not be samples at temperature 1. Do not train on a benchmark on which you report "
    "results.",
)
