"""Setting of all experiments: base models, problems, completions, evaluation.

A task is a base model with its problems, which `topr_trl.tasks.arithmetic` generates:

- `bundled`: the model and the problems of the demo.
- `main` (two steps) and `hard` (five steps, so the base model is rarely correct), made by version 0.2 of
  `scripts/make_careless_model.py`.
- The models of `benchmarks/bases.py`, with different kinds and rates of errors, some with the problems of
  `benchmarks/habits.py`.

All models except `bundled` only know the sentences in `ONE_WORDING`, which have one wording for a product.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import habits, pretrained
from benchmarks.cells import Unfinished
from benchmarks.decoding import DRAWS, draw
from benchmarks.experiment import TUNING_SEED
from benchmarks.rows import Rows
from topr_trl import (
    Evaluation,
    curate,
    evaluate_rows,
    score_completions,
)
from topr_trl.tasks import arithmetic, gsm8k

HERE = Path(__file__).parent
CACHE = HERE / ".cache"
BUNDLED = "bundled"
ONE_WORDING = (arithmetic.OF, arithmetic.FINDS, arithmetic.GIVES)
TASK_STEPS = {"main": 2, "hard": 5}
TEST_SEED, VALIDATION_SEED = 2, 3  # learning rates are chosen on the validation problems
MAX_NEW_TOKENS = {"main": 80, "hard": 170, **pretrained.BASES}
OF_OTHER_TASKS = 120  # a correct answer has about 40 tokens


@dataclass(frozen=True)
class Profile:
    """Sizes of the experiments."""

    name: str
    seeds: int
    problems: int  # training problems
    candidates: int  # completions of each training problem
    steps: int  # steps of 32 rows: one epoch
    test_problems: int
    rounds: int  # rounds of the long run
    updates: int  # updates of the experiment `staleness`

    @property
    def is_quick(self) -> bool:
        """Return whether the profile only tests one arm of each loop."""
        return self.seeds == 1

    @property
    def sizes(self) -> str:
        """Return the sizes that all results depend on."""
        return f"{self.problems}x{self.candidates}, {self.steps} steps, {self.test_problems} test problems"


PROFILES = {
    "full": Profile("full", 5, 400, 16, 80, 400, 20, 1_024),
    "quick": Profile("quick", 1, 200, 8, 40, 200, 1, 128),
}
BATCH_ROWS = 32


def folder(task: str) -> Path:
    """Return the folder of a base model."""
    if task == BUNDLED:
        return arithmetic.CARELESS_MODEL
    return CACHE / task if task in pretrained.BASES else HERE / "models" / task


def has_copies(base: str) -> bool:
    """Return whether the cache has the weights of a pretrained model, and its problems."""
    problems = [CACHE / f"gsm8k_{split}.jsonl" for split in ("train", "test")] if base == pretrained.QWEN else []
    return all(path.exists() for path in (folder(base) / "model.safetensors", *problems))


@lru_cache
def tokenizer(task: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a task."""
    PartialState(cpu=True)
    disable_progress_bars()
    return AutoTokenizer.from_pretrained(folder(task if task in (BUNDLED, *TASK_STEPS, *pretrained.BASES) else "main"))


def base_model(task: str) -> PreTrainedModel:
    """Return a fresh copy of the base model in float32, on the default device. Pretrained models have an adapter."""
    PartialState(cpu=True)
    if task in pretrained.BASES:
        return pretrained.load(folder(task), tokenizer(task), pretrained.EXAMPLES[task])
    model = AutoModelForCausalLM.from_pretrained(folder(task), dtype=torch.float32)
    return model.to(torch.get_default_device())


@lru_cache
def model_hash(task: str) -> str:
    """Return a hash of the base model's weights, which separates the results of different weights.

    Raises:
        Unfinished: there is no base model for this task.
    """
    weights = folder(task) / "model.safetensors"
    if not weights.exists():
        if task in pretrained.HASHES:
            return pretrained.HASHES[task]
        raise Unfinished(f"{weights.parent} is missing: make it with python -m benchmarks.bases")
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:12]


@lru_cache
def problems(task: str, count: int, seed: int) -> Dataset:
    """Return problems of a task, as `topr_trl.tasks.gsm8k` prepares them."""
    disable_progress_bars()
    if task == BUNDLED:
        return gsm8k.prepare(arithmetic.arithmetic_dataset(count, seed), num_shots=0)
    if task in pretrained.BASES:
        return _of_gsm8k(count, seed) if task == pretrained.QWEN else pretrained.problems(count, seed)
    if task in habits.AUTHORS:
        return gsm8k.prepare(habits.problems(task), num_shots=0)
    if task in TASK_STEPS:
        rows = arithmetic.arithmetic_dataset(count, seed, TASK_STEPS[task], ONE_WORDING)
        return gsm8k.prepare(rows, num_shots=0)
    rows = arithmetic.arithmetic_dataset(4 * count, seed, sentences=ONE_WORDING)  # four of nine have one multiplication
    one = [i for i, answer in enumerate(rows["answer"]) if answer.count("*") == 1]
    return gsm8k.prepare(rows.select(one[:count]), num_shots=0)


def _of_gsm8k(count: int, seed: int) -> Dataset:
    """Return problems of GSM8K with at most two calculations. Seeds have different problems."""
    split = "test" if seed == TEST_SEED else "train"
    lines = (CACHE / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["answer"].count("<<") <= 2]
    place = 0 if split == "test" else (VALIDATION_SEED, 100 + TUNING_SEED, *range(100, 110)).index(seed)
    order = np.random.default_rng(0).permutation(len(rows))[count * place : count * (place + 1)]
    return gsm8k.prepare(Dataset.from_list([rows[n] for n in order]), num_shots=0)


def sample(
    model: PreTrainedModel, task: str, questions: Dataset, count: int, seed: int, temperature: float = 1.0
) -> Dataset:
    """Return `count` scored completions of each question, with columns `extracted` and `verdict`."""
    longest = MAX_NEW_TOKENS.get(task, OF_OTHER_TASKS)
    rows = draw(model, tokenizer(task), questions, count, longest, seed, temperature)
    return score_completions(rows, gsm8k.judge)


def candidates(task: str, profile: Profile, seed: int, count: int | None = None) -> Rows:
    """Return the base model's completions of the training problems of a seed."""
    return untrained(task, profile.problems, seed, count or profile.candidates, seed)


@lru_cache(maxsize=16)  # reading takes a tenth of an arm's time
def untrained(task: str, size: int, seed: int, count: int, draw_seed: int, temperature: float = 1.0) -> Rows:
    """Return `count` completions of each training problem of a seed by the base model, which are drawn once."""
    # Another device would draw other rows. Pretrained models are too slow on the CPU of a machine with a GPU.
    device = torch.get_default_device().type if task in pretrained.BASES else "cpu"
    name = f"{model_hash(task)}-{size}x{count}-seed{seed}-draw{draw_seed}-at{temperature:g}-{device}-{DRAWS}.scored"
    path = CACHE / name
    if not path.exists():
        with torch.device(device):
            model = base_model(task)
            rows = Rows.of(sample(model, task, problems(task, size, 100 + seed), count, draw_seed, temperature))
        CACHE.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
            torch.save(rows.to_dict(), file)
        os.replace(file.name, path)  # atomic, because a different worker may write the same file
    return Rows.from_dict(torch.load(path, weights_only=True))


def epoch_rows(task: str, profile: Profile, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of one epoch, which are the same for all methods, and all completions of the seed."""
    pool = candidates(task, profile, seed)
    size = min(profile.steps * BATCH_ROWS, len(pool))
    return pool[curate(pool.rewards, pool.groups, "uniform", size, seed=seed).indices], pool


def evaluate(
    model: PreTrainedModel,
    task: str,
    profile: Profile,
    samples: int = 4,
    seed: int = 0,
    split: str = "test",
    maj_ks: tuple[int, ...] = (),
    temperature: float = 1.0,
) -> Evaluation:
    """Return the evaluation of a model on the test or validation problems."""
    questions = problems(task, profile.test_problems, TEST_SEED if split == "test" else VALIDATION_SEED)
    return evaluate_rows(sample(model, task, questions, samples, seed, temperature), maj_ks=maj_ks)


def summary(evaluation: Evaluation) -> dict[str, float]:
    """Return pass@1, its standard error and the shares of verdicts."""
    return {"pass@1": evaluation.pass_at[1].value, "error": evaluation.pass_at[1].standard_error, **evaluation.shares}
