"""Read a request before it is recorded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from topr_trl.recording.conversations import Conversation
from topr_trl.recording.protocols.completions import prompts_of
from topr_trl.recording.protocols.protocol import Protocol
from topr_trl.recording.redaction import Redactor
from topr_trl.recording.store import Store


@dataclass(frozen=True)
class RecordedRequest:
    """Request that is being recorded.

    Attributes:
        asked (`Mapping[str, Any]`): Body of the request.
        stored (`Mapping[str, Any]`): Body with blanked-out text, and with the messages of the response that the
            request continues.
        is_redacted (`bool`): Whether text was blanked out.
        size (`int`): Number of bytes of the body, plus the number of characters of the call that the request continues.
        conversation (`Conversation`): Hash of the messages.
        continues (`str`, `int` or `None`): Key of the conversation that the request continues, or number of the call
            whose response it continues. None if the request has no earlier answer.
    """

    asked: Mapping[str, Any]
    stored: Mapping[str, Any]
    is_redacted: bool
    size: int
    conversation: Conversation
    continues: str | int | None

    @property
    def prompt_is_ids(self) -> bool:
        """Whether a prompt contains token ids. A prompt that is an object, as in the Responses API, contains none."""
        return not all(isinstance(each, str | Mapping | None) for each in prompts_of(self.asked))

    @property
    def choices(self) -> int:
        """Number of choices that the request asks for."""
        n = self.asked.get("n")
        return len(prompts_of(self.asked)) * (n if isinstance(n, int) and n > 0 else 1)


def read_request(body: bytes, protocol: Protocol, redact: Redactor, salt: str) -> RecordedRequest | None:
    """Return the request in a body. Return None if the body is not a JSON object, or is nested too deeply.

    Args:
        body (`bytes`): Body.
        protocol (`Protocol`): API of the request.
        redact (`Redactor`): Function that blanks out text.
        salt (`str`): Secret text in the hashes of conversations.
    """
    try:
        asked = json.loads(body)
        stored = redact(asked)
        is_redacted = stored != asked
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    conversation = Conversation(asked.get("model"), protocol.messages(asked), salt)
    return RecordedRequest(asked, stored, is_redacted, len(body), conversation, conversation.continued)


def with_earlier_messages(request: RecordedRequest, protocol: Protocol, store: Store, salt: str) -> RecordedRequest:
    """Return a request with the messages of the response that it continues, if the store has this response.

    Args:
        request (`RecordedRequest`): Request with a `previous_response_id`.
        protocol (`Protocol`): API of the request.
        store (`Store`): Database.
        salt (`str`): Secret text in the hashes of conversations.
    """
    found = store.response(str(request.asked["previous_response_id"]))
    if found is None or protocol.whole is None:
        return request
    earlier, answer, is_redacted, call, size = found
    stored = protocol.whole(request.stored, earlier, answer)
    conversation = Conversation(stored.get("model"), protocol.messages(stored), salt)
    return replace(
        request, stored=stored, is_redacted=request.is_redacted or is_redacted, size=request.size + size,
        conversation=conversation, continues=call,
    )  # fmt: skip
