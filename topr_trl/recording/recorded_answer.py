"""Store the answer of a call while the client receives it."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from topr_trl.recording.answers import CHAT, Assembler, is_well_formed, without_token_ids
from topr_trl.recording.conversations import conversations
from topr_trl.recording.redaction import Redactor, without_tokens
from topr_trl.recording.settings import PASS, RecordArguments
from topr_trl.recording.store import Call, State, StorageFullError, Store

_MOST_IDS = 200  # maximum number of names in the header. Many clients read headers of at most 8 KB.


class Writer:
    """Database of a recorder, with the settings for redaction and for a full disk.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
    """

    def __init__(self, args: RecordArguments, store: Store) -> None:
        self.store, self.redact = store, Redactor(args.redact or ())
        # Without salt, others could hash guesses of the blanked-out text, and compare the hashes. Each start has a new
        # salt, so the recorder does not recognize conversations from before a restart.
        self.salt = secrets.token_hex(16) if self.redact else ""
        self._passes_on = args.on_full == PASS

    @contextmanager
    def full_is_fine(self) -> Iterator[None]:
        """Ignore a StorageFullError if `on_full` is `pass`."""
        try:
            yield
        except StorageFullError:
            if not self._passes_on:
                raise


class RecordedAnswer:
    """Answer that is being received and stored.

    Args:
        writer (`Writer`): Database and settings.
        call (`Call`): Call, as `Store.begin` returns it.
        endpoint (`str`): `CHAT` or `TEXT`.
        asked (`Mapping[str, Any]`): Request of the client.
        prompt_is_redacted (`bool`): Whether text of the stored request was blanked out.
        hides (`bool`): Whether to hide the token ids and log-probabilities that only the recorder requested.
    """

    def __init__(
        self,
        writer: Writer,
        call: Call,
        endpoint: str,
        asked: Mapping[str, Any],
        prompt_is_redacted: bool,
        hides: bool,
    ) -> None:
        self.writer, self.call, self.endpoint, self.asked, self.hides = writer, call, endpoint, asked, hides
        self.prompt_is_redacted = prompt_is_redacted
        self.answer = Assembler(endpoint)
        self.error: str | None = None
        self.ended = False
        self.lacks_chunks = False  # whether an event could not be stored

    @property
    def header(self) -> str | None:
        """Distinct names of the rollouts, joined by commas, in the order of the choices.

        None if there are more than `_MOST_IDS` names.
        """
        names = dict.fromkeys(self.call.rollouts)
        return ",".join(names) if len(names) <= _MOST_IDS else None

    def shown(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer or an event as the client sees it.

        Args:
            answer (`Mapping[str, Any]`): Answer or event of the server.
        """
        return without_token_ids(answer, self.asked, self.endpoint) if self.hides else answer

    def add_event(self, data: str) -> str:
        """Store an event of a stream, and return it as the client sees it.

        Args:
            data (`str`): Data of the event.

        Raises:
            StorageFullError: the event cannot be stored, and `on_full` is `refuse`.
        """
        if data == "[DONE]":
            # Store the end before the client gets this mark, because the client may continue the answer at once.
            self.end()
            return data
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not isinstance(event, dict) or not is_well_formed(event):
            return data
        if event.get("error") is not None:
            self.error = _message_of(event) or "The server reported an error."
            return data
        self.answer.add(event)
        # With redaction, the answer is stored only at its end, because a match may span several events. If an event
        # cannot be stored, skip all later events: recovery joins the stored events, and a gap would change the text.
        if not self.writer.redact and not self.lacks_chunks:
            with self.writer.full_is_fine():
                self.lacks_chunks = True
                self.writer.store.add_chunk(self.call.id, data)
                self.lacks_chunks = False
        return json.dumps(self.shown(event)) if self.hides else data

    def add_answer(self, status: int, content: bytes) -> bytes:
        """Store an answer that is not a stream, and return it as the client sees it.

        Args:
            status (`int`): HTTP status.
            content (`bytes`): Body of the answer.

        Raises:
            StorageFullError: the answer cannot be stored, and `on_full` is `refuse`.
        """
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict) or not answer.get("choices") or not is_well_formed(answer):
            reason = "" if status != 200 else ", but not with choices in the format of OpenAI's API"
            self._end(State.FAILED, None, _message_of(answer) or f"The server answered with status {status}{reason}.")
            return content
        self._end(State.FINISHED, answer, None)
        return json.dumps(self.shown(answer)).encode() if self.hides else content

    def end(self, why: str | None = None) -> None:
        """Store the end of a stream, or of an incomplete answer. Do nothing if the end is already stored.

        Args:
            why (`str`, *optional*): Reason, if the answer did not arrive completely.

        Raises:
            StorageFullError: the answer cannot be stored, and `on_full` is `refuse`.
        """
        if not self.ended:
            whole = self.answer.finished >= len(self.call.rollouts) and self.error is None
            self._end(State.FINISHED if whole else State.CUT, self.answer.answer, None if whole else self.error or why)

    def _end(self, state: State, answer: Mapping[str, Any] | None, message: str | None) -> None:
        self.ended = True
        stored, is_redacted = self.writer.redact(answer)
        if stored and (is_redacted or self.prompt_is_redacted):
            stored = without_tokens(stored)
        keys = conversations(self.asked, answer, self.writer.salt) if answer and self.endpoint == CHAT else None
        message, _ = self.writer.redact(message)
        with self.writer.full_is_fine():
            self.writer.store.end(self.call.id, state, stored, keys, message, is_redacted)


def _message_of(answer: Any) -> str | None:
    """Return the message of an error in the format of OpenAI or of vLLM. Return None if there is no message."""
    found = answer.get("error", answer) if isinstance(answer, dict) else None
    return str(found.get("message")) if isinstance(found, dict) and found.get("message") else None
