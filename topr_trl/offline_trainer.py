"""`OfflineTOPRTrainer`: learn from a table of prompts, completions and rewards, without generating a token."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from trl import SFTTrainer
from trl.trainer.utils import get_config_model_id

from topr_trl.candidates import problem_column, reward_column, tokenize_row
from topr_trl.config import OfflineTOPRConfig
from topr_trl.curation import compose
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
from topr_trl.metrics import RowMetrics
from topr_trl.paper import PAPER

logger = logging.getLogger(__name__)


class OfflineTOPRTrainer(SFTTrainer):
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

    _tag_names = ["trl", "topr"]
    _name = "TOPR"
    _paper = PAPER

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
        self._row_metrics = {"train": RowMetrics(), "eval": RowMetrics()}
        self._context = None
        if isinstance(eval_dataset, DatasetDict):
            eval_dataset = dict(eval_dataset)
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self._check_lengths()
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
        if "labels" in dataset.column_names:  # prepared before
            return dataset
        raw, problems = reward_column(dataset), problem_column(dataset)
        train = dataset_name == "train"
        rewards, curated = compose(
            raw,
            problems,
            baseline=args.baseline_value,
            effective_positive_share=args.effective_positive_share,
            rule=args.curation if train else "none",
            size=args.iteration_size,
            positive_share=args.curation_positive_share,
            sample_ids=dataset["sample_id"] if "sample_id" in dataset.column_names else None,
            seed=args.seed,
        )
        if len(rewards) == 0:
            raise ValueError(f"curation={args.curation!r} chose no row: {curated}.")
        if train:
            self.curated = curated
            _warn_about_signs(raw[curated.indices], rewards, args)
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
        if args.log_mu == "sampler" and not keep:
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

    def _check_lengths(self) -> None:
        limits = {"max_length": self.args.max_length}
        limits["the model's context"] = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        evals = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evals}.items():
            lengths = (
                torch.tensor([len(ids) for ids in dataset["input_ids"]]) if dataset is not None else torch.zeros(0)
            )
            for what, limit in limits.items():
                too_long = (lengths > limit).nonzero().flatten() if limit is not None else torch.zeros(0)
                if len(too_long):
                    raise ValueError(
                        f"{len(too_long)} of {len(lengths)} rows of the {name} dataset are longer than {what}, {limit} "
                        f"tokens; the first has {int(lengths[too_long[0]])}. Drop or shorten them."
                    )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [c for c in ("reward", "mu_logps") if c not in self._signature_columns]

    # log μ: scored with the starting weights, once.

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        self.train_dataset = self._with_log_mu(self.train_dataset, "log_mu", resumed=bool(resume_from_checkpoint))
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._with_log_mu(dataset, f"log_mu_{name}", resumed=bool(resume_from_checkpoint))
                for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = self._with_log_mu(self.eval_dataset, "log_mu_eval", bool(resume_from_checkpoint))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _with_log_mu(self, dataset: Dataset, name: str, resumed: bool) -> Dataset:
        """The dataset with a complete `mu_logps`: empty where the row's weight does not depend on it."""
        needs = rows_that_need_log_mu(dataset, self.args.limits)
        model = fingerprint(self.accelerator.unwrap_model(self.model))
        if "mu_logps" in dataset.column_names:
            check_log_mu(dataset, needs, model, self.args.ratio_level)
            return dataset
        rows = rows_fingerprint(dataset)
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in self._row_metrics[mode].flush(self.accelerator).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)


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


def _warn_about_signs(raw: Any, rewards: Any, args: OfflineTOPRConfig) -> None:
    if (rewards >= 0).all() and args.limits.b_neg > 0:
        advice = (
            " Rewards of 0 are no negatives: set baseline=0.5, or effective_positive_share." if (raw == 0).any() else ""
        )
        warnings.warn(
            f"None of the {len(rewards)} rows has a negative reward after the baseline: TOPR then is reward-weighted "
            f"supervised fine-tuning.{advice}",
            stacklevel=4,
        )
    elif (rewards < 0).all():
        warnings.warn(
            f"All {len(rewards)} rows have a negative reward after the baseline: the model only learns what to avoid, "
            "and nothing says what to write instead. Add positives, or lower the baseline.",
            stacklevel=4,
        )
