"""Read the settings of `topr COMMAND` from its arguments and a YAML file."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, make_dataclass
from dataclasses import field as new_field
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

import torch
import yaml
from trl import TrlParser

from topr_trl.cli.main import commands, settings_given, unknown_setting
from topr_trl.cli.memory_plan import PlanArguments
from topr_trl.cli.run_report import PlotArguments
from topr_trl.hub import PushArguments
from topr_trl.pipeline import stages
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import (
    LOOP_SETTINGS,
    TRIAL_SETTINGS,
    IterateArguments,
    TrialArguments,
    field_names,
)
from topr_trl.settings.checks import check_type
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS

_OTHERS: dict[str, type] = {
    "iterate": IterateArguments, "trial": TrialArguments, "plan": PlanArguments, "plot": PlotArguments,
    "push": PushArguments,
}  # fmt: skip
_SOME = {"iterate": LOOP_SETTINGS, "trial": TRIAL_SETTINGS}  # commands that do not take all of their dataclass
_ALSO = {"debug": NoneType, "fsdp": bool}  # what transformers takes beside the types that it declares


def settings_of(command: str) -> tuple[str, ...]:
    """Return the names of the settings that a command takes."""
    if command in _OTHERS:
        return _SOME.get(command) or field_names(_OTHERS[command])
    found: tuple[str, ...] = stages.load(command).setting_names()
    return found


def kind_of(command: str) -> type:
    """Return the dataclass of a command's settings."""
    return _OTHERS[command] if command in _OTHERS else stages.load(command).settings


def parse(command: str, given: list[str]) -> Any:
    """Return the settings of a command, from its arguments and the YAML file that they name.

    Args:
        command (`str`): Name of the command.
        given (`list[str]`): The arguments that follow it.

    Raises:
        ValueError: the command does not take a setting, or a value has another type than its setting.
    """
    kind, names = kind_of(command), settings_of(command)
    config = read_config(given)
    said = settings_given(given)
    flags = flags_of(command)
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
    parser = parser_of(command, names)
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
    """Check that a command takes all of these settings.

    Args:
        command (`str`): Name of the command.
        said (`set[str]`): Names of settings.
        where (`str`): Where they were given, for the message.

    Raises:
        ValueError: the command does not take one of them. The message suggests a similar one, or a command.
    """
    unknown = sorted(said - set(settings_of(command)))
    if unknown:
        others = [other for other in commands() if unknown[0] in settings_of(other)]
        raise ValueError(unknown_setting(command, unknown[0], where, settings_of(command), others))


def flags_of(command: str) -> set[str]:
    """Return options that a command takes beside its settings: aliases, and `no_...` for settings that are true."""
    given = [field.metadata.get("aliases", []) for field in fields(kind_of(command))]
    aliases = [alias[2:] for names in given for alias in ([names] if isinstance(names, str) else names)]
    return {*aliases, *(f"no_{name}" for name in settings_of(command))}


def select_fields(kind: type, names: Sequence[str]) -> type:
    """Copy selected fields of a dataclass, without validation."""
    hints, own = get_type_hints(kind), {field.name: field for field in fields(kind)}

    def copied(name: str) -> Any:
        given = {"default": own[name].default, "default_factory": own[name].default_factory}
        known: Json = {what: value for what, value in given.items() if value is not MISSING}
        return new_field(metadata=dict(own[name].metadata), kw_only=True, **known)

    return make_dataclass(kind.__name__, [(name, hints[name], copied(name)) for name in names])


def parser_of(command: str, names: Sequence[str], **more: Any) -> TrlParser:
    # With argparse's own usage, an error would list all settings first.
    parser = TrlParser(select_fields(kind_of(command), names), prog=f"topr {command}", allow_abbrev=False,
                       usage=f"topr {command} [--config FILE] [settings]", **more)  # fmt: skip
    if "use_cpu" in names:
        parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    return parser


def _settings_of_the_bundled_model(command: str, said: set[str], config: Json) -> Json:
    """Return the defaults for the bundled model, used when no model is given."""
    names = settings_of(command)
    named = "model_name_or_path" in said or config.get("model_name_or_path")
    if named or "model_name_or_path" not in names or command == "plan":
        return {}
    own = {name: value for name, value in CARELESS_SETTINGS.items() if name in names}
    # `topr train` uses all rows that it is given, and a curation rule that the user sets has a size of its own.
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
