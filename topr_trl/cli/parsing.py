"""The settings of `topr COMMAND`, from its arguments and a YAML file; its help."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, make_dataclass
from dataclasses import field as new_field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

import torch
import yaml
from trl import TrlParser

from topr_trl.cli.main import commands
from topr_trl.cli.memory_plan import PlanArguments
from topr_trl.cli.run_report import PlotArguments
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.hub import PushArguments
from topr_trl.pipeline import stages
from topr_trl.pipeline.arguments import (
    LOOP_SETTINGS,
    TRIAL_SETTINGS,
    IterateArguments,
    LaunchArguments,
    ProblemArguments,
    TrialArguments,
    field_names,
)
from topr_trl.pipeline.manifest import Json
from topr_trl.settings.checks import check_type
from topr_trl.settings.config import CurationArguments, LossArguments
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS

_OTHERS: dict[str, type] = {
    "iterate": IterateArguments, "trial": TrialArguments, "plan": PlanArguments, "plot": PlotArguments,
    "push": PushArguments,
}  # fmt: skip
_SOME = {"iterate": LOOP_SETTINGS, "trial": TRIAL_SETTINGS}  # commands that do not take all of their dataclass
_ALSO = {"debug": NoneType, "fsdp": bool}  # what transformers takes beside the types that it declares
_NOT_NEEDED = {
    "resume_from_checkpoint": "A command that was stopped continues from its last checkpoint when it is run again.",
}


def split_config(arguments: Sequence[str]) -> list[str]:
    """Arguments with `--config=FILE` as two of them: TRL knows `--config FILE` alone."""
    parts = [part.split("=", 1) if part.startswith("--config=") else [part] for part in arguments]
    return [word for words in parts for word in words]


def settings_of(command: str) -> tuple[str, ...]:
    """The names of the settings that a command takes."""
    if command in _OTHERS:
        return _SOME.get(command) or field_names(_OTHERS[command])
    found: tuple[str, ...] = stages.load(command).setting_names()
    return found


def kind_of(command: str) -> type:
    """Return the dataclass of a command's settings."""
    return _OTHERS[command] if command in _OTHERS else stages.load(command).settings


def parse(command: str, given: list[str]) -> Any:
    """The settings of a command, from its arguments and the YAML that they name.

    A ValueError names a setting that the command does not take, or that has a value of another type.
    """
    kind, names = kind_of(command), settings_of(command)
    config = read_config(given)
    said = {part[2:].partition("=")[0].replace("-", "_") for part in given if part.startswith("--")} - {"config"}
    flags = {*_aliases(command), *(f"no_{name}" for name in names)}  # a YAML has no such
    refuse_unknown(command, said - flags, "")
    in_yaml = set(config) - {"env"}
    if command not in ("plot", "push"):  # the YAML of a loop serves its stages, and can be planned
        in_yaml -= set(settings_of("iterate"))
    refuse_unknown(command, in_yaml, f" (in {given[given.index('--config') + 1]})" if config else "")
    for name, hint in get_type_hints(kind).items():
        value = config.get(name)
        # Text is read as on the command line, and a number as a baseline stands for its text.
        is_text = isinstance(value, str) or (hint is str and type(value) in (int, float))
        if name in names and name in config and not is_text:
            check_type(name, value, hint | _ALSO[name] if name in _ALSO else hint)
    parser = _parser(command, names)
    parser.set_defaults(**_settings_of_the_bundled_model(command, said, config))
    parsed, _, more = parser.parse_args_and_config(
        given, return_remaining_strings=True, separate_remaining_strings=True
    )
    if more:
        raise ValueError(f"Unexpected argument {more[0]!r}. topr {command} --help lists its settings.")
    return kind(**{name: getattr(parsed, name) for name in names})


def read_config(given: Sequence[str]) -> Json:
    """Return the settings in the YAML after `--config`; empty without one."""
    if "--config" not in given:
        return {}
    if given[-1] == "--config":
        raise ValueError("--config needs the name of a YAML file.")
    file = Path(given[given.index("--config") + 1])
    with file.open(encoding="utf-8") as stream:  # not the text: errors of YAML name the file
        config = yaml.safe_load(stream)
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold settings, one per line, as in `learning_rate: 1.0e-6`.")
    return config


def refuse_unknown(command: str, said: set[str], where: str) -> None:
    """Raise a ValueError naming the first setting that a command does not take, and what may have been meant.

    `where` says for its message where the settings were given.
    """
    names = settings_of(command)
    unknown = sorted(said - set(names))
    if not unknown:
        return
    name, others = unknown[0], [other for other in commands() if unknown[0] in settings_of(other)]
    if name in _NOT_NEEDED:
        hint = _NOT_NEEDED[name]
    elif others:
        hint = f"It is a setting of topr {', '.join(others)}."
    elif similar := get_close_matches(name, names, 1) or get_close_matches(name, sorted(_all_names()), 1):
        hint = f"Did you mean --{similar[0]}?"
    else:
        hint = f"topr {command} --help lists its settings."
    raise ValueError(f"There is no setting --{name}{where}. {hint}")


def _all_names() -> set[str]:
    return {name for command in commands() for name in settings_of(command)}


def _aliases(command: str) -> list[str]:
    given = [field.metadata.get("aliases", []) for field in fields(kind_of(command))]
    return [alias[2:] for names in given for alias in ([names] if isinstance(names, str) else names)]


def _only(kind: type, names: Sequence[str]) -> type:
    """A dataclass with some of the fields of another, which checks nothing: values are checked when all are known."""
    hints, own = get_type_hints(kind), {field.name: field for field in fields(kind)}

    def copied(name: str) -> Any:
        given = {"default": own[name].default, "default_factory": own[name].default_factory}
        known: Json = {what: value for what, value in given.items() if value is not MISSING}
        return new_field(metadata=dict(own[name].metadata), kw_only=True, **known)

    return make_dataclass(kind.__name__, [(name, hints[name], copied(name)) for name in names])


def _parser(command: str, names: Sequence[str], **more: Any) -> TrlParser:
    # A usage of our own: else an error would list all settings first.
    parser = TrlParser(_only(kind_of(command), names), prog=f"topr {command}", allow_abbrev=False,
                       usage=f"topr {command} [--config FILE] [settings]", **more)  # fmt: skip
    if "use_cpu" in names:
        parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    return parser


def _settings_of_the_bundled_model(command: str, said: set[str], config: Json) -> Json:
    """Defaults that it needs, if no model is named: it is small, and learns with large steps."""
    names = settings_of(command)
    named = "model_name_or_path" in said or config.get("model_name_or_path")
    if named or "model_name_or_path" not in names or command == "plan":
        return {}
    own = {name: value for name, value in CARELESS_SETTINGS.items() if name in names}
    # Rows that are trained on by hand are chosen by who brings them, and a rule that is given has its own size.
    if command != "iterate" or "curation" in said | set(config):
        own = {name: value for name, value in own.items() if name not in ("curation", "iteration_size")}
    if not (command == "evaluate" and "input" in said | set(config)):
        shown = [f"{name}={value}" for name, value in own.items() if name not in said | set(config)]
        print(
            "There is no --model_name_or_path: this is the bundled model, of 0.3 million parameters. Its own "
            f"defaults: {', '.join(shown)}.",
            flush=True,
        )
    return own


# Help.


_STEPS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "padding_free",
          "sort_by_length", "share_prompts", "gradient_checkpointing", "bf16", "max_length", "dataset_num_proc",
          "use_cpu")  # fmt: skip
_TRAINING = (
    "model_name_or_path", "model_revision", "dtype", "attn_implementation", "use_peft", "lora_r", *_STEPS,
    *(field.name for kind in (LossArguments, CurationArguments) for field in fields(kind)), "learning_rate",
    "lr_scheduler_type", "optim", "num_train_epochs", "max_grad_norm", "logging_steps", "save_steps",
    "save_total_limit", "report_to", "log_completions", "num_completions_to_print", "seed",
)  # fmt: skip
# Of commands that take all settings of a trainer, those that its help shows.
_SHOWN = {
    "train": ("input", "output_dir", "iteration", *_TRAINING),
    "trial": (
        "input", "output_dir", "task", "trial_rows", "held_out_problems", "test_by", "num_generations_eval",
        *(field.name for kind in (LaunchArguments, SamplingArguments) for field in fields(kind)),
        *(name for name in _TRAINING if name in TRIAL_SETTINGS),
    ),
    "iterate": (
        "output_dir", "iterations", "overlap", "rows", "num_generations_eval",
        *(field.name for kind in (LaunchArguments, ProblemArguments, SamplingArguments) for field in fields(kind)),
        *_TRAINING,
    ),
}  # fmt: skip


def print_help(command: str, description: str, everything: bool) -> None:
    """The settings that matter to a command, or all that it takes."""
    names = settings_of(command)
    shown = names if everything else [name for name in _SHOWN.get(command, names) if name in names]
    parser = _parser(command, shown, description=description)
    if command in _SHOWN and not everything:
        parser.epilog = "TRL's other settings of a trainer are taken too: --help_all lists them."
    parser.print_help()
