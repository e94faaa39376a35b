"""Accept connections, within the limit of open files, and refuse requests that are not HTTP."""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from topr_trl.recording.protection import error
from topr_trl.recording.settings import RecordArguments

_OTHER_FILES = 64  # files of the process that are not connections, such as the database and its readers
_MOST_OF_MACOS = 10_240  # macOS can report an infinite hard limit, and refuses a higher soft limit.
_BACKLOG = 1024  # connections that the kernel accepts before the recorder does
_SECONDS_BETWEEN = 0.05  # pause before the next look at the connections
LONGEST_HEADER = 65_536  # bytes. Browsers send the cookies of all local applications in one header.
SECONDS_TO_END = 5.0  # time for running requests to end after Ctrl+C
_SECONDS_TO_CUT = 0.1  # aiohttp waits for this time twice: before and after it cancels a request.


@cache
def say_once(message: str) -> None:
    """Print a message, but not a second time.

    Args:
        message (`str`): Message.
    """
    print(f"Note: {message}", flush=True)


def raise_file_limit() -> int:
    """Raise the limit of open files as far as this user can, and return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_OF_MACOS if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class _Connection(web.RequestHandler):
    """Connection of a client. The answer to a malformed request does not repeat the request and its secrets."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """Whether no request with a complete header is waiting or running."""
        return not (self._request_in_progress or self._messages)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that is not valid HTTP. For other errors, aiohttp logs a traceback."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        say_once("a request was not valid HTTP, and was refused. The recorder speaks HTTP/1.1 without encryption.")
        response = error(status, "The request is not valid HTTP/1.1.")
        response.force_close()
        return response


class Listener:
    """Sockets that accept connections for a server.

    Args:
        server (`web.Server`): Server of the application.
        args (`RecordArguments`): Settings.
        sockets (`Sequence[socket.socket]`): Listening sockets.
    """

    def __init__(self, server: web.Server, args: RecordArguments, sockets: Sequence[socket.socket]) -> None:
        self.server, self.args = server, args
        self.port: int = sockets[0].getsockname()[1]
        self.limit = raise_file_limit()
        self.most = max(1, (self.limit - _OTHER_FILES) // 2)  # A call needs a connection to the model server, too.
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets]

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections, at most `most` at once. asyncio's own server would log each failure, without a pause."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
                await loop.connect_accepted_socket(self._connection, connection)
            except OSError as failure:
                say_once(f"a connection cannot be accepted: {failure.strerror}. The recorder tries again.")
                await asyncio.sleep(_SECONDS_BETWEEN)
            while len(self.server.connections) >= self.most:
                say_once(
                    f"{self.most} connections are open, and more have to wait, because this process can open only "
                    f"{self.limit} files. Raise the hard limit of files (ulimit -Hn) for more."
                )
                # A client that has just connected keeps its connection, because its request may still arrive.
                _close_idle(self.server.connections[: -max(1, self.most // 8)])
                await asyncio.sleep(_SECONDS_BETWEEN)

    def _connection(self) -> web.RequestHandler:
        """Return the handler of a new connection. aiohttp closes an idle connection after `client_timeout` seconds."""
        settings: dict[str, Any] = {"access_log": None, "keepalive_timeout": self.args.client_timeout}
        return _Connection(self.server, loop=asyncio.get_running_loop(), max_field_size=LONGEST_HEADER, **settings)

    async def stop_accepting(self) -> None:
        """Stop accepting connections."""
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop accepting connections, and wait at most `SECONDS_TO_END` seconds for running requests to end.

        Args:
            hurry (`asyncio.Event`): Event that ends the waiting.
        """
        await self.stop_accepting()
        _close_idle(self.server.connections)
        for each in self.server.connections:
            each.close()  # The connection closes when its request ends.
        await asyncio.sleep(_SECONDS_BETWEEN)
        if not (running := len(self.server.connections)):
            return
        requests = f"{running} request{'s' * (running != 1)}"
        print(
            f"Stopping: waiting up to {SECONDS_TO_END:g} seconds for {requests}. Press Ctrl+C again to cut them.",
            flush=True,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_TO_END):
                while self.server.connections and not hurry.is_set():
                    await asyncio.sleep(_SECONDS_BETWEEN)


def _close_idle(connections: Iterable[web.RequestHandler]) -> None:
    for each in connections:
        if isinstance(each, _Connection) and each.is_idle:
            each.force_close()


@asynccontextmanager
async def listening(app: web.Application, args: RecordArguments) -> AsyncIterator[Listener]:
    """Serve an application inside the context.

    Args:
        app (`web.Application`): Application.
        args (`RecordArguments`): Settings.

    Raises:
        OSError: the port is in use, or the host does not exist.
    """
    # Without handler_cancellation, the model server would go on generating after a client has left.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SECONDS_TO_CUT)
    await runner.setup()
    assert runner.server is not None
    with ExitStack() as opened:
        try:
            sockets = [opened.enter_context(each) for each in await _bound(args)]
            listener = Listener(runner.server, args, sockets)
            try:
                yield listener
            finally:
                await listener.stop_accepting()
        finally:
            await runner.cleanup()


async def _bound(args: RecordArguments) -> list[socket.socket]:
    """Return a listening socket for each address of the host."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sockets = [each for each in map(_socket_at, dict.fromkeys(found)) if each is not None]
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as failure:
        why = (failure.strerror or str(failure)).partition(" (while")[0]
        reason = f"Cannot listen on {args.host}, port {args.port}: {why}."
        raise OSError(f"{reason} Set a different port or host.") from failure
    for each in sockets:
        each.setblocking(False)
    return sockets


def _socket_at(address: tuple[Any, ...]) -> socket.socket | None:
    """Return a listening socket. Return None for an address that this machine lacks, such as ::1 without IPv6."""
    try:
        return socket.create_server(address[4], family=address[0], backlog=_BACKLOG)
    except OSError as failure:
        if failure.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        raise
