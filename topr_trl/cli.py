"""The command `topr`: the stages of an iteration, and the loop over them."""

import argparse
import logging
import sys
from collections.abc import Sequence

from trl import ModelConfig, TrlParser

from topr_trl import stages
from topr_trl.config import OfflineTOPRConfig
from topr_trl.evaluate_command import evaluate_command
from topr_trl.iterate import LoopArguments, end_with_the_loop, iterate
from topr_trl.plan import PlanArguments, describe
from topr_trl.sampling import SamplingArguments
from topr_trl.settings import Settings, StageArguments
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS
from topr_trl.vllm_sampling import VLLMArguments

COMMANDS = {
    "iterate": "sample, score, curate, log-mu, train and evaluate, in a loop that survives being killed",
    "sample": "draw candidates for problems",
    "score": "judge candidates",
    "curate": "choose the rows to train on",
    "log-mu": "score log μ of the rows with the starting model",
    "train": "train on the rows",
    "plan": "memory of a GPU and time of a step, before anything is started",
    "evaluate": "pass@k, maj@k and more of a model or of candidates, alone or beside another run",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    end_with_the_loop()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in COMMANDS:
        parser = argparse.ArgumentParser(
            prog="topr",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description="TOPR (arXiv 2503.14286).\n\n"
            + "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
            epilog="topr COMMAND --help lists the settings of a command; --config FILE reads them from YAML.",
        )
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
        parser.parse_args(arguments[:1])
    command, given = arguments[0], arguments[1:]
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if command == "plan":
        print(describe(*TrlParser(PlanArguments, prog="topr plan").parse_args_and_config(given)))
        return
    parser = TrlParser(
        (LoopArguments, StageArguments, SamplingArguments, VLLMArguments, OfflineTOPRConfig, ModelConfig),
        prog=f"topr {command}",
    )
    # The disk of a long run is bounded by keeping one checkpoint.
    parser.set_defaults(output_dir="topr-run", save_total_limit=1)
    if not any(argument.startswith(("--model_name_or_path", "--config")) for argument in given):
        parser.set_defaults_with_config(**CARELESS_SETTINGS)
    loop, *parts = parser.parse_args_and_config(given)
    settings = Settings(*parts)
    if command == "iterate":
        iterate(loop, settings, given)
    elif command == "evaluate":
        try:
            evaluate_command(settings)
        except (ValueError, OSError) as error:  # what a user can mend; a traceback would hide it
            sys.exit(f"topr evaluate: {' '.join(str(error).split())}")
    else:
        stages.run(command, settings)
