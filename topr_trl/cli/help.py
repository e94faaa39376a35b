"""Format the help of `topr COMMAND`: the most important settings, or all settings, in groups."""

import argparse

from trl import ModelConfig, SFTConfig, TrlParser

from topr_trl.cli.parsing import select_fields, settings_class, settings_of
from topr_trl.generation.settings import SamplingArguments
from topr_trl.pipeline.settings import BackendArguments, LaunchArguments, field_names
from topr_trl.settings.shared import CurationArguments, LossArguments

WIDTH = 100
_MAX_IN_SHORT_HELP = 26  # if a command has more settings, its short help shows only settings in _IMPORTANT
_IMPORTANT = (
    "input", "output_dir", "task", "dataset_name", "test_dataset_name", "reward_funcs", "reward_weights", "rows",
    "iterations", "trial_rows", "held_out_problems", "decode", "compare", "model_name_or_path", "use_peft",
    "load_in_4bit", "ratio_level", "baseline", "effective_positive_share", "curation", "learning_rate",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
    "num_generations_eval", "temperature", "max_new_tokens", "sampling_backend", "sampling_workers",
    "accelerate_config", "report_to", "format", "reward_fields", "label_values", "skip_unrewarded", "rewards",
    "problem_field", "gpus", "nodes", "gpu_memory", "prompt_tokens", "optim", "lora_parameters",
)  # fmt: skip
_FIRST = ("input", "output_dir")
# Settings of `_IMPORTANT` that the short help of a command leaves out.
_LESS_IMPORTANT = {
    "iterate": ("format", "reward_fields", "label_values", "skip_unrewarded", "load_in_4bit", "ratio_level"),
    "trial": ("sampling_workers",),
}
# Groups of settings, by title, with the dataclasses that define them. Settings of `_FIRST`, and settings of all other
# dataclasses, are in the group Data, which comes first. A setting of several groups is in the first of these.
_GROUPS: dict[str, tuple[type, ...]] = {
    "Data": (),
    "Model": (ModelConfig,),
    "Algorithm": (LossArguments, CurationArguments),
    "Training": (SFTConfig,),
    "Sampling": (SamplingArguments, BackendArguments),
    "Machines": (LaunchArguments,),
}


def format_help(command: str, description: str, everything: bool = False) -> str:
    """Return the help of a command.

    Args:
        command (`str`): Name of the command.
        description (`str`): One-line description of the command, shown below the usage.
        everything (`bool`, defaults to `False`): Whether to list all settings instead of the most important ones.
    """
    names = settings_of(command)
    important = set(_IMPORTANT) - set(_LESS_IMPORTANT.get(command, ()))
    short = [name for name in names if name in important] if len(names) > _MAX_IN_SHORT_HELP else list(names)
    shown = list(names) if everything else short
    # Settings of `_FIRST` come first. The sort is stable, so the remaining settings keep their order.
    shown.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    kind = settings_class(command)
    groups = {title: [name for name in shown if _group_of(name, kind) == title] for title in _GROUPS}
    parts = []
    for title, own in groups.items():
        if own:
            part = select_fields(kind, own)
            part._argument_group_name = title if len(own) < len(shown) else "Settings"  # type: ignore[attr-defined]
            parts.append(part)
    parser = TrlParser(
        parts, prog=f"topr {command}", usage=f"topr {command} [--config FILE] [settings]", description=description,
        formatter_class=_Formatter, add_help=False,
    )  # fmt: skip
    if len(shown) < len(names):
        parser.epilog = f"--help_all lists all {len(names)} settings."
    return parser.format_help()


def _group_of(name: str, kind: type) -> str:
    if name in _FIRST:
        return "Data"
    for title, classes in _GROUPS.items():
        if issubclass(kind, classes) and any(name in field_names(each) for each in classes):
            return title
    return "Data"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter that lists option names only with underscores. The parser also accepts hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=WIDTH)

    def add_argument(self, action: argparse.Action) -> None:
        # The help leaves out `--no_x`, which means `--x false`.
        if not action.option_strings[0].startswith("--no_"):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name[2:]]
        value = "" if action.nargs == 0 else " " + self._format_args(action, "VALUE")
        return ", ".join(names) + value

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") else super()._get_help_string(action)
