"""Read responses of the API `/v1/completions`: batch files, and logs of requests with responses."""

from itertools import chain
from typing import Any

from topr_trl.importing.calls import Dialect, check_lengths, field_of, first_choice, format_of_calls, ids_in
from topr_trl.importing.format import NotOfFormat, Record, Unusable
from topr_trl.importing.openai_messages import finish_reason_of
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return no columns, because each answer has its own prompt.

    Raises:
        Unusable: the request has `echo` or `suffix`.
    """
    if asked.get("echo") or asked.get("suffix"):
        raise Unusable(
            "its request has echo or suffix, so the text of a choice is not a plain continuation of the prompt"
        )
    return {}


def answers(body: Record, asked: Record) -> list[Row | None]:
    """Return the columns of each choice with its prompt, or None for an empty choice.

    A row has token ids if they are known for both the prompt and the completion. Otherwise, it has only text.

    Raises:
        NotOfFormat: the prompt or the choices are missing, the prompt has a wrong type, or the number of choices is not
            `n` per prompt.
        Unusable: the prompt is token ids and a choice has only text, the numbers of token ids and log-probabilities
            differ, or the finish reason is unknown.
    """
    prompts = _prompts(field_of(asked, "prompt", "request"))
    each = asked.get("n") or 1
    choices = sorted(field_of(body, "choices", "response"), key=lambda choice: choice.get("index", 0))
    if len(choices) != len(prompts) * each:
        raise NotOfFormat(f"it has {len(choices)} choices for {len(prompts)} prompt(s) with n={each}")
    by_choice = chain.from_iterable([prompt] * each for prompt in prompts)
    return [_row(choice, prompt) for choice, prompt in zip(choices, by_choice, strict=True)]


def _prompts(given: Any) -> list[Any]:
    """Return the prompts of a request, each as text or token ids. A request can have one prompt or several.

    Raises:
        NotOfFormat: the prompt is neither text, token ids, nor a list of prompts.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        return given
    raise NotOfFormat(f"the prompt of its request is {str(given)[:60]}, and must be text or token ids")


def _row(choice: Record, prompt: str | list[int]) -> Row | None:
    logged = choice.get("logprobs") or {}
    tokens, logps = logged.get("tokens") or [], logged.get("token_logprobs") or []
    ids = choice.get("token_ids") or ids_in(tokens)
    if not choice["text"] and not ids:
        return None
    if isinstance(prompt, list) and not ids:
        raise Unusable("its prompt is token ids, and its choice has no token ids: log token_ids, or the prompt as text")
    prompt_ids = prompt if isinstance(prompt, list) else choice.get("prompt_token_ids")
    check_lengths(ids, logps)
    if not (ids and prompt_ids):  # Keep ids only if both the prompt and the completion have them.
        ids = prompt_ids = None
    return {
        "prompt": "" if isinstance(prompt, list) else prompt, "completion": choice["text"], "prompt_ids": prompt_ids,
        "completion_ids": ids, "sampler_logps": (logps or None) if ids else None,
        "finish_reason": finish_reason_of(choice),  # Bedrock has it in `stop_reason`.
    }  # fmt: skip


DIALECT = Dialect(
    asks="prompt", is_answer=lambda body: isinstance(first_choice(body, "text"), str), prompt=prompt, answers=answers
)
FORMAT = format_of_calls(
    DIALECT,
    source="OpenAI's legacy completions; vLLM (entrypoints/openai/completion/protocol.py at 002032e)",
    loses="Prompts are plain text: no chat template is applied. Without token_ids (vLLM: return_token_ids), text is "
    "tokenized again, which can give different tokens. A request without a temperature used the default of the server, "
    "which is assumed to be 1.",
)
