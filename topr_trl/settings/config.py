"""Settings for the two trainers: TRL's own settings, and TOPR's."""

import os
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike
from trl import GRPOConfig, SFTConfig

from topr_trl.baseline import BASELINES, FloatArray
from topr_trl.curation import CURATIONS, Curated, compose
from topr_trl.loss import PRESETS, RATIO_LEVELS, TruncationLimits
from topr_trl.settings.checks import check_at_least, check_choice, check_type, check_types
from topr_trl.settings.unsupported import (
    GRPO_ONLY,
    LIKE_OFFLINE_TOPR,
    LIKE_TOPR,
    SFT_ONLY,
    is_loss,
    needs_metric_for_best_model,
    offloads_optimizer,
    refuse_adafactor,
    refuse_filters,
    refuse_generation_kwargs,
    refuse_offloading_without_accelerator,
    refuse_settings,
    refuse_split_sequences,
    refuse_unsupported_order,
)
from topr_trl.user_warnings import warn_user

LOG_MU_SOURCES = ("trainer", "sampler")
REPLAY_RULES = ("newest", "negatives", "anna_karenina")
REPLAYED_BATCHES = 8  # generation batches that a replay buffer holds by default

if TYPE_CHECKING:
    Baseline = float | str
else:  # HfArgumentParser reads `float | str` as float and then rejects 'mean', so it gets text, parsed after it.
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
        default="sequence", metadata={"help": "'sequence' (TOPR); 'token' and 'geometric' for comparison only."}
    )
    length_normalization: bool = field(default=True, metadata={"help": "Divide the loss by the completion's length."})
    log_mu: str = field(default="trainer", metadata={"help": "Source of log μ: 'trainer' (own forward) or 'sampler'."})

    @property
    def limits(self) -> TruncationLimits:
        """Limits of the preset, with the limits that were set singly in their place."""
        given = {name: getattr(self, name) for name in ("a_pos", "b_pos", "a_neg", "b_neg")}
        return replace(PRESETS[self.preset], **{name: float(v) for name, v in given.items() if v is not None})

    def validate_loss(self) -> None:
        """Raise a ValueError if a setting is outside its range, or a lower limit is above the upper limit."""
        check_types(self, LossArguments)
        check_choice(self, preset=tuple(PRESETS), ratio_level=RATIO_LEVELS, log_mu=LOG_MU_SOURCES)
        if not self.limits.bounded:  # `limits` raises with the limit's name
            warn_user(
                f"a_neg={self.limits.a_neg:g} is above 0: the objective has no upper bound once a reward is negative "
                "(Prop. 3.2), and off-policy the model collapses. Good for a comparison; TOPR has a_neg=0."
            )


@dataclass
class CurationArguments:
    """Settings for the baseline and the choice of rows (arXiv 2503.14286, Sec. 3.2 and 4.3).

    [`TOPRConfig`] and [`OfflineTOPRConfig`] describe them. A round of rows is a generation batch online, and the
    dataset offline.
    """

    baseline: Baseline = field(
        default="mean", metadata={"help": "Baseline c in R = R0 - c: a number, 'mean' or 'group_mean'."}
    )
    effective_positive_share: float | None = field(
        default=None, metadata={"help": "Target effective share of positives in (0, 1]; the baseline is solved for it."}
    )
    curation: str = field(default="none", metadata={"help": f"Rows to train on: {', '.join(CURATIONS)}."})
    iteration_size: int | None = field(default=None, metadata={"help": "Number of rows to choose."})
    curation_positive_share: float = field(
        default=0.5, metadata={"help": "Share of positives that curation='positive_share' chooses."}
    )

    def choose(
        self, rewards: ArrayLike, problem_ids: ArrayLike, seed: int, sample_ids: ArrayLike | None = None, **changes: Any
    ) -> tuple[FloatArray, Curated]:
        """Call `topr_trl.curation.compose` with these settings. `changes` replace single arguments."""
        own: dict[str, Any] = {
            "baseline": parse_baseline(self.baseline), "effective_positive_share": self.effective_positive_share,
            "rule": self.curation, "size": self.iteration_size, "positive_share": self.curation_positive_share,
        }  # fmt: skip
        return compose(rewards, problem_ids, sample_ids=sample_ids, seed=seed, **{**own, **changes})

    def validate_curation(self) -> None:
        """Validate the settings, and turn the baseline into a `float` if it is a number.

        Raises:
            ValueError: a setting is outside its range, or two settings contradict each other.
        """
        self.baseline = parse_baseline(self.baseline)
        check_types(self, CurationArguments, but=("baseline",))
        check_choice(self, curation=CURATIONS)
        share = self.effective_positive_share
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"effective_positive_share must be in (0, 1], not {share}.")
        if share is not None and self.baseline != "mean":
            raise ValueError(
                f"baseline={self.baseline} and effective_positive_share={share} both set the baseline. Keep one of "
                "them (baseline='mean', the default, counts as none)."
            )
        if share is not None and self.curation == "positives":
            raise ValueError(
                "curation='positives' leaves no negatives, so effective_positive_share cannot be reached. Remove one."
            )
        if share == 1 and self.curation == "positive_share" and self.curation_positive_share < 1:
            raise ValueError(
                "effective_positive_share=1 makes every completion a positive, and curation='positive_share' wants "
                "negatives too. Remove one."
            )
        check_at_least(1, self, "iteration_size")
        if self.iteration_size is not None and self.curation == "none":
            raise ValueError("iteration_size needs a curation rule; set curation='uniform' to draw rows at random.")
        if not 0 <= self.curation_positive_share <= 1:
            raise ValueError(f"curation_positive_share must be in [0, 1], not {self.curation_positive_share}.")


@dataclass
class TOPRArguments(CurationArguments, LossArguments):
    """Settings that both trainers share. [`TOPRConfig`] and [`OfflineTOPRConfig`] describe them."""

    optim: str = field(default="adafactor", metadata={"help": "Optimizer. The paper's: Adafactor."})
    learning_rate: float = field(default=5e-7, metadata={"help": "Learning rate. The paper's: 5e-7."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule. The paper's: constant."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Log a loss of NaN as 0."})
    share_prompts: bool | None = field(
        default=None,
        metadata={
            "help": "true or false. Compute a prompt once for neighboring completions. Training on stored rows then "
            "reads the rows in another order if a step has 32 rows or more. Default: true on a CPU."
        },
    )

    def validate_topr(self) -> None:
        """Raise a ValueError if a setting is invalid, or conflicts with the settings of Accelerate's launcher."""
        self.validate_loss()
        self.validate_curation()
        check_type("share_prompts", self.share_prompts, bool | None)
        launched = os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") == "2"
        offloaded = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
        for deepspeed in (os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), getattr(self, "deepspeed", None)):
            offloaded = offloaded or offloads_optimizer(deepspeed)
        refuse_adafactor(self.optim, launched, offloaded)
        refuse_split_sequences(getattr(self, "parallelism_config", None))

    def validate_sharding(self) -> None:
        """Raise a ValueError if the optimizer does not work with `fsdp`.

        Call it after transformers has parsed `fsdp_config`.
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
        default=None, metadata={"help": "Rows kept for replay_share. Default: 8 generation batches."}
    )
    replay_rule: str = field(
        default="newest", metadata={"help": f"Rows kept for replay_share: {', '.join(REPLAY_RULES)}."}
    )

    def validate_replay(self, micro_batch: int, micro_batches: int, processes: int, beta: float) -> None:
        """Raise a ValueError if the replay settings do not fit the batch sizes.

        Args:
            micro_batch: fresh rows of a micro-batch of one process.
            micro_batches: micro-batches of a generation batch of one process.
            processes: number of processes.
            beta: coefficient of TRL's KL term.
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
                f"replay_share={self.replay_share} with beta={beta}: TRL's KL term needs rows of the present "
                "policy, and rows that are used again are not. Set beta=0 (the paper's), or replay_share=0."
            )
        again = self.rows_again(micro_batch)
        if again == 0:
            raise ValueError(
                f"replay_share={self.replay_share} is less than half a row of a micro-batch with {micro_batch} fresh "
                "ones. Raise it, or per_device_train_batch_size."
            )
        needed = again * micro_batches * processes
        if self.replay_size is not None and self.replay_size < needed:
            raise ValueError(
                f"replay_share={self.replay_share} uses {needed} rows again with each generation batch, and "
                f"replay_size={self.replay_size} keeps fewer. Raise it, or leave it out."
            )

    def rows_again(self, micro_batch: int) -> int:
        """Return the number of replayed rows for a micro-batch with `micro_batch` fresh rows."""
        return round(micro_batch * self.replay_share / (1 - self.replay_share))


@dataclass
class TOPRConfig(ReplayArguments, TOPRArguments, GRPOConfig):
    """Settings for [`TOPRTrainer`]: all settings of [`~trl.GRPOConfig`], and the parameters below.

    The defaults are those of the paper (arXiv 2503.14286, Sec. 4.1), except for `baseline`. R is the reward after the
    baseline is subtracted. π is the policy in training, and μ is the policy that wrote the completion.

    Settings that only the losses of GRPO use, such as `epsilon`, `delta` and `scale_rewards`, must keep their defaults.
    `vllm_importance_sampling_correction` never changes the loss. While it is on, TRL measures the distance between
    the log-probabilities of vLLM and of the trainer, and logs it as `sampling/sampling_logp_difference`.
    With `load_best_model_at_end`, the best model is the one with the highest `eval_reward`.

    In the tables of `log_completions`, `advantage` is R. `weight` and `log_ratio` are the last values that the loss
    computed for the row. They are empty if the loss has not used the row.

    Example:

    ```python
    >>> from topr_trl import TOPRConfig

    >>> args = TOPRConfig("out", effective_positive_share=0.2, use_cpu=True, bf16=False)
    >>> args.limits
    TruncationLimits(a_pos=1.0, b_pos=1.0, a_neg=0.0, b_neg=1.0)
    ```

    Parameters:
        > Parameters that control the loss

        preset (`str`, *optional*, defaults to `"topr"`):
            Name of a set of truncation limits (Table 1). Can be:

            - `"topr"`: the paper's method, with a+ = b+ = b- = 1 and a- = 0.
            - `"positives_only"`: completions with R < 0 have weight 0. This is reward-weighted fine-tuning.
            - `"reinforce"`: every weight is 1. The objective has no upper bound, and off-policy the model collapses.
            - `"opr"`: plain importance sampling. The weight is the ratio π/μ.
            - `"tis"`: truncated importance sampling. The weight is the ratio π/μ, and at most 1.
        a_pos (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R >= 0 (a+ in Eq. 7). `None` uses the preset's limit.
        b_pos (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R >= 0 (b+ in Eq. 7). `None` uses the preset's limit.
        a_neg (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R < 0 (a- in Eq. 7). `None` uses the preset's limit.
        b_neg (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R < 0 (b- in Eq. 7). `None` uses the preset's limit.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio π/μ is computed. `"sequence"` is the paper's: the product over the tokens of a
            completion. `"token"` and `"geometric"` (the mean over tokens) are not TOPR. They exist for comparison.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, *optional*, defaults to `"trainer"`):
            Source of log μ. `"trainer"` computes it with the trainer's own forward. `"sampler"` takes the
            log-probabilities that vLLM reported, and needs `use_vllm=True`. Rounding in vLLM changes the ratio of long
            completions.

        > Parameters that control the baseline and the choice of rows

        baseline (`float` or `str`, *optional*, defaults to `"mean"`):
            Baseline c, which is subtracted from each reward: R = R0 - c. Can be a number, `"mean"` (the mean reward of
            a generation batch) or `"group_mean"` (the mean reward of the completions of the same prompt). The paper
            uses 0 with rewards of ±1. Text that holds a number becomes a `float`.

            The mean gives positives and negatives the same total weight, for any scale of rewards, before rows are
            chosen. So the effective share of positives stays at 50% in every iteration. With `length_normalization`
            the baseline also changes the length of completions. If the mean reward is below 0, a baseline of 0 favors
            long completions. The mean removes this effect if reward and length are independent.
        effective_positive_share (`float`, *optional*):
            Target p~, in (0, 1], for the share of positives in the weight of the rows (Sec. 3.2). The baseline is then
            solved from the rewards, and `baseline` must keep its default. The paper's best values are 0.1 to 0.2.
        curation (`str`, *optional*, defaults to `"none"`):
            Rule that chooses the rows to train on from a generation batch (Sec. 4.3). Can be `"none"` (all rows),
            `"uniform"`, `"positives"`, `"positive_share"` or `"anna_karenina"`. See [`curate`].
        iteration_size (`int`, *optional*):
            Number of rows to choose. Needs a `curation` other than `"none"`. See [`curate`] for the meaning of `None`.
        curation_positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives, in [0, 1], among the rows that `curation="positive_share"` chooses.

        > Parameters that control replay

        replay_share (`float`, *optional*, defaults to `0.0`):
            Share, in [0, 1), of replayed rows among the rows trained on. A replayed row comes from an earlier
            generation batch and keeps the log μ that was computed when it was fresh. Replayed rows are added to the
            fresh rows. A micro-batch then has up to `per_device_train_batch_size / (1 - replay_share)` rows, and needs
            memory for them.
        replay_size (`int`, *optional*):
            Number of rows kept for replay, over all processes. Each process keeps an equal part, rounded up. `None`
            keeps 8 generation batches, or all rows of `replay_dataset` if those are more. If `replay_dataset` has
            more rows than this, only its last rows are kept.
        replay_rule (`str`, *optional*, defaults to `"newest"`):
            Rule that chooses the rows kept for replay:

            - `"newest"`: the newest rows.
            - `"negatives"`: the newest rows with R < 0.
            - `"anna_karenina"`: the newest rows with R < 0, and the newest positive of each prompt and process.

            Rows with R = 0 are never kept. A negative is removed when its weight falls below 0.01.

        > Parameters that control generation and training

        top_k (`int`, *optional*):
            Number of most likely tokens to sample from. `None` means 500, the paper's value. With `log_mu="sampler"`,
            `None` means all tokens, since vLLM's log-probabilities of a truncated distribution are too large.
        loss_type (`str`, *optional*, defaults to `"topr"`):
            Always `"topr"`. The losses of GRPO cannot be used.
        optim (`str`, *optional*, defaults to `"adafactor"`):
            Optimizer. The default is the paper's.
        learning_rate (`float`, *optional*, defaults to `5e-07`):
            Learning rate. The default is the paper's.
        lr_scheduler_type (`str`, *optional*, defaults to `"constant"`):
            Schedule of the learning rate. The default is the paper's.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether to log a loss of NaN as 0. With `False`, training stops at a loss of NaN.
        share_prompts (`bool`, *optional*):
            Whether to compute a prompt once for all its completions in a micro-batch. Needs `"sdpa"` or `"eager"`
            attention and a model whose log π is measured to stay the same. The completions of a prompt become
            neighbors within each optimizer step. `None` means `True` on a CPU and `False` on other devices, where
            sharing has not been measured.
    """

    top_k: int | None = field(
        default=None,
        metadata={"help": "Most likely tokens to sample from. Default: 500, or all tokens with log_mu='sampler'."},
    )
    loss_type: str = field(default="topr", metadata={"help": "Always 'topr'."})

    def __post_init__(self) -> None:
        self.validate_topr()
        refuse_settings(self, GRPOConfig, "TOPRTrainer", GRPO_ONLY, LIKE_TOPR)
        self.loss_type = "topr"
        if self.log_mu == "sampler" and not self.use_vllm:
            raise ValueError(
                "log_mu='sampler' needs use_vllm=True: transformers' generate reports no log-probabilities."
            )
        if self.top_k is None:
            self.top_k = 0 if self.log_mu == "sampler" else 500
        self._choose_metric_for_best_model()
        super().__post_init__()
        self.validate_sharding()
        if self.share_prompts and min(self.per_device_train_batch_size, self.num_generations) < 2:
            raise ValueError(
                "share_prompts=True needs two completions of a prompt in a micro-batch. Raise "
                f"per_device_train_batch_size={self.per_device_train_batch_size} or "
                f"num_generations={self.num_generations}, or leave share_prompts out."
            )
        refuse_offloading_without_accelerator(self)
        self.validate_replay(self.per_device_train_batch_size, self.steps_per_generation, self.world_size, self.beta)
        if self.log_mu == "sampler":
            refuse_filters(self)
        refuse_generation_kwargs(self)
        generate_every = self.steps_per_generation * self.num_iterations
        corrected_kl = self.beta != 0 and getattr(self, "use_bias_correction_kl", False)
        if corrected_kl and self.gradient_accumulation_steps % generate_every != 0:
            raise ValueError(
                f"beta={self.beta} with use_bias_correction_kl=True needs the ratio of each token to the sampling "
                "weights once a batch is used for several optimizer steps, and TOPR's loss does not hold it. Set "
                "use_bias_correction_kl=False, or beta=0 (the paper's)."
            )

    def _choose_metric_for_best_model(self) -> None:
        """Select the best model by its reward, since the loss does not measure how good a model is.

        The loss is -mean(w · R), and w is 1 in evaluations. It raises a ValueError even if no best model is selected:
        callbacks such as transformers' `EarlyStoppingCallback` also read the metric.
        """
        args: Any = self
        if is_loss(args.metric_for_best_model):
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r}: the loss is -mean(w · R), which says nothing "
                "of how good a model is; with baseline='mean' each evaluation's is 0. Set metric_for_best_model="
                "'eval_reward', or leave it out."
            )
        if needs_metric_for_best_model(args) and args.metric_for_best_model is None:
            args.metric_for_best_model = "eval_reward"
            args.greater_is_better = True if args.greater_is_better is None else args.greater_is_better


@dataclass
class OfflineTOPRConfig(TOPRArguments, SFTConfig):
    """Settings for [`OfflineTOPRTrainer`]: all settings of [`~trl.SFTConfig`], and the parameters below.

    The defaults are those of the paper (arXiv 2503.14286, Sec. 4.1), except for `baseline`. R is the reward after the
    baseline is subtracted. π is the policy in training, and μ is the policy that wrote the completion.

    Settings that only supervised fine-tuning uses, such as `packing` and `assistant_only_loss`, must keep their
    defaults.

    Example:

    ```python
    >>> from topr_trl import OfflineTOPRConfig

    >>> args = OfflineTOPRConfig("out", baseline="0.5", use_cpu=True, bf16=False)
    >>> args.baseline
    0.5
    ```

    Parameters:
        > Parameters that control the loss

        preset (`str`, *optional*, defaults to `"topr"`):
            Name of a set of truncation limits (Table 1). Can be:

            - `"topr"`: the paper's method, with a+ = b+ = b- = 1 and a- = 0.
            - `"positives_only"`: completions with R < 0 have weight 0. This is reward-weighted fine-tuning.
            - `"reinforce"`: every weight is 1. The objective has no upper bound, and off-policy the model collapses.
            - `"opr"`: plain importance sampling. The weight is the ratio π/μ.
            - `"tis"`: truncated importance sampling. The weight is the ratio π/μ, and at most 1.
        a_pos (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R >= 0 (a+ in Eq. 7). `None` uses the preset's limit.
        b_pos (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R >= 0 (b+ in Eq. 7). `None` uses the preset's limit.
        a_neg (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R < 0 (a- in Eq. 7). `None` uses the preset's limit.
        b_neg (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R < 0 (b- in Eq. 7). `None` uses the preset's limit.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio π/μ is computed. `"sequence"` is the paper's: the product over the tokens of a
            completion. `"token"` and `"geometric"` (the mean over tokens) are not TOPR. They exist for comparison.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, *optional*, defaults to `"trainer"`):
            Source of log μ. `"trainer"` takes the column `mu_logps`, or computes log μ with the starting weights
            before the first step. `"sampler"` takes the column `sampler_logps`. Rounding in a sampler changes the
            ratio of long completions.

        > Parameters that control the baseline and the choice of rows

        baseline (`float` or `str`, *optional*, defaults to `"mean"`):
            Baseline c, which is subtracted from each reward: R = R0 - c. Can be a number, `"mean"` (the mean reward of
            the dataset) or `"group_mean"` (the mean reward of the completions of the same prompt). The paper uses 0
            with rewards of ±1. Text that holds a number becomes a `float`.

            The mean gives positives and negatives the same total weight, for any scale of rewards, before rows are
            chosen. So the effective share of positives stays at 50% in every iteration. With `length_normalization`
            the baseline also changes the length of completions. If the mean reward is below 0, a baseline of 0 favors
            long completions. The mean removes this effect if reward and length are independent.
        effective_positive_share (`float`, *optional*):
            Target p~, in (0, 1], for the share of positives in the weight of the rows (Sec. 3.2). The baseline is then
            solved from the rewards, and `baseline` must keep its default. The paper's best values are 0.1 to 0.2.
        curation (`str`, *optional*, defaults to `"none"`):
            Rule that chooses the rows to train on from the dataset (Sec. 4.3). Can be `"none"` (all rows), `"uniform"`,
            `"positives"`, `"positive_share"` or `"anna_karenina"`. See [`curate`].
        iteration_size (`int`, *optional*):
            Number of rows to choose. Needs a `curation` other than `"none"`. See [`curate`] for the meaning of `None`.
        curation_positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives, in [0, 1], among the rows that `curation="positive_share"` chooses.

        > Parameters that control training

        num_train_epochs (`float`, *optional*, defaults to `1.0`):
            Number of epochs over the chosen rows. The default is the paper's.
        max_length (`int`, *optional*):
            Maximum number of tokens of prompt and completion. A longer row is an error, and so is a row longer than
            the model's context. Rows are never cut, since the reward belongs to the whole completion.
        optim (`str`, *optional*, defaults to `"adafactor"`):
            Optimizer. The default is the paper's.
        learning_rate (`float`, *optional*, defaults to `5e-07`):
            Learning rate. The default is the paper's.
        lr_scheduler_type (`str`, *optional*, defaults to `"constant"`):
            Schedule of the learning rate. The default is the paper's.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether to log a loss of NaN as 0. With `False`, training stops at a loss of NaN.
        sort_by_length (`bool`, *optional*, defaults to `True`):
            Whether to sort the rows of each optimizer step by length. The micro-batches then have less padding, and
            each step keeps its rows and its gradient. Has no effect on rows that are read in a fixed order, with
            `padding_free=True`, or with the auxiliary loss of a mixture of experts.
        share_prompts (`bool`, *optional*):
            Whether to compute a prompt once for all its completions in a micro-batch. Needs `"sdpa"` or `"eager"`
            attention and a model whose log π is measured to stay the same. Up to 8 rows of a prompt then stay
            together in training, or fewer, so that a step has at least 16 prompts. `None` means `True` on a CPU if
            sharing saves at least 10% of the tokens. It means `False` on other devices, where sharing has not been
            measured.

        > Parameters that control logging

        log_completions (`bool`, *optional*, defaults to `False`):
            Whether to log the rows of the last optimizer step with reward, advantage (R), weight and log-ratio. The
            table is written to `output_dir/completions/completions_{step}.parquet`. It is printed if `rich` is
            installed, and sent to wandb and trackio if `report_to` names them. Evaluation rows are not logged.
        num_completions_to_print (`int`, *optional*):
            Number of completions to print, drawn at random. `None` prints all. The file always holds all.
    """

    num_train_epochs: float = field(default=1.0, metadata={"help": "Epochs over the rows. The paper's: 1."})
    max_length: int | None = field(
        default=None, metadata={"help": "Maximum number of tokens in a row; a longer row is an error."}
    )
    sort_by_length: bool = field(
        default=True, metadata={"help": "Sort the rows of a step by length, for less padding."}
    )
    log_completions: bool = field(default=False, metadata={"help": "Log the rows of the last step at each log."})
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "Number of completions to print. Default: all."}
    )

    def __post_init__(self) -> None:
        self.validate_topr()
        for name in ("sort_by_length", "log_completions"):
            check_type(name, getattr(self, name), bool)
        check_type("num_completions_to_print", self.num_completions_to_print, int | None)
        refuse_settings(self, SFTConfig, "OfflineTOPRTrainer", SFT_ONLY, LIKE_OFFLINE_TOPR)
        metric = self.metric_for_best_model
        if is_loss(metric) or (metric is None and needs_metric_for_best_model(self)):
            raise ValueError(
                "The best checkpoint, and reduce_lr_on_plateau, would go by the loss (metric_for_best_model), which "
                "rises as negatives become less likely: the model before training can have the lowest. Name a metric "
                "that a callback of yours adds to evaluations, or keep the checkpoints and compare them with topr "
                "evaluate."
            )
        template = getattr(self, "chat_template_path", None)
        if template is not None:
            self.chat_template_path = template = os.fspath(template)  # TRL accepts only text
        if (
            template and template.endswith((".jinja", ".j2")) and not Path(template).is_file()
        ):  # TRL would look on the Hub
            raise ValueError(f"chat_template_path: there is no file {template}.")
        super().__post_init__()
        self.validate_sharding()
        refuse_unsupported_order(self)
        refuse_offloading_without_accelerator(self)
