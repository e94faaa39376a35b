"""Run `topr COMMAND`, and print the result."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from topr_trl.cli.evaluate import evaluate_command
from topr_trl.cli.memory_plan import plan_command
from topr_trl.cli.parsing import parse, settings_class
from topr_trl.cli.run_report import plot_command
from topr_trl.cli.trial_report import trial_command
from topr_trl.hub import push_command
from topr_trl.importing.input_settings import InputArguments
from topr_trl.pipeline import stages
from topr_trl.pipeline.imported_input import with_imported_input
from topr_trl.pipeline.loop import iterate
from topr_trl.pipeline.parent_process import end_processes_on_signals, end_with_the_loop
from topr_trl.pipeline.settings import LaunchArguments
from topr_trl.pipeline.stage import Stage
from topr_trl.recording.settings import RecordArguments


def _record_command(args: RecordArguments) -> None:
    """Run `topr record`. Raise an ImportError if aiohttp is not installed."""
    if not find_spec("aiohttp"):
        raise ImportError('topr record needs aiohttp: run pip install ".[record]" in the clone.')
    from topr_trl.recording.server import record_command

    record_command(args)


# Functions that run commands. A command that is not listed runs the stage with its name. `evaluate` is also a stage,
# but its command may have to sample and score first.
COMMANDS: dict[str, Callable[[Any], None]] = {
    "evaluate": evaluate_command,
    "iterate": iterate,
    "trial": trial_command,
    "plan": plan_command,
    "plot": plot_command,
    "push": push_command,
    "record": _record_command,
}


def run(command: str, given: list[str]) -> None:
    """Parse the settings of a command, and run the command.

    Args:
        command (`str`): Name of the command.
        given (`list[str]`): Arguments after the name.

    Raises:
        ValueError, OSError: a setting or an input cannot be used.
        ImportError: a package that the settings need is not installed, such as a tracker in `report_to`.
        FloatingPointError: a weight, loss or gradient is NaN or infinite.
        yaml.YAMLError: the `--config` file is not valid YAML.
    """
    end_with_the_loop()
    if issubclass(settings_class(command), LaunchArguments):
        end_processes_on_signals()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    args = parse(command, given)
    wanted = [name for name in ("tensorboard", "trackio", "wandb") if name in (getattr(args, "report_to", None) or ())]
    if missing := [name for name in wanted if not find_spec(name)]:
        raise ImportError(f'--report_to {missing[0]} needs {missing[0]}: run pip install ".[trackers]" in the clone.')
    if isinstance(args, InputArguments) and command != "import":
        args = with_imported_input(args)
    if command in COMMANDS:
        COMMANDS[command](args)
    else:
        run_stage(stages.load(command)(args))


def run_stage(stage: Stage[Any]) -> None:
    """Run a stage, and print its summary, its outcome and the next steps. Only the main process prints."""
    if done := stage.run():
        lines = (stage.summary(done), stage.outcome.format(**done, folder=stage.folder), stage.next_steps())
        print(*filter(None, lines), sep="\n", flush=True)
