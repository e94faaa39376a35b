"""Read the settings of `topr COMMAND` from its arguments and a YAML file."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, make_dataclass
from dataclasses import field as new_field
from types import NoneType
from typing import Any, get_type_hints

import torch
import yaml
from trl import TrlParser

from topr_trl.cli.command_names import commands, settings_given, unknown_setting
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
from topr_trl.recording.settings import RecordArguments
from topr_trl.settings.checks import check_type, existing
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS

_WITHOUT_STAGE: dict[str, type] = {
    "iterate": IterateArguments, "trial": TrialArguments, "plan": PlanArguments, "plot": PlotArguments,
    "push": PushArguments, "record": RecordArguments,
}  # fmt: skip
_SUBSETS = {"iterate": LOOP_SETTINGS, "trial": TRIAL_SETTINGS}  # commands that take only some fields of their dataclass
_UNDECLARED_TYPES = {"debug": NoneType, "fsdp": bool}  # types that transformers accepts but does not declare


def settings_of(command: str) -> tuple[str, ...]:
    """Return the names of the settings that a command takes."""
    if command in _WITHOUT_STAGE:
        return _SUBSETS.get(command) or field_names(_WITHOUT_STAGE[command])
    found: tuple[str, ...] = stages.load(command).setting_names()
    return found


def settings_class(command: str) -> type:
    """Return the dataclass of a command's settings."""
    return _WITHOUT_STAGE[command] if command in _WITHOUT_STAGE else stages.load(command).settings


def parse(command: str, given: list[str]) -> Any:
    """Parse the settings of a command from its arguments and from the YAML file after `--config`.

    Args:
        command (`str`): Name of the command.
        given (`list[str]`): Arguments after the name.

    Returns:
        An instance of `settings_class(command)`.

    Raises:
        ValueError: the command does not take a setting, or does not accept its value.
        OSError: the YAML file does not exist, or is a folder.
        SystemExit: a value on the command line, or text in the YAML file, cannot be converted to the setting's type.
    """
    kind, names = settings_class(command), settings_of(command)
    config = read_config(given)
    in_arguments = settings_given(given)
    flags = flags_of(command)
    refuse_unknown(command, in_arguments - flags, "")
    in_yaml = set(config) - {"env"}  # TrlParser sets environment variables from `env`
    if command not in ("plot", "push", "record"):  # Other commands can read the YAML file of `topr iterate`.
        in_yaml -= set(settings_of("iterate"))
    refuse_unknown(command, in_yaml, f" (in {given[given.index('--config') + 1]})" if config else "")
    for name, hint in get_type_hints(kind).items():
        value = config.get(name)
        # The parser checks text, as on the command line. YAML can have a number for a str setting such as baseline.
        is_text = isinstance(value, str) or (hint is str and type(value) in (int, float))
        if name in names and name in config and not is_text:
            check_type(name, value, hint | _UNDECLARED_TYPES[name] if name in _UNDECLARED_TYPES else hint)
    parser = make_parser(command, names)
    parser.set_defaults(**_settings_of_the_bundled_model(command, in_arguments, config))
    parsed, _, more = parser.parse_args_and_config(
        given, return_remaining_strings=True, separate_remaining_strings=True
    )
    if more:
        raise ValueError(f"Unexpected argument {more[0]!r}. topr {command} --help lists its settings.")
    return kind(**{name: getattr(parsed, name) for name in names})


def read_config(given: Sequence[str]) -> Json:
    """Return the settings in the YAML file after `--config`. Return {} without `--config`.

    Args:
        given (`Sequence[str]`): Arguments of the command.

    Raises:
        ValueError: no file follows `--config`, or the file does not hold settings.
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
    """
    if "--config" not in given:
        return {}
    if given[-1] == "--config":
        raise ValueError("--config needs the name of a YAML file.")
    file = existing(given[given.index("--config") + 1], "--config")
    if file.is_dir():
        raise IsADirectoryError(f"--config {file} is a folder, and must be a YAML file.")
    with file.open(encoding="utf-8") as stream:  # With a stream, a YAML error names the file.
        config = yaml.safe_load(stream)
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold settings, one per line, as in `learning_rate: 1.0e-6`.")
    return config


def refuse_unknown(command: str, names: set[str], where: str) -> None:
    """Check that a command takes all given settings.

    Args:
        command (`str`): Name of the command.
        names (`set[str]`): Names of settings.
        where (`str`): Text after the name of the setting in the message, such as `" (in FILE)"`, or `""` for the
            command line.

    Raises:
        ValueError: the command does not take one of the settings. The message suggests a similar setting, or another
            command.
    """
    unknown = sorted(names - set(settings_of(command)))
    if unknown:
        others = [other for other in commands() if unknown[0] in settings_of(other)]
        raise ValueError(unknown_setting(command, unknown[0], where, settings_of(command), others))


def flags_of(command: str) -> set[str]:
    """Return the options that are not names of settings: aliases, and `no_NAME` for each setting NAME."""
    given = [field.metadata.get("aliases", []) for field in fields(settings_class(command))]
    aliases = [alias[2:] for names in given for alias in ([names] if isinstance(names, str) else names)]
    return {*aliases, *(f"no_{name}" for name in settings_of(command))}


def select_fields(kind: type, names: Sequence[str]) -> type:
    """Copy selected fields of a dataclass, without validation.

    Args:
        kind (`type`): The dataclass.
        names (`Sequence[str]`): Names of the fields to copy.

    Returns:
        `type`: a dataclass with these fields. All its fields are keyword-only.
    """
    hints, own = get_type_hints(kind), {field.name: field for field in fields(kind)}

    def copied(name: str) -> Any:
        given = {"default": own[name].default, "default_factory": own[name].default_factory}
        default: Json = {key: value for key, value in given.items() if value is not MISSING}
        return new_field(metadata=dict(own[name].metadata), kw_only=True, **default)

    return make_dataclass(kind.__name__, [(name, hints[name], copied(name)) for name in names])


def make_parser(command: str, names: Sequence[str]) -> TrlParser:
    """Return a parser for some settings of a command.

    Args:
        command (`str`): Name of the command.
        names (`Sequence[str]`): Names of the settings.
    """
    # With argparse's own usage, an error message would first list all settings.
    parser = TrlParser(select_fields(settings_class(command), names), prog=f"topr {command}", allow_abbrev=False,
                       usage=f"topr {command} [--config FILE] [settings]")  # fmt: skip
    if "use_cpu" in names:
        parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    return parser


def _settings_of_the_bundled_model(command: str, in_arguments: set[str], config: Json) -> Json:
    """Return the defaults for the bundled model, and print them.

    Return {} if a model is given, or if the command takes no model or has its own default model (`plan`). Print nothing
    if `topr evaluate` reads given rows, because it then needs no model.
    """
    names = settings_of(command)
    named = "model_name_or_path" in in_arguments or config.get("model_name_or_path")
    if named or "model_name_or_path" not in names or command == "plan":
        return {}
    own = {name: value for name, value in CARELESS_SETTINGS.items() if name in names}
    # The bundled curation defaults are only for `topr iterate`, because `topr train` uses all rows of its input.
    # They also do not apply if the user sets a curation rule, because each rule has its own iteration size.
    if command != "iterate" or "curation" in in_arguments | set(config):
        own = {name: value for name, value in own.items() if name not in ("curation", "iteration_size")}
    if not (command == "evaluate" and "input" in in_arguments | set(config)):
        shown = [f"{name}={value}" for name, value in own.items() if name not in in_arguments | set(config)]
        defaults = f" and its defaults: {', '.join(shown)}" if shown else ""
        print(
            "--model_name_or_path is not set, so the command uses the bundled model (0.3 million parameters)"
            f"{defaults}.",
            flush=True,
        )
    return own
