"""List the commands, and write the error message for an unknown setting.

Help should be fast, so this module imports neither torch nor TRL.
"""

from collections.abc import Collection, Sequence
from difflib import get_close_matches

from topr_trl.pipeline import stages

_WITHOUT_STAGE = {
    "iterate": "Run sample, score, curate, log-mu, train and evaluate in a loop that can be killed and continued.",
    "trial": "Train with several settings on some of the rows, test on held-out problems, and recommend a setting.",
    "plan": "Estimate GPU memory and the times of sampling and training before you start.",
    "plot": "Plot a finished or running run on one HTML page with evaluations, curves and rows.",
    "record": "Pass calls on to a model server, and record them with rewards for training.",
    "push": "Upload a model or rows to the Hugging Face Hub, with a card.",
}
_ORDER = ("iterate", "trial", "import", "sample", "score", "curate", "log-mu", "train", "evaluate")
_SRUN = "Let srun choose the machines in sampling_launcher and training_launcher, as in examples/slurm."
_HINTS = {
    "sampling_hosts": _SRUN,
    "training_hosts": _SRUN,
    "retries": "Run a stopped command again, and it continues. On Slurm, #SBATCH --requeue does this.",
    "resume_from_checkpoint": "Run a stopped command again, and it continues from its last checkpoint.",
}


def commands() -> dict[str, str]:
    """Return a one-line description of each command, by name. The order is the order of `topr --help`."""
    found = {**stages.descriptions(), **_WITHOUT_STAGE}
    return {name: found[name] for name in dict.fromkeys((*_ORDER, *found))}


def settings_given(arguments: Sequence[str]) -> set[str]:
    """Return the names of the options on a command line, except `--config`.

    `--num-shots=8` gives `num_shots`. `--no_NAME`, which switches a setting off, gives `no_NAME`. Aliases are not
    replaced by the names of their settings.
    """
    words = {part[2:].partition("=")[0] for part in arguments if part.startswith("--")}
    return {word.replace("-", "_") for word in words} - {"config"}


def unknown_setting(command: str, name: str, where: str, names: Collection[str], others: Sequence[str]) -> str:
    """Return the error message for a setting that a command does not take, with a hint.

    Args:
        command (`str`): Name of the command.
        name (`str`): Name of the setting.
        where (`str`): Text after the name of the setting, such as `" (in FILE)"`, or `""` for the command line.
        names (`Collection[str]`): Names of the command's settings.
        others (`Sequence[str]`): Names of the commands that take the setting.
    """
    if name in _HINTS:
        hint = _HINTS[name]
    elif others:
        hint = f"It is a setting of topr {', '.join(others)}."
    elif similar := get_close_matches(name, names, 1):
        hint = f"Did you mean --{similar[0]}?"
    else:
        hint = f"topr {command} --help lists its settings."
    return f"This command has no setting --{name}{where}. {hint}"
