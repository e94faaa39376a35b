"""Print messages, and tell the user what the rewards of the training rows mean for the loss."""

import sys
from typing import Any

import numpy as np
from accelerate import PartialState

from topr_trl.baseline import FloatArray, effective_positive_share
from topr_trl.curation import Curated
from topr_trl.data.preparation import ScoredRows
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.user_warnings import warn_user


def say(what: str, args: Any) -> None:
    """Print a message on the main process, unless the setting `disable_tqdm` is on."""
    if PartialState().is_main_process and not args.disable_tqdm:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # A stream of the user's may have no encoding.
        shown = what.encode(encoding, "replace").decode(encoding)  # Latin-1, for example, has no π and no μ.
        print(f"TOPR: {shown}", flush=True)


def say_share(rewards: FloatArray, args: TOPRConfig | OfflineTOPRConfig, said: set[object]) -> None:
    """Print the effective share of positives among the rewards R, if it is below 1 and negatives have a weight.

    Online, the message describes the first generation batch with negatives.

    Args:
        rewards (`np.ndarray`):
            R of the chosen rows.
        args ([`TOPRConfig`] or [`OfflineTOPRConfig`]):
            Settings of the trainer.
        said (`set`):
            Messages that the trainer has already printed. The function adds its own, and prints it only once.
    """
    share = effective_positive_share(rewards)
    if "share" in said or not share < 1 or args.limits.b_neg == 0:
        return
    said.add("share")
    until = " until the taper reduces it" * (args.limits.a_neg < args.limits.b_neg)
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
            Messages that the trainer has already printed. The function adds its own, and gives each warning only once.
    """
    positives, negatives = curated.available_positives, curated.available_negatives
    signs = (positives > 0, negatives > 0)
    missed = not all(signs) and (signs != (True, False) or args.limits.b_neg > 0)
    if not missed or signs in said:
        return
    if signs == (True, False):
        message = (
            f"None of the {positives} rows has a negative reward after the baseline: TOPR then is reward-weighted "
            "supervised fine-tuning."
        )
        if zeros:
            message += " Rewards of 0 are not negatives: set baseline='mean', or baseline=0.5."
    elif signs == (False, True):
        message = (
            f"All {negatives} rows have a negative reward after the baseline: the model only learns what to avoid, "
            "and nothing says what to write instead. Add positives, or lower the baseline."
        )
    else:
        message = "No completion has a reward, so there is nothing to learn from them: the weights do not change."
        if isinstance(args, TOPRConfig) and args.mask_truncated_completions:
            message += " With mask_truncated_completions, completions cut at max_completion_length have no reward."
    said.add(signs)
    warn_user(message)


def say_recipe(scored: ScoredRows, args: OfflineTOPRConfig) -> None:
    """Print the recipe for few right answers, if rewards have two values and the user has made no choice.

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
    if is_chosen or scored.after_baseline_U is not None or len(values) != 2 or counts[1] >= counts[0]:
        return
    say(
        f"{counts[1] / counts.sum():.0%} of the rows are right. Repeating them with curation='repeated_positives', "
        "or until they are half of the rows with curation='balanced', may train a better model. See \"Which "
        'method?" in the documentation.',
        args,
    )
