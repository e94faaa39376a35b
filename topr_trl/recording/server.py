"""Run `topr record`."""

import asyncio
import logging
import os
import signal
from contextlib import suppress

import aiohttp
from aiohttp import web
from filelock import FileLock, Timeout

from topr_trl.recording.grading import Grading
from topr_trl.recording.protection import protect
from topr_trl.recording.proxy import Proxy
from topr_trl.recording.settings import RecordArguments
from topr_trl.recording.store import Store

_SECONDS_TO_END = 2.5  # aiohttp waits for this time twice, so running answers have 5 seconds to end after Ctrl+C
_SECONDS_TO_KEEP = 2.0  # time to keep an idle connection. vLLM's server (uvicorn) closes it after 5 seconds.


def record_command(args: RecordArguments) -> None:
    """Record until the process is stopped.

    Args:
        args (`RecordArguments`): Settings.

    Raises:
        ValueError: another recorder writes to the folder, or the recording has a different format.
        OSError: the folder cannot be written, or the port is in use.
    """
    args.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(args.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another topr record writes to {args.folder}. Stop it, or set a different output_dir."
        ) from None
    logging.getLogger("aiohttp.server").setLevel(logging.ERROR)
    with lock, suppress(KeyboardInterrupt):
        asyncio.run(_serve(args))
    print(f"Stopped. The recording is in {args.folder}/.", flush=True)


def application(args: RecordArguments, store: Store, session: aiohttp.ClientSession) -> web.Application:
    """Return the web application of a recorder.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
        session (`aiohttp.ClientSession`): HTTP session for requests to the model server.
    """
    app = web.Application(middlewares=[protect(args)], client_max_size=args.max_body_mb * 2**20)
    proxy = Proxy(args, store, session)
    grading = Grading(args, store, proxy.writer.redact)
    for path in ("/rewards", "/v1/rewards"):  # Applications can send rewards to their base URL, which ends in /v1.
        app.router.add_post(path, grading.reward)
    app.router.add_post("/v1/{endpoint:chat/completions|completions}", proxy.record)
    app.router.add_route("*", "/v1/{endpoint:.+}", proxy.pass_on)
    app.router.add_get("/", grading.page)
    app.router.add_get("/rollouts", grading.rollouts)
    app.router.add_get("/rollouts/{name:.+}", grading.rollout)
    return app


def connections(args: RecordArguments) -> aiohttp.ClientSession:
    """Return an HTTP session for the model server. It keeps no cookies, because several clients share it.

    Args:
        args (`RecordArguments`): Settings.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=args.upstream_timeout)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_SECONDS_TO_KEEP)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def _serve(args: RecordArguments) -> None:
    store = Store(args.folder)
    if recovered := store.recover():
        calls = f"{recovered} call{'s' * (recovered != 1)}"
        print(f"{calls} had not ended when the last recorder stopped. Partial answers are kept.", flush=True)
    try:
        async with connections(args) as session:
            # Without handler_cancellation, the model server would go on generating after a client has left.
            runner = web.AppRunner(
                application(args, store, session), handler_cancellation=True, access_log=None,
                shutdown_timeout=_SECONDS_TO_END,
            )  # fmt: skip
            await runner.setup()
            try:
                site = web.TCPSite(runner, args.host, args.port)
                try:
                    await site.start()
                except OSError as error:
                    reason = f"Cannot listen on {args.host}, port {args.port}: {os.strerror(error.errno or 0)}."
                    raise OSError(f"{reason} Set a different port or host.") from error
                _print_addresses(args, runner.addresses[0][1])
                await _check_server(args, session)
                await _until_stopped()
            finally:
                await runner.cleanup()
    finally:
        store.close()


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


async def _until_stopped() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def _print_addresses(args: RecordArguments, port: int) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{port}"
    print(
        f"Recording calls to {args.upstream} in {args.folder}/.\n"
        f"Base URL for your application: {address}/v1\n"
        f"Read and grade rollouts:       {address}/\n"
        f"Press Ctrl+C to stop. Then: topr train --input {args.folder} --model_name_or_path ... --output_dir ...",
        flush=True,
    )
