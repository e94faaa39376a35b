"""Print messages and logs, and tell the user what the rewards of the training rows mean for the loss."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from topr_trl.baseline import FloatArray, effective_positive_share
from topr_trl.curation import Curated, counted
from topr_trl.data.preparation import ScoredRows
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.user_warnings import warn_user

# Metrics in the line that the terminal shows for each log, the most important one first. See the page "Metrics".
_SHOWN = {
    "reward": "reward {:.3g}",
    "topr/negatives_dead": "dead negatives {:.0%}",
    "topr/weight_mean_negatives": "weight of negatives {:.2f}",
    "grad_norm": "gradient norm {:.2g}",
    "topr/logps/positives/token": "log-probability per token of positives {:.3g}",
}
_MOST_SHOWN = 4


def log_line(logs: Mapping[str, Any], step: int, max_steps: int) -> str:
    """Return a line with the most important metrics of a log.

    Return "" if the log has none of these metrics and is not the summary at the end of training.

    Args:
        logs (`Mapping`): Metrics by name.
        step (`int`): Optimizer step.
        max_steps (`int`): Last optimizer step.
    """
    evaluated = [
        name.removesuffix("_runtime") for name in logs if name.startswith("eval_") and name.endswith("_runtime")
    ]
    prefix = f"{evaluated[0]}_" if evaluated else ""
    known = [(form, logs.get(f"{prefix}{name}")) for name, form in _SHOWN.items()]
    shown = ", ".join([form.format(value) for form, value in known if isinstance(value, int | float)][:_MOST_SHOWN])
    if "train_runtime" in logs:
        return f"{counted(step, 'step')} in {logs['train_runtime']:,.0f} s{': ' * bool(shown)}{shown}"
    return f"step {step:,}/{max_steps:,}{', ' * bool(evaluated)}{''.join(evaluated)}: {shown}" if shown else ""


class LogLine(TrainerCallback):
    """Callback that prints a line for each log. Trackers and `trainer_state.json` have all metrics."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line above the progress bar, on the main process."""
        if state.is_world_process_zero and (line := log_line(logs, state.global_step, state.max_steps)):
            tqdm.write(line)


class ProgressBar(ProgressCallback):
    """Progress bars of transformers, without logs. Without a terminal, there is no bar for training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar at once, whatever delay other bars have."""
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, delay=0, disable=None)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing."""


def print_log_lines(trainer: Trainer) -> None:
    """Make a trainer print a line for each log instead of all metrics.

    The table of metrics in notebooks, and callbacks of the user, stay unchanged.
    """
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback) is PrinterCallback:
            callbacks[place] = LogLine()
        elif type(callback) is ProgressCallback:
            callbacks[place] = ProgressBar()
            callbacks.append(LogLine())


def say(what: str, args: Any) -> None:
    """Print a message on the main process, unless the setting `disable_tqdm` is on, or a loop or a trial has."""
    if PartialState().is_main_process and not args.disable_tqdm and not args.was_said:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # A stream of the user's may have no encoding.
        shown = what.encode(encoding, "replace").decode(encoding)  # Latin-1, for example, has no π and no μ.
        print(f"TOPR: {shown}", flush=True)


def say_source_of_log_mu(args: Any) -> None:
    """Print that the starting model computes log μ."""
    say(
        "log μ is computed with the starting model. If another model wrote the rows, that is a proxy: if you have log "
        "μ of that model, add it as mu_logps, or as sampler_logps with log_mu='sampler'.",
        args,
    )


def say_share(rewards: FloatArray, args: TOPRConfig | OfflineTOPRConfig, said: set[object]) -> None:
    """Print the effective share of positives among the rewards R, if it is below 1 and negatives have a weight.

    Online, the message describes the first generation batch with negatives.

    Args:
        rewards (`np.ndarray`):
            R of the chosen rows.
        args ([`TOPRConfig`] or [`OfflineTOPRConfig`]):
            Settings of the trainer.
        said (`set`):
            Messages that the trainer has already printed. The function adds its own message, and prints this
            message only once.
    """
    share, limits = effective_positive_share(rewards), args.limits
    if "share" in said or not share < 1 or limits.b_neg == 0:
        return
    said.add("share")
    until = " until the taper reduces it" * limits.ratio_matters_neg
    offline = isinstance(args, OfflineTOPRConfig)
    more = ""
    if offline:
        more = "; topr trial compares several shares on your rows"
    elif abs(share - 0.5) < 1e-6:
        more = "; the loss is 0 while all weights are 1"
    sets = "" if args.curation == "balanced" else f" effective_positive_share sets this share{more}."
    say(
        f"the effective share of positives is {share:.0%}, so negatives have {1 - share:.0%} of the weight{until}."
        f"{sets}",
        args,
    )


def warn_of_signs(curated: Curated, zeros: bool, args: TOPRConfig | OfflineTOPRConfig, said: set[object]) -> None:
    """Warn if all rows are positive, all are negative, or none has a reward.

    If negatives have no weight, positives alone need no warning.

    Args:
        curated ([`Curated`]):
            Choice of the rows.
        zeros (`bool`):
            Whether any raw reward is 0.
        args ([`TOPRConfig`] or [`OfflineTOPRConfig`]):
            Settings of the trainer.
        said (`set`):
            Messages that the trainer has already printed. The function adds its own warnings, and gives each
            warning only once.
    """
    positives, negatives = curated.available_positives, curated.available_negatives
    signs = (positives > 0, negatives > 0)
    missed = not all(signs) and (signs != (True, False) or args.limits.b_neg > 0)
    if not missed or signs in said:
        return
    if signs == (True, False):
        message = (
            f"None of the {positives} completions has a negative reward after the baseline: TOPR then is "
            "reward-weighted supervised fine-tuning."
        )
        if zeros and args.baseline != "mean":
            message += " Rewards of 0 are not negatives: set baseline='mean', or baseline=0.5."
    elif signs == (False, True):
        message = (
            f"All {negatives} completions have a negative reward after the baseline: the model only learns what to "
            "avoid, and nothing says what to write instead. Add positives, or lower the baseline."
        )
    else:
        message = "No completion has a reward, so there is nothing to learn from them: the weights do not change."
        if isinstance(args, TOPRConfig) and args.mask_truncated_completions:
            message += " With mask_truncated_completions, completions cut at max_completion_length have no reward."
    said.add(signs)
    warn_user(message)


def say_recipe(scored: ScoredRows, args: OfflineTOPRConfig) -> None:
    """Print the agreement of wrong answers, and a recipe if fewer than half of the completions are right.

    Nothing is printed for rows that `curate` chose, or if rewards do not have two values. The recipe is not printed if
    negatives have no weight, or if the user has set the preset, the curation rule, the baseline, or the effective share
    of positives.

    Args:
        scored (`ScoredRows`):
            Rows of the training dataset.
        args ([`OfflineTOPRConfig`]):
            Settings of the trainer.
    """
    defaults = OfflineTOPRConfig.__dataclass_fields__
    choices = ("baseline", "effective_positive_share", "curation", "preset")
    is_chosen = any(getattr(args, name) != defaults[name].default for name in choices) or args.limits.b_neg == 0
    values, counts = np.unique(scored.rewards_U[~np.isnan(scored.rewards_U)], return_counts=True)
    if scored.after_baseline_U is not None or len(values) != 2:
        return
    if (diagnosis := scored.diagnose()) and diagnosis.advice:
        say(diagnosis.advice, args)
    if is_chosen or counts[1] >= counts[0]:
        return
    say(
        f"{counts[1] / counts.sum():.0%} of the completions are right. Repeating these with "
        "curation='repeated_positives', or until they are half of the rows with curation='balanced', may train a "
        'better model. See "Which method?" in the documentation.',
        args,
    )
