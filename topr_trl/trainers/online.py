"""Train with TOPR on completions that are generated during training: `TOPRTrainer`.

The trainer reuses TRL's GRPO loss, and makes its ratio equal to 1. The loss then has the gradient of
`-A · log π(y|x) / |y|`, where A is the advantage. With `A = w · R` this is Algorithm 1. TRL's other terms (KL, entropy,
mixture of experts) are unchanged. The weight w depends on log π, so the trainer computes w inside TRL's loss, right
after TRL's forward pass. A training step calls these methods, in order:

1. `_generate_and_score_completions`, which computes R, chooses rows and adds replayed rows,
2. `_compute_loss`, which calls TRL's loss,
3. `_get_per_token_logps_and_entropies`, which is TRL's forward pass inside the loss, and
4. `_write_weighted_rewards`, which writes `w · R` into the batch.

These methods communicate through keys in TRL's batch of N rows:

| key | value | meaning |
|---|---|---|
| `topr_rewards` | (N,) float32 | R; NaN for a row that has no reward or was not chosen |
| `topr_rows` | (N,) int64, on the CPU | number of each row, in the order of generation over all processes |
| `topr_scale` | scalar | factor that makes the loss a mean over the chosen and replayed rows |
| `topr_fresh` | (N,) bool | whether a row was generated in this batch |
| `topr_mu_logps` | (N, T) float32 | log μ from the trainer's forward pass, for later uses of the batch |

`topr_scale` exists only with curation or replay, and `topr_fresh` only with replay.
"""

import inspect
import math
import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length
from trl import GRPOTrainer, is_conversational
from trl.trainer.utils import get_callable_name, pad

from topr_trl.baseline import BASELINES
from topr_trl.curation import Curated
from topr_trl.data.batch_samplers import ReseededSampler
from topr_trl.data.text_tokens import encode_prompt
from topr_trl.data.tokenized_rows import check_ids
from topr_trl.loss import reachable
from topr_trl.rewards import checked
from topr_trl.settings.config import TOPRConfig
from topr_trl.settings.sampling import of_policy, replaced_generation_config, warn_of_own_settings
from topr_trl.trainers.base import TOPRMixin
from topr_trl.trainers.completions_table import WEIGHT_COLUMNS, DisplayedFloat, refuse_own_column
from topr_trl.trainers.evaluated_rewards import EvaluatedRewards
from topr_trl.trainers.fingerprints import model_fingerprint, prompts_fingerprint, text_fingerprint
from topr_trl.trainers.forward_checks import (
    count_positions_from_mask,
    depends_on_batch,
    learned_positions,
    text_model,
    virtual_tokens,
)
from topr_trl.trainers.generation_batches import keep_rows, trim_padding
from topr_trl.trainers.messages import say_share, warn_of_signs
from topr_trl.trainers.replay.replay import Replay, check_replay
from topr_trl.trainers.shared_prompts import share_generated
from topr_trl.trainers.start_checks import (
    check_metric_for_best_model,
    check_prompts,
    check_state_is_whole,
    check_tokenizer,
    model_and_settings,
)
from topr_trl.trainers.training_warnings import (
    SilentBatches,
    warn_if_far,
    warn_if_merged_coarsely,
    warn_of_scale,
)
from topr_trl.user_warnings import warn_user

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from trl.trainer.grpo_trainer import RewardFunc


class TOPRTrainer(TOPRMixin, GRPOTrainer):
    """Trainer for Tapered Off-Policy REINFORCE (TOPR), on completions that are generated during training.

    The method was proposed in [Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for
    LLMs](https://huggingface.co/papers/2503.14286). The trainer takes the arguments of [`~trl.GRPOTrainer`]. It
    replaces the advantages of GRPO with w · R. R is the raw reward minus a baseline. The weight w of a completion is
    its ratio π/μ, clipped to limits that depend on the sign of R (Eq. 7). `curation` can choose rows before the
    backward pass.

    The value logged as `loss` is `-mean(w · R)`. Its gradient is the gradient of Algorithm 1.

    An `effective_positive_share` below 1 has no solution for the baseline if all rewards of a generation batch are
    equal. The trainer then uses its last solution, or 0 if it has none. Checkpoints do not store the last solution.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import TOPRConfig, TOPRTrainer

    >>> def reward(completions, answer, **kwargs):
    ...     return [1.0 if text.endswith(right) else -1.0 for text, right in zip(completions, answer)]

    >>> dataset = Dataset.from_dict({"prompt": ["3 + 4 =", "2 + 6 ="], "answer": ["7", "8"]})
    >>> trainer = TOPRTrainer(
    ...     model="Qwen/Qwen2.5-0.5B",
    ...     reward_funcs=reward,
    ...     args=TOPRConfig("out", learning_rate=1e-6, max_completion_length=16),
    ...     train_dataset=dataset,
    ... )
    >>> trainer.train()
    ```

    Args:
        model (`str`, `os.PathLike`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train: a model id on the Hub, a folder written by `save_pretrained`, or a causal language model.
            Models given by name are loaded in float32, with the arguments in `args.model_init_kwargs`.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`]: functions, sequence classification models or their names. A
            function returns one number per completion, or `None` for a completion without a reward. The reward of a
            completion is the sum over the functions, weighted by `args.reward_weights`. Can be omitted if the
            environment of `environment_factory` has rewards.
        args ([`TOPRConfig`], *optional*):
            Settings. `None` creates default settings with the output folder `MODEL-TOPR`.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Prompts in a column `prompt`, as text or messages. Other columns are passed to the reward functions. Can be
            omitted if the environment of `environment_factory` makes the prompts.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict[str, Dataset]`, *optional*):
            Prompts for evaluation, in the form of `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer or processor, with padding on the left. `None` loads the model's own.
        reward_processing_classes (`PreTrainedTokenizerBase` or `list[PreTrainedTokenizerBase]`, *optional*):
            Tokenizers of the reward models, in the order of `reward_funcs`. `None` loads the tokenizers of the models.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks that are added to the default ones.
        optimizers (`tuple[Optimizer | None, LambdaLR | None]`, *optional*, defaults to `(None, None)`):
            Optimizer and schedule. `None` creates them from `args`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization used to load a model that is given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train. `None` adds no adapter to the model.
        tools (`list[Callable]`, *optional*):
            Functions that the model can call during generation.
        rollout_func (`RolloutFunc`, *optional*):
            Function that generates the completions instead of the trainer.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Function that returns an environment with tools, and optionally with prompts and rewards. A dictionary holds
            such functions by name, and the column `environment` of the dataset then has the name for each prompt.
        replay_dataset ([`~datasets.Dataset`], *optional*):
            Logged rows that are replayed from the first step on. They need `replay_share` above 0 in `args`. The
            columns are those of [`OfflineTOPRTrainer`], with one row per completion. Rows without a column `mu_logps`,
            or `sampler_logps` with `log_mu="sampler"`, get log μ of the starting weights.

    Raises:
        TypeError: `args` is not a [`TOPRConfig`], or `replay_dataset` is not a `Dataset`.
        FileNotFoundError: `model` is the path of a folder that does not exist.
        ValueError: the dataset has no row or no column `prompt`, settings do not fit the model or the datasets, the
            tokenizer has neither a pad token nor a stop token, or log π depends on padding. In training and evaluation,
            a prompt is too long for the model's context, or a reward is infinite.
    """

    _kind = "online"
    args: TOPRConfig
    _buffered_inputs: list[dict[str, Any]] | None  # micro-batches of the current generation batch
    _rewards_per_func: Tensor  # raw rewards of the current generation batch, over all processes

    def __init__(
        self,
        model: "str | os.PathLike[str] | PreTrainedModel | PeftModel",
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: TOPRConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        *rest: Any,
        replay_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        # An environment can make the prompts, so the dataset does not need them.
        writes_prompts = kwargs.get("environment_factory") is not None
        if isinstance(train_dataset, Dataset) and "prompt" not in train_dataset.column_names and not writes_prompts:
            raise ValueError(
                f"The training dataset needs a column `prompt`; it has {train_dataset.column_names}. Rename the "
                "column with the prompts."
            )
        model, args = model_and_settings("TOPRTrainer", model, args, TOPRConfig)
        if args.log_mu == "sampler" and not args.use_vllm and kwargs.get("rollout_func") is None:
            raise ValueError(
                "log_mu='sampler' needs use_vllm=True, or a rollout_func that returns log-probabilities. Without both, "
                "set log_mu='trainer'."
            )
        logged = check_replay(args, train_dataset, replay_dataset)
        if isinstance(train_dataset, Dataset) and len(train_dataset) == 0:
            raise ValueError("The training dataset has no row. Check how it was filtered or split.")
        check_metric_for_best_model(args, eval_dataset)
        self._rows_made = 0  # number of rows generated so far, over all processes
        self._loss_inputs: dict[str, Any] | None = None  # batch of the loss that is being computed
        self._last_baseline = 0.0  # last solution for `effective_positive_share`
        self._silent = SilentBatches(had_signal=replay_dataset is not None)
        self._evaluated = EvaluatedRewards()  # rewards of the current evaluation set
        self._shown_weights: dict[int, list[float]] = {}  # weight and log-ratio in the last table, by row number
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)
        # Store what TRL receives, also from a method of a subclass.
        self._calculate_rewards = partial(self._store_rewards, self._calculate_rewards)  # type: ignore[has-type]
        check_tokenizer(self._tokenizer, self.model.config.get_text_config())
        self.reward_funcs: list[Any] = [
            function if isinstance(function, nn.Module) else checked(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        if args.log_completions:
            for readers in self._row_readers.values():
                readers.append("table")
            for name in self.reward_func_names:
                refuse_own_column(name, "A reward function")
        uses = f", each batch used {args.num_iterations} times" if args.num_iterations > 1 else ""
        self._rows_trained_on = f"generated during training, {args.num_generations} per prompt{uses}"
        self._positions = learned_positions(self.model)
        config = text_model(self.model).config.get_text_config()
        if getattr(config, "output_router_logits", False):
            # With True, generation fails. TRL's loss does not need this setting: it requests the router logits itself.
            config.output_router_logits = False
        self._check_model(share_generated)
        self._replay = Replay(self, logged) if args.replay_share else None
        if self._replay is not None:
            self._rows_trained_on += f"; {self._replay.description}"
        self.loss_type = "grpo"  # TRL's mean of `-A · ratio` over the tokens of a completion, then over completions

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        if not is_conversational({"prompt": prompts[0]}):
            tokenized = ([encode_prompt(prompt, self._tokenizer) for prompt in prompts], *tokenized[1:])
        config, virtual = self.model.config.get_text_config(), virtual_tokens(self.model)
        if not self._is_vlm:  # The placeholders of images can have ids outside the vocabulary.
            check_ids("A prompt", tokenized[0], config)
        context = (getattr(config, "max_position_embeddings", None) or math.inf) - virtual
        longest = max(map(len, tokenized[0]), default=0)
        if longest >= context:
            raise ValueError(
                f"A prompt has {longest} tokens; the model's context holds {context}. Drop or shorten such prompts."
            )
        limit = (self._positions or math.inf) - virtual
        if longest + (self.max_completion_length or 0) > limit:
            raise ValueError(
                f"A prompt of {longest} tokens and max_completion_length={self.max_completion_length} do not fit in "
                f"the model's context of {limit} learned positions. Lower max_completion_length, or shorten such "
                "prompts."
            )
        return tokenized

    def _check_rows(self, model: nn.Module) -> None:
        """Make log π of a completion independent of the padding of its prompt, with `position_ids` if necessary.

        Raises:
            ValueError: log π depends on the padding even with `position_ids`.
        """
        if self._is_vlm:  # Skip the check, because the forward pass of vision-language models needs images.
            return
        check = partial(
            depends_on_batch, self, model, partial(self._padded_log_probs, model), self._tokenizer, self.temperature
        )
        if not check():
            return
        for each in (self.model, self.ref_model):
            if each is not None:
                count_positions_from_mask(each)
        if check():
            raise ValueError(
                f"log π of {type(text_model(self.model)).__name__} depends on the padding of a batch, and TRL pads "
                "prompts on the left, so π/μ would be wrong. Train a different model, or use OfflineTOPRTrainer."
            )

    def _padded_log_probs(self, model: nn.Module, sequences: list[list[int]]) -> list[Tensor]:
        """Return for each sequence log π of all tokens but the first, from a batch that is padded on the left."""
        rows = [torch.tensor(tokens, device=self.accelerator.device) for tokens in sequences]
        ids = pad(rows, self._tokenizer.pad_token_id, "left")
        mask = pad([torch.ones_like(row) for row in rows], 0, "left")
        # Unwrap TRL's method, because its profiling decorator would log to trackers before they are set up.
        forward = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
        logps = forward(self, model, ids, mask, ids.size(1) - 1)[0]
        return [row[len(row) - len(tokens) + 1 :] for row, tokens in zip(logps, sequences, strict=True)]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch. With shared prompts, rows of a prompt are adjacent within each optimizer step."""
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        # The auxiliary loss and TRL's entropy settings depend on which rows share a micro-batch, so rows must not move.
        by_micro_batch = self.aux_loss_enabled or self.top_entropy_quantile < 1 or self._entropy_bonus_enabled
        is_old = not self.model.training or self._buffered_inputs is before
        if by_micro_batch or is_old or self._buffered_inputs is None:
            return inputs
        self._buffered_inputs = self._sharing.arrange(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        """Return TRL's sampler, reseeded in each epoch so that a resumed run repeats the order."""
        self._order = ReseededSampler(super()._get_train_sampler(dataset))
        return self._order

    def _before_training(self, checkpoint: Path | None) -> None:
        super()._before_training(checkpoint)
        check_prompts(self.args, self.train_dataset)
        warn_of_own_settings(self.model.generation_config)
        if self.args.use_vllm:
            warn_if_merged_coarsely(self.model)
        # Discard a generation batch that an earlier call of `train` left unfinished after an error. TRL would continue
        # in the middle of it. Then log μ would be computed after a step, and vLLM would keep outdated weights.
        self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
        self._silent.had_signal |= checkpoint is not None
        if checkpoint is not None:
            check_state_is_whole(checkpoint, self.args, self.train_dataset)
        elif self._replay is not None:
            self._replay.start(self._run["model"])

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # Otherwise, vLLM would evaluate the last weights.

    def _save_rng_state(self, output_dir: str) -> None:
        if self._replay is not None:
            self._replay.save(output_dir)
        super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._replay is not None and checkpoint is not None:
            self._replay.load(checkpoint)

    def _identity_values(self) -> dict[str, Any]:
        reference = None
        if self.ref_model is not None:
            reference = model_fingerprint(self.ref_model)
        elif self.args.beta != 0:  # If the script passes a model with an adapter, TRL makes the copy.
            reference = "copy of the adapter" if "ref" in self.model.peft_config else "base model"
        return {
            "rows": prompts_fingerprint(self.train_dataset),
            "reference_model": reference,
            "reward_functions": self.reward_func_names,
            "tools": [get_callable_name(tool) for tool in self.tools],
            "chat_template": text_fingerprint(self._tokenizer.chat_template),
        }

    def _store_rewards(self, calculate: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return the rewards that `calculate` returns, and store them. TRL subtracts the mean of each group."""
        if not self._is_vlm:  # Tools and a `rollout_func` can write any token.
            check_ids("A completion", args[3], self.model.config.get_text_config())
        rewards_per_func = calculate(*args)
        infinite = rewards_per_func.isinf().any(dim=0).nonzero().flatten().tolist()
        if infinite:
            name = self.reward_func_names[infinite[0]]
            raise ValueError(
                f"The reward function {name!r} returned an infinite reward. Return a finite number or None."
            )
        self._rewards_per_func = rewards_per_func
        return rewards_per_func

    def _generate_for_one_use(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score completions, without TRL's extra forward pass for log μ."""
        # For a batch that is used several times, TRL computes log μ with an extra forward pass. That pass is not needed
        # if the first use is within one optimizer step, because the forward pass of that step gives log μ. So tell TRL
        # that the batch is used once.
        uses = self.num_iterations  # type: ignore[has-type]  # TRL sets it without an annotation
        self.num_iterations = 1
        try:
            # For settings that TRL does not pass, `generate` takes the values in the model's generation config.
            with replaced_generation_config(self.model, of_policy(self.model.generation_config)):
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = uses
        return batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        train = self.model.training
        batch = self._generate_for_one_use(inputs)
        self.model.train(train)  # TRL's continuous batching switches to training mode, even during evaluation.
        # If the weights are unchanged at the first use, μ = π. With vLLM, TRL computes log μ even then, in a batch with
        # other padding, where log μ can round differently.
        if not train or self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0:
            batch.pop("old_per_token_logps", None)
        if "importance_sampling_ratio" in batch:  # TRL's correction for vLLM, which w replaces
            batch["importance_sampling_ratio"] = torch.ones((), device=batch["completion_ids"].device)
        # With vLLM, TRL logs the difference between the log-probabilities of vLLM and the trainer.
        distances = self._metrics[self._mode].get("sampling/sampling_logp_difference/mean")
        if distances:
            warn_if_far(distances[-1], self._said)
        raw_rewards = self._raw_rewards()
        if not train:
            raw_rewards = self._evaluated.add(raw_rewards, self._rewards_per_func)
        raw_rewards = self._without_masked(raw_rewards, batch)
        rewards, curated = self._compose(raw_rewards, train)
        rewards_all = torch.full_like(raw_rewards, torch.nan)
        rewards_all[torch.from_numpy(curated.indices)] = torch.from_numpy(rewards).to(rewards_all)
        self._show_rewards_in_completions(rewards_all)
        start = self.accelerator.process_index * len(inputs)
        batch["topr_rewards"] = rewards_all[start : start + len(inputs)]
        batch["topr_rows"] = torch.arange(start, start + len(inputs)) + self._rows_made
        self._rows_made += len(raw_rewards)
        if train:
            self._silent.add(rewards, raw_rewards)
            # With a mean as baseline, equal rewards give R = 0 for all rows. This is normal and needs no warning.
            if rewards.any() or not len(rewards) or self.args.baseline not in BASELINES:
                warn_of_signs(curated, bool((raw_rewards == 0).any()), self.args, self._said)
            warn_of_scale(rewards, self._said, may_be_small=True)
            say_share(rewards, self.args, self._said)
            if self.args.curation != "none":
                self._metrics["train"]["topr/rows_kept"].append(len(curated.indices) / len(raw_rewards))
                process, processes = self.accelerator.process_index, self.accelerator.num_processes
                batch = keep_rows(batch, curated.indices, self.args.steps_per_generation, process, processes)
            if self._replay is not None:
                # Without curation, the loss is a mean over all rows, including rows without a reward, as in TRL.
                counted = len(raw_rewards) if self.args.curation == "none" else len(curated.indices)
                batch = self._replay.add_rows(batch, counted)
        return batch

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Compute loss, rewards and metrics of evaluation prompts. See `transformers.Trainer.evaluate`.

        Args:
            *args (`Any`):
                Arguments of `transformers.Trainer.evaluate`.
            **kwargs (`Any`):
                Arguments of `transformers.Trainer.evaluate`.

        Returns:
            `dict[str, float]`: metrics by name. A metric without a value is NaN, such as the mean reward if no
            completion has a reward. Trainer compares NaN with the best reward, and could not compare `None`.
        """
        metrics = super().evaluate(*args, **kwargs)
        return {name: math.nan if value is None else value for name, value in metrics.items()}

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one dataset. The reward metrics count each completion once, even if Accelerate repeats rows."""
        rows = len(dataloader.dataset) * self.num_generations_eval if has_length(dataloader.dataset) else math.inf
        batch, group = self.args.per_device_eval_batch_size * self.args.world_size, self.num_generations_eval
        if rows > batch and batch % group:  # TRL checks this only if `eval_strategy` is set.
            raise ValueError(
                f"per_device_eval_batch_size={self.args.per_device_eval_batch_size}: the {batch} completions of an "
                f"evaluation batch cannot be divided into groups of {group}. Choose per_device_eval_batch_size or "
                "num_generations_eval so that they can."
            )
        self._evaluated = EvaluatedRewards(rows)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _raw_rewards(self) -> Tensor:
        """Return the (N,) raw rewards of the rows of all processes: weighted sums over the reward functions.

        NaN marks a row that no function rewarded.
        """
        rewards = self._rewards_per_func
        raw = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return raw.masked_fill(rewards.isnan().all(dim=1), torch.nan)

    def _without_masked(self, raw_rewards_N: Tensor, batch: dict[str, Any]) -> Tensor:
        """Return the raw rewards with NaN for completions that `mask_truncated_completions` leaves out of the loss.

        The reward metrics of an evaluation still count these completions, as TRL's metrics do. Otherwise, the model
        that is cut most often could have the highest reward.
        """
        masked = self.accelerator.gather(batch["completion_mask"].sum(dim=1) == 0)
        return raw_rewards_N.masked_fill(masked, torch.nan)

    def _compose(self, raw_rewards: Tensor, train: bool) -> tuple[NDArray[np.float64], Curated]:
        """Compute R and choose rows of a generation batch. Without `train`, choose all rows that have a reward.

        The choice is the same on all processes. Return R of the chosen rows, and the choice.
        """
        raw = raw_rewards.cpu().double().numpy()
        changes: dict[str, Any] = {} if train else {"rule": "none"}
        share = self.args.effective_positive_share
        values = np.unique(raw[~np.isnan(raw)])
        if share is not None and (len(values) == 0 or (len(values) == 1 and share < 1)):
            # No baseline reaches the share if all rewards are equal. This is normal, so raise no error.
            share = None
            changes |= {"baseline": self._last_baseline, "effective_positive_share": None}
        problems = np.arange(len(raw)) // (self.num_generations if train else self.num_generations_eval)
        with warnings.catch_warnings(record=True) as caught:
            rewards, curated = self.args.choose(raw, problems, self.args.seed + self.state.global_step, **changes)
        for text in (str(each.message) for each in caught):
            # The numbers differ between batches, so Python would show the warning for each batch.
            if (kind := re.sub(r"\d+", "", text)) not in self._said:
                self._said.add(kind)
                warn_user(text)
        if share is not None and train:
            self._last_baseline = float(raw[curated.indices[0]] - rewards[0])
        return rewards, curated

    def _show_rewards_in_completions(self, rewards_N: Tensor) -> None:
        """Replace the advantages in TRL's table of completions with R, or with 0 for a row whose R is NaN."""
        shown = self._logs["advantages"]
        for _ in range(min(len(shown), len(rewards_N))):
            shown.pop()
        shown.extend(rewards_N.nan_to_num(0.0).tolist())

    def _show_weights_in_completions(self) -> None:
        """Add the latest weight and log-ratio of each row to TRL's table of completions.

        NaN marks a row that the loss has not used.
        """
        # A row that was already in the previous table keeps its values if it has no new values.
        seen = self._shown_weights | {row: values for row, *values in gather_object(self._row_log.read("table"))}
        # TRL's table contains the newest rows, from training or evaluation.
        rows = range(self._rows_made - len(self._logs["prompt"]), self._rows_made)
        self._shown_weights = {row: seen.get(row, [math.nan] * len(WEIGHT_COLUMNS)) for row in rows}
        for place, name in enumerate(WEIGHT_COLUMNS):
            self._logs["extra"][name] = [DisplayedFloat(values[place]) for values in self._shown_weights.values()]

    def _log_completion_extra(self, column: str, values: list[Any]) -> None:
        if self.args.log_completions:
            refuse_own_column(column, "log_extra")
        super()._log_completion_extra(column, values)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        # Change a copy, because with num_iterations > 1 the buffered batch is used again. Trimming reads the length of
        # the longest completion, so it waits for the device, as TRL's metrics of each micro-batch do.
        self._loss_inputs = of_loss = trim_padding(dict(inputs), self.args.pad_to_multiple_of)
        try:
            loss = super()._compute_loss(model, of_loss)
        finally:
            self._loss_inputs = None
        if self.num_iterations > 1:  # log π of the first use is log μ of the later uses.
            inputs["old_per_token_logps"] = of_loss["topr_mu_logps"]
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is None:
            return output
        self._write_weighted_rewards(self._loss_inputs, policy_logps_BT=output[0])
        signal = self._loss_inputs["advantages"]
        return reachable(output[0], signal if signal.dim() == 2 else signal.unsqueeze(-1)), *output[1:]

    def _write_weighted_rewards(self, inputs: dict[str, Any], policy_logps_BT: Tensor) -> None:
        """Write w · R into a micro-batch as TRL's advantages, with shape (B,), or (B, T) with a ratio per segment.

        Raises:
            ValueError: `log_mu="sampler"`, and the rollout has no log-probabilities.
        """
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        mu_logps = inputs.pop("old_per_token_logps", None)
        if mu_logps is None:  # TRL leaves log μ out if the weights have not changed since sampling. Then μ = π.
            mu_logps = policy_logps_BT.detach()
        elif "topr_fresh" in inputs:  # With replay, log μ of fresh rows is NaN if TRL leaves it out.
            unknown = mu_logps.isnan() & inputs["topr_fresh"].unsqueeze(-1)
            mu_logps = torch.where(unknown, policy_logps_BT.detach(), mu_logps)
        inputs["topr_mu_logps"] = mu_logps
        if self.args.log_mu == "sampler":
            sampler_logps = inputs.get("sampling_per_token_logps")
            if sampler_logps is None:
                raise ValueError("log_mu='sampler', but the rollout gave no log-probabilities. Set log_mu='trainer'.")
            # If the sampler's value of a token is NaN, use the trainer's log μ.
            mu_logps = torch.where(sampler_logps.isnan(), mu_logps, sampler_logps)
        rewards_B, numbers_B = inputs["topr_rewards"], inputs["topr_rows"]
        # Detach log π, because the gradient comes from TRL's loss.
        weights = self._compute_losses(policy_logps_BT.detach(), mu_logps, rewards_B, mask, numbers_B).weights
        if self._replay is not None and self.model.training:
            self._replay.buffer.note(numbers_B, mu_logps)

        signal_B = rewards_B.nan_to_num(0.0) * inputs.get("topr_scale", 1.0)
        if not self.args.length_normalization:  # Undo TRL's division by the length.
            signal_B = signal_B * mask.sum(-1)
        # The batch has no `old_per_token_logps`, so TRL's ratio is exp(log π - log π) = 1, with the gradient of log π.
        inputs["advantages"] = weights * (signal_B.unsqueeze(-1) if weights.dim() == 2 else signal_B)

    @property
    def _ratio_is_one(self) -> bool:
        """Whether π = μ for every row in the current mode. If so, ratios are not logged.

        In evaluation, π = μ. In training, π = μ if each row is used only in the optimizer step that follows its
        generation. With `log_mu="sampler"`, π and μ differ, because the sampler's log-probabilities differ by rounding.
        """
        if self.args.log_mu == "sampler":
            return False
        uses = self.args.steps_per_generation * self.num_iterations
        used_once = self.args.gradient_accumulation_steps % uses == 0 and not self.args.replay_share
        return self._mode == "eval" or used_once

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TOPR's metrics in addition to TRL's.

        Args:
            logs (`dict[str, float]`):
                Metrics that Trainer logs. See `transformers.Trainer.log`.
            start_time (`float`, *optional*):
                Start time of training. See `transformers.Trainer.log`.
        """
        metrics = self._metrics[mode := self._mode_of(logs)]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # GRPO's clipping has no effect if its ratio is 1.
        if self.args.log_completions:
            self._show_weights_in_completions()
        if mode == "train":
            self._silent.warn(self.args.baseline, self._said)
        else:
            self._metrics["eval"].update(self._evaluated.read(self.reward_func_names))
        super().log(logs, start_time)
