"""Compare methods, each at its own best learning rate.

An `Experiment` plans cells (`benchmarks.cells`). Each cell is run once and its result is stored, so a killed experiment
can be continued. The reported cells of a method are planned after its choices have been tried.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.statistics import Measured

TUNING_SEED = 1_000  # seed of the runs that choose learning rates, with validation problems

Choice = dict[str, Any]  # fields of a cell that are tuned: the learning rate, sometimes also the rows per step


def rates(*values: float) -> list[Choice]:
    """Return one choice per learning rate."""
    return [{"learning_rate": rate} for rate in values]


@dataclass(frozen=True)
class Experiment:
    """Comparison of methods on the same rows.

    Attributes:
        claim: name of the file with the results.
        methods: fields of the cells of each method, by name.
        choices: choices that are tried first.
        seeds: seeds that are reported. Choices are tried with `TUNING_SEED`.
        measures: measures for choosing, as paths for `value`. Each method has a best choice per measure, among the
            choices that any measure has tried.
        title: title of the table. An experiment without a title has no table.
        fields: fields of all cells, such as the base model and its weights.
        reported_fields: further fields of the cells of the reported seeds.
        further: number of rates to try in addition, if the best rate is the lowest or the highest.
        untrained: value of the untrained model by measure, or the path of this value in a result. If the best rate
            does not exceed this value, lower rates are tried.
        finalists: number of choices to run with all seeds, by method. Default: 1.
        level: choices whose value is less than `level` below the best value are also run with all seeds.
        tuned: function that returns the choice of a method and measure, instead of trying choices.
        shows: measures in the table. Default: the measures that choose the learning rates.
    """

    claim: str
    methods: Mapping[str, Cell]
    choices: Sequence[Choice]
    seeds: Sequence[int]
    measures: Sequence[str]
    title: str = ""
    fields: Cell = field(default_factory=dict)
    reported_fields: Cell = field(default_factory=dict)
    further: int = 0
    untrained: Mapping[str, float | str] = field(default_factory=dict)
    finalists: Mapping[str, int] = field(default_factory=dict)
    level: float = 0.0
    tuned: Callable[[Store, str, str], Choice | None] | None = None
    shows: Sequence[str] = ()

    def cell(self, method: str, choice: Choice, seed: int) -> Cell:
        """Return the cell of one run."""
        reported = self.reported_fields if seed != TUNING_SEED else {}
        return {"claim": self.claim, **self.fields, **self.methods[method], **choice, "seed": seed, **reported}

    def cells(self, store: Store) -> list[Cell]:
        """Return the cells that can be planned now: the choices to try, and the best choices with each seed."""
        planned: list[Cell] = []
        for method in self.methods:
            for measure in self.measures:
                tried, best = self._tuned(store, method, measure)
                planned += [self.cell(method, choice, TUNING_SEED) for choice in tried]
                planned += [self.cell(method, choice, seed) for choice in best for seed in self.seeds]
        return once(planned)

    def best(self, store: Store, method: str, measure: str = "") -> Choice | None:
        """Return the choice to report: the finalist with the highest mean over all seeds.

        Return None if results are missing.
        """
        measure = measure or self.measures[0]
        finalists = self._tuned(store, method, measure)[1]
        if len(finalists) < 2:
            return finalists[0] if finalists else None
        ends = [self._results(store, method, choice) for choice in finalists]
        if any(len(end) < len(self.seeds) for end in ends):
            return None
        means = [np.mean([value(result, measure) for result in end.values()]) for end in ends]
        return finalists[int(np.argmax(means))]

    def ends(self, store: Store, method: str, measure: str = "") -> dict[int, dict[str, Any]]:
        """Return the results by seed, with the best choice for a measure."""
        best = self.best(store, method, measure)
        return self._results(store, method, best) if best else {}

    def measured(self, store: Store, method: str, shown: str = "") -> Measured:
        """Return the values of `shown` by seed, with errors, for the best choice.

        The choice is best by `shown`, or by the last measure if `shown` is not a measure.
        """
        shown = shown or self.measures[0]
        found = self.ends(store, method, shown if shown in self.measures else self.measures[-1])
        # These errors are over problems. All seeds have the same ones, so more seeds do not narrow them.
        shared = sqrt(len(found)) if shown.endswith("greedy") or shown.startswith("test/") else 1.0
        return {seed: (value(result, shown), shared * error(result, shown)) for seed, result in found.items()}

    def has_all_seeds(self, store: Store, method: str) -> bool:
        """Return whether all seeds of a method have been run with its best choice."""
        return len(self.ends(store, method)) == len(self.seeds)

    def is_finished(self, store: Store) -> bool:
        """Return whether all cells have been run. Return False if none can be planned yet."""
        planned = self.cells(store)
        return bool(planned) and not store.unfinished(planned)

    def _results(self, store: Store, method: str, choice: Choice) -> dict[int, dict[str, Any]]:
        found = {seed: store.get(self.cell(method, choice, seed)) for seed in self.seeds}
        return {seed: result for seed, result in found.items() if result is not None}

    def _tuned(self, store: Store, method: str, measure: str) -> tuple[list[Choice], list[Choice]]:
        """Return the choices to try, and the choices to run with all seeds (none until all have been tried)."""
        if self.tuned is not None:
            best = self.tuned(store, method, measure)
            return [], [best] if best else []

        tried, end = self._tried(store, method), partial(self._end, store, method, measure)
        if any(end(choice) is None for choice in tried):
            return tried, []
        best = max(tried, key=lambda choice: end(choice) or 0.0)
        by_end = sorted(tried, key=lambda choice: -(end(choice) or 0.0))
        highest = end(best) or 0.0
        level = sum((end(choice) or 0.0) > highest - self.level for choice in tried)
        finalists = [choice for choice in by_end if choice != best][: max(self.finalists.get(method, 1), level) - 1]
        return tried, [best, *finalists]

    def _end(self, store: Store, method: str, measure: str, choice: Choice) -> float | None:
        """Return the value of a choice on the problems that choose, or None if it has not been tried."""
        result = store.get(self.cell(method, choice, TUNING_SEED))
        return None if result is None else value(result, measure)

    def _tried(self, store: Store, method: str) -> list[Choice]:
        """Return the choices to try for all measures. A search can stop at a local optimum that another one passes."""
        first = store.get(self.cell(method, self.choices[0], TUNING_SEED))
        found: list[Choice] = []
        for measure in self.measures:
            untrained = self.untrained.get(measure, 0.0)
            if isinstance(untrained, str):
                untrained = value(first, untrained) if first else 0.0
            tried, _ = tune(self.choices, self.further, partial(self._end, store, method, measure), untrained)
            found += [choice for choice in tried if choice not in found]
        return found


def value(result: dict[str, Any], path: str) -> float:
    """Return a number of a result, or 0 for a failed run. "curve/-1/pass@1" is `result["curve"][-1]["pass@1"]`."""
    if result.get("failed"):
        return 0.0
    found: Any = result
    for part in path.split("/"):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return float(found)


def error(result: dict[str, Any], path: str) -> float:
    """Return the standard error of a number of a result, or NaN if the run failed or the number has no error."""
    if result.get("failed"):
        return float("nan")
    folder, _, name = path.rpartition("/")
    found: Any = result
    for part in folder.split("/") if folder else ():
        found = found[int(part)] if isinstance(found, list) else found[part]
    return float(found.get(f"{name} error", found.get("error", np.nan) if name == "pass@1" else np.nan))


def tune(
    choices: Sequence[Choice], further: int, end: Callable[[Choice], float | None], untrained: float = 0.0
) -> tuple[list[Choice], Choice | None]:
    """Return the choices to try, and the first choice with the highest value, or None while a value is unknown.

    If the best choice has the lowest or the highest rate, add the next rate (1, 3, 10...), at most `further` times. If
    the best value does not exceed that of the `untrained` model, all rates are too high, so add the next lower rate.
    """
    tried = list(choices)
    while True:
        ends = [end(choice) for choice in tried]
        if None in ends:
            return tried, None
        place = int(np.argmax(np.array(ends, dtype=float)))
        best, harmful = tried[place], (ends[place] or 0.0) <= untrained
        rate = best["learning_rate"]
        of_kind = [one["learning_rate"] for one in tried if one | {"learning_rate": rate} == best]
        at_end = rate in (min(of_kind), max(of_kind)) and len(of_kind) > 1
        if not (at_end or harmful) or len(tried) == len(choices) + further:
            return tried, best
        up = not harmful and rate == max(of_kind)
        tried.append(best | {"learning_rate": next_rate(max(of_kind) if up else min(of_kind), up)})


def next_rate(rate: float, up: bool) -> float:
    """Return the next higher or lower rate in the series 1, 3, 10, 30..."""
    is_one = f"{rate:.0e}".startswith("1")
    factor = 3 if is_one == up else 10 / 3
    return float(f"{rate * factor if up else rate / factor:.0e}")


def once(planned: Iterable[Cell]) -> list[Cell]:
    """Return the cells without repeated cells, in the same order."""
    found: dict[str, Cell] = {}
    for cell in planned:
        found.setdefault(repr(sorted(cell.items())), cell)
    return list(found.values())
