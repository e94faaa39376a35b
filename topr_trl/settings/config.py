"""Settings for `TOPRTrainer` and `OfflineTOPRTrainer`: TRL's settings, and those of TOPR."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import GRPOConfig, SFTConfig

from topr_trl.curation import REPEATING
from topr_trl.settings.checks import check_type
from topr_trl.settings.sampling import refuse_sampling_settings
from topr_trl.settings.shared import ReplayArguments, TOPRArguments
from topr_trl.settings.unsupported import (
    GRPO_ONLY,
    LIKE_OFFLINE_TOPR,
    LIKE_TOPR,
    SFT_ONLY,
    is_loss,
    needs_metric_for_best_model,
    refuse_lost_weights_and_prompts,
    refuse_offloading_without_accelerator,
    refuse_settings,
    refuse_uneven_batches,
    refuse_unsupported_order,
    set_direction_of_schedule,
)


@dataclass
class TOPRConfig(ReplayArguments, TOPRArguments, GRPOConfig):
    """Settings for [`TOPRTrainer`]: all settings of [`~trl.GRPOConfig`], and the parameters below.

    The defaults for the loss and the optimizer are the paper's (arXiv 2503.14286, Sec. 4.1), except for `baseline`. R
    is the reward after the baseline is subtracted. π is the policy in training, and μ is the policy that wrote the
    completion.

    Settings that only the losses of GRPO use, such as `epsilon`, `delta` and `importance_sampling_level`, must keep
    their defaults.
    `vllm_importance_sampling_correction` never changes the loss. With `True`, TRL logs the difference between the
    log-probabilities of vLLM and of the trainer, as `sampling/sampling_logp_difference/mean` and
    `sampling/sampling_logp_difference/max`.

    With `load_best_model_at_end`, the best model is the one with the highest `eval_reward`, unless
    `metric_for_best_model` names a different metric.

    In the tables of `log_completions`, `advantage` is R, or 0 for a row that was not chosen or has no reward. `weight`
    and `log_ratio` are the last values that the loss computed for the row. The two values are NaN if the loss has not
    used the row, and printed tables show nothing for NaN.

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
            - `"positives_only"`: completions with R < 0 have weight 0, as in reward-weighted fine-tuning.
            - `"reinforce"`: every weight is 1. The objective has no upper bound, and off-policy training collapses.
            - `"opr"`: plain importance sampling. The weight is the ratio π/μ.
            - `"tis"`: truncated importance sampling. The weight is the ratio π/μ, truncated at 1.
        a_pos (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R >= 0 (a+ in Eq. 7). `None` uses the preset's limit.
        b_pos (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R >= 0 (b+ in Eq. 7). `None` uses the preset's limit.
        a_neg (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R < 0 (a- in Eq. 7). `None` uses the preset's limit.
        b_neg (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R < 0 (b- in Eq. 7). `None` uses the preset's limit.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio π/μ is computed. With `"sequence"`, as in the paper, the ratio of a completion is
            the product of the ratios of its tokens. With `"segment"`, for long completions, each token gets the product
            of the ratios in its segment of `segment_tokens` tokens. See [`topr_loss`] for the equations.
        segment_tokens (`int`, *optional*, defaults to `64`):
            Number of tokens in a segment, with `ratio_level="segment"`, which needs log μ of each token. Tokens that
            the model did not write, such as tool results, do not count.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, *optional*, defaults to `"trainer"`):
            Source of log μ. `"trainer"` computes it with the trainer's own forward pass. `"sampler"` takes the
            log-probabilities that the sampler reported, and needs `use_vllm=True` or a `rollout_func` that returns
            them. Rounding in vLLM changes the ratio of long completions.

        > Parameters that control the baseline and the choice of rows

        baseline (`float` or `str`, *optional*, defaults to `"mean"`):
            Baseline c, which is subtracted from each reward: R = R0 - c. Can be a number, `"mean"` (the mean reward of
            a generation batch) or `"group_mean"` (the mean reward of the completions of the same prompt). The paper
            uses 0 with rewards of ±1. A number given as text becomes a `float`.

            With the mean, positives and negatives have the same sum of |R|, for any scale of rewards, before rows are
            chosen. So the effective share of positives stays at 50% in every iteration. With `length_normalization`
            the baseline also changes the length of completions. If the mean reward is below 0, a baseline of 0 favors
            long completions. The mean removes this effect if reward and length are independent.
        effective_positive_share (`float`, *optional*):
            Target for the effective share of positives, p~ in (0, 1], which is the share of positives in the sum of
            |R| (Sec. 3.2). The trainer then computes the baseline that reaches this target, and `baseline` must keep
            its default. The paper's best values are 0.1 to 0.2.
        curation (`str`, *optional*, defaults to `"none"`):
            Rule that chooses the rows to train on from a generation batch (Sec. 4.3). Can be `"none"` (all rows),
            `"uniform"`, `"positives"`, `"positive_share"` or `"anna_karenina"`. See [`curate`]. To train on right
            answers more often than on wrong ones, use `replay_share` and `replay_rule="positives"`.
        iteration_size (`int`, *optional*):
            Number of rows to choose. Needs a `curation` other than `"none"`. See [`curate`] for the meaning of `None`.
        curation_positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives, in [0, 1], among the rows that `curation="positive_share"` chooses.

        > Parameters that control replay

        replay_share (`float`, *optional*, defaults to `0.0`):
            Share, in [0, 1), of replayed rows among the rows trained on. A replayed row comes from an earlier
            generation batch, with the log μ of its first use, or from `replay_dataset`. Replayed rows are added to the
            fresh rows. A micro-batch then has about `per_device_train_batch_size / (1 - replay_share)` rows, and needs
            memory for them.
        replay_size (`int`, *optional*):
            Number of rows kept for replay, over all processes. Each process keeps an equal part, rounded up. `None`
            keeps 8 generation batches, or all rows of `replay_dataset` if these are more. If `replay_dataset` has more
            rows than `replay_size`, each process keeps the last rows of its part.
        replay_rule (`str`, *optional*, defaults to `"newest"`):
            Rule that chooses the rows kept for replay:

            - `"newest"`: the newest rows.
            - `"positives"`: the newest rows with R > 0.
            - `"negatives"`: the newest rows with R < 0.
            - `"anna_karenina"`: the newest rows with R < 0, and the newest positive of each prompt in each process.

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
            Whether to leave NaN and infinite losses out of the logged loss. With `False`, a NaN or infinite loss stops
            training at the next log.
        share_prompts (`bool`, *optional*):
            Whether to compute a prompt once for all its completions in a micro-batch. Needs `"sdpa"` or `"eager"`
            attention. If sharing is not possible or would change log π, the trainer prints the reason, and computes the
            prompt for each completion. The completions of a prompt become adjacent within each optimizer step. `None`
            means `True` on a CPU and `False` on other devices. On an H200, sharing made offline steps faster for an 8B
            model with prompts of 1,024 tokens, and slower for a 0.5B model.
    """

    top_k: int | None = field(
        default=None,
        metadata={"help": "Most likely tokens to sample from. Default: 500, or all tokens with log_mu='sampler'."},
    )
    loss_type: str = field(default="topr", metadata={"help": "Always 'topr'."})

    def __post_init__(self) -> None:
        self.validate_topr()
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")
        refuse_settings(self, GRPOConfig, "TOPRTrainer", GRPO_ONLY, LIKE_TOPR)
        self.loss_type = "topr"
        if self.curation in REPEATING:
            raise ValueError(
                f"curation={self.curation!r} repeats rows of a dataset, and a generation batch has each row once. To "
                "train on right answers again, set replay_rule='positives' and replay_share."
            )
        if self.top_k is None:
            self.top_k = 0 if self.log_mu == "sampler" else 500
        # A vLLM server would replace None with the model's own settings.
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) is None:
                setattr(self, name, 1.0)
        self._choose_metric_for_best_model()
        super().__post_init__()
        set_direction_of_schedule(self)
        self.validate_sharding()
        if self.share_prompts and min(self.per_device_train_batch_size, self.num_generations) < 2:
            raise ValueError(
                "share_prompts=True needs two completions of a prompt in a micro-batch. Raise "
                f"per_device_train_batch_size={self.per_device_train_batch_size} and "
                f"num_generations={self.num_generations} to at least 2, or leave share_prompts out."
            )
        refuse_uneven_batches(self)
        refuse_lost_weights_and_prompts(self)
        self.validate_replay(self.per_device_train_batch_size, self.steps_per_generation, self.world_size, self.beta)
        refuse_sampling_settings(self)
        generate_every = self.steps_per_generation * self.num_iterations
        corrected_kl = self.beta != 0 and self.use_bias_correction_kl
        if corrected_kl and self.gradient_accumulation_steps % generate_every != 0:
            raise ValueError(
                f"beta={self.beta} with use_bias_correction_kl=True needs the ratio of each token if a batch is "
                "used for several optimizer steps, and TOPR's loss does not have this ratio. Set "
                "use_bias_correction_kl=False, or beta=0 (the paper's)."
            )

    def _choose_metric_for_best_model(self) -> None:
        """Select the best model by its reward if no metric is set. The loss does not measure how good a model is.

        The loss is -mean(w · R). If the user selects the loss or the lowest reward, this method raises a ValueError
        even if no best model is saved, because callbacks such as transformers' `EarlyStoppingCallback` also read the
        two settings.
        """
        args: Any = self
        if is_loss(args.metric_for_best_model):
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r}: the loss is -mean(w · R), which does not "
                "measure how good a model is; with baseline='mean', it is 0 in each evaluation. Set "
                "metric_for_best_model='eval_reward', or leave it out. Leave greater_is_better out, too."
            )
        if needs_metric_for_best_model(args) and args.metric_for_best_model is None:
            args.metric_for_best_model = "eval_reward"
        if str(args.metric_for_best_model).endswith("reward") and args.greater_is_better is False:
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r} with greater_is_better=False: the model with "
                "the lowest reward would be the best. Leave greater_is_better out."
            )


@dataclass
class OfflineTOPRConfig(TOPRArguments, SFTConfig):
    """Settings for [`OfflineTOPRTrainer`]: all settings of [`~trl.SFTConfig`], and the parameters below.

    The defaults for the loss and the optimizer are the paper's (arXiv 2503.14286, Sec. 4.1), except for `baseline`. R
    is the reward after the baseline is subtracted. π is the policy in training, and μ is the policy that wrote the
    completion.

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
            - `"positives_only"`: completions with R < 0 have weight 0, as in reward-weighted fine-tuning.
            - `"reinforce"`: every weight is 1. The objective has no upper bound, and off-policy training collapses.
            - `"opr"`: plain importance sampling. The weight is the ratio π/μ.
            - `"tis"`: truncated importance sampling. The weight is the ratio π/μ, truncated at 1.
        a_pos (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R >= 0 (a+ in Eq. 7). `None` uses the preset's limit.
        b_pos (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R >= 0 (b+ in Eq. 7). `None` uses the preset's limit.
        a_neg (`float`, *optional*):
            Lower limit of the ratio π/μ of a completion with R < 0 (a- in Eq. 7). `None` uses the preset's limit.
        b_neg (`float`, *optional*):
            Upper limit of the ratio π/μ of a completion with R < 0 (b- in Eq. 7). `None` uses the preset's limit.
        ratio_level (`str`, *optional*, defaults to `"sequence"`):
            Level at which the ratio π/μ is computed. With `"sequence"`, as in the paper, the ratio of a completion is
            the product of the ratios of its tokens. With `"segment"`, for long completions, each token gets the product
            of the ratios in its segment of `segment_tokens` tokens. See [`topr_loss`] for the equations.
        segment_tokens (`int`, *optional*, defaults to `64`):
            Number of tokens in a segment, with `ratio_level="segment"`, which needs log μ of each token. Tokens that
            the model did not write, such as tool results, do not count.
        length_normalization (`bool`, *optional*, defaults to `True`):
            Whether to divide the loss of a completion by its number of tokens (Sec. 4.2).
        log_mu (`str`, *optional*, defaults to `"trainer"`):
            Source of log μ. `"trainer"` takes the column `mu_logps`. Without this column, the trainer computes log μ
            with the starting weights before the first step. `"sampler"` takes the column `sampler_logps`. Rounding in a
            sampler changes the ratio of long completions.

        > Parameters that control the baseline and the choice of rows

        baseline (`float` or `str`, *optional*, defaults to `"mean"`):
            Baseline c, which is subtracted from each reward: R = R0 - c. Can be a number, `"mean"` (the mean reward of
            the dataset) or `"group_mean"` (the mean reward of the completions of the same prompt). The paper uses 0
            with rewards of ±1. A number given as text becomes a `float`.

            With the mean, positives and negatives have the same sum of |R|, for any scale of rewards, before rows are
            chosen. So the effective share of positives stays at 50% in every iteration. With `length_normalization`
            the baseline also changes the length of completions. If the mean reward is below 0, a baseline of 0 favors
            long completions. The mean removes this effect if reward and length are independent.
        effective_positive_share (`float`, *optional*):
            Target for the effective share of positives, p~ in (0, 1], which is the share of positives in the sum of
            |R| (Sec. 3.2). The trainer then computes the baseline that reaches this target, and `baseline` must keep
            its default. The paper's best values are 0.1 to 0.2.
        curation (`str`, *optional*, defaults to `"none"`):
            Rule that chooses the rows to train on from the dataset (Sec. 4.3). Can be `"none"` (all rows), `"uniform"`,
            `"positives"`, `"positive_share"`, `"balanced"` (half right and half wrong rows, with the middle between
            the two rewards as baseline; needs rewards with two values), `"repeated_positives"` (right answers only,
            repeated up to `iteration_size` rows) or `"anna_karenina"`. See [`curate`].
        iteration_size (`int`, *optional*):
            Number of rows to choose. Needs a `curation` other than `"none"`. See [`curate`] for the meaning of `None`.
        curation_positive_share (`float`, *optional*, defaults to `0.5`):
            Share of positives, in [0, 1], among the rows that `curation="positive_share"` chooses.

        > Parameters that control training

        num_train_epochs (`float`, *optional*, defaults to `1.0`):
            Number of epochs over the chosen rows. The default is the paper's.
        max_length (`int`, *optional*):
            Maximum number of tokens of prompt and completion together. A longer row is an error, and so is a row
            longer than the model's context. Rows are never cut, since the reward belongs to the whole completion.
        optim (`str`, *optional*, defaults to `"adafactor"`):
            Optimizer. The default is the paper's.
        learning_rate (`float`, *optional*, defaults to `5e-07`):
            Learning rate. The default is the paper's.
        lr_scheduler_type (`str`, *optional*, defaults to `"constant"`):
            Schedule of the learning rate. The default is the paper's.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether to leave NaN and infinite losses out of the logged loss. With `False`, a NaN or infinite loss stops
            training at the next log.
        sort_by_length (`bool`, *optional*, defaults to `True`):
            Whether to sort the rows of each optimizer step by length. The micro-batches then have less padding, and
            each step keeps its rows and its gradient. The setting has no effect on rows that are read in a fixed order,
            with `padding_free=True`, with Accelerate's `split_batches`, or with the auxiliary loss of a mixture of
            experts.
        share_prompts (`bool`, *optional*):
            Whether to compute a prompt once for all its completions in a micro-batch. Needs `"sdpa"` or `"eager"`
            attention. If sharing is not possible or would change log π, the trainer prints the reason, and computes the
            prompt for each completion. If sharing saves at least 10% of the tokens, up to 8 rows of a prompt stay
            together in training, or fewer if a step would have fewer than 16 prompts. `None` means `True` on a CPU if
            sharing saves at least 10% of the tokens. Otherwise, `None` means `False`. On an H200, sharing made steps
            faster for an 8B model with prompts of 1,024 tokens, and slower for a 0.5B model.

        > Parameters that control logging

        log_completions (`bool`, *optional*, defaults to `False`):
            Whether to log the rows of the last optimizer step with reward, advantage (R), weight and log-ratio. Each
            table is written to `output_dir/completions/completions_{step}.parquet`. It is printed if `rich` is
            installed, and sent to wandb and trackio if `report_to` names them. Evaluation rows are not logged.
        num_completions_to_print (`int`, *optional*):
            Number of completions to print, drawn at random. `None` prints all. The file has all completions.
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
        self.refuse_loss_as_metric()
        template = self.chat_template_path  # type: ignore[has-type]
        if template is not None:
            self.chat_template_path = template = os.fspath(template)  # TRL accepts a path only as text.
            # TRL would look for a missing file on the Hub.
            if template.endswith((".jinja", ".j2")) and not Path(template).is_file():
                raise ValueError(f"chat_template_path: there is no file {template}.")
        super().__post_init__()
        set_direction_of_schedule(self)
        self.validate_sharding()
        refuse_unsupported_order(self)
        refuse_offloading_without_accelerator(self)
        refuse_uneven_batches(self)

    def refuse_loss_as_metric(self, sets: Iterable[str] = ()) -> None:
        """Raise a ValueError if the metric for the best model is a loss, or would be the loss by default.

        Args:
            sets (`Iterable[str]`, *optional*, defaults to `()`):
                Names of the evaluation sets.
        """
        metric = self.metric_for_best_model
        if is_loss(metric, sets) or (metric is None and needs_metric_for_best_model(self)):
            raise ValueError(
                f"metric_for_best_model={metric!r}: the best checkpoint, or the learning rate, would depend on the "
                "loss, which rises as negatives become less likely. Use a metric that your own callback adds to "
                "evaluations, or keep the checkpoints and compare them with topr evaluate."
            )
