"""Start the stages that run in their own processes, such as `sample` and `train`, on their machines and GPUs."""

import json
import os
import shlex
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from threading import Event
from typing import Any

import torch
import yaml
from trl import ModelConfig

from topr_trl.pipeline.child_processes import Program, describe_failure, run_processes
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.parent_process import is_one_of_several
from topr_trl.pipeline.settings import LAUNCHERS, FolderArguments, LaunchArguments, RunArguments
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.stages.sample import Sample
from topr_trl.pipeline.stages.train import NO_WEIGHTS
from topr_trl.settings.unsupported import offloads_optimizer, refuse_adafactor
from topr_trl.user_warnings import warn_user


def check_launch(command: str, settings: RunArguments) -> None:
    """Check before a long run that the processes of a command can start and resume.

    Args:
        command (`str`): Name of the command, for messages.
        settings (`RunArguments`): Settings of the command.

    Raises:
        ValueError: settings are wrong, contradict each other or are incomplete, the machine has too few GPUs, or a
            launcher started this process as one of several.
        ImportError: vLLM or DeepSpeed is needed and not installed.
        FileNotFoundError: the program of a launcher does not exist.
    """
    if settings.save_only_model:
        raise ValueError("save_only_model=True saves checkpoints from which training cannot resume: remove it.")
    if is_one_of_several():
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
    is_spread = bool(settings.accelerate_config or settings.training_launcher)
    is_spread |= "device_map" in (settings.model_init_kwargs or {})
    for stage in () if settings.use_cpu or is_spread else ("log-mu", "train"):
        if (seen := len(devices(stage, settings)) or torch.cuda.device_count()) > 1:
            raise ValueError(
                f"The stage {stage} would see {seen} GPUs, and its one process can use one. Set --accelerate_config to "
                "a config file of Accelerate, or name one GPU in --sampling_devices and --training_devices, or in "
                "CUDA_VISIBLE_DEVICES if neither is set."
            )
    needed = settings.sampling_workers * settings.vllm_tensor_parallel_size
    gpus = len(settings.sampling_devices or ()) or torch.cuda.device_count()
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
    fsdp = (config.get("fsdp_config") or {}) if sharding == "FSDP" else {}
    deepspeed = (config.get("deepspeed_config") or {}) if sharding == "DEEPSPEED" else {}
    offloaded = deepspeed.get("offload_optimizer_device", "none") != "none"
    offloaded = offloaded or offloads_optimizer(deepspeed.get("deepspeed_config_file"))
    refuse_adafactor(settings.optim, fsdp.get("fsdp_version") == 2, offloaded)
    if str(fsdp.get("fsdp_state_dict_type")).upper() in ("LOCAL_STATE_DICT", "2"):
        raise ValueError(
            "Training cannot be resumed from checkpoints with fsdp_state_dict_type: LOCAL_STATE_DICT. Set "
            f"SHARDED_STATE_DICT in {settings.accelerate_config}."
        )
    if not (settings.use_peft or _saves_weights(deepspeed)):  # ZeRO-3 always saves the weights of an adapter.
        raise ValueError(NO_WEIGHTS)
    if sharding == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError('This accelerate_config needs DeepSpeed: run pip install ".[deepspeed]" in the clone.')
    if sharding == "DEEPSPEED" and settings.bf16 and not settings.use_peft:
        warn_user(
            "DeepSpeed rounds weights to bfloat16 when it loads and saves a model. If a training changes a weight by "
            "less than 1/512 of its value, the change is lost. FSDP2 keeps float32: set accelerate_config to a file "
            "such as examples/accelerate_configs/fsdp2.yaml."
        )
    for name in LAUNCHERS:
        launcher = getattr(settings, name)
        words = shlex.split(launcher or "")
        if launcher and not words:
            raise ValueError(f"{name} is empty: set it to a command, or remove it.")
        if words and which(words[0]) is None:
            raise FileNotFoundError(f"{name}: there is no program {words[0]}.")
    if (machines := int(config.get("num_machines") or 1)) > 1 and not settings.training_launcher:
        raise ValueError(
            f"{settings.accelerate_config} has num_machines={machines}: set --training_launcher to a command that "
            "starts a process on each machine, such as 'srun --nodes 2 --ntasks-per-node 1 "
            "examples/slurm/train_on_node.sh'."
        )
    processes, gpus = config.get("num_processes") or 1, torch.cuda.device_count()
    is_named = settings.training_launcher or (settings.sampling_devices and settings.training_devices)
    if 0 < gpus < processes and not (is_named or settings.use_cpu or config.get("use_cpu")):
        raise ValueError(
            f"{settings.accelerate_config} has num_processes={processes}, and training would see {gpus} GPUs. Change "
            "num_processes, or list GPUs in --sampling_devices and --training_devices."
        )


def _saves_weights(deepspeed: Json) -> bool:
    """Return whether training with these settings of DeepSpeed saves whole weights at its end."""
    zero, stage, gathers = deepspeed, "zero_stage", "zero3_save_16bit_model"
    if os.path.isfile(file := deepspeed.get("deepspeed_config_file", "")):
        zero = json.loads(Path(file).read_text()).get("zero_optimization") or {}
        stage, gathers = "stage", "stage3_gather_16bit_weights_on_model_save"
    return zero.get(stage) != 3 or bool(zero.get(gathers))


def run_apart(stage: Stage[Any], launch: LaunchArguments, log: Path | None, stop: Event) -> None:
    """Run a stage in its own processes. All of their memory, including GPU memory, is freed when they end.

    Args:
        stage (`Stage`): The stage.
        launch (`LaunchArguments`): Settings for starting processes.
        log (`Path` or `None`): File to append the output of the processes to. With `None`, they share this process's
            output.
        stop (`Event`): Event that ends the processes when it is set.

    Raises:
        ChildProcessError: a process failed or ended before its work was done, or `stop` was set.
    """
    run_processes(programs_of(stage, launch), stage.name, log, stop)
    if "finished" in stage.entry():
        return
    # Exit status 0 is not enough, because a launcher can exit with 0 after losing a machine.
    if not isinstance(stage, Sample) or stage.has_missing_shards():
        raise ChildProcessError(describe_failure(stage.name, "ended before its work was done", log))
    stage.run()  # On a slow shared disk, the last worker may not see all shards, and does not finish the stage.


def programs_of(stage: Stage[Any], launch: LaunchArguments) -> list[Program]:
    """Return the programs that run a stage at the same time, and write the stage's settings for them.

    Args:
        stage (`Stage`): The stage.
        launch (`LaunchArguments`): Settings for starting processes.
    """
    launcher = shlex.split((launch.sampling_launcher if isinstance(stage, Sample) else launch.training_launcher) or "")
    settings = write_settings(stage, launch.is_cpu_given or not launcher)
    arguments, gpus = [stage.name, "--config", str(settings)], devices(stage.name, launch)
    if isinstance(stage, Sample):
        python, workers = [launch.sampling_python] if launch.sampling_python else [], launch.sampling_workers
        if launcher:
            return [Program(arguments, [], python, launcher)]
        if workers == 1:
            return [Program(arguments, gpus, python)]
        each = launch.vllm_tensor_parallel_size
        return [
            Program([*arguments, "--worker", f"{k}/{workers}"], worker_devices(gpus, k, each), python)
            for k in range(workers)
        ]
    if not stage.on_several_processes:
        return [Program(arguments, gpus)]
    python = []
    if config := launch.accelerate_config:
        python = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        if int(_accelerate_settings(config).get("num_machines") or 1) == 1:
            # Two stages may start on one machine at the same time. With port 0, Accelerate picks a free port.
            python += ["--main_process_port", "0"]
        if launch.devices_of(stage.name):
            # `gpu_ids` of the config file would replace CUDA_VISIBLE_DEVICES.
            python += ["--num_processes", str(len(gpus)), "--gpu_ids", "all"]
    return [Program(arguments, gpus, python, launcher)]


def _accelerate_settings(path: str | None) -> Any:
    """Read a config file of Accelerate. Return {} without a file."""
    return yaml.safe_load(Path(path).read_text()) if path else {}


def write_settings(stage: Stage[Any], with_device: bool = True) -> Path:
    """Write the settings of a stage to a YAML file beside the stage's folder. The stage's processes read this file.

    Settings with default values are left out, except for the model, and for settings whose default depends on the
    machine or on the task. Without `with_device`, use_cpu is left out, too, and the machine of the stage decides.

    Returns:
        The path of the file.
    """
    args = stage.args
    # The defaults of these settings depend on the machine or on the task, so write their values in any case.
    always = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16", "num_shots") if hasattr(args, name)}
    default, given = (_settings_for_yaml(each) for each in (type(args)(**always), args))
    own = {name: given[name] for name in stage.setting_names() if name in always or given[name] != default[name]}
    if not with_device:
        own.pop("use_cpu", None)
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
        # `to_dict` hides the values of all settings whose name ends in _token.
        return args.to_dict() | {name: getattr(args, name, None) for name in ("eos_token", "pad_token")}
    return {field.name: getattr(args, field.name) for field in fields(args)}


def devices(stage: str, launch: LaunchArguments) -> list[str]:
    """Return the GPUs of a stage: those in the settings, else those in `CUDA_VISIBLE_DEVICES`.

    Return [] if neither source names a GPU. The stage then sees the GPUs that this process sees.
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
