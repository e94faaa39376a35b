import numpy as np
import pytest

from topr_trl.evaluation.off_policy import off_policy_values


def test_by_hand():
    """The weights are 1 and 3 for the first problem, and equal for the second: (1 - 3) / 4 and 0.5."""
    ratios, rewards, problems = np.log([1, 3, 5, 5]), np.array([1.0, -1, 1, 0]), np.array([0, 0, 1, 1])
    found = off_policy_values(ratios, rewards, problems)
    assert found.values_P == pytest.approx([-0.5, 0.5])
    assert found.effective_samples == pytest.approx((16 / 10 + 2) / 2)


def test_ratios_beyond_floats():
    found = off_policy_values(np.array([-900.0, -1_000.0, 5_000.0]), np.array([1.0, -1.0, 0.5]), np.array([0, 0, 1]))
    assert found.values_P == pytest.approx([1.0, 0.5])
    assert found.effective_samples == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ratios", "rewards", "problems", "words"),
    [
        ([0.0, -np.inf], [1.0, 0.0], [0, 0], "^log .*finite"), ([0.0, 0.0], [1.0, np.nan], [0, 0], "finite"),
        ([0.0], [1.0, 0.0], [0, 0], "^log_ratios_N, .*same shape"),
        ([0.0, 0.0], [1.0, 0.0], [0, 2], "^problems_N .*without a gap"),
    ],
)  # fmt: skip
def test_bad_values(ratios, rewards, problems, words):
    with pytest.raises(ValueError, match=words):
        off_policy_values(np.array(ratios), np.array(rewards), np.array(problems))
