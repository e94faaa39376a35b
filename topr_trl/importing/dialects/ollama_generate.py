"""Read logs of Ollama's `/api/generate`."""

from topr_trl.importing.calls import Dialect, field_of, format_of_calls
from topr_trl.importing.content_blocks import answer_of
from topr_trl.importing.dialects.ollama import LOSES, check_is_whole, settings_of
from topr_trl.importing.format import LeftOut, Record, Unusable
from topr_trl.importing.message_parts import other
from topr_trl.importing.openai_messages import finish_reason
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the prompt, the template settings and the sampling settings of a request.

    The server applies the chat template, so the prompt becomes messages. With `raw`, the prompt remains text.

    Raises:
        NotOfFormat: the request has no prompt.
        Unusable: the request has an image, a suffix, its own template, or the tokens of earlier turns.
    """
    if others := [name for name in ("images", "suffix", "template", "context") if asked.get(name)]:
        raise Unusable(f"its request has {', '.join(others)}, so its prompt and its system prompt are not all it read")
    text = field_of(asked, "prompt", "request")
    start = [other("system", asked["system"])] if asked.get("system") else []
    return {"prompt": text if asked.get("raw") else [*start, other("user", text)], **settings_of(asked)}


def answers(body: Record, asked: Record) -> list[Row | LeftOut | None]:
    """Return a list with the columns of the answer, or `[None]` if the answer is empty.

    Raises:
        Unusable: the response is a part of a stream, or the finish reason is unknown.
    """
    check_is_whole(body)
    reason = finish_reason(body.get("done_reason"))
    if asked.get("raw"):
        return [{"completion": body["response"], "finish_reason": reason} if body["response"] else None]
    return [answer_of({"content": body["response"], "thinking": body.get("thinking")}, reason)]


DIALECT = Dialect(
    asks="prompt",
    is_answer=lambda body: isinstance(body.get("response"), str) and isinstance(body.get("done"), bool),
    prompt=prompt,
    answers=answers,
)
FORMAT = format_of_calls(DIALECT, source="Ollama's API, /api/generate (ollama-python, _types.py)", loses=LOSES)
