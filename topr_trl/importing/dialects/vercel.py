"""Read requests and answers of the Vercel AI SDK, whose messages have parts such as `tool-call` and `tool-result`."""

from topr_trl.importing.calls import Dialect
from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.message_parts import assistant, parsed_json
from topr_trl.importing.openai_messages import finish_reason, tools_as_json
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages and the tools of a request.

    Raises:
        Unusable: the provider runs a tool, or a part of a message cannot become text, for instance an image.
    """
    tools = [_tool(parsed_json(each)) for each in asked.get("tools") or ()]
    return {"prompt": text_or_messages(asked["messages"]), "tools": tools_as_json(tools)}


def answers(body: Record, asked: Record) -> list[Row]:
    """Return the columns of the answer, or [] for an empty answer.

    Raises:
        Unusable: the finish reason is unknown.
    """
    calls = parsed_json(body.get("toolCalls")) or ()
    text, thinking = body.get("text") or body.get("object"), body.get("reasoning")
    if not (calls or text or thinking):
        return []
    said = [assistant(text, calls, thinking)]
    return [{"completion": said, "finish_reason": finish_reason(body["finishReason"], said)}]


def _tool(given: Record) -> Record:
    if given.get("type", "function") != "function":
        raise Unusable(f"its request has the tool {given.get('name')}, which the provider runs itself")
    found: Record = {name: given[name] for name in ("name", "description") if name in given}
    return {**found, "parameters": given.get("inputSchema", given.get("parameters"))}


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: "finishReason" in body and bool({"text", "toolCalls", "object"} & set(body)),
    prompt=prompt,
    answers=answers,
)
