"""The command `topr`: the stages of an iteration, and the loop over them."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches

import yaml

from topr_trl import __version__
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
    from topr_trl.cli.commands import run  # torch and TRL, which take seconds: help and typing errors do without

    run(arguments[0], arguments[1:], known[arguments[0]])
