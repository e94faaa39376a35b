"""Read logs of Bedrock's Converse API."""

from topr_trl.importing.calls import Dialect, field_of, format_of_calls, sampling_of
from topr_trl.importing.content_blocks import answer_of, prompt_of
from topr_trl.importing.format import Record, Unusable
from topr_trl.importing.openai_messages import tools_as_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row


def prompt(asked: Record) -> Row:
    """Return the messages, the tools, the model and the sampling settings of a request.

    Raises:
        NotOfFormat: the request has no messages, or a message has no role.
        Unusable: the provider runs a tool, or a message cannot be used (see `content_blocks.prompt_of`).
    """
    tools = [_function(tool) for tool in inner_value(asked, "toolConfig", "tools") or () if "cachePoint" not in tool]
    settings = {**asked, **(asked.get("additionalModelRequestFields") or {}), **(asked.get("inferenceConfig") or {})}
    messages = prompt_of(field_of(asked, "messages", "request"), asked.get("system") or asked.get("instructions"))
    model = asked.get("modelId") or asked.get("model")
    return {"prompt": messages, "tools": tools_as_json(tools), "model": model, **sampling_of(settings)}


def answers(body: Record, asked: Record) -> list[Row | None]:
    """Return a list with the columns of the answer, or `[None]` if the answer is empty.

    Raises:
        Unusable: the finish reason is unknown, or the answer cannot become a message, for instance because the provider
            ran a tool itself (see `content_blocks.messages_of`).
    """
    return [answer_of(body["output"]["message"], body.get("stopReason"))]


def _function(tool: Record) -> Record:
    if "toolSpec" not in tool:
        raise Unusable(f"its request has the tool {', '.join(tool)}, which the provider runs itself")
    spec = tool["toolSpec"]
    named = {name: spec[name] for name in ("name", "description") if spec.get(name)}
    return {**named, "parameters": spec["inputSchema"]["json"]}


DIALECT = Dialect(
    asks="messages",
    is_answer=lambda body: isinstance(inner_value(body, "output", "message", "content"), list),
    prompt=prompt,
    answers=answers,
)
FORMAT = format_of_calls(
    DIALECT,
    source="Bedrock's Converse API (API reference of the Bedrock runtime, Converse)",
    loses="Thinking can be hidden. Text is tokenized again, which can give different tokens. A request without a "
    "temperature used the default of the model, which is assumed to be 1.",
)
