"""Steps: stages with their settings, run one after the other.

What holds a model (sampling, log μ, training) is a process of its own, which takes its memory with it when it ends, on
the GPU too; what is cheap runs here. Finished steps are skipped.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml

from topr_trl.config import refuse_adafactor
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import SETTINGS, LaunchArguments, RunArguments, model_path
from topr_trl.pipeline.manifest import Json

_HERE = ("score", "curate", "evaluate")  # stages that run in this process


@dataclass
class Step:
    """A stage with its settings."""

    stage: str
    args: stages.Settings

    @property
    def folder(self) -> Path:
        """What it writes, or works on."""
        return self.args.folder


@dataclass
class Spent:
    """Seconds: of the stages that ran, and of starting processes for them."""

    stages: float = 0.0
    starts: float = 0.0


def run_steps(steps: Iterable[Step], launch: LaunchArguments, out: Path, count: int) -> Spent:
    """Run steps in order, each once; which come later may depend on what earlier ones have found.

    Args:
        out: their folders are in it.
        count: of the steps, for the titles.

    Raises:
        ChildProcessError: a stage failed; its messages say why.
    """
    spent = Spent()
    for number, step in enumerate(steps, 1):
        title = f"[{number}/{count}] {step.stage} -> {os.path.relpath(step.folder, out)}"
        if stages.is_finished(step.stage, step.args):
            print(f"{title}: done before", flush=True)
            continue
        print(title, flush=True)
        started = time.monotonic()
        if step.stage in _HERE:
            done = stages.run(step.stage, step.args)
            if said := summary(step.stage, done):
                print(said, flush=True)
        else:
            done = _run_apart(step, launch)
            spent.starts += time.monotonic() - started - done["seconds"]
        spent.stages += done["seconds"]
    return spent


def summary(stage: str, done: Json) -> str:
    """What a stage found, in a line, or a few of an import."""
    if stage == "import":
        return _of_import(done)
    if stage == "score":
        counts = {**done.get("scored", {})}  # version 0.1 noted none
        kept = counts.pop("kept", 0)
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items() if n]
        return ", ".join(parts + ([f"{kept:,} keep the reward that they came with"] if kept else [])) + "."
    if stage == "evaluate":
        return f"pass@1 {done['pass@1']}" if "pass@1" in done else ""
    if stage == "curate":
        return f"Chosen: {done['curated']}." if isinstance(done["curated"], str) else ""
    if stage == "log-mu" and (distance := done["sampler_distance"]):
        return (
            f"Sampler and trainer differ by {distance['token']:.2g} per token, {distance['response']:.2g} per "
            "completion."
        )
    return ""


_LEFT_OUT = {
    "broken": ("line is no JSON and is left out", "lines are no JSON and are left out"),
    "unrewarded": ("record has no reward and is left out", "records have no reward and are left out"),
    "empty": ("record holds no completion to learn from", "records hold no completion to learn from"),
    "repeated": ("file repeats the one before it and is left out", "files repeat those before them and are left out"),
}


def _of_import(done: Json) -> str:
    rows = done["rows"]
    has = [f"{name}{'' if n == rows else f' in {n:,}'}" for name, n in done["filled"].items() if n]
    said = [f"Format: {done['format']}. Rows have {', '.join(has)}."]
    if done["lacking"]:
        said.append(f"Not in these files: {', '.join(done['lacking'])}.")
    if not done["filled"].get("reward"):
        said.append("There are no rewards: name their fields (--reward_fields) or a second file (--rewards), or score "
                    "rows that have an answer.")  # fmt: skip
    if done["temperatures"][1:] or 0 in done["temperatures"]:
        found = ", ".join(f"{value:g}" for value in done["temperatures"])
        said.append(f"They were sampled at temperatures {found}, and the trainer takes one that is above 0: import "
                    "files of one, or set --temperature.")  # fmt: skip
    for kind, (one, more) in _LEFT_OUT.items():
        count, first = done["left_out"][kind]["count"], done["left_out"][kind]["first"]
        if count:
            said.append(f"{count} {one if count == 1 else more}: {', '.join(first)}{', ...' * (count > len(first))}.")
    if not done["filled"].get("sampler_logps"):
        said.append("There are no log-probabilities: log μ will be that of the model that training starts from, which "
                    "stands for the one that wrote the rows.")  # fmt: skip
    return "\n".join([*said, done["loses"]]).strip()


def check_launch(command: str, settings: RunArguments) -> None:
    """A ValueError or ImportError if the processes of a command cannot be started, or could not resume."""
    if settings.save_only_model:
        raise ValueError("save_only_model leaves no checkpoint to resume from: leave it out.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"Start topr {command} in one process; name Accelerate's settings with --accelerate_config.")
    _check_accelerate(settings)
    if settings.sampling_backend == "vllm" and not settings.sampling_python and find_spec("vllm") is None:
        raise ImportError(
            "sampling_backend='vllm' needs vLLM: pip install topr_trl[vllm], or name the Python of an environment that "
            "has it (and topr_trl) with --sampling_python."
        )
    needed, gpus = settings.sampling_workers * settings.vllm_tensor_parallel_size, torch.cuda.device_count()
    if gpus and needed > gpus:
        raise ValueError(
            f"{settings.sampling_workers} sampling_workers of vllm_tensor_parallel_size="
            f"{settings.vllm_tensor_parallel_size} need {needed} GPUs, and there are {gpus}."
        )


def _check_accelerate(settings: RunArguments) -> None:
    config = yaml.safe_load(Path(settings.accelerate_config).read_text()) if settings.accelerate_config else {}
    if not isinstance(config, dict):
        raise ValueError(
            f"{settings.accelerate_config} must hold settings of Accelerate, as `accelerate config` writes them."
        )
    sharding = config.get("distributed_type")
    fsdp_version = (config.get("fsdp_config") or {}).get("fsdp_version", 1)
    offload = (config.get("deepspeed_config") or {}).get("offload_optimizer_device", "none")
    refuse_adafactor(settings.optim, sharding == "FSDP" and fsdp_version == 2, offload != "none")
    if sharding == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError("This accelerate_config needs DeepSpeed: pip install topr_trl[deepspeed].")


# Stages that are processes of their own.


def _run_apart(step: Step, launch: LaunchArguments) -> Json:
    """Run a stage to its end in a process of its own, or several.

    Returns:
        What its manifest says of it.
    """
    program = ["-m", "topr_trl", step.stage, "--config", str(write_settings(step))]
    python = [sys.executable]
    if step.stage in stages.ON_SEVERAL_PROCESSES and launch.accelerate_config:
        python += ["-m", "accelerate.commands.launch", "--config_file", launch.accelerate_config]
    if step.stage == "sample":
        python = [launch.sampling_python or sys.executable]
        if launch.sampling_workers > 1:
            n, gpus = launch.sampling_workers, launch.vllm_tensor_parallel_size
            workers = [
                _start([*python, *program, "--worker", f"{k}/{n}"], _devices(range(k * gpus, (k + 1) * gpus)))
                for k in range(n)
            ]
            _wait(workers, step)
    _wait([_start([*python, *program])], step)
    known = manifest.read(step.folder)
    assert known is not None
    return known.stages[step.stage]


def write_settings(step: Step) -> Path:
    """The YAML that the stage is started with, beside its folder: settings other than the defaults."""
    always = {name: getattr(step.args, name) for name in ("use_cpu", "bf16", "fp16") if hasattr(step.args, name)}
    default, given = (_plain(args) for args in (type(step.args)(**always), step.args))
    own = {name: given[name] for name in SETTINGS[step.stage] if name in always or given[name] != default[name]}
    own["model_name_or_path"] = model_path(step.args)  # always named: defaults of the embedded model are the loop's
    path = step.folder.parent / f"{step.stage}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(own))
    return path


def _plain(args: stages.Settings) -> Json:
    """Values as YAML holds them."""
    if hasattr(args, "to_dict"):  # of transformers
        plain: Json = args.to_dict()
        return plain | {name: getattr(args, name) for name in ("eos_token", "pad_token")}  # it hides all *_token
    return {field.name: getattr(args, field.name) for field in fields(args)}


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
            "What was finished is kept: the same command continues from there."
        )


# A stage ends when its loop is killed (Linux; elsewhere it finishes its work, and a new loop waits for it). The loop
# asks the kernel for that for its children; those of a launcher in between ask for themselves, which may be too late.

_LOOP = "TOPR_LOOP"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not after


def _end_with_parent() -> None:
    set_parent_death_signal = 1
    if _LIBC is not None:
        _LIBC.prctl(set_parent_death_signal, signal.SIGKILL)


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
