"""Processes of stages that hold a model (sampling, log μ, training), and how a command starts and waits for them.

What a stage takes of memory, on the GPU too, goes with its process when it ends.
"""

import ctypes
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from threading import Event
from typing import IO, Any

import torch
import yaml

from topr_trl.config import refuse_adafactor
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import (
    PLACEHOLDERS,
    SETTINGS,
    LaunchArguments,
    RunArguments,
    SampleArguments,
    model_path,
)
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.problems import load_problems

_Process = subprocess.Popen[bytes]


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
    gpus = len(settings.sampling_devices or ()) or gpus
    if gpus and needed > gpus and not settings.sampling_launcher:
        raise ValueError(
            f"{settings.sampling_workers} sampling_workers of vllm_tensor_parallel_size="
            f"{settings.vllm_tensor_parallel_size} need {needed} GPUs, and there are {gpus} to sample with."
        )


def _check_accelerate(settings: RunArguments) -> None:
    config = _accelerate_settings(settings.accelerate_config)
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
    for name in PLACEHOLDERS:
        if (launcher := getattr(settings, name)) and which(program := shlex.split(launcher)[0]) is None:
            raise FileNotFoundError(f"{name}: there is no program {program}.")
    machines = num_machines(settings.accelerate_config)
    if machines > 1 and "{host}" not in (settings.training_launcher or ""):
        raise ValueError(
            f"{settings.accelerate_config} has num_machines={machines}: say how a process is started on each of them, "
            "as in --training_launcher 'srun --nodes 1 --ntasks 1 --nodelist {host}', and name them with "
            "--training_hosts."
        )
    for stage, name in (("train", "training_hosts"), ("log-mu", "sampling_hosts")):
        if (found := len(settings.hosts_of(stage))) < machines > 1:
            raise ValueError(f"{settings.accelerate_config} has num_machines={machines}, and {name} has {found}.")


# Processes that run together.

_LINES = 30  # of its log that are shown of a stage that failed
_PAUSE = 10.0  # seconds before processes are started again
_GRACE = 60.0  # seconds in which a process that is asked to end does so


@dataclass
class _Group:
    """Processes that run together: where one fails, all are ended, and started again.

    A launcher may say nothing of a lost machine: exit status 0 alone is not trusted, `has_finished` has to say so, too.
    """

    start: Callable[[], list[_Process]]
    has_finished: Callable[[], bool] = lambda: True
    processes: list[_Process] = field(default_factory=list)
    failures: int = 0
    pause: float = 0.0  # begin again at this time
    is_done: bool = False

    def failure(self) -> str:
        """What has failed, "" if nothing has; notes if all is done."""
        codes = [process.poll() for process in self.processes]
        if failed := [code for code in codes if code]:
            return f"failed with exit status {failed[0]}"
        if codes and None not in codes and not self.is_done:
            self.is_done = self.has_finished()
            return "" if self.is_done else "ended before its work was done"
        return ""

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []


def _run_groups(groups: list[_Group], stage: str, retries: int, log: Path | None, stop: Event) -> None:
    try:
        while not all(group.is_done for group in groups):
            for group in groups:
                if not group.processes and not group.is_done and time.monotonic() >= group.pause:
                    group.processes = group.start()
                elif failure := group.failure():
                    group.end()
                    group.failures += 1
                    group.pause = time.monotonic() + _PAUSE
                    if group.failures > retries:
                        raise ChildProcessError(_message(stage, failure, log))
                    print(
                        f"A process of the stage {stage} {failure}; it is started again ({group.failures} of {retries} "
                        "retries).",
                        flush=True,
                    )
            if stop.wait(0.1):
                raise ChildProcessError(f"The stage {stage} was stopped.")
    finally:
        for group in groups:
            group.end()


def _message(stage: str, failure: str, log: Path | None) -> str:
    if log is not None:
        print(*log.read_text(errors="replace").splitlines()[-_LINES:], sep="\n", flush=True)
    return (
        f"The stage {stage} {failure}; its messages are {log or 'above'}. "
        "What was finished is kept: the same command continues from there."
    )


# Stages that are processes of their own.


def run_apart(stage: str, args: stages.Settings, launch: LaunchArguments, log: Path | None, stop: Event) -> Json:
    """Run a stage to its end in a process of its own, or several.

    Args:
        log: file to which their output is added; by default it goes where that of this process goes.
        stop: ends them when it is set.

    Returns:
        What the manifest says of the stage.

    Raises:
        ChildProcessError: one failed more often than it may be started again, or they were stopped.
    """
    program = ["-m", "topr_trl", stage, "--config", str(write_settings(stage, args))]

    def manifest_of_stage() -> Json:
        known = manifest.read(args.folder)
        return known.stages.get(stage, {}) if known is not None else {}

    def finished() -> bool:
        return "finished" in manifest_of_stage()

    with ExitStack() as opened:
        output = None if log is None else opened.enter_context(log.open("ab"))
        if stage == "sample":
            assert isinstance(args, SampleArguments)
            python = [launch.sampling_python or sys.executable, *program]
            if (count := launch.sampling_workers) > 1 or launch.sampling_launcher:
                shards = stages.shard_count(args, load_problems(args, args.split))
                workers = [_worker(python, k, args.folder, shards, launch, output) for k in range(count)]
                _run_groups(workers, stage, launch.retries, log, stop)
            # All shards are there by now, or it is the only one.
            whole = _Group(lambda: [_start(python, devices(stage, launch), output)], finished)
        else:
            whole = _Group(partial(_start_nodes, program, stage, launch, output), finished)
        _run_groups([whole], stage, launch.retries, log, stop)
    return manifest_of_stage()


def _worker(
    command: list[str], k: int, folder: Path, shards: int, launch: LaunchArguments, output: IO[bytes] | None
) -> _Group:
    """A sampling process; it has done its work when its shards are there."""
    worker = f"{k}/{launch.sampling_workers}"
    start = partial(_start_worker, [*command, "--worker", worker], k, launch, output)
    return _Group(start, lambda: not stages.missing_shards(folder, stages.own_shards(worker, shards), shards))


def _start_worker(command: list[str], k: int, launch: LaunchArguments, output: IO[bytes] | None) -> list[_Process]:
    if launch.sampling_launcher:
        launcher = _filled(launch.sampling_launcher, host=_host("sample", launch, k), worker=k)
        return [_start(launcher + command, [], output, is_launcher=True)]
    return [_start(command, worker_devices(devices("sample", launch), k, launch.vllm_tensor_parallel_size), output)]


def _start_nodes(program: list[str], stage: str, launch: LaunchArguments, output: IO[bytes] | None) -> list[_Process]:
    """The processes of a stage that trains or computes log μ, on each of its machines."""
    config, port, first = launch.accelerate_config, random.randrange(*_PORTS), _host(stage, launch, 0)
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", config] if config else []
    if config and launch.devices_of(stage):
        accelerate += ["--num_processes", str(len(devices(stage, launch)))]
    machines, started = num_machines(config), []
    for node in range(machines):
        # Two stages may start at the same time on one machine: there Accelerate looks for a port that is free.
        where = ["--machine_rank", node, "--main_process_ip", first, "--main_process_port", port]
        place = (where if machines > 1 else ["--main_process_port", 0]) if config else []
        command = [sys.executable, *accelerate, *map(str, place), *program]
        if launch.training_launcher:
            host = _host(stage, launch, node)
            command = _filled(launch.training_launcher, host=host, node=node, port=port) + command
        started.append(_start(command, devices(stage, launch), output, is_launcher=bool(launch.training_launcher)))
    return started


def _host(stage: str, launch: LaunchArguments, number: int) -> str:
    """Of a worker or node; "" where none are named."""
    hosts = launch.hosts_of(stage)
    return hosts[number % len(hosts)] if hosts else ""


_PORTS = (20_000, 32_000)  # below the ephemeral ports


def _filled(launcher: str, **places: str | int) -> list[str]:
    """The words of a launcher, with its placeholders filled in."""
    for name, value in places.items():
        launcher = launcher.replace(f"{{{name}}}", str(value))
    return shlex.split(launcher)


def num_machines(accelerate_config: str | None) -> int:
    """On how many machines Accelerate's settings start processes."""
    return int(_accelerate_settings(accelerate_config).get("num_machines") or 1)


def _accelerate_settings(path: str | None) -> Any:
    """What a file of Accelerate's settings holds; empty if none is named."""
    return yaml.safe_load(Path(path).read_text()) if path else {}


def write_settings(stage: str, args: stages.Settings) -> Path:
    """The YAML that the stage is started with, beside its folder: settings other than the defaults."""
    always = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16") if hasattr(args, name)}
    default, given = (_plain(one) for one in (type(args)(**always), args))
    own = {name: given[name] for name in SETTINGS[stage] if name in always or given[name] != default[name]}
    own["model_name_or_path"] = model_path(args)  # always named: defaults of the embedded model are the loop's
    path = args.folder.parent / f"{stage}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(own))
    return path


def _plain(args: stages.Settings) -> Json:
    """Values as YAML holds them."""
    if hasattr(args, "to_dict"):  # of transformers
        plain: Json = args.to_dict()
        return plain | {name: getattr(args, name) for name in ("eos_token", "pad_token")}  # it hides all *_token
    return {field.name: getattr(args, field.name) for field in fields(args)}


def devices(stage: str, launch: LaunchArguments) -> list[str]:
    """The GPUs of a stage: those that are named for its side, or all that this process was given by name.

    Empty where none are named: the stage sees what this process sees.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return launch.devices_of(stage) or [name for name in given.split(",") if name]


def worker_devices(of_stage: list[str], worker: int, each: int) -> list[str]:
    """Of a worker: its share of those of the stage; after the last comes the first again."""
    first = worker * each
    if not of_stage and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [str(n) for n in range(first, first + each)]
    return [of_stage[n % len(of_stage)] for n in range(first, first + each)] if of_stage else []


def _start(command: list[str], gpus: list[str], output: IO[bytes] | None, is_launcher: bool = False) -> _Process:
    """Start a process that ends with this one.

    What a launcher starts may be on another machine. It is asked to end, and passes that on.
    """
    environment = {**os.environ, _LOOP: str(os.getpid())}
    if is_launcher:
        del environment[_LOOP]  # no process of that machine
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    ended = partial(_end_with_parent, signal.SIGTERM if is_launcher else signal.SIGKILL)
    return subprocess.Popen(
        command, env=environment, preexec_fn=ended if sys.platform == "linux" else None, stdout=output, stderr=output
    )


# A stage ends when its loop is killed (Linux; elsewhere it finishes its work, and a new loop waits for it). The loop
# asks the kernel for that for its children; those of a launcher in between ask for themselves, which may be too late.

_LOOP = "TOPR_LOOP"
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before a fork, not after


def _end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    set_parent_death_signal = 1
    if _PRCTL is not None:
        _PRCTL(set_parent_death_signal, by)


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
