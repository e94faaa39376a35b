"""Start a vLLM server with the bundled model, for tests."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from topr_trl.tasks import arithmetic


@contextmanager
def vllm_server(folder, *options, **environment):
    """Yield the address of a server on the CPU. Options and environment variables are vLLM's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(arithmetic.CARELESS_MODEL),
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", *options,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not _is_up(address):
            assert process.poll() is None, log.read_text()[-4_000:]
            assert time.monotonic() < deadline, log.read_text()[-4_000:]
            time.sleep(1.0)
        yield address
    finally:
        process.terminate()
        process.wait()


def _is_up(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
