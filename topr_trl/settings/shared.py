"""Settings that the trainers and the commands share."""

import os
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from topr_trl.baseline import BASELINES, FloatArray
from topr_trl.curation import CURATIONS, Curated, compose
from topr_trl.limits import PRESETS, RATIO_LEVELS, SEGMENT_TOKENS, TruncationLimits
from topr_trl.settings.checks import check_at_least, check_choice, check_types
from topr_trl.settings.unsupported import offloads_optimizer, refuse_adafactor, refuse_split_sequences
from topr_trl.user_warnings import warn_user

LOG_MU_SOURCES = ("trainer", "sampler")
REPLAY_RULES = ("newest", "positives", "negatives", "anna_karenina")
REPLAYED_BATCHES = 8  # generation batches that a replay buffer holds by default

if TYPE_CHECKING:
    Baseline = float | str
else:  # HfArgumentParser would read `float | str` as float and reject 'mean'. `parse_baseline` converts the text.
    Baseline = str


def parse_baseline(baseline: float | str) -> float | str:
    """Return a baseline as a `float`, or as one of the names in `BASELINES`.

    Raises:
        ValueError: the baseline is neither a finite number nor one of the names.
    """
    if isinstance(baseline, str) and baseline in BASELINES:
        return baseline
    wrong = ValueError(f"baseline must be a number or one of {', '.join(BASELINES)}, not {baseline!r}.")
    if isinstance(baseline, bool) or not isinstance(baseline, str | Real):
        raise wrong
    try:
        value = float(baseline)
    except (ValueError, OverflowError):
        raise wrong from None
    if not isfinite(value):
        raise ValueError(f"baseline must be finite, not {baseline}.")
    return value


@dataclass
class LossArguments:
    """Settings for the weights of the loss (arXiv 2503.14286, Eq. 7). [`TOPRConfig`] describes them."""

    preset: str = field(default="topr", metadata={"help": f"Truncation limits by name: {', '.join(PRESETS)}."})
    a_pos: float | None = field(default=None, metadata={"help": "Lower limit of the ratio where R >= 0."})
    b_pos: float | None = field(default=None, metadata={"help": "Upper limit of the ratio where R >= 0."})
    a_neg: float | None = field(default=None, metadata={"help": "Lower limit of the ratio where R < 0."})
    b_neg: float | None = field(default=None, metadata={"help": "Upper limit of the ratio where R < 0."})
    ratio_level: str = field(
        default="sequence",
        metadata={"help": "Level of the ratio: 'sequence' (TOPR); 'segment', for completions of 128 tokens or more."},
    )
    segment_tokens: int = field(
        default=SEGMENT_TOKENS, metadata={"help": "Number of tokens in a segment, with ratio_level='segment'."}
    )
    length_normalization: bool = field(default=True, metadata={"help": "Divide the loss by the completion's length."})
    log_mu: str = field(
        default="trainer", metadata={"help": "Source of log μ: 'trainer' (forward pass) or 'sampler' (reported)."}
    )

    was_said = False  # not a setting: whether a loop or a trial has printed the same messages

    @property
    def limits(self) -> TruncationLimits:
        """Limits of the preset, with individual overrides from `a_pos`, `b_pos`, `a_neg` and `b_neg`."""
        given = {name: getattr(self, name) for name in ("a_pos", "b_pos", "a_neg", "b_neg")}
        return replace(PRESETS[self.preset], **{name: float(v) for name, v in given.items() if v is not None})

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Keyword arguments of `topr_trl.topr_loss`."""
        return {
            "limits": self.limits, "ratio_level": self.ratio_level, "segment_tokens": self.segment_tokens,
            "length_normalization": self.length_normalization,
        }  # fmt: skip

    @property
    def needs_mu_of_tokens(self) -> bool:
        """Whether the ratio needs log μ of each token. Otherwise, the ratio needs only the sum over the tokens."""
        return self.ratio_level == "segment"

    def validate_loss(self) -> None:
        """Validate the settings. Warn the user if the objective has no upper bound.

        Raises:
            ValueError: a setting has the wrong type or is outside its range, a lower limit is above its upper limit, or
                `segment_tokens` is not the default and `ratio_level` is not `"segment"`.
        """
        check_types(self, LossArguments)
        check_choice(self, preset=tuple(PRESETS), ratio_level=RATIO_LEVELS, log_mu=LOG_MU_SOURCES)
        check_at_least(1, self, "segment_tokens")
        if self.segment_tokens != SEGMENT_TOKENS and self.ratio_level != "segment":
            raise ValueError(
                f"segment_tokens={self.segment_tokens} needs ratio_level='segment', not {self.ratio_level!r}. Set "
                "ratio_level, or leave segment_tokens out."
            )
        if not self.limits.bounded:  # `limits` raises a ValueError that names an invalid limit.
            warn_user(
                f"a_neg={self.limits.a_neg:g} is above 0: the objective has no upper bound once a reward is negative "
                "(Prop. 3.2), and off-policy the model collapses. Use it only for comparison. TOPR has a_neg=0."
            )


@dataclass
class CurationArguments:
    """Settings for the baseline and the choice of rows (arXiv 2503.14286, Sec. 3.2 and 4.3).

    [`TOPRConfig`] and [`OfflineTOPRConfig`] describe them. Rows are chosen from a generation batch online, and from the
    dataset offline.
    """

    baseline: Baseline = field(
        default="mean", metadata={"help": "Baseline c in R = R0 - c: a number, 'mean' or 'group_mean'."}
    )
    effective_positive_share: float | None = field(
        default=None, metadata={"help": "Target effective share of positives in (0, 1]; the baseline is solved for it."}
    )
    curation: str = field(
        default="none",
        metadata={
            "help": "Rule that chooses the rows to train on. If rewards say right or wrong: 'repeated_positives' "
            "(right answers alone, repeated) or 'balanced' (half right, half wrong). "
            f"All rules: {', '.join(CURATIONS)}."
        },
    )
    iteration_size: int | None = field(default=None, metadata={"help": "Number of rows to choose."})
    curation_positive_share: float = field(
        default=0.5, metadata={"help": "Share of positives that curation='positive_share' chooses."}
    )

    def choose(
        self, rewards: ArrayLike, problem_ids: ArrayLike, seed: int, sample_ids: ArrayLike | None = None, **changes: Any
    ) -> tuple[FloatArray, Curated]:
        """Call `topr_trl.curation.compose` with these settings. `changes` replace individual arguments."""
        own: dict[str, Any] = {
            "baseline": parse_baseline(self.baseline), "effective_positive_share": self.effective_positive_share,
            "rule": self.curation, "size": self.iteration_size, "positive_share": self.curation_positive_share,
        }  # fmt: skip
        given = own | changes
        if given["rule"] != "positive_share":  # `changes` can have another rule, which takes no share.
            del given["positive_share"]
        return compose(rewards, problem_ids, sample_ids=sample_ids, seed=seed, **given)

    def validate_curation(self) -> None:
        """Validate the settings. Convert a baseline that is a number, or the text of a number, to a `float`.

        Raises:
            ValueError: a setting has the wrong type or is outside its range, or two settings contradict each other.
        """
        self.baseline = parse_baseline(self.baseline)
        check_types(self, CurationArguments, but=("baseline",))
        check_choice(self, curation=CURATIONS)
        share = self.effective_positive_share
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"effective_positive_share must be in (0, 1], not {share}.")
        if share is not None and self.baseline != "mean":
            raise ValueError(
                f"baseline={self.baseline} and effective_positive_share={share} both set the baseline. Remove one "
                "of the two settings."
            )
        check_at_least(1, self, "iteration_size")
        if self.iteration_size is not None and self.curation == "none":
            raise ValueError("iteration_size needs a curation rule; set curation='uniform' to draw rows at random.")
        self._check_shares()

    def _check_shares(self) -> None:
        """Raise a ValueError if a share is out of range, or the rule contradicts one of the shares or the baseline."""
        rule, share, of_rows = self.curation, self.effective_positive_share, self.curation_positive_share
        if not 0 <= of_rows <= 1:
            raise ValueError(f"curation_positive_share must be in [0, 1], not {of_rows}.")
        if of_rows != CurationArguments.curation_positive_share and rule != "positive_share":
            raise ValueError(
                f"curation_positive_share={of_rows:g} has no effect with curation={rule!r}: only "
                "curation='positive_share' uses it. Remove it."
            )
        if rule == "balanced" and (share is not None or self.baseline != "mean"):
            name, value = ("baseline", self.baseline) if share is None else ("effective_positive_share", share)
            raise ValueError(
                f"curation='balanced' gives right and wrong rows the same weight: its baseline is the middle between "
                f"the two rewards, and {name}={value} would change it. Remove {name}."
            )
        # A share below 1 needs chosen rows of both signs. With share 1, `positive_share` must choose positives only.
        is_reached = of_rows == 1 if share == 1 else 0 < of_rows < 1
        of_one_sign = rule in ("positives", "repeated_positives") or (rule == "positive_share" and not is_reached)
        if share is not None and of_one_sign:
            how = f" with curation_positive_share={of_rows:g}" * (rule == "positive_share")
            raise ValueError(
                f"effective_positive_share={share:g} cannot be reached with the rows that curation={rule!r}{how} "
                "chooses. Remove one of these settings."
            )


@dataclass
class TOPRArguments(CurationArguments, LossArguments):
    """Settings that online and offline training share. [`TOPRConfig`] and [`OfflineTOPRConfig`] describe them."""

    optim: str = field(default="adafactor", metadata={"help": "Optimizer. The paper's: Adafactor."})
    learning_rate: float = field(default=5e-7, metadata={"help": "Learning rate. The paper's: 5e-7."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule. The paper's: constant."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Leave NaN and infinite losses out of the logged loss."}
    )
    share_prompts: bool | None = field(
        default=None,
        metadata={
            "help": "true or false. Compute a prompt once for adjacent completions. Training on stored rows then "
            "reads the rows in a different order if a step has 32 rows or more. Default: true on a CPU."
        },
    )

    def validate_topr(self) -> None:
        """Raise a ValueError if a setting is invalid, or conflicts with the settings of Accelerate or DeepSpeed."""
        self.validate_loss()
        self.validate_curation()
        check_types(self, TOPRArguments, but=("baseline",))
        if getattr(self, "ignore_data_skip", False):
            raise ValueError("ignore_data_skip=True: a resumed run would read rows of the epoch again. Remove it.")
        launched = os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") == "2"
        offloaded = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
        for deepspeed in (os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), getattr(self, "deepspeed", None)):
            offloaded = offloaded or offloads_optimizer(deepspeed)
        refuse_adafactor(self.optim, launched, offloaded)
        refuse_split_sequences(getattr(self, "parallelism_config", None))

    def validate_sharding(self) -> None:
        """Raise a ValueError if the optimizer does not work with `fsdp`.

        Call this method after transformers has parsed `fsdp_config`.
        """
        fsdp: dict[str, Any] = getattr(self, "fsdp_plugin_args", None) or {}
        refuse_adafactor(self.optim, fsdp.get("fsdp_version") == 2, offloaded=False)


@dataclass
class ReplayArguments:
    """Settings for the replay of rows from earlier generation batches. [`TOPRConfig`] describes them."""

    replay_share: float = field(
        default=0.0, metadata={"help": "Share of rows from earlier generation batches among the rows trained on."}
    )
    replay_size: int | None = field(
        default=None, metadata={"help": "Number of rows kept for replay. Default: 8 generation batches."}
    )
    replay_rule: str = field(
        default="newest", metadata={"help": f"Rule that chooses the rows kept for replay: {', '.join(REPLAY_RULES)}."}
    )

    def validate_replay(self, micro_batch: int, micro_batches: int, processes: int, beta: float) -> None:
        """Validate the replay settings.

        Args:
            micro_batch (`int`): Number of fresh rows in a micro-batch of one process.
            micro_batches (`int`): Number of micro-batches in a generation batch of one process.
            processes (`int`): Number of processes.
            beta (`float`): Coefficient of TRL's KL term.

        Raises:
            ValueError: a setting has the wrong type, is outside its range, does not fit the batch sizes, or has no
                effect without `replay_share`; or rows are replayed and `beta` is not 0.
        """
        check_types(self, ReplayArguments)
        check_choice(self, replay_rule=REPLAY_RULES)
        check_at_least(1, self, "replay_size")
        if not 0 <= self.replay_share < 1:
            raise ValueError(f"replay_share must be at least 0 and below 1, not {self.replay_share}.")
        if not self.replay_share:
            for name, default in (("replay_size", None), ("replay_rule", "newest")):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name}={value} needs replay_share above 0. Set replay_share, or leave {name} out."
                    )
            return
        if beta != 0:
            raise ValueError(
                f"replay_share={self.replay_share} with beta={beta}: TRL's KL term needs rows of the current "
                "policy, and replayed rows are from older policies. Set beta=0 (the paper's), or replay_share=0."
            )
        again = self.rows_again(micro_batch)
        if again == 0:
            raise ValueError(
                f"replay_share={self.replay_share} adds no row to a micro-batch of {micro_batch} fresh rows. Raise "
                "replay_share or per_device_train_batch_size."
            )
        needed = again * micro_batches * processes
        if self.replay_size is not None and self.replay_size < needed:
            raise ValueError(
                f"replay_share={self.replay_share} replays {needed} rows with each generation batch, and "
                f"replay_size={self.replay_size} keeps fewer. Raise replay_size, or leave it out."
            )

    def rows_again(self, micro_batch: int) -> int:
        """Return the number of replayed rows for a micro-batch with `micro_batch` fresh rows."""
        return round(micro_batch * self.replay_share / (1 - self.replay_share))
