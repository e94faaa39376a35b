"""Run `topr`: print help, or check the names of the given settings and run the command."""

import argparse
import atexit
import io
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches

import yaml

from topr_trl import __version__
from topr_trl.cli.command_names import LOOPS, commands, read_config, refuse_unknown, values_given
from topr_trl.cli.settings_index import read_index, write_index
from topr_trl.pipeline.child_processes import start_server
from topr_trl.pipeline.parent_process import LOOP, is_one_of_several
from topr_trl.user_warnings import printable


def console() -> None:
    """Run the command in `sys.argv`. If the user can correct an error, print its message on one line, and exit.

    With `--debug`, raise the error instead, so that Python prints a traceback. `--debug VALUE` is a setting of
    transformers.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Some terminals cannot show μ.
    arguments = without_debug(sys.argv[1:])
    if sys.platform == "win32" and arguments and arguments[0] in ("record", *LOOPS):
        sys.exit(f"topr {arguments[0]}: it needs Linux or macOS. On Windows, use WSL.")
    # The default format also shows the line of code that warned.
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {printable(str(message))}\n"
    warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)  # TRL sets it by default
    # Progress bars of all libraries appear after some seconds and leave no line. In a file, they are written rarely.
    rarely = {} if sys.stderr.isatty() else {"TQDM_MININTERVAL": "30", "TQDM_MAXINTERVAL": "30"}
    for name, value in ({"TQDM_DELAY": "5", "TQDM_LEAVE": ""} | rarely).items():
        os.environ.setdefault(name, value)
    try:
        main(arguments)
    except (ValueError, OSError, ImportError, FloatingPointError, yaml.YAMLError) as error:
        if len(arguments) < len(sys.argv[1:]):
            raise
        message = printable(" ".join(str(error).split()))
        sys.exit(f"topr {arguments[0]}: {message} (--debug shows where)")
    except KeyboardInterrupt as stopped:
        if LOOP not in os.environ:  # In a process of a loop, the loop prints these lines.
            kept = str(stopped) or "Finished parts, such as checkpoints, are kept; without any, it starts over."
            again = shlex.join(["topr", *sys.argv[1:]])
            print(f"\ntopr {arguments[0]}: stopped. {kept} To continue, run: {again}", file=sys.stderr, flush=True)
        if arguments[0] in LOOPS:
            os._exit(130)  # After a second Ctrl+C, do not wait for threads. On Linux, stages end with this process.
        sys.exit(130)
    if is_one_of_several():
        # All files are written, so exit without shutting gloo down. If gloo shuts down while another process is still
        # running, it sometimes aborts or hangs (torch 2.13). The launcher would then stop the other processes.
        atexit._run_exitfuncs()  # Trackers finish their runs in these functions, which `os._exit` skips.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def without_debug(arguments: Sequence[str]) -> list[str]:
    """Remove `--debug`, unless a value follows it, as in `topr train --debug underflow_overflow`."""
    after = [*arguments[1:], "--"]
    return [
        word for i, word in enumerate(arguments) if word != "--debug" or (i > 0 and not after[i].startswith("-"))
    ]  # fmt: skip


def full_arguments(command: str, arguments: Sequence[str]) -> list[str]:
    """Write `topr look FOLDER` as `--input FOLDER`, and split `--config=FILE`, because TRL reads only `--config FILE`.

    Args:
        command (`str`): Name of the command.
        arguments (`Sequence[str]`): Arguments after the name.
    """
    parts = [part.split("=", 1) if part.startswith("--config=") else [part] for part in arguments]
    is_short = command == "look" and arguments and not arguments[0].startswith("-")
    return ["--input"] * bool(is_short) + [word for words in parts for word in words]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments (`Sequence[str]`, *optional*): Name of the command, and its arguments. Default: `sys.argv[1:]`.

    Raises:
        ValueError, OSError, ImportError, FloatingPointError, yaml.YAMLError: an error that the user can correct.
            `console` prints its message on one line.
    """
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
            epilog="topr COMMAND --help lists the settings of a command. --config FILE reads them from a YAML file.",
        )
        parser.add_argument("--version", action="version", version=f"topr_trl {__version__}")
        parser.add_argument("command", choices=known, metavar="COMMAND")
        parser.parse_args(arguments[:1] or ["--help"])
    command, given = arguments[0], full_arguments(arguments[0], arguments[1:])
    asks_help = bool({"-h", "--help", "--help_all"} & set(given))
    config = {} if asks_help else read_config(given)
    if isinstance(config.get("env"), dict):  # Libraries read some of these variables when they are imported.
        os.environ.update({name: str(value) for name, value in config["env"].items()})
    index = read_index() or write_index()
    if asks_help:
        short, full = index["help"][command]
        print(full if "--help_all" in given else short, end="")
        return
    refuse_unknown(command, given, index)
    from topr_trl.cli.early_checks import check_early  # The import of huggingface_hub reads HF_HOME.

    known_settings, values = index["settings"][command], {**config, **values_given(given)}
    values = {name: value for name, value in values.items() if name in known_settings}
    check_early(command, values, known_settings, index["choices"][command])
    if command == "look":  # `topr look` needs neither torch nor TRL.
        from topr_trl.report.look import LookArguments, look_command

        look_command(LookArguments(**values))
        return
    if command in LOOPS:
        start_server()  # The server imports the libraries at the same time as this process.
    from topr_trl.cli.commands import run  # The import of torch and TRL takes seconds.

    run(command, given)
