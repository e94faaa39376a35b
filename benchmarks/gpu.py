"""Run the experiments that need a GPU, in their order, and measure steps of full-size models.

python -m benchmarks.gpu                # continues where it stopped, and starts nothing after eight minutes
python -m benchmarks.gpu --steps        # only steps
python -m benchmarks.gpu --tiny         # tiny steps on a CPU; results are discarded

The experiments on pretrained models need the copies that `benchmarks/pretrained.py` names, and are left out without
them: iterations with SmolLM2 (`wrong_answers`), rivals on GSM8K (`real_model`), and iterations on GSM8K. Results are
added to benchmarks/results/*.jsonl. If another machine runs the command, copy these files back before the next call.
`make gpu` installs packages; without a network, use a Python that has them, and the command above.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks import cells, pretrained, real_model
from benchmarks.__main__ import open_store
from benchmarks.cells import Cell, Store, quiet, timed
from benchmarks.experiment import Experiment
from benchmarks.experiments import wrong_answers
from benchmarks.performance.timing import in_turn, peak_memory, seconds_per_step
from benchmarks.performance.work import VARIANTS, WORDS, Build, Case, candidates, even, offline_topr
from benchmarks.report import table as markdown
from benchmarks.setting import CACHE, HERE, PROFILES, Profile, folder, has_copies
from topr_trl.cli.memory_estimate import GIB, Shape, training_flops
from topr_trl.cli.memory_plan import KNOWN

COMMAND = "python -m benchmarks.gpu"
PEAK = 989.0  # dense TFLOPS of an H100 or H200 in bfloat16
SHAPES = {
    "8b": KNOWN["8b"],
    "0.5b": LlamaConfig(hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True,
                        max_position_embeddings=8_192),
    "tiny": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=1_024),
}  # fmt: skip
POINTS = ((300, 85, 8), (1_024, 512, 8), (64, 4_096, 1))  # tokens of prompts and completions, completions per prompt
BUILDS: dict[str, Build] = {
    "topr": offline_topr(brings_log_mu=True, share_prompts=True),
    "topr, not shared": offline_topr(brings_log_mu=True, share_prompts=False),
    "sft": VARIANTS["sft"],
}


def step_cells(tiny: bool) -> list[Cell]:
    """Return the cells of the steps: each shape with each point. Only the large shape checkpoints activations."""
    small = [("tiny", (16, 8, 4), False)] if tiny else [("0.5b", point, False) for point in POINTS]
    large = [("tiny", (16, 8, 4), True)] if tiny else [("8b", point, True) for point in POINTS]
    return [
        {"claim": "gpu_steps", "model": shape, "point": list(point), "checkpointing": checkpointing}
        for shape, point, checkpointing in small + large
    ]


def work(cell: Cell, tiny: bool, peak_tflops: float) -> dict[str, Any]:
    """Return seconds per step, model FLOPs utilization and peak memory of each variant."""
    prompt, completion, samples = cell["point"]
    config, rows = SHAPES[cell["model"]], 8
    steps = 3 if tiny else 5
    data = candidates(steps * rows, even(completion, log(prompt)), WORDS, positives=0.25, samples=samples)
    settings = {"use_cpu": tiny, "bf16": not tiny, "gradient_checkpointing": cell["checkpointing"],
                "train_sampling_strategy": "sequential"}  # fmt: skip
    kind = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16}
    case = Case(config, data, rows, 1, settings, **kind)
    peaks: dict[str, int] = {}

    def measure(name: str) -> float:
        _forget()
        seconds = seconds_per_step(BUILDS[name], case)
        peaks[name] = peak_memory(BUILDS[name], case) if tiny else torch.cuda.max_memory_allocated()
        return seconds

    measures = {name: partial(measure, name) for name in BUILDS}
    try:
        times = in_turn(measures, 2 if cell["model"] != "8b" else 1, lambda name: print(f"  {name}", flush=True))
    except torch.cuda.OutOfMemoryError:
        return {"failed": "out of memory"}
    # Recomputed operations do not count, and each row counts its whole prompt. So the MFU with shared prompts can
    # exceed 100%.
    flops = rows * training_flops(Shape.of(config), prompt + completion, checkpointing=False)
    return {
        name: {
            "seconds": median(times[name]),
            "mfu": flops / median(times[name]) / (peak_tflops * 1e12),
            "peak_gib": peaks[name] / GIB,
        }
        for name in BUILDS
    }


def _forget() -> None:
    """Free the GPU's memory, and reset its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_steps(store: Store, tiny: bool, peak_tflops: float, until: float) -> bool:
    """Run the missing cells. Return whether all cells are finished."""
    for cell in store.unfinished(step_cells(tiny)):
        if time.monotonic() > until:
            return False
        print(cell, flush=True)
        result, seconds = timed(work, cell, tiny, peak_tflops)
        device = "CPU" if tiny else torch.cuda.get_device_name()
        store.add(cell, result | {"device": device}, seconds, COMMAND)
    return True


def table(store: Store, tiny: bool = False) -> str:
    """Return a Markdown table of the steps: seconds, MFU without shared prompts, and memory."""
    header = ["model", "prompt + completion", "per prompt", "SFT", "TOPR", "MFU", "shared prompts", "GiB (shared)"]
    rows = []
    for cell, result in store.results(step_cells(tiny)):
        prompt, completion, samples = (f"{size:,}" for size in cell["point"])
        where = [cell["model"], f"{prompt} + {completion}", samples]
        if "failed" in result:
            rows.append([*where, result["failed"], *[""] * 4])
            continue
        sft, topr, shared = (result[name] for name in ("sft", "topr, not shared", "topr"))
        rows.append([
            *where, f"{sft['seconds']:.2f} s", f"{topr['seconds']:.2f} s", f"{topr['mfu']:.0%}",
            f"{shared['seconds']:.2f} s ({topr['seconds'] / shared['seconds']:.2f}×)",
            f"{topr['peak_gib']:.1f} ({shared['peak_gib']:.1f})",
        ])  # fmt: skip
    return markdown(header, rows)


def run_iterations(
    experiments: Sequence[Experiment], profile: Profile, store: Store, workers: int, until: float, device: str = "cuda"
) -> bool:
    """Run the missing cells of `wrong_answers`. Return whether all cells are finished."""
    return cells.run(
        lambda: [cell for experiment in experiments for cell in experiment.cells(store)],
        partial(wrong_answers.work, profile=profile), store, workers, COMMAND, "iterations", device, until,
    )  # fmt: skip


def run_rivals(workers: int, until: float) -> bool:
    """Run the missing cells of `real_model` on GSM8K. Return whether all cells are finished."""
    train, test = (CACHE / f"gsm8k_{split}.jsonl" for split in ("train", "test"))
    backend = "vllm" if find_spec("vllm") else "transformers"
    setup = real_model.setup_on("cuda", str(folder(pretrained.QWEN)), train, test, backend)
    return real_model.run(setup, real_model.open_store(HERE / "results"), until, workers, COMMAND)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing cells, and print the table of steps."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", action="store_true", help="only measure steps")
    parser.add_argument("--workers", type=int, default=4, help="runs at once on the GPU")
    parser.add_argument("--peak_tflops", type=float, default=PEAK, help="bfloat16 peak of the GPU; default: H100")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no cell after this many minutes")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU; results are discarded")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("There is no GPU. Set --tiny to try the steps on a CPU.")
    quiet()
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as nowhere:
        store = Store(Path(nowhere) if args.tiny else HERE / "results", "gpu")
        queue: list[Callable[[], bool]] = [partial(run_steps, store, args.tiny, args.peak_tflops, until)]
        if not (args.tiny or args.steps):
            queue = [*_experiments(args.workers, until), *queue]
        if not all(run() for run in queue):
            print("The time limit is reached. The same command continues from here.")
        print(table(store, args.tiny))
    if not args.tiny:
        print("Fill in docs/performance.md with: python -m benchmarks.performance --report")


def _experiments(workers: int, until: float) -> list[Callable[[], bool]]:
    """Return the experiments whose models are in the cache, in the order to run them."""
    profile = PROFILES["full"]
    store = open_store(HERE / "results", profile)
    found: list[Callable[[], bool]] = []
    for base in pretrained.BASES:
        if not has_copies(base):
            print(f"{base} is left out: its weights or problems are not in {CACHE}. See benchmarks/pretrained.py.")
            continue
        if base == pretrained.QWEN:
            found.append(partial(run_rivals, workers, until))
        found.append(partial(run_iterations, wrong_answers.on_gpu(base), profile, store, workers, until))
    return found


if __name__ == "__main__":
    main()
