"""Write `results.jsonl` with verifiers itself, which asks a server that answers like vLLM's.

    pip install verifiers==0.3.1 && python with_verifiers_0_3.py

The output is stored with the script, because verifiers and topr_trl cannot always be installed together.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import verifiers as vf
from datasets import Dataset

HERE = Path(__file__).parent


class Server(BaseHTTPRequestHandler):
    """Server that calls the tool once and then answers. The second prompt starts with the first prompt and answer."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turns = len(asked["messages"])
        prompt = list(range(1, 4 * turns + 1))
        if turns == 1:
            call = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}
            message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        else:
            message, reason = {"role": "assistant", "content": "It is 42"}, "stop"
        ids = list(range(len(prompt) + 1, len(prompt) + 4))
        logged = [{"token": f"t{n}", "logprob": -0.125 * n, "bytes": None, "top_logprobs": []} for n in range(3)]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": {"content": logged},
                  "token_ids": ids}  # fmt: skip
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3, "total_tokens": len(prompt) + 3}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                  "usage": usage, "prompt_token_ids": prompt}  # fmt: skip
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def right(completion, answer) -> float:
    return float(answer in completion[-1]["content"])


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    problems = Dataset.from_list([{"question": "6*7?", "answer": "42"}, {"question": "6*8?", "answer": "48"}])
    environment = vf.ToolEnv(eval_dataset=problems, tools=[multiply], rubric=vf.Rubric(funcs=[right]), max_turns=3)
    client = vf.ClientConfig(api_base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="NONE")
    environment.evaluate_sync(
        client, "m", {"logprobs": True}, rollouts_per_example=1, max_concurrent=1, save_results=True,
        results_path=HERE / "verifiers-0.3.1", state_columns=["trajectory"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
