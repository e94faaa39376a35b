"""Read the settings of `topr COMMAND` from its arguments and a YAML file."""

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import Field, fields, make_dataclass
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_type_hints

import torch
from trl import TrlParser

from topr_trl.cli.command_names import COMMANDS, read_config, values_given
from topr_trl.cli.memory_plan import PLAN_SETTINGS
from topr_trl.pipeline import stages
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import LOOP_SETTINGS, TRIAL_SETTINGS, LaunchArguments, field_names
from topr_trl.settings.checks import check_type
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS

# Commands that take only some fields of their dataclass.
_SUBSETS = {"iterate": LOOP_SETTINGS, "trial": TRIAL_SETTINGS, "plan": PLAN_SETTINGS}
_UNDECLARED_TYPES = {"debug": NoneType, "fsdp": bool}  # types that transformers accepts but does not declare


def settings_of(command: str) -> tuple[str, ...]:
    """Return the names of the settings that a command takes."""
    if _has_own_settings(command):
        return _SUBSETS.get(command) or field_names(settings_class(command))
    return stages.load(command).setting_names()


def settings_class(command: str) -> type:
    """Return the dataclass of a command's settings."""
    if _has_own_settings(command):
        return resolve_name(COMMANDS[command].settings)
    return stages.load(command).settings


def _has_own_settings(command: str) -> bool:
    return command in COMMANDS and bool(COMMANDS[command].settings)


def parse(command: str, given: list[str]) -> Any:
    """Parse the settings of a command from its arguments and from the YAML file after `--config`.

    Args:
        command (`str`): Name of the command.
        given (`list[str]`): Arguments after the name.

    Returns:
        An instance of `settings_class(command)`.

    Raises:
        ValueError: the command does not accept the value of a setting. `command_names.refuse_unknown` has already
            refused settings that the command does not have.
        OSError: the YAML file does not exist, or is a folder.
        yaml.YAMLError: the file is not valid YAML.
        SystemExit: a value on the command line, or text in the YAML file, cannot be converted to the setting's type.
    """
    kind, names = settings_class(command), settings_of(command)
    config = read_config(given)
    for name, hint in get_type_hints(kind).items():
        value = config.get(name)
        # The parser below checks text, and numbers of the YAML file for settings of type str (`baseline: 0.5`). This
        # loop checks all other values of the YAML file.
        is_text = isinstance(value, str) or (hint is str and type(value) in (int, float))
        if name in names and name in config and not is_text:
            check_type(name, value, hint | _UNDECLARED_TYPES[name] if name in _UNDECLARED_TYPES else hint)
    # With argparse's own usage, an error message would first list all settings.
    parser = TrlParser(select_fields(kind, names), prog=f"topr {command}", allow_abbrev=False,
                       usage=f"topr {command} [--config FILE] [settings]")  # fmt: skip
    if "use_cpu" in names:
        parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    values = {**config, **values_given(given)}
    parser.set_defaults(**_settings_of_the_bundled_model(command, values))
    parsed, _, more = parser.parse_args_and_config(
        given, return_remaining_strings=True, separate_remaining_strings=True
    )
    if sum(word == "--input" or word.startswith("--input=") for word in given) > 1:
        raise ValueError("--input is given twice. To read several files, set it to a folder that has only these files.")
    if more:
        is_input = "input" in names and "input" not in values and os.path.exists(more[0])
        remedy = f"Write --input {more[0]}." if is_input else f"topr {command} --help lists its settings."
        raise ValueError(f"Unexpected argument {more[0]!r}. {remedy}")
    settings = kind(**{name: getattr(parsed, name) for name in names})
    if isinstance(settings, LaunchArguments):
        settings.is_cpu_given = "use_cpu" in values
    return settings


def flags_of(command: str) -> set[str]:
    """Return the options that are not names of settings: aliases, and `no_NAME` for each setting NAME."""
    given = [field.metadata.get("aliases", []) for field in fields(settings_class(command))]
    aliases = [alias[2:] for names in given for alias in ([names] if isinstance(names, str) else names)]
    return {*aliases, *(f"no_{name}" for name in settings_of(command))}


def choices_of(command: str) -> dict[str, list[str]]:
    """Return the values that settings of a command can have, by the name of the setting."""
    own = [field for field in fields(settings_class(command)) if field.name in settings_of(command)]
    return {field.name: list(field.metadata["choices"]) for field in own if "choices" in field.metadata}


def select_fields(kind: type, names: Sequence[str]) -> type:
    """Copy selected fields of a dataclass, without validation.

    Args:
        kind (`type`): The dataclass.
        names (`Sequence[str]`): Names of the fields to copy.

    Returns:
        `type`: a dataclass with these fields. All its fields are keyword-only.
    """
    hints, own = get_type_hints(kind), {field.name: field for field in fields(kind)}

    def copied(name: str) -> "Field[Any]":
        field = copy(own[name])
        field.kw_only = True
        return field

    return make_dataclass(kind.__name__, [(name, hints[name], copied(name)) for name in names])


def _settings_of_the_bundled_model(command: str, given: Json) -> Json:
    """Return the defaults for the bundled model, and print them.

    Return {} if a model is given, or if the command takes no model or has its own default model (`plan`). Print nothing
    if `topr evaluate` reads given rows, because it then needs no model.
    """
    names = settings_of(command)
    if given.get("model_name_or_path") or "model_name_or_path" not in names or command == "plan":
        return {}
    own = {name: value for name, value in CARELESS_SETTINGS.items() if name in names}
    # The bundled curation defaults are only for `topr iterate`, because `topr train` uses all rows of its input.
    # They also do not apply if the user sets a curation rule, because each rule has its own iteration size.
    if command != "iterate" or "curation" in given:
        own = {name: value for name, value in own.items() if name not in ("curation", "iteration_size")}
    if not (command == "evaluate" and "input" in given):
        shown = [f"{name}={value}" for name, value in own.items() if name not in given]
        defaults = f" and its defaults: {', '.join(shown)}" if shown else ""
        print(
            "--model_name_or_path is not set, so the command uses the bundled model (0.3 million parameters)"
            f"{defaults}.",
            flush=True,
        )
    return own
