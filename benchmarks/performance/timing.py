"""Runs of trainers in turn, so that what else the machine does hits all of them alike."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.memory import peak_of
from benchmarks.performance.work import Build, Case


class Clock(TrainerCallback):
    """Seconds of the steps, without the first."""

    def __init__(self) -> None:
        self.start, self.seconds, self.steps = 0.0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (1, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.start, self.seconds, self.steps = now, now - self.start, state.max_steps - 1


def seconds_per_step(build: Build, case: Case) -> float:
    """Of a fresh trainer over all rows of the case, the first step left out."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        build(case, folder, [clock]).train()
    return clock.seconds / clock.steps


def in_turn(
    measures: dict[str, Callable[[], float]], repeats: int, say: Callable[[str], Any]
) -> dict[str, list[float]]:
    """Every measure `repeats` times, round after round; a round starts with another one each time."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            say(name)
            found[name].append(measures[name]())
    return found


def peak_memory(build: Build, case: Case) -> int:
    """Most bytes of tensors alive at once, weights included, from before the model is made to the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        if torch.cuda.is_available() and not case.settings.get("use_cpu"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            build(case, folder, []).train()
            return torch.cuda.max_memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            build(case, folder, []).train()
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(os.fspath(trace))
        return peak_of(json.loads(trace.read_text())["traceEvents"])
