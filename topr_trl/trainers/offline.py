"""Train with TOPR on a table of prompts, completions and rewards: `OfflineTOPRTrainer`."""

import os
import warnings
from copy import copy
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from trl import SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from topr_trl.baseline import FloatArray
from topr_trl.curation import REPEATING, Curated
from topr_trl.data.batch_samplers import FilledRows, FilledSampler, StepsOfGroups, StepsSortedByLength
from topr_trl.data.collator import Collator, join_sequences, select_units, unflatten
from topr_trl.data.preparation import ScoredRows
from topr_trl.data.sampler_logps import temperature_of
from topr_trl.data.text_tokens import stop_tokens
from topr_trl.data.tokenization import tokenizer_of
from topr_trl.data.tokenized_rows import (
    COLUMNS,
    check_special_tokens,
    check_tokens,
    column,
    is_prepared,
    lengths_of,
    prompt_groups,
)
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.trainers.base import TOPRMixin
from topr_trl.trainers.completions_table import LogCompletions
from topr_trl.trainers.fingerprints import mu_fingerprint, text_fingerprint
from topr_trl.trainers.forward_checks import depends_on_batch, text_model, virtual_tokens, without_cudnn_attention
from topr_trl.trainers.log_mu import LogMu, NeededRows
from topr_trl.trainers.messages import say, say_recipe, say_share, say_source_of_log_mu, warn_of_signs
from topr_trl.trainers.shared_prompts import share_stored
from topr_trl.trainers.start_checks import model_and_settings
from topr_trl.trainers.training_warnings import warn_of_many_reads, warn_of_scale

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class OfflineTOPRTrainer(TOPRMixin, SFTTrainer):
    """Trainer for Tapered Off-Policy REINFORCE (TOPR), on stored completions with rewards.

    The method was proposed in [Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for
    LLMs](https://huggingface.co/papers/2503.14286). The trainer takes the arguments of [`~trl.SFTTrainer`], except for
    `data_collator`, `formatting_func`, `compute_loss_func` and `compute_metrics`.

    Before the first step, the trainer computes log μ with the starting weights, for each row whose weight in the loss
    depends on log μ. It writes log μ to `output_dir/log_mu.parquet`, and a resumed run reads this file. Rows with a
    column `mu_logps` keep their values. Use this column for completions that another model wrote. With
    `log_mu="sampler"`, log μ comes from the column `sampler_logps`.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import OfflineTOPRTrainer

    >>> rows = [
    ...     {"prompt": "3 + 4 = ", "completion": "7", "reward": 1.0},
    ...     {"prompt": "3 + 4 = ", "completion": "8", "reward": -1.0},
    ... ]
    >>> trainer = OfflineTOPRTrainer(
    ...     model="Qwen/Qwen2.5-0.5B",
    ...     train_dataset=Dataset.from_list(rows),
    ... )
    >>> trainer.train()
    ```

    Args:
        model (`str`, `os.PathLike`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train: a model id on the Hub, a folder written by `save_pretrained`, or a causal language model.
            Models given by name are loaded in float32, with the arguments in `args.model_init_kwargs`.
        args ([`OfflineTOPRConfig`], *optional*):
            Settings. `None` creates default settings with the output folder `MODEL-TOPR`.
        train_dataset ([`~datasets.Dataset`]):
            Rows to train on, with the columns `prompt`, `completion` and `reward` (or `turn_rewards`). Prompts and
            completions are text, messages or token ids. `topr_trl.data.rows` lists all columns.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.DatasetDict`] or `dict[str, Dataset]`, *optional*):
            Rows to evaluate, in the form of `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer or processor. `None` loads the model's own.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks that are added to the default ones.
        optimizers (`tuple[Optimizer | None, LambdaLR | None]`, *optional*, defaults to `(None, None)`):
            Optimizer and schedule. `None` creates them from `args`.
        optimizer_cls_and_kwargs (`tuple[type[torch.optim.Optimizer], dict[str, Any]]`, *optional*):
            Class and keyword arguments of the optimizer. Replaces `optim` in `args`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization used to load a model that is given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train. `None` adds no adapter to the model.

    Attributes:
        curated ([`Curated`]):
            The rows of `train_dataset` that were chosen.

    Raises:
        TypeError: `args` is not an [`OfflineTOPRConfig`], or a dataset is not a `Dataset`.
        FileNotFoundError: `model` is the path of a folder that does not exist.
        ValueError: rows are malformed or too long, an argument or setting cannot be used with this trainer, or log π of
            a row depends on the other rows of its batch.
    """

    _kind = "offline"
    # transformers' Trainer annotates these attributes with wider types.
    args: OfflineTOPRConfig
    train_dataset: Dataset
    eval_dataset: Dataset | dict[str, Dataset] | None
    data_collator: Any
    _scored: dict[str, ScoredRows]  # datasets that are not tokenized yet, by name
    _row_tokenizer: "PreTrainedTokenizerBase"
    _temperature: float  # sampling temperature of the training rows, at which log π is computed
    _evaluation_baseline: dict[str, float | None] = {}  # baseline settings that evaluation sets use instead of `args`
    _training_rows: NeededRows  # rows of the latest call of `train`
    _sampler_reported: bool  # whether training rows have `sampler_logps`
    _prepared = 0  # number of datasets tokenized so far; the next dataset gets this number in its column `dataset`

    def __init__(
        self,
        model: "str | os.PathLike[str] | PreTrainedModel | PeftModel",
        args: OfflineTOPRConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        **kwargs: Any,
    ) -> None:
        for foreign in ("data_collator", "formatting_func", "compute_loss_func", "compute_metrics"):
            if kwargs.get(foreign) is not None:
                raise ValueError(f"OfflineTOPRTrainer does not take {foreign}: rows and loss are TOPR's. Remove it.")
        evaluated = _by_name(eval_dataset)
        datasets = {"train": train_dataset, **evaluated}
        self._scored = {name: ScoredRows.read(name, rows) for name, rows in datasets.items()}
        self._temperature = temperature_of({name: scored.temperatures for name, scored in self._scored.items()})
        model, args = model_and_settings("OfflineTOPRTrainer", model, args, OfflineTOPRConfig)
        args.refuse_loss_as_metric(evaluated)
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        # `compute_loss` divides by the number of rows of the whole step, so Trainer must not divide by the number of
        # micro-batches.
        self.model_accepts_loss_kwargs = True
        check_special_tokens(self._row_tokenizer, self.model.config.get_text_config())
        # Other programs stop at the tokens of the saved configuration.
        if (saved := getattr(self.model, "generation_config", None)) is not None:
            saved.eos_token_id = stop_tokens(self._row_tokenizer, saved) or None
        self._check_tokens({"train": self.train_dataset, **_by_name(self.eval_dataset)})
        # Replace SFTTrainer's head, which also computes the entropy and the most likely token, for metrics of SFT.
        add_fused_lm_head(text_model(self.model), temperature=self._temperature)
        self._log_mu = LogMu(args, self.accelerator)
        # The auxiliary loss of a mixture of experts needs the tokens of all rows, including rows with R = 0.
        self.data_collator = Collator(
            self.data_collator, args.needs_mu_of_tokens, not self.aux_loss_enabled, self._log_mu.values
        )
        self._check_model(share_stored)
        if args.log_completions:
            self._row_readers["train"].append("table")
            self.add_callback(LogCompletions(self))

    # SFTTrainer would tokenize and truncate rows differently.
    def _prepare_dataset(
        self, dataset: Dataset, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Dataset:
        scored = self._scored.pop(dataset_name)
        self._row_tokenizer = tokenizer_of(processing_class, args.chat_template_path is not None)
        has_logps = "sampler_logps" in dataset.column_names
        if args.log_mu == "sampler" and not has_logps:
            raise ValueError(
                "log_mu='sampler' needs the column `sampler_logps`: the sampler's log-probabilities. Add it, or set "
                "log_mu='trainer'."
            )
        is_train = dataset_name == "train"
        if is_train:
            self._sampler_reported = has_logps and column(dataset, "sampler_logps").null_count < len(dataset)
            rewards, curated = self._choose(scored, args)
        else:
            rewards, curated = scored.choose(args, args.seed, rule="none", **self._evaluation_baseline)
        dataset = scored.tokenize(
            curated.indices, rewards, self._row_tokenizer, args, self._temperature, args.dataset_num_proc
        )
        if is_train:
            rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            steps = ceil(len(dataset) / rows_per_step)
            warn_of_many_reads(
                curated, rewards, args.max_steps / steps if args.max_steps > 0 else args.num_train_epochs
            )
            if args.shuffle_dataset:
                dataset = dataset.shuffle(seed=args.seed)
        dataset = dataset.add_column("dataset", np.full(len(dataset), self._prepared))
        self._prepared += 1
        return dataset

    def _choose(self, scored: ScoredRows, args: OfflineTOPRConfig) -> tuple[FloatArray, Curated]:
        """Choose the units to train on. Return their R and the choice, and store the choice in `curated`."""
        scored.check_values(args)
        rewards, curated = scored.choose(args, args.seed)
        by_turn, chosen = scored.units.turns_R.any(), str(curated)
        if args.curation in REPEATING and not by_turn:
            say(f"curation={args.curation!r}: {chosen}.", args)
        scored.check_signal(rewards, args)
        self.curated, self._rows_trained_on = curated, chosen
        if by_turn:
            self._rows_trained_on += "; each turn with a reward counts as a row"
            means = ", and each turn index has its own mean as baseline" * scored.has_returns
            say(f"each turn with a reward counts as a row{means}: {chosen}.", args)
        if args.effective_positive_share is not None or args.curation == "balanced":
            # The baseline is computed from the chosen rows of the training set, and evaluation sets use this baseline.
            # With `reward_after_baseline`, raw rewards can be missing.
            baselines = scored.rewards_U[curated.indices] - rewards
            known = baselines[~np.isnan(baselines)]
            if len(known):
                self._evaluation_baseline = {"baseline": float(known[0]), "effective_positive_share": None}
        if scored.after_baseline_U is not None:
            self._rows_trained_on += "; their column `reward_after_baseline` replaces baseline and curation"
            say("rewards come from reward_after_baseline, which already includes baseline and curation.", args)
            self._said.add("share")  # No setting changes it.
        if scored.times_U is None or not (rewards > 0).all():  # Otherwise, topr curate has repeated right answers.
            warn_of_signs(curated, not scored.rewards_U.all(), args, self._said)
        warn_of_scale(rewards, self._said)
        say_recipe(scored, args)
        return rewards, curated

    def _check_tokens(self, datasets: dict[str, Dataset]) -> None:
        for name, dataset in datasets.items():
            config = self.model.config.get_text_config()
            check_tokens(name, dataset, config, self.args.max_length, virtual_tokens(self.model))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [c for c in COLUMNS if c not in self._signature_columns]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        args, dataset = self.args, self.train_dataset if train_dataset is None else train_dataset
        # Do not sort rows by length in three cases. With padding_free, sorting would save no padding, and would put the
        # longest rows into one micro-batch. The auxiliary loss of a mixture of experts depends on which rows share a
        # micro-batch. With split_batches, micro-batches do not follow the sorted order.
        plain = args.padding_free or self.aux_loss_enabled or args.accelerator_config.split_batches
        if isinstance(sampler, RandomSampler):
            # Accelerate replaces a RandomSampler with a SeedableRandomSampler, but not inside the samplers below.
            sampler = SeedableRandomSampler(dataset, data_seed=args.seed if args.data_seed is None else args.data_seed)
            rows = self._rows_per_step
            if self._sharing.together > 1:
                lengths = lengths_of(dataset) if args.sort_by_length and not plain else None
                sampler = StepsOfGroups(sampler, prompt_groups(dataset), lengths, rows)
            elif args.sort_by_length and not plain:
                sampler = StepsSortedByLength(sampler, lengths_of(dataset), rows)
        self._order = sampler
        return sampler

    def _get_dataloader(self, dataset: Dataset, *args: Any, sampler_fn: Any = None, **kwargs: Any) -> Any:
        """Return a dataloader that reads each row once. Accelerate would repeat rows to fill the last batches."""
        processes = self.accelerator.num_processes
        if processes == 1 or self.args.dataloader_drop_last:
            return super()._get_dataloader(dataset, *args, sampler_fn=sampler_fn, **kwargs)
        rows = self._remove_unused_columns(dataset)
        multiple = kwargs["batch_size"] * (1 if self.args.accelerator_config.split_batches else processes)

        def filled(_: Dataset) -> FilledSampler:
            return FilledSampler(sampler_fn(rows) or SequentialSampler(rows), multiple)

        return super()._get_dataloader(FilledRows(rows), *args, sampler_fn=filled, **kwargs)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository on the Hub. See `transformers.Trainer.init_hf_repo`."""
        super().init_hf_repo(*args, **kwargs)
        # The file with log μ is pushed on purpose: a run that resumes from a checkpoint on the Hub needs it.
        warnings.filterwarnings("ignore", r"It seems that you are about to commit a data file \(log_mu", UserWarning)

    @property
    def sampler_distance(self) -> dict[str, float]:
        """Distance between `sampler_logps` and log μ of the training rows, in nats, or `{}` if it is unknown.

        `topr_trl.trainers.training_warnings.sampler_distance` describes the keys.
        """
        return self._log_mu.sampler_distance

    def compute_log_mu(self) -> dict[str, float]:
        """Compute log μ with the current weights and write it to the output folder, without training.

        The computation needs no more memory than `train`. Finished parts are kept in `output_dir/log_mu_parts`, so a
        second call continues an interrupted call. Under FSDP2 and DeepSpeed, create a new trainer before you call
        `train`.

        Returns:
            `dict[str, float]`: the property `sampler_distance`.

        Raises:
            ValueError: training has changed the weights.
        """
        if self.state.global_step > 0:
            raise ValueError(
                "log μ needs the starting weights, and training has changed them. Call compute_log_mu() before train()."
            )
        # Training for 0 epochs shards the model and computes log μ. Without a step, the schedule does not matter.
        args, self.args = self.args, copy(self.args)
        self.args.num_train_epochs, self.args.max_steps, self.args.eval_on_start = 0, -1, False
        self.args.lr_scheduler_type, self.args.lr_scheduler_kwargs = "constant", None
        try:
            self.train()
        finally:
            self.args = args
        return self.sampler_distance

    def _check_rows(self, model: nn.Module) -> None:
        """Raise a ValueError if log π of a row depends on the other rows of its batch."""

        def log_probs(sequences: list[list[int]]) -> list[Tensor]:
            rows = [{"input_ids": ids, "prompt_length": 1} for ids in sequences]
            batch = self._prepare_inputs(self.data_collator.collate_tokens(rows))
            logps, mask, _ = self._policy_logps(model, batch)
            return [row[own.bool()] for row, own in zip(logps, mask, strict=True)]

        if depends_on_batch(self, model, log_probs, self._row_tokenizer, self._temperature):
            remedy = "Set padding_free=False" if self.padding_free else "Train a different model"
            attention = self.model.config._attn_implementation
            raise ValueError(
                f"log π of a row depends on the other rows of its batch with {type(text_model(self.model)).__name__}, "
                f"attention {attention} and padding_free={self.padding_free}, so π/μ would be wrong. {remedy}."
            )

    def _training_begins(self, model: nn.Module) -> None:
        super()._training_begins(model)
        trains = self.state.max_steps > 0  # `compute_log_mu` takes no steps.
        self._compute_log_mu(model, keep_parts=not trains)
        if trains and self.sampler_distance:
            self.log({f"topr/sampler_distance/{name}": value for name, value in self.sampler_distance.items()})

    def _before_training(self, checkpoint: Path | None) -> None:
        datasets = {"train": self.train_dataset, **_by_name(self.eval_dataset)}
        rows = {name: NeededRows.of(each, self.args.limits) for name, each in datasets.items()}
        self._training_rows = rows["train"]
        if self._will_train:
            say_share(self._training_rows.rewards_U, self.args, self._said)
        super()._before_training(checkpoint)
        self._log_mu.planned.clear()  # A computation that was interrupted may have left them.
        for name, each in rows.items():
            self._log_mu.plan(name, each, self._run["model"], checkpoint, is_trained=self.state.global_step > 0)
        if "train" in self._log_mu.planned and not self._sampler_reported:
            say_source_of_log_mu(self.args)

    def _identity_values(self) -> dict[str, Any]:
        values = {"temperature": self._temperature, "rows": self._training_rows.fingerprint}
        if self.args.dataloader_drop_last:  # An incomplete micro-batch at the end of an epoch is dropped.
            values["rows_per_micro_batch"] = self._rows_per_micro_batch
        return values

    def _compute_log_mu(self, model: nn.Module, keep_parts: bool = False) -> None:
        if self._log_mu.planned:
            self._log_mu.prompts_together, config = self._sharing.is_on, self.model.config
            self._log_mu.numerics = (
                f"{self.accelerator.mixed_precision} {next(self.model.parameters()).dtype} "
                f"{config._attn_implementation} {text_fingerprint(config.to_json_string())}"
            )
            was_training = model.training
            model.eval()
            with without_cudnn_attention():
                self._log_mu.compute(
                    lambda batch: self._policy_logps(model, batch)[:2], self.data_collator.collate_tokens, keep_parts
                )
            model.train(was_training)

    def evaluate(
        self, eval_dataset: Dataset | dict[str, Dataset] | str | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        """Compute loss and metrics of evaluation rows. See `transformers.Trainer.evaluate`.

        Args:
            eval_dataset ([`~datasets.Dataset`], `dict[str, Dataset]` or `str`, *optional*):
                Rows to evaluate, or the name of one of the trainer's evaluation sets. `None` evaluates all of them.
            *args (`Any`):
                Other arguments of `transformers.Trainer.evaluate`.
            **kwargs (`Any`):
                Other arguments of `transformers.Trainer.evaluate`.

        Returns:
            `dict[str, float]`: metrics by name.

        Raises:
            TypeError: the rows are not a `Dataset`.
            ValueError: the rows are malformed or too long. Or the rows need log μ, but training has changed the
                starting weights, or FSDP or DeepSpeed shards the model only when training begins.
        """
        given = {} if isinstance(eval_dataset, str) else _by_name(eval_dataset)
        raw = {name: rows for name, rows in given.items() if not is_prepared(rows)}
        self._scored = {name: ScoredRows.read(name, rows) for name, rows in raw.items()}
        temperature_of({name: scored.temperatures for name, scored in self._scored.items()}, self._temperature)
        new = {
            name: self._prepare_dataset(rows, self.processing_class, self.args, False, None, name)
            for name, rows in raw.items()
        }
        self._check_tokens(new)
        if new:
            eval_dataset = {**given, **new} if isinstance(eval_dataset, dict) else new["eval"]
        if self.is_in_train and self._log_mu.planned:  # A callback evaluates before `_training_begins` is called.
            self._training_begins(self.model_wrapped)
        if self.state.global_step == 0 and not self.is_in_train:
            self._cast_for_evaluation()
            own = {"train": self.train_dataset} if any(rows is self.train_dataset for rows in given.values()) else {}
            # With the prefix `given_`, files of new sets do not replace files of the trainer's sets. A resumed run
            # needs the files of the trainer's sets.
            model = mu_fingerprint(self.model, self._temperature)
            every = {**own, **_by_name(self.eval_dataset), **{f"given_{name}": rows for name, rows in new.items()}}
            for name, rows in every.items():
                self._log_mu.plan(name, NeededRows.of(rows, self.args.limits), model)
            if self._log_mu.planned and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
                self._log_mu.planned.clear()
                raise ValueError(
                    "Under DeepSpeed and FSDP, log μ of evaluation rows is computed when training begins. Set "
                    "eval_on_start=True, or add a column mu_logps to the rows."
                )
            self._compute_log_mu(self.model)
        else:
            for name, rows in new.items():
                self._log_mu.plan(name, NeededRows.of(rows, self.args.limits), self._run["model"], is_trained=True)
        # Skip SFTTrainer's method, because it would prepare the rows again, and differently.
        return super(SFTTrainer, self).evaluate(eval_dataset, *args, **kwargs)

    def _cast_for_evaluation(self) -> None:
        """Cast and move the model as Trainer does for evaluation, but before log μ is computed.

        Then log π and log μ are computed with the same weights.
        """
        for dtype, asked in ((torch.bfloat16, self.args.bf16_full_eval), (torch.float16, self.args.fp16_full_eval)):
            if asked and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
                self.model.to(device=self.args.device, dtype=dtype)

    def _policy_logps(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """Return (B, T) log π of the next tokens, their (B, T) completion mask, and the outputs of the model."""
        inputs = dict(inputs)
        lengths, parts = inputs.pop("lengths"), inputs.pop("parts")
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with self.accelerator.autocast():
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        logps, mask = outputs.log_probs, outputs.label_mask
        if self.padding_free:  # (1, tokens of all rows - 1)
            logps, mask = unflatten(logps, lengths), unflatten(mask, lengths)
        return join_sequences(logps, parts), join_sequences(mask, parts), outputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean loss over units, which are rows or turns with rewards of their own (Algorithm 1).

        Args:
            model (`torch.nn.Module`):
                Model that computes log π.
            inputs (`dict[str, Any]`):
                Micro-batch. See `topr_trl.data.collator.Collator`.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Must be `False`.
            num_items_in_batch (`torch.Tensor`, *optional*):
                Number of units of the optimizer step, over all processes. `None` computes the mean over this batch, for
                evaluation.

        Returns:
            `torch.Tensor`: the loss, a scalar.

        Raises:
            ValueError: `return_outputs` is `True`.
        """
        if return_outputs:
            raise ValueError("OfflineTOPRTrainer computes no logits, so it cannot return outputs or predict.")
        rewards_N, mu_logps, numbers_N2 = (inputs.pop(name) for name in ("reward", "mu_logps", "row"))
        place_B = inputs.pop("place", None)
        logps, mask, outputs = self._policy_logps(model, inputs)
        if place_B is not None:  # From here on, a row is a unit: a turn with its tokens alone, or a whole completion.
            logps, mask = select_units(logps, mask, place_B, numbers_N2[: len(place_B), 1])
        if self.args.needs_mu_of_tokens:
            mu_logps = torch.full_like(logps, torch.nan, dtype=torch.float32).masked_scatter(mask, mu_logps)
        losses_B = self._compute_losses(logps, mu_logps, rewards_N, mask, numbers_N2).losses_B
        if num_items_in_batch is None:
            loss, windows = losses_B.sum() / len(rewards_N), 1
        else:
            # Gradients are averaged over processes, so the factor turns the average into a sum.
            loss = losses_B.sum() / num_items_in_batch * self.accelerator.num_processes
            windows = self.current_gradient_accumulation_steps
        if self.aux_loss_enabled:
            counts = ~rewards_N.isnan().all()
            loss = loss + self.router_aux_loss_coef * (counts * outputs.aux_loss) / windows
            self._metrics[self._mode]["aux_loss"].append(outputs.aux_loss.detach())
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device. Keep rewards and log μ in float32: with DeepSpeed, Trainer casts all floats."""
        kept = {name: inputs[name].to(self.args.device) for name in ("reward", "mu_logps") if name in inputs}
        return {**super()._prepare_inputs(inputs), **kept}

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Count the units of an optimizer step over all processes. Trainer would count tokens instead."""
        counted = sum((~batch["reward"].isnan()).sum() for batch in batch_samples)
        rows = torch.as_tensor(counted, device=device)
        return self.accelerator.gather(rows).sum()


def _by_name(datasets: Dataset | dict[str, Dataset] | None) -> dict[str, Dataset]:
    """Return evaluation datasets by name. A single dataset gets the name `eval`.

    Raises:
        ValueError: a dataset has the name `train`.
    """
    if not isinstance(datasets, dict):
        return {} if datasets is None else {"eval": datasets}
    if "train" in datasets:
        raise ValueError("'train' is the name of the training dataset. Give the evaluation dataset another name.")
    return datasets
