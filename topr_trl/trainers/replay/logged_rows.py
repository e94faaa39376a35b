"""Read logged rows for replay (`replay_dataset`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from topr_trl.data.masks import MASK
from topr_trl.data.rows import ROLLOUT, check_finish_reasons, named_rows, problem_column, refuse_images, reward_column
from topr_trl.data.sampler_logps import TEMPERATURE, temperature_of, why_incomparable
from topr_trl.data.tokenization import tokenize
from topr_trl.data.tokenized_rows import check_tokens
from topr_trl.data.trajectories import rollouts_of
from topr_trl.settings.config import TOPRConfig
from topr_trl.trainers.log_mu import check_log_mu, fingerprints, needs_log_mu
from topr_trl.trainers.replay.buffer import ReplayRow

_NAME = "replay"  # name of the dataset in messages


@contextmanager
def _named() -> Iterator[None]:
    """Add the name of the dataset to a ValueError, since a trainer has several datasets."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"The {_NAME} dataset: {error}") from None


def check_logged(dataset: object, temperature: float) -> None:
    """Validate logged rows before the model is loaded.

    Raises:
        TypeError: the rows are not a `datasets.Dataset`.
        ValueError: the rows lack columns, were sampled at another temperature, have images, or are parts of longer
            trajectories.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"replay_dataset must be a datasets.Dataset, not {type(dataset).__name__}. Name a split of a dictionary; "
            "load a stream, or a list, into a Dataset."
        )
    refuse_images(dataset, "replay_dataset has images, and only text can be used again. Leave such rows out.")
    with _named():
        reward_column(dataset)
        check_finish_reasons(dataset)
    if TEMPERATURE in dataset.column_names and (own := temperature_of({_NAME: dataset})) != temperature:
        raise ValueError(
            f"The {_NAME} dataset was sampled at temperature {own:g}, and log π is computed at temperature="
            f"{temperature:g}. Set temperature={own:g}, or leave these rows out."
        )
    if (rollouts_of(dataset).counts_R > 1).any():
        raise ValueError(
            f"The {_NAME} dataset has trajectories in several rows ({ROLLOUT}), which only OfflineTOPRTrainer can "
            "read. Leave them out."
        )


def logged_rows(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, args: TOPRConfig
) -> tuple[list[ReplayRow], set[str]]:
    """Return logged rows for the buffer, and the fingerprints of the models that computed their log μ.

    The numbers of the rows precede those of all generated rows. Log μ is the column `mu_logps`, or `sampler_logps` with
    `log_mu="sampler"`. A sum over the completion is divided equally among its tokens. Log μ is NaN without such a
    column, and for rows whose weight does not depend on it.

    Args:
        dataset: rows that passed `check_logged`.
        tokenizer: tokenizer of the model.
        config: config of the starting model. See `check_tokens`.
        args: settings of the trainer.

    Raises:
        ValueError: a row is malformed, or all rewards are 0 after the baseline.
    """
    with _named():
        rewards, chosen = args.choose(reward_column(dataset), problem_column(dataset), args.seed, rule="none")
    is_used = rewards != 0
    if not is_used.any():
        raise ValueError(
            f"Each reward of the {_NAME} dataset is 0 after baseline={args.baseline}: there is nothing to learn. Add "
            "rows with other rewards, or set baseline to a number below these, which the generated rows then have, too."
        )
    rewards, places = rewards[is_used], chosen.indices[is_used]
    kept = [column for column in ("mu_logps", "mu_fingerprint", "sampler_logps") if column in dataset.column_names]
    if args.chat_template_kwargs and "chat_template_kwargs" not in dataset.column_names:
        dataset = dataset.add_column("chat_template_kwargs", [args.chat_template_kwargs] * len(dataset))
    with named_rows(_NAME, places):
        rows = tokenize(dataset.select(places), tokenizer, kept)
    rows = rows.add_column("row", places).add_column("reward", rewards)
    check_tokens(_NAME, rows, config, None)
    if args.log_mu == "sampler" and "sampler_logps" in kept:
        if why := why_incomparable(dataset, args.temperature, config.vocab_size):
            raise ValueError(f"log_mu='sampler' and the {_NAME} dataset: {why}.")
        rows = rows.remove_columns([column for column in kept if column != "sampler_logps"])
        rows = rows.rename_column("sampler_logps", "mu_logps")
    needed = needs_log_mu(rewards, args.limits)
    if "mu_logps" in rows.column_names:
        check_log_mu(_NAME, rows, needed, args)
    logged = [_logged(row, k - len(rows), bool(needed[k])) for k, row in enumerate(rows)]
    return logged, fingerprints(rows, needed)


def _logged(row: dict[str, Any], number: int, needs_log_mu: bool) -> ReplayRow:
    ids, start = torch.tensor(row["input_ids"], dtype=torch.int32), row["prompt_length"]
    mask = row.get(MASK)
    written = torch.ones(len(ids) - start, dtype=torch.bool) if mask is None else torch.tensor(mask)
    logps = row.get("mu_logps") if needs_log_mu else None
    if not isinstance(logps, list):
        logps = torch.nan if logps is None else logps / int(written.sum())
    mu_logps = torch.zeros(len(written))
    mu_logps[written] = torch.as_tensor(logps, dtype=torch.float32)
    return ReplayRow(ids[:start], ids[start:], written, mu_logps, row["reward"], number, step=0)
