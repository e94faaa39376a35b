"""Run `topr record`."""

import asyncio
import logging
import os
import shlex
import signal
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import web
from filelock import FileLock, Timeout

from topr_trl.recording.grading import Grading
from topr_trl.recording.listening import LONGEST_HEADER, listening
from topr_trl.recording.protection import protect
from topr_trl.recording.protocols import PROTOCOLS
from topr_trl.recording.proxy import Proxy
from topr_trl.recording.settings import RecordArguments, is_loopback
from topr_trl.recording.store import Store

_SECONDS_TO_KEEP = 2.0  # time to keep an idle connection, which vLLM's server (uvicorn) closes after 5 seconds


def record_command(args: RecordArguments) -> None:
    """Record until the process is stopped. Ctrl+C and SIGTERM end the whole process.

    Args:
        args (`RecordArguments`): Settings.

    Raises:
        ValueError: another recorder writes to the folder, or the recording has a different format or cannot be opened.
        OSError: the folder cannot be written, the port is in use, or the host does not exist.
    """
    args.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(args.folder / ".lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another topr record writes to {args.folder}. Stop it, or set a different output_dir."
        ) from None
    logging.getLogger("aiohttp.server").setLevel(logging.ERROR)
    with lock, suppress(KeyboardInterrupt):
        asyncio.run(_serve(args))


def application(args: RecordArguments, store: Store, session: aiohttp.ClientSession) -> web.Application:
    """Return the web application of a recorder.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
        session (`aiohttp.ClientSession`): HTTP session for requests to the model server.
    """
    app = web.Application(middlewares=[protect(args)], client_max_size=args.max_body_mb * 2**20)
    proxy = Proxy(args, store, session)
    grading = Grading(args, store, proxy.writer.redact, proxy.unrecorded)
    for path in ("/rewards", "/v1/rewards"):  # Applications can send rewards to their base URL, which ends in /v1.
        app.router.add_post(path, grading.reward)
    for protocol in PROTOCOLS.values():
        app.router.add_post(f"{protocol.base}/{protocol.endpoint}", partial(proxy.record, protocol))
    for path in ("/v1/{path:.+}", "/api/{path:.+}"):
        app.router.add_route("*", path, proxy.pass_on)
    app.router.add_get("/", grading.page)
    app.router.add_get("/rollouts", grading.rollouts)
    app.router.add_get("/rollouts/{name:.+}", grading.rollout)
    return app


def connections(args: RecordArguments) -> aiohttp.ClientSession:
    """Return an HTTP session for the model server. Several clients share the session, so it keeps no cookies.

    A server on another machine is reached through the proxy of the system, such as `HTTPS_PROXY`.

    Args:
        args (`RecordArguments`): Settings.
    """
    url = urlsplit(args.upstream)
    is_direct = is_loopback(url.hostname or "") or proxy_bypass(url.netloc)
    proxy = None if is_direct else getproxies().get(url.scheme)
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=args.upstream_timeout)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_SECONDS_TO_KEEP)
    return aiohttp.ClientSession(
        timeout=timeout,
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_field_size=LONGEST_HEADER,
        proxy=proxy,
    )


async def _serve(args: RecordArguments) -> None:
    store = Store(args.folder)
    if recovered := store.recover():
        calls = f"{recovered} call{'s' * (recovered != 1)}"
        print(f"{calls} had not ended when the last recorder stopped. Partial answers are kept.", flush=True)
    try:
        async with connections(args) as session, listening(application(args, store, session), args) as listener:
            _print_addresses(args, listener.port)
            stop, hurry = _stop_signals()
            await _check_server(args, session)
            await stop.wait()
            await listener.stop(hurry)
    finally:
        store.close()
    print(f"Stopped. The recording is in {args.folder}/.", flush=True)
    os._exit(0)  # Waiting for threads and for the teardown of PyTorch would take seconds on a busy machine.


async def _check_server(args: RecordArguments, session: aiohttp.ClientSession) -> None:
    """Print a note if the model server does not answer, or has no path `/models`. The server may start later."""
    url = f"{args.upstream}/models"
    headers = {"Authorization": f"Bearer {args.upstream_key}"} if args.upstream_key else {}
    try:
        async with session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as answer:
            if answer.status == 404:
                print(f"Note: {url} does not exist. The URL of most servers ends in /v1.", flush=True)
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"Note: {url} cannot be reached yet: {error}", flush=True)


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event for the first Ctrl+C or SIGTERM, and an event for the second of these signals."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def note() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, note)
    return stop, hurry


def _print_addresses(args: RecordArguments, port: int) -> None:
    host, folder = f"[{args.host}]" if ":" in args.host else args.host, shlex.quote(str(args.folder))
    address = f"http://{host}:{port}"
    print(
        f"Recording calls to {args.upstream} in {args.folder}/.\n"
        f"Base URL for your application: {address}/v1 (clients of Anthropic and Ollama: {address})\n"
        f"Read and grade rollouts:       {address}/\n"
        f"Press Ctrl+C to stop. Then: topr train --input {folder} --model_name_or_path ... --output_dir ...",
        flush=True,
    )
