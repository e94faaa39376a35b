"""A replay buffer: rows of earlier generation batches, each with the log μ it got when it was fresh."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl.trainer.utils import pad

from topr_trl.config import TOPRConfig
from topr_trl.data.collator import check_tokens
from topr_trl.data.masks import MASK
from topr_trl.data.rollouts import rollouts_of
from topr_trl.data.rows import ROLLOUT, MalformedRow, check_finish_reasons, problem_column, refuse_images, reward_column
from topr_trl.data.sampled import TEMPERATURE, temperature_of, why_incomparable
from topr_trl.data.tokenization import tokenize
from topr_trl.log_mu import check_log_mu, needs_log_mu
from topr_trl.loss import TruncationLimits
from topr_trl.metrics import DEAD_WEIGHT


@dataclass(frozen=True)
class ReplayRow:
    """A row to be used again, on the CPU.

    Attributes:
        prompt_ids: (P,) int32.
        completion_ids: (T,) int32, T >= 1.
        written: (T,) bool, which tokens the model wrote; results of tools are not.
        mu_logps: (T,) float32 log μ of each token; 0 where it did not write the token.
        reward: R, after the baseline of the batch that the row was generated in; not 0.
        number: place in the order in which rows were generated, over all processes.
        step: optimizer steps that had been made then.
        weight: w that the loss gave the row last.
    """

    prompt_ids: Tensor
    completion_ids: Tensor
    written: Tensor
    mu_logps: Tensor
    reward: float
    number: int
    step: int
    weight: float = 1.0

    @property
    def nbytes(self) -> int:
        tensors = (self.prompt_ids, self.completion_ids, self.written, self.mu_logps)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def is_dead(self) -> bool:
        """A negative that contributes almost nothing."""
        return self.reward < 0 and self.weight < DEAD_WEIGHT


class ReplayBuffer:
    """The rows of one process that may be used again.

    `begin` is called with each generation batch, `note` after each forward, `settle` before the next batch: it takes
    the rows whose log μ was noted. A row that was never forwarded, or whose R is 0, is not kept. A negative whose
    noted weight is below `DEAD_WEIGHT` is removed.

    Args:
        size: rows that are kept.
        rule: which are kept where there are more: one of `topr_trl.config.REPLAY_RULES`.
    """

    def __init__(self, size: int, rule: str) -> None:
        self.size, self.rule = size, rule
        self.rows: list[ReplayRow] = []  # in the order in which they were generated
        self._fresh: dict[str, Tensor] = {}
        self._step = 0
        self._awaited: set[int] = set()  # numbers of fresh rows that were not forwarded yet
        self._logps: dict[int, tuple[Tensor, int]] = {}  # of fresh rows: where log μ is
        self._weights: list[tuple[list[int], Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def add(self, rows: list[ReplayRow]) -> None:
        """Add rows, and cut the buffer to its size."""
        alive = [row for row in [*self.rows, *rows] if not row.is_dead]
        self.rows = _kept(sorted(alive, key=lambda row: row.number), self.size, self.rule)

    def draw(self, count: int, seed: list[int]) -> list[ReplayRow]:
        """`count` different rows at random, or all if there are fewer."""
        places = np.random.default_rng(seed).permutation(len(self.rows))[:count]
        return [self.rows[place] for place in places]

    def begin(self, batch: dict[str, Any], step: int) -> None:
        """A generation batch, of which nothing has been forwarded yet, after `step` optimizer steps."""
        self._fresh = {name: batch[name] for name in _READ if batch.get(name) is not None}
        self._step, self._awaited, self._logps = step, set(batch["topr_rows"].tolist()), {}

    def note(self, numbers_B: Tensor, mu_logps_BT: Tensor, weights_B: Tensor) -> None:
        """Record what a forward pass computed: (B,) row numbers, (B, T) log μ, (B,) float w. Does not synchronize."""
        numbers = numbers_B.tolist()
        places = [place for place, number in enumerate(numbers) if number in self._awaited]
        if places:  # the first forward of a row has its log μ
            kept = mu_logps_BT[places].detach().float()
            self._logps |= {numbers[place]: (kept, k) for k, place in enumerate(places)}
            self._awaited -= {numbers[place] for place in places}
        self._weights.append((numbers, weights_B.detach().float()))

    def settle(self) -> None:
        """Take the rows that were forwarded since `begin`, and the last weights of all."""
        weights: dict[int, float] = {}
        for numbers, weights_B in self._weights:
            weights |= dict(zip(numbers, weights_B.tolist(), strict=True))
        fresh = {name: tensor.cpu() for name, tensor in self._fresh.items()} if self._logps else {}
        entering = [
            _row(fresh, place, self._logps[number][0][self._logps[number][1]].cpu(), self._step)
            for place, number in enumerate(fresh["topr_rows"].tolist() if fresh else ())
            if number in self._logps and fresh["topr_rewards"][place].nan_to_num(0.0) != 0
        ]
        self._logps, self._weights = {}, []
        self.rows = [replace(row, weight=weights.get(row.number, row.weight)) for row in [*self.rows, *entering]]
        self.add([])

    # Log μ of logged rows that brought none, and checkpoints.

    def without_log_mu(self, limits: TruncationLimits) -> list[ReplayRow]:
        """The rows whose weight depends on a log μ that is unknown."""
        needed = needs_log_mu(np.array([row.reward for row in self.rows]), limits)
        return [row for row, needs in zip(self.rows, needed, strict=True) if needs and row.mu_logps.isnan().any()]

    def set_log_mu(self, logps: dict[int, Tensor]) -> None:
        """log μ of rows by their number, where it is unknown: at least as many values as a completion has tokens."""
        for place, row in enumerate(self.rows):
            if row.number in logps:
                computed = logps[row.number][: len(row.mu_logps)]
                self.rows[place] = replace(row, mu_logps=torch.where(row.mu_logps.isnan(), computed, row.mu_logps))

    def remove(self, rows: list[ReplayRow]) -> None:
        gone = {row.number for row in rows}
        self.rows = [row for row in self.rows if row.number not in gone]

    def state(self) -> dict[str, Any]:
        """For `torch.save`; `load` reads it."""
        return {"rows": [vars(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        self.rows = [ReplayRow(**row) for row in state["rows"]]


def _kept(rows: list[ReplayRow], size: int, rule: str) -> list[ReplayRow]:
    """The rows that a rule keeps, in their order."""
    if rule == "negatives":
        rows = [row for row in rows if row.reward < 0]
    elif rule == "anna_karenina":
        newest = {row.prompt_ids.numpy().tobytes(): row.number for row in rows if row.reward > 0}
        rows = [row for row in rows if row.reward < 0 or newest[row.prompt_ids.numpy().tobytes()] == row.number]
    return rows[-size:]


_READ = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "topr_rewards", "topr_rows")


def _row(batch: dict[str, Tensor], place: int, mu_logps_T: Tensor, step: int) -> ReplayRow:
    """A row of a generation batch on the CPU, without its padding."""
    length = int(batch["completion_mask"][place].sum())
    own = batch["tool_mask"][place, :length] if "tool_mask" in batch else torch.ones(length)
    written = own != 0
    return ReplayRow(
        prompt_ids=batch["prompt_ids"][place][batch["prompt_mask"][place] != 0].to(torch.int32),
        completion_ids=batch["completion_ids"][place, :length].to(torch.int32),
        written=written,
        mu_logps=mu_logps_T[:length].masked_fill(~written, 0.0),
        reward=float(batch["topr_rewards"][place]),
        number=int(batch["topr_rows"][place]),
        step=step,
    )


def check_columns(batch: dict[str, Any]) -> None:
    """A ValueError if a generation batch has a column with a row axis that is not kept, of images for instance."""
    for name, values in batch.items():
        if name not in _COLUMNS and not (values is None or (isinstance(values, Tensor) and values.dim() == 0)):
            raise ValueError(f"Rows with {name} cannot be used again: only text is kept. Set replay_share=0.")


def with_rows(batch: dict[str, Any], rows: list[ReplayRow], pad_token_id: int) -> dict[str, Any]:
    """TRL's generation batch of F rows with K others behind them; `topr_fresh` says which are the F.

    Where the batch has no log μ of its own rows (`old_per_token_logps`), that is NaN.
    """
    shape, device = batch["completion_ids"].shape, batch["completion_ids"].device
    batch = {
        "old_per_token_logps": torch.full(shape, torch.nan, device=device),
        "topr_fresh": torch.ones(shape[0], dtype=torch.bool, device=device),
        **{name: value for name, value in batch.items() if value is not None},
    }
    if not all(bool(row.written.all()) for row in rows):
        batch.setdefault("tool_mask", torch.ones(shape, dtype=torch.long, device=device))
    for name, values in batch.items():
        if values.dim() == 0:
            continue
        own = _column(name, rows, pad_token_id)
        if values.dim() == 2:
            values, own = _as_wide(name, pad_token_id, values, own)
        batch[name] = torch.cat([values, own.to(values)])
    return batch


def batch_of(rows: list[ReplayRow], pad_token_id: int, device: torch.device) -> dict[str, Tensor]:
    """The tokens of rows and their masks, padded as in a generation batch of TRL."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return {name: _column(name, rows, pad_token_id).long().to(device) for name in names}


_NAME = "replay"  # of the dataset, in messages


def check_logged(dataset: Any, temperature: float) -> None:
    """What can be said about logged rows before a model is loaded.

    Raises:
        TypeError: they are not a `datasets.Dataset`.
        ValueError: they lack columns, were sampled at another temperature, have images, or are parts of longer
            trajectories.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"replay_dataset must be a datasets.Dataset, not {type(dataset).__name__}. Name a split.")
    refuse_images(dataset, "replay_dataset has images, and only text can be used again. Leave such rows out.")
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
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, model: str, args: TOPRConfig
) -> list[ReplayRow]:
    """Rows as `OfflineTOPRTrainer` reads them, older than all that are generated; R is after the baseline.

    log μ is the column `mu_logps`, a sum spread over the tokens, or with `log_mu="sampler"` the column `sampler_logps`.
    Without it, and of rows whose weight does not depend on it, it is NaN.

    Args:
        dataset: rows that `check_logged` has passed.
        config, model: of the model that starts training, and its fingerprint; see `check_tokens`, `check_log_mu`.

    Raises:
        ValueError: rows are malformed, or all rewards are 0 after the baseline.
    """
    try:
        rewards, chosen = args.choose(reward_column(dataset), problem_column(dataset), args.seed, rule="none")
    except ValueError as error:
        raise ValueError(f"The {_NAME} dataset: {error}") from None
    is_used = rewards != 0
    if not is_used.any():
        raise ValueError(
            f"All {len(rewards)} rewards of the {_NAME} dataset are 0 after baseline={args.baseline}: there is nothing "
            "to learn. Add rows with other rewards, or set baseline to a number below these."
        )
    rewards, places = rewards[is_used], chosen.indices[is_used]
    kept = [column for column in ("mu_logps", "mu_fingerprint", "sampler_logps") if column in dataset.column_names]
    if args.chat_template_kwargs and "chat_template_kwargs" not in dataset.column_names:
        dataset = dataset.add_column("chat_template_kwargs", [args.chat_template_kwargs] * len(dataset))
    try:
        rows = tokenize(dataset.select(places), tokenizer, kept)
    except MalformedRow as error:
        raise ValueError(f"Row {places[error.row]} of the {_NAME} dataset: {error.why}. Fix or drop it.") from None
    rows = rows.add_column("row", places).add_column("reward", rewards)
    check_tokens(_NAME, rows, config, None)
    if args.log_mu == "sampler" and "sampler_logps" in kept:
        if why := why_incomparable(dataset, args.temperature, config.vocab_size):
            raise ValueError(f"log_mu='sampler' and the {_NAME} dataset: {why}.")
        rows = rows.remove_columns([column for column in kept if column != "sampler_logps"])
        rows = rows.rename_column("sampler_logps", "mu_logps")
    needed = needs_log_mu(rewards, args.limits)
    if "mu_logps" in rows.column_names:
        check_log_mu(_NAME, rows, needed, model, args)
    return [_logged(row, k - len(rows), bool(needed[k])) for k, row in enumerate(rows)]


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


# The columns of a generation batch with a row axis: what a row has in them, and what pads it.
_COLUMNS: dict[str, tuple[Callable[[ReplayRow], Any], float]] = {
    "prompt_ids": (lambda row: row.prompt_ids, 0),
    "prompt_mask": (lambda row: torch.ones_like(row.prompt_ids), 0),
    "completion_ids": (lambda row: row.completion_ids, 0),
    "completion_mask": (lambda row: torch.ones_like(row.completion_ids), 0),
    "tool_mask": (lambda row: row.written, 1),
    "old_per_token_logps": (lambda row: row.mu_logps, 0),
    "sampling_per_token_logps": (lambda row: row.mu_logps, 0),
    "importance_sampling_ratio": (lambda row: torch.ones(1), 1),  # not used by this loss
    "advantages": (lambda row: 0.0, 0),  # neither
    "topr_rewards": (lambda row: row.reward, 0),
    "topr_rows": (lambda row: row.number, 0),
    "topr_fresh": (lambda row: False, 0),
}


def _column(name: str, rows: list[ReplayRow], pad_token_id: int) -> Tensor:
    """(K,) or (K, T) of rows, on the CPU."""
    values = [torch.as_tensor(_COLUMNS[name][0](row)) for row in rows]
    if values[0].dim() == 0:
        return torch.stack(values)
    return pad(values, _fill(name, pad_token_id), _side(name))


def _as_wide(name: str, pad_token_id: int, *tensors: Tensor) -> list[Tensor]:
    """(N, T) tensors of a column, all padded to the longest."""
    width, fill = max(tensor.size(1) for tensor in tensors), _fill(name, pad_token_id)
    missing = [width - tensor.size(1) for tensor in tensors]
    sides = [(n, 0) if _side(name) == "left" else (0, n) for n in missing]
    return [torch.nn.functional.pad(tensor, side, value=fill) for tensor, side in zip(tensors, sides, strict=True)]


def _fill(name: str, pad_token_id: int) -> float:
    return pad_token_id if name.endswith("_ids") else _COLUMNS[name][1]


def _side(name: str) -> str:
    return "left" if name.startswith("prompt") else "right"
