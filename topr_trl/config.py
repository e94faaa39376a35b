"""Settings of the two trainers: TRL's own, with TOPR's beside them. Defaults are the paper's, but for the baseline."""

import os
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike
from trl import GRPOConfig, SFTConfig

from topr_trl.baseline import BASELINES, FloatArray
from topr_trl.checks import check_at_least, check_choice, check_types
from topr_trl.curation import CURATIONS, Curated, compose
from topr_trl.loss import PRESETS, RATIO_LEVELS, TruncationLimits
from topr_trl.refused import (
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
from topr_trl.warn import warn_user

LOG_MU_SOURCES = ("trainer", "sampler")
REPLAY_RULES = ("newest", "negatives", "anna_karenina")
REPLAYED_BATCHES = 8  # generation batches that a replay buffer holds by default

_DEFAULT_BASELINE = "mean"

if TYPE_CHECKING:
    Baseline = float | str
else:  # HfArgumentParser would read `float | str` as float alone, and refuse 'mean'
    Baseline = str


@dataclass
class LossArguments:
    """How far the ratio π/μ counts in the loss (arXiv 2503.14286, Eq. 7), and where log μ comes from.

    Parameters:
        preset (`str`, defaults to `"topr"`):
            Truncation limits by name: `"topr"`, `"positives_only"`, `"reinforce"`, `"opr"` or `"tis"` (Table 1).
        a_pos, b_pos, a_neg, b_neg (`float`, *optional*):
            Single limits that replace the preset's: the ratio π/μ of a completion is clipped to `[a_pos, b_pos]` if
            R >= 0 and to `[a_neg, b_neg]` if R < 0 (Eq. 7).
        ratio_level (`str`, defaults to `"sequence"`):
            `"sequence"` is the paper. `"token"` and `"geometric"` are not TOPR and exist for comparison only.
        length_normalization (`bool`, defaults to `True`):
            Divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, defaults to `"trainer"`):
            Where log μ comes from: the trainer's own forward with the weights μ had, or the log-probabilities that
            the `"sampler"` reported. Over long completions the numerical noise of a sampler alone moves the ratio.
    """

    preset: str = field(default="topr", metadata={"help": f"Truncation limits by name: {', '.join(PRESETS)}."})
    a_pos: float | None = field(default=None, metadata={"help": "Lower limit of the ratio where R >= 0."})
    b_pos: float | None = field(default=None, metadata={"help": "Upper limit of the ratio where R >= 0."})
    a_neg: float | None = field(default=None, metadata={"help": "Lower limit of the ratio where R < 0."})
    b_neg: float | None = field(default=None, metadata={"help": "Upper limit of the ratio where R < 0."})
    ratio_level: str = field(
        default="sequence", metadata={"help": "'sequence' (TOPR); 'token' and 'geometric' for comparison only."}
    )
    length_normalization: bool = field(default=True, metadata={"help": "Divide the loss by the completion's length."})
    log_mu: str = field(default="trainer", metadata={"help": "Whose log μ: 'trainer' (own forward) or 'sampler'."})

    @property
    def limits(self) -> TruncationLimits:
        """The truncation limits: the preset's, single ones replaced."""
        given = {name: getattr(self, name) for name in ("a_pos", "b_pos", "a_neg", "b_neg")}
        return replace(PRESETS[self.preset], **{name: float(v) for name, v in given.items() if v is not None})

    def validate_loss(self) -> None:
        """Raise a ValueError if a setting is outside its range, or a lower limit is above its upper one."""
        check_types(self, LossArguments)
        check_choice(self, preset=tuple(PRESETS), ratio_level=RATIO_LEVELS, log_mu=LOG_MU_SOURCES)
        if not self.limits.bounded:  # `limits` raises with the limit's name
            warn_user(
                f"a_neg={self.limits.a_neg:g} is above 0: the objective has no upper bound once a reward is negative "
                "(Prop. 3.2), and off-policy the model collapses. Good for a comparison; TOPR has a_neg=0."
            )


@dataclass
class CurationArguments:
    """The baseline and the rows that are trained on (arXiv 2503.14286, Sec. 3.2 and 4.3).

    Parameters:
        baseline (`float` or `str`, defaults to `"mean"`):
            c in R = R0 - c: a number, `"mean"` (of the rows of a round) or `"group_mean"` (of the rows of the problem).
            The mean gives the positives and negatives of a round as much weight, whatever the rewards, before rows are
            chosen. The paper's: 0, for rewards ±1.

            With `length_normalization`, c also moves the length of completions: at π = μ, E[(R0 - c)/|y| · ∇log π]
            depends on c. If the mean reward is below 0, c = 0 pushes toward long completions. The mean cancels this
            push if reward and length are independent. This is the best argument for the default.

            `"mean"` and `"group_mean"` hold the effective share of positives at 50% in every iteration. On one task
            a number that gave 50% in the first of eight iterations and then stayed ended higher.
        effective_positive_share (`float`, *optional*):
            Target p~ in (0, 1]: the baseline is then solved from the data (Sec. 3.2). The paper finds 0.1 to 0.2 best.
        curation (`str`, defaults to `"none"`):
            Which rows of a round are trained on: `"none"` (all), `"uniform"`, `"positives"`, `"positive_share"` or
            `"anna_karenina"` (Sec. 4.3). A round is the dataset offline, and a generation batch online.
        iteration_size (`int`, *optional*):
            Rows of a round to keep. See `topr_trl.curation.curate` for what leaving it out means.
        curation_positive_share (`float`, defaults to `0.5`):
            Share of positives that `curation="positive_share"` keeps.
    """

    baseline: Baseline = field(
        default=_DEFAULT_BASELINE, metadata={"help": "c in R = R0 - c: a number, 'mean' or 'group_mean'."}
    )
    effective_positive_share: float | None = field(
        default=None, metadata={"help": "Target effective share of positives in (0, 1]; the baseline is solved for it."}
    )
    curation: str = field(default="none", metadata={"help": f"Rows to train on: {', '.join(CURATIONS)}."})
    iteration_size: int | None = field(default=None, metadata={"help": "Rows of a round to keep."})
    curation_positive_share: float = field(
        default=0.5, metadata={"help": "Share of positives kept by curation='positive_share'."}
    )

    @property
    def baseline_value(self) -> float | str:
        """The baseline as a number if it is one, else its name; a ValueError if it is neither."""
        if self.baseline in BASELINES:
            return self.baseline
        try:
            value = float(self.baseline)
        except ValueError:
            choices = ", ".join(BASELINES)
            raise ValueError(f"baseline must be a number or one of {choices}, not {self.baseline!r}.") from None
        if not isfinite(value):
            raise ValueError(f"baseline must be finite, not {self.baseline}.")
        return value

    def choose(
        self, rewards: ArrayLike, problem_ids: ArrayLike, seed: int, sample_ids: ArrayLike | None = None, **changes: Any
    ) -> tuple[FloatArray, Curated]:
        """`topr_trl.curation.compose` with these settings, except for `changes` to its arguments."""
        own: dict[str, Any] = {
            "baseline": self.baseline_value, "effective_positive_share": self.effective_positive_share,
            "rule": self.curation, "size": self.iteration_size, "positive_share": self.curation_positive_share,
        }  # fmt: skip
        return compose(rewards, problem_ids, sample_ids=sample_ids, seed=seed, **{**own, **changes})

    def validate_curation(self) -> None:
        """Raise a ValueError if a setting is outside its range, or two contradict each other.

        Afterwards the baseline is text, as the command line gives it.
        """
        if isinstance(self.baseline, Real):
            self.baseline = str(self.baseline)
        check_types(self, CurationArguments)
        check_choice(self, curation=CURATIONS)
        baseline, share = self.baseline_value, self.effective_positive_share
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"effective_positive_share must be in (0, 1], not {share}.")
        if share is not None and baseline != _DEFAULT_BASELINE:
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
    """Settings of both trainers: [`LossArguments`], [`CurationArguments`], and other defaults than TRL's.

    Parameters:
        share_prompts (`bool`, *optional*):
            Compute a prompt once for all its completions in a micro-batch. Needs attention `"sdpa"` or `"eager"`, and a
            model whose log π is measured to stay the same. Rows of a prompt become neighbors: online within each step,
            offline also across steps, see [`OfflineTOPRConfig`]. Default: `True` on a CPU; offline only if it saves at
            least 10% of the tokens. Not measured on a GPU yet.
    """

    optim: str = field(default="adafactor", metadata={"help": "Optimizer. The paper's: Adafactor."})
    learning_rate: float = field(default=5e-7, metadata={"help": "Learning rate. The paper's: 5e-7."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule. The paper's: constant."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Log a loss that is NaN as 0."})
    share_prompts: bool | None = field(
        default=None,
        metadata={
            "help": "true or false. Compute a prompt once for neighboring completions. Training on stored rows then "
            "reads rows in another order, from 32 rows per step on. Default: true on a CPU."
        },
    )

    def validate_topr(self) -> None:
        """Raise a ValueError if settings cannot be used in what Accelerate's launcher has set up for this process."""
        self.validate_loss()
        self.validate_curation()
        launched = os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") == "2"
        offloaded = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
        for deepspeed in (os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), getattr(self, "deepspeed", None)):
            offloaded = offloaded or offloads_optimizer(deepspeed)
        refuse_adafactor(self.optim, launched, offloaded)
        refuse_split_sequences(getattr(self, "parallelism_config", None))

    def validate_sharding(self) -> None:
        """Raise a ValueError if `fsdp` and the optimizer do not fit; after transformers has read `fsdp_config`."""
        fsdp: dict[str, Any] = getattr(self, "fsdp_plugin_args", None) or {}
        refuse_adafactor(self.optim, fsdp.get("fsdp_version") == 2, offloaded=False)


@dataclass
class ReplayArguments:
    """Rows of earlier generation batches that are trained on again.

    Parameters:
        replay_share (`float`, defaults to `0`):
            Share of the rows trained on that are of earlier generation batches, used again with the log μ that they got
            when they were fresh. They come beside the fresh ones: a micro-batch has up to `1 / (1 - replay_share)`
            times `per_device_train_batch_size` rows, rounded, and needs the memory of as many.
        replay_size (`int`, *optional*):
            Rows that are kept for it, over all processes; each keeps its own part, rounded up. Of a larger
            `replay_dataset` the last are kept. Default: 8 generation batches, or the rows of `replay_dataset` if they
            are more.
        replay_rule (`str`, defaults to `"newest"`):
            Which rows are kept where there are more: `"newest"`; `"negatives"`, the newest negatives; or
            `"anna_karenina"`, the newest of all negatives and of each prompt's (and process's) newest positive. Rows
            with R = 0 are not kept, and a negative is removed when the loss has given it a weight below 0.01.
    """

    replay_share: float = field(
        default=0.0, metadata={"help": "Share of the rows trained on that are of earlier generation batches."}
    )
    replay_size: int | None = field(
        default=None, metadata={"help": "Rows kept for replay_share. Default: 8 generation batches."}
    )
    replay_rule: str = field(
        default="newest", metadata={"help": f"Rows kept for replay_share: {', '.join(REPLAY_RULES)}."}
    )

    def validate_replay(self, micro_batch: int, micro_batches: int, processes: int, beta: float) -> None:
        """Raise a ValueError if rows cannot be used again like this.

        Args:
            micro_batch, micro_batches: rows of a micro-batch, and micro-batches of a generation batch, of a process.
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
        """Rows that are used again beside the fresh ones of a micro-batch."""
        return round(micro_batch * self.replay_share / (1 - self.replay_share))


@dataclass
class TOPRConfig(ReplayArguments, TOPRArguments, GRPOConfig):
    """Settings of [`TOPRTrainer`]: those of [`~trl.GRPOConfig`], and of [`LossArguments`], [`CurationArguments`] and
    [`ReplayArguments`].

    Defaults that differ from TRL's are the paper's (Sec. 4.1): `optim="adafactor"`, `learning_rate=5e-7`,
    `lr_scheduler_type="constant"`, `top_k=500`, `loss_type="topr"`. Settings that belong to GRPO's losses alone
    (`epsilon`, `delta`, `scale_rewards`, ...) raise if they are given a value of their own. With `log_mu="sampler"` all
    tokens are sampled from: log-probabilities of what a filter leaves are larger than the trainer's. With
    `load_best_model_at_end` the best model is that of the highest `eval_reward`.
    `logging_nan_inf_filter=False`: training stops at NaN, instead of logging it as 0.

    `vllm_importance_sampling_correction` never multiplies the loss here. While it is on, TRL measures how far the
    sampler's log-probabilities are from the trainer's and logs it as `sampling/sampling_logp_difference`.

    In the tables of `log_completions`, `advantage` is R, and `weight` and `log_ratio` are what the loss last gave the
    row; they are empty where it has not used the row (yet).
    """

    top_k: int | None = field(
        default=None, metadata={"help": "Tokens sampled from. Default: 500, the paper's; all with log_mu='sampler'."}
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
        """Use the reward instead of transformers' default, the loss, which is -mean(w · R) with w = 1 in evaluations.

        The loss is refused in any case: callbacks such as transformers' `EarlyStoppingCallback` read the metric, too.
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
    """Settings of [`OfflineTOPRTrainer`]: those of [`~trl.SFTConfig`], [`LossArguments`] and [`CurationArguments`].

    Defaults that differ from TRL's are the paper's (Sec. 4.1): `optim="adafactor"`, `learning_rate=5e-7`,
    `lr_scheduler_type="constant"`, `num_train_epochs=1`. `max_length` is `None`: a row is never cut, since half a
    completion has neither the reward nor the probability of the whole; longer rows than `max_length` (or the model's
    context) are an error. Settings that belong to supervised fine-tuning alone raise if given a value of their own.
    `logging_nan_inf_filter=False`: training stops at NaN, instead of logging it as 0.

    Parameters:
        sort_by_length (`bool`, defaults to `True`):
            Sort the rows of each optimizer step by length, so that those of a micro-batch are about as long as each
            other and little padding is computed. The rows of a step, and its gradient, are the same without. Only a
            random order of rows is sorted, and only where rows are padded (`padding_free=False`) and there is no
            auxiliary loss of a mixture of experts.
        share_prompts (`bool`, *optional*):
            As in [`TOPRArguments`]. Rows of a prompt stay together, at most 8, and no more than leave 16 prompts in an
            optimizer step.
        log_completions (`bool`, defaults to `False`):
            At each log, show the rows of the last optimizer step with reward, advantage (R), weight and log-ratio:
            printed if `rich` is installed, in `output_dir/completions/completions_{{step}}.parquet`, and as a table in
            wandb and trackio if `report_to` names them. Rows of evaluation sets are not shown.
        num_completions_to_print (`int`, *optional*):
            How many of them to print, drawn at random; all are kept in the file. Default: all.
    """

    num_train_epochs: float = field(default=1.0, metadata={"help": "Epochs over the rows. The paper's: 1."})
    max_length: int | None = field(default=None, metadata={"help": "Longest row allowed, in tokens."})
    sort_by_length: bool = field(default=True, metadata={"help": "Sort the rows of a step: less padding."})
    log_completions: bool = field(default=False, metadata={"help": "At each log, show the rows of the last step."})
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Rows to print. Default: all."})

    def __post_init__(self) -> None:
        self.validate_topr()
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
            self.chat_template_path = template = os.fspath(template)  # TRL takes text alone
        if template and template.endswith((".jinja", ".j2")) and not Path(template).is_file():  # TRL would ask the Hub
            raise ValueError(f"chat_template_path: there is no file {template}.")
        super().__post_init__()
        self.validate_sharding()
        refuse_unsupported_order(self)
        refuse_offloading_without_accelerator(self)


for _config in (TOPRConfig, OfflineTOPRConfig):  # so that help() has all settings of TOPR
    _config.__doc__ = f"{_config.__doc__}\n{LossArguments.__doc__}\n{CurationArguments.__doc__}"
TOPRConfig.__doc__ = f"{TOPRConfig.__doc__}\n{ReplayArguments.__doc__}"
