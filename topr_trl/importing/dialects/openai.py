"""Read chat completions of OpenAI's API and of vLLM's server: batch files, and logs of requests with responses.

A log of LiteLLM has the request's messages next to the response, and the request's settings in `model_parameters`. The
messages can have blocks of Anthropic's API.
"""

from collections.abc import Mapping
from dataclasses import replace

from topr_trl.importing.calls import (
    Dialect,
    check_lengths,
    field_of,
    first_choice,
    format_of_calls,
    ids_in,
    is_failed,
)
from topr_trl.importing.content_blocks import messages_of
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.openai_messages import finish_reason, message, template_columns
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages, the tools and the template settings of a request.

    Raises:
        NotOfFormat: the request has no messages, or a message has no role.
        Unusable: the provider defines a tool, or a message cannot be used (see `content_blocks.messages_of`).
    """
    messages = [row for each in field_of(asked, "messages", "request") for row in messages_of(each)]
    if asked.get("instructions"):
        messages = [message({"role": "system", "content": asked["instructions"]}), *messages]
    return {"prompt": messages, **template_columns(asked)}


def answers(body: Record, asked: Record) -> list[Row | None]:
    """Return the columns of each choice, or None for an empty choice.

    Raises:
        NotOfFormat: the response has no `choices`.
        Unusable: a choice without token ids continues the last message of the request, the numbers of token ids and
            log-probabilities differ, the finish reason is unknown, or see `content_blocks.messages_of`.
    """
    choices = [
        _choice_columns(choice, body.get("prompt_token_ids")) for choice in field_of(body, "choices", "response")
    ]
    if _continues(asked) and not all(choice is None or choice["completion_ids"] for choice in choices):
        raise Unusable(
            "its request continues its last message (continue_final_message or prefix), and without token ids the "
            "start of the completion is not known"
        )
    return choices


def _continues(asked: Record) -> bool:
    """Return whether a request asked the server to continue its last message (vLLM, or DeepSeek and Mistral)."""
    of_vllm = {**asked, **(asked.get("extra_body") or {})}.get("continue_final_message")
    return bool(of_vllm or (asked["messages"] and asked["messages"][-1].get("prefix")))


def _choice_columns(choice: Record, prompt_ids: list[int] | None) -> Row | None:
    """Return the columns of a choice. Return None for an empty choice."""
    logged = (choice.get("logprobs") or {}).get("content") or ()
    ids = choice.get("token_ids") or ids_in([entry["token"] for entry in logged])
    logps = [entry["logprob"] for entry in logged]
    check_lengths(ids, logps)
    (written,) = messages_of({"role": "assistant", **choice["message"]})
    if not ids and not any(written[name] for name in ("content", "tool_calls", "reasoning_content")):
        return None
    return {
        "prompt_ids": prompt_ids if ids else None,  # Without completion ids, the row has only messages.
        "completion": [written],
        "completion_ids": ids,
        "sampler_logps": logps or None,
        "finish_reason": finish_reason(choice.get("finish_reason"), () if ids else [written]),
    }


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: isinstance(first_choice(body, "message"), Mapping),
    prompt=prompt,
    answers=answers,
)
_CALLS = format_of_calls(
    DIALECT,
    source="OpenAI's chat completions and batches; vLLM (entrypoints/openai/chat_completion/protocol.py at 002032e); "
    "LiteLLM's StandardLoggingPayload",
    loses="Without token_ids (vLLM: return_token_ids), text is tokenized again, which can give different tokens. A "
    "request without a temperature used the default of the server, which is assumed to be 1.",
)


def _is_call(record: Record) -> bool:
    # A failed line of a batch has no answer that shows the dialect. This format reads such lines.
    return _CALLS.test(record) or (
        {"custom_id", "response"} <= set(record)
        and isinstance(record["response"], Mapping | None)
        and is_failed(record)
    )


FORMAT = replace(_CALLS, test=_is_call)
