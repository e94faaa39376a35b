"""Read responses of the API `/v1/completions`: batch files, and logs of requests with responses."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.format import IGNORED, Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import finish_reason
from topr_trl.importing.row_table import Row

_ID_PREFIX = "token_id:"  # vLLM logs a token as `token_id:42` with `return_tokens_as_token_ids`


def logged_call(record: Record) -> Iterator[Record]:
    """Yield a record with its call of OpenAI's API in the fields `request` and `response`.

    Logging tools name these two fields differently (`request_body`, `inputs`, `reply`), and databases export them as
    JSON text. A response is an object with `choices`, or with the `output` of the Responses API. A request is an object
    with `messages`, a `prompt` or an `input`. If several fields match, the record is yielded unchanged.

    Args:
        record (`Record`): Log of a call.
    """
    objects = {name: found for name, value in record.items() if isinstance(found := parsed_json(value), Mapping)}
    answers = [name for name, value in objects.items() if _is_response(value.get("body", value))]
    asked = [name for name, value in objects.items() if name not in answers and _is_request(value.get("body", value))]
    response = "response" if record.get("response") else answers[0] if len(answers) == 1 else None
    request = "request" if record.get("request") else asked[0] if len(asked) == 1 else None
    names = {"response": response, "request": request} if response in answers and request in asked else {}
    is_call = {*answers, *asked}
    named: Record = {name: objects[name] for name in ("response", "request") if name in is_call}
    yield {**record, **named, **{name: objects[found] for name, found in names.items() if found}}


def _is_response(body: Any) -> bool:
    if not isinstance(body, Mapping):
        return False
    of_responses_api = isinstance(body.get("output"), list) and body.get("object") == "response"
    return of_responses_api or (isinstance(body.get("choices"), list) and bool(body["choices"]))


def _is_request(body: Any) -> bool:
    return isinstance(body, Mapping) and any(
        isinstance(body.get(name), str | list) for name in ("messages", "prompt", "input")
    )


def body_and_request(record: Record, of_request: str) -> tuple[Record, Record] | None:
    """Return the body of the response and the body of the request. Return None if the request failed.

    Args:
        record (`Record`): Log of a request, or line of a batch with its request from `--requests`.
        of_request (`str`): Field that a request must have.

    Raises:
        NotOfFormat: the request or its field is missing.
    """
    response, request = record["response"], record.get("request")
    if response and not isinstance(response, Mapping):
        raise NotOfFormat(f"its response is {str(response)[:60]!r}, and must be the object that the API returned")
    failed = record.get("error") or not response or response.get("error")
    if failed or response.get("status_code", 200) != 200:
        return None
    if request is None:
        raise NotOfFormat("it has no request: set --requests to the input file of the batch")
    body, asked = response.get("body", response), request.get("body", request)
    if of_request not in asked:
        raise NotOfFormat(f"its request has no {of_request}; it has {', '.join(sorted(asked))}")
    return body, asked


def ids_in(tokens: Sequence[str]) -> list[int] | None:
    """Return the ids of logged tokens. Return None if the tokens were logged as text.

    Args:
        tokens (`Sequence[str]`): Tokens that were logged with the log-probabilities.
    """
    if not tokens or not all(token.startswith(_ID_PREFIX) for token in tokens):
        return None
    return [int(token.removeprefix(_ID_PREFIX)) for token in tokens]


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return a row for each choice, or None for an empty choice. Return `[LeftOut.FAILED]` if the request failed.

    A row has token ids if they are known for both the prompt and the completion. Otherwise, it has only text.

    Raises:
        NotOfFormat: the request or its prompt is missing or has a wrong type, or the number of choices is wrong.
        Unusable: the request has `echo` or `suffix`, the prompt is token ids and a choice has only text, or the numbers
            of token ids and log-probabilities differ.
    """
    found = body_and_request(record, "prompt")
    if found is None:
        return [LeftOut.FAILED]
    body, asked = found
    if asked.get("echo") or asked.get("suffix"):
        raise Unusable(
            "its request has echo or suffix, so the text of a choice is not a plain continuation of the prompt"
        )
    prompts = _prompts(asked["prompt"])
    each = asked.get("n") or 1
    choices = sorted(body["choices"], key=lambda choice: choice.get("index", 0))
    if len(choices) != len(prompts) * each:
        raise NotOfFormat(f"it has {len(choices)} choices for {len(prompts)} prompt(s) with n={each}")
    sampling = {name: asked.get(name) for name in SAMPLING}
    by_choice = chain.from_iterable([prompt] * each for prompt in prompts)
    return [_row(choice, prompt, sampling) for choice, prompt in zip(choices, by_choice, strict=True)]


def _prompts(given: Any) -> list[Any]:
    """Return the prompts of a request, each as text or token ids. A request can have one prompt or several."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        return given
    raise NotOfFormat(f"the prompt of its request is {str(given)[:60]}, and must be text or token ids")


def _row(choice: Record, prompt: str | list[int], sampling: Row) -> Row | None:
    logged = choice.get("logprobs") or {}
    tokens, logps = logged.get("tokens") or [], logged.get("token_logprobs") or []
    ids = choice.get("token_ids") or ids_in(tokens)
    if not choice["text"] and not ids:
        return None
    if isinstance(prompt, list) and not ids:
        raise Unusable("its prompt is token ids, and its choice has no token ids: log token_ids, or the prompt as text")
    prompt_ids = prompt if isinstance(prompt, list) else choice.get("prompt_token_ids")
    if ids and logps and len(ids) != len(logps):
        raise Unusable(f"a choice has {len(ids)} token_ids and {len(logps)} log-probabilities")
    if not (ids and prompt_ids):  # Keep ids only if both the prompt and the completion have them.
        ids = prompt_ids = None
    return {
        "prompt": "" if isinstance(prompt, list) else prompt, "completion": choice["text"], "prompt_ids": prompt_ids,
        "completion_ids": ids, "sampler_logps": (logps or None) if ids else None,
        "finish_reason": finish_reason(choice.get("finish_reason")), **sampling,
    }  # fmt: skip


FORMAT = Format(
    source="OpenAI's legacy completions; vLLM (entrypoints/openai/completion/protocol.py at 002032e)",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=("prompt_ids", "completion_ids", "sampler_logps", "problem_id", "finish_reason", *SAMPLING),
    required=frozenset({"response"}),
    optional=None,
    records=logged_call,
    choices=lambda record: IGNORED._replace(read=("response",)),
    loses="Prompts are plain text: no chat template is applied. Without token_ids (vLLM: return_token_ids), text is "
    "tokenized again, which can give different tokens. A request without a temperature used the default of the server, "
    "which is assumed to be 1.",
)
