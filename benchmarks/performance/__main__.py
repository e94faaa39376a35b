"""Measure time and memory of TOPR and of TRL's other trainers, on the CPU.

python -m benchmarks.performance            # an hour on two idle cores; fills in docs/performance.md
python -m benchmarks.performance memory     # only some parts; results of other parts are kept
python -m benchmarks.performance --small    # quick test of all parts; writes to reproduction/performance
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig

from benchmarks.cells import machine, versions
from benchmarks.performance import data, page
from benchmarks.performance.loop import measure
from benchmarks.performance.page import ROOT
from benchmarks.performance.timing import (
    in_turn,
    log_ratios_at_start,
    peak_memory,
    quiet,
    scoring_peak,
    scoring_seconds,
    seconds_per_step,
)
from benchmarks.performance.work import (
    GENERATED,
    GSM8K,
    LONG_TAILS,
    VARIANTS,
    WORDS,
    Build,
    Case,
    candidates,
    even,
    offline_topr,
    online,
    readable,
)
from topr_trl import TOPRConfig, TOPRTrainer


def model(size: int, vocabulary: int = 1_024) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size, intermediate_size=size * 11 // 4, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, pad_token_id=1, eos_token_id=0, max_position_embeddings=4_096,
    )  # fmt: skip


class Sizes:
    """Sizes of all parts. Small sizes only test that all parts work."""

    def __init__(self, small: bool) -> None:
        self.is_small = small
        self.model = model(64 if small else 192)
        self.steps, self.repeats = (2, 2) if small else (3, 3)
        self.micro_batch, self.accumulation = (8, 2) if small else (8, 8)
        self.problems = [64, 128] if small else [data.PROBLEMS // 8, data.PROBLEMS]
        self.loop = (2, 8) if small else (3, 200)  # iterations, problems
        self.records = 2_000 if small else 100_000  # records of the log to import

    def case(self, lengths: Any, steps: int = 0, accumulation: int = 0, positives: float = 0.5, **changes: Any) -> Case:
        accumulation = accumulation or self.accumulation
        rows = candidates((steps or self.steps) * self.micro_batch * accumulation, lengths, WORDS, positives)
        settings = {"use_cpu": True, "bf16": False}
        return Case(changes.get("model", self.model), rows, self.micro_batch, accumulation, settings)


Say = Callable[[str], Any]


def _steps(case: Case, variants: list[str], repeats: int, say: Say) -> dict[str, list[float]]:
    """Return the seconds per step of variants, which are run in turn."""
    builds = {**VARIANTS, "online topr, 1/4": online(
        TOPRTrainer, TOPRConfig, curation="anna_karenina", iteration_size=case.micro_batch * case.accumulation // 4
    )}  # fmt: skip
    return in_turn({v: lambda v=v: seconds_per_step(builds[v], case) for v in variants}, repeats, say)  # type: ignore[misc]


def offline(sizes: Sizes, say: Say) -> dict[str, Any]:
    gsm8k, tails = sizes.case(GSM8K), sizes.case(LONG_TAILS, steps=2, accumulation=sizes.accumulation // 2)
    own = ["topr", "sft", "grpo"]
    return {
        "gsm8k": _steps(gsm8k, [*own, "topr, unsorted", "topr, frozen copy", "grpo, frozen copy", "online topr",
                                "online topr, 1/4"], sizes.repeats, say),
        "padding-free": _steps(gsm8k, ["topr, padding-free", "sft, padding-free"], 2 * sizes.repeats, say),
        "long tails": _steps(tails, own, 2, say),
    }  # fmt: skip


def generating(sizes: Sizes, say: Say) -> dict[str, Any]:
    variants = [
        "grpo, generating", "online topr, generating", "grpo, generating, 4 uses", "online topr, generating, 4 uses"
    ]  # fmt: skip
    batches = 3 * sizes.steps  # a step only takes a second, so time more steps
    case = sizes.case(even(GENERATED), batches)
    times = _steps(replace(case, rows=readable(case.rows)), variants, sizes.repeats, say)
    return {"generating": times, "generated batches": batches}


def memory(sizes: Sizes, say: Say) -> dict[str, Any]:
    two_steps, found = sizes.case(GSM8K, steps=2), {}
    for name in ("topr", "sft", "grpo"):
        say(f"memory: {name}")
        found[name] = peak_memory(VARIANTS[name], two_steps)
    return {"memory": found}


def log_mu(sizes: Sizes, say: Say) -> dict[str, Any]:
    shares = {share: sizes.case(GSM8K, positives=share) for share in (0.0, 0.5)}
    by_share = in_turn(
        {str(share): lambda c=case: scoring_seconds(offline_topr(), c) for share, case in shares.items()},  # type: ignore[misc]
        2, lambda share: say(f"log mu: {share}"),
    )  # fmt: skip
    say("log mu: memory")
    large = sizes.case(GSM8K, steps=1, accumulation=1, positives=0.0, model=model(64, 32_000))
    return {"log mu, seconds by share of positives": by_share, "log mu, memory": scoring_peak(large)}


# Tokens of a prompt and of a completion, and completions per prompt in a micro-batch. With 1 completion per prompt, a
# micro-batch has eight prompts.
SHARED = ((300, 85, 8), (64, 85, 4), (300, 85, 1), (1_024, 512, 16))
# Further points for time and memory, with six layers.
GRID = ((64, 85, 4), (300, 85, 4), (1_024, 85, 4), (64, 85, 16), (300, 85, 16), (1_024, 85, 16), (64, 512, 8),
        (300, 512, 8), (1_024, 512, 8), (300, 85, 64))  # fmt: skip
GRID_LAYERS = 6
DEMO = even(42, float(np.log(38)))  # tokens of `make demo`
CHECKPOINTED = 12_000  # tokens of a micro-batch above which activations are checkpointed


def smollm2(layers: int, vocabulary: int = 49_152) -> LlamaConfig:
    """Return the shape of SmolLM2-135M with a given number of layers. The model has 30 layers."""
    return LlamaConfig(
        hidden_size=576, intermediate_size=1_536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=vocabulary, pad_token_id=1, eos_token_id=0,
        max_position_embeddings=8_192, tie_word_embeddings=True,
    )  # fmt: skip


# Shape of the bundled model, with a larger vocabulary.
BUNDLED = LlamaConfig(
    hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3, vocab_size=1_024, pad_token_id=1,
    eos_token_id=0, max_position_embeddings=2_048,
)  # fmt: skip


def _point(config: LlamaConfig, prompt: int, completion: int, samples: int, steps: int = 2) -> Case:
    batch = samples if samples > 1 else 8
    rows = candidates(steps * batch, even(completion, float(np.log(prompt))), WORDS, 0.0, samples=samples)
    settings = {
        "use_cpu": True, "bf16": True, "train_sampling_strategy": "sequential",
        # Without checkpointing, the activations of 24,576 tokens take more than 20 GB.
        "gradient_checkpointing": (prompt + completion) * batch > CHECKPOINTED,
    }  # fmt: skip
    return Case(config, rows, batch, 1, settings)


_SHARING: dict[str, Build] = {
    "topr": offline_topr(brings_log_mu=True, share_prompts=True),
    "topr, not shared": offline_topr(brings_log_mu=True, share_prompts=False),
    "sft": VARIANTS["sft"],
}


def _named(prompt: int, completion: int, samples: int) -> str:
    return f"{prompt} + {completion}, {samples}"


def shared_prompts(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Time steps and log μ of rows that share prompts, with and without sharing, and steps of `SFTTrainer`."""
    config = smollm2(2, 1_024) if sizes.is_small else smollm2(30)
    found: dict[str, dict[str, list[float]]] = {}
    for lengths in SHARED[:1] if sizes.is_small else SHARED:
        case = _point(config, *lengths)
        measures: dict[str, Callable[[], float]] = {
            variant: lambda b=build, c=case: seconds_per_step(b, c)
            for variant, build in _SHARING.items()  # type: ignore[misc]
        }
        for variant, share in (("log mu", True), ("log mu, not shared", False)):
            build = offline_topr(share_prompts=share)
            measures[variant] = lambda b=build, c=case: scoring_seconds(b, c)  # type: ignore[misc]
        name = _named(*lengths)
        found[name] = in_turn(measures, 2, lambda variant, n=name: say(f"{n}: {variant}"))  # type: ignore[misc]
    return {"shared prompts": found, "shared prompts, as the demo": _like_the_demo(sizes, say)}


def _like_the_demo(sizes: Sizes, say: Say) -> dict[str, list[float]]:
    """Time steps of 128 rows in the trainer's order, with the lengths and completions per prompt of `make demo`."""
    rows = candidates(2 * 128 if sizes.is_small else 8 * 128, DEMO, WORDS, 0.25, samples=16)
    case = Case(BUNDLED, rows, 32, 4, {"use_cpu": True, "bf16": False})
    builds = {"topr": offline_topr(share_prompts=True), "topr, not shared": offline_topr(share_prompts=False)}
    measures = {name: lambda b=build: seconds_per_step(b, case) for name, build in builds.items()}
    return in_turn(measures, 3, lambda name: say(f"as the demo: {name}"))  # type: ignore[arg-type]


def shared_grid(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Measure time and memory of steps with shared prompts, at more points and with fewer layers."""
    config = smollm2(2, 1_024) if sizes.is_small else smollm2(GRID_LAYERS)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for lengths in GRID[:1] if sizes.is_small else GRID:
        case, one_step = _point(config, *lengths), _point(config, *lengths, steps=1)
        name = _named(*lengths)
        found[name] = {}
        for variant, build in _SHARING.items():
            say(f"{name}: {variant}")
            seconds = seconds_per_step(build, case)
            found[name][variant] = {"seconds": seconds, "bytes": peak_memory(build, one_step)}
    return {"shared grid": found}


def precision(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Time a step in bfloat16 and float32, and return log π - log μ of completions before the first update."""
    large = _point(smollm2(2, 1_024) if sizes.is_small else smollm2(30), *SHARED[0])
    small = _point(BUNDLED, 64, 40, 32, steps=8)

    def cases(case: Case) -> dict[str, Case]:
        return {name: replace(case, settings={**case.settings, "bf16": name == "bfloat16"})
                for name in ("bfloat16", "float32")}  # fmt: skip

    def times(case: Case) -> dict[str, list[float]]:
        measures = {name: lambda c=one: seconds_per_step(_SHARING["topr"], c) for name, one in cases(case).items()}
        return in_turn(measures, 2, say)  # type: ignore[arg-type]

    flags = Path("/proc/cpuinfo").read_text().split()
    return {
        "precision": {
            "instructions": ", ".join(name for name in ("amx_bf16", "avx512_bf16") if name in flags) or "no bfloat16",
            "seconds": times(large), "seconds, size of the bundled model": times(small),
            "log_ratio": {
                f"{name}{'' if share else ', not shared'}": log_ratios_at_start(offline_topr(share_prompts=share), one)
                for name, one in cases(large).items()
                for share in (True, False)
            },
        }
    }  # fmt: skip


def two_processes(sizes: Sizes, say: Say) -> dict[str, Any]:
    say("two processes")
    return {"processes": processes(sizes)}


def files(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Time curation and the start of training on stored rows, and the import of a log."""
    results: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for problems in sizes.problems:
            say(f"{problems * data.SAMPLES:,} rows: writing")
            rows = folder / "rows"
            count = data.write_candidates(rows, problems)
            entry: dict[str, Any] = {"rows": count, "bytes": data.size_of(rows), "curate": [], "start": [], "again": []}
            for _ in range(2):
                say(f"{count:,} rows: curation")
                entry["curate"].append(data.curate(rows, folder / "curated"))
                shutil.rmtree(folder / "curated")
            for name in ("start", "again"):
                say(f"{count:,} rows: {name}")
                entry[name].append(data.start(rows, folder / "cache", folder / "out"))
            shutil.rmtree(folder / "cache")
            results["rows"].append(entry)
            shutil.rmtree(rows)
        log = folder / "log.jsonl"
        data.write_log(log, sizes.records)
        results["import"] = {"records": sizes.records, "bytes": log.stat().st_size, "import": [], "parse": []}
        for _ in range(2):
            say(f"{sizes.records:,} records: parsing and tokenizing")
            results["import"]["parse"].append(data.parse_log(log))
            say(f"{sizes.records:,} records: importing")
            results["import"]["import"].append(data.import_log(log, folder / "imported"))
            shutil.rmtree(folder / "imported")
    return results


def loop(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Time `topr iterate` with and without overlap of sampling and training."""
    found: dict[str, Any] = {}
    for overlap, name in ((0, "in turns"), (1, "overlapped")):
        say(f"the loop, {name}")
        found[name] = measure(overlap, *sizes.loop)
    return {"loop": found}


PARTS = {
    "shared_prompts": shared_prompts, "precision": precision, "offline": offline, "generating": generating,
    "memory": memory, "log_mu": log_mu, "processes": two_processes, "files": files, "loop": loop,
}  # fmt: skip
FURTHER = {"shared_grid": shared_grid}  # only if requested, because it takes 40 minutes of a core


def processes(sizes: Sizes) -> dict[str, list[float]]:
    """Return the rows per second of one process and of two processes, with one thread each."""
    found: dict[str, list[float]] = {"1": [], "2": []}
    for _ in range(2):
        for count in (1, 2):
            launch = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={count}"]
            launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
            if count > 1:
                launch.append(f"--config_file={ROOT / 'examples' / 'accelerate_configs' / 'ddp.yaml'}")
            environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            command = [*launch, "-m", "benchmarks.performance", "--worker", str(sizes.model.hidden_size)]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-4_000:])
            lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
            found[str(count)].append(float(lines[0].split()[1]))
    return found


def worker(size: int) -> None:
    """Train in one of the processes. A step has 32 rows for any number of processes."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    case = Case(model(size), candidates(96, GSM8K, WORDS), 8, 4 // count, {"use_cpu": True, "bf16": False})
    seconds = seconds_per_step(VARIANTS["topr"], case)
    print("MEASURED", 32 / seconds, flush=True)
    os._exit(0)  # gloo can hang at shutdown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", choices=[[], *PARTS, *FURTHER], metavar="part",
        help=f"one of {', '.join((*PARTS, *FURTHER))}; default: all but {', '.join(FURTHER)}",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="quick test of all parts, in two minutes")
    parser.add_argument("--report", action="store_true", help="measure nothing, fill in docs/performance.md")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    quiet()
    if args.worker:
        return worker(args.worker)
    if args.report:
        return print(f"Written: {page.write(json.loads(page.RESULT.read_text()))}")
    tried = ROOT / "reproduction" / "performance"
    result, written = (tried / "performance.json", tried / "performance.md") if args.small else (page.RESULT, page.PAGE)
    result.parent.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(args.small)
    content = json.loads(result.read_text()) if result.is_file() else {"results": {}, "runs": {}}
    with tqdm(desc="Measuring", unit="run", mininterval=0) as progress:

        def say(what: str) -> None:
            progress.set_description(what)
            progress.update()

        for name in ("topr", "sft", "grpo"):  # to exclude imports and compilation from the measurements
            say(f"warming up: {name}")
            seconds_per_step(VARIANTS[name], sizes.case(GSM8K, steps=2, accumulation=1))
        for name in args.parts or PARTS:
            began = time.perf_counter()
            content["results"] |= {**PARTS, **FURTHER}[name](sizes, say)
            content["runs"][name] = {
                "machine": machine(), "threads": torch.get_num_threads(), "versions": versions(),
                "date": time.strftime("%Y-%m-%d"), "seconds": round(time.perf_counter() - began),
            }  # fmt: skip
            result.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {result}, {page.write(content, written)}")


if __name__ == "__main__":
    main()
