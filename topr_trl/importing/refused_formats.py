"""Recognize files of systems that `topr import` does not read yet, and tell users what to do with them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from topr_trl.importing.format import Record

_NOT_YET = "topr import does not read it yet. "
_AS_MESSAGES = (
    _NOT_YET
    + 'Write one JSON object per answer: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", '
    '"content": ...}], "reward": 1}. The messages end with the answer that the reward is for'
)
_AS_ROWS = _NOT_YET + 'Write one JSON object per completion: {"prompt": ..., "completion": ..., "score": 1}'


class Refused(NamedTuple):
    """Kind of file that `topr import` does not read.

    Attributes:
        name (`str`): Description of the file in error messages, such as `an export of ChatGPT or Claude`.
        test (`Callable`): Function that returns whether a record comes from this kind of file.
        advice (`str`): Advice for the user in error messages.
    """

    name: str
    test: Callable[[Record], bool]
    advice: str


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _is_export_of_chats(record: Record) -> bool:
    of_claude = any("sender" in each for each in _objects(record.get("chat_messages")))
    return {"mapping", "current_node"} <= set(record) or of_claude


def _is_body_of_ollama(record: Record) -> bool:
    return isinstance(record.get("done"), bool) and bool({"eval_count", "created_at"} & set(record))


# These tests run before the tests of `FORMATS`, so they must not match a format that `topr import` reads.
REFUSED = (
    Refused("an export of ChatGPT or Claude", _is_export_of_chats, _AS_MESSAGES),
    Refused(
        "responses of Ollama's API without requests, or parts of a stream",
        _is_body_of_ollama,
        'Write one JSON object per answer: {"request": ..., "response": ..., "score": 1}, with the bodies of the '
        "request and of the whole response",
    ),
    Refused(
        "steps with a label each",
        lambda record: isinstance(record.get("completions"), list) and isinstance(record.get("labels"), list),
        f"{_AS_ROWS}. A row is a whole answer with one score",
    ),
)


def refused(record: Any) -> Refused | None:
    """Return the first entry of `REFUSED` that matches a record. Return None if no entry matches.

    Args:
        record (`Any`): Record.
    """
    if not isinstance(record, Mapping):
        return None
    return next((each for each in REFUSED if each.test(dict(record))), None)
