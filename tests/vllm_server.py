"""Start a vLLM server with the bundled model, for tests."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from topr_trl.tasks import arithmetic

ADAPTERS = 4  # that the server can load at the same time


@contextmanager
def vllm_server(folder):
    """Yield the address of a server on the CPU that knows the model as `m`, and can load adapters."""
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(arithmetic.CARELESS_MODEL),
        "--served-model-name", "m", str(arithmetic.CARELESS_MODEL), "--generation-config", "vllm",
        "--chat-template", str(template), "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "512", "--logprobs-mode", "processed_logprobs", "--enable-lora", "--max-lora-rank", "8",
        "--max-loras", str(ADAPTERS),
        # Requests have seeds. With chunked prefill, vLLM rewinds their generators, which is not possible on a CPU.
        "--no-enable-chunked-prefill",
    ]  # fmt: skip
    environment = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not _is_up(address):
            assert process.poll() is None, log.read_text()[-4_000:]
            assert time.monotonic() < deadline, log.read_text()[-4_000:]
            time.sleep(0.2)
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
