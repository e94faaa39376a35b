"""The outer loop: sample, score, curate, log μ, train, evaluate, again and again, each stage a process of its own.

A stage's process takes its memory with it when it ends, on the GPU too. The loop can be killed at any moment and
started again with the same command: finished stages are skipped, the others go on from their last shard or checkpoint.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml

from topr_trl.checkpoints import check_files
from topr_trl.config import check_types, refuse_adafactor
from topr_trl.evaluation.report import Evaluations, read_evaluation
from topr_trl.pipeline import manifest
from topr_trl.pipeline.arguments import Settings, inputs_of, load_problems
from topr_trl.pipeline.stages import ON_SEVERAL_PROCESSES, check_candidates


@dataclass
class LoopArguments:
    """How the loop runs its stages.

    Parameters:
        iterations (`int`, defaults to `1`): Rounds of sampling and training.
        candidates (`str`, *optional*): Folder or file of rows to train on in the first iteration instead of sampling.
        sampling_workers (`int`, defaults to `1`): Sampling processes; each gets `vllm_tensor_parallel_size` GPUs.
        sampling_python (`str`, *optional*): Python of the environment that vLLM is installed in, if it is another one.
        accelerate_config (`str`, *optional*): Accelerate's config for log μ and training, see
            `examples/accelerate_configs`; default: one process.
        keep_copies (`bool`, defaults to `False`): Keep `candidates` and `curated` when `scored` and `log_mu`, which
            hold the same rows and more, have been used.
    """

    iterations: int = field(default=1, metadata={"help": "Rounds of sampling and training."})
    candidates: str | None = field(
        default=None, metadata={"help": "Folder or file of rows to train on first, instead of sampling."}
    )
    sampling_workers: int = field(default=1, metadata={"help": "Sampling processes."})
    sampling_python: str | None = field(default=None, metadata={"help": "Python of the environment with vLLM."})
    accelerate_config: str | None = field(default=None, metadata={"help": "Accelerate's config for training."})
    keep_copies: bool = field(
        default=False, metadata={"help": "Keep `candidates` and `curated` when `scored` and `log_mu` have been used."}
    )

    def __post_init__(self) -> None:
        check_types(self, LoopArguments)
        for name in ("iterations", "sampling_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("candidates", "accelerate_config", "sampling_python"):
            if getattr(self, name) is not None and not Path(getattr(self, name)).exists():
                raise FileNotFoundError(f"There is no {getattr(self, name)} ({name}).")


@dataclass
class Step:
    """A stage with its folders."""

    stage: str
    output: Path
    input: Path | None = None
    model: str | None = None
    iteration: int = 0
    split: str = "train"

    def options(self) -> list[str]:
        given = {"output": self.output, "input": self.input, "model_name_or_path": self.model,
                 "iteration": self.iteration, "split": self.split}  # fmt: skip
        return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def plan(loop: LoopArguments, model: str | None, out: Path) -> Iterator[Step]:
    """All steps of the loop, in order."""

    def testing(folder: Path, model: str | None, iteration: int) -> Iterator[Step]:
        yield Step("sample", folder / "candidates", None, model, iteration, "test")
        yield Step("score", folder / "scored", folder / "candidates")
        yield Step("evaluate", folder / "results", folder / "scored")

    yield from testing(out / "base" / "test", model, 0)
    for iteration in range(1, loop.iterations + 1):
        folder = out / f"iteration-{iteration}"
        rows = Path(loop.candidates) if loop.candidates and iteration == 1 else folder / "candidates"
        if rows == folder / "candidates":
            yield Step("sample", rows, None, model, iteration)
        yield Step("score", folder / "scored", rows, None, iteration)
        yield Step("curate", folder / "curated", folder / "scored", None, iteration)
        yield Step("log-mu", folder / "log_mu", folder / "curated", model, iteration)
        yield Step("train", folder / "model", folder / "log_mu", model, iteration)
        model = str(folder / "model")
        yield from testing(folder / "test", model, iteration)


def copies_after(step: Step) -> Iterator[tuple[Path, Path]]:
    """Folders of the loop whose rows nothing needs once this step is done, and the folders that hold them too."""
    folder = step.output.parent
    if step.stage == "evaluate":
        yield folder / "candidates", folder / "scored"
    elif step.stage == "train":
        yield folder / "candidates", folder / "scored"
        yield folder / "curated", folder / "log_mu"


def iterate(loop: LoopArguments, settings: Settings, arguments: list[str]) -> None:
    """Run the loop to its end, or from where it stopped.

    Args:
        loop, settings: parsed.
        arguments: the command line that they were parsed from; every stage is started with it.

    Raises:
        ValueError: a folder holds results for other settings, or settings cannot work together.
        ChildProcessError: a stage failed; what it printed tells why.
    """
    check(loop, settings)
    out = Path(settings.training.output_dir)
    with manifest.lock(out):
        steps = list(plan(loop, settings.model.model_name_or_path, out))
        for number, step in enumerate(steps, 1):
            title = f"[{number}/{len(steps)}] {step.stage} -> {os.path.relpath(step.output, out)}"
            if _is_finished(step, settings):
                print(f"{title}: done before", flush=True)
            else:
                print(title, flush=True)
                _run(step, loop, settings, arguments)
            if not loop.keep_copies:
                for folder, copy in copies_after(step):
                    manifest.drop(folder, copy)
        results = Evaluations(
            {
                path.parent.parent.parent.name: read_evaluation(path)
                for path in [step.output / "evaluation.json" for step in steps if step.stage == "evaluate"]
            }
        )
        print(
            f"\n{results}\n\nModels, candidates and results are in {out}/; topr plot --input {out} draws them.",
            flush=True,
        )


def check(loop: LoopArguments, settings: Settings) -> None:
    """Refuse what would fail in a later stage, after hours of sampling.

    Raises:
        ValueError, ImportError: naming the setting and what to do.
    """
    for name in ("input", "output", "worker", "compare"):
        if getattr(settings.stage, name) is not None:
            raise ValueError(f"{name} is for single stages; topr iterate writes to output_dir.")
    if settings.training.save_only_model:
        raise ValueError("save_only_model leaves no checkpoint that the loop could go on from.")
    manifest.check_own(Path(settings.training.output_dir))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("Start topr iterate in one process; name Accelerate's settings with --accelerate_config.")
    config = yaml.safe_load(Path(loop.accelerate_config).read_text()) if loop.accelerate_config else {}
    if not isinstance(config, dict):
        raise ValueError(
            f"{loop.accelerate_config} must hold settings of Accelerate, as `accelerate config` writes them."
        )
    sharding = config.get("distributed_type")
    fsdp_version = config.get("fsdp_config", {}).get("fsdp_version", 1)
    offload = config.get("deepspeed_config", {}).get("offload_optimizer_device", "none")
    refuse_adafactor(settings.training.optim, sharding == "FSDP" and fsdp_version == 2, offload != "none")
    if sharding == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError("This accelerate_config needs DeepSpeed: pip install topr_trl[deepspeed].")
    if settings.stage.sampling_backend == "vllm" and not loop.sampling_python and find_spec("vllm") is None:
        raise ImportError(
            "sampling_backend='vllm' needs vLLM: pip install topr_trl[vllm], or name the Python of an environment that "
            "has it (and topr_trl) with --sampling_python."
        )
    for split in ("train", "test"):
        if split == "test" or not loop.candidates:
            load_problems(replace(settings.stage, split=split))
    if loop.candidates:
        check_candidates(Path(loop.candidates))
    check_files(settings.model_path)
    needed, gpus = loop.sampling_workers * settings.vllm.vllm_tensor_parallel_size, torch.cuda.device_count()
    if gpus and needed > gpus:
        raise ValueError(
            f"{loop.sampling_workers} sampling_workers of vllm_tensor_parallel_size="
            f"{settings.vllm.vllm_tensor_parallel_size} need {needed} GPUs, and there are {gpus}."
        )


def _is_finished(step: Step, settings: Settings) -> bool:
    known = manifest.read(step.output)
    if known is None or known["files"] is None:
        return False
    settings = deepcopy(settings)
    settings.stage.input, settings.stage.output = str(step.input) if step.input else None, str(step.output)
    settings.stage.iteration, settings.stage.split = step.iteration, step.split
    if step.model is not None:
        settings.model.model_name_or_path = step.model
    finished = manifest.begin(step.output, inputs_of(step.stage, settings))
    if finished:
        manifest.clean(step.output)
    return finished


def _run(step: Step, loop: LoopArguments, settings: Settings, arguments: list[str]) -> None:
    program = ["-m", "topr_trl", step.stage, *arguments, *step.options()]
    python = [sys.executable]
    if step.stage in ON_SEVERAL_PROCESSES and loop.accelerate_config:
        python += ["-m", "accelerate.commands.launch", "--config_file", loop.accelerate_config]
    if step.stage == "sample":
        python = [loop.sampling_python or sys.executable]
        if loop.sampling_workers > 1:
            n, gpus = loop.sampling_workers, settings.vllm.vllm_tensor_parallel_size
            workers = [
                _start([*python, *program, "--worker", f"{k}/{n}"], _devices(range(k * gpus, (k + 1) * gpus)))
                for k in range(n)
            ]
            _wait(workers, step)
    _wait([_start([*python, *program])], step)


def _devices(indices: range) -> dict[str, str]:
    """The environment of a worker that sees only these of the GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return {}
    names = visible.split(",") if visible else [str(i) for i in range(indices.stop)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i % len(names)] for i in indices)}


def _start(command: list[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **(more or {}), _LOOP: str(os.getpid())}
    linux = sys.platform == "linux"
    return subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent if linux else None)


def _wait(processes: list[subprocess.Popen[bytes]], step: Step) -> None:
    try:  # the first that fails ends the others
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise ChildProcessError(
            f"The stage {step.stage} failed with exit status {failed[0]}; its messages are above. "
            "What was finished is kept: the same command goes on from there."
        )


# A stage ends when its loop is killed (Linux; elsewhere it finishes its work, and a new loop waits for it). The loop
# asks the kernel for that for its children; those of a launcher in between ask for themselves, maybe too late.

_LOOP = "TOPR_LOOP"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not after


def _end_with_parent() -> None:
    set_parent_death_signal = 1
    if _LIBC is not None:
        _LIBC.prctl(set_parent_death_signal, signal.SIGKILL)


def in_a_loop() -> bool:
    """Whether this process is a stage that a loop has started."""
    return _LOOP in os.environ


def end_with_the_loop() -> None:
    """For a process that a loop may have started: end when the loop does, at once if it has ended already."""
    loop = os.environ.get(_LOOP)
    if loop is None:
        return
    _end_with_parent()
    try:
        os.kill(int(loop), 0)
    except ProcessLookupError:
        sys.exit("The loop that started this stage has ended.")
