"""Check the datasets of `OfflineTOPRTrainer`, and name the columns that it reads."""

from collections.abc import Iterable

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from topr_trl.data.rows import ROLLOUT, check_finish_reasons, problem_column, refuse_images, reward_column
from topr_trl.data.sampler_logps import why_incomparable
from topr_trl.data.tokenized_rows import column
from topr_trl.data.trajectories import rollouts_of
from topr_trl.settings.config import OfflineTOPRConfig


def check_datasets(datasets: Iterable[Dataset | None]) -> None:
    """Validate datasets before the model is loaded.

    Raises:
        TypeError: a dataset is not a `Dataset`.
        ValueError: a row is malformed, or the rows of a rollout contradict each other.
    """
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"OfflineTOPRTrainer needs a datasets.Dataset; found {type(dataset).__name__}. Pass one split, or load "
                "the stream into a Dataset: baseline, curation and log μ need all rows before the first step."
            )
        refuse_images(dataset, "Rows with images are not supported offline. Use TOPRTrainer for vision models.")
        rollouts = rollouts_of(dataset)
        rollouts.check_same("reward", reward_column(dataset))
        if {ROLLOUT, "problem_id"} <= set(dataset.column_names):
            rollouts.check_same("problem_id", problem_column(dataset))
        if {ROLLOUT, "mu_fingerprint"} <= set(dataset.column_names):
            rollouts.check_same("mu_fingerprint", np.array(dataset["mu_fingerprint"][:], dtype=str))
        check_finish_reasons(dataset)


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, with the processor's chat template if it has none of its own."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not tokenizer.chat_template:
        tokenizer.chat_template = getattr(processing_class, "chat_template", None)
    return tokenizer


def by_name(datasets: Dataset | dict[str, Dataset] | None) -> dict[str, Dataset]:
    """Return evaluation datasets by name. A single dataset gets the name `eval`."""
    if not isinstance(datasets, dict):
        return {} if datasets is None else {"eval": datasets}
    if "train" in datasets:
        raise ValueError("'train' is the name of the training dataset. Give the evaluation dataset another name.")
    return datasets


def is_prepared(rows: object) -> bool:
    """Whether rows are already prepared, as the trainer's own evaluation sets are when Trainer evaluates them."""
    return isinstance(rows, Dataset) and {"input_ids", "prompt_length", "row"} <= set(rows.column_names)


def has_values(dataset: Dataset, name: str) -> bool:
    """Whether a dataset has a column of this name with at least one value."""
    return name in dataset.column_names and column(dataset, name).null_count < len(dataset)


def sampler_logps_are_incomparable(
    name: str, dataset: Dataset, temperature: float, vocabulary: int, args: OfflineTOPRConfig
) -> bool:
    """Whether rows have `sampler_logps` that cannot be compared with log π.

    Args:
        name: name of the dataset, for messages.
        dataset: rows to check.
        temperature: temperature at which log π is computed.
        vocabulary: number of tokens of the tokenizer.
        args: settings of the trainer.

    Raises:
        ValueError: `log_mu="sampler"`, and the rows have no `sampler_logps` that can be compared with log π.
    """
    if "sampler_logps" in dataset.column_names:
        why = why_incomparable(dataset, temperature, vocabulary)
        if why and args.log_mu == "sampler":
            raise ValueError(f"log_mu='sampler' and the {name} dataset: {why}.")
        return why is not None
    if args.log_mu == "sampler":
        raise ValueError(
            "log_mu='sampler' needs the column `sampler_logps`: the sampler's log-probabilities. Add it, or set "
            "log_mu='trainer'."
        )
    return False


def columns_about_log_mu(dataset: Dataset, args: OfflineTOPRConfig) -> list[str]:
    """Return the columns about log μ that tokenized rows keep."""
    wanted = {"sampler_logps"} | ({"mu_logps", "mu_fingerprint"} if args.log_mu == "trainer" else set())
    return [name for name in dataset.column_names if name in wanted]
