"""Warn about silent causes of poor training, such as dead negatives, a different sampler, and lost updates."""

from collections.abc import Mapping
from math import ceil

import numpy as np
from accelerate.utils import is_peft_model
from numpy.typing import NDArray
from torch import Tensor, float32, nn
from transformers import TrainerState

from topr_trl.curation import Curated
from topr_trl.limits import DEAD_WEIGHT
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.user_warnings import warn_user

# If most negatives are dead early in training, the run probably has an error.
MOSTLY_DEAD = 0.5  # "most": more than this share of the negatives
EARLY = 0.1  # "early": in this first share of the steps
# Negatives are long from this mean number of tokens on. With 160 tokens, a ratio per segment was better than one per
# completion (see "Long completions" on the page of results). Up to 64 tokens, a segment is the whole completion.
LONG_NEGATIVES = 128
MOST_READS = 13  # largest number of times that an experiment trained a pretrained model on a right answer (see results)
LOST_WEIGHT = 0.5  # long negatives with a lower mean weight have lost too much weight


def warn_if_merged_coarsely(model: nn.Module) -> None:
    """Warn if weights are too coarse to add an adapter to them and to subtract it again, as TRL does for vLLM.

    Args:
        model (`torch.nn.Module`):
            Model that TRL sends to vLLM.
    """
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    if is_peft_model(model) and any(dtype.itemsize < float32.itemsize for dtype in frozen):
        warn_user(
            "For vLLM, TRL adds the adapter to the weights and later subtracts it, and the weights are not float32. "
            "Rounding then loses most of a small update in what vLLM samples from, and changes the weights with each "
            "new batch. Load the base model with dtype='float32', or use AsyncTOPRTrainer, which sends the adapter."
        )


def warn_of_pushed_rows(args: TOPRConfig | OfflineTOPRConfig) -> None:
    """Warn if `push_to_hub` uploads training rows beside the model, and the repository may be public."""
    files = ["completions/*.parquet (log_completions)"] * args.log_completions
    if getattr(args, "replay_share", 0) and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        files.append(f"replay_*.pt (hub_strategy={args.hub_strategy.value!r})")
    if args.push_to_hub and files and not args.hub_private_repo:
        warn_user(
            f"push_to_hub also uploads training rows to the Hub: {' and '.join(files)}. To keep the rows private, set "
            "hub_private_repo=True before the repository is created, or upload the model alone with `topr push`."
        )


def warn_of_weights(metrics: Mapping[str, float], state: TrainerState, ratio_level: str, said: set[object]) -> None:
    """Warn if most negatives are dead early in training, and recommend a ratio per segment for long negatives.

    Each of the two messages is given at most once.

    Args:
        metrics (`Mapping[str, float]`):
            Metrics since the last log. See `topr_trl.trainers.metrics.row_metrics`.
        state ([`~transformers.TrainerState`]):
            State of the trainer.
        ratio_level (`str`):
            Level of the ratio.
        said (`set`):
            Messages that the trainer has already given. The function adds its own.
    """
    tokens, weight = metrics.get("topr/tokens/negatives", 0.0), metrics.get("topr/weight_mean_negatives", 1.0)
    needs_segments = ratio_level == "sequence" and tokens >= LONG_NEGATIVES and weight < LOST_WEIGHT
    dead, step, steps = metrics.get("topr/negatives_dead", 0.0), state.global_step, state.max_steps
    if "dead" not in said and dead > MOSTLY_DEAD and step <= max(EARLY * steps, state.logging_steps):
        said |= {"dead", "segments"} if needs_segments else {"dead"}  # The warning includes the advice.
        then = "Otherwise use"
        if needs_segments:
            then = "Completions are long, so set ratio_level='segment' first. Then use"
        warn_user(
            f"{dead:.0%} of the negatives have a weight below {DEAD_WEIGHT:g} at step {step} of {steps} and contribute "
            "almost nothing: according to log μ, the model being trained is far from the model that wrote them. If the "
            "two should be close, check the source of log μ: small errors add up over long completions, for instance "
            f"from top_k or top_p, a different temperature, or the rounding of a different engine. {then} a lower "
            'learning rate or fewer updates on the same rows. See "Metrics" in the documentation.'
        )
    if needs_segments and "segments" not in said:
        said.add("segments")
        warn_user(
            f"Negatives have {tokens:,.0f} tokens on average, and their mean weight since the last log is "
            f"{weight:.2f}. The ratio of a whole completion soon removes the weight of long negatives. Set "
            "ratio_level='segment', and train again from the original model. Also try segment_tokens=16. "
            'See "Long completions" on the page "Metrics" of the documentation.'
        )


_SILENT = 10  # number of consecutive batches in which every R is 0, after which to warn
# Largest mean difference between sampler and trainer, in nats per token, that different kernels can cause. A larger
# difference means different weights or settings.
_FAR = 0.1


def sampler_distance(mu_logps: list[list[float]], sampler_logps: list[list[float] | None]) -> dict[str, float]:
    """Measure how far the sampler's log-probabilities are from the trainer's, and warn if they are far apart.

    Completions with a different number of values from sampler and trainer are skipped, with a warning.

    Args:
        mu_logps (`list[list[float]]`):
            log μ from the trainer, for N completions with one value per token.
        sampler_logps (`list[list[float] | None]`):
            Log-probabilities from the sampler, for the same completions. `None` for a completion without them.

    Returns:
        `dict[str, float]`: absolute differences in nats. `token` is the mean over tokens, and `token_max` the maximum.
        `response` is the mean over completions of the difference between their sums. With `log_mu="sampler"`, this
        difference is noise in log π/μ. The result is empty if no completion can be compared.
    """
    pairs = [(np.asarray(m), np.asarray(s)) for m, s in zip(mu_logps, sampler_logps, strict=True) if s is not None]
    cut = [len(s) for m, s in pairs if len(m) != len(s)]
    if cut:
        warn_user(
            f"{len(cut)} of {len(pairs)} rows have sampler_logps and completion_ids of different lengths, so "
            "training uses different tokens than the sampler wrote. Keep the sampler's completion_ids with the rows."
        )
    pairs = [(m, s) for m, s in pairs if len(m) == len(s) > 0]
    if not pairs:
        return {}
    tokens = np.abs(np.concatenate([m - s for m, s in pairs]))
    distance = {
        "token": float(tokens.mean()),
        "token_max": float(tokens.max()),
        "response": float(np.mean([abs((m - s).sum()) for m, s in pairs])),
    }
    warn_if_far(distance["token"], set())
    return distance


def warn_if_far(distance: float, said: set[object]) -> None:
    """Warn if sampler and trainer differ by more than `_FAR` nats per token, unless `said` has this warning."""
    if distance > _FAR and "far" not in said:
        said.add("far")
        warn_user(
            f"The sampler's log-probabilities differ from the trainer's by {distance:.2f} nats per token: the sampler "
            "had different weights, a different tokenizer or RoPE settings, or computed at low precision. Sample from "
            "the checkpoint that training starts from, in the precision of training. If another model wrote the rows, "
            "set log_mu='sampler'."
        )


_LARGEST_R, _SMALLEST_R = 4.0, 0.1  # range of the largest |R| that needs no warning


def warn_of_scale(rewards: NDArray[np.float64], said: set[object], may_be_small: bool = False) -> None:
    """Warn if the rewards are not of a magnitude of about 1, because their scale multiplies the gradient.

    Args:
        rewards (`np.ndarray`):
            R of the chosen rows.
        said (`set`):
            Warnings that the trainer has already given. The function adds its own warning, and gives the warning only
            once.
        may_be_small (`bool`, *optional*, defaults to `False`):
            Whether small rewards need no warning, as in a batch of completions that are equally good.
    """
    largest = float(np.abs(rewards).max(initial=0))
    is_far = largest > _LARGEST_R or (0 < largest < _SMALLEST_R and not may_be_small)
    if is_far and "scale" not in said:
        said.add("scale")
        warn_user(
            f"After the baseline, rewards have magnitudes of up to {largest:.3g}. They multiply the gradient, and the "
            "defaults are for rewards of about +1 and -1. Scale the rewards to a magnitude of about 1, for example by "
            "dividing them by their largest value."
        )


def warn_of_many_reads(curated: Curated, rewards: NDArray[np.float64], epochs: float) -> None:
    """Warn if training reads a positive more often than was measured with a pretrained model.

    Args:
        curated ([`Curated`]):
            Choice of the rows.
        rewards (`np.ndarray`):
            R of the chosen rows.
        epochs (`float`):
            Number of epochs over the chosen rows.
    """
    reads = epochs * np.bincount(curated.indices[rewards > 0], minlength=1).max()
    if reads > MOST_READS:
        warn_user(
            f"Training reads a right answer up to {ceil(reads)} times, and the model may only memorize these answers. "
            f"On a pretrained model, at most {MOST_READS} readings were measured. Reduce iteration_size or "
            "num_train_epochs, or add right answers."
        )


class SilentBatches:
    """Count consecutive generation batches without a signal: every R is 0, so training learns nothing from them.

    Args:
        had_signal (`bool`, *optional*, defaults to `False`):
            Whether training has a signal from another source: logged rows, or the run that is resumed.

    Attributes:
        had_signal (`bool`):
            Whether there has been a signal from this source or from a batch.
    """

    def __init__(self, had_signal: bool = False) -> None:
        self.had_signal = had_signal
        self._rows = self._batches = 0

    def add(self, rewards: NDArray[np.float64], raw_rewards_N: Tensor) -> None:
        """Count a batch without a signal. A batch with a signal, or without any reward, resets the count.

        Args:
            rewards (`np.ndarray`):
                R of the chosen rows.
            raw_rewards_N (`torch.Tensor`):
                Rewards of all N rows before the baseline. NaN marks a missing reward.
        """
        has_signal = bool(rewards.any())
        is_silent = not has_signal and not bool(raw_rewards_N.isnan().all())
        self.had_signal |= has_signal
        self._batches = self._batches + 1 if is_silent else 0
        self._rows = self._rows + len(raw_rewards_N) if is_silent else 0

    def warn(self, baseline: float | str, said: set[object]) -> None:
        """Warn once if there has been no signal since the start of training, or in at least the last ten batches."""
        since_start = self._rows > 0 and not self.had_signal
        if "silent" in said or not (since_start or self._batches >= _SILENT):
            return
        said.add("silent")
        which = "so far" if since_start else f"of the last {self._batches} generation batches"
        warn_user(
            f"All {self._rows} completions {which} have R = 0 after baseline={baseline}, so there is nothing to learn "
            "from them. Check the reward functions."
        )
