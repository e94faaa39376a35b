"""Read conversations of LibreChat, exported as JSON. Only answers with a thumb are learned."""

from collections.abc import Iterator, Mapping

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.dialects.openai_responses import messages_of
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.message_parts import other
from topr_trl.importing.message_trees import branch
from topr_trl.importing.openai_messages import finish_reason
from topr_trl.importing.rated_turns import RATED
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

_PARENT = "parentMessageId"


def ratings(record: Record) -> Iterator[Record]:
    """Yield a record for each rated message of a conversation, with the message's id and feedback.

    For a conversation without a rating, yield one record without feedback.

    Args:
        record (`Record`): Conversation. Its messages are a list, or a tree with `children`.
    """
    listed = _flat(record.get("messagesTree") or record["messages"], None)
    if not any(each.get(_PARENT) for each in listed):  # In the export of a single branch, messages have no parents.
        parents = [None, *(each["messageId"] for each in listed[:-1])]
        listed = [{**each, _PARENT: parent} for each, parent in zip(listed, parents, strict=True)]
    messages = {each["messageId"]: each for each in listed}
    rated = [each for each in listed if inner_value(each, "feedback", "rating")]
    for each in rated or [{}]:
        yield {**record, "messages": messages, "rated": each.get("messageId"), "feedback": each.get("feedback")}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the row of a rated answer. The messages before it in its branch of the conversation are the prompt.

    Return `[LeftOut.UNGRADED]` for a conversation without a rating, and `[LeftOut.FAILED]` for a failed answer.

    Raises:
        NotOfFormat: a message of the branch is missing, the branch has a cycle, or a message of the user is rated.
        Unusable: the options have several system prompts, the export lacks text that the model read or wrote, a part
            has no text, or the finish reason is unknown.
    """
    if record["rated"] is None:
        return [LeftOut.UNGRADED]
    *earlier, answer = branch(record["messages"], record["rated"], _PARENT)
    if answer.get("isCreatedByUser"):
        raise NotOfFormat(f"its message {answer['messageId']} is rated, and is from the user")
    if answer.get("error"):
        return [LeftOut.FAILED]
    options = record.get("options") or {}
    given = [name for name in _SYSTEM if options.get(name)]
    if len(given) > 1:
        raise Unusable(f"its options have {' and '.join(given)}")
    start = [other("system", options[given[0]])] if given else []
    return [{
        "prompt": [*start, *(turn for each in earlier for turn in _turns(each))], "completion": _turns(answer),
        "finish_reason": "length" if answer.get("unfinished") else finish_reason(answer.get("finish_reason")),
        "model": answer.get("model") or options.get("model"), **{name: options.get(name) for name in SAMPLING},
        RATED: True,
    }]  # fmt: skip


_SYSTEM = ("promptPrefix", "system", "instructions")  # options with the system prompt


def _flat(messages: list[Record], parent: str | None) -> list[Record]:
    """Return the messages of a tree as a list. Messages below the root get the id of their parent, if they lack it."""
    found = []
    for each in messages:
        own = {name: value for name, value in each.items() if name != "children"}
        found += [{_PARENT: parent, **own} if parent else own, *_flat(each.get("children") or [], each["messageId"])]
    return found


def _turns(given: Record) -> list[Row]:
    """Return a message of the export as messages of a row. An answer with tool calls becomes several messages.

    Raises:
        Unusable: the model read a file, a quote or a summary, the text of an answer contains thinking, or a part of the
            answer cannot be used (see `_items`).
    """
    if missing := [name for name in ("files", "quotes", "summary") if given.get(name)]:
        raise Unusable(f"a message has {missing[0]}, and the export lacks the text that the model read instead")
    if given.get("isCreatedByUser"):
        return [other("user", given["text"])]
    if str(given.get("text")).startswith(":::thinking"):
        raise Unusable("a message has thinking in its text (:::thinking), so the text of the model is not known")
    parts = given.get("content") or [{"type": "text", "text": given["text"]}]
    return messages_of(item for part in parts for item in _items(part))


def _items(part: Record) -> Iterator[Record]:
    """Yield a part of an answer as items of the Responses API. An empty text gives no item.

    Raises:
        Unusable: the part is not text, thinking or a tool call, or the tool call has no name.
    """
    kind = part.get("type")
    value = part.get(str(kind))
    if kind == "text" and (text := inner_value(value, "value") or value):
        yield {"type": "message", "role": "assistant", "content": text}
    elif kind == "think":
        yield {"type": "reasoning", "content": value}
    elif kind == "tool_call" and isinstance(value, Mapping) and "name" in value:
        identifier = value.get("id")
        yield {"type": "function_call", "name": value["name"], "arguments": value["args"], "call_id": identifier}
        yield {"type": "function_call_output", "call_id": identifier, "output": value.get("output")}
    elif kind != "text":
        raise Unusable(f"a message has a part of type {kind}: offline training supports only text")


def _is_conversation(record: Record) -> bool:
    messages = record.get("messagesTree") or record.get("messages")
    return isinstance(messages, list) and any("isCreatedByUser" in each for each in messages if isinstance(each, dict))


FORMAT = Format(
    source="LibreChat (client/src/hooks/Conversations/useExportConversation.ts; data-schemas/src/schema/message.ts)",
    test=_is_conversation,
    rows=rows,
    rewards=lambda record: {"feedback.rating": inner_value(record, "feedback", "rating")},  # thumbsUp or thumbsDown
    columns=("problem_id", "finish_reason", "model", *SAMPLING),
    required=frozenset({"conversationId"}),
    records=ratings,
    rates_turns=True,
    loses="Only answers with a thumb are learned. The system prompt and the temperature are known only if the export "
    "includes the endpoint's options. Exports lack the tools.",
)
