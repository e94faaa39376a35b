"""Settings that several stages share, and those of the commands that run stages, `topr iterate` and `topr trial`."""

import re
import shlex
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
from trl import ModelConfig

from topr_trl.data.tables import TABLE_SUFFIXES
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.generation.vllm import VLLMArguments
from topr_trl.settings.arguments import CurationArguments
from topr_trl.settings.checks import check_at_least, check_choice, check_types, existing
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.tasks import TASKS, Task
from topr_trl.trainers.checkpoints import refuse_adapter

BACKENDS = ("transformers", "vllm")
SPLITS = ("train", "test")
TESTS = ("auto", "answers", "rewards")
GREEDY_HELP = "Also draw one completion per test problem at temperature 0, and report its accuracy; never trained on."


@dataclass
class FolderArguments:
    """Where a stage reads and writes."""

    input: str | None = field(default=None, metadata={"help": "Folder of rows, or a file of them."})
    output_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder to write. If it is the input, which other stages have written, columns are added there."
        },
    )

    @property
    def source(self) -> Path:
        """The path to read; a ValueError or FileNotFoundError if it is not named or not there."""
        if self.input is None:
            raise ValueError("This command reads rows: name their folder or file with --input.")
        return existing(self.input, "--input")

    @property
    def folder(self) -> Path:
        """The folder to write; a ValueError if it is not named."""
        if self.output_dir is None:
            raise ValueError("Name the folder to write with --output_dir.")
        return Path(self.output_dir)


@dataclass
class SeedArguments:
    """Seed settings."""

    seed: int = field(default=42, metadata={"help": "Seed."})
    iteration: int = field(default=0, metadata={"help": "Iteration of the loop; also mixed into the seed."})


@dataclass
class ProblemArguments:
    """Settings for the problems to sample and their prompts."""

    task: str = field(default="gsm8k", metadata={"help": f"Task: {' or '.join(TASKS)}."})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: built-in problems."})
    test_dataset_name: str | None = field(
        default=None, metadata={"help": "Test problems; default: the test split of dataset_name."}
    )
    num_train_problems: int | None = field(default=None, metadata={"help": "Use only the first N. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Use only the first N. Default: all."})
    num_shots: int | None = field(default=None, metadata={"help": "Examples in the prompt. Default: the task's."})
    training_shots: bool = field(
        default=False, metadata={"help": "Take the examples in the prompt from the training problems (MATH)."}
    )
    problems_per_shard: int = field(default=64, metadata={"help": "Problems per file of rows."})

    def __post_init__(self) -> None:
        check_types(self, ProblemArguments)
        check_choice(self, task=tuple(TASKS))
        check_at_least(1, self, "problems_per_shard", "num_train_problems", "num_test_problems")
        check_at_least(0, self, "num_shots")
        if self.test_dataset_name is None and str(self.dataset_name).endswith(TABLE_SUFFIXES):
            raise ValueError("A file has no test split: name the test problems with --test_dataset_name.")
        if self.test_dataset_name is not None and self.dataset_name is None:
            raise ValueError(
                f"test_dataset_name={self.test_dataset_name}: without dataset_name, built-in problems are used. Set "
                "dataset_name as well; to test only, to the same problems."
            )
        if self.training_shots and self.task_of_problems is not TASKS["math"]:
            raise ValueError(
                "training_shots draws from MATH's training problems: it needs task=math and a dataset_name."
            )
        if self.num_shots is None:
            self.num_shots = self.task_of_problems.num_shots

    @property
    def task_of_problems(self) -> Task:
        """The task, or that of the built-in problems."""
        return TASKS["gsm8k" if self.dataset_name is None else self.task]


@dataclass
class BackendArguments(VLLMArguments):
    """Settings for the backend that samples."""

    sampling_backend: str = field(default="transformers", metadata={"help": f"What samples: {' or '.join(BACKENDS)}."})

    def __post_init__(self) -> None:
        check_types(self, BackendArguments)
        check_choice(self, sampling_backend=BACKENDS)


# Placeholders allowed in launcher templates.
PLACEHOLDERS = {"sampling_launcher": ("host", "worker"), "training_launcher": ("host", "node", "port")}


@dataclass
class LaunchArguments(BackendArguments):
    """How a command that runs stages starts their processes."""

    sampling_workers: int = field(default=1, metadata={"help": "Sampling processes."})
    sampling_python: str | None = field(default=None, metadata={"help": "Python of the environment with vLLM."})
    accelerate_config: str | None = field(default=None, metadata={"help": "Accelerate's config for training."})
    sampling_devices: list[str] | None = field(
        default=None, metadata={"help": "GPUs of sampling and log μ, as in CUDA_VISIBLE_DEVICES. Default: all."}
    )
    training_devices: list[str] | None = field(default=None, metadata={"help": "GPUs of training. Default: all."})
    sampling_launcher: str | None = field(
        default=None,
        metadata={"help": "Command that starts a sampling process, such as srun; may have {host} {worker}."},
    )
    training_launcher: str | None = field(
        default=None,
        metadata={"help": "Command that starts training or log μ on a machine; may have {host} {node} {port}."},
    )
    sampling_hosts: list[str] | None = field(
        default=None, metadata={"help": "Machines of sampling and log μ: what {host} stands for."}
    )
    training_hosts: list[str] | None = field(
        default=None, metadata={"help": "Machines of training, and of log μ if there are no sampling_hosts."}
    )
    retries: int = field(default=0, metadata={"help": "How often a process that failed is started again."})

    def __post_init__(self) -> None:
        check_types(self, LaunchArguments)  # text, for a list, would be taken apart
        super().__post_init__()
        check_at_least(1, self, "sampling_workers")
        check_at_least(0, self, "retries")
        for name, places in PLACEHOLDERS.items():
            if unknown := set(re.findall(r"{(\w*)}", getattr(self, name) or "")) - set(places):
                allowed = ", ".join(f"{{{place}}}" for place in places)
                raise ValueError(f"{name} may have {allowed}, and has {{{sorted(unknown)[0]}}}.")
            hosts, gpus = name.replace("launcher", "hosts"), name.replace("launcher", "devices")
            if "{host}" in (getattr(self, name) or "") and not getattr(self, hosts):
                raise ValueError(f"{name} has {{host}}: name the machines with {hosts}.")
            if getattr(self, name) and getattr(self, gpus):
                raise ValueError(f"{gpus} are GPUs of this machine, and {name} starts processes elsewhere. Keep one.")
            try:
                shlex.split(getattr(self, name) or "")
            except ValueError as error:
                raise ValueError(f"{name}: {error}.") from error
        for name in ("sampling_devices", "training_devices"):
            if (devices := getattr(self, name)) is not None and len(set(devices)) < max(len(devices), 1):
                raise ValueError(f"{name} must name GPUs, each once, not {' '.join(devices) or 'none'}.")
        for name in ("accelerate_config", "sampling_python"):
            if getattr(self, name) is not None:
                existing(getattr(self, name), f"--{name}")

    def devices_of(self, stage: str) -> list[str] | None:
        """The GPUs that are named for a stage."""
        return self.training_devices if stage == "train" else self.sampling_devices

    def hosts_of(self, stage: str) -> list[str]:
        """The machines that are named for a stage."""
        own = {"train": self.training_hosts, "log-mu": self.sampling_hosts or self.training_hosts}
        return own.get(stage, self.sampling_hosts) or []


_PLAIN_NAME = re.compile(r"\w+(\.\w+)*")


def validate_model(settings: ModelConfig, whole: bool) -> None:
    """Check the settings of the model and of LoRA.

    Convert a single module name to a list. TRL unwraps lists of one name, and PEFT treats a string as a regular
    expression of whole paths, which a name such as `q_proj` never matches.

    Raises:
        ValueError: two settings contradict each other; or the model's folder holds an adapter and has to be `whole`.
    """
    ModelConfig.__post_init__(settings)
    for name in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
        value = getattr(settings, name, None)
        if isinstance(value, str) and value != "all-linear" and _PLAIN_NAME.fullmatch(value):
            setattr(settings, name, [value])
    if whole and settings.model_name_or_path:
        refuse_adapter(settings.model_name_or_path)


@dataclass
class RunArguments(SamplingArguments, LaunchArguments, OfflineTOPRConfig, ModelConfig):
    """Settings of commands that run the stages of sampling and training."""

    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints of a training that are kept."})
    greedy: bool = field(default=True, metadata={"help": GREEDY_HELP})

    def __post_init__(self) -> None:
        validate_model(self, whole=True)
        SamplingArguments.__post_init__(self)
        LaunchArguments.__post_init__(self)
        OfflineTOPRConfig.__post_init__(self)


@dataclass
class IterateArguments(ProblemArguments, RunArguments):
    """Settings of `topr iterate`: those of its stages, and how it runs them."""

    output_dir: str | None = field(default="topr-run", metadata={"help": "Folder to write."})
    iterations: int = field(default=1, metadata={"help": "Rounds of sampling and training."})
    overlap: int = field(
        default=0,
        metadata={
            "help": "Sample and train at the same time: rows of an iteration are by a model that is so many iterations "
            "older than the newest. 0: one after the other."
        },
    )
    rows: str | None = field(
        default=None, metadata={"help": "Folder or file of rows to train on first, instead of sampling."}
    )
    num_generations_eval: int = field(default=16, metadata={"help": "Completions per test problem (the paper: 64)."})

    def __post_init__(self) -> None:
        ProblemArguments.__post_init__(self)
        RunArguments.__post_init__(self)
        check_at_least(1, self, "iterations", "num_generations_eval")
        check_at_least(0, self, "overlap")
        if self.rows is not None:
            existing(self.rows, "--rows")

    @property
    def folder(self) -> Path:
        """The folder to write."""
        return Path(self.output_dir or "topr-run")


@dataclass
class TrialArguments(FolderArguments, RunArguments):
    """Settings of `topr trial`: those of its stages, and how much it tries."""

    input: str | None = field(default=None, metadata={"help": "Folder of rows, or a file of them, with rewards."})
    output_dir: str | None = field(default="topr-trial", metadata={"help": "Folder to write."})
    task: str = field(default="gsm8k", metadata={"help": f"{' or '.join(TASKS)}; topr sample notes that of its rows."})
    trial_rows: int = field(default=2_560, metadata={"help": "Rows that each training reads, at most."})
    held_out_problems: int = field(default=400, metadata={"help": "Problems to test on, at most a third of all."})
    test_by: str = field(
        default="auto",
        metadata={
            "help": "'answers': sample the held-out problems and judge; 'rewards': weight the rewards of their rows; "
            "'auto': the first if a judge agrees with the rows."
        },
    )
    num_generations_eval: int = field(default=8, metadata={"help": "Completions per held-out problem."})

    def __post_init__(self) -> None:
        RunArguments.__post_init__(self)
        check_choice(self, task=tuple(TASKS), test_by=TESTS)
        check_at_least(1, self, "trial_rows", "num_generations_eval")
        check_at_least(2, self, "held_out_problems")


def field_names(*kinds: type, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the settings of dataclasses, each once, in order."""
    return tuple(dict.fromkeys(f.name for kind in kinds for f in fields(kind) if f.init and f.name not in without))


ADAPTER_SETTINGS = tuple(
    name for name in field_names(ModelConfig) if name.startswith(("use_peft", "lora_", "use_rs", "use_do"))
)
NOT_FOR_COMMANDS = ("resume_from_checkpoint",)  # a command finds its own checkpoints
# Settings of the commands that run stages.
LOOP_SETTINGS = field_names(IterateArguments, without=NOT_FOR_COMMANDS)
TRIAL_SETTINGS = field_names(
    TrialArguments,
    # A trial tries these.
    without=(*field_names(CurationArguments), *NOT_FOR_COMMANDS, "preset", "a_pos", "b_pos", "a_neg", "b_neg"),
)

Kind = TypeVar("Kind")


def stage_args(kind: type[Kind], settings: object, **changes: object) -> Kind:
    """Copy the settings that a stage shares with a command, and change some.

    Args:
        kind (`type`): The stage's dataclass of settings.
        settings (`object`): Settings of the command.
        changes: Other values by name.
    """
    names = {f.name for f in fields(kind) if f.init and hasattr(settings, f.name)}  # type: ignore[arg-type]
    return kind(**{name: deepcopy(getattr(settings, name)) for name in names} | changes)


def seed_of(stage: str, seed: int, iteration: int, split: str = "train", shard: int = 0) -> int:
    """A seed for a stage of an iteration and split, and a shard of it; below 2^31."""
    of_stage = 2 * ("sample", "curate", "train").index(stage) + (split == "test")
    entropy = [seed, iteration, of_stage, shard + 1]  # ends in no zero: those are ignored
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
