"""`OfflineTOPRTrainer`: learn from a table of prompts, completions and rewards, without generating a token."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from trl import SFTTrainer
from trl.trainer.utils import get_config_model_id

from topr_trl.baseline import FloatArray
from topr_trl.candidates import problem_column, reward_column, tokenize_row
from topr_trl.config import OfflineTOPRConfig
from topr_trl.curation import Curated, compose
from topr_trl.log_mu import (
    check_log_mu,
    fingerprint,
    load_log_mu,
    rows_fingerprint,
    rows_that_need_log_mu,
    save_log_mu,
    score_log_mu,
)
from topr_trl.loss import log_ratios, topr_loss, truncated_weights
from topr_trl.trainer_base import TOPRMixin

logger = logging.getLogger(__name__)


class OfflineTOPRTrainer(TOPRMixin, SFTTrainer):
    """Tapered Off-Policy REINFORCE (arXiv 2503.14286) on stored responses.

    Takes what [`~trl.SFTTrainer`] takes. The dataset holds `prompt`, `completion` and `reward` (all columns:
    `topr_trl.candidates`). Before the first step the starting model scores log μ once, for the rows whose weight
    depends on it, and writes it to `output_dir/log_mu.parquet`; a resumed run reads it there. Rows that carry
    `mu_logps` of their own keep them, for learning from what another model wrote.

    Attributes:
        curated (`Curated`): which rows of the training set were chosen.

    Raises:
        TypeError: `args` is not an `OfflineTOPRConfig`, or a dataset is not a `datasets.Dataset`.
        ValueError: rows are malformed or too long, or their log μ is of another model.
    """

    # Trainer's own annotations do not tell what they hold here.
    args: OfflineTOPRConfig
    train_dataset: Dataset
    eval_dataset: Any
    data_collator: Any
    _baseline: float  # c of the training set

    def __init__(
        self,
        model: Any,
        args: OfflineTOPRConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = OfflineTOPRConfig(f"{model_name.split('/')[-1]}-TOPR")
        if not isinstance(args, OfflineTOPRConfig):
            raise TypeError(f"OfflineTOPRTrainer needs an OfflineTOPRConfig, not a {type(args).__name__}.")
        for foreign in ("data_collator", "formatting_func", "compute_loss_func"):
            if kwargs.get(foreign) is not None:
                raise ValueError(f"{foreign} has no place in OfflineTOPRTrainer: rows and loss are TOPR's. Remove it.")
        datasets = [train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])]
        for dataset in datasets[:1] + [d for d in datasets[1:] if d is not None]:
            if not isinstance(dataset, Dataset):
                raise TypeError(
                    f"OfflineTOPRTrainer needs a datasets.Dataset, not a {type(dataset).__name__}: baseline, curation "
                    "and log μ look at all rows before the first step."
                )
            if {"image", "images"} & set(dataset.column_names):
                raise ValueError("Rows with images are not supported offline. Use TOPRTrainer for vision models.")
            reward_column(dataset)  # raises before a model is loaded
        if isinstance(eval_dataset, DatasetDict):
            eval_dataset = dict(eval_dataset)
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "OfflineTOPRTrainer does not run under DeepSpeed or FSDP yet: log μ is scored before they shard the "
                "weights. Launch it in one process or with plain data parallelism."
            )
        self._check_lengths({"train": self.train_dataset, **self._by_name(self.eval_dataset)})
        self.data_collator = _WithRewards(self.data_collator)

    # Rows: SFTTrainer would tokenise and cut them its own way.

    def _prepare_dataset(
        self,
        dataset: Dataset,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Dataset:
        raw, problems = reward_column(dataset), problem_column(dataset)
        train = dataset_name == "train"
        share = args.effective_positive_share
        rewards, curated = compose(
            raw,
            problems,
            # A target share describes the training set; other sets get the baseline that it led to.
            baseline=args.baseline_value if train or share is None else self._baseline,
            effective_positive_share=share if train else None,
            rule=args.curation if train else "none",
            size=args.iteration_size,
            positive_share=args.curation_positive_share,
            sample_ids=dataset["sample_id"] if "sample_id" in dataset.column_names else None,
            seed=args.seed,
        )
        if len(rewards) == 0:
            raise ValueError(f"curation={args.curation!r} chose no row: {curated}.")
        if train:
            self._note_choice(raw, rewards, curated, args)
        dataset = dataset.select(curated.indices).remove_columns("reward")

        def tokenize(row: dict[str, Any], index: int) -> dict[str, Any]:
            try:
                prompt_ids, completion_ids = tokenize_row(row, processing_class)
            except ValueError as error:
                raise ValueError(f"Row {curated.indices[index]} of the {dataset_name} dataset: {error}.") from None
            return {
                "input_ids": prompt_ids + completion_ids,
                "labels": [-100] * len(prompt_ids) + completion_ids,
                "reward": float(rewards[index]),
            }

        mu_column = "sampler_logps" if args.log_mu == "sampler" else "mu_logps"
        keep = [name for name in (mu_column, "mu_fingerprint") if name in dataset.column_names]
        if args.log_mu == "sampler" and mu_column not in keep:
            raise ValueError("log_mu='sampler' needs the column `sampler_logps`: the sampler's log-probabilities.")
        dataset = dataset.map(
            tokenize,
            with_indices=True,
            num_proc=args.dataset_num_proc,
            remove_columns=[name for name in dataset.column_names if name not in keep],
            desc=f"Tokenizing {dataset_name} dataset",
        )
        return (
            dataset.rename_column(mu_column, "mu_logps") if mu_column in keep and mu_column != "mu_logps" else dataset
        )

    def _note_choice(self, raw: FloatArray, rewards: FloatArray, curated: Curated, args: OfflineTOPRConfig) -> None:
        if not rewards.any():
            raise ValueError(
                f"All {len(rewards)} rewards of the training dataset are 0 after the baseline: there is nothing to "
                "learn. Add rows with other rewards, or change baseline."
            )
        self.curated, self._baseline = curated, float(raw[curated.indices[0]] - rewards[0])
        self._warn_about_signs(curated, bool((raw == 0).any()), args.limits)

    @staticmethod
    def _by_name(datasets: Any) -> dict[str, Dataset]:
        """The evaluation datasets by name; one without a name is `eval`."""
        return datasets if isinstance(datasets, dict) else {} if datasets is None else {"eval": datasets}

    def _check_lengths(self, datasets: dict[str, Dataset]) -> None:
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for name, dataset in datasets.items():
            lengths = np.array([len(ids) for ids in dataset["input_ids"]])
            for what, limit in (("max_length", self.args.max_length), ("the model's context", context)):
                too_long = np.flatnonzero(lengths > (np.inf if limit is None else limit))
                if len(too_long):
                    raise ValueError(
                        f"{len(too_long)} of {len(lengths)} rows of the {name} dataset are longer than {what}, {limit} "
                        f"tokens; the first has {lengths[too_long[0]]}. Drop or shorten them."
                    )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [c for c in ("reward", "mu_logps") if c not in self._signature_columns]

    # log μ: scored with the starting weights, once.

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Score log μ with the starting weights, then train; see `transformers.Trainer.train`."""
        resumed = bool(resume_from_checkpoint)
        self.train_dataset = self._with_log_mu(self.train_dataset, "log_mu", resumed)
        self._score_eval_datasets(resumed)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _score_eval_datasets(self, resumed: bool) -> None:
        scored = {
            name: self._with_log_mu(dataset, f"log_mu_{name}", resumed)
            for name, dataset in self._by_name(self.eval_dataset).items()
        }
        self.eval_dataset = scored if isinstance(self.eval_dataset, dict) else scored.get("eval")

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss and metrics of evaluation rows; see `transformers.Trainer.evaluate`.

        Raises:
            ValueError: rows that were not given at construction need log μ, and the weights it is of are gone.
        """
        if self.state.global_step == 0:
            self._score_eval_datasets(resumed=False)
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            new = {
                name: self._prepare_dataset(dataset, self.processing_class, self.args, False, None, name)
                for name, dataset in self._by_name(eval_dataset).items()
                if "labels" not in dataset.column_names  # a dictionary comes back here set by set
            }
            self._check_lengths(new)
            for name, dataset in new.items():
                needed = any(rows_that_need_log_mu(dataset, self.args.limits))
                if self.state.global_step and needed and "mu_logps" not in dataset.column_names:
                    raise ValueError(
                        f"The rows of {name} need log μ of the starting weights, and training has moved them. Pass the "
                        "dataset as eval_dataset when you make the trainer, or give it a column mu_logps."
                    )
                new[name] = self._with_log_mu(dataset, f"log_mu_{name}", resumed=False)
            if new:
                eval_dataset = new if isinstance(eval_dataset, dict) else new["eval"]
        # SFTTrainer's own would prepare the rows its way.
        return super(SFTTrainer, self).evaluate(eval_dataset, *args, **kwargs)

    def _with_log_mu(self, dataset: Dataset, name: str, resumed: bool) -> Dataset:
        """The dataset with a complete `mu_logps`: empty where the row's weight does not depend on it."""
        needs = rows_that_need_log_mu(dataset, self.args.limits)
        model = fingerprint(self.accelerator.unwrap_model(self.model))
        if "mu_logps" in dataset.column_names:
            check_log_mu(dataset, needs, model, self.args.ratio_level)
            return dataset
        rows = rows_fingerprint(dataset, needs)
        path = Path(self.args.output_dir) / f"{name}.parquet"
        mu_logps = load_log_mu(path, model, rows) if resumed else None
        if mu_logps is None:
            indices = [i for i, needed in enumerate(needs) if needed]
            logger.info("Scoring log μ of %d of %d rows.", len(indices), len(dataset))
            mu_logps = [None] * len(dataset)
            was_training = self.model.training
            self.model.eval()
            scored = score_log_mu(
                self._policy_logps,
                dataset.select(indices).select_columns(["input_ids", "labels"]),
                self.data_collator.collate,
                self.accelerator,
                self.args.per_device_eval_batch_size,
            )
            self.model.train(was_training)
            for i, logps in zip(indices, scored, strict=True):
                mu_logps[i] = logps
            if self.accelerator.is_main_process:
                save_log_mu(path, mu_logps, model, rows)
            self.accelerator.wait_for_everyone()
        return dataset.add_column("mu_logps", mu_logps)

    # Loss: Algorithm 1.

    def _policy_logps(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self._forward(self.model, inputs)
        return outputs.log_probs, outputs.label_mask

    def _forward(self, model: Any, inputs: dict[str, Any]) -> Any:
        if self.aux_loss_enabled:
            inputs = {**inputs, "output_router_logits": True}
        with self.accelerator.autocast():
            return model(**inputs, use_cache=False, fused_lm_head=True)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean over rows of Algorithm 1; `num_items_in_batch` counts the rows of the whole optimiser step."""
        if return_outputs:
            raise ValueError("OfflineTOPRTrainer does not return outputs; `compute_metrics` is not supported.")
        rewards_B, mu_B, mu_flat = inputs.pop("reward"), inputs.pop("mu_sum"), inputs.pop("mu_flat")
        outputs = self._forward(model, inputs)
        mask = outputs.label_mask
        mu_logps = mu_B
        if self.args.ratio_level == "token":
            mu_logps = torch.full_like(outputs.log_probs, torch.nan, dtype=torch.float32).masked_scatter(mask, mu_flat)
        args = self.args
        loss_B = topr_loss(
            outputs.log_probs, mu_logps, rewards_B, mask, args.limits, args.ratio_level, args.length_normalization
        )
        mode = "train" if self.model.training else "eval"
        with torch.no_grad():
            log_ratio = log_ratios(outputs.log_probs, mu_logps, mask, args.ratio_level)
            self._row_metrics[mode].add(truncated_weights(log_ratio, rewards_B, args.limits), log_ratio, rewards_B)

        if num_items_in_batch is None:
            loss, windows = loss_B.mean(), 1
        else:
            # DDP averages the gradients of the processes; the sum over all rows is divided by all rows.
            loss = loss_B.sum() / num_items_in_batch * self.accelerator.num_processes
            windows = self.current_gradient_accumulation_steps
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / windows
            self._metrics[mode]["aux_loss"].append(outputs.aux_loss.item())
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: Any) -> Tensor:
        """Rows of an optimiser step over all processes: Trainer would count tokens, and short rows would weigh less."""
        rows = torch.tensor(sum(len(batch["reward"]) for batch in batch_samples), device=device)
        return self.accelerator.gather(rows).sum()

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        return super().prediction_step(model, inputs, True, ignore_keys)


class _WithRewards:
    """TRL's collator for `input_ids` and `labels`, and beside it R and log μ of each row."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        mu = [row.get("mu_logps") for row in rows]
        per_token = [
            m if isinstance(m, list) and m else [torch.nan] * sum(label != -100 for label in row["labels"])
            for m, row in zip(mu, rows, strict=True)
        ]
        sums = [sum(m) if isinstance(m, list) and m else torch.nan if not isinstance(m, float) else m for m in mu]
        batch = self.collate([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows])
        batch["reward"] = torch.tensor([row["reward"] for row in rows], dtype=torch.float32)
        batch["mu_sum"] = torch.tensor(sums, dtype=torch.float32)
        batch["mu_flat"] = torch.tensor([value for m in per_token for value in m], dtype=torch.float32)
        return batch
