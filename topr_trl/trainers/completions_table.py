"""Log tables of completions with their weights and log-ratios (`log_completions`)."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain, groupby, pairwise, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import is_rich_available
from trl.trainer.utils import print_prompt_completions_sample

from topr_trl.data.masks import MASK, runs_of
from topr_trl.data.tokenized_rows import column

WEIGHT_COLUMNS = ("weight", "log_ratio")
TOKEN_COLUMNS = ["tokens", "token_log_ratio", "token_weight"]  # columns that exist only with a ratio per segment


class DisplayedFloat(float):
    """Float that prints three significant digits, or nothing if it is NaN. Files store the exact value."""

    def __str__(self) -> str:
        return "" if math.isnan(self) else f"{self:.3g}"


def refuse_own_column(name: str, who: str) -> None:
    """Raise a ValueError if a column that the user adds to the table has a name in `WEIGHT_COLUMNS`.

    Args:
        name (`str`): Name of the column.
        who (`str`): Function that adds the column, for the error.
    """
    if name in WEIGHT_COLUMNS:
        raise ValueError(
            f"{who} names a column {name!r}, but TOPR fills this column of the table of completions. Rename it."
        )


class LogCompletions(TrainerCallback):
    """Callback that shows the rows of the last optimizer step whenever an `OfflineTOPRTrainer` logs in training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # Row numbers of each forward pass, and log-ratio, weight and mask of the tokens, shape (B, 3, T)
        self.of_tokens: list[tuple[Tensor, Tensor]] = []
        if trainer.args.needs_mu_of_tokens:
            trainer._log_tokens = self.add_tokens

    def add_tokens(self, numbers_N: Tensor, log_ratios_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor) -> None:
        """Add the tokens of the rows of a forward pass.

        Args:
            numbers_N: (N, 2) row numbers and turns of N >= B rows.
            log_ratios_BT: (B, T) log π - log μ of each token.
            weights_BT: (B, T) weight of each token.
            mask_BT: (B, T) completion mask.
        """
        if self.trainer.model.training:
            values_B3T = torch.stack([log_ratios_BT.float(), weights_BT.float(), mask_BT.float()], dim=1)
            self.of_tokens.append((numbers_N, values_B3T))  # Only `on_log` waits for the device.

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Remove the rows of the previous step."""
        self.trainer._row_log.discard("table")
        self.of_tokens.clear()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the rows of the last step, on the main process."""
        if not self.trainer.model.training:
            return
        seen = gather_object(self.trainer._row_log.read("table"))
        # `seen` is empty if no step has run since the last log, for example at the summary after training.
        own = [
            (tuple(number), values_3T[:2, values_3T[2] > 0].tolist())
            for numbers_N, values_B3T in self.of_tokens
            for number, values_3T in zip(numbers_N.tolist(), values_B3T, strict=False)
        ]
        of_tokens = dict(gather_object(own))
        if seen and state.is_world_process_zero:
            show(self._table(seen, of_tokens, state.global_step), args)

    def _table(
        self, seen: list[tuple[list[int], float, float]], of_tokens: dict[tuple[int, ...], list[list[float]]], step: int
    ) -> dict[str, list[Any]]:
        """Return the columns of the table, named as in TRL's table of completions.

        A turn with its own reward is a completion, and everything before the turn is its prompt.
        """
        numbers, weights, log_ratios = zip(*seen, strict=True)
        places, turns = zip(*numbers, strict=True)
        dataset = self.trainer.train_dataset
        decode = partial(self.trainer.processing_class.decode, skip_special_tokens=True)
        rows = dataset.select(pc.index_in(pa.array(places), value_set=column(dataset, "row")).to_pylist())
        prompts, completions, masks = zip(
            *(_split(row, turn) for row, turn in zip(rows, turns, strict=True)), strict=True
        )
        given, after = (
            [
                value[max(turn, 0)] if isinstance(value, list) else value
                for value, turn in zip(rows[name], turns, strict=True)
            ]
            for name in ("given_reward", "reward")
        )
        values = [of_tokens.get(tuple(number)) for number in numbers]
        return {
            "step": [step] * len(seen),
            "prompt": list(map(decode, prompts)),
            "completion": [_completion(ids, mask, decode) for ids, mask in zip(completions, masks, strict=True)],
            "reward": given,
            "advantage": after,
            "weight": list(map(DisplayedFloat, weights)),
            "log_ratio": list(map(DisplayedFloat, log_ratios)),
            **(_token_columns(values, completions, masks, decode) if of_tokens else {}),
        }


def _split(row: dict[str, Any], turn: int) -> tuple[list[int], list[int], list[bool] | None]:
    """Return the token ids of the prompt and the completion of a row or one of its turns, and the completion mask.

    The mask is None if the model wrote all tokens of the completion.
    """
    ids, start, mask = row["input_ids"], row["prompt_length"], row.get(MASK)
    if turn < 0 or mask is None:
        return ids[:start], ids[start:], mask
    begin, end = runs_of(mask)[turn]
    return ids[: start + begin], ids[start + begin : start + end], None


def _token_columns(
    values: list[list[list[float]] | None],
    completions: Iterable[list[int]],
    masks: Iterable[list[bool] | None],
    decode: Callable[..., str],
) -> dict[str, list[Any]]:
    """Return the text, the log-ratio and the weight of each token.

    The log-ratio and the weight are None for a token that the model did not write, or that has no log-probability.
    """
    found: dict[str, list[Any]] = {name: [] for name in TOKEN_COLUMNS}
    for of_row, own, mask in zip(values, completions, masks, strict=True):
        texts = [decode([token]) for token in own]
        # Some decoders drop the space before the first token.
        later = [decode([*pair])[len(text) :] for pair, text in zip(pairwise(own), texts, strict=False)]
        found[TOKEN_COLUMNS[0]].append(texts[:1] + later)
        is_own = [True] * len(own) if mask is None else mask
        for name, numbers in zip(TOKEN_COLUMNS[1:], of_row or [[], []], strict=True):
            # The first token of a completion without a prompt has no value.
            left: Iterator[float | None] = chain(repeat(None, sum(is_own) - len(numbers)), numbers)
            found[name].append([next(left) if each else None for each in is_own])
    return found


def _completion(ids: list[int], mask: list[bool] | None, decode: Callable[[list[int]], str]) -> str:
    """Return the text of a completion, with ⟦ and ⟧ around text that the model did not write."""
    if mask is None:
        return decode(ids)
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    texts = ((own, decode([token for token, _ in run])) for own, run in runs)
    return "".join(text if own else f"⟦{text}⟧" for own, text in texts)


def show(table: dict[str, list[Any]], args: Any) -> None:
    """Write a table to `output_dir/completions`, as TRL does.

    Also print the table if rich is installed, and send it to wandb and trackio if `report_to` names them.
    """
    step = table["step"][0]
    if is_rich_available():
        print_prompt_completions_sample(
            table["prompt"], table["completion"], {"reward": table["reward"]}, table["advantage"], step,
            args.num_completions_to_print, extra={name: table[name] for name in WEIGHT_COLUMNS},
        )  # fmt: skip
    frame = pd.DataFrame(table)
    path = Path(args.output_dir) / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path)
    frame = frame.drop(columns=TOKEN_COLUMNS, errors="ignore")  # Trackers have no use for lists.
    for name in ("wandb", "trackio"):
        if name in args.report_to:
            tracker = import_module(name)
            # wandb has no run if an environment variable switches it off.
            if name == "trackio" or tracker.run is not None:
                tracker.log({"completions": tracker.Table(dataframe=frame)})
