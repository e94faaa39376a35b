"""Read messages of OpenTelemetry's conventions for generative AI, whose content is a list of parts."""

from topr_trl.importing.calls import Dialect, first_choice
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.message_parts import assistant, other, parsed_json, result_text, with_results
from topr_trl.importing.openai_messages import ROLE_NAMES, finish_reason, tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

_RESULT = "tool_call_response"


def prompt(asked: Record) -> Row:
    """Return the messages and the tools of a request.

    Raises:
        Unusable: the provider ran a tool itself, or a part of a message cannot become text, for instance an image.
    """
    messages = [each for given in asked["messages"] for each in _messages(given)]
    if given := asked.get("instructions"):
        each = given if isinstance(given, list) else [given]
        # Microsoft's Agent Framework writes each instruction also as a message.
        if messages[: len(each)] != [other("system", [part]) for part in each]:
            messages = [other("system", given), *messages]
    return {"prompt": messages, "tools": tools_as_json(asked.get("tools"))}


def answers(body: Record, asked: Record) -> list[Row]:
    """Return the columns of each output message.

    Raises:
        Unusable: the provider ran a tool itself, the finish reason is unknown, or a part of a message cannot become
            text, for instance an image.
    """
    found = [(_messages(choice["message"]), choice["finish_reason"]) for choice in body["choices"]]
    return [{"completion": said, "finish_reason": finish_reason(reason, said)} for said, reason in found]


def _messages(given: Record) -> list[Row]:
    """Convert a message to messages of a row. Each tool result becomes a separate message.

    Raises:
        Unusable: the provider ran a tool itself, or a part cannot become text.
    """
    parts = given["parts"]
    if ROLE_NAMES.get(given["role"]) == "assistant":
        if any(part.get("type") == _RESULT for part in parts):
            raise Unusable("an assistant message has the result of a tool that the provider ran itself")
        # OpenLLMetry writes the summaries of reasoning as JSON text.
        parts = [{**part, "content": parsed_json(part["content"])}
                 if part["type"] == "reasoning" and '"summary_text"' in str(part.get("content")) else part
                 for part in parts]  # fmt: skip
        return [assistant(parts, [part for part in parts if part["type"] == "tool_call"])]
    return with_results(
        parts,
        _RESULT,
        lambda part: other("tool", result_text(part.get("response", part.get("result"))), tool_call_id=part.get("id")),
        lambda run: other(given["role"], run),
    ) or [other(given["role"], "")]


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: isinstance(inner_value(first_choice(body, "message"), "parts"), list),
    prompt=prompt,
    answers=answers,
)
