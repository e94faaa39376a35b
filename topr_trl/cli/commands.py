"""Runs `topr COMMAND`, and prints what came out."""

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from topr_trl.cli.evaluate import evaluate_command
from topr_trl.cli.memory_plan import plan_command
from topr_trl.cli.run_report import plot_command
from topr_trl.cli.settings import KINDS, parse, print_help, split_config
from topr_trl.cli.trial import trial_command
from topr_trl.hub import push_command
from topr_trl.pipeline import stages
from topr_trl.pipeline.arguments import LaunchArguments
from topr_trl.pipeline.loop import iterate
from topr_trl.pipeline.processes import end_processes_on_signals, end_with_the_loop
from topr_trl.pipeline.summary import summary


def run(command: str, arguments: Sequence[str], description: str) -> None:
    """Run a command with the arguments that follow it; `description` is for its help."""
    end_with_the_loop()
    if issubclass(KINDS[command], LaunchArguments):
        end_processes_on_signals()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    given = split_config(arguments)
    if {"-h", "--help", "--help_all"} & set(given):
        print_help(command, description, everything="--help_all" in given)
        return
    args = parse(command, given)
    wanted = [name for name in ("tensorboard", "trackio", "wandb") if name in (getattr(args, "report_to", None) or ())]
    if missing := [name for name in wanted if not find_spec(name)]:
        raise ImportError(f"--report_to {missing[0]} needs {missing[0]}: pip install topr_trl[trackers].")
    CARRY_OUT[command](args)


def run_stage(command: str) -> Callable[[Any], None]:
    """The function that runs a stage and prints what came out."""

    def carry_out(args: Any) -> None:
        done = stages.run(command, args)
        if done:
            print(*filter(None, (summary(command, done), _OUTCOMES[command].format(**done, folder=args.folder))),
                  sep="\n", flush=True)  # fmt: skip

    return carry_out


_OUTCOMES = {
    "import": "Rows in {folder}/: {rows:,}.",
    "sample": "Completions in {folder}/: {rows:,}.",
    "score": "Rows with rewards in {folder}/: {rows:,}.",
    "curate": "Rows in {folder}/: {rows:,}; column reward_after_baseline says which are trained on.",
    "log-mu": "log μ is in {folder}/.",
    "train": "The model is in {folder}/.",
}


CARRY_OUT: dict[str, Callable[[Any], None]] = {
    **{stage: run_stage(stage) for stage in _OUTCOMES},
    "evaluate": evaluate_command,
    "iterate": iterate,
    "trial": trial_command,
    "plan": plan_command,
    "plot": plot_command,
    "push": push_command,
}
