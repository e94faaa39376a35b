"""An arm: base model, protocol, effective share of positives, optimizer, rate and rows per step; trained and tested.

The paper compares TOPR with "positives only" by one protocol: wrong answers are removed, and one pass is made over what
is left. There are others that are as fair, and they give another order. Each is named in what it measures:

| protocol | positives only reads | its steps |
|---|---|---|
| `"removed"` | the right answers, once | p times TOPR's, all of right answers |
| `"steps"` | the rows that TOPR reads, in its batches, the wrong answers at weight 0 | as many as TOPR |
| `"rows"` | the right answers, 1/p times | as many as TOPR, all of right answers: as much computation, or less |
| `"half"` | the right answers, 1/2p times | half as many as TOPR: right answers as often as `"balanced"` reads them |

Every other share reads all rows once, or `"balanced"` as many rows, of which half are right answers, again and again,
and half are wrong ones, once: as much computation as `"rows"`, half of it on wrong answers. By `"steps"` two arms are
compared at the same rows per step; by the others each has its own best.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.decoding import DRAWS
from benchmarks.losses import LOSSES, centered
from benchmarks.rivals import Direct
from benchmarks.rows import Rows
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, model_hash, summary
from benchmarks.statistics import Measured
from benchmarks.training import train
from topr_trl import baseline_for_positive_share

TUNING_SEED = 1_000  # completions, order and problems (validation) that only the choice of rates uses
PROTOCOLS = ("removed", "steps", "rows")


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        base: the task, see `benchmarks.setting`.
        share: effective share of positives p~; `"p"` is the paper's c = 0, 1 is positives only; or `"group_mean"`.
        protocol: of positives only; other shares read all rows once, which is said as `"steps"`, or are `"balanced"`.
        loss: of `benchmarks.losses`; `"taper"` is TOPR. Those with an R of their own have no share, which is `"p"`.
    """

    base: str
    share: float | str
    protocol: str = "steps"
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    batch_rows: int = 32
    loss: str = "taper"

    def cell(self, seed: int) -> Cell:
        """A cell that trains this arm, whichever claim asks; other weights of the base model are another cell.

        So are other rows of the same seed, since arms are compared seed by seed; not where a rate is chosen.
        """
        draws = {} if seed == TUNING_SEED else {"draws": DRAWS}
        return {"claim": "arms", **asdict(self), "weights": model_hash(self.base), "seed": seed, **draws}

    @classmethod
    def of(cls, cell: Cell) -> "Arm":
        return cls(**{name: cell[name] for name in cls.__dataclass_fields__})


def after_baseline(rows: Rows, share: float | str) -> np.ndarray:
    """R of rows under a share."""
    if share == "group_mean":
        return centered(rows)
    if share == "p" or rows.rewards.min() == rows.rewards.max():
        return rows.rewards
    return rows.rewards - baseline_for_positive_share(rows.rewards, float(share))


def balanced(rows: Rows, seed: int) -> Rows:
    """As many rows, half of them right answers as often as it takes, half of them wrong ones."""
    rng, half = np.random.default_rng(seed), len(rows) // 2
    sides = [np.flatnonzero((rows.rewards > 0) == sign) for sign in (True, False)]
    return rows[np.concatenate([np.resize(rng.permutation(side), half) for side in sides])]


def run(arm: Arm, profile: Profile, seed: int, split: str = "test") -> dict[str, Any]:
    """Train from the base model, and test at the end."""
    model, found = trained(arm, profile, seed)
    return {"end": summary(evaluate(model, arm.base, profile, seed=seed, split=split)), **found}


def trained(arm: Arm, profile: Profile, seed: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model after one pass, and how it came to be."""
    model = base_model(arm.base)
    rows, _ = epoch_rows(arm.base, profile, seed)
    steps = len(rows) // arm.batch_rows
    share = float((rows.rewards > 0).mean())
    if arm.share == 1.0 and arm.protocol != "steps":
        rows = rows[np.flatnonzero(rows.rewards > 0)]
        steps = {"removed": -(-len(rows) // arm.batch_rows), "half": steps // 2}.get(arm.protocol, steps)
    if arm.protocol == "balanced":
        rows = balanced(rows, seed)
    loss, rewards = LOSSES[arm.loss]
    objective = Direct(model, rows, loss, rewards or (lambda rows: after_baseline(rows, arm.share)))
    done = train(model, objective, steps, arm.learning_rate, seed, optimizer=arm.optimizer, batch_rows=arm.batch_rows)
    return model, {"p": share, "steps": steps, "gradient_norm": float(np.median(done["gradient_norms"]))}


# Each arm at its own best rate and rows per step, found on a seed apart.

Choices = Sequence[dict[str, Any]]  # of fields of an arm
ADAMW_RATES = (1e-4, 3e-4, 1e-3)
_FURTHER = 3  # rates that are tried beyond these, where the best is at an end of them


def planned(store: Store, arms: dict[Arm, Choices], seeds: Sequence[int]) -> list[Cell]:
    """The cells that tune each arm; then, of those that are tuned, the cells that are reported."""
    tuning, reported = [], []
    for arm, choices in arms.items():
        tried, best = _tuned(store, arm, choices)
        tuning += [one.cell(TUNING_SEED) for one in tried]
        reported += [best.cell(seed) for seed in seeds if best]
    return tuning + reported


def _tuned(store: Store, arm: Arm, choices: Choices) -> tuple[list[Arm], Arm | None]:
    """What is tried of an arm, and what ends highest on the validation problems; None as yet."""

    def of(choice: dict[str, Any]) -> dict[str, Any] | None:
        return store.get(replace(arm, **choice).cell(TUNING_SEED))

    def end(choice: dict[str, Any]) -> float | None:
        result = of(choice)
        return result["end"]["pass@1"] if result else None

    first = of(choices[0])  # the rows were drawn by the base model
    tried, best = tune(choices, _FURTHER, end, untrained=first["p"] if first else 0.0)
    return [replace(arm, **choice) for choice in tried], None if best is None else replace(arm, **best)


def tune(
    choices: Choices, further: int, end: Callable[[dict[str, Any]], float | None], untrained: float = 0.0
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The choices to try, and the one that ends highest: the first of equals, or None while `end` does not know all.

    Where that is at the lowest or the highest rate, the next one (1, 3, 10...) is tried, too: at most `further` ones.
    Where it ends no higher than the `untrained` model, all rates are too high, and the next lower one is tried.
    """
    tried = list(choices)
    while True:
        ends = [end(choice) for choice in tried]
        if None in ends:
            return tried, None
        place = int(np.argmax(np.array(ends, dtype=float)))
        best, harmful = tried[place], (ends[place] or 0.0) <= untrained
        rate = best["learning_rate"]
        rates = [one["learning_rate"] for one in tried if one | {"learning_rate": rate} == best]
        at_end = rate in (min(rates), max(rates)) and len(rates) > 1
        if not (at_end or harmful) or len(tried) == len(choices) + further:
            return tried, best
        up = not harmful and rate == max(rates)
        tried.append(best | {"learning_rate": next_rate(max(rates) if up else min(rates), up)})


def next_rate(rate: float, up: bool) -> float:
    """The rate above or below, of 1, 3, 10, 30..."""
    is_one = f"{rate:.0e}".startswith("1")
    factor = 3 if is_one == up else 10 / 3
    return float(f"{rate * factor if up else rate / factor:.0e}")


def best(store: Store, arm: Arm, choices: Choices) -> Arm:
    """The arm with its best choice.

    Raises:
        Unfinished: not all choices have been tried.
    """
    chosen = _tuned(store, arm, choices)[1]
    if chosen is None:
        raise Unfinished(f"{arm} has not been tuned")
    return chosen


def measured(store: Store, arm: Arm, choices: Choices, seeds: Sequence[int]) -> Measured:
    """pass@1 at the end of an arm with its best choice, by seed."""
    chosen = best(store, arm, choices)
    found = {seed: store.get(chosen.cell(seed)) for seed in seeds}
    ends = {seed: result["end"] for seed, result in found.items() if result is not None}
    return {seed: (end["pass@1"], end["error"]) for seed, end in ends.items()}


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """What the cells of `planned` do."""
    split = "validation" if cell["seed"] == TUNING_SEED else "test"
    return run(Arm.of(cell), profile, cell["seed"], split=split)
