"""Compute log μ of stored completions once, before the first step, and save it in a file.

μ is the policy that wrote the completions. The trainer computes log μ with the weights that training starts from.
"""

import hashlib
import itertools
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset, List
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from topr_trl.baseline import FloatArray
from topr_trl.data.masks import MASK
from topr_trl.data.tables import atomic_write
from topr_trl.data.tokenized_rows import (
    COLUMNS,
    column,
    lengths_of,
    prompt_groups,
    rewards_of_units,
)
from topr_trl.data.trajectories import PARTS
from topr_trl.limits import TruncationLimits
from topr_trl.settings.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.trainers.training_warnings import sampler_distance
from topr_trl.user_warnings import warn_user

logger = logging.getLogger(__name__)

# Function that takes a batch, and returns (B, T) log-probabilities of the next tokens and the (B, T) completion mask.
Forward = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]
# Function that takes tokenized rows, and returns the batch for `Forward`.
Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]

LOG_MU_FILE = "log_mu.parquet"  # name of the file in the output folder
# Maximum numbers of rows and of tokens that are computed and saved as one part, to limit memory.
_AT_ONCE, _TOKENS_AT_ONCE = 8_192, 1 << 23
_COMPARED = 1_000  # maximum number of rows whose log μ is compared with the sampler's log-probabilities
_LOGPS = pa.large_list(pa.float32())  # All rows together can have more than 2**31 tokens.


@dataclass(frozen=True)
class NeededRows:
    """Tokenized rows, some of which need log μ.

    Attributes:
        dataset: all tokenized rows.
        rewards_U: (U,) R of all units that count. See `rewards_of_units`.
        needs_N: (N,) whether each row has a unit that needs log μ. See `needs_log_mu`.
    """

    dataset: Dataset
    rewards_U: FloatArray
    needs_N: NDArray[np.bool_]

    @classmethod
    def of(cls, dataset: Dataset, limits: TruncationLimits) -> "NeededRows":
        """Return the rows of a dataset for a loss with these limits."""
        rewards_U, rows_U = rewards_of_units(dataset)
        return cls(dataset, rewards_U, np.bincount(rows_U, needs_log_mu(rewards_U, limits), len(dataset)) > 0)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the rows. See `rows_fingerprint`."""
        return rows_fingerprint(self.dataset, self.needs_N)

    @property
    def mu_fingerprints(self) -> set[str]:
        """Distinct values of `mu_fingerprint` among the rows that need log μ.

        The set is empty if the dataset has no such column.
        """
        if "mu_fingerprint" not in self.dataset.column_names:
            return set()
        found = column(self.dataset, "mu_fingerprint").filter(pa.array(self.needs_N))
        return set(map(str, pc.unique(found).to_pylist()))

    def check_log_mu(self, name: str, args: TOPRConfig | OfflineTOPRConfig) -> None:
        """Raise a ValueError if a row needs log μ, and its `mu_logps` is missing, invalid, or of the wrong length."""
        dataset = self.dataset
        starts, rows = (column(dataset, each).to_numpy() for each in ("prompt_length", "row"))
        masks = dataset[MASK] if MASK in dataset.column_names else [None] * len(dataset)
        remedy = "drop the column" if args.log_mu == "trainer" else "set log_mu='trainer'"
        by_token = needs_mu_of_tokens(dataset, args)
        values = zip(rows, dataset["mu_logps"], masks, lengths_of(dataset) - starts, self.needs_N, strict=True)
        for row, mu_logps, mask, count, needed in values:
            if needed and (wrong := _what_is_wrong(mu_logps, sum(mask) if mask else int(count), by_token)):
                raise ValueError(f"Row {row} of the {name} dataset: {wrong}; or {remedy}, and log μ is computed.")


class LogMu:
    """Store of log μ for the rows of an `OfflineTOPRTrainer`.

    `plan` selects one of three sources for the log μ of a dataset. A column `mu_logps` is used without changes. A
    resumed run reads the file that was written when the run started. Otherwise `compute` computes log μ, and writes it
    to the output folder. The file is `log_mu.parquet` for the training rows, and `log_mu_NAME.parquet` for an
    evaluation dataset.

    Args:
        args ([`OfflineTOPRConfig`]):
            Settings of the trainer.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.

    Attributes:
        values (`dict[tuple[int, int], float | np.ndarray]`):
            Log μ in nats, by the columns `dataset` and `row`. A value is the sum over the completion, or (T,) float32
            values with a ratio per segment or turn. Rows with a column `mu_logps` are not included.
        planned (`dict[str, NeededRows]`):
            Datasets for which `compute` must compute log μ, by name. The trainer clears this before a run.
        numerics (`str`):
            Description of the forward pass. Saved parts of another forward pass are computed again. The trainer sets
            this attribute before `compute`.
        prompts_together (`bool`):
            Whether a batch should contain rows of the same prompt. The trainer sets this attribute before `compute`.
        sampler_distance (`dict[str, float]`):
            Distance between log μ of the training rows and their `sampler_logps`. See
            `topr_trl.trainers.training_warnings.sampler_distance`. The dictionary is empty until `compute` fills it.
    """

    def __init__(self, args: OfflineTOPRConfig, accelerator: Accelerator) -> None:
        self.args, self.accelerator = args, accelerator
        self.prompts_together, self.numerics = False, ""
        self._model = ""  # fingerprint of the model whose log μ is in `values`, and of the starting model
        self.values: dict[tuple[int, int], float | FloatArray] = {}
        self.planned: dict[str, NeededRows] = {}
        self.sampler_distance: dict[str, float] = {}

    def plan(
        self, name: str, rows: NeededRows, model: str, checkpoint: Path | None = None, is_trained: bool = False
    ) -> None:
        """Select the source of log μ of a dataset, and read log μ from disk if the run is resumed.

        If log μ is neither in the rows nor already known, a new run adds the dataset to `planned`. If the output folder
        then has checkpoints and a file of log μ that does not match the new run, the file is renamed.

        Args:
            name (`str`):
                Name of the dataset.
            rows (`NeededRows`):
                Tokenized rows.
            model (`str`):
                Fingerprint of the starting model.
            checkpoint (`Path`, *optional*):
                Folder of the checkpoint from which the run is resumed. `None` for a new run.
            is_trained (`bool`, *optional*, defaults to `False`):
                Whether training has changed the weights, so that log μ can no longer be computed.

        Raises:
            ValueError: log μ in the rows is malformed or from a different model. Or it is unknown, and training has
                changed the weights. Or the run is resumed, and its file is missing, damaged, or from a different model
                or different rows.
        """
        dataset = rows.dataset
        if model != self._model:
            self.values.clear()  # The collator has this dictionary.
            self._model = model
        if "mu_logps" in dataset.column_names:
            check_fingerprints(rows.mu_fingerprints, model)
            rows.check_log_mu(name, self.args)
        elif not self.values.keys() >= set(_keys(dataset, rows.needs_N)):
            if checkpoint is not None:  # Only the main process reads the file, since other nodes may not have it.
                main = self.accelerator.is_main_process
                found = [self._resumed(self._path(name), checkpoint, model, rows.fingerprint) if main else None]
                self._use(dataset, broadcast_object_list(found)[0])
            elif is_trained:
                raise ValueError(
                    f"The rows of {name} need log μ of the starting weights, and training has changed them. Create a "
                    "new trainer with the starting model, these rows and these settings, or add a column mu_logps."
                )
            else:
                self._set_aside(self._path(name), model, rows.fingerprint)
                self.planned[name] = rows

    def compute(self, forward: Forward, collate: Collate, keep_parts: bool = False) -> None:
        """Compute log μ of all planned datasets, and write it to files. All processes must call this method together.

        Finished parts are saved in a folder next to the file, so an interrupted run can continue with the next part.

        Args:
            forward (`Forward`):
                Function that computes log-probabilities with the starting weights.
            collate (`Collate`):
                Function that makes a batch of rows.
            keep_parts (`bool`, *optional*, defaults to `False`):
                Whether to keep the folder of parts when log μ is complete.
        """
        while self.planned:
            name, needed = next(iter(self.planned.items()))
            path, dataset, indices = self._path(name), needed.dataset, np.flatnonzero(needed.needs_N)
            logger.info("Computing log μ of %d of %d rows.", len(indices), len(dataset))
            parts = path.with_name(f"{path.stem}_parts")
            computed = self._compute(dataset.select(indices), needed.fingerprint, parts, forward, collate)
            places = np.full(len(dataset), -1)
            places[indices] = np.arange(len(indices))
            mu_logps = computed.take(pa.array(places, mask=places < 0))  # null for a row that needs no log μ
            if self.accelerator.is_main_process:
                save_log_mu(path, mu_logps, self._model, needed.fingerprint)
                if not keep_parts:
                    shutil.rmtree(parts, ignore_errors=True)
            if name == "train" and "sampler_logps" in dataset.column_names:
                some = np.unique(np.linspace(0, len(indices) - 1, _COMPARED).astype(int))
                sampled = dataset.select(indices[some])["sampler_logps"][:]
                self.sampler_distance = sampler_distance(computed.take(pa.array(some)).to_pylist(), sampled)
            self._use(dataset, pa.chunked_array([mu_logps]))
            self.accelerator.wait_for_everyone()
            del self.planned[name]

    @torch.no_grad()
    def _compute(self, rows: Dataset, fingerprint: str, folder: Path, forward: Forward, collate: Collate) -> pa.Array:
        """Compute log μ part by part, or read the parts that are already saved in the folder.

        Return a list of float32 values per row, one per completion token, in the order of the rows, on every process.
        """
        main, model = self.accelerator.is_main_process, f"{self._model} {self.numerics}"
        # Use the smaller batch size. The default for evaluation may need more memory than training.
        batch_size = min(self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size)
        computed = []
        with tqdm(total=len(rows), desc="Computing log μ", disable=not main, leave=False) as progress:
            for start, end in pairwise([*_starts(lengths_of(rows)), len(rows)]):
                part = rows.select(range(start, end))
                path = folder / f"{start}.parquet"
                logps = self._part(path, model, fingerprint, len(part))
                if logps is None:
                    order = _order(part, self.prompts_together)
                    found = _per_token_logps(forward, part, order, collate, self.accelerator, batch_size, progress)
                    logps = pa.array(found, _LOGPS)
                    if main:
                        save_log_mu(path, logps, model, fingerprint)
                else:
                    progress.update(len(part))
                computed.append(logps)
        return pa.concat_arrays(computed)

    def _part(self, path: Path, model: str, rows: str, count: int) -> pa.Array | None:
        """Return log μ of a saved part with `count` rows on every process, or None if the part must be computed.

        Only the main process reads the file. A file that is damaged, or from a different model or rows, is removed.
        """
        found: list[pa.Array | None] = [None]
        if self.accelerator.is_main_process and path.is_file():
            try:
                logps = load_log_mu(path, model, rows)
                found = [pa.concat_arrays(logps.cast(_LOGPS).chunks) if len(logps) == count else None]
            except ValueError:
                path.unlink()
        return broadcast_object_list(found)[0]

    def _use(self, dataset: Dataset, mu_logps: pa.ChunkedArray) -> None:
        """Add log μ of a dataset's rows to `values`. `mu_logps` is null for a row without log μ."""
        keys = _keys(dataset, mu_logps.is_valid().to_numpy())
        mu_logps = mu_logps.drop_null()
        values, lengths = pc.list_flatten(mu_logps).to_numpy(), pc.list_value_length(mu_logps).to_numpy()
        starts = lengths.cumsum() - lengths
        by_row: Any
        if needs_mu_of_tokens(dataset, self.args):
            by_row = np.split(values, starts[1:])
        else:
            by_row = np.add.reduceat(values.astype(np.float64), starts)
        self.values.update(zip(keys, by_row, strict=True))

    def _path(self, name: str) -> Path:
        return Path(self.args.output_dir) / (LOG_MU_FILE if name == "train" else f"log_mu_{name}.parquet")

    def _resumed(self, path: Path, checkpoint: Path, model: str, rows: str) -> pa.ChunkedArray:
        """Return log μ of the run to resume.

        If the output folder has no file of log μ, the file is copied from the folder of the checkpoint, so that the
        checkpoints of the output folder can be resumed, too.
        """
        first = checkpoint.parent / path.relative_to(self.args.output_dir)
        if not path.is_file() and first.is_file():
            found = load_log_mu(first, model, rows)
            with atomic_write(path) as partial:
                shutil.copyfile(first, partial)
            return found
        return load_log_mu(path, model, rows)

    def _set_aside(self, path: Path, model: str, rows: str) -> None:
        """Rename a file that does not match this run, if the folder has checkpoints, because they may need the file."""
        if not path.is_file() or not any(path.parent.glob("checkpoint-*")):
            return
        try:
            load_log_mu(path, model, rows)
        except ValueError:
            names = (path.with_name(f"old_{k}_{path.name}") for k in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            if self.accelerator.is_main_process:
                path.replace(aside)
            warn_user(
                f"{path} is damaged, or was written for a different model, rows, rewards or limits, so log μ is "
                f"computed again. The old file is now {aside}. To resume a checkpoint in {path.parent}, rename the "
                "file back."
            )


def needs_log_mu(rewards_N: FloatArray, limits: TruncationLimits) -> NDArray[np.bool_]:
    """Return an (N,) mask of the rows that need log μ, because their weight depends on π/μ.

    The ratio does not matter if R = 0, or if the two limits for the sign of R are equal.
    """
    return np.where(rewards_N > 0, limits.ratio_matters_pos, limits.ratio_matters_neg) & (rewards_N != 0)


def _keys(dataset: Dataset, which_N: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the pair of the columns `dataset` and `row` for each selected row."""
    table = dataset.select_columns(["dataset", "row"]).with_format("arrow")[:]
    datasets, rows = (values.to_numpy()[which_N].tolist() for values in table.columns)
    return list(zip(datasets, rows, strict=True))


def check_fingerprints(found: set[str], model: str) -> None:
    """Raise a ValueError if log μ was computed by a model other than `model`, or at a different temperature."""
    if others := sorted(found - {model}):
        raise ValueError(
            "Column `mu_logps` was computed by another model, or at a temperature other than that in the column "
            f"`temperature` (1 without the column): its mu_fingerprint is {others[0]}, and the model being trained has "
            f"{model}. If the column `temperature` was lost, restore it. If that model wrote these rows, remove the "
            "column `mu_fingerprint`. To compute log μ with the model being trained, remove both columns."
        )


def needs_mu_of_tokens(dataset: Dataset, args: TOPRConfig | OfflineTOPRConfig) -> bool:
    """Return whether log μ of each token is needed, because the ratio is per segment or per turn."""
    return args.needs_mu_of_tokens or isinstance(dataset.features["reward"], List)


def _what_is_wrong(mu_logps: object, tokens: int, needs_tokens: bool) -> str | None:
    """Return why log μ of a completion with this number of tokens cannot be used, or None if log μ is valid."""
    if isinstance(mu_logps, list) and len(mu_logps) != tokens:
        return (
            f"log μ has {len(mu_logps)} values for a completion of {tokens} tokens. Give one value per token of "
            "`completion_ids` (or per token that the model wrote), including the stop token"
        )
    # The limit is 1e-3 and not 0, because rounding can make log μ of a token with probability 1 slightly positive.
    for value in mu_logps if isinstance(mu_logps, list) else [mu_logps]:
        if not (isinstance(value, int | float) and -math.inf < value <= 1e-3):
            return f"log μ must be finite and at most 0, for each token or as their sum; found {value}. Fix it"
    if needs_tokens and not isinstance(mu_logps, list):
        return "ratio_level='segment' and turn_rewards need log μ for each token, and mu_logps has the sum. Give a list"
    return None


def _starts(lengths_N: NDArray[np.int64]) -> list[int]:
    """Return the first row of each part, which has at most `_AT_ONCE` rows and `_TOKENS_AT_ONCE` tokens, or one row."""
    starts, tokens = [0], 0
    for row, length in enumerate(lengths_N.tolist()):
        if row - starts[-1] == _AT_ONCE or (row > starts[-1] and tokens + length > _TOKENS_AT_ONCE):
            starts.append(row)
            tokens = 0
        tokens += length
    return starts


def _order(rows: Dataset, prompts_together: bool) -> NDArray[np.int64]:
    """Return an order of the rows, longest first.

    With `prompts_together`, rows of the same prompt are side by side, and the prompts are ordered by their longest row.
    """
    lengths = lengths_of(rows)
    if not prompts_together:
        return np.argsort(-lengths, kind="stable")
    groups = prompt_groups(rows)
    longest = np.zeros(groups.max() + 1, dtype=np.int64)
    np.maximum.at(longest, groups, lengths)
    return np.lexsort((-lengths, groups, -longest[groups]))


def _per_token_logps(
    forward: Forward, rows: Dataset, order: NDArray[np.int64], collate: Collate, accelerator: Accelerator,
    batch_size: int, progress: tqdm,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """Compute the log-probabilities of all completion tokens. Return them in the order of the rows, on every process.

    Each process computes some of the batches. Rows that are adjacent in `order` share a batch.
    """
    loader = DataLoader(rows.select(order), batch_size=batch_size, collate_fn=collate)
    computed: list[NDArray[np.float32]] = []
    for batch in accelerator.prepare_data_loader(loader):
        logps, mask = forward(batch)
        # Move completion tokens to the front of their rows. Then rows can be padded to one width and gathered.
        counts = mask.sum(-1, keepdim=True)
        packed = logps.new_full(logps.shape, torch.nan, dtype=torch.float32)
        packed[torch.arange(mask.size(1), device=mask.device) < counts] = logps[mask.bool()].float()
        packed = accelerator.pad_across_processes(packed, dim=1, pad_index=torch.nan)
        packed, counts = accelerator.gather_for_metrics((packed, counts))
        values = zip(packed.cpu().numpy(), counts.squeeze(1).tolist(), strict=True)
        computed += [row[:n].copy() for row, n in values]  # The copy is without padding.
        progress.update(len(counts))
    return [computed[i] for i in order.argsort()]  # Undo `order`.


def rows_fingerprint(dataset: Dataset, needs_N: NDArray[np.bool_]) -> str:
    """Return a short hash of `needs_N`, and of the tokens, lengths, masks, parts, rewards and log μ of all rows."""
    digest = hashlib.sha256()
    names = [name for name in COLUMNS if name in dataset.column_names]
    table = dataset.select_columns(names).with_format("arrow")[:]
    for ids in table["input_ids"].chunks:
        digest.update(ids.flatten().to_numpy().tobytes())
    for name in [name for name in (MASK, PARTS) if name in names]:
        for lists in column(dataset, name).chunks:
            digest.update(np.asarray(lists.flatten()).tobytes() + np.asarray(lists.is_valid()).tobytes())
    if "mu_logps" in names:
        given = table["mu_logps"]
        digest.update(given.is_valid().to_numpy().tobytes())
        digest.update((pc.list_flatten(given) if pa.types.is_nested(given.type) else given).to_numpy().tobytes())
    lengths = np.asarray(pc.list_value_length(table["input_ids"]), dtype=np.int64)
    rewards = table["reward"]
    if not pa.types.is_floating(rewards.type):
        digest.update(np.asarray(pc.list_value_length(rewards)).tobytes())
        rewards = pc.list_flatten(rewards)
    for values in (lengths, table["prompt_length"].to_numpy(), rewards.to_numpy(), needs_N):
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def save_log_mu(path: Path, mu_logps: pa.Array, model: str, rows: str) -> None:
    """Write log μ to a file atomically, with the fingerprints of the model that computed it and of the rows."""
    table = pa.table({"mu_logps": mu_logps}).replace_schema_metadata({"model": model, "rows": rows})
    with atomic_write(path) as partial:
        pq.write_table(table, partial)


def read_log_mu(path: Path) -> tuple[pa.ChunkedArray, str]:
    """Read log μ and the fingerprint of its model from a file that `save_log_mu` wrote, without validation."""
    table = pq.read_table(path)
    return table["mu_logps"], table.schema.metadata[b"model"].decode()


def load_log_mu(path: Path, model: str, rows: str) -> pa.ChunkedArray:
    """Read log μ from a file that `save_log_mu` wrote.

    Args:
        path (`Path`):
            File to read.
        model (`str`):
            Expected fingerprint of the model.
        rows (`str`):
            Expected fingerprint of the rows.

    Returns:
        `pa.ChunkedArray`: a list of values per row, one per completion token. A row without log μ has null.

    Raises:
        ValueError: the file is missing or damaged, or its log μ is for a different model, temperature, rows, rewards or
            limits.
    """
    if not path.is_file():
        raise ValueError(
            f"log μ of the run to resume is missing: {path}. log μ needs the weights that the run started with, so "
            "it cannot be computed now. Restore the file, or start again."
        )
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} is damaged ({why}). Restore it, or start again.") from error
    found = table.schema.metadata or {}
    if (found.get(b"model"), found.get(b"rows")) != (model.encode(), rows.encode()):
        raise ValueError(
            f"{path} holds log μ of another run: its model, temperature, rows, rewards or limits differ. Restore the "
            "file of the run to resume, with the rows of its evaluation sets, or start again in another output_dir."
        )
    return table["mu_logps"]
