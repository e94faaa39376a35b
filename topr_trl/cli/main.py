"""The command `topr`: the stages of an iteration, and the loop over them."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from difflib import get_close_matches

import yaml

from topr_trl import __version__
from topr_trl.cli.settings_index import read_index
from topr_trl.pipeline import stages

_OTHERS = {
    "iterate": "Run sample, score, curate, log-mu, train and evaluate in a loop that survives being killed.",
    "trial": "Try settings on a part of the rows, test on held-out problems, and recommend one.",
    "plan": "Estimate GPU memory and the time of a step before you start.",
    "plot": "Draw a run, finished or not, as one HTML page: evaluations, curves, rows by weight.",
    "push": "Upload a model or rows to the Hugging Face Hub, with a card.",
}
_ORDER = ("iterate", "trial", "import", "sample", "score", "curate", "log-mu", "train", "evaluate")


def commands() -> dict[str, str]:
    """Return the help of each command, in the order in which they are listed."""
    found = {**stages.descriptions(), **_OTHERS}
    return {name: found[name] for name in dict.fromkeys((*_ORDER, *found))}


def console() -> None:
    """Entry point: user errors print as one line, with `--debug` as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show μ
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"  # without a line of this package
    warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)  # TRL's default
    try:
        main(arguments)
    except (ValueError, OSError, ImportError, FloatingPointError, yaml.YAMLError) as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        message = " ".join(str(error).split())
        sys.exit(f"topr {arguments[0]}: {message} (--debug shows where)")
    except KeyboardInterrupt:
        print(f"\ntopr {arguments[0]}: stopped. The same command continues from what is finished.", file=sys.stderr)
        sys.exit(130)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # All is written. Taking gloo down while another process still works aborts or hangs now and then (torch 2.13),
        # and the launcher would end the others for that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


HELP = {"-h", "--help", "--help_all"}
_NOT_NEEDED = {
    "resume_from_checkpoint": "A command that was stopped continues from its last checkpoint when it is run again.",
}


def split_config(arguments: Sequence[str]) -> list[str]:
    """Split `--config=FILE` in two, because TRL reads `--config FILE` only."""
    parts = [part.split("=", 1) if part.startswith("--config=") else [part] for part in arguments]
    return [word for words in parts for word in words]


def settings_given(arguments: Sequence[str]) -> set[str]:
    """Return the names of the settings on a command line, without `--config`."""
    words = {part[2:].partition("=")[0] for part in arguments if part.startswith("--")}
    return {word.replace("-", "_") for word in words} - {"config"}


def unknown_setting(command: str, name: str, where: str, names: Collection[str], others: Sequence[str]) -> str:
    """Return the message for a setting that a command does not take.

    Args:
        command (`str`): Name of the command.
        name (`str`): Name of the setting.
        where (`str`): Where it was given; empty for the command line.
        names (`Collection[str]`): Settings of the command.
        others (`Sequence[str]`): Commands that take the setting.
    """
    if name in _NOT_NEEDED:
        hint = _NOT_NEEDED[name]
    elif others:
        hint = f"It is a setting of topr {', '.join(others)}."
    elif similar := get_close_matches(name, names, 1):
        hint = f"Did you mean --{similar[0]}?"
    else:
        hint = f"topr {command} --help lists its settings."
    return f"There is no setting --{name}{where}. {hint}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; user errors are a ValueError, an OSError, an ImportError or a FloatingPointError."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    known = commands()
    if not arguments or arguments[0] not in known:
        if arguments and (similar := get_close_matches(arguments[0], known, 1)):
            raise ValueError(f"There is no command {arguments[0]!r}. Did you mean topr {similar[0]}?")
        parser = argparse.ArgumentParser(
            prog="topr",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description="TOPR (arXiv 2503.14286).\n\n"
            + "\n".join(f"  {name:<10} {text}" for name, text in known.items()),
            epilog="topr COMMAND --help lists the settings of a command; --config FILE reads them from YAML.",
        )
        parser.add_argument("--version", action="version", version=f"topr_trl {__version__}")
        parser.add_argument("command", choices=known, metavar="COMMAND")
        parser.parse_args(arguments[:1])
    command, given = arguments[0], split_config(arguments[1:])
    if (index := read_index()) and command in index["settings"]:
        if HELP & set(given):
            print(index["help"][command]["--help_all" in given], end="")
            return
        names = index["settings"][command]
        for name in sorted(settings_given(given) - {*names, *index["flags"][command]}):
            others = [other for other in known if name in index["settings"].get(other, ())]
            raise ValueError(unknown_setting(command, name, "", names, others))
    from topr_trl.cli.commands import run  # imports torch and TRL, which takes seconds

    run(command, given, known[command])
