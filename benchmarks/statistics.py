"""Compute means and intervals, from seeds and from the bootstrap of each evaluation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)


@dataclass(frozen=True)
class Interval:
    """Mean and half the width of its interval. If `half` is NaN, `low` and `high` are the mean."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self._known_half

    @property
    def high(self) -> float:
        return self.mean + self._known_half

    @property
    def _known_half(self) -> float:
        return 0.0 if self.half != self.half else self.half

    def percent(self, signed: bool = False) -> str:
        sign = "+" if signed else ""
        margin = "" if self.half != self.half else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:{sign}.1f}{margin}"


def interval(values: Sequence[float], errors: Sequence[float] = ()) -> Interval:
    """Return the mean over seeds and its 95% t-interval, which is at least as wide as the bootstrap interval.

    Args:
        values: one value per seed.
        errors: bootstrap standard errors of the evaluations. With one seed, the interval only depends on these errors.
    """
    array = np.asarray(values, dtype=float)
    bootstrap = 2 * sqrt(float(np.mean(np.square(errors))) / len(array)) if len(errors) else nan
    if len(array) < 2:
        return Interval(float(array.mean()), bootstrap)
    seeds = _T[min(len(array) - 2, len(_T) - 1)] * float(array.std(ddof=1)) / sqrt(len(array))
    return Interval(float(array.mean()), float(np.fmax(seeds, bootstrap)))


Measured = dict[int, tuple[float, float]]  # value and bootstrap error (or NaN) by seed


def over_seeds(measured: Measured) -> Interval:
    return interval([value for value, _ in measured.values()], _known(error for _, error in measured.values()))


def difference(first: Measured, second: Measured) -> Interval:
    """Return `first - second` over common seeds, which have the same completions and test problems."""
    seeds = sorted(first.keys() & second.keys())
    errors = _known(sqrt(first[seed][1] ** 2 + second[seed][1] ** 2) for seed in seeds)
    return interval([first[seed][0] - second[seed][0] for seed in seeds], errors)


def over_problems(values_SP: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of values by seed and problem, with the wider of two 95% intervals: over seeds or problems.

    All seeds have the same problems, so more seeds do not narrow the interval over problems.
    """
    array = np.asarray(values_SP, dtype=float)
    error = float(array.mean(axis=0).std(ddof=1)) / sqrt(array.shape[1])
    by_seed = interval(array.mean(axis=1).tolist())
    return Interval(by_seed.mean, float(np.fmax(by_seed.half, 1.96 * error)))


def _known(errors: Iterable[float]) -> list[float]:
    return [error for error in errors if error == error]
