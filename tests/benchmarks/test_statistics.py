"""Intervals and paired differences match hand arithmetic."""

import numpy as np
import pytest

from benchmarks.statistics import difference, interval


def test_interval_is_students_and_never_below_the_bootstraps():
    # The standard deviation of the three seeds is 0.1. Student's t for two degrees of freedom is 4.30.
    got = interval([0.1, 0.2, 0.3], [0.01] * 3)
    assert (got.mean, got.half) == pytest.approx((0.2, 4.30 * 0.1 / 3**0.5))
    assert interval([0.2, 0.2, 0.2], [0.03] * 3).half == pytest.approx(2 * 0.03 / 3**0.5)
    assert interval([0.4], [0.05]).half == pytest.approx(0.1)
    assert np.isnan(interval([0.4]).half)


def test_difference_is_paired():
    nan = float("nan")
    got = difference({0: (0.5, nan), 1: (0.7, nan), 2: (0.9, nan)}, {0: (0.4, nan), 1: (0.6, nan), 5: (0.0, nan)})
    assert (got.mean, got.half) == pytest.approx((0.1, 0.0))
    assert difference({0: (0.5, 0.03)}, {0: (0.4, 0.04)}).half == pytest.approx(2 * 0.05)
