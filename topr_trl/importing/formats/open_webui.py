"""Read exports of Open WebUI: feedback, and chats with ratings. Only rated answers are learned."""

import html
import re
from collections.abc import Iterator
from typing import Any

from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.dialects.openai_responses import messages_of
from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, Unusable
from topr_trl.importing.joined_records import LINES, joined_by
from topr_trl.importing.message_parts import assistant, other, text_of
from topr_trl.importing.message_trees import branch
from topr_trl.importing.openai_messages import finish_reason_of
from topr_trl.importing.rated_turns import RATED
from topr_trl.importing.record_fields import inner_value, value_at
from topr_trl.importing.row_table import Row

_THINKING = re.compile(
    r'<details type="reasoning"[^>]*>\s*<summary>[^<]*</summary>\n(?P<text>.*?)\n</details>\n?', re.DOTALL
)
_SHOWN = re.compile(r'<details type="(?P<kind>\w+)"')


def ratings(record: Record) -> Iterator[Record]:
    """Yield a feedback record for each rated answer of a chat. Yield feedback unchanged.

    For a chat without a rating, yield one record without a rating.

    Args:
        record (`Record`): Feedback, the joined feedback on a chat, or a chat.
    """
    if LINES in record:
        yield from record[LINES]
        return
    if not _is_chat(record):
        yield record
        return
    nodes = _nodes(record["chat"])
    rated = [each for each in nodes.values() if inner_value(each, "annotation", "rating") is not None]
    for each in rated or [{}]:
        yield {"data": each.get("annotation"), "meta": {"message_id": each.get("id")}, "snapshot": {"chat": record}}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the row of a rated answer. The messages before it in its branch of the chat are the prompt.

    Return `[LeftOut.UNGRADED]` for a chat without a rating, and `[LeftOut.FAILED]` for a failed answer.

    Raises:
        NotOfFormat: a message of the branch is missing, the branch has a cycle, or the rated message is not from the
            model.
        Unusable: the export lacks the chat, or text that the model read or wrote, the rated answer was edited, a part
            has no text, or the finish reason is unknown.
    """
    if (chat := inner_value(record, "snapshot", "chat", "chat")) is None:
        raise Unusable("it has no snapshot of the chat. Export it in Admin Panel, Evaluations, Feedback")
    if not (name := record["meta"].get("message_id")):
        return [LeftOut.UNGRADED]
    *earlier, answer = branch(_nodes(chat), name, "parentId")
    if answer["role"] != "assistant":
        raise NotOfFormat(f"its message {name} is rated, and is from {answer['role']}, not the assistant")
    if answer.get("error"):
        return [LeftOut.FAILED]
    if answer.get("originalContent") is not None:
        raise Unusable("a user or a filter edited the rated answer, so the rating may be for either text")
    settings = chat.get("params") or {}
    system = settings.get("system") or chat.get("system")
    start = [other("system", system)] if system else []
    reason = "length" if answer.get("done") is False else finish_reason_of({name: answer.get(name) for name in _USAGE})
    return [{
        "prompt": [*start, *(turn for each in earlier for turn in _turns(each))], "completion": _turns(answer),
        "finish_reason": reason, "model": answer.get("selectedModelId") or answer.get("model"),
        **{name: settings.get(name) for name in SAMPLING}, RATED: True,
    }]  # fmt: skip


_USAGE = ("info", "usage")  # fields that may have the server's finish reason


def _nodes(chat: Record) -> dict[str, Record]:
    """Return the messages of a chat by their ids."""
    listed = {each["id"]: each for each in chat.get("messages") or ()}
    return {**listed, **(inner_value(chat, "history", "messages") or {})}


def _turns(given: Record) -> list[Row]:
    """Convert a message of a chat to messages of a row. An answer with tool calls becomes several messages.

    Raises:
        Unusable: the model read a file, a summary, or a source that no tool returned, the text that the model wrote is
            not known, or a part has no text.
    """
    items = [item for item in given.get("output") or () if item.get("type") != "message" or text_of(item["content"])]
    has_results = any(item.get("type") == "function_call_output" for item in items)
    sources = given.get("sources") or given.get("citations")
    if given.get("files") or given.get("contextSummary") or (sources and not has_results):
        raise Unusable("a message has files, sources or a summary, and the export lacks the text that the model read")
    if given["role"] != "assistant":
        return [other(given["role"], given["content"])]
    if any(item.get("type") == "message" and item.get("start_tag") for item in items):
        raise Unusable("a tag around the model's text is not in the export")
    if items:
        return messages_of(items)
    shown = given.get("content") or ""
    thinking = "\n".join(_unquoted(found["text"]) for found in _THINKING.finditer(shown))
    text = _THINKING.sub("", shown)
    if left := _SHOWN.search(text):
        raise Unusable(f"a message shows {left['kind']} as HTML, so the text that the model wrote is not known")
    return [assistant(text.lstrip("\n") if thinking else text, thinking=thinking)]


def _unquoted(shown: str) -> str:
    """Return the text of thinking from its HTML, in which each line starts with `> `."""
    return "\n".join(html.unescape(line).removeprefix("> ") for line in shown.splitlines())


def _is_chat(record: Record) -> bool:
    return inner_value(record, "chat", "history", "messages") is not None


def _chat_of(place: str, record: Record) -> Any:
    """Return the id of the chat to which feedback belongs. Return None for a whole chat, or if the id is missing."""
    return None if _is_chat(record) else value_at(record, "meta.chat_id", "snapshot.chat.id")


def _is_export(record: Record) -> bool:
    is_feedback = record.get("type") == "rating" and inner_value(record, "meta", "message_id") is not None
    return is_feedback or inner_value(record, "snapshot", "chat", "chat") is not None or _is_chat(record)


FORMAT = Format(
    source="Open WebUI (backend/open_webui/models/feedbacks.py; Messages/ResponseMessage.svelte, feedbackHandler)",
    test=_is_export,
    rows=rows,
    rewards=lambda record: {"data.rating": inner_value(record, "data", "rating")},  # 1, -1 or None
    columns=("problem_id", "finish_reason", "model", *SAMPLING),
    required=frozenset({"meta"}),
    records=ratings,
    join=joined_by("conversation", _chat_of),
    rates_turns=True,
    loses="Only rated answers are learned. The reward is the thumb. For the rating from 1 to 10, set --reward_fields "
    "data.details.rating. Exports lack the tools, and the system prompts and settings of models and users.",
)
