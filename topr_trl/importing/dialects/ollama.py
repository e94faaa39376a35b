"""Read logs of Ollama's `/api/chat`."""

from collections.abc import Mapping

from topr_trl.importing.calls import Dialect, field_of, format_of_calls, sampling_of
from topr_trl.importing.content_blocks import answer_of, prompt_of
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.openai_messages import template_columns
from topr_trl.importing.row_table import Row

LOSES = (
    "A system prompt in the model's Modelfile is not in the log. Text is tokenized again, which can give different "
    "tokens. A request without options used those of the model, often a temperature of 0.8, a top_k of 40 and a top_p "
    "of 0.9: set topr import --temperature."
)


def prompt(asked: Record) -> Row:
    """Return the messages, the tools, the template settings and the sampling settings of a request.

    Raises:
        NotOfFormat: the request has no messages, or a message has no role.
        Unusable: a message has an image, or see `content_blocks.prompt_of`.
    """
    given = field_of(asked, "messages", "request")
    messages = [{**each, "name": each.get("tool_name") or each.get("name")} for each in given]
    return {"prompt": prompt_of(messages, asked.get("instructions")), **settings_of(asked)}


def settings_of(asked: Record) -> Row:
    """Return the tools, the template settings and the sampling settings of a request.

    Args:
        asked (`Record`): Request. Its field `think` is a setting of the chat template.
    """
    think = asked.get("think")
    found: Record = {"reasoning_effort": think} if isinstance(think, str) else {}
    if isinstance(think, bool):
        found["chat_template_kwargs"] = {"enable_thinking": think}
    return {
        **template_columns({"tools": asked.get("tools"), **found}),
        **sampling_of({**asked, **(asked.get("options") or {})}),
    }


def answers(body: Record, asked: Record) -> list[Row | LeftOut | None]:
    """Return a list with the columns of the answer, or `[None]` if the answer is empty.

    Raises:
        Unusable: the response is a part of a stream, the finish reason is unknown, or see `content_blocks.answer_of`.
    """
    check_is_whole(body)
    return [answer_of(body["message"], body.get("done_reason"))]


def check_is_whole(body: Record) -> None:
    """Check that a response is not a part of a stream.

    Raises:
        Unusable: the response is a part of a stream.
    """
    if not body["done"]:
        raise Unusable("its response is a part of a stream (done is false). Write all its parts into one list")


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: isinstance(body.get("message"), Mapping) and isinstance(body.get("done"), bool),
    prompt=prompt,
    answers=answers,
)
FORMAT = format_of_calls(DIALECT, source="Ollama's API, /api/chat (ollama-python, _types.py)", loses=LOSES)
