"""Read a request for completions before it is recorded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topr_trl.recording.conversations import Conversation, continued_conversation
from topr_trl.recording.redaction import Redactor


@dataclass(frozen=True)
class RecordedRequest:
    """Request for completions.

    Attributes:
        asked (`Mapping[str, Any]`): Body of the request.
        stored (`Mapping[str, Any]`): Body with blanked-out text.
        is_redacted (`bool`): Whether text was blanked out.
        size (`int`): Number of bytes of the body.
        conversation (`Conversation`): Hash of the messages.
        continues (`str` or `None`): Key of the conversation that the request continues.
    """

    asked: Mapping[str, Any]
    stored: Mapping[str, Any]
    is_redacted: bool
    size: int
    conversation: Conversation
    continues: str | None

    @property
    def prompt_is_ids(self) -> bool:
        """Whether a prompt contains token ids."""
        prompt = self.asked.get("prompt")
        return isinstance(prompt, list) and not all(isinstance(each, str) for each in prompt)

    @property
    def choices(self) -> int:
        """Number of choices that the request asks for."""
        prompts, n = self.asked.get("prompt"), self.asked.get("n")
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        return count * (n if isinstance(n, int) and n > 0 else 1)


def read_request(body: bytes, redact: Redactor, salt: str) -> RecordedRequest | None:
    """Return the request in a body. Return None if the body is not a JSON object.

    Args:
        body (`bytes`): Body.
        redact (`Redactor`): Function that blanks out text.
        salt (`str`): Secret text in the hashes of conversations.
    """
    try:
        asked = json.loads(body)
        stored, is_redacted = redact(asked)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    conversation, continues = Conversation(asked, salt), continued_conversation(asked, salt)
    return RecordedRequest(asked, stored, is_redacted, len(body), conversation, continues)
