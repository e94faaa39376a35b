"""Measure the overhead of `topr record` by comparing the same calls with and without it.

python -m benchmarks.recording                        # 64 streams, ten minutes through the recorder
python -m benchmarks.recording --vllm MODEL           # tokens per second of vLLM, in an environment with vLLM

The server, the recorder and the client are processes on the same machine. The server writes the time into each event,
so the client knows how long the event took. The script adds its result to benchmarks/results/recording.json.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from aiohttp import web

from topr_trl.recording.store import NAME, read_rollouts

RESULTS = Path(__file__).parent / "results" / "recording.json"
RATE = 20  # events per second of each stream
EVENTS = 200  # events of a stream


async def _stream(request: web.Request) -> web.StreamResponse:
    """Send EVENTS events, RATE per second. Each event has its send time, and the name of the client's stream."""
    asked = await request.json()
    name, response = asked["messages"][0]["content"], web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    began = time.monotonic()
    for n in range(EVENTS):
        await asyncio.sleep(max(0.0, began + n / RATE - time.monotonic()))
        choice = {
            "index": 0, "delta": {"content": f"{name}.{n} "}, "finish_reason": "stop" if n == EVENTS - 1 else None,
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
            "token_ids": [n],
        }  # fmt: skip
        event = {"id": "x", "object": "chat.completion.chunk", "sent": time.monotonic(), "choices": [choice]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "owned_by": "vllm", "root": "m"}]})


def serve(port: int) -> None:
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", _stream)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


@contextmanager
def _running(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended.")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _receive(port: int, streams: int, seconds: float, prefix: str = "") -> tuple[list[float], set[str]]:
    """Return the delay of each event in milliseconds, and the names of the streams that ended."""
    delays: list[float] = []
    ended: set[str] = set()
    stop = time.monotonic() + seconds

    async def one(session: aiohttp.ClientSession, place: int) -> None:
        await asyncio.sleep(place / streams)
        count = 0
        while time.monotonic() < stop:
            name = f"{prefix}stream{place}-{count}"
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": name}]}
            async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        delays.append(1000 * (time.monotonic() - event["sent"]))
                        if not event["choices"][0]["delta"]["content"].startswith(f"{name}."):
                            raise RuntimeError(f"The stream {name} got an event of another stream: {event}.")
            ended.add(name)
            count += 1

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(one(session, place) for place in range(streams)))
    return delays, ended


def _memory(process: int) -> float:
    """Return the resident memory of a process, in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def _count_streams(recording: Path, ended: set[str]) -> Counter[str]:
    """Count the streams that are stored once and as the client received them (`right`), and the others (`wrong`)."""
    stored: dict[str, list[str]] = {}
    for rollout in read_rollouts(recording / NAME):
        (call,) = rollout["calls"]
        choices = (call["response"] or {}).get("choices") or [{"message": {}}]
        name = call["request"]["messages"][0]["content"]
        stored.setdefault(name, []).append(choices[0]["message"].get("content"))
    right = sum(stored.get(name) == ["".join(f"{name}.{n} " for n in range(EVENTS))] for name in ended)
    return Counter(right=right, wrong=len(ended) - right)


def load(streams: int, minutes: float) -> dict[str, Any]:
    """Stream without the recorder for at most a minute, then through it, then without it again."""
    server, port = _free_port(), _free_port()
    found: dict[str, Any] = {"streams": streams, "events_per_second": RATE, "minutes": minutes}
    with TemporaryDirectory() as folder, _running("benchmarks.recording", "--serve", str(server), port=server):
        record = ("topr_trl", "record", "--upstream", f"http://127.0.0.1:{server}/v1", "--output_dir", folder)
        direct, _ = asyncio.run(_receive(server, streams, 60 * min(minutes, 1)))
        with _running(*record, "--port", str(port), port=port) as process:
            asyncio.run(_receive(port, streams, 5))
            memory = [_memory(process.pid)]
            through: list[float] = []
            rows: Counter[str] = Counter()
            for part in range(4):
                delays, ended = asyncio.run(_receive(port, streams, 15 * minutes, f"part{part}-"))
                through += delays
                memory.append(_memory(process.pid))
                rows += _count_streams(Path(folder), ended)
        again, _ = asyncio.run(_receive(server, streams, 60 * min(minutes, 1)))
    for name, delays in (("without", direct + again), ("through", through)):
        points = statistics.quantiles(delays, n=100)
        found[name] = {"events": len(delays), "median_ms": points[49], "p95_ms": points[94], "p99_ms": points[98]}
    found["overhead_ms"] = found["through"]["median_ms"] - found["without"]["median_ms"]
    found["memory_mib"] = memory
    found["rows"] = dict(rows)
    return found


async def _tokens_per_second(port: int, calls: int, at_once: int) -> float:
    """Return the tokens per second of several calls with 64 tokens each."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Count from one to a hundred."}], "max_tokens": 64,
            "ignore_eos": True, "stream": True}  # fmt: skip
    limit = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession) -> None:
        async with limit, session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            await answer.read()
            answer.raise_for_status()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        began = time.monotonic()
        await asyncio.gather(*(one(session) for _ in range(calls)))
        return calls * 64 / (time.monotonic() - began)


def vllm(model: str, rounds: int) -> dict[str, Any]:
    """Compare the throughput of vLLM without a recorder, through one, and through one that requests no token ids."""
    server, auto, never = (_free_port() for _ in range(3))
    serve = ("vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m", "--port", str(server),
             "--max-model-len", "1024", "--generation-config", "vllm")  # fmt: skip
    ports = {"without": server, "through": auto, "without_tokens": never}
    speeds: dict[str, list[float]] = {name: [] for name in ports}
    with ExitStack() as running:
        running.enter_context(_running(*serve, port=server))
        for port, token_ids in ((auto, "auto"), (never, "never")):
            folder = running.enter_context(TemporaryDirectory())
            record = ("topr_trl", "record", "--upstream", f"http://127.0.0.1:{server}/v1", "--output_dir", folder)
            running.enter_context(_running(*record, "--token_ids", token_ids, "--port", str(port), port=port))
        for port in ports.values():
            asyncio.run(_tokens_per_second(port, 16, 16))
        for n in range(rounds):
            for name in sorted(ports, reverse=n % 2 == 1):
                speeds[name].append(asyncio.run(_tokens_per_second(ports[name], 32, 16)))
            print(", ".join(f"{name} {found[-1]:.1f} tokens/s" for name, found in speeds.items()), flush=True)
    found: dict[str, Any] = {"model": Path(model).name, "rounds": rounds, "tokens_per_second": speeds}
    for name in ("through", "without_tokens"):
        ratios = [speed / base for speed, base in zip(speeds[name], speeds["without"], strict=True)]
        found[f"median_ratio_{name}"] = statistics.median(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="streams at the same time")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of streams through the recorder")
    parser.add_argument("--vllm", help="folder or Hub name of a model: measure vLLM's tokens per second")
    parser.add_argument("--rounds", type=int, default=8, help="times that --vllm repeats its three measurements")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    found = vllm(args.vllm, args.rounds) if args.vllm else load(args.streams, args.minutes)
    command = "python -m benchmarks.recording" + f" --vllm MODEL --rounds {args.rounds}" * bool(args.vllm)
    result = {"measure": "vllm" if args.vllm else "load", "date": time.strftime("%Y-%m-%d"),
              "cores": os.cpu_count(), **found, "command": command}  # fmt: skip
    results = [*json.loads(RESULTS.read_text()), result] if RESULTS.exists() else [result]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
