"""Find the branch of a chat that ends with a given message. A chat is a tree, because users edit messages."""

from collections.abc import Callable, Mapping
from typing import Any

from topr_trl.importing.format import NotOfFormat, Record


def branch(
    messages: Mapping[str, Record], last: Any, parent: str, missing: Callable[[Any], NotOfFormat] | None = None
) -> list[Record]:
    """Return the messages from the start of a chat to a given message.

    Args:
        messages (`Mapping[str, Record]`): All messages of the chat by their ids.
        last (`Any`): Id of the last message of the branch.
        parent (`str`): Field of a message with the id of the message before it.
        missing (`Callable`, *optional*): Function that returns the error for the id of a message that is not there.

    Raises:
        NotOfFormat: a message of the branch is missing, or the branch has a cycle.
    """
    found: list[Record] = []
    while last and last != _NO_PARENT:
        if missing is not None and last not in messages:
            raise missing(last)
        if last not in messages or len(found) == len(messages):
            raise NotOfFormat(f"its message {last} is not in the chat, or is its own {parent}: export the chat again")
        found.append(messages[last])
        last = messages[last].get(parent)
    return found[::-1]


_NO_PARENT = "00000000-0000-0000-0000-000000000000"  # id in the parent field of LibreChat's first messages
