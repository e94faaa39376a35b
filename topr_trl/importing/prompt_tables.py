"""Read tables with a prompt, a completion, and a score or label per row: CSV, TSV, JSON lines or parquet."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from topr_trl.importing.format import Format, NotOfFormat, Record, Unusable
from topr_trl.importing.openai_messages import finish_reason, text_or_messages
from topr_trl.importing.row_table import Row

PROMPTS = ("prompt", "question", "instruction", "input", "query", "user_message", "user_input", "human", "problem",
           "message")  # fmt: skip
COMPLETIONS = ("completion", "response", "answer", "output", "assistant", "assistant_message", "bot", "bot_response",
               "model_output", "reply", "generation", "ai_response")  # fmt: skip
REWARDS = ("reward", "score", "rating", "label", "feedback", "thumbs", "thumb", "vote", "stars", "user_rating",
           "user_feedback", "rated", "like", "liked", "helpful")  # fmt: skip
_SYSTEM = ("system", "system_prompt")
ROLES = ("system", "developer", "user", "assistant", "tool")
# Text with a list of objects that have roles holds messages. Other lists, such as an extracted table, remain text.
_OBJECTS, _ROLE = re.compile(r"\s*\[\s*\{\s*['\"]"), re.compile(r"['\"]role['\"]\s*:")


def column_of(record: Mapping[str, Any], names: Sequence[str], what: str, remedy: str) -> str:
    """Return the name of the column with the prompt or the completion.

    An empty column is ignored if another column has a value. If all columns are empty, return the first one. If several
    columns have a value, prefer the column named `names[0]`.

    Args:
        record (`Mapping[str, Any]`): Record.
        names (`Sequence[str]`): Names to look for, as `normalized` returns them.
        what (`str`): Content of the column, for error messages.
        remedy (`str`): Remedy for a missing or ambiguous column, for error messages.

    Raises:
        NotOfFormat: no column has one of the names, or several columns have a value and none is preferred.
    """
    found = [name for name in record if normalized(name) in names]
    found = [name for name in found if record[name] not in (None, "")] or found[:1]
    exact = [name for name in found if normalized(name) == names[0]]
    if len(exact) == 1 or len(found) == 1:
        return (exact or found)[0]
    which = f"{', '.join(found)} may all hold the {what}" if found else f"it has no column for the {what}"
    raise NotOfFormat(f"{which}; it has {', '.join(map(str, record))}. {remedy}")


def normalized(name: Any) -> str:
    """Return a column name in lower case, with underscores instead of spaces and punctuation."""
    return re.sub(r"[^a-z0-9]+", "_", str(name).strip().lower()).strip("_")


def has_columns(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a column for the prompt and a column for the completion.

    Columns with objects are ignored.
    """
    names = {normalized(name) for name, value in record.items() if not isinstance(value, Mapping)}
    return bool(names & set(PROMPTS) and names & set(COMPLETIONS))


def plain(value: Any, name: str) -> Any:
    """Return text, messages or None. Convert a number to text, and parse text that looks like a JSON list of messages.

    Args:
        value (`Any`): Text, messages, a number, or None.
        name (`str`): Name of the column, for error messages.

    Raises:
        NotOfFormat: the text looks like messages and is not JSON, the value has another type, or a message has no role.
        Unusable: a message has an unknown role, or cannot become text (see `openai_messages.message`).
    """
    if isinstance(value, str) and _OBJECTS.match(value) and _ROLE.search(value):
        try:
            objects = json.loads(value)
        except (ValueError, RecursionError):
            raise NotOfFormat(f"its {name} looks like messages, and is not valid JSON ({value[:40]!r})") from None
        if any("role" in each for each in objects if isinstance(each, dict)):
            value = objects
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str | list | None):
        raise NotOfFormat(f"its {name} is {str(value)[:60]}, and must be text or messages")
    found = text_or_messages(value)
    check_roles(found)
    return found


def check_roles(messages: Any) -> None:
    """Check the roles of messages, because some chat templates drop messages with unknown roles.

    Args:
        messages (`Any`): Messages, or text, which is always accepted.

    Raises:
        Unusable: a message has an unknown role.
    """
    for each in messages if isinstance(messages, list) else ():
        if each["role"] not in ROLES:
            raise Unusable(f"a message has the role {each['role']!r}; known roles are {', '.join(ROLES)}")


def rows(record: Record) -> list[Row]:
    """Return one row. Return [] if the prompt or the completion is empty.

    Raises:
        NotOfFormat: the column of the prompt or of the completion is missing or ambiguous, or `plain` cannot read it.
        Unusable: `plain` cannot use a message, or there are two system prompts.
    """
    prompt_name = column_of(record, PROMPTS, "prompt", "Set --prompt_field to the name of the column")
    completion_name = column_of(record, COMPLETIONS, "completion", "Set --completion_field to the name of the column")
    prompt, completion = plain(record[prompt_name], prompt_name), plain(record[completion_name], completion_name)
    if not prompt or not completion:
        return []
    system = next((record[name] for name in record if normalized(name) in _SYSTEM), None)
    if system:
        prompt = with_system(prompt, str(system))
    answer = record.get("answer") if completion_name != "answer" else None
    return [
        {
            "prompt": prompt, "completion": completion, "finish_reason": finish_reason(record.get("finish_reason")),
            "answer": None if answer is None else str(answer),
        }
    ]  # fmt: skip


def with_system(prompt: Any, system: str) -> Any:
    """Return a prompt as messages that start with a system prompt.

    Raises:
        Unusable: the prompt already starts with a system message.
    """
    own = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if own and own[0]["role"] == "system":
        raise Unusable("its prompt starts with a system message, and another column has a system prompt, too")
    return [text_or_messages([{"role": "system", "content": system}])[0], *text_or_messages(own)]  # type: ignore[index, misc]


def rewards(record: Record) -> dict[str, Any]:
    """Return the columns that may hold the reward. If a column is named `reward`, return only this column."""
    found = {name: value for name, value in record.items() if normalized(name) in REWARDS}
    exact = {name: value for name, value in found.items() if normalized(name) == REWARDS[0]}
    return exact or found


FORMAT = Format(
    source="tables with columns such as prompt, completion and rating",
    suffix="",
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "finish_reason", "answer"),
    required=frozenset(),
    optional=None,
    chat=True,
    loses="Most tables hold only text. They lack tool calls, the sampling temperature, and often the system prompt.",
)
