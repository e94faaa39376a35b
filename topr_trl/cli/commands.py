"""Run `topr COMMAND`, and print the result."""

import logging
import os
from pkgutil import resolve_name

from topr_trl.cli.command_names import COMMANDS, LOOPS
from topr_trl.cli.parsing import parse
from topr_trl.importing.input_settings import InputArguments
from topr_trl.pipeline import stages
from topr_trl.pipeline.imported_input import with_imported_input
from topr_trl.pipeline.parent_process import LOOP, end_processes_on_signals, end_with_the_loop
from topr_trl.settings.checks import HUB

# Warnings of libraries about a machine without a GPU, and about checkpoints of models with tied weights
_NOISE = ("Setting accelerator to CPU", "missing keys in the checkpoint model loaded: ['lm_head.weight']")


def run(command: str, given: list[str]) -> None:
    """Parse the settings of a command, and run the command.

    Args:
        command (`str`): Name of the command.
        given (`list[str]`): Arguments after the name.

    Raises:
        ValueError, OSError: a setting or an input cannot be used.
        ImportError: a package that the settings need is not installed.
        FloatingPointError: a weight, loss or gradient is NaN or infinite.
        yaml.YAMLError: the `--config` file is not valid YAML.
    """
    end_with_the_loop()
    if command in LOOPS:
        end_processes_on_signals()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in ("DeepSpeed", "transformers.trainer"):
        logging.getLogger(name).addFilter(lambda record: not any(text in record.getMessage() for text in _NOISE))
    args = parse(command, given)
    for field in ("input", "rows"):
        if command != "push" and (name := str(getattr(args, field, None))).startswith(HUB):
            from topr_trl.hub.download import downloaded

            setattr(args, field, str(downloaded(name, f"--{field}")))
    if isinstance(args, InputArguments) and command != "import":
        args = with_imported_input(args)
    if command in COMMANDS:
        resolve_name(COMMANDS[command].function)(args)
        return
    stage = stages.load(command)(args)
    before = stage.entry()
    # Only the main process gets an entry. The loop prints a line for each of its stages.
    if (done := stage.run()) and LOOP not in os.environ:
        repeated = f"Nothing to do: topr {command} had already finished in {stage.folder}." if done == before else ""
        lines = (repeated, stage.summary(done), stage.outcome.format(**done, folder=stage.folder), stage.next_steps())
        print(*filter(None, lines), sep="\n", flush=True)
