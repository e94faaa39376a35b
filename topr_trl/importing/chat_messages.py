"""Read chat conversations: records such as `{"messages": [...], "tools": [...]}`."""

from topr_trl.importing.format import Format, NotOfFormat, Record
from topr_trl.importing.openai_messages import message, row_of_run, template_columns
from topr_trl.importing.row_table import Row

# Fields that can hold the model's answer to the messages.
_ANSWERS = ("response", "responses", "choices", "completion", "output")


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no assistant turn to learn from.

    Raises:
        NotOfFormat: another field, such as `response`, has the model's answer, so `messages` is only the request. Or a
            message has no role.
        Unusable: a message has an image, a part without text, or a weight other than 0 and 1.
    """
    messages = list(map(message, record["messages"]))
    beside = [name for name in _ANSWERS if record.get(name)]
    is_asked = bool(messages) and messages[-1]["role"] != "assistant"
    # An object in `response` is an API's response, even if the request ends with an assistant turn.
    if beside and (is_asked or isinstance(record.get("response"), dict)):
        raise NotOfFormat(
            f"it has {', '.join(beside)} in addition to its messages, so these messages are the request. Use --format "
            "openai, which reads records with a request and its response, such as LiteLLM's logs"
        )
    return row_of_run(messages, **template_columns(record))


FORMAT = Format(
    source="lists of messages in OpenAI's format",
    suffix=".jsonl",
    rows=rows,
    rewards=None,
    columns=("problem_id", "tools", "chat_template_kwargs"),
    required=frozenset({"messages"}),
    optional=None,  # Logs have further fields, such as times and users.
    loses="The trainer learns from assistant turns, except turns with weight 0. User and tool turns "
    "between them are context.",
)
