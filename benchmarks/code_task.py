"""Task of `examples/code_generation.py`: its tiny model, logged rows and held-out tasks."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from datasets import Dataset
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.setting import CACHE, HERE, summary
from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    SamplingArguments,
    evaluate_rows,
    load_rows,
    sample_completions,
    score_completions,
)
from topr_trl.pipeline.arms import Arm
from topr_trl.sandbox import run_tests

MAX_NEW_TOKENS = 48


def folder() -> Path:
    """Return the folder that the example wrote: `warm-up` (model), `log` (rows), `before` (held-out rows).

    The example runs only if this folder is missing.
    """
    CACHE.mkdir(exist_ok=True)
    place = CACHE / "code"
    with FileLock(CACHE / "code.lock"):
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as name:
                subprocess.run([sys.executable, HERE.parent / "examples" / "code_generation.py"], cwd=name, check=True)
                os.replace(Path(name) / "topr-code", place)
    return place


def run(arm: Arm, learning_rate: float, num_rows: int, seed: int) -> dict[str, float]:
    """Train on rows of the log, and evaluate on the held-out tasks.

    Args:
        arm: arm of `topr trial`, with settings of `OfflineTOPRConfig`.
        learning_rate: learning rate.
        num_rows: approximate number of rows. All rows of a task are used, or none.
        seed: seed of the choice of tasks, of training and of the evaluation.
    """
    place = folder()
    log, before = load_rows(place / "log"), load_rows(place / "before")
    tasks = np.random.default_rng(seed).permutation(np.unique(log["problem_id"]))
    chosen = np.isin(log["problem_id"], tasks[: num_rows * len(tasks) // len(log)])
    tokenizer = AutoTokenizer.from_pretrained(place / "warm-up")
    with tempfile.TemporaryDirectory() as out:
        args = OfflineTOPRConfig(
            out, learning_rate=learning_rate, lr_scheduler_type="constant", per_device_train_batch_size=32,
            per_device_eval_batch_size=128, optim="adamw_torch", save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=seed, **arm.settings,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(place / "warm-up")
        trainer = OfflineTOPRTrainer(model, args, log.select(np.flatnonzero(chosen)), processing_class=tokenizer)
        trainer.train()
        sampling = SamplingArguments(num_generations=8, max_new_tokens=MAX_NEW_TOKENS)
        rows = sample_completions(trainer.model, tokenizer, _held_out(before), sampling, seed=seed)
    return summary(evaluate_rows(score_completions(rows, run_tests)))


def _held_out(rows: Dataset) -> Dataset:
    _, first = np.unique(rows["problem_id"], return_index=True)
    return rows.select(first).select_columns(["problem_id", "prompt", "answer"])
