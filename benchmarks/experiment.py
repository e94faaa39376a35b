"""Compare methods, each at its own best learning rate.

An `Experiment` plans cells (`benchmarks.cells`). Each cell is run once and its result is kept, so a killed run
continues. The reported cells of a method are planned once its learning rates have been tried.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.arms import TUNING_SEED, tune
from benchmarks.cells import Cell, Store


@dataclass(frozen=True)
class Experiment:
    """Methods that are compared on the same rows.

    Attributes:
        claim: name of the file of results.
        methods: names of the methods.
        rates: learning rates that are tried first.
        seeds: seeds that are reported; the rates are tried with another one, `TUNING_SEED`.
        measures: names of results. Each method has a best rate for each of them.
        fields: what else a cell says, such as the base model and its weights.
        further: number of rates to try beyond the first, where the best one is at an end of them.
        untrained: the measures of the untrained model, if known: a best rate that ends no higher is too high.
    """

    claim: str
    methods: Sequence[str]
    rates: Sequence[float]
    seeds: Sequence[int]
    measures: Sequence[str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    further: int = 0
    untrained: Mapping[str, float] = field(default_factory=dict)

    def cell(self, method: str, rate: float, seed: int) -> Cell:
        """Return the cell of one run."""
        return {"claim": self.claim, **self.fields, "method": method, "learning_rate": rate, "seed": seed}

    def cells(self, store: Store) -> list[Cell]:
        """Return the cells that can be planned now: the rates to try, and the best rate with each seed."""
        planned: list[Cell] = []
        for method in self.methods:
            for measure in self.measures:
                tried, best = self._tuned(store, method, measure)
                planned += [self.cell(method, rate, TUNING_SEED) for rate in tried]
                planned += [self.cell(method, best, seed) for seed in self.seeds if best]
        return _once(planned)

    def best_rate(self, store: Store, method: str, measure: str) -> float | None:
        """Return the best learning rate for a measure; None until all have been tried."""
        return self._tuned(store, method, measure)[1]

    def ends(self, store: Store, method: str, measure: str) -> dict[int, dict[str, Any]]:
        """Return the results by seed, at the learning rate that is best for a measure."""
        rate = self.best_rate(store, method, measure)
        found = {seed: store.get(self.cell(method, rate, seed)) for seed in self.seeds} if rate else {}
        return {seed: result for seed, result in found.items() if result is not None}

    def _tuned(self, store: Store, method: str, measure: str) -> tuple[list[float], float | None]:
        def end(choice: dict[str, Any]) -> float | None:
            found = store.get(self.cell(method, choice["learning_rate"], TUNING_SEED))
            return found[measure] if found else None

        choices = [{"learning_rate": rate} for rate in self.rates]
        tried, best = tune(choices, self.further, end, self.untrained.get(measure, 0.0))
        return [choice["learning_rate"] for choice in tried], best and best["learning_rate"]


def _once(planned: Iterable[Cell]) -> list[Cell]:
    """Drop repeated cells, keeping the order."""
    kept: list[Cell] = []
    for cell in planned:
        if cell not in kept:
            kept.append(cell)
    return kept
