"""What models of 10 and 100 million parameters learn from the same candidates: TOPR, right answers alone and GRPO.

They are trained from scratch: one on generated problems of several kinds and on GSM8K's training rows, others on the
solutions of the authors of `benchmarks.bases`.
"""

import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks import arms
from benchmarks.arms import TUNING_SEED
from benchmarks.bases import AUTHORS, Author, one_product, solution
from benchmarks.cells import Cell, Store
from benchmarks.gpu.steps import Machine
from benchmarks.setting import CACHE, HERE, ONE_WORDING, TEST_SEED, VALIDATION_SEED, problems, summary
from scripts.make_careless_model import gsm8k_row, train_from_scratch, train_tokenizer
from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    SamplingArguments,
    evaluate_rows,
    load_rows,
    sample_completions,
    save_rows,
    score_completions,
)
from topr_trl.tasks import arithmetic, gsm8k

MIXED = "GSM8K and generated"
BASE, GRPO, RIGHT = "base model", "GRPO", "right answers, repeated"
METHODS: dict[str, dict[str, Any]] = {
    "TOPR, c = 0": {"baseline": 0},
    "TOPR, p~ 50%": {"effective_positive_share": 0.5},
    RIGHT: {"baseline": 0},  # as many steps as the others, all of right answers
    GRPO: {},
}
RATES, FURTHER, SEEDS = (1e-5, 3e-5, 1e-4), 1, 3
BATCH_ROWS = 32


@dataclass(frozen=True)
class Size:
    """Of a base model and what is drawn from it.

    Attributes:
        width, layers, steps, peak: of the model and its training from scratch, 64 rows a step; with 0 steps it is the
            CPU's base model, to see whether the rest works.
        problems, candidates: to train on, and completions of each.
        tested, samples: test problems of each kind, and completions of each.
        longest: completion, in tokens.
        held_back: rows of GSM8K that the base model does not read; those problems are trained on later.
    """

    width: int
    layers: int
    steps: int
    peak: float = 5e-4
    problems: int = 400
    candidates: int = 16
    tested: int = 200
    samples: int = 8
    longest: int = 220
    held_back: int = 1_000


SIZES = {
    "100m": Size(768, 11, 2_000),
    "10m": Size(320, 6, 2_000, peak=1e-3),
    "tiny": Size(32, 1, 0, problems=8, candidates=8, tested=2, longest=60, held_back=8),
}


def cells(tiny: bool, store: Store) -> list[Cell]:
    """Those that are known as yet: each method has its own best rate, found on a seed apart."""
    if tiny:
        return [_cell("tiny", task, method) for task in (MIXED, "sure-17") for method in (BASE, *METHODS)]
    found = []
    for size, task in (("100m", MIXED), *((s, t) for s in ("10m", "100m") for t in ("misconception-10", "sure-17"))):
        found.append(_cell(size, task, BASE))
        for method in METHODS:

            def end(choice: dict[str, Any], size: str = size, task: str = task, method: str = method) -> float | None:
                result = store.get(_cell(size, task, method, choice["learning_rate"], TUNING_SEED))
                return None if result is None else float(np.mean([test["pass@1"] for test in result["tests"].values()]))

            tried, best = arms.tune([{"learning_rate": rate} for rate in RATES], FURTHER, end)
            found += [_cell(size, task, method, one["learning_rate"], TUNING_SEED) for one in tried]
            if best is not None:
                found += [_cell(size, task, method, best["learning_rate"], seed) for seed in range(SEEDS)]
    return found


def _cell(size: str, task: str, method: str, learning_rate: float = 1e-4, seed: int = 0) -> Cell:
    rate = {} if method == BASE else {"learning_rate": learning_rate}
    return {"claim": "learning", "model": size, "task": task, "method": method, **rate, "seed": seed}


def work(cell: Cell, machine: Machine) -> dict[str, Any]:
    task, size, seed, method = cell["task"], SIZES[cell["model"]], cell["seed"], cell["method"]
    folder = _base(task, cell["model"], machine)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.to(machine.device)
    found: dict[str, Any] = {}
    if method != BASE:
        path = folder / f"candidates-{seed}"
        if not path.exists():
            save_rows(_sampled(model, tokenizer, _to_train_on(task, size, seed, machine), size, size.candidates, seed),
                      path)  # fmt: skip
        rows = load_rows(path)
        right = np.array(rows["reward"]) > 0
        steps = len(rows) // BATCH_ROWS
        found = {"p": float(right.mean()), "steps": steps}
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings(action="ignore"):
            train = _with_grpo if method == GRPO else _offline
            train(model, tokenizer, rows, cell, _arguments(cell, scratch, steps, machine))
    split = VALIDATION_SEED if seed == TUNING_SEED else TEST_SEED
    tests = {
        kind: _tested(model, tokenizer, questions, size, seed)
        for kind, questions in _to_test_on(task, size, split, machine).items()
    }
    return {**found, "tests": tests}


# Base models, and what they write.


def _base(task: str, size_name: str, machine: Machine) -> Path:
    """The folder of a base model; made if it is not there yet."""
    folder = CACHE / "gpu" / f"{size_name}-{task.replace(' ', '-')}"
    if (folder / "model.safetensors").exists():
        return folder
    size = SIZES[size_name]
    set_seed(0)
    row, tokenizer = to_learn_from(task, size, machine)
    if size.steps:
        model = train_from_scratch(
            row,
            tokenizer,
            size.width,
            size.layers,
            max(4, size.width // 64),
            size.steps,
            learning_rate=size.peak,
            device=machine.device,
        )
    else:
        model, tokenizer = (
            kind.from_pretrained(HERE / "models" / "main") for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # last: a model that is there is whole
    return folder


def to_learn_from(
    task: str, size: Size, machine: Machine
) -> tuple[Callable[[], tuple[str, str]], PreTrainedTokenizerBase]:
    """What draws a prompt and a careless solution, and a tokenizer for them."""
    rng = random.Random(f"{task}-{size.width}")
    if task != MIXED:
        author = AUTHORS[task]
        return (lambda: _written(one_product(rng), author, rng)), AutoTokenizer.from_pretrained(
            HERE / "models" / "main"
        )
    real, author = machine.gsm8k_rows("train").to_list()[: -size.held_back], AUTHORS["misconception-30"]

    def row() -> tuple[str, str]:
        if rng.random() < 0.5:
            return gsm8k_row(rng.choice(real), rng, forget=0.1)
        return _written(arithmetic.make_problem(rng, rng.randint(1, 4), ONE_WORDING), author, rng)

    return row, train_tokenizer(["".join(row()) for _ in range(5_000)], 4_096)


def _written(problem: arithmetic.Problem, author: Author, rng: random.Random) -> tuple[str, str]:
    return gsm8k.build_prompt(problem.question, num_shots=0), f" {solution(problem, author, rng)}"


def _to_train_on(task: str, size: Size, seed: int, machine: Machine) -> Dataset:
    if task != MIXED:
        return problems(task, size.problems, 100 + seed)
    unread = machine.gsm8k_rows("train")
    unread = unread.select(range(len(unread) - size.held_back, len(unread))).shuffle(seed)
    return _numbered(_of_gsm8k(unread, size.problems // 2), _generated(size.problems // 2, 100 + seed))


def _to_test_on(task: str, size: Size, split: int, machine: Machine) -> dict[str, Dataset]:
    """By kind. For the choice of rates, GSM8K's last test problems; else its first."""
    if task != MIXED:
        return {"generated": problems(task, size.tested, split)}
    real = machine.gsm8k_rows("test")
    if split == VALIDATION_SEED:
        real = real.select(range(len(real) - size.tested, len(real)))
    return {"generated": _generated(size.tested, split), "GSM8K's test": _of_gsm8k(real, size.tested)}


def _of_gsm8k(rows: Dataset, count: int) -> Dataset:
    return gsm8k.prepare(rows.select(range(count)), num_shots=0)


def _generated(count: int, seed: int) -> Dataset:
    """As many problems of each number of steps, one to four."""
    parts = [arithmetic.arithmetic_dataset(-(-count // 4), seed, steps, ONE_WORDING) for steps in range(1, 5)]
    return _numbered(*(gsm8k.prepare(part, num_shots=0) for part in parts)).select(range(count))


def _numbered(*parts: Dataset) -> Dataset:
    joined = concatenate_datasets(parts)
    return joined.remove_columns("problem_id").add_column("problem_id", list(range(len(joined))))


def _sampled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Dataset, size: Size, count: int, seed: int
) -> Dataset:
    args = SamplingArguments(num_generations=count, max_new_tokens=size.longest, top_k=len(tokenizer))
    return score_completions(
        sample_completions(model, tokenizer, questions, args, gsm8k.STOP_STRINGS, seed), gsm8k.judge
    )


def _tested(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Dataset, size: Size, seed: int
) -> dict[str, float]:
    k = size.samples
    found = evaluate_rows(_sampled(model, tokenizer, questions, size, k, seed), maj_ks=(k,), pass_ks=(1, k))
    return {**summary(found), f"maj@{k}": found.maj_at[k].value, f"pass@{k}": found.pass_at[k].value}


# Training.


def _arguments(cell: Cell, folder: str, steps: int, machine: Machine) -> dict[str, Any]:
    return {
        "output_dir": folder, "learning_rate": cell["learning_rate"], "lr_scheduler_type": "constant",
        "optim": "adamw_torch", "weight_decay": 0.0, "max_grad_norm": 1.0, "per_device_train_batch_size": BATCH_ROWS,
        "gradient_accumulation_steps": 1, "max_steps": steps, "seed": cell["seed"], "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "logging_steps": 1_000, "gradient_checkpointing": False,
        "use_cpu": machine.use_cpu, "bf16": not machine.use_cpu,
    }  # fmt: skip


def _offline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, cell: Cell, arguments: dict[str, Any]
) -> None:
    if cell["method"] == RIGHT:
        right = rows.select(np.flatnonzero(np.array(rows["reward"]) > 0))
        rows = right.select(np.resize(np.arange(len(right)), len(rows)))
    args = OfflineTOPRConfig(**arguments, **METHODS[cell["method"]], log_mu="sampler")
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()


def _with_grpo(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, cell: Cell, arguments: dict[str, Any]
) -> None:
    """One generation of `GRPOTrainer`, which is all candidates: it computes their log-probabilities itself."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    group = len(rows) // len(by_prompt)

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        used: dict[str, int] = {}
        found = []
        for prompt in prompts:
            used[prompt] = used.get(prompt, -1) + 1
            found.append(by_prompt[prompt][used[prompt] % len(by_prompt[prompt])])
        return {"prompt_ids": [row["prompt_ids"] for row in found], "logprobs": None,
                "completion_ids": [row["completion_ids"] for row in found],
                "row_reward": [row["reward"] for row in found]}  # fmt: skip

    def reward(row_reward: list[float], **_: Any) -> list[float]:
        return row_reward

    args = GRPOConfig(
        **arguments, beta=0.0, num_generations=group, steps_per_generation=arguments["max_steps"], top_k=0,
        max_completion_length=max(map(len, rows["completion_ids"])),
    )  # fmt: skip
    GRPOTrainer(
        model, reward, args, train_dataset=Dataset.from_dict({"prompt": list(by_prompt)}),
        processing_class=tokenizer, rollout_func=rollout,
    ).train()  # fmt: skip
