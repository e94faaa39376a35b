"""Read chat completions of OpenAI's API and of vLLM's server: batch files, and logs of requests with responses.

LiteLLM logs a response beside the messages of its request, with the other settings in `model_parameters`.
"""

from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.records import (
    Format,
    LeftOut,
    NotOfFormat,
    Record,
    Row,
    Unusable,
    finish_reason,
    message,
    template_columns,
)

_ID_PREFIX = "token_id:"  # prefix of tokens that vLLM writes with `return_tokens_as_token_ids`


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return a row for each choice of a response, or None for an empty choice.

    The request is the field `request` of the record, or a line in the input file of the batch (`--requests`), or the
    record itself (LiteLLM).
    """
    response, request = record["response"], record.get("request")
    failed = record.get("error") or record.get("status") == "failure" or not response or response.get("error")
    if failed or response.get("status_code", 200) != 200:
        return [LeftOut.FAILED]
    if request is None and "messages" in record:
        request = {**record, **(record.get("model_parameters") or {})}
    if request is None:
        raise NotOfFormat("it has no request: name the input file of the batch with --requests")
    body, asked = response.get("body", response), request.get("body", request)
    for part, name, of in ((body, "choices", "response"), (asked, "messages", "request")):
        if name not in part:
            raise NotOfFormat(f"its {of} has no {name}; it has {', '.join(sorted(part))}")
    shared = {
        "prompt": [message(each) for each in asked["messages"]], **template_columns(asked),
        **{name: asked.get(name) for name in SAMPLING},
    }  # fmt: skip
    choices = [_choice_columns(choice, body.get("prompt_token_ids")) for choice in body["choices"]]
    if _continues(asked) and not all(choice is None or choice["completion_ids"] for choice in choices):
        raise Unusable(
            "its request continues its last message (continue_final_message), and without token ids the start of the "
            "completion is not known"
        )
    return [choice and {**shared, **choice} for choice in choices]


def _continues(asked: Record) -> bool:
    """Return whether the model continued the last message of a request (vLLM)."""
    return bool(asked.get("continue_final_message") or (asked.get("extra_body") or {}).get("continue_final_message"))


def _choice_columns(choice: Record, prompt_ids: list[int] | None) -> Row | None:
    """Return the columns of a choice. Return None for an empty choice."""
    logged = (choice.get("logprobs") or {}).get("content")
    ids, logps = choice.get("token_ids") or _parse_ids(logged), [entry["logprob"] for entry in logged or ()]
    if ids and logps and len(ids) != len(logps):
        raise Unusable(f"a choice has {len(ids)} token_ids and {len(logps)} log-probabilities")
    written = message(choice["message"])
    if not ids and not any(written[name] for name in ("content", "tool_calls", "reasoning_content")):
        return None
    return {
        "prompt_ids": prompt_ids if ids else None,  # A row has both kinds of ids or none.
        "completion": [written],
        "completion_ids": ids,
        "sampler_logps": logps or None,
        "finish_reason": finish_reason(choice.get("finish_reason")),
    }


def _parse_ids(logged: list[dict[str, Any]] | None) -> list[int] | None:
    """Return the token ids of log-probabilities. Return None if they have the texts of tokens, not the ids."""
    tokens = [entry["token"] for entry in logged or ()]
    if not tokens or not all(token.startswith(_ID_PREFIX) for token in tokens):
        return None
    return [int(token.removeprefix(_ID_PREFIX)) for token in tokens]


FORMAT = Format(
    source="OpenAI's chat completions and batches; vLLM (entrypoints/openai/chat_completion/protocol.py at 002032e); "
    "LiteLLM's StandardLoggingPayload",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=(
        "prompt_ids", "completion_ids", "sampler_logps", "problem_id", "finish_reason", "tools",
        "chat_template_kwargs", *SAMPLING,
    ),
    required=frozenset({"response"}),
    optional=None,  # Logs have further fields, such as times and users.
    loses="Without token_ids (vLLM: return_token_ids), text is tokenized again, which can give other tokens. A request "
    "without a temperature used the default of the server, which is assumed to be 1.",
)  # fmt: skip
