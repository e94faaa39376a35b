"""Compare methods on GSM8K with a pretrained model, on the same rows and each at its best learning rate.

python -m benchmarks.real_model --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct \\
    --train gsm8k_train.jsonl --test gsm8k_test.jsonl            # days on two cores; continues where it stopped
python -m benchmarks.real_model ... --workers 2 --hours 2        # two runs in parallel; starts no run after two hours
python -m benchmarks.real_model ... --sampling_backend transformers  # without vLLM
python -m benchmarks.real_model ... --device cuda --workers 4    # minutes on one H100

On a CPU, set LD_PRELOAD to jemalloc and MALLOC_CONF=dirty_decay_ms:10000,muzzy_decay_ms:10000. Memory is then reused
with fewer page faults, and a step takes two thirds of the time.

The expectations are in benchmarks/real_model.md. A run consists of `topr` commands, which continue where they were
killed, or of one of TRL's trainers. Rows are sampled once per repetition. Rows, weights and the text of GSM8K stay in
the cache, outside git. Results have no texts: they list problems in the order of the file.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cells import Cell, Store, finish
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.setting import CACHE, HERE
from topr_trl import evaluate_rows, load_rows
from topr_trl.data.tables import shards_of

RATES = (1e-5, 3e-5, 1e-4)
FURTHER = 1  # rates to try in addition, if the best rate is the lowest or the highest
REPETITIONS = 5
FIRST = 3  # repetitions of all methods before further repetitions start
TEMPERATURES = (0.3, 0.7)  # temperatures for the untrained model, in addition to 0 and 1
VOTES = 4  # k of pass@k and maj@k
SCORE = "greedy and pass@1"  # their mean chooses the rate, so each method has one model to test


@dataclass(frozen=True)
class Sizes:
    """Numbers of problems, completions and rows."""

    problems: int = 125  # per repetition, and for choosing rates
    apart: int = 400  # distance between the first problems of two repetitions
    completions: int = 8
    test_problems: int = 300
    validation_problems: int = 150
    test_completions: int = 4
    step_rows: int = 64
    micro_batch: int = 8  # rows of a forward pass
    calculations: int = 2  # maximum per problem


@dataclass(frozen=True)
class Method:
    """Differences of a method from TOPR's defaults.

    Attributes:
        settings: settings of `topr train`.
        rows: `"all"`, `"right"` (correct answers) or `"balanced"`. In balanced rows, correct answers are repeated until
            they are half of the rows, and each wrong answer occurs at most once.
        repeated: whether rows are repeated until there are as many steps as with all rows.
        optional: whether the method is run after the other methods.
        trl: `"dpo"`, `"kto"` or `"grpo"` for TRL's trainers instead of `topr train`, or `""`.
    """

    settings: tuple[str, ...] = ()
    rows: str = "all"
    repeated: bool = False
    optional: bool = False
    trl: str = ""


METHODS = {
    "positives repeated": Method(("--baseline", "0"), "right", repeated=True),
    "TOPR (default)": Method(),
    "TOPR, balanced rows, 50%": Method(("--effective_positive_share", "0.5"), "balanced"),
    "TOPR, c = 0": Method(("--baseline", "0")),
    "positives once": Method(("--baseline", "0"), "right"),
    "TOPR, balanced rows, 80%": Method(("--effective_positive_share", "0.8"), "balanced"),
    "TOPR, segments of 64": Method(("--ratio_level", "segment"), optional=True),
    "TOPR, balanced rows, 50%, segments of 64": Method(
        ("--effective_positive_share", "0.5", "--ratio_level", "segment"), "balanced", optional=True
    ),
    "TOPR, group_mean": Method(("--baseline", "group_mean"), optional=True),
    "KTO": Method(optional=True, trl="kto"),
    "DPO": Method(optional=True, trl="dpo"),
    "GRPO (TRL's loss, offline)": Method(optional=True, trl="grpo"),
}


@dataclass(frozen=True)
class Setup:
    """Model, data, folder and settings of the comparison.

    Attributes:
        model: folder or Hub name of the model.
        train, test: files of GSM8K's training and test problems.
        folder: folder for rows, models and tests.
        sizes: numbers of problems, completions and rows.
        sampling: further settings of `topr sample` and `topr evaluate`.
        training: further settings of `topr log-mu` and `topr train`.
        save_steps: steps between checkpoints.
        sampling_python: Python interpreter of the environment for sampling.
        device: `"cpu"` or `"cuda"`.
    """

    model: str
    train: Path
    test: Path
    folder: Path
    sizes: Sizes = Sizes()
    sampling: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    save_steps: int = 5
    sampling_python: str = sys.executable
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Return the name of the model in results. It has the device, because another one samples other rows."""
        return Path(self.model).name + ("" if self.device == "cpu" else f", {self.device}")


def experiment(model: str, problems: int = Sizes.problems) -> Experiment:
    """Return the comparison with a model and a number of problems per repetition."""
    methods = {name: {"method": name} for name in METHODS}
    return Experiment(
        "real_model", methods, rates(*RATES), range(REPETITIONS), (SCORE,),
        fields={"model": model, "problems": problems}, further=FURTHER,
    )  # fmt: skip


def untrained_cell(model: str) -> Cell:
    return {"claim": "real_model", "model": model, "method": "untrained"}


def cells(model: str, store: Store, problems: int = Sizes.problems) -> list[Cell]:
    """Return the cells that can be planned now, in the order to run them.

    Runs that choose rates come before repetitions, and optional methods after the others. Repetitions after the first
    three come last.
    """
    planned = experiment(model, problems).cells(store)
    return [untrained_cell(model), *sorted(planned, key=_turn)]


def _turn(cell: Cell) -> tuple[bool, bool, int]:
    seed = -1 if cell["seed"] == TUNING_SEED else cell["seed"]
    return seed >= FIRST, METHODS[cell["method"]].optional, seed


def open_store(results: Path) -> Store:
    return Store(results, "real model")


def work(cell: Cell, setup: Setup) -> dict[str, Any]:
    """Run a cell, or continue it.

    Returns:
        Greedy accuracy, pass@1, pass@4, maj@4, the share of invalid answers, and the correct answers by test problem.
        Trained models also have row counts, a hash of the rows, the number of steps, and the last logged weights of
        negatives. The untrained model has one result per temperature.
    """
    if cell["method"] == "untrained":
        return _untrained(setup)
    seed, method = cell["seed"], METHODS[cell["method"]]
    with _making_rows[seed]:
        rows = _rows(setup, seed)
    folder = setup.folder / "runs" / f"{cell['method'].replace(' ', '-')}-{cell['learning_rate']:g}-{seed}"
    model, tested = folder / "model", folder / "test"
    if not (tested / "evaluation.json").is_file():
        _train(setup, method, rows, model, cell["learning_rate"], seed)
        _evaluate(setup, str(model), tested, 1.0, "validation" if seed == TUNING_SEED else "test")
    for weights in model.glob("*.safetensors"):  # these take gigabytes; the adapter is kept
        weights.unlink()
    counts = {name: _count(path) for name, path in rows.items()}
    return {**_read_test(tested), "rows": counts, "rows_hash": _hash(rows["all"]), **_end_of_log(model)}


def _train(setup: Setup, method: Method, rows: dict[str, Path], model: Path, rate: float, seed: int) -> None:
    """Train with a method, and save the model."""
    sizes = setup.sizes
    steps = _count(rows["all"]) // sizes.step_rows
    if method.trl:
        if model.is_dir():
            return
        cpu = "--use_cpu" in setup.training
        part = model.with_name("part")
        arguments = {"learning_rate": rate, "seed": seed, "max_steps": steps, "use_cpu": cpu, "bf16": True,
                     "per_device_train_batch_size": min(sizes.micro_batch, 16)}  # fmt: skip
        _fork(setup, _trl, method.trl, rows[method.rows], setup.model, part, arguments, sizes.step_rows)
        part.rename(model)
        return
    length = ("--max_steps", str(steps)) if method.repeated else ()
    _topr(
        setup, "train", "--input", rows[method.rows], "--output_dir", model, "--model_name_or_path", setup.model,
        "--learning_rate", rate, "--seed", seed, "--optim", "adamw_torch",
        "--per_device_train_batch_size", sizes.micro_batch,
        "--gradient_accumulation_steps", sizes.step_rows // sizes.micro_batch,
        "--use_peft", "--lora_r", "32", "--lora_alpha", "64", "--lora_target_modules", "all-linear",
        "--gradient_checkpointing", "false", "--save_steps", setup.save_steps, "--logging_steps", "1",
        "--report_to", "none", *method.settings, *length, *setup.training,
    )  # fmt: skip


def _untrained(setup: Setup) -> dict[str, Any]:
    found = {}
    for temperature in (1.0, *TEMPERATURES):
        folder = setup.folder / "untrained" / f"{temperature:g}"
        samples = setup.sizes.completions if temperature == 1 else None  # to measure the difficulty of problems
        _evaluate(setup, setup.model, folder, temperature, "test", samples)
        found[f"{temperature:g}"] = _read_test(folder)
    return found


# Rows of a repetition, which are sampled, scored and given log μ once for all methods.

_making_rows: dict[int, threading.Lock] = defaultdict(threading.Lock)


def _rows(setup: Setup, seed: int) -> dict[str, Path]:
    """Return the folders of rows by their name in `Method.rows`. The first run of a seed makes the rows."""
    sizes, folder = setup.sizes, setup.folder / "rows" / str(seed)
    found = {name: folder / name for name in ("all", "right", "balanced")}
    if all(path.is_dir() for path in found.values()):
        return found
    problems = _problems(setup, "tuning" if seed == TUNING_SEED else "train", seed)
    drawn = folder / "drawn"
    _topr(
        setup, "sample", "--task", "gsm8k", *_named(problems), "--output_dir", drawn,
        "--model_name_or_path", setup.model, "--num_generations", sizes.completions, "--seed", seed,
        *_DECODING, *setup.sampling, python=setup.sampling_python,
    )  # fmt: skip
    _topr(setup, "score", "--input", drawn, "--output_dir", drawn)
    _topr(
        setup, "log-mu", "--input", drawn, "--output_dir", drawn, "--model_name_or_path", setup.model,
        "--baseline", "0",
        "--per_device_train_batch_size", sizes.micro_batch, "--per_device_eval_batch_size", sizes.micro_batch,
        *setup.training,
    )  # fmt: skip
    table = pa.concat_tables([pq.read_table(path) for path in shards_of(drawn)], promote_options="default")
    rewards = table["reward"].to_numpy()
    right, wrong = np.flatnonzero(rewards > 0), np.flatnonzero(rewards <= 0)
    rng, half = np.random.default_rng(seed), len(rewards) // 2
    chosen = {
        "all": np.arange(len(rewards)),
        "right": right,
        "balanced": np.concatenate([np.resize(rng.permutation(right), half), rng.permutation(wrong)[:half]]),
    }
    for name, places in chosen.items():
        if not found[name].is_dir():
            part = found[name].with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            kept = table.take(np.sort(places)).drop_columns(["sample_id"])
            pq.write_table(kept, part / "rows.parquet")
            part.rename(found[name])
    return found


def _problems(setup: Setup, split: str, seed: int = 0) -> Path:
    """Write a file with the problems of a split, and return its path. Repetitions have different problems."""
    sizes = setup.sizes
    lines = (setup.test if split == "test" else setup.train).read_text(encoding="utf-8").splitlines()
    easy = [i for i, line in enumerate(lines) if json.loads(line)["answer"].count("<<") <= sizes.calculations]
    order = np.random.default_rng(0).permutation(easy)
    starts = {"train": seed * sizes.apart, "tuning": REPETITIONS * sizes.apart, "test": 0}
    starts["validation"] = starts["tuning"] + sizes.problems
    counts = {"test": sizes.test_problems, "validation": sizes.validation_problems}
    places = order[starts[split] :][: counts.get(split, sizes.problems)]
    path = setup.folder / "problems" / f"{split}-{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{lines[i]}\n" for i in places), encoding="utf-8")
    return path


def _named(problems: Path) -> tuple[object, ...]:
    """Return both dataset settings with the same file. Commands require both, but read only one of them."""
    return ("--dataset_name", problems, "--test_dataset_name", problems)


# Commands and their results.

_DECODING = ("--num_shots", "2", "--top_k", "500", "--max_new_tokens", "160")


def _evaluate(
    setup: Setup, model: str, folder: Path, temperature: float, split: str, samples: int | None = None
) -> None:
    _topr(
        setup, "evaluate", "--task", "gsm8k", *_named(_problems(setup, split)), "--output_dir", folder,
        "--model_name_or_path", model, "--num_generations_eval", samples or setup.sizes.test_completions,
        "--greedy", "true", "--temperature", temperature, *_DECODING, *setup.sampling, python=setup.sampling_python,
    )  # fmt: skip


def _topr(setup: Setup, *words: object, python: str = sys.executable) -> None:
    """Run a `topr` command, with its output in a log.

    Raises:
        RuntimeError: the command failed.
    """
    given = list(map(str, words))
    if python == sys.executable:
        _fork(setup, _command, given)
        return
    with _log(setup).open("a") as file:
        done = subprocess.run([python, "-m", "topr_trl", *given], stdout=file, stderr=file, check=False)
    if done.returncode:
        raise RuntimeError(f"topr {given[0]} failed with {done.returncode}: see {_log(setup)}.")


def _fork(setup: Setup, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a fork of a process that has imported everything, because imports take seconds.

    Raises:
        RuntimeError: the function failed.
    """
    child = _FORKS.Process(target=_logged, args=(_log(setup), function, *args))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{function.__name__} {args[0]} failed with {child.exitcode}: see {_log(setup)}.")


def _log(setup: Setup) -> Path:
    setup.folder.mkdir(parents=True, exist_ok=True)
    return setup.folder / "log.txt"


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "topr_trl.cli.commands", "topr_trl.trainers.offline", "topr_trl.tasks.gsm8k", "benchmarks.trl_on_rows",
    *(f"topr_trl.pipeline.stages.{name}" for name in ("sample", "score", "log_mu", "train", "evaluate")),
    "matplotlib.pyplot", "transformers.models.qwen2.modeling_qwen2", "benchmarks.real_model",
])  # fmt: skip


def _logged(log: Path, function: Callable[..., None], *args: Any) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def _command(words: list[str]) -> None:
    from topr_trl.cli.main import console

    sys.argv = ["topr", *words]
    console()


def _trl(*args: Any) -> None:
    from benchmarks.trl_on_rows import train

    train(*args)


def _read_test(folder: Path) -> dict[str, Any]:
    """Return accuracies of an evaluation, and correct answers by problem in the order of the file."""
    rows = load_rows(folder / "rollouts")
    k = min(VOTES, len(rows) // len(set(rows["problem_id"])) - 1)
    found = evaluate_rows(rows, pass_ks=(1, k), maj_ks=(k,))
    assert found.greedy is not None
    greedy: dict[Any, int] = dict.fromkeys(rows["problem_id"], 0)
    right = dict(greedy)
    for problem, temperature, verdict in zip(rows["problem_id"], rows["temperature"], rows["verdict"], strict=True):
        (right if temperature else greedy)[problem] += verdict == "correct"
    values = {"greedy": found.greedy.value, "pass@1": found.pass_at[1].value}
    return {
        **values, SCORE: sum(values.values()) / 2, f"pass@{k}": found.pass_at[k].value,
        f"maj@{k}": found.maj_at[k].value, "invalid": found.shares["invalid"],
        "samples": len(rows) // len(right) - 1, "right_by_problem": list(right.values()),
        "greedy_by_problem": list(greedy.values()),
    }  # fmt: skip


def _end_of_log(model: Path) -> dict[str, Any]:
    """Return the number of steps, and the last logged weights of negatives."""
    state = json.loads((model / "trainer_state.json").read_text())
    last = next((log for log in reversed(state["log_history"]) if "topr/negatives_dead" in log), {})
    negatives = {name: last.get(f"topr/{name}") for name in ("weight_mean_negatives", "negatives_dead")}
    return {"steps": state["global_step"], "negatives": negatives}


def _count(folder: Path) -> int:
    return sum(int(pq.read_metadata(path).num_rows) for path in shards_of(folder))


def _hash(folder: Path) -> str:
    """Return a hash of the completions, which shows whether two machines sampled the same completions."""
    found = hashlib.sha256()
    for path in shards_of(folder):
        found.update(str(pq.read_table(path, columns=["completion_ids"])["completion_ids"].to_pylist()).encode())
    return found.hexdigest()[:16]


def run(setup: Setup, store: Store, until: float = inf, workers: int = 1, command: str = "") -> bool:
    """Run the missing cells in threads, and return whether all have been run. The work of a cell is in subprocesses."""
    plan, own = partial(cells, setup.name, store, setup.sizes.problems), partial(work, setup=setup)
    with ThreadPoolExecutor(workers) as pool:
        return finish(plan, own, store, pool, workers, command, setup.name, until)


def setup_on(
    device: str, model: str, train: Path, test: Path, backend: str, sampling_python: str = sys.executable
) -> Setup:
    """Return the setup for a CPU or a GPU."""
    sampling: tuple[str, ...] = ("--sampling_backend", backend)
    if backend == "vllm":
        sampling += ("--vllm_dtype", "bfloat16", "--vllm_max_model_length", "1024")
    else:
        batch = "300" if device == "cpu" else "1600"
        sampling += ("--dtype", "bfloat16", "--sampling_batch_size", batch, "--problems_per_shard", "400")
    if device == "cpu":
        sizes, training = Sizes(micro_batch=4), ("--use_cpu", "true", "--bf16", "true", "--share_prompts", "true")
        if backend == "transformers":
            sampling += ("--use_cpu", "true")
    else:
        sizes, training = Sizes(micro_batch=16), ("--bf16", "true")
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the default check breaks CUDA in forks
    return Setup(
        model, train.resolve(), test.resolve(),
        CACHE / "real_model" / (Path(model).name + ("" if device == "cpu" else f"-{device}")), sizes,
        sampling=sampling, training=training, save_steps=5 if device == "cpu" else 1_000,
        sampling_python=sampling_python, device=device,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__.partition("\n")[0])
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train", type=Path, required=True, help="JSON Lines file of GSM8K's training problems")
    parser.add_argument("--test", type=Path, required=True, help="JSON Lines file of GSM8K's test problems")
    parser.add_argument("--sampling_python", default=sys.executable, help="Python of the environment for sampling")
    parser.add_argument("--sampling_backend", default="vllm")
    parser.add_argument("--hours", type=float, help="start no run after this many hours; default: no limit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args(argv)
    setup = setup_on(
        args.device, args.model_name_or_path, args.train, args.test, args.sampling_backend, args.sampling_python
    )
    command = " ".join(["python -m benchmarks.real_model", *sys.argv[1:]])
    until = inf if args.hours is None else time.monotonic() + 3600 * args.hours
    if not run(setup, open_store(args.results), until, args.workers, command):
        print("Cells are left. Start the command again to continue.")


if __name__ == "__main__":
    main()
