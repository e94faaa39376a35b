"""`OfflineTOPRTrainer`: learn from a table of prompts, completions and rewards, without generating a token."""

import itertools
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import is_peft_model
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import RandomSampler
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.utils import add_fused_lm_head, get_config_model_id

from topr_trl.baseline import FloatArray
from topr_trl.checkpoints import from_safetensors
from topr_trl.completions_log import LogCompletions
from topr_trl.config import OfflineTOPRConfig
from topr_trl.curation import Curated, compose
from topr_trl.data.collator import COLUMNS, Collator, StepsSortedByLength, unflatten
from topr_trl.data.rows import check_finish_reasons, id_column, problem_column, reward_column
from topr_trl.data.tokenization import MalformedRow, tokenize
from topr_trl.log_mu import (
    check_log_mu,
    column,
    fingerprint,
    lengths_of,
    load_log_mu,
    rows_fingerprint,
    rows_that_need_log_mu,
    sampler_distance,
    save_log_mu,
    score_log_mu,
)
from topr_trl.trainer_base import TOPRMixin

logger = logging.getLogger(__name__)

_ROWS = 2**40  # more than a dataset has: a row's number tells its dataset and its place there
_COMPARED = 1_000  # rows whose log μ is compared with the sampler's
_NAMED = 20  # rows that a message lists


class OfflineTOPRTrainer(TOPRMixin, SFTTrainer):
    """Tapered Off-Policy REINFORCE (arXiv 2503.14286) on stored responses.

    Takes what [`~trl.SFTTrainer`] takes. The dataset holds `prompt`, `completion` and `reward` (all columns:
    `topr_trl.data.rows`). Before the first step the starting model scores log μ once, for the rows whose weight
    depends on it, and writes it to `output_dir/log_mu.parquet`; a resumed run reads it there. Rows that carry
    `mu_logps` of their own keep them, for learning from what another model wrote.

    Attributes:
        curated (`Curated`): which rows of the training set were chosen.
        sampler_distance (`dict`): how far the rows' `sampler_logps` are from log μ, once that has been scored.

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
    _score_only = False
    _datasets = 0  # rows of all datasets are numbered

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
                    f"OfflineTOPRTrainer needs a datasets.Dataset; found {type(dataset).__name__}. Name a split, or "
                    "make one of a stream: baseline, curation and log μ look at all rows before the first step."
                )
            if {"image", "images"} & set(dataset.column_names):
                raise ValueError("Rows with images are not supported offline. Use TOPRTrainer for vision models.")
            reward_column(dataset)  # raises before a model is loaded
            check_finish_reasons(dataset)
        if isinstance(eval_dataset, dict) and "train" in eval_dataset:
            raise ValueError("An evaluation dataset cannot be called 'train': the rows to learn from are. Rename it.")
        if isinstance(eval_dataset, DatasetDict):
            eval_dataset = dict(eval_dataset)
        if isinstance(model, str):
            args.model_init_kwargs = from_safetensors(model, args.model_init_kwargs)
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self._check_tokens({"train": self.train_dataset, **self._by_name(self.eval_dataset)})
        # SFTTrainer's head computes the entropy and the likeliest token of every position too, for metrics of its own.
        add_fused_lm_head(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        # The auxiliary loss of a mixture of experts is of all tokens.
        self.data_collator = Collator(self.data_collator, args.ratio_level, keep_idle=self.aux_loss_enabled)
        self.sampler_distance: dict[str, float] = {}
        self._to_score: dict[Path, tuple[Dataset, NDArray[np.bool_], str, str]] = {}
        self.add_callback(_ScoreLogMu(self))
        if args.log_completions:
            self.add_callback(LogCompletions(self))

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
            sample_ids=id_column(dataset, "sample_id") if "sample_id" in dataset.column_names else None,
            seed=args.seed,
        )
        if len(rewards) == 0:
            raise ValueError(f"curation={args.curation!r} chose no row: {curated}. Change curation or baseline.")
        if train:
            self._note_choice(raw, rewards, curated, args)
        mu_column = "sampler_logps" if args.log_mu == "sampler" else "mu_logps"
        keep = [name for name in (mu_column, "mu_fingerprint", "sampler_logps") if name in dataset.column_names]
        if args.log_mu == "sampler" and mu_column not in keep:
            raise ValueError(
                "log_mu='sampler' needs the column `sampler_logps`: the sampler's log-probabilities. Add it, or set "
                "log_mu='trainer'."
            )
        try:
            dataset = tokenize(
                dataset.select(curated.indices), processing_class, list(dict.fromkeys(keep)),
                num_proc=args.dataset_num_proc, desc=f"Tokenizing {dataset_name} dataset",
            )  # fmt: skip
        except MalformedRow as error:
            row = curated.indices[error.row]
            raise ValueError(f"Row {row} of the {dataset_name} dataset: {error.why}. Mend or drop it.") from None
        # Not in the mapped file: it serves whatever the baseline, and whatever other datasets there are.
        dataset = dataset.add_column("reward", rewards).add_column("given_reward", raw[curated.indices])
        dataset = dataset.add_column("row", self._datasets * _ROWS + curated.indices)
        self._datasets += 1
        return dataset.rename_column("sampler_logps", "mu_logps") if args.log_mu == "sampler" else dataset

    def _note_choice(self, raw: FloatArray, rewards: FloatArray, curated: Curated, args: OfflineTOPRConfig) -> None:
        if not rewards.any():
            raise ValueError(
                f"All {len(rewards)} rewards of the training dataset are 0 after the baseline: there is nothing to "
                "learn. Add rows with other rewards, or change baseline."
            )
        self.curated, self._baseline = curated, float(raw[curated.indices[0]] - rewards[0])
        self._warn_about_signs(curated, bool((raw == 0).any()), args)

    def _rows_trained_on(self) -> str:
        return str(self.curated)

    @staticmethod
    def _by_name(datasets: Any) -> dict[str, Dataset]:
        """The evaluation datasets by name; one without a name is `eval`."""
        return datasets if isinstance(datasets, dict) else {} if datasets is None else {"eval": datasets}

    def _check_tokens(self, datasets: dict[str, Dataset]) -> None:
        vocabulary = self.model.config.get_text_config().vocab_size
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for name, dataset in datasets.items():
            lengths, ids = lengths_of(dataset), pc.list_flatten(column(dataset, "input_ids"))
            extremes = pc.min_max(ids)
            if extremes["min"].as_py() < 0 or extremes["max"].as_py() >= vocabulary:
                wrong = int(np.argmax((ids.to_numpy() < 0) | (ids.to_numpy() >= vocabulary)))
                row = np.searchsorted(lengths.cumsum(), wrong, side="right")
                raise ValueError(
                    f"Row {_place(dataset)[row]} of the {name} dataset holds the token id {ids[wrong]}, and the model "
                    f"has the ids 0 to {vocabulary - 1}: another tokenizer wrote it. Drop prompt_ids and "
                    "completion_ids, so that text is tokenised, or train the model that they are for."
                )
            for what, limit in (("max_length", self.args.max_length), ("the model's context", context)):
                too_long = np.flatnonzero(lengths > (np.inf if limit is None else limit))
                if len(too_long):
                    places = _place(dataset)[too_long].tolist()
                    which = f": rows {', '.join(map(str, places[:_NAMED]))}{', ...' if places[_NAMED:] else ''}"
                    raise ValueError(
                        f"{len(too_long)} of {len(lengths)} rows of the {name} dataset are longer than {what}, {limit} "
                        f"tokens; the first is row {places[0]} with {lengths[too_long[0]]}. Drop or shorten "
                        f"them{which if places[1:] else ''}."
                    )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [c for c in COLUMNS if c not in self._signature_columns]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        args, dataset = self.args, self.train_dataset if train_dataset is None else train_dataset
        # Without padding there is nothing to save, and the longest rows are better not all in one micro-batch. The
        # auxiliary loss of a mixture of experts is no sum over rows. Split batches are of other rows than is said here.
        plain = args.padding_free or self.aux_loss_enabled or args.accelerator_config.split_batches
        if not args.sort_by_length or plain or not isinstance(sampler, RandomSampler):
            return sampler
        # The order that Accelerate would make of it.
        order = SeedableRandomSampler(dataset, data_seed=args.seed if args.data_seed is None else args.data_seed)
        return StepsSortedByLength(order, lengths_of(dataset), self.get_total_train_batch_size(args))

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """See `transformers.Trainer.init_hf_repo`."""
        super().init_hf_repo(*args, **kwargs)
        # On purpose: a run that goes on from a checkpoint on the Hub needs it.
        warnings.filterwarnings("ignore", r"It seems that you are about to commit a data file \(log_mu", UserWarning)

    # log μ: scored once, by the starting weights, when training begins: FSDP and ZeRO have sharded them by then.

    def _before_training(self, resumed: bool) -> None:
        weights = fingerprint(self.model, self.accelerator)
        for name, dataset in self._log_mu_files().items():
            self._plan_log_mu(dataset, name, weights, resumed)

    def score_log_mu(self) -> dict[str, float]:
        """Score log μ with the present weights and write it, without training; needs no more than `train` does.

        If it is interrupted, or called again, it goes on with the parts that it keeps in `output_dir/log_mu_parts`.

        Raises:
            ValueError: the weights have been trained, so that they are no longer those that wrote the rows.

        Returns:
            How far the sampler's log-probabilities are from these, see `topr_trl.log_mu.sampler_distance`; empty if the
            rows carry none.
        """
        if self.state.global_step > 0:
            raise ValueError("log μ is that of the starting weights, and training has moved them: score it before.")
        self._score_only = True
        try:
            self.train()
        except _Scored:
            pass
        finally:
            self._score_only = self.is_in_train = False
        return self.sampler_distance

    def _log_mu_files(self) -> dict[str, Dataset]:
        evaluation = {f"log_mu_{name}": dataset for name, dataset in self._by_name(self.eval_dataset).items()}
        return {"log_mu": self.train_dataset, **evaluation}

    def _needs_log_mu(self, dataset: Dataset) -> NDArray[np.bool_]:
        return rows_that_need_log_mu(column(dataset, "reward").to_numpy(), self.args.limits)

    def _plan_log_mu(self, dataset: Dataset, name: str, weights: str, resumed: bool = False) -> None:
        """Check log μ that came with the rows, read what the resumed run has scored, or note what is to be scored."""
        needs = self._needs_log_mu(dataset)
        if "mu_logps" in dataset.column_names:
            check_log_mu(dataset, needs, weights, self.args.ratio_level, _place(dataset))
            return
        if self.data_collator.scored.keys() >= set(column(dataset, "row").to_numpy()[needs].tolist()):
            return
        path, of_rows = Path(self.args.output_dir) / f"{name}.parquet", rows_fingerprint(dataset, needs)
        if resumed:
            self._keep_log_mu(dataset, load_log_mu(path, weights, of_rows))
        else:
            if path.is_file() and any(path.parent.glob("checkpoint-*")):
                try:
                    load_log_mu(path, weights, of_rows)
                except ValueError:
                    names = (path.with_name(f"old_{k}_{path.name}") for k in itertools.count(1))
                    aside = next(name for name in names if not name.exists())
                    if self.accelerator.is_main_process:
                        path.replace(aside)
                    warnings.warn(
                        f"{path} is damaged, or of another model or other rows, rewards or limits than now, so log μ "
                        f"is scored anew. The old one is {aside}: the checkpoints in {path.parent} can be resumed with "
                        "it alone, under its old name.",
                        stacklevel=4,
                    )
            self._to_score[path] = (dataset, needs, weights, of_rows)

    def _keep_log_mu(self, dataset: Dataset, mu_logps: pa.ChunkedArray) -> None:
        """Give log μ of the rows of a dataset (None where a row has none) to the collator."""
        rows = column(dataset, "row").to_numpy()[mu_logps.is_valid().to_numpy()]
        mu_logps = mu_logps.drop_null()
        values, lengths = pc.list_flatten(mu_logps).to_numpy(), pc.list_value_length(mu_logps).to_numpy()
        starts = lengths.cumsum() - lengths
        per_token = self.args.ratio_level == "token"
        scored = np.split(values, starts[1:]) if per_token else np.add.reduceat(values.astype(np.float64), starts)
        self.data_collator.scored.update(zip(rows.tolist(), scored, strict=bool(len(rows))))

    def _score_log_mu(self, model: Any) -> None:
        """Score what `_plan_log_mu` noted, and write it to the output folder."""
        while self._to_score:
            path, (dataset, needs, weights, rows) = next(iter(self._to_score.items()))
            indices = np.flatnonzero(needs)
            logger.info("Scoring log μ of %d of %d rows.", len(indices), len(dataset))
            was_training = model.training
            model.eval()
            scored = score_log_mu(
                lambda batch: self._policy_logps(model, batch)[:2],
                dataset.select(indices).select_columns(["input_ids", "prompt_length"]),
                self.data_collator.collate_tokens,
                self.accelerator,
                self.args.per_device_eval_batch_size,
                parts := path.with_name(f"{path.stem}_parts"),
                weights,
                rows,
            )
            model.train(was_training)
            places = np.full(len(dataset), -1)
            places[indices] = np.arange(len(indices))
            mu_logps = scored.take(pa.array(places, mask=places < 0))  # None where the row needs none
            if self.accelerator.is_main_process:
                save_log_mu(path, mu_logps, weights, rows)
                if not self._score_only:  # or it may end before its caller has used them
                    shutil.rmtree(parts, ignore_errors=True)
            if dataset is self.train_dataset and "sampler_logps" in dataset.column_names:
                some = np.unique(np.linspace(0, len(indices) - 1, _COMPARED).astype(int))
                sampled = dataset.select(indices[some])["sampler_logps"][:]
                self.sampler_distance = sampler_distance(scored.take(pa.array(some)).to_pylist(), sampled)
                if not self._score_only:
                    self.log({f"topr/sampler_distance/{name}": x for name, x in self.sampler_distance.items()})
            self._keep_log_mu(dataset, pa.chunked_array([mu_logps]))
            self.accelerator.wait_for_everyone()
            del self._to_score[path]

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss and metrics of evaluation rows; see `transformers.Trainer.evaluate`.

        Raises:
            ValueError: rows need log μ of the starting weights, and those are gone (the rows were not given at
                construction) or not yet there (FSDP or DeepSpeed, before training).
        """
        new: dict[str, Dataset] = {}
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            new = {
                name: self._prepare_dataset(dataset, self.processing_class, self.args, False, None, name)
                for name, dataset in self._by_name(eval_dataset).items()
                # A dictionary comes back here set by set, prepared.
                if not {"input_ids", "prompt_length", "row"} <= set(dataset.column_names)
            }
            self._check_tokens(new)
            if new:
                eval_dataset = new if isinstance(eval_dataset, dict) else new["eval"]
        if self.state.global_step == 0 and not self.is_in_train:
            weights = fingerprint(self.model, self.accelerator)
            for name, dataset in {**self._by_name(self.eval_dataset), **new}.items():
                self._plan_log_mu(dataset, f"log_mu_{name}", weights)
            if self._to_score and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
                self._to_score.clear()
                raise ValueError(
                    "Under DeepSpeed and FSDP, log μ of evaluation rows is scored when training begins. Evaluate then "
                    "(eval_on_start=True), or give the rows a column mu_logps."
                )
            self._score_log_mu(self.model)
        elif any(
            "mu_logps" not in dataset.column_names and self._needs_log_mu(dataset).any() for dataset in new.values()
        ):
            raise ValueError(
                f"The rows of {', '.join(new)} need log μ of the starting weights, and training has moved them. Pass "
                "the dataset as eval_dataset when you make the trainer, or give it a column mu_logps."
            )
        # SFTTrainer's own would prepare the rows its way.
        return super(SFTTrainer, self).evaluate(eval_dataset, *args, **kwargs)

    # Loss: Algorithm 1.

    def _policy_logps(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """(B, T) log π of the next tokens, (B, T) whether they belong to the response, and what the model put out."""
        inputs, lengths = dict(inputs), inputs["lengths"]
        del inputs["lengths"]
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with self.accelerator.autocast():
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        logps, mask = outputs.log_probs, outputs.label_mask
        if self.padding_free:  # (1, tokens of all rows - 1)
            logps, mask = unflatten(logps, lengths), unflatten(mask, lengths)
        return logps, mask, outputs

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean over rows of Algorithm 1; `num_items_in_batch` counts the rows of the whole optimiser step."""
        if return_outputs:
            raise ValueError("OfflineTOPRTrainer does not return outputs; `compute_metrics` is not supported.")
        rewards_B, mu_logps, idle, rows = (inputs.pop(name) for name in ("reward", "mu_logps", "idle", "row"))
        args = self.args
        logps, mask, outputs = self._policy_logps(model, inputs)
        if args.ratio_level == "token":
            mu_logps = torch.full_like(logps, torch.nan, dtype=torch.float32).masked_scatter(mask, mu_logps)
        shown = rows if args.log_completions and self.model.training else None
        loss_B = self._row_losses(logps, mu_logps, rewards_B, mask, shown, idle).losses_B
        if num_items_in_batch is None:
            loss, windows = loss_B.sum() / (len(loss_B) + idle), 1
        else:
            # DDP averages the gradients of the processes; the sum over all rows is divided by all rows.
            loss = loss_B.sum() / num_items_in_batch * self.accelerator.num_processes
            windows = self.current_gradient_accumulation_steps
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / windows
            self._metrics[self._mode]["aux_loss"].append(outputs.aux_loss.detach())
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: Any) -> Tensor:
        """Rows of an optimiser step over all processes: Trainer would count tokens, and short rows would weigh less."""
        rows = torch.tensor(sum(len(batch["reward"]) + batch["idle"] for batch in batch_samples), device=device)
        return self.accelerator.gather(rows).sum()

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        return super().prediction_step(model, inputs, True, ignore_keys)


def _place(dataset: Dataset) -> NDArray[np.int64]:
    """(N,) where the rows stood in the dataset that was given."""
    return np.asarray(column(dataset, "row").to_numpy() % _ROWS)


class _ScoreLogMu(TrainerCallback):
    """Scores log μ when training begins."""

    def __init__(self, trainer: OfflineTOPRTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._score_log_mu(self.trainer.model_wrapped)
        if self.trainer._score_only:
            raise _Scored


class _Scored(Exception):
    """Ends `train` when it was called for log μ alone."""
