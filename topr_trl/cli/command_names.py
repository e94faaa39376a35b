"""List the commands, read the names of given settings, and refuse unknown settings.

Help should be fast, so this module imports neither torch nor TRL.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from topr_trl.pipeline import stages


class Command(NamedTuple):
    """Command that is not a stage, or that does more than its stage.

    Attributes:
        function (`str`): Function that runs the command, as `MODULE:NAME`.
        settings (`str`, defaults to `""`): Dataclass of the command's settings, as `MODULE:NAME`. With `""`, the
            command has the settings of the stage with the same name.
        description (`str`, defaults to `""`): One-line help. With `""`, the command has the help of this stage.
    """

    function: str
    settings: str = ""
    description: str = ""


COMMANDS = {
    "iterate": Command(
        "topr_trl.pipeline.loop:iterate", "topr_trl.pipeline.settings:IterateArguments",
        "Run sample, score, curate, log-mu, train and evaluate in a loop that can be killed and continued.",
    ),
    "trial": Command(
        "topr_trl.cli.trial_report:trial_command", "topr_trl.pipeline.settings:TrialArguments",
        "Train with several settings on some of the rows, test on held-out problems, and recommend a setting.",
    ),
    "plan": Command(
        "topr_trl.cli.memory_plan:plan_command", "topr_trl.cli.memory_plan:PlanArguments",
        "Estimate GPU memory and the times of sampling and training before you start.",
    ),
    "look": Command(
        "topr_trl.report.look:look_command", "topr_trl.report.look:LookArguments",
        "Write one page about rows, a run, a trial, an evaluation or a recording: samples, results, curves, advice.",
    ),
    "record": Command(
        "topr_trl.recording.server:record_command", "topr_trl.recording.settings:RecordArguments",
        "Pass calls on to a model server, and record them with rewards for training.",
    ),
    "push": Command(
        "topr_trl.hub:push_command", "topr_trl.hub:PushArguments",
        "Upload a model or rows to the Hugging Face Hub, with a card.",
    ),
    "evaluate": Command("topr_trl.cli.evaluate:evaluate_command"),  # The command may sample and score first.
}  # fmt: skip
LOOPS = ("iterate", "trial")  # commands that run stages in other processes
_ORDER = ("iterate", "trial", "import", "sample", "score", "curate", "log-mu", "train", "evaluate")


def commands() -> dict[str, str]:
    """Return a one-line description of each command, by name. The order is the order of `topr --help`."""
    found = {**stages.descriptions(), **{name: each.description for name, each in COMMANDS.items() if each.settings}}
    return {name: found[name] for name in dict.fromkeys((*_ORDER, *found))}


def read_config(given: Sequence[str]) -> dict[str, Any]:
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
    file = Path(given[given.index("--config") + 1])
    if not file.exists():
        raise FileNotFoundError(f"--config: {file} does not exist.")
    if file.is_dir():
        raise IsADirectoryError(f"--config {file} is a folder, and must be a YAML file.")
    with file.open(encoding="utf-8") as stream:  # With a stream, a YAML error names the file.
        config = yaml.safe_load(stream)
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold settings, one per line, as in `learning_rate: 1.0e-6`.")
    return config


def values_given(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the options on a command line, a text or a list of texts, by name.

    `--num-shots=8` gives `num_shots`. `--no_NAME`, which switches a setting off, gives `no_NAME`. Aliases are not
    replaced by the names of their settings.
    """
    values: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            option, is_whole, value = word[2:].partition("=")
            name = option.replace("-", "_")
            values[name] = [value] if is_whole else []
        elif name:
            values[name].append(word)
    return {name: words[0] if len(words) == 1 else words for name, words in values.items()}


def refuse_unknown(command: str, given: Sequence[str], index: Mapping[str, Any]) -> None:
    """Check that a command takes all settings on the command line and in the YAML file.

    Except for `look`, `push` and `record`, commands accept a YAML file with settings of `topr iterate`. The entry `env`
    of a YAML file is also accepted.

    Args:
        command (`str`): Name of the command.
        given (`Sequence[str]`): Arguments of the command.
        index (`Mapping`): Names of settings and options of all commands, see `settings_index.read_index`.

    Raises:
        ValueError: the command does not take one of the settings. The error suggests a similar setting, or a
            command that takes the setting.
        OSError, yaml.YAMLError: the YAML file cannot be read.
    """
    settings = index["settings"]
    unknown = set(values_given(given)) - {"config", *settings[command], *index["flags"][command]}
    where = ""
    if not unknown:
        unknown = set(read_config(given)) - {*settings[command], "env"}  # TrlParser sets environment variables of `env`
        if command not in ("look", "push", "record"):  # All other commands read iterate's YAML file.
            unknown -= set(settings["iterate"])
        where = f" (in {given[given.index('--config') + 1]})" if unknown else ""
    if unknown:
        name = min(unknown)
        others = [other for other in commands() if name in settings[other]]
        hint = _hint(command, name, settings[command], others)
        raise ValueError(f"This command has no setting --{name}{where}. {hint}")


def _hint(command: str, name: str, names: Collection[str], others: Sequence[str]) -> str:
    """Return a hint about a setting that a command does not take. `others` are the commands that take the setting."""
    if name == "resume_from_checkpoint":
        return "Run a stopped command again, and it continues from its last checkpoint."
    if others:
        return f"It is a setting of topr {', '.join(others)}."
    if name.startswith(("eval_", "do_", "load_best_", "metric_for_", "greater_is_")):
        return "Remove it: commands do not evaluate during training. Use topr evaluate after it."
    if similar := get_close_matches(name, names, 1):
        return f"Did you mean --{similar[0]}?"
    return f"topr {command} --help lists its settings."
