"""Chat completions as OpenAI's API and vLLM's server return them: batch files, and logs of requests with responses."""

from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.records import Format, NotOfFormat, Record, Row, finish_reason, message, tools_as_json

_UNKNOWN = -9999.0  # vLLM's log-probability where it has none
_AS_ID = "token_id:"  # how vLLM writes a token with `return_tokens_as_token_ids`


def rows(record: Record) -> list[Row | None]:
    """A row for each choice of a response, None for one that says nothing; no row for a request that failed.

    The request is the record's `request`, or its line of a batch's input file (`--requests`).
    """
    response, request = record["response"], record.get("request")
    failed = record.get("error") or response is None or response.get("error")
    if failed or response.get("status_code", 200) != 200:
        return []
    if request is None:
        raise NotOfFormat("it has no request: name the input file of the batch with --requests")
    body, asked = response.get("body", response), request.get("body", request)
    for part, name, of in ((body, "choices", "response"), (asked, "messages", "request")):
        if name not in part:
            raise NotOfFormat(f"its {of} has no {name}; it has {', '.join(sorted(part))}")
    prompt = [message(each) for each in asked["messages"]]
    shared = {
        "prompt": prompt, "tools": tools_as_json(asked.get("tools")), **{name: asked.get(name) for name in SAMPLING}
    }  # fmt: skip
    choices = [_choice(choice, body.get("prompt_token_ids")) for choice in body["choices"]]
    return [{**shared, **choice} if choice else None for choice in choices]


def _choice(choice: Record, prompt_ids: list[int] | None) -> Row | None:
    logged = (choice.get("logprobs") or {}).get("content")
    ids, logps = choice.get("token_ids") or _ids_in(logged), [entry["logprob"] for entry in logged or ()]
    if ids and logps and len(ids) != len(logps):
        raise NotOfFormat(f"a choice has {len(ids)} token_ids and {len(logps)} log-probabilities")
    said = message(choice["message"])
    if not ids and not any(said[name] for name in ("content", "tool_calls", "reasoning_content")):
        return None
    return {
        "prompt_ids": prompt_ids if ids else None,  # a row has both or neither
        "completion": [said],
        "completion_ids": ids,
        "sampler_logps": None if not logps or None in logps or _UNKNOWN in logps else logps,
        "finish_reason": finish_reason(choice.get("finish_reason")),
    }


def _ids_in(logged: list[dict[str, Any]] | None) -> list[int] | None:
    tokens = [entry["token"] for entry in logged or ()]
    if not tokens or not all(token.startswith(_AS_ID) for token in tokens):
        return None
    return [int(token.removeprefix(_AS_ID)) for token in tokens]


FORMAT = Format(
    source="OpenAI's chat completions and batches; vLLM (entrypoints/openai/chat_completion/protocol.py at 002032e)",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=(
        "prompt_ids", "completion_ids", "sampler_logps", "problem_id", "finish_reason", "tools", *SAMPLING,
    ),
    required=frozenset({"response"}),
    optional=None,  # logs have times, users and more
    loses="Without token_ids (vLLM: return_token_ids) text is tokenized again, which need not give the same tokens. A "
    "request without a temperature was sampled at the server's, which is taken to be 1.",
)  # fmt: skip
