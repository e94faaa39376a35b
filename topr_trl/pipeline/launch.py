"""Start the stages that run in their own processes, such as `sample` and `train`, on their machines and GPUs."""

import os
import random
import shlex
import sys
import time
from collections.abc import Iterable
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
from trl import ModelConfig

from topr_trl.pipeline.child_processes import Process, ProcessGroup, run_process_groups, start
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.settings import (
    PLACEHOLDERS,
    FolderArguments,
    LaunchArguments,
    RunArguments,
)
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.stages.sample import Sample
from topr_trl.settings.unsupported import offloads_optimizer, refuse_adafactor


def check_launch(command: str, settings: RunArguments) -> None:
    """Check before a long run that the processes of a command can start and resume.

    Args:
        command (`str`): Name of the command, for messages.
        settings (`RunArguments`): Settings of the command.

    Raises:
        ValueError: settings are wrong, contradict each other or are incomplete, or the machine has too few GPUs.
        ImportError: vLLM or DeepSpeed is needed and not installed.
        FileNotFoundError: the program of a launcher does not exist.
    """
    if settings.save_only_model:
        raise ValueError("save_only_model=True saves checkpoints from which training cannot resume: remove it.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"Start topr {command} in one process. For several training processes, set --accelerate_config to a config "
            "file of Accelerate."
        )
    _check_accelerate(settings)
    if settings.sampling_backend == "vllm" and not settings.sampling_python and find_spec("vllm") is None:
        raise ImportError(
            "sampling_backend='vllm' needs vLLM: run pip install \".[vllm]\" in the clone, or set --sampling_python to "
            "the Python of an environment with vLLM and topr_trl."
        )
    needed, gpus = settings.sampling_workers * settings.vllm_tensor_parallel_size, torch.cuda.device_count()
    gpus = len(settings.sampling_devices or ()) or gpus
    if gpus and needed > gpus and not settings.sampling_launcher:
        raise ValueError(
            f"{settings.sampling_workers} sampling_workers with vllm_tensor_parallel_size="
            f"{settings.vllm_tensor_parallel_size} need {needed} GPUs, and {gpus} can be used for sampling. Use fewer "
            "workers, or list more GPUs in --sampling_devices."
        )


def _check_accelerate(settings: RunArguments) -> None:
    config = _accelerate_settings(settings.accelerate_config)
    if not isinstance(config, dict):
        raise ValueError(
            f"{settings.accelerate_config} is not a config file of Accelerate. Write one with `accelerate config`."
        )
    sharding = config.get("distributed_type")
    fsdp_version = (config.get("fsdp_config") or {}).get("fsdp_version", 1)
    deepspeed = config.get("deepspeed_config") or {}
    offloaded = deepspeed.get("offload_optimizer_device", "none") != "none"
    offloaded = offloaded or offloads_optimizer(deepspeed.get("deepspeed_config_file"))
    refuse_adafactor(settings.optim, sharding == "FSDP" and fsdp_version == 2, offloaded)
    if sharding == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError('This accelerate_config needs DeepSpeed: run pip install ".[deepspeed]" in the clone.')
    for name in PLACEHOLDERS:
        launcher = getattr(settings, name)
        words = shlex.split(launcher or "")
        if launcher and not words:
            raise ValueError(f"{name} is empty: set it to a command, or remove it.")
        if words and which(words[0]) is None:
            raise FileNotFoundError(f"{name}: there is no program {words[0]}.")
    machines = num_machines(settings.accelerate_config)
    if machines > 1 and "{host}" not in (settings.training_launcher or ""):
        raise ValueError(
            f"{settings.accelerate_config} has num_machines={machines}: set --training_launcher to a command that "
            "starts a process on a machine, such as 'srun --nodes 1 --ntasks 1 --nodelist {host}', and set "
            "--training_hosts to the machines."
        )
    for stage, name in (("train", "training_hosts"), ("log-mu", "sampling_hosts")):
        if (found := len(settings.hosts_of(stage))) < machines > 1:
            raise ValueError(
                f"{settings.accelerate_config} has num_machines={machines}, and {name} has {found}. Set --{name} to "
                "one host per machine."
            )


def run_apart(stage: Stage[Any], launch: LaunchArguments, log: Path | None, stop: Event) -> Json:
    """Run a stage in its own processes. All of their memory, including GPU memory, is freed when they end.

    Args:
        stage (`Stage`): The stage.
        launch (`LaunchArguments`): Settings for starting processes.
        log (`Path` or `None`): File to append the output of the processes to. With `None`, they share this process's
            output.
        stop (`Event`): Event that ends the processes when it is set.

    Returns:
        The stage's entry in the manifest. Its `seconds` include the time of the sampling workers.

    Raises:
        ChildProcessError: a process failed more than `launch.retries` times, or `stop` was set.
    """
    program = ["-m", "topr_trl", stage.name, "--config", str(write_settings(stage))]
    with ExitStack() as opened:
        output = None if log is None else opened.enter_context(log.open("ab"))
        if isinstance(stage, Sample):
            program = [launch.sampling_python or sys.executable, *program]
            if launch.sampling_workers > 1 or launch.sampling_launcher:
                return _run_workers(stage, program, launch, log, output, stop)
            started = partial(_start_local, program, stage.name, launch, output)
        elif not stage.on_several_processes:
            started = partial(_start_local, [sys.executable, *program], stage.name, launch, output)
        else:
            started = partial(_start_nodes, program, stage.name, launch, output)
        group = ProcessGroup(started, lambda: "finished" in stage.entry())
        run_process_groups([group], stage.name, launch.retries, log, stop)
    return stage.entry()


def _run_workers(
    stage: Sample, program: list[str], launch: LaunchArguments, log: Path | None, output: IO[bytes] | None, stop: Event
) -> Json:
    """Sample the shards in worker processes, and finish the stage in this process."""
    began, workers = time.monotonic(), []
    count = stage.count_shards(load_problems(stage.args, stage.args.split))
    for k in range(launch.sampling_workers):
        worker = f"{k}/{launch.sampling_workers}"
        started = partial(_start_worker, [*program, "--worker", worker], k, launch, output)
        workers.append(ProcessGroup(started, lambda w=worker: not stage.missing_shards(w, count)))  # type: ignore[misc]
    run_process_groups(workers, stage.name, launch.retries, log, stop)
    sampled = time.monotonic() - began
    done = stage.run()
    return done | {"seconds": done["seconds"] + sampled}


def _start_local(
    command: list[str], stage: str, launch: LaunchArguments, output: IO[bytes] | None
) -> Iterable[Process]:
    return [start(command, devices(stage, launch), output)]


def _start_worker(command: list[str], k: int, launch: LaunchArguments, output: IO[bytes] | None) -> list[Process]:
    if launch.sampling_launcher:
        launcher = _fill_placeholders(launch.sampling_launcher, host=_host("sample", launch, k), worker=k)
        return [start(launcher + command, [], output, is_launcher=True)]
    return [start(command, worker_devices(devices("sample", launch), k, launch.vllm_tensor_parallel_size), output)]


def _start_nodes(
    program: list[str], stage: str, launch: LaunchArguments, output: IO[bytes] | None
) -> Iterable[Process]:
    """Start the stage `train` or `log-mu` on each of its machines, and yield the processes."""
    config, port, first = launch.accelerate_config, random.randrange(*_PORTS), _host(stage, launch, 0)
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", config] if config else []
    if config and launch.devices_of(stage):
        accelerate += ["--num_processes", str(len(devices(stage, launch)))]
    machines = num_machines(config)
    for node in range(machines):
        # Two stages may start on one machine at the same time. With port 0, Accelerate picks a free port.
        where = ["--machine_rank", node, "--main_process_ip", first, "--main_process_port", port]
        place = (where if machines > 1 else ["--main_process_port", 0]) if config else []
        command = [sys.executable, *accelerate, *map(str, place), *program]
        if launch.training_launcher:
            host = _host(stage, launch, node)
            command = _fill_placeholders(launch.training_launcher, host=host, node=node, port=port) + command
        yield start(command, devices(stage, launch), output, is_launcher=bool(launch.training_launcher))


def _host(stage: str, launch: LaunchArguments, number: int) -> str:
    """Return the host of a worker or node. Return "" if the settings name no hosts."""
    hosts = launch.hosts_of(stage)
    return hosts[number % len(hosts)] if hosts else ""


_PORTS = (20_000, 32_000)  # range to draw the main port from; Linux gives ports from 32,768 to other connections


def _fill_placeholders(launcher: str, **places: str | int) -> list[str]:
    """Return the words of a launcher command, with its placeholders filled in."""
    for name, value in places.items():
        launcher = launcher.replace(f"{{{name}}}", str(value))
    return shlex.split(launcher)


def num_machines(accelerate_config: str | None) -> int:
    """Return the number of machines in a config file of Accelerate. Return 1 without a file."""
    return int(_accelerate_settings(accelerate_config).get("num_machines") or 1)


def _accelerate_settings(path: str | None) -> Any:
    """Read a config file of Accelerate. Return {} without a file."""
    return yaml.safe_load(Path(path).read_text()) if path else {}


def write_settings(stage: Stage[Any]) -> Path:
    """Write a YAML file beside a stage's folder, from which another process can read the stage's settings.

    Settings with default values are left out, unless the default depends on the machine or on the task.

    Returns:
        The path of the file.
    """
    args = stage.args
    # The defaults of these settings depend on the machine or on the task, so write their values in any case.
    always = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16", "num_shots") if hasattr(args, name)}
    default, given = (_settings_for_yaml(each) for each in (type(args)(**always), args))
    own = {name: given[name] for name in stage.setting_names() if name in always or given[name] != default[name]}
    # Always name the model. Otherwise, the defaults for the bundled model would replace settings that are left out.
    if isinstance(args, ModelConfig):
        own["model_name_or_path"] = model_path(args)
    path = stage.folder.parent / f"{stage.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(own))
    return path


def _settings_for_yaml(args: FolderArguments) -> Json:
    """Return settings by name, with values that YAML can hold."""
    if hasattr(args, "to_dict"):  # a subclass of transformers.TrainingArguments
        plain: Json = args.to_dict()
        # `to_dict` hides the values of all settings whose name ends in _token.
        return plain | {name: getattr(args, name, None) for name in ("eos_token", "pad_token")}
    return {field.name: getattr(args, field.name) for field in fields(args)}


def devices(stage: str, launch: LaunchArguments) -> list[str]:
    """Return the GPUs of a stage: those in the settings, else those in `CUDA_VISIBLE_DEVICES`.

    Return [] if neither names a GPU. The stage then sees the GPUs that this process sees.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return launch.devices_of(stage) or [name for name in given.split(",") if name]


def worker_devices(of_stage: list[str], worker: int, each: int) -> list[str]:
    """Return the GPUs of a worker. Workers share GPUs if there are too few.

    If `of_stage` is empty and `CUDA_VISIBLE_DEVICES` is not set, number the GPUs from 0 and do not share them. If
    `of_stage` is empty and `CUDA_VISIBLE_DEVICES` is set, return [].

    Args:
        of_stage (`list[str]`): GPUs of the stage, see `devices`.
        worker (`int`): Number of the worker, from 0.
        each (`int`): Number of GPUs per worker.
    """
    first = worker * each
    if not of_stage and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [str(n) for n in range(first, first + each)]
    return [of_stage[n % len(of_stage)] for n in range(first, first + each)] if of_stage else []
