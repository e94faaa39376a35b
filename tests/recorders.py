"""Start a recorder in a thread or in a process, and an OpenAI-like server in a thread, for tests."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from topr_trl.recording.listening import listening
from topr_trl.recording.server import application, connections
from topr_trl.recording.settings import RecordArguments
from topr_trl.recording.store import NAME, Store, read_rollouts

WORDS = ["It", " is", " 4", "."]
PROMPT_IDS = [1, 2, 3]


class Upstream:
    """Server that answers with WORDS, in vLLM's format. Tests set its attributes, and read `requests`."""

    def __init__(self):
        self.requests, self.headers, self.fault, self.delay, self.left = [], [], None, 0.0, 0
        self.words, self.owner, self.raw = WORDS, "vllm", None
        self.names, self.lists = ["m"], 0  # names of the models, and number of requests for their list
        self.gate = None  # event; a stream waits for it after its first word

    def application(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.text)
        app.router.add_route("*", "/{path:.*}", self.other)
        return app

    async def other(self, request):
        """Return the path, set two cookies, and redirect if the path has `moved`. The path `long` has a long header."""
        self.headers.append(request.headers.copy())
        if "moved" in request.path:
            raise web.HTTPTemporaryRedirect(f"/elsewhere?{request.query_string}")
        response = web.Response(text=request.raw_path)
        if request.path.endswith("long"):
            response.headers["x-long"] = "x" * 60_000
        for cookie in ("a=1", "b=2"):
            response.headers.add("Set-Cookie", cookie)
        return response

    async def models(self, request):
        self.lists += 1
        model = {"object": "model", "owned_by": self.owner, "root": "/weights/m"}
        return web.json_response({"object": "list", "data": [{"id": name, **model} for name in self.names]})

    async def chat(self, request):
        return await self.answered(request, "chat.completion")

    async def text(self, request):
        return await self.answered(request, "text_completion")

    async def answered(self, request, kind):
        asked = await request.json()
        self.requests.append(asked)
        self.headers.append(request.headers.copy())
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "model m is busy", "code": 503}}, status=503)
        if self.fault == "echo":
            said = f"{request.rel_url} {request.headers.get('Authorization')} {request.headers.get('x-api-key')}"
            return web.json_response({"error": {"message": said}}, status=400)
        if self.fault == "broken":
            request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")
            request.transport.close()
            return web.Response()
        if self.fault == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.left += 1
                raise
        if self.raw is not None:
            kind = "text/event-stream" if asked.get("stream") else "application/json"
            return web.Response(body=self.raw, content_type=kind)
        if not asked.get("stream"):
            return web.json_response(self.whole(asked, kind))
        return await self.stream(request, asked, kind)

    def whole(self, asked, kind):
        ids = asked.get("return_token_ids")
        choices = []
        for n in range(asked.get("n") or 1):
            choice = {"index": n, "finish_reason": "stop", "logprobs": None}
            if kind == "chat.completion":
                choice["message"] = {"role": "assistant", "content": "".join(self.words), "tool_calls": []}
            else:
                choice["text"] = "".join(self.words)
            if self.wants_logps(asked, kind):
                choice["logprobs"] = self.logps(kind, range(len(self.words)))
            choice["token_ids"] = list(range(10, 10 + len(self.words))) if ids else None
            if kind != "chat.completion":
                choice["prompt_token_ids"] = PROMPT_IDS if ids else None
            choices.append(choice)
        more = {"prompt_token_ids": PROMPT_IDS if ids else None} if kind == "chat.completion" else {}
        return {"id": "x", "object": kind, "created": 1, "model": "m", "choices": choices, "usage": {}, **more}

    def wants_logps(self, asked, kind):
        return asked.get("logprobs") if kind == "chat.completion" else asked.get("logprobs") is not None

    def logps(self, kind, places):
        if kind == "chat.completion":
            of_token = [
                {"token": self.words[k], "logprob": -0.5 * k, "bytes": None, "top_logprobs": []} for k in places
            ]
            return {"content": of_token}
        return {"tokens": [self.words[k] for k in places], "token_logprobs": [-0.5 * k for k in places]}

    async def stream(self, request, asked, kind):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for k, word in enumerate(self.words):
                for n in range(asked.get("n") or 1):
                    event = self.event(asked, kind, k, n, word)
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                if self.fault == "die" and k == 1:
                    request.transport.abort()
                    return response
                if self.fault == "stall" and k == 1:
                    await asyncio.sleep(60)
                if self.gate is not None:
                    await asyncio.to_thread(self.gate.wait, 60)
                await asyncio.sleep(self.delay)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    def event(self, asked, kind, k, n, word):
        last = k == len(self.words) - 1
        choice = {"index": n, "finish_reason": "stop" if last else None, "logprobs": None}
        if kind == "chat.completion":
            choice["delta"] = {"content": word, **({"role": "assistant"} if k == 0 else {})}
        else:
            choice["text"] = word
        if self.wants_logps(asked, kind):
            choice["logprobs"] = self.logps(kind, [k])
        event = {"id": "x", "object": f"{kind}.chunk", "created": 1, "model": "m", "choices": [choice]}
        ids = asked.get("return_token_ids")
        choice["token_ids"] = [10 + k] if ids else None
        if k == 0:
            (event if kind == "chat.completion" else choice)["prompt_token_ids"] = PROMPT_IDS if ids else None
        return event


class Running:
    """A recorder in a thread, with its address, its server and its folder."""

    def __init__(self, folder, upstream, address, direct, store, loop):
        self.folder, self.upstream, self.address, self.direct = folder, upstream, address, direct
        self.store, self.loop = store, loop

    def fill(self):
        """Prevent the database from growing, as on a full disk."""

        async def fill():
            for connection in (self.store._connection, self.store._for_large):
                (pages,) = connection.execute("PRAGMA page_count").fetchone()
                connection.execute(f"PRAGMA max_page_count = {pages}")

        asyncio.run_coroutine_threadsafe(fill(), self.loop).result(10)

    def rollouts(self):
        return list(read_rollouts(self.folder / NAME))

    def connect(self):
        host, _, port = self.address.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=5)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


_RECORDER = """
import sys
from topr_trl.recording import listening
from topr_trl.recording.server import record_command
from topr_trl.recording.settings import RecordArguments
listening.SECONDS_TO_END = 600  # Without the second Ctrl+C, the process would not end in time.
record_command(RecordArguments(sys.argv[1], sys.argv[2], port=0))
"""


def start_recorder(upstream, folder):
    """Start a recorder in a process, and return the process and the recorder's address."""
    command = [sys.executable, "-c", _RECORDER, f"{upstream}/v1", str(folder)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    said = ""
    while "Press Ctrl+C" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return process, said.partition("Read and grade rollouts:")[2].split()[0].rstrip("/")


@contextmanager
def recorder(folder, server=None, **settings):
    """Yield a running recorder. `settings` are settings of `topr record`."""
    server, loop, found = server or Upstream(), asyncio.new_event_loop(), {}
    ready, stop = threading.Event(), asyncio.Event()

    async def serve():
        runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found["upstream"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        args = RecordArguments(settings.pop("upstream", found["upstream"] + "/v1"), str(folder), port=0, **settings)
        found["store"] = Store(args.folder)
        found["store"].recover()
        async with (
            connections(args) as session,
            listening(application(args, found["store"], session), args) as listener,
        ):
            found["recorder"] = f"http://127.0.0.1:{listener.port}"
            ready.set()
            await stop.wait()
        await runner.cleanup()
        found["store"].close()

    def run():
        try:
            loop.run_until_complete(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(20)
    try:
        yield Running(folder, server, found["recorder"], found["upstream"], found["store"], loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
