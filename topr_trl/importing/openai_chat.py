"""Read chat completions of OpenAI's API and of vLLM's server: batch files, and logs of requests with responses.

A log of LiteLLM has the request's messages next to the response, and the request's settings in `model_parameters`.
"""

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import IGNORED, Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.openai_messages import finish_reason, message, template_columns
from topr_trl.importing.row_table import Row
from topr_trl.importing.text_completions import body_and_request, ids_in, logged_call


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return a row for each choice, or None for an empty choice. Return `[LeftOut.FAILED]` if the request failed.

    The request comes from the field `request` of the record, from the input file of the batch (`--requests`), or from
    the record itself (LiteLLM).

    Raises:
        NotOfFormat: the response has no choices, the request or its messages are missing, or a message has no role.
        Unusable: the start of a completion is not known, the numbers of token ids and log-probabilities differ, or a
            message cannot be used (see `openai_messages.message`).
    """
    if record.get("status") == "failure":
        return [LeftOut.FAILED]
    if record.get("request") is None and "messages" in record:
        record = {**record, "request": {**record, **(record.get("model_parameters") or {})}}
    found = body_and_request(record, "messages")
    if found is None:
        return [LeftOut.FAILED]
    body, asked = found
    if "choices" not in body:
        raise NotOfFormat(f"its response has no choices; it has {', '.join(sorted(body))}")
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
    """Return whether a request asked vLLM's server to continue its last message."""
    return bool(asked.get("continue_final_message") or (asked.get("extra_body") or {}).get("continue_final_message"))


def _choice_columns(choice: Record, prompt_ids: list[int] | None) -> Row | None:
    """Return the columns of a choice. Return None for an empty choice."""
    logged = (choice.get("logprobs") or {}).get("content") or ()
    ids = choice.get("token_ids") or ids_in([entry["token"] for entry in logged])
    logps = [entry["logprob"] for entry in logged]
    if ids and logps and len(ids) != len(logps):
        raise Unusable(f"a choice has {len(ids)} token_ids and {len(logps)} log-probabilities")
    written = message(choice["message"])
    if not ids and not any(written[name] for name in ("content", "tool_calls", "reasoning_content")):
        return None
    return {
        "prompt_ids": prompt_ids if ids else None,  # Without completion ids, the row has only messages.
        "completion": [written],
        "completion_ids": ids,
        "sampler_logps": logps or None,
        "finish_reason": finish_reason(choice.get("finish_reason")),
    }


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
    records=logged_call,
    choices=lambda record: IGNORED._replace(read=("response",)),
    loses="Without token_ids (vLLM: return_token_ids), text is tokenized again, which can give different tokens. A "
    "request without a temperature used the default of the server, which is assumed to be 1.",
)  # fmt: skip
