"""Define the settings that several stages share, and the settings of `topr iterate` and `topr trial`."""

import re
import shlex
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import TypeVar

import numpy as np
from trl import ModelConfig

from topr_trl.data.tables import TABLE_SUFFIXES
from topr_trl.generation.settings import SamplingArguments
from topr_trl.generation.vllm import VLLMArguments, refuse_adapter_of_vllm
from topr_trl.importing.input_settings import InputArguments
from topr_trl.rewards.functions import check_weights
from topr_trl.settings.checks import HUB, check_at_least, check_choice, check_types, existing
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.settings.shared import CurationArguments
from topr_trl.tasks import DEFAULT_TASK, OWN_PROMPTS, TASKS, Task
from topr_trl.trainers.checkpoints import refuse_adapter

BACKENDS = ("transformers", "vllm")
SPLITS = ("train", "test")
TESTS = ("auto", "answers", "rewards")
DECODINGS = ("greedy", "sample")
TASK_NAMES = (*TASKS, OWN_PROMPTS.name)
TASK_HELP = (
    f"Task: {' or '.join(TASKS)}, or {OWN_PROMPTS.name} for prompts that are used as they are. Default: "
    f"{DEFAULT_TASK}, or {OWN_PROMPTS.name} with reward_funcs and a dataset."
)
GREEDY_HELP = "Also draw one completion per test problem at temperature 0 and report its accuracy."


@dataclass
class FolderArguments:
    """Settings for the input and the output folder of a stage."""

    input: str | None = field(
        default=None,
        metadata={
            "help": "Folder or file of rows, or hub:owner/name[:[config/]split][@revision]. If the command has "
            "--format, also a file of another system."
        },
    )
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Folder to write. Stages that add columns to rows can write to the folder of --input."},
    )

    @property
    def source(self) -> Path:
        """Return the path to read.

        Raises:
            ValueError: `input` is not set.
            FileNotFoundError: the path does not exist.
        """
        if self.input is None:
            raise ValueError("This command reads rows: set --input to their folder or file.")
        return existing(self.input, "--input")

    @property
    def folder(self) -> Path:
        """Return the folder to write.

        Raises:
            ValueError: `output_dir` is not set.
        """
        if self.output_dir is None:
            raise ValueError("Set --output_dir to the folder to write.")
        return Path(self.output_dir)


@dataclass
class RowsArguments(FolderArguments, InputArguments):
    """Settings of a stage that reads rows, or imports a file from another system."""


@dataclass
class SeedArguments:
    """Settings that determine the random numbers of a stage."""

    seed: int = field(default=42, metadata={"help": "Random seed."})
    iteration: int = field(
        default=0, metadata={"help": "Iteration of the loop. Each iteration uses different random numbers."}
    )


@dataclass
class ProblemArguments:
    """Settings for the problems and their prompts."""

    task: str | None = field(default=None, metadata={"help": TASK_HELP, "choices": TASK_NAMES})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset on the Hub, or file, with problems or prompts. Default: the built-in problems. Own "
            "prompts are in a column prompt, as text or messages."
        },
    )
    test_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset of test problems. Default: the test split of dataset_name. A file has no test split, so "
            "topr iterate does not test models if dataset_name is a file of own prompts."
        },
    )
    num_train_problems: int | None = field(
        default=None, metadata={"help": "Use only the first N training problems. Default: all."}
    )
    num_test_problems: int | None = field(
        default=None,
        metadata={"help": "Use only the first N test problems. Default: all. With 0, topr iterate tests no model."},
    )
    num_shots: int | None = field(
        default=None, metadata={"help": "Number of worked examples in the prompt. Default: as in the paper."}
    )
    training_shots: bool = field(
        default=False, metadata={"help": "Draw the worked examples from the training problems (MATH only)."}
    )
    problems_per_shard: int = field(default=64, metadata={"help": "Number of problems per shard of rows."})

    def __post_init__(self) -> None:
        check_types(self, ProblemArguments)
        check_choice(self, task=(None, *TASKS, OWN_PROMPTS.name))  # A program can add a task.
        check_at_least(1, self, "problems_per_shard", "num_train_problems")
        check_at_least(0, self, "num_shots", "num_test_problems")
        if self.test_dataset_name is not None and self.dataset_name is None:
            raise ValueError(
                f"test_dataset_name={self.test_dataset_name} has no effect without dataset_name. Set dataset_name as "
                "well. If you only test, set both to the same dataset."
            )
        if self.training_shots and self.task_of_problems is not TASKS["math"]:
            raise ValueError(
                "training_shots draws worked examples from MATH's training problems: set task=math and dataset_name."
            )
        if self.num_shots is None:
            self.num_shots = self.task_of_problems.num_shots

    @property
    def task_of_problems(self) -> Task:
        """Return the task."""
        return OWN_PROMPTS if self.task == OWN_PROMPTS.name else TASKS[self.task or DEFAULT_TASK]

    @property
    def has_no_test_split(self) -> bool:
        """Return whether the problems are in a file, and `test_dataset_name` is not set."""
        return self.test_dataset_name is None and str(self.dataset_name).endswith(TABLE_SUFFIXES)

    def check_test_split(self) -> None:
        """Raise a ValueError if there is no test split."""
        if self.has_no_test_split:
            raise ValueError(
                f"dataset_name={self.dataset_name} is a file, which has no test split: set "
                "--test_dataset_name to the test problems. For own prompts, also set --reward_funcs."
            )


@dataclass
class RewardArguments:
    """Settings for reward functions and reward models."""

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions as in TRL, judges or reward models, instead of the judge of a task: "
            "FILE.py:FUNCTION, MODULE:FUNCTION, a function of TRL, or the name or folder of a reward model."
        },
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward function. Default: 1 for each."}
    )

    def __post_init__(self) -> None:
        check_types(self, RewardArguments)
        if self.reward_funcs is None and self.reward_weights is not None:
            raise ValueError(
                "reward_weights has no effect without reward_funcs. Set reward_funcs, or remove reward_weights."
            )
        try:
            self.reward_weights = self.reward_weights and list(map(float, self.reward_weights))
        except (TypeError, ValueError):
            raise ValueError(f"reward_weights must be numbers, not {self.reward_weights}.") from None
        if self.reward_funcs is not None:
            check_weights(self.reward_funcs, self.reward_weights)

    def implied_task(self, task: str | None, dataset_name: str | None) -> str | None:
        """Return `task`. If it is None and reward functions and a dataset are set, return the task of own prompts."""
        return OWN_PROMPTS.name if task is None and self.reward_funcs and dataset_name else task


@dataclass
class RewardTestArguments(RewardArguments):
    """Settings for rewards, and for tests by answers or rewards."""

    num_generations_eval: int = field(
        default=16, metadata={"help": "Number of completions per test problem (64 in the paper)."}
    )
    pass_threshold: float | None = field(
        default=None,
        metadata={"help": "Smallest reward with which a completion passes. Answers are then not used."},
    )

    def __post_init__(self) -> None:
        RewardArguments.__post_init__(self)
        check_types(self, RewardTestArguments)
        check_at_least(1, self, "num_generations_eval")
        if self.pass_threshold is not None and not isfinite(self.pass_threshold):
            raise ValueError(f"pass_threshold must be a finite number, not {self.pass_threshold}.")


@dataclass
class BackendArguments(VLLMArguments):
    """Settings for the sampling backend."""

    sampling_backend: str = field(
        default="transformers", metadata={"help": "Library that samples.", "choices": BACKENDS}
    )

    def __post_init__(self) -> None:
        check_types(self, BackendArguments)
        check_choice(self, sampling_backend=BACKENDS)


LAUNCHERS = ("sampling_launcher", "training_launcher")


@dataclass
class LaunchArguments(BackendArguments):
    """Settings for starting the processes of stages."""

    sampling_workers: int = field(default=1, metadata={"help": "Number of sampling processes."})
    sampling_python: str | None = field(
        default=None, metadata={"help": "Python interpreter of an environment with vLLM, used for sampling."}
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "Config file of Accelerate, used for training and log μ."}
    )
    sampling_devices: list[str] | None = field(
        default=None, metadata={"help": "GPUs for sampling and log μ, as in CUDA_VISIBLE_DEVICES. Default: all."}
    )
    training_devices: list[str] | None = field(default=None, metadata={"help": "GPUs for training. Default: all."})
    sampling_launcher: str | None = field(
        default=None,
        metadata={"help": "Command that starts sampling on other machines, such as srun with a script."},
    )
    training_launcher: str | None = field(
        default=None,
        metadata={"help": "Command that starts training and log μ on other machines, such as srun with a script."},
    )

    is_cpu_given = True  # not a setting: whether the user chose use_cpu, and not the command

    def __post_init__(self) -> None:
        check_types(self, LaunchArguments)  # Check first: the code below would split a str into characters.
        super().__post_init__()
        check_at_least(1, self, "sampling_workers")
        for name in LAUNCHERS:
            self._check_launcher(name)
        if self.sampling_launcher and self.sampling_workers > 1:
            raise ValueError(
                "sampling_workers starts processes on this machine, and sampling_launcher on others. Remove "
                "sampling_workers, and let the launcher start the workers, as examples/slurm/sample_on_node.sh does."
            )
        for name in ("sampling_devices", "training_devices"):
            if (given := getattr(self, name)) is not None:
                devices = [device for each in given for device in str(each).split(",") if device]
                if len(set(devices)) < max(len(devices), 1):
                    raise ValueError(f"{name} must list GPUs, each once, not {' '.join(devices) or 'none'}.")
                setattr(self, name, devices)
        for name in ("accelerate_config", "sampling_python"):
            if getattr(self, name) is not None:
                existing(getattr(self, name), f"--{name}")

    def _check_launcher(self, name: str) -> None:
        launcher, gpus = getattr(self, name) or "", name.replace("launcher", "devices")
        if launcher and getattr(self, gpus):
            raise ValueError(
                f"{gpus} are GPUs of this machine, and {name} starts processes on other machines. Keep only one of "
                "the two."
            )
        try:
            shlex.split(launcher)
        except ValueError as error:
            raise ValueError(f"{name}: {error}.") from error

    def devices_of(self, stage: str) -> list[str] | None:
        """Return the GPUs that the settings name for a stage, or None."""
        return self.training_devices if stage == "train" else self.sampling_devices


_PLAIN_NAME = re.compile(r"\w+(\.\w+)*")  # name of a module, not a regular expression


def validate_model(settings: ModelConfig, whole: bool) -> None:
    """Check the settings of the model and of LoRA.

    Also convert a single module name, such as `q_proj`, back to a list, because TRL unwraps lists of one name. PEFT
    would treat the string as a regular expression for the full paths of modules, and match no module.

    Args:
        settings ([`~trl.ModelConfig`]): Settings of the model.
        whole (`bool`): Whether to refuse a folder that has only an adapter.

    Raises:
        ValueError: two settings contradict each other, or the folder has only an adapter and `whole` is set.
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
    """Settings of the commands that run stages: `topr iterate` and `topr trial`."""

    save_total_limit: int | None = field(
        default=1, metadata={"help": "Number of checkpoints to keep per training run."}
    )
    greedy: bool = field(default=True, metadata={"help": GREEDY_HELP})

    def __post_init__(self) -> None:
        validate_model(self, whole=True)
        SamplingArguments.__post_init__(self)
        LaunchArguments.__post_init__(self)
        OfflineTOPRConfig.__post_init__(self)
        if self.use_peft and self.sampling_backend == "vllm" and self.vllm_dtype != "float32":
            config = {"r": self.lora_r, "use_dora": self.use_dora, "modules_to_save": self.lora_modules_to_save}
            refuse_adapter_of_vllm(config)

    def check_sampling(self) -> None:
        """Raise a ValueError if training would use another model or prompt than sampling, which lacks some settings."""
        if self.chat_template_path or self.eos_token or set(self.model_init_kwargs or {}) - {"device_map"}:
            raise ValueError(
                "chat_template_path, eos_token and model_init_kwargs would apply to training and not to sampling. Save "
                "the model and its tokenizer with these settings, set --model_name_or_path to their folder, and remove "
                "the settings."
            )


@dataclass
class IterateArguments(RewardTestArguments, ProblemArguments, InputArguments, RunArguments):
    """Settings of `topr iterate`: the settings of its stages and of the loop."""

    output_dir: str | None = field(default="topr-run", metadata={"help": "Folder to write."})
    iterations: int = field(default=1, metadata={"help": "Number of iterations. Each one samples, then trains."})
    overlap: int = field(
        default=0,
        metadata={
            "help": "Sample and train at the same time. The rows of an iteration then come from a model that is this "
            "many iterations older. Default: 0, sample and train in turns."
        },
    )
    rows: str | None = field(
        default=None,
        metadata={
            "help": "Folder or file of rows, or a file that topr import reads. The first iteration trains on these "
            "rows and does not sample."
        },
    )

    def __post_init__(self) -> None:
        RewardTestArguments.__post_init__(self)
        self.task = self.implied_task(self.task, self.dataset_name)
        ProblemArguments.__post_init__(self)
        if self.tests:
            self.check_test_split()
        RunArguments.__post_init__(self)
        check_at_least(1, self, "iterations")
        check_at_least(0, self, "overlap")
        if self.rows is not None and not self.rows.startswith(HUB):  # Data on the Hub is not downloaded yet.
            existing(self.rows, "--rows")

    @property
    def folder(self) -> Path:
        """Return the folder to write."""
        return Path(self.output_dir or "topr-run")

    @property
    def tests(self) -> bool:
        """Return whether the loop tests models.

        The loop tests no model if `num_test_problems` is 0, or if own prompts are in a file and `test_dataset_name` is
        not set.
        """
        return self.num_test_problems != 0 and not (self.task_of_problems is OWN_PROMPTS and self.has_no_test_split)


@dataclass
class TrialArguments(RowsArguments, RunArguments):
    """Settings of `topr trial`: the settings of its stages, and the size of the trial."""

    output_dir: str | None = field(default="topr-trial", metadata={"help": "Folder to write."})
    task: str | None = field(
        default=None,
        metadata={
            "help": f"Task of the rows. Rows written by topr sample have their own task. Default: {DEFAULT_TASK}.",
            "choices": tuple(TASKS),
        },
    )
    trial_rows: int = field(
        default=2_560,
        metadata={"help": "Number of rows for each training run, rounded up to whole problems."},
    )
    held_out_problems: int = field(
        default=400, metadata={"help": "Number of problems to test on. At most a third of all problems is held out."}
    )
    test_by: str = field(
        default="auto",
        metadata={
            "help": "How to test on the held-out problems. 'answers': sample completions and judge them. 'rewards': "
            "estimate the mean reward from the logged rows, without sampling. 'auto': answers if the judge agrees with "
            "the logged rewards, else rewards.",
            "choices": TESTS,
        },
    )
    num_generations_eval: int = field(default=8, metadata={"help": "Number of completions per held-out problem."})
    decode: str = field(
        default="greedy",
        metadata={
            "help": "Decoding that ranks the settings. Choose the one that your users get. 'greedy': one greedy answer "
            "per held-out problem. 'sample': completions sampled at the setting `temperature`. No effect with "
            "test_by='rewards'.",
            "choices": DECODINGS,
        },
    )

    def __post_init__(self) -> None:
        RunArguments.__post_init__(self)
        check_choice(self, task=(None, *TASKS), test_by=TESTS, decode=DECODINGS)
        if self.test_by != "rewards" and self.decode == "greedy" and not self.greedy:
            raise ValueError(
                "decode='greedy' ranks settings by greedy answers, and greedy=False draws none. Set decode='sample', "
                "or remove greedy=False."
            )
        check_at_least(1, self, "trial_rows", "num_generations_eval")
        check_at_least(2, self, "held_out_problems")


def field_names(*kinds: type, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of all fields of dataclasses, in order and without repeats.

    Args:
        kinds (`type`): Dataclasses of settings. Fields with `init=False` are left out.
        without (`Collection[str]`, *optional*): Names to leave out.
    """
    return tuple(dict.fromkeys(f.name for kind in kinds for f in fields(kind) if f.init and f.name not in without))


ADAPTER_SETTINGS = tuple(
    name for name in field_names(ModelConfig) if name.startswith(("use_peft", "lora_", "use_rs", "use_do"))
)
# A command finds its own checkpoints, and has no rows to evaluate during training.
NOT_FOR_COMMANDS = (
    "resume_from_checkpoint", "do_train", "do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
)  # fmt: skip
LOOP_SETTINGS = field_names(IterateArguments, without=NOT_FOR_COMMANDS)
TRIAL_SETTINGS = field_names(
    TrialArguments,
    # Each arm of a trial (see `topr_trl.pipeline.arms.ARMS`) has its own values for the last settings. A trial samples
    # only for its test, with `num_generations_eval`.
    without=(*field_names(CurationArguments), *NOT_FOR_COMMANDS, "num_generations", "preset", "a_pos", "b_pos",
             "a_neg", "b_neg"),
)  # fmt: skip

Kind = TypeVar("Kind")


def stage_args(kind: type[Kind], settings: object, **changes: object) -> Kind:
    """Copy the settings that a stage shares with a command, and change some of them.

    Args:
        kind (`type`): Dataclass of the stage's settings.
        settings (`object`): Settings of the command.
        changes (`object`): Values that replace those of the command, by name.
    """
    names = {f.name for f in fields(kind) if f.init and hasattr(settings, f.name)}  # type: ignore[arg-type]
    return kind(**{name: deepcopy(getattr(settings, name)) for name in names} | changes)


def seed_of(stage: str, seed: int, iteration: int, split: str = "train", shard: int = 0) -> int:
    """Return a seed below 2^31 that differs between stages, iterations, splits and shards.

    Args:
        stage (`str`): `"sample"`, `"curate"` or `"train"`.
        seed (`int`): Seed in the settings.
        iteration (`int`): Iteration of the loop.
        split (`str`, defaults to `"train"`): `"train"` or `"test"`.
        shard (`int`, defaults to `0`): Number of the shard.
    """
    stage_number = 2 * ("sample", "curate", "train").index(stage) + (split == "test")
    entropy = [seed, iteration, stage_number, shard + 1]  # SeedSequence ignores zeros at the end.
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
