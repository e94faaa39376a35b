"""Store the answer of a call while the client receives it."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from topr_trl.recording.protocols.protocol import Protocol
from topr_trl.recording.recorded_request import RecordedRequest
from topr_trl.recording.redaction import Redactor, without_tokens
from topr_trl.recording.settings import PASS, RecordArguments
from topr_trl.recording.store import Call, State, StorageFullError, Store

Result = TypeVar("Result")
LARGE = 1 << 20  # bytes. Larger requests and answers are parsed, hashed and stored in a thread.
_MOST_IDS = 200  # maximum number of names or numbers in a header. Many clients read headers of at most 8 KB.


async def in_thread(size: int, function: Callable[..., Result], *given: Any) -> Result:
    """Call a function, in a thread if its input is large, because other streams must not wait for a long call.

    Args:
        size (`int`): Number of bytes of the input.
        function (`Callable`): Function to call. In a thread, it runs to its end even if the request is canceled.
        *given (`Any`): Arguments.
    """
    return await asyncio.to_thread(function, *given) if size > LARGE else function(*given)


class Writer:
    """Database of a recorder, with the settings for redaction and for a full disk.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
    """

    def __init__(self, args: RecordArguments, store: Store) -> None:
        self.store, self.redact = store, Redactor(args.redact or ())
        # Without salt, readers of the database could hash guesses of the blanked-out text, and compare the hashes. Each
        # start has a new salt, so the recorder does not recognize conversations from before a restart.
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
        protocol (`Protocol`): API of the call.
        request (`RecordedRequest`): Request of the client.
        hides (`bool`): Whether the recorder adds token ids and log-probabilities to the request. It then removes from
            the answer what the client did not request.
        without_secrets (`Callable`): Function that removes the secrets of the request from an error message.
    """

    def __init__(
        self,
        writer: Writer,
        call: Call,
        protocol: Protocol,
        request: RecordedRequest,
        hides: bool,
        without_secrets: Callable[[str], str],
    ) -> None:
        self.writer, self.call, self.protocol, self.request, self.hides = writer, call, protocol, request, hides
        self.without_secrets = without_secrets
        self.answer = protocol.assembler()
        self.size = 0  # characters of the events
        self.error: str | None = None
        self.ended = False
        self.lacks_chunks = False  # whether an event could not be stored

    @property
    def header(self) -> tuple[str, str] | None:
        """Distinct names of the rollouts, and the numbers of the answers, joined by commas in the order of the choices.

        Only the first `_MOST_IDS` numbers are included. None if there are more than `_MOST_IDS` names.
        """
        names = dict.fromkeys(self.call.rollouts)
        numbers = ",".join(map(str, self.call.answers[:_MOST_IDS]))
        return (",".join(names), numbers) if len(names) <= _MOST_IDS else None

    def shown(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer or an event as the client sees it.

        Args:
            answer (`Mapping[str, Any]`): Answer or event of the server.
        """
        return self.protocol.without_token_ids(answer, self.request.asked) if self.hides else answer

    async def add_event(self, data: str) -> str:
        """Store an event of a stream, and return it as the client sees it.

        A malformed event is not stored, and an error is stored only at the end of the stream.

        Args:
            data (`str`): Data of the event.

        Raises:
            StorageFullError: the event cannot be stored, and `on_full` is `refuse`.
        """
        if data == "[DONE]":
            await self._end_before_the_client_knows()
            return data
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not isinstance(event, dict) or not self.protocol.is_well_formed(event):
            return data
        if _is_error(event):
            self.error = _message_of(event) or "The server reported an error."
            return data
        self.answer.add(event)
        self.size += len(data)
        # With redaction, the answer is stored only at its end, because a match may span several events. If an event
        # cannot be stored, skip all later events: recovery joins the stored events, and a gap would change the text.
        if not self.writer.redact and not self.lacks_chunks:
            with self.writer.full_is_fine():
                self.lacks_chunks = True
                self.writer.store.add_chunk(self.call.id, data)
                self.lacks_chunks = False
        if self.protocol.is_last(event):
            await self._end_before_the_client_knows()
        shown = self.shown(event)
        return data if shown is event else json.dumps(shown)

    async def _end_before_the_client_knows(self) -> None:
        """Store the end of a stream before the client gets it, because the client may continue the answer at once."""
        if not self.ended:
            await self._end(self.size, *self._outcome())

    async def add_answer(self, status: int, content: bytes) -> bytes:
        """Store an answer that is not a stream, and return it as the client sees it.

        Args:
            status (`int`): HTTP status.
            content (`bytes`): Body of the answer.

        Raises:
            StorageFullError: the answer cannot be stored, and `on_full` is `refuse`.
        """
        size = len(content)
        answer, message = await in_thread(size, _read_answer, self.protocol, status, content)
        await self._end(size, State.FAILED if answer is None else State.FINISHED, answer, message)
        if answer is None or not self.hides:
            return content
        return await in_thread(size, lambda: json.dumps(self.shown(answer)).encode())

    def end(self, why: str | None = None) -> None:
        """Store the end of a stream, or of an incomplete answer. Do nothing if the end is already stored.

        Args:
            why (`str`, *optional*): Reason, if the answer did not arrive completely. An error event replaces it.

        Raises:
            StorageFullError: the answer cannot be stored, and `on_full` is `refuse`.
        """
        if not self.ended:
            state, answer, message = self._outcome(why)
            with self.writer.full_is_fine():
                self._store(state, answer, message, *self._redacted(answer))

    def _outcome(self, why: str | None = None) -> tuple[State, Mapping[str, Any] | None, str | None]:
        """Return the state, the answer and the error message of a stream that has ended."""
        answer = self.answer.answer
        # Some servers ignore `n`. At the end of a stream that is not cut, all choices that will come are there.
        choices = len(self.call.rollouts) if why or not answer else len(self.protocol.choices(answer)) or 1
        if answer and self.answer.finished >= choices and self.error is None:
            return State.FINISHED, answer, None
        return State.CUT if answer else State.FAILED, answer, self.error or why

    async def _end(self, size: int, state: State, answer: Mapping[str, Any] | None, message: str | None) -> None:
        """End the call. Store a large answer in a thread."""
        stored, is_redacted = await in_thread(size, self._redacted, answer)
        with self.writer.full_is_fine():
            if size > LARGE and stored is not None:
                await asyncio.to_thread(self.writer.store.add_text, self.call.id, "response", stored)
                stored = None
            self._store(state, answer, message, stored, is_redacted)

    def _redacted(self, answer: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bool]:
        """Return the answer to store, and whether text in it was blanked out."""
        stored = self.writer.redact(answer)
        is_redacted = stored != answer
        if stored and (is_redacted or self.request.is_redacted):
            stored = without_tokens(stored)
        return stored, is_redacted

    def _store(
        self,
        state: State,
        answer: Mapping[str, Any] | None,
        message: str | None,
        stored: Mapping[str, Any] | None,
        is_redacted: bool,
    ) -> None:
        self.ended = True
        keys = self.request.conversation.keys(self.protocol.choices(answer)) if answer else None
        if message is not None:
            message = self.writer.redact(self.without_secrets(message))
        self.writer.store.end(self.call.id, state, stored, keys, message, is_redacted)


def _read_answer(protocol: Protocol, status: int, content: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Return the answer of the server and None, or None and an error message."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if status == 200 and isinstance(answer, dict) and protocol.is_well_formed(answer) and protocol.choices(answer):
        return answer, None
    reason = "" if status != 200 else f", but not with an answer of the API /{protocol.endpoint}"
    return None, _message_of(answer) or f"The server answered with status {status}{reason}."


def _is_error(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports an error. The Responses API has three ways to do so."""
    return bool(event.get("error") or event.get("type") in ("error", "response.failed"))


def _message_of(answer: Any) -> str | None:
    """Return the message of an error in the format of an API or of vLLM. Return None if there is no message."""
    found = answer if isinstance(answer, dict) else {}
    if isinstance(found.get("response"), dict):
        found = found["response"]
    found = found.get("error") or found
    if isinstance(found, str):  # Ollama
        return found
    message = found.get("message") if isinstance(found, dict) else None
    return message if message and isinstance(message, str) else None
