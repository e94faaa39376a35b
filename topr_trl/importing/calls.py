"""Read logged calls of a model. An envelope gives the place of a call in a record. A dialect reads the call itself."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.field_names import Kind, kind_of
from topr_trl.importing.format import IGNORED, Choices, Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import check_roles, with_role
from topr_trl.importing.record_fields import inner_value, raw_value_at, value_at
from topr_trl.importing.row_table import Row
from topr_trl.importing.streamed_answers import whole_answer

COLUMNS_OF_CALLS = (
    "prompt_ids", "completion_ids", "sampler_logps", "problem_id", "finish_reason", "tools", "chat_template_kwargs",
    "model", *SAMPLING,
)  # fmt: skip
_ID_PREFIX = "token_id:"  # vLLM logs a token as `token_id:42` with `return_tokens_as_token_ids`


class Dialect(NamedTuple):
    """Way in which an API or a tool writes requests and responses.

    Attributes:
        asks (`str`): Field that a request must have, such as `messages`.
        is_answer (`Callable`): Function that returns whether an object is a response in this dialect.
        prompt (`Callable`): Function that takes a request and returns columns of its rows, such as `prompt`.
        answers (`Callable`): Function that takes a response and its request, and returns the columns of each answer,
            such as `completion` and `finish_reason`. In place of columns, the list has None for an empty answer, or a
            `LeftOut` for another reason to leave the answer out.
    """

    asks: str
    is_answer: Callable[[Record], bool]
    prompt: Callable[[Record], Row]
    answers: Callable[[Record, Record], Sequence[Row | LeftOut | None]]


@dataclass(frozen=True)
class Envelope:
    """Paths of the parts of a call in a record, such as `attributes.input`. The first path with a value counts.

    Attributes:
        request (`tuple[str, ...]`): Paths of the request: an object, a list of messages, or text.
        response (`tuple[str, ...]`): Paths of the response: an object, one or more messages, or text.
        dialects (`tuple[Dialect, ...]`): Dialects to try in order.
        settings (`tuple[str, ...]`, defaults to `()`): Paths of objects with more fields of the request. All of these
            objects are read, and values of other types are ignored.
        tools (`tuple[str, ...]`, defaults to `()`): Paths of the tools outside of the request.
        system (`tuple[str, ...]`, defaults to `()`): Paths of the system prompt outside of the request.
        reasons (`tuple[str, ...]`, defaults to `()`): Paths of the finish reason, or of a list with one reason per
            answer.
        left_out (`Callable`, *optional*): Function that returns the reason why a record gives no row, or None.
        has_several (`bool`, defaults to `False`): Whether a record may have several answers.
    """

    request: tuple[str, ...]
    response: tuple[str, ...]
    dialects: tuple[Dialect, ...]
    settings: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    left_out: Callable[[Record], LeftOut | None] = lambda record: None
    has_several: bool = False

    def rows(self, record: Record) -> list[Row | LeftOut | None]:
        """Return a row for each answer of a record. Return [] if the response is missing or empty.

        In place of a row, the list has None for an empty answer, or the reason to leave the answer out.

        Raises:
            NotOfFormat: the request is missing, the call lacks a field that its dialect needs, or `left_out` raises
                this error.
            Unusable: the answer is in none of `dialects`, there are several answers and `has_several` is False, a role
                is unknown, or the dialect or `left_out` cannot use the call.
        """
        if (reason := self.left_out(record)) is not None:
            return [reason]
        if not (answer := value_at(record, *self.response)):
            return []
        asked = self._asked(record)
        dialect, body = self._written_in(answer, asked, self._text_in(record))
        found = rows_of_call(dialect, asked, self._with_reasons(record, body))
        for row in found:
            if isinstance(row, Mapping):  # An application can log messages with any role.
                check_roles(row["prompt"])
        if len(found) > 1 and not self.has_several:
            raise Unusable(f"it has {len(found)} choices in one record, so which of them was used is not known")
        return found

    def _asked(self, record: Record) -> Record:
        """Return the fields of the request. If `request` has no value, the record itself can have these fields."""
        given = value_at(record, *self.request)
        if given is None and any(each.asks in record for each in self.dialects):
            given = record
        if given is None:
            is_of_batch, names = {"custom_id", "key"} & set(record), ", ".join(record)
            more = ": set --requests to the input file of the batch" if is_of_batch else f"; it has {names}"
            raise NotOfFormat(f"it has no request{more}")
        if not isinstance(given, Mapping):
            asked = {"messages" if isinstance(given, list) else "prompt": given}
            if self._text_in(record) is None:  # JSON that a model wrote is not read as a response to `input`.
                asked["input"] = given
            given = asked
        beside = {"tools": value_at(record, *self.tools), "instructions": value_at(record, *self.system)}
        parts = [each for path in self.settings if isinstance(each := value_at(record, path), Mapping)]
        parts.append(given["body"] if isinstance(given.get("body"), Mapping) else given)
        parts.append({name: value for name, value in beside.items() if value is not None})
        found: Record = {}
        for part in parts:  # A later value replaces an earlier value, unless the later value is None or [].
            found |= {name: value for name, value in part.items() if name not in found or value not in (None, [])}
        return found

    def _text_in(self, record: Record) -> str | None:
        """Return the answer if it is text, which can be JSON that the model wrote.

        Return None if the request is JSON text, because the JSON text of the answer then is an exported object, too.
        """
        said, asked = (raw_value_at(record, *paths) for paths in (self.response, self.request))
        is_exported = isinstance(asked, str) and not isinstance(parsed_json(asked), str)
        return said if isinstance(said, str) and not is_exported else None

    def _written_in(self, answer: Any, asked: Record, text: str | None) -> tuple[Dialect, Record]:
        """Return the dialect of a call, and the answer as a response in this dialect. `text` is the unparsed answer."""
        answer, is_chat = _body_of(answer), "messages" in asked
        if text is None and _are_items(answer):
            answer = {"output": answer if isinstance(answer, list) else [answer]}
        choices = _as_choices(answer, is_chat, text is not None)
        if choices is None and text is not None and not isinstance(inner_value(answer, "choices"), list):
            choices = _as_choices(text, is_chat)
        bodies = [dict(body) for body in (answer, choices) if isinstance(body, Mapping)]
        for body in bodies:
            for dialect in self.dialects:
                if dialect.asks in asked and dialect.is_answer(body):
                    return dialect, body
        if len(self.dialects) == 1 and bodies:
            return self.dialects[0], bodies[-1]  # The dialect raises an error that names the missing field.
        raise Unusable(
            f"its request has {', '.join(asked)} and its answer is {str(answer)[:60]}. They must be messages or text, "
            "and one assistant message, text or a response"
        )

    def _with_reasons(self, record: Record, body: Record) -> Record:
        """Return a response with the finish reasons at the paths `reasons`. The response's own reasons stay."""
        reasons = value_at(record, *self.reasons)
        if not reasons or not isinstance(body.get("choices"), list):
            return body
        each = reasons if isinstance(reasons, list) else [reasons]
        pairs = zip(body["choices"], [*each, *[None] * len(body["choices"])], strict=False)
        choices = [{**choice, "finish_reason": choice.get("finish_reason") or reason} for choice, reason in pairs]
        return {**body, "choices": choices}


def rows_of_call(dialect: Dialect, asked: Record, body: Record) -> list[Row | LeftOut | None]:
    """Return a row for each answer in a response. See `Dialect.answers` for None and `LeftOut`.

    Args:
        dialect (`Dialect`): Dialect of the request and the response.
        asked (`Record`): Request.
        body (`Record`): Response.
    """
    model = asked.get("model") or value_at(body, "model", "modelVersion", "model_version")
    # OpenAI's and Anthropic's clients add the fields of `extra_body` to the request.
    sampling = sampling_of({**asked, **(asked.get("extra_body") or {})})
    shared = {"model": model, **sampling, **dialect.prompt(asked)}
    found = dialect.answers(body, asked)
    return [{**shared, **each} if isinstance(each, Mapping) else each for each in found]


def sampling_of(settings: Record) -> Row:
    """Return the columns of the sampling settings, such as `top_p`. Some APIs write such names as `topP`.

    Args:
        settings (`Record`): Settings of a request.
    """
    return {name: _number(settings.get(name, settings.get(_CAMEL_CASE[name]))) for name in SAMPLING}


_CAMEL_CASE = {name: re.sub(r"_(\w)", lambda found: found[1].upper(), name) for name in SAMPLING}


def _number(value: Any) -> Any:
    """Parse a number that was sent or exported as text, because servers accept text.

    Empty text becomes None. Text that is not JSON, and values of other types, are returned unchanged.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value or "null")
    return value


def field_of(body: Record, name: str, what: str) -> Any:
    """Return a field of a request or a response.

    Args:
        body (`Record`): Request or response.
        name (`str`): Name of the field.
        what (`str`): `"request"` or `"response"`, for error messages.

    Raises:
        NotOfFormat: the field is missing.
    """
    if name not in body:
        raise NotOfFormat(f"its {what} has no {name}; it has {', '.join(sorted(body))}")
    return body[name]


def first_choice(body: Any, name: str) -> Any:
    """Return a field of the first choice of a response, such as `message`. Return None without such a choice or field.

    Args:
        body (`Any`): Response.
        name (`str`): Name of the field.
    """
    choices = inner_value(body, "choices")
    return inner_value(choices[0], name) if isinstance(choices, list) and choices else None


def _as_choices(answer: Any, is_chat: bool, may_be_text: bool = False) -> Record | None:
    """Wrap an answer in a response with choices. Return None if the argument is not an answer.

    Args:
        answer (`Any`): Text, a message, an object with a message, or a list of these.
        is_chat (`bool`): Whether the request has messages, so that a text is the content of a message.
        may_be_text (`bool`, defaults to `False`): Whether the answer is parsed text, so that the model may have written
            it as JSON. Lists of texts, and objects with more fields than a message and without a role are then JSON.
    """
    choices: list[Record] = []
    for each in answer if isinstance(answer, list) else [answer]:
        if may_be_text and _is_json_of_model(each, answer):
            return None
        if isinstance(each, str):
            choices.append({"message": {"role": "assistant", "content": each}} if is_chat else {"text": each})
        elif isinstance(inner_value(each, "message"), Mapping):
            choices.append(dict(each))
        elif isinstance(each, Mapping) and _OF_MESSAGE & set(each):
            choices.append({"message": {"role": "assistant", **each}, "finish_reason": each.get("finish_reason")})
        else:
            return None
    return {"choices": choices}


_OF_MESSAGE = {"content", "tool_calls", "parts", "kwargs", "data"}  # a message has at least one of these fields


def _are_items(answer: Any) -> bool:
    """Return whether an answer is an item, or a list of items, of OpenAI's Responses API."""
    for each in answer if isinstance(answer, list) else [answer]:
        kind, parts = inner_value(each, "type"), inner_value(each, "content")
        if kind in ("reasoning", "function_call"):
            return True
        if kind == "message" and isinstance(parts, list):
            return any(inner_value(part, "type") == "output_text" for part in parts)
    return False


def _is_json_of_model(each: Any, answer: Any) -> bool:
    if not isinstance(each, Mapping):
        return isinstance(answer, list)
    given = with_role(each)
    return not {"role", "message"} & set(given) and not set(given) <= {*_OF_MESSAGE, "finish_reason", "stop_reason"}


def ids_in(tokens: Sequence[str]) -> list[int] | None:
    """Return the ids of logged tokens. Return None if there are no tokens, or if a token was logged as text.

    Args:
        tokens (`Sequence[str]`): Tokens that were logged with the log-probabilities.
    """
    if not tokens or not all(token.startswith(_ID_PREFIX) for token in tokens):
        return None
    return [int(token.removeprefix(_ID_PREFIX)) for token in tokens]


def check_lengths(ids: Sequence[int] | None, logps: Sequence[float] | None) -> None:
    """Check that a choice with token ids and log-probabilities has one log-probability per token.

    Raises:
        Unusable: the numbers of token ids and log-probabilities differ.
    """
    if ids and logps and len(ids) != len(logps):
        raise Unusable(f"a choice has {len(ids)} token_ids and {len(logps)} log-probabilities")


def format_of_calls(dialect: Dialect, source: str, loses: str) -> Format:
    """Return the format of logged calls in a dialect: batch files, and logs of requests with responses.

    Args:
        dialect (`Dialect`): Dialect.
        source (`str`): See `Format`.
        loses (`str`): See `Format`.
    """
    envelope = Envelope(
        request=("request",), response=("response",), dialects=(dialect,), has_several=True,
        # LiteLLM logs the messages next to the response, and the other fields of the request in `model_parameters`.
        settings=("model_parameters",),
        left_out=lambda record: LeftOut.FAILED if is_failed(record) else None,
    )  # fmt: skip
    return Format(
        source=source, rows=envelope.rows, columns=COLUMNS_OF_CALLS,
        required=frozenset({"response"}), rank=2, loses=loses,
        # A failed line of a batch can lack a response.
        records=lambda record: [_with_call({"response": None, **record} if record.get("error") else record, dialect)],
        test=lambda record: is_answer(dialect, _body_of(_with_call(record, dialect).get("response"))),
        choices=lambda record: IGNORED._replace(read=("response",)),
    )  # fmt: skip


def format_of_exports(envelope: Envelope, read: Sequence[str], **fields: Any) -> Format:
    """Return the format of a tool that exports model calls.

    Args:
        envelope (`Envelope`): Places of the call in a record.
        read (`Sequence[str]`): Fields that count as completely read. See `Choices`.
        **fields (`Any`): Other fields of the format.
    """
    choices = IGNORED._replace(read=tuple(read))
    return Format(rows=envelope.rows, columns=COLUMNS_OF_CALLS, choices=lambda record: choices, **fields)


def not_a_call(ratings: Mapping[str, Any], id_field: str) -> LeftOut:
    """Return the reason to leave out a span that is not a model call.

    Args:
        ratings (`Mapping[str, Any]`): Ratings of the span, by name.
        id_field (`str`): Field with the id of the trace in the records of model calls, for the error message.

    Raises:
        Unusable: the span has ratings, which would be lost.
    """
    if ratings:
        raise Unusable(
            f"it is not a model call, and has ratings ({', '.join(ratings)}). To give them to the calls of its trace, "
            f"write them to a file for --rewards, and set --id_field {id_field}"
        )
    return LeftOut.OTHER


def choices_of_request(record: Record, *path: str) -> Choices:
    """Return the `Choices` of a record, so that only the request is checked for unread parts of the prompt.

    Args:
        record (`Record`): Record.
        *path (`str`): Names of the fields with the request, from outer to inner.
    """
    others, start, inner = list[str](), "", parsed_json(record)
    for name in path:
        others += [f"{start}{other}" for other in inner if other != name]
        start, inner = f"{start}{name}.", parsed_json(inner.get(name))
        inner = inner if isinstance(inner, Mapping) else {}
    others += [f"{start}{name}" for name in inner if name in _READ_OF_A_REQUEST or kind_of((name,)) is not Kind.ASKED]
    return IGNORED._replace(read=tuple(others))


# Fields of a request that dialects read, and objects with settings.
_READ_OF_A_REQUEST = ("messages", "input", "prompt", "contents", "tools", "text", "options", "web_search_options")


def is_failed(record: Record) -> bool:
    """Return whether the call in a record has failed, or has no response.

    Raises:
        NotOfFormat: the response is neither empty nor an object.
    """
    response = record["response"]
    if response and not isinstance(response, Mapping):
        raise NotOfFormat(f"its response is {str(response)[:60]!r}, and must be the object that the API returned")
    is_failed = record.get("error") or record.get("status") == "failure" or not response or response.get("error")
    return bool(is_failed) or (response.get("status_code") or 200) != 200


def _body_of(response: Any) -> Any:
    """Return the body of a response: the object in its field `body`, as in a line of a batch, or the response itself.

    The events of a logged stream are joined.
    """
    inner = parsed_json(whole_answer(inner_value(response, "body")))
    return inner if isinstance(inner, Mapping) else whole_answer(response)


def _with_call(record: Record, dialect: Dialect) -> Record:
    """Return a record with its call in the fields `request` and `response`.

    Logging tools name these two fields differently (`request_body`, `inputs`, `reply`), and databases export them as
    JSON text. The dialect recognizes both. A field that already has the name is preferred. If several other fields
    match, no field is renamed.
    """
    parsed = {name: parsed_json(whole_answer(value)) for name, value in record.items()}
    objects = {name: value for name, value in parsed.items() if isinstance(value, Mapping)}
    answers = [name for name, value in objects.items() if is_answer(dialect, _body_of(value))]
    asked = [
        name
        for name, value in objects.items()
        if name not in answers and isinstance(inner_value(value.get("body", value), dialect.asks), str | list)
    ]
    response = "response" if record.get("response") else answers[0] if len(answers) == 1 else None
    request = "request" if record.get("request") else asked[0] if len(asked) == 1 else None
    names = {"response": response, "request": request} if response in answers and request in asked else {}
    named: Record = {name: objects[name] for name in ("response", "request") if name in {*answers, *asked}}
    return {**record, **named, **{name: objects[found] for name, found in names.items() if found}}


def is_answer(dialect: Dialect, body: Any) -> bool:
    """Return whether a value is a response in a dialect."""
    return isinstance(body, Mapping) and dialect.is_answer(dict(body))
