import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def launch(processes, *command, timeout=300, again=False):
    """Run a script as a user would, in one or two processes on the CPU, and return what it printed.

    With `again`, a run that hangs is tried once more: gloo can hang when a process ends (see launched.py).
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={processes}", "--num_machines=1",
                "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]  # fmt: skip
    # Accelerate's launcher starts several processes on one machine for GPUs alone; on the CPU they are asked for so.
    launcher += ["--multi_gpu"] if processes > 1 else []
    command = [*launcher, *map(str, command)]

    def run():
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)

    try:
        done = run()
    except subprocess.TimeoutExpired:
        if not again:
            raise
        done = run()
    assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["offline", "online", "curated"])
def test_two_processes_give_the_loss_of_one(kind, tmp_path):
    for processes in (1, 2):
        launch(processes, ROOT / "tests" / "launched.py", kind, tmp_path)
    one, two = (json.loads((tmp_path / f"{kind}-{n}.json").read_text()) for n in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["logs"]) == len(two["logs"]) == 3
    for a, b in zip(one["logs"], two["logs"], strict=True):
        for name in a:
            if name in ("loss", "grad_norm", "reward") or name.startswith("topr/"):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    first, second = (torch.load(tmp_path / f"{kind}-{n}.pt") for n in (1, 2))
    start = max((first[name] - second[name]).abs().max().item() for name in first)
    assert start < 2e-5


@pytest.mark.processes
@pytest.mark.slow
def test_gsm8k_example_in_two_processes(tmp_path):
    printed = launch(
        2, ROOT / "examples" / "gsm8k.py", "--output_dir", tmp_path, "--num_train_problems", 8,
        "--num_test_problems", 6,
        "--num_candidates", 4, "--eval_samples", 4, "--iterations", 2, "--per_device_train_batch_size", 4,
        "--curation", "anna_karenina", "--iteration_size", 12,
        "--use_peft", "--lora_target_modules", "q_proj", "v_proj", again=True,
    )  # fmt: skip
    assert "pass@1" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["before", "iteration 1", "iteration 2"]
    assert results["before"]["num_problems"] == 6
    assert (tmp_path / "results.png").is_file()
    assert len(list((tmp_path / "iteration 1" / "candidates").glob("*.parquet"))) == 2
