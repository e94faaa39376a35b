"""Means with intervals, over seeds and over the bootstrap of each evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval, two standard errors; NaN where one seed says nothing about it."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def percent(self, signed: bool = False) -> str:
        sign = "+" if signed else ""
        margin = "" if self.half != self.half else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:{sign}.1f}{margin}"


def interval(values: Sequence[float], errors: Sequence[float] = ()) -> Interval:
    """Mean over seeds ± two standard errors: the spread over seeds, and the bootstrap error of each value, added.

    The spread over seeds already contains the error of each evaluation, so this errs on the wide side. With one seed
    the bootstrap error is all there is.
    """
    array = np.asarray(values, dtype=float)
    spread = array.var(ddof=1) / len(array) if len(array) > 1 else 0.0
    bootstrap = float(np.mean(np.square(errors))) / len(array) if len(errors) else 0.0
    if len(array) == 1 and not len(errors):
        return Interval(float(array.mean()), nan)
    return Interval(float(array.mean()), 2 * sqrt(spread + bootstrap))


def difference(first: dict[int, float], second: dict[int, float]) -> Interval:
    """Mean of `first - second` over the seeds that both have, which share candidates and test problems."""
    seeds = sorted(first.keys() & second.keys())
    return interval([first[seed] - second[seed] for seed in seeds])
