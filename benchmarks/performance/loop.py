"""Time `topr iterate` with and without overlap of sampling and training, and the idle time of both sides."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.performance.page import ROOT

_STEP = re.compile(r"\[(?:(\w+) )?\d+/\d+\] ([\w-]+) -> (\S+?)(:.*)?$")  # title of a step, and its result at the end


def measure(overlap: int, iterations: int, problems: int) -> dict[str, Any]:
    """Time a loop with the bundled model, with one thread per process.

    Returns:
        `total`, in seconds. An overlapped loop also has `window`, the seconds from the start of the first training to
        the end of the last, and `busy`. `busy` has the working seconds of sampling and of training in this window,
        including process starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "topr_trl", "iterate", "--output_dir", str(Path(folder) / "loop"),
            "--iterations", str(iterations), "--overlap", str(overlap), "--num_train_problems", str(problems),
            "--num_test_problems", str(problems), "--num_shots", "0", "--num_generations", "16",
            "--num_generations_eval", "16", "--max_new_tokens", "120", "--curation", "uniform",
            "--learning_rate", "1e-4", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "1",
            "--num_train_epochs", "2", "--gradient_checkpointing", "False", "--bf16", "False", "--use_cpu", "True",
            "--dtype", "float32", "--report_to", "none", "--disable_tqdm", "True",
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1"}
        began, lines = time.perf_counter(), []
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip()))
        if process.wait():
            raise RuntimeError("\n".join(line for _, line in lines[-30:]))
    found: dict[str, Any] = {"total": lines[-1][0]}
    return {**found, **_sides(lines)} if overlap else found


def _sides(lines: list[tuple[float, str]]) -> dict[str, Any]:
    begun: dict[tuple[str, str, str], float] = {}
    intervals: dict[str, list[tuple[str, float, float]]] = {"sampling": [], "training": []}
    for at, line in lines:
        if step := _STEP.match(line):
            side, stage, folder, ended = step.groups()
            if ended:
                intervals[side].append((stage, begun[side, stage, folder], at))
            else:
                begun[side, stage, folder] = at
    trained = [(begin, end) for stage, begin, end in intervals["training"] if stage == "train"]
    first, last = trained[0][0], trained[-1][1]
    busy = {
        side: sum(max(min(end, last) - max(begin, first), 0.0) for _, begin, end in of_side)
        for side, of_side in intervals.items()
    }
    return {"window": last - first, "busy": busy}
