"""Time trainers in turn, so that other load on the machine affects all of them equally."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.kernels import chunked_logprob

from benchmarks.memory import allocations, peak_of
from benchmarks.performance.work import Build, Case, offline_topr


class Clock(TrainerCallback):
    """Callback that measures the `seconds` of all `steps` except the first."""

    def __init__(self) -> None:
        self.start, self.seconds, self.steps = 0.0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (1, state.max_steps):
            now = time.perf_counter()
            self.start, self.seconds, self.steps = now, now - self.start, state.max_steps - 1


def seconds_per_step(build: Build, case: Case) -> float:
    """Return the seconds per step of a new trainer over all rows of a case, without the first step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        build(case, folder, [clock]).train()
    return clock.seconds / clock.steps


def in_turn(
    measures: dict[str, Callable[[], float]], repeats: int, say: Callable[[str], Any]
) -> dict[str, list[float]]:
    """Take each measure once per round, for `repeats` rounds. Each round starts with a different measure."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            say(name)
            found[name].append(measures[name]())
    return found


def peak_memory(build: Build, case: Case) -> int:
    """Return the peak of allocated bytes, from before the model is created to the end of the run."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        with allocations() as profile:
            build(case, folder, []).train()
        return peak_of(profile, Path(folder) / "trace.json")


def scoring_seconds(build: Build, case: Case) -> float:
    """Return the seconds of the log μ pass, over the rows of a case that need log μ."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(case, folder, [])
        start = time.perf_counter()
        trainer.compute_log_mu()
        return time.perf_counter() - start


def scoring_peak(case: Case) -> dict[str, int]:
    """Return the peak of bytes in the log μ pass of one micro-batch, and in a forward pass that keeps all logits.

    Tiles of the head have 256 tokens, because the micro-batch is smaller than TRL's tiles of 4,096 tokens.
    """
    found = {}
    chunked_logprob.TOKEN_CHUNK_SIZE, usual = 256, chunked_logprob.TOKEN_CHUNK_SIZE
    with tempfile.TemporaryDirectory() as folder:
        trainer = offline_topr()(case, folder, [])
        batch = trainer.data_collator.collate_tokens(list(trainer.train_dataset))
        tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
        targets = batch["input_ids"][:, 1:, None]
        passes: dict[str, Callable[[], Any]] = {
            "log mu pass": lambda: trainer._policy_logps(trainer.model, batch),
            "with logits": lambda: trainer.model(**tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, targets),
        }
        for name, forward in passes.items():
            with torch.no_grad(), allocations() as profile:
                forward()
            found[name] = peak_of(profile, Path(folder) / "trace.json")
    chunked_logprob.TOKEN_CHUNK_SIZE = usual
    return found
