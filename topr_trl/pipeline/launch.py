"""Start the processes of the stages that hold a model (sampling, log μ, training), on their machines and GPUs."""

import os
import random
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from threading import Event
from typing import IO, Any

import torch
import yaml

from topr_trl.pipeline.arguments import (
    PLACEHOLDERS,
    FolderArguments,
    LaunchArguments,
    RunArguments,
)
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.processes import Process, ProcessGroup, run_process_groups, start
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.stages.sample import Sample
from topr_trl.settings.unsupported import offloads_optimizer, refuse_adafactor


def check_launch(command: str, settings: RunArguments) -> None:
    """Raise a ValueError or ImportError if the processes of a command cannot be started, or could not resume."""
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
    deepspeed = config.get("deepspeed_config") or {}
    offloaded = deepspeed.get("offload_optimizer_device", "none") != "none"
    offloaded = offloaded or offloads_optimizer(deepspeed.get("deepspeed_config_file"))
    refuse_adafactor(settings.optim, sharding == "FSDP" and fsdp_version == 2, offloaded)
    if sharding == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError("This accelerate_config needs DeepSpeed: pip install topr_trl[deepspeed].")
    for name in PLACEHOLDERS:
        launcher = getattr(settings, name)
        words = shlex.split(launcher or "")
        if launcher and not words:
            raise ValueError(f"{name} is empty: name a command, or leave it out.")
        if words and which(words[0]) is None:
            raise FileNotFoundError(f"{name}: there is no program {words[0]}.")
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


def run_apart(stage: Stage[Any], launch: LaunchArguments, log: Path | None, stop: Event) -> Json:
    """Run a stage to its end in processes of its own. Their memory, GPU memory included, is free when they end.

    Args:
        stage (`Stage`): The stage.
        launch (`LaunchArguments`): How its processes are started.
        log (`Path`, *optional*): File to which their output is added. Default: the output of this process.
        stop (`Event`): Ends them when it is set.

    Returns:
        The stage's entry in the manifest; its `seconds` include those of the sampling workers.

    Raises:
        ChildProcessError: a process failed more often than it may be started again, or was stopped.
    """
    program = ["-m", "topr_trl", stage.name, "--config", str(write_settings(stage))]
    with ExitStack() as opened:
        output = None if log is None else opened.enter_context(log.open("ab"))
        if isinstance(stage, Sample):
            program = [launch.sampling_python or sys.executable, *program]
            if launch.sampling_workers > 1 or launch.sampling_launcher:
                return _run_workers(stage, program, launch, log, output, stop)
            started = partial(_start_here, program, stage.name, launch, output)
        else:
            started = partial(_start_nodes, program, stage.name, launch, output)
        group = ProcessGroup(started, lambda: "finished" in stage.entry())
        run_process_groups([group], stage.name, launch.retries, log, stop)
    return stage.entry()


def _run_workers(
    stage: Sample, program: list[str], launch: LaunchArguments, log: Path | None, output: IO[bytes] | None, stop: Event
) -> Json:
    """Draw the shards in several processes, and finish the stage in this one."""
    began, workers = time.monotonic(), []
    for k in range(launch.sampling_workers):
        worker = f"{k}/{launch.sampling_workers}"
        started = partial(_start_worker, [*program, "--worker", worker], k, launch, output)
        workers.append(ProcessGroup(started, lambda w=worker: not stage.missing_shards(w)))  # type: ignore[misc]
    run_process_groups(workers, stage.name, launch.retries, log, stop)
    sampled = time.monotonic() - began
    done = stage.run()
    return done | {"seconds": done["seconds"] + sampled}


def _start_here(command: list[str], stage: str, launch: LaunchArguments, output: IO[bytes] | None) -> list[Process]:
    return [start(command, devices(stage, launch), output)]


def _start_worker(command: list[str], k: int, launch: LaunchArguments, output: IO[bytes] | None) -> list[Process]:
    if launch.sampling_launcher:
        launcher = _filled(launch.sampling_launcher, host=_host("sample", launch, k), worker=k)
        return [start(launcher + command, [], output, is_launcher=True)]
    return [start(command, worker_devices(devices("sample", launch), k, launch.vllm_tensor_parallel_size), output)]


def _start_nodes(program: list[str], stage: str, launch: LaunchArguments, output: IO[bytes] | None) -> list[Process]:
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
        started.append(start(command, devices(stage, launch), output, is_launcher=bool(launch.training_launcher)))
    return started


def _host(stage: str, launch: LaunchArguments, number: int) -> str:
    """Return the host of a worker or node; "" if no hosts are named."""
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
    """Read a file of Accelerate's settings; empty if none is named."""
    return yaml.safe_load(Path(path).read_text()) if path else {}


def write_settings(stage: Stage[Any]) -> Path:
    """Write the settings of a stage that differ from the defaults to a YAML file beside its folder."""
    args = stage.args
    # Settings whose default depends on the machine, or on the task.
    always = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16", "num_shots") if hasattr(args, name)}
    default, given = (_plain(one) for one in (type(args)(**always), args))
    own = {name: given[name] for name in stage.setting_names() if name in always or given[name] != default[name]}
    own["model_name_or_path"] = model_path(args)  # always named: defaults of the bundled model are the loop's
    path = stage.folder.parent / f"{stage.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(own))
    return path


def _plain(args: FolderArguments) -> Json:
    """Return settings as YAML holds them."""
    if hasattr(args, "to_dict"):  # of transformers
        plain: Json = args.to_dict()
        return plain | {name: getattr(args, name, None) for name in ("eos_token", "pad_token")}  # it hides all *_token
    return {field.name: getattr(args, field.name) for field in fields(args)}


def devices(stage: str, launch: LaunchArguments) -> list[str]:
    """The GPUs of a stage: those that are named for its side, or all that this process was given by name.

    Empty where none are named: the stage sees what this process sees.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return launch.devices_of(stage) or [name for name in given.split(",") if name]


def worker_devices(of_stage: list[str], worker: int, each: int) -> list[str]:
    """Return a worker's share of the stage's devices; after the last device comes the first again."""
    first = worker * each
    if not of_stage and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [str(n) for n in range(first, first + each)]
    return [of_stage[n % len(of_stage)] for n in range(first, first + each)] if of_stage else []
