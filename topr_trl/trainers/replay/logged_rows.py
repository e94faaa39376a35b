"""Read logged rows for replay (`replay_dataset`)."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from topr_trl.data.masks import MASK
from topr_trl.data.preparation import ScoredRows
from topr_trl.data.rows import ROLLOUT, TURN_REWARDS
from topr_trl.data.sampler_logps import temperature_of
from topr_trl.data.tokenized_rows import check_tokens
from topr_trl.settings.config import TOPRConfig
from topr_trl.trainers.log_mu import NeededRows
from topr_trl.trainers.replay.buffer import ReplayRow

_NAME = "replay"  # name of the dataset in error messages


def read_logged(dataset: object, temperature: float) -> ScoredRows:
    """Validate logged rows, and compute their raw rewards. No model is needed.

    Args:
        dataset (`object`):
            Value of `replay_dataset`.
        temperature (`float`):
            Temperature at which log π is computed.

    Raises:
        TypeError: the rows are not a `datasets.Dataset`.
        ValueError: a row is malformed, was sampled at a different temperature, or has rewards of turns; or a
            trajectory has several rows.
    """
    scored = ScoredRows.read(_NAME, dataset)
    temperature_of({_NAME: scored.temperatures}, temperature)
    if (scored.rollouts.counts_R > 1).any():
        raise ValueError(
            f"The {_NAME} dataset has trajectories in several rows ({ROLLOUT}), which only OfflineTOPRTrainer can "
            "read. Drop these rows."
        )
    if scored.units.turns_R.any():
        raise ValueError(
            f"The {_NAME} dataset has {TURN_REWARDS}, and TRL's batches have one reward per row. Train with "
            "OfflineTOPRTrainer, or give the rows a reward and drop the column."
        )
    return scored


def logged_rows(
    scored: ScoredRows, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, args: TOPRConfig
) -> tuple[list[ReplayRow], set[str]]:
    """Tokenize logged rows for the buffer. Rows whose reward after the baseline is 0 are dropped.

    The row numbers are negative, so logged rows count as older than all generated rows. Log μ comes from the column
    `mu_logps`, or from `sampler_logps` with `log_mu="sampler"`. If the column has the sum over a completion, each token
    gets an equal part of the sum. Log μ is NaN without the column, and for rows whose weight does not depend on log μ.

    Args:
        scored (`ScoredRows`):
            Rows from `read_logged`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        config ([`~transformers.PretrainedConfig`]):
            Config of the model, with the size of its vocabulary and the length of its context.
        args ([`TOPRConfig`]):
            Settings of the trainer.

    Returns:
        `tuple[list[ReplayRow], set[str]]`: the rows, and the fingerprints of the models that computed their log μ. The
        set is empty if the models are unknown.

    Raises:
        ValueError: a row is malformed or too long, or all rewards are 0 after the baseline.
    """
    if args.chat_template_kwargs and "chat_template_kwargs" not in scored.rows.column_names:
        column = [args.chat_template_kwargs] * len(scored.rows)
        scored = replace(scored, rows=scored.rows.add_column("chat_template_kwargs", column))
    scored = replace(scored, times_U=None)  # The buffer holds each row once.
    rewards, curated = scored.choose(args, args.seed, rule="none")
    scored.check_signal(rewards, args)
    is_used = rewards != 0
    rewards = rewards[is_used]
    rows = scored.tokenize(curated.indices[is_used], rewards, tokenizer, args, args.temperature)
    check_tokens(_NAME, rows, config, None)
    needed = NeededRows.of(rows, args.limits)
    if "mu_logps" in rows.column_names:
        needed.check_log_mu(_NAME, args)
    logged = [_logged(row, k - len(rows), bool(needed.needs_N[k])) for k, row in enumerate(rows)]
    return logged, needed.mu_fingerprints


def _logged(row: dict[str, Any], number: int, needs_log_mu: bool) -> ReplayRow:
    """Convert a tokenized row to a `ReplayRow` with the given number."""
    ids, start = torch.tensor(row["input_ids"], dtype=torch.int32), row["prompt_length"]
    mask = row.get(MASK)
    written = torch.ones(len(ids) - start, dtype=torch.bool) if mask is None else torch.tensor(mask)
    logps = row.get("mu_logps") if needs_log_mu else None
    if not isinstance(logps, list):
        logps = torch.nan if logps is None else logps / int(written.sum())
    mu_logps = torch.zeros(len(written))
    mu_logps[written] = torch.as_tensor(logps, dtype=torch.float32)
    return ReplayRow(ids[:start], ids[start:], written, mu_logps, row["reward"], number, step=0)
