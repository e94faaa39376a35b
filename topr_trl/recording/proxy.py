"""Pass requests on to a model server, and store the requests and the answers."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from topr_trl.recording.protection import KEY_HEADER, error, error_body, read_body
from topr_trl.recording.protocols.protocol import Protocol
from topr_trl.recording.recorded_answer import LARGE, RecordedAnswer, Writer, in_thread
from topr_trl.recording.recorded_request import RecordedRequest, read_request, with_earlier_messages
from topr_trl.recording.redaction import without_secrets
from topr_trl.recording.settings import ALWAYS, AUTO, PASS, RecordArguments
from topr_trl.recording.store import StorageFullError, Store
from topr_trl.recording.unrecorded import Unrecorded

ROLLOUT_HEADER, ANSWER_HEADER = "x-topr-rollout", "x-topr-answer"
LONGEST_ID = 200  # maximum number of characters in the name of a rollout
_MOST_CHOICES = 10_000  # maximum number of choices of a request
_CONNECTION_HEADERS = frozenset({  # headers for one connection or encoding, which the recorder does not pass on
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host", "content-length", "content-encoding", "accept-encoding", "expect",
})  # fmt: skip
_STREAMS = {  # by content type: start of the lines with data, and end of an event
    "text/event-stream": (b"data:", b"\n\n"),
    "application/x-ndjson": (b"", b"\n"),
}
_REDIRECTS = (301, 302, 303, 307, 308)
_MODELS_AGE = 60.0  # seconds after which the list of models is requested again
_SECONDS_BETWEEN = 1.0  # minimum time between two requests of the list, after a failure or for a model that it lacks


class _BadAnswerError(Exception):
    """Error for an answer that the recorder does not pass on. Its text is the message for the client."""


class _ClientGoneError(Exception):
    """Error for a client that closed the connection, or stopped reading."""


# Errors that the recorder reports to the client.
_FAILURES = (aiohttp.ClientError, StorageFullError, _BadAnswerError)


class Proxy:
    """HTTP handlers of the paths under `/v1` and `/api`.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
        session (`aiohttp.ClientSession`): HTTP session for requests to the model server.
    """

    def __init__(self, args: RecordArguments, store: Store, session: aiohttp.ClientSession) -> None:
        self.args, self.session = args, session
        self.writer, self.unrecorded = Writer(args, store), Unrecorded()
        self._models: dict[str, dict[str, Any]] = {}  # entries of /v1/models by id
        self._models_until = 0.0  # `time.monotonic()` at which the list of models becomes old
        self._next_list = 0.0  # `time.monotonic()` at which the list may be requested for a model that it lacks
        self._reading_models = asyncio.Lock()

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass on a request without recording it, for instance to `/v1/models`. WebSockets are not supported."""
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return error(501, "topr record does not pass on WebSockets. Send requests over HTTP.")
        return await self._forward_unrecorded(request, await read_body(request, self.args))

    async def record(self, protocol: Protocol, request: web.Request) -> web.StreamResponse:
        """Record a request of an API, and pass it on.

        Pass on a request without recording it if its body is not a JSON object, if `redact` is set and its prompt has
        token ids, or if the disk is full and `on_full` is `pass`. Refuse a request with a malformed rollout name or too
        many choices, and any request if the disk is full and `on_full` is `refuse`.
        """
        body = await read_body(request, self.args)
        rollout = request.headers.get(ROLLOUT_HEADER)
        if rollout is not None and not _is_name(rollout):
            return error(
                400, f"{ROLLOUT_HEADER} must be printable ASCII without commas, with at most {LONGEST_ID} characters."
            )
        asked = await in_thread(len(body), read_request, body, protocol, self.writer.redact, self.writer.salt)
        if asked is None:  # The server explains what is wrong with the request.
            return await self._forward_unrecorded(request, body, "its body is not a JSON object")
        if self.writer.redact and asked.prompt_is_ids:  # Matches cannot be blanked out in token ids.
            return await self._forward_unrecorded(request, body, "redact is set, and its prompt has token ids")
        if asked.choices > _MOST_CHOICES:
            most = f"Ask for at most {_MOST_CHOICES:,} at once."
            return error(400, f"The request asks for {asked.choices:,} choices. {most}")
        await self._read_models(request, asked.asked.get("model"))
        if protocol.whole is not None and asked.asked.get("previous_response_id"):
            given = asked, protocol, self.writer.store, self.writer.salt
            asked = await asyncio.to_thread(with_earlier_messages, *given)
        return await self._forward_recorded(request, body, protocol, asked, rollout)

    async def _forward_unrecorded(self, request: web.Request, body: bytes, why: str = "") -> web.StreamResponse:
        self.unrecorded.add(request, why)
        return await self._forward(request, body, None)

    async def _forward_recorded(
        self, request: web.Request, body: bytes, protocol: Protocol, asked: RecordedRequest, rollout: str | None
    ) -> web.StreamResponse:
        """Pass on a request, and store it with its answer."""
        recording = None
        try:
            recording = self._begin(request, protocol, asked, rollout)
            if asked.size > LARGE:
                await asyncio.to_thread(self.writer.store.add_text, recording.call.id, "request", asked.stored)
            if recording.hides and protocol.with_token_ids:
                with_ids = partial(protocol.with_token_ids, asked.asked)
                body = await in_thread(asked.size, lambda: json.dumps(with_ids()).encode())
            return await self._forward(request, body, recording)
        except StorageFullError as full:
            _end_early(recording, str(full))
            if self.args.on_full == PASS:
                return await self._forward_unrecorded(request, body, "the disk is full")
            return error(507, f"{full} Or start topr record with --on_full pass.", "storage_full")
        except BaseException as failure:
            is_gone = isinstance(failure, asyncio.CancelledError)
            why = "The client closed the connection, or the recorder was stopped."
            _end_early(recording, why if is_gone else f"{type(failure).__name__}: {failure}")
            raise

    def _begin(
        self, request: web.Request, protocol: Protocol, asked: RecordedRequest, rollout: str | None
    ) -> RecordedAnswer:
        """Store the start of a call. A large request is stored later.

        Raises:
            StorageFullError: the call cannot be stored.
        """
        default = next(iter(self._models), "")  # the model that vLLM uses if a request names none
        model = self._models.get(str(asked.asked.get("model") or default), {})
        root = model.get("root")
        call = self.writer.store.begin(
            protocol.endpoint, {} if asked.size > LARGE else asked.stored, rollout, asked.choices, asked.continues,
            root if isinstance(root, str) else None, self.args.model_revision, asked.is_redacted,
        )  # fmt: skip
        asks_for_ids = protocol.with_token_ids is not None and (
            self.args.token_ids == ALWAYS or (self.args.token_ids == AUTO and model.get("owned_by") == "vllm")
        )
        hidden = partial(self._without_secrets, request)
        return RecordedAnswer(self.writer, call, protocol, asked, asks_for_ids, hidden)

    def _without_secrets(self, request: web.Request, message: str) -> str:
        """Return an error message without the secrets of a request and of the recorder."""
        keys = (self.args.token, self.args.upstream_key)
        return without_secrets(message, request.rel_url.raw_query_string, request.headers, keys)

    async def _forward(self, request: web.Request, body: bytes, recording: RecordedAnswer | None) -> web.StreamResponse:
        """Send a request to the server, and the answer to the client. Store the answer if `recording` is given."""
        path = request.rel_url.raw_path
        if {".", ".."} & set(re.split(r"[/\\]", unquote(path))):  # Refuse paths outside the upstream URL.
            return error(404, f"There is no path {path}.")
        if path.startswith("/v1/"):
            url = URL(f"{self.args.upstream}{path.removeprefix('/v1')}", encoded=True)
        else:  # Ollama's own API is not under `/v1`.
            url = URL(f"{self.args.upstream.removesuffix('/v1')}{path}", encoded=True)
        query = request.rel_url.raw_query_string
        try:
            async with self.session.request(
                request.method, URL(f"{url}?{query}", encoded=True) if query else url, data=body or None,
                headers=self._headers(request), allow_redirects=False,
            ) as answer:  # fmt: skip
                if answer.status in _REDIRECTS:  # A client that follows a redirect bypasses the recorder.
                    address = answer.headers.get("Location", "an unknown address")
                    raise _BadAnswerError(f"{url} redirects to {address}. Set upstream to the new address.")
                if answer.content_type in _STREAMS:
                    return await self._stream(request, answer, url, recording)
                content = b"".join([piece async for piece in self._pieces(answer, url)])
                if recording is not None:
                    content = await recording.add_answer(answer.status, content)
                headers = _shown_headers(answer, recording)
            if len(content) > LARGE:
                return await self._send(request, answer.status, headers, content)
            return web.Response(status=answer.status, body=content, headers=headers)
        except _FAILURES as failure:
            return error(*self._store_failure(failure, request, url, recording))
        except _ClientGoneError as gone:
            _end_early(recording, str(gone))
            return web.Response()

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, url: URL, recording: RecordedAnswer | None
    ) -> web.StreamResponse:
        """Send the events of the server to the client. First add each event to `recording`, unless it is None."""
        response = web.StreamResponse(status=answer.status, headers=_shown_headers(answer, recording))
        start, end = _STREAMS[answer.content_type]
        name = b""
        async with self._sending(request):
            await response.prepare(request)
        try:
            async for event in _events(self._pieces(answer, url), has_lines=not start):
                lines, found = event, [line.removeprefix(start).strip() for line in event if line.startswith(start)]
                name = b"event: error\n" if event[0].startswith(b"event:") else name
                if recording is not None and found:
                    data = b"\n".join(found).decode("utf-8", "replace")
                    shown = await recording.add_event(data)
                    if shown is not data:
                        lines = [*(line for line in event if not line.startswith(start)), start + b" " + shown.encode()]
                async with self._sending(request):
                    await response.write(b"\n".join(lines) + end)
            if recording is not None:
                recording.end("The server ended the answer early.")
        except _FAILURES as failure:
            body = error_body(*self._store_failure(failure, request, url, recording))
            shown = f" {json.dumps(body)}" if start else json.dumps({"error": body["error"]["message"]})
            async with self._sending(request):
                await response.write(name + start + shown.encode() + end)
        async with self._sending(request):
            await response.write_eof()
        return response

    async def _send(
        self, request: web.Request, status: int, headers: CIMultiDict[str], content: bytes
    ) -> web.StreamResponse:
        """Send a large answer in parts, and limit the time for each part."""
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(content)
        async with self._sending(request):
            await response.prepare(request)
        for start in range(0, len(content), LARGE):
            async with self._sending(request):
                await response.write(content[start : start + LARGE])
        async with self._sending(request):
            await response.write_eof()
        return response

    async def _pieces(self, answer: aiohttp.ClientResponse, url: URL) -> AsyncIterator[bytes]:
        """Yield the bytes of an answer as they arrive.

        Raises:
            _BadAnswerError: the answer is larger than `max_answer_mb`.
        """
        size = 0
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > self.args.max_answer_mb * 2**20:
                most = f"max_answer_mb={self.args.max_answer_mb}"
                raise _BadAnswerError(f"The answer of {url} is larger than {most}.")
            yield piece

    @asynccontextmanager
    async def _sending(self, request: web.Request) -> AsyncIterator[None]:
        """Limit the time to send a part of an answer to the client.

        Raises:
            _ClientGoneError: the client closed the connection, or did not read for `client_timeout` seconds.
        """
        try:
            async with asyncio.timeout(self.args.client_timeout):
                yield
        except (TimeoutError, aiohttp.ClientConnectionResetError) as gone:
            if request.transport is not None:
                request.transport.abort()  # `close` would wait for the client.
            raise _ClientGoneError(
                "The client closed the connection, or did not read for "
                f"{self.args.client_timeout:g} seconds (client_timeout)."
            ) from gone

    def _store_failure(
        self, failure: Exception, request: web.Request, url: URL, recording: RecordedAnswer | None
    ) -> tuple[int, str, str]:
        """End the recording with a message about a failure. Return the HTTP status, the message and the error type."""
        if isinstance(failure, StorageFullError):
            found = 507, f"The answer cannot be recorded: {failure}", "storage_full"
        elif isinstance(failure, _BadAnswerError):
            found = 502, str(failure), "upstream_error"
        elif isinstance(failure, aiohttp.SocketTimeoutError):
            seconds = f"{self.args.upstream_timeout:g} seconds (upstream_timeout)"
            found = 504, f"{url} sent nothing for {seconds}.", "upstream_timeout"
        else:
            self._models_until = 0.0  # The server may restart with another model.
            found = 502, f"{url} cannot be reached, or closed the connection: {failure}", "upstream_error"
        status, message, kind = found
        _end_early(recording, message)
        return status, self._without_secrets(request, message), kind

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        """Return the client's headers for the server, without the recorder's token and `x-topr-` headers.

        The API key from the environment, if there is one, replaces the client's key.
        """
        keys = {"authorization", KEY_HEADER} if self.args.token or self.args.upstream_key else set()
        left_out = _CONNECTION_HEADERS | keys
        found = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in left_out and not name.lower().startswith("x-topr-")
        )
        if self.args.upstream_key:
            if KEY_HEADER in request.headers:
                found[KEY_HEADER] = self.args.upstream_key
            else:
                found["Authorization"] = f"Bearer {self.args.upstream_key}"
        found["Accept-Encoding"] = "identity"
        return found

    async def _read_models(self, request: web.Request, name: object) -> None:
        """Update the list of models if it is old, or if it lacks the model `name`, which the server may have loaded.

        The list has the server software (`owned_by`) and the weights (`root`) of each model.
        """
        async with self._reading_models:  # Calls that start together wait for one request.
            now, is_listed = time.monotonic(), name is None or str(name) in self._models
            if now < self._models_until and (is_listed or now < self._next_list):
                return
            url = f"{self.args.upstream}/models"
            try:
                timeout = aiohttp.ClientTimeout(total=5)
                async with self.session.get(url, headers=self._headers(request), timeout=timeout) as answer:
                    found = await answer.json()
                self._models = {str(model["id"]): model for model in found["data"]}
                self._models_until = time.monotonic() + _MODELS_AGE
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
                # Forwarding the call reports the error.
                self._models_until = time.monotonic() + _SECONDS_BETWEEN
            self._next_list = time.monotonic() + _SECONDS_BETWEEN


def _end_early(recording: RecordedAnswer | None, why: str) -> None:
    """End a recording of an incomplete answer, and store the reason. Do nothing if `recording` is None."""
    if recording is not None:
        with suppress(StorageFullError):  # `Store.recover` ends the call at the next start.
            recording.end(why)


def _is_name(rollout: str) -> bool:
    """Return whether a text can be the name of a rollout. Commas separate the names in the header of an answer."""
    return 0 < len(rollout) <= LONGEST_ID and rollout.isascii() and rollout.isprintable() and "," not in rollout


def _shown_headers(answer: aiohttp.ClientResponse, recording: RecordedAnswer | None) -> CIMultiDict[str]:
    """Return the headers for the client: the server's, the names of the rollouts, and the numbers of the answers."""
    found = CIMultiDict(
        (name, value) for name, value in answer.headers.items() if name.lower() not in _CONNECTION_HEADERS
    )
    if recording is not None and recording.header is not None:
        found[ROLLOUT_HEADER], found[ANSWER_HEADER] = recording.header
    return found


async def _events(pieces: AsyncIterator[bytes], has_lines: bool = False) -> AsyncIterator[list[bytes]]:
    """Yield the lines of each event of a stream. An empty line ends an event. With `has_lines`, a line is an event."""
    event: list[bytes] = []
    line = bytearray()  # A `bytearray` grows without a copy of the whole line.
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line += end
            if text := bytes(line.removesuffix(b"\r")):
                event.append(text)
            if event and (has_lines or not text):
                yield event
                event = []
            line.clear()
        line += rest
    if line.strip():
        event.append(bytes(line))
    if event:
        yield event
