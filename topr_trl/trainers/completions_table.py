"""Log tables of completions with their weights and log-ratios (`log_completions`)."""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.utils import is_rich_available
from trl.trainer.utils import print_prompt_completions_sample

from topr_trl.data.masks import MASK
from topr_trl.data.tokenized_rows import column

WEIGHT_COLUMNS = ("weight", "log_ratio")


class DisplayedFloat(float):
    """Float that prints three significant digits, or nothing if it is NaN. Files store the exact value."""

    def __str__(self) -> str:
        return "" if math.isnan(self) else f"{self:.3g}"


def refuse_own_column(name: str, who: str) -> None:
    """Raise a ValueError if a column that the user adds has the name of a column of TOPR.

    Args:
        name (`str`): Name of the column.
        who (`str`): Who adds it, for the error.
    """
    if name in WEIGHT_COLUMNS:
        raise ValueError(
            f"{who} names a column {name!r}, but TOPR fills this column of the table of completions. Rename it."
        )


class LogCompletions(TrainerCallback):
    """Callback that shows the rows of the last optimizer step whenever an `OfflineTOPRTrainer` logs in training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Remove the rows of the previous step."""
        self.trainer._row_log.discard("table")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the rows of the last step, on the main process."""
        if not self.trainer.model.training:
            return
        seen = gather_object(self.trainer._row_log.read("table"))
        # `seen` is empty if no step has run since the last log. The summary after training can be such a log.
        if seen and state.is_world_process_zero:
            show(self._table(seen, state.global_step), args)

    def _table(self, seen: list[tuple[list[int], float, float]], step: int) -> dict[str, list[Any]]:
        """Return the columns of the table, named as in TRL's table of completions.

        A turn with a reward of its own is a completion, and all before it is its prompt.
        """
        numbers, weights, log_ratios = zip(*seen, strict=True)
        numbers, turns = zip(*numbers, strict=True)
        dataset = self.trainer.train_dataset
        decode = partial(self.trainer.processing_class.decode, skip_special_tokens=True)
        places = pc.index_in(pa.array(numbers), value_set=column(dataset, "row"))
        rows = dataset.select(places.to_pylist())
        texts = [_texts(row, turn, decode) for row, turn in zip(rows, turns, strict=True)]
        given, after = (
            [
                value[max(turn, 0)] if isinstance(value, list) else value
                for value, turn in zip(rows[name], turns, strict=True)
            ]
            for name in ("given_reward", "reward")
        )
        return {
            "step": [step] * len(seen),
            "prompt": [prompt for prompt, _ in texts],
            "completion": [completion for _, completion in texts],
            "reward": given,
            "advantage": after,
            "weight": list(map(DisplayedFloat, weights)),
            "log_ratio": list(map(DisplayedFloat, log_ratios)),
        }


def _texts(row: dict[str, Any], turn: int, decode: Callable[[list[int]], str]) -> tuple[str, str]:
    """Return the texts of the prompt and the completion of a row, or of one of its turns."""
    ids, start, mask = row["input_ids"], row["prompt_length"], row.get(MASK)
    if turn < 0 or mask is None:
        return decode(ids[:start]), _completion(ids[start:], mask, decode)
    begins = [n for n, own in enumerate(mask) if own and not (n and mask[n - 1])][turn]
    ends = next((n for n in range(begins, len(mask)) if not mask[n]), len(mask))
    return decode(ids[: start + begins]), decode(ids[start + begins : start + ends])


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
    for name in ("wandb", "trackio"):
        if name in args.report_to:
            tracker = import_module(name)
            # wandb has no run if an environment variable switches it off.
            if name == "trackio" or tracker.run is not None:
                tracker.log({"completions": tracker.Table(dataframe=frame)})
