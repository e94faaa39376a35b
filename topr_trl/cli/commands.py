"""What `topr COMMAND` does: its settings are parsed, and handed to what carries it out."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import ModelConfig, TrlParser

from topr_trl.cli.evaluate import evaluate_command
from topr_trl.cli.memory_plan import PlanArguments, plan_command
from topr_trl.cli.run_report import PlotArguments, plot_command
from topr_trl.config import OfflineTOPRConfig, TOPRArguments
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.generation.vllm import VLLMArguments
from topr_trl.hub import PushArguments, push_command
from topr_trl.pipeline import stages
from topr_trl.pipeline.arguments import CHOICE, Settings, StageArguments
from topr_trl.pipeline.loop import LoopArguments, end_with_the_loop, in_a_loop, iterate
from topr_trl.tasks.arithmetic import CARELESS_SETTINGS

# Commands that start nothing: what they take, and what they do.
AT_ONCE: dict[str, tuple[type, Callable[[Any], None]]] = {
    "plan": (PlanArguments, plan_command),
    "plot": (PlotArguments, plot_command),
    "push": (PushArguments, push_command),
}


def run(command: str, arguments: Sequence[str], description: str) -> None:
    """Run a command; see `topr_trl.cli.main`.

    Args:
        command: its name.
        arguments: what follows it.
        description: for its help.
    """
    end_with_the_loop()
    given = [part for a in arguments for part in _apart(a)]
    if given[-1:] == ["--config"]:
        raise ValueError("--config needs the name of a YAML file.")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if command in AT_ONCE:
        _, carry_out = AT_ONCE[command]
        carry_out(settings_at_once(command, given))
        return
    if {"-h", "--help", "--help_all"} & set(given):
        print_help(command, description, everything="--help_all" in given)
        return
    if _named_model(given) is None and command in _NEED_A_MODEL:
        own = _settings_of_the_embedded_model(command, given)
        if not (in_a_loop() or (command == "evaluate" and any(part.startswith("--input") for part in given))):
            shown = _SHOWN[command]
            chosen = ", ".join(part[2:] for part in own if part[2:].partition("=")[0] in shown)
            print(
                "There is no --model_name_or_path: this is the embedded model, of one million parameters. For it, and "
                f"unless you set them: {chosen}.",
                flush=True,
            )
        given = own + given
    loop, *parts = _parsed(make_parser(command), given)
    settings = Settings(*parts)
    if missing := [
        n for n in ("tensorboard", "trackio", "wandb") if n in settings.training.report_to and not find_spec(n)
    ]:
        raise ImportError(f"--report_to {missing[0]} needs {missing[0]}: pip install topr_trl[trackers].")
    if command == "iterate":
        iterate(loop, settings, given)
    elif command == "evaluate":
        evaluate_command(settings)
    else:
        stages.run(command, settings)


def _apart(argument: str) -> list[str]:
    """TRL knows `--config FILE` alone."""
    return argument.split("=", 1) if argument.startswith("--config=") else [argument]


def settings_at_once(command: str, given: list[str]) -> Any:
    """Those of a command that starts nothing."""
    kind, _ = AT_ONCE[command]
    parser = TrlParser(kind, prog=f"topr {command}", usage=_usage(command), allow_abbrev=False)
    # The YAML of a loop is one that can be planned.
    (settings,) = _parsed(parser, given, others=make_parser("iterate") if command == "plan" else None)
    return settings


def _usage(command: str) -> str:
    """Without one of its own an error would list all settings first."""
    return f"topr {command} [--config FILE] [settings]"


def _parsed(parser: TrlParser, given: list[str], others: TrlParser | None = None) -> list[Any]:
    """The settings, of which none may be unknown; a YAML may hold those of another parser, too."""
    *parts, in_config, unknown = parser.parse_args_and_config(
        given, return_remaining_strings=True, separate_remaining_strings=True
    )
    elsewhere = {action.dest for action in others._actions} if others else set()
    unknown += [name for name in in_config[::2] if name[2:] not in elsewhere]
    if unknown:
        similar = get_close_matches(unknown[0], [f"--{action.dest}" for action in parser._actions], 1)
        meant = f" (is {similar[0]} meant?)" if similar else ""
        config = "" if unknown[0] in given else f" (in {given[given.index('--config') + 1]})"
        raise ValueError(f"There is no setting {unknown[0]}{config}{meant}; {parser.prog} --help lists them.")
    return parts


def print_help(command: str, description: str, everything: bool) -> None:
    """The settings that matter to a command, or all that it takes."""
    parser = make_parser(command)
    parser.description = f"{description.capitalize()}."
    for action in parser._actions:
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]  # one of two spellings
        if not everything and action.dest not in _SHOWN[command]:
            action.help = argparse.SUPPRESS
    if not everything:
        parser.epilog = "All other settings of TRL are taken too: --help_all lists them."
    parser.print_help()


def _names(*settings: type, without: Sequence[str] = ()) -> tuple[str, ...]:
    return tuple(field.name for part in settings for field in fields(part) if field.name not in without)


_FOLDERS = ("input", "output", "seed")
_MODEL = ("model_name_or_path", "model_revision", "dtype", "attn_implementation")
_OF_ONE_STAGE = ("input", "output", "compare", "iteration", "worker", "split")
_PROBLEMS = _names(StageArguments, without=_OF_ONE_STAGE)
_SAMPLING = _names(SamplingArguments, VLLMArguments)
_STEPS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "padding_free",
          "sort_by_length", "gradient_checkpointing", "bf16", "max_length", "dataset_num_proc", "use_cpu")  # fmt: skip
_TRAINING = (
    *_STEPS, *_names(TOPRArguments, without=CHOICE), "learning_rate", "lr_scheduler_type", "optim",
    "num_train_epochs", "max_grad_norm", "logging_steps", "save_steps", "save_total_limit", "report_to",
    "log_completions", "num_completions_to_print", "use_peft", "lora_r",
)  # fmt: skip
# What the help of a command shows.
_SHOWN = {
    "sample": (*_FOLDERS, *_MODEL, *_PROBLEMS, "split", "worker", "iteration", *_SAMPLING),
    "score": ("input", "output", "task"),
    "curate": (*_FOLDERS, *CHOICE, "iteration"),
    "log-mu": (*_FOLDERS, *_MODEL, *_STEPS, *_names(TOPRArguments, without=CHOICE)),
    "train": (*_FOLDERS, *_MODEL, *_TRAINING, *CHOICE, "iteration"),
    "evaluate": (*_FOLDERS, "compare", *_MODEL, *_PROBLEMS, *_SAMPLING),
    "iterate": ("output_dir", "seed", *_names(LoopArguments), *_MODEL, *_PROBLEMS, *_SAMPLING, *CHOICE,
                *_TRAINING),
}  # fmt: skip

_NEED_A_MODEL = ("iterate", "sample", "log-mu", "train", "evaluate")


def _named_model(given: list[str]) -> str | None:
    """Of the command line or its config file, whatever else they hold."""
    parser = TrlParser(ModelConfig, prog="topr", usage=_usage("COMMAND"))
    model, *_ = parser.parse_args_and_config(given, return_remaining_strings=True)
    name: str | None = model.model_name_or_path
    return name


def _settings_of_the_embedded_model(command: str, given: list[str]) -> list[str]:
    """As arguments, which the loop hands to its stages; what is given, or in a config file, wins."""
    files = [file for option, file in pairwise(given) if option == "--config"]
    own = {name for file in files for name in yaml.safe_load(Path(file).read_text()) or {}}
    own |= {part[2:].partition("=")[0].replace("-", "_") for part in given if part.startswith("--")}
    # Rows that are trained on by hand are chosen by who brings them, and a rule that is given has its own size.
    left_out = own | ({"iteration_size"} if "curation" in own else set())
    if command != "iterate":
        left_out |= {"curation", "iteration_size"}
    return [f"--{name}={value}" for name, value in CARELESS_SETTINGS.items() if name not in left_out]


def make_parser(command: str) -> TrlParser:
    """Of the loop's and all stages' settings."""
    settings = (LoopArguments, StageArguments, SamplingArguments, VLLMArguments, OfflineTOPRConfig, ModelConfig)
    parser = TrlParser(settings, prog=f"topr {command}", usage=_usage(command), allow_abbrev=False)
    # The disk of a long run is bounded by keeping one checkpoint.
    parser.set_defaults(output_dir="topr-run", save_total_limit=1, use_cpu=not torch.accelerator.is_available())
    return parser
