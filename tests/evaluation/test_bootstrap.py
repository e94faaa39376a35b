from dataclasses import replace

import numpy as np
import pytest

from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.bootstrap import Difference, RewardDifference, compare, matched, paired_bootstrap, share_best


def run(skills, samples=8, seed=0, ids=None, truth="7"):
    rng = np.random.default_rng(seed)
    answers = [[truth if rng.random() < s else str(rng.integers(1, 4)) for _ in range(samples)] for s in skills]
    return encode(answers, [truth] * len(skills), problem_ids=ids)


def test_the_bootstrap_by_hand():
    """The second run gains 1 on one of two problems. Draws of two problems have the mean gains 1, 1/2, 1/2 and 0."""
    (found,) = paired_bootstrap(np.array([[0.0], [0.5]]), np.array([[1.0], [0.5]]))
    assert (found.difference, found.low, found.high) == (0.5, 0.0, 1.0)
    better = found.share_better * 10_000  # number of draws in which the second run is better
    assert better == pytest.approx(round(better), abs=1e-6)
    assert found.share_better == pytest.approx(0.75, abs=0.02)
    assert str(Difference(0.512, -0.534, 0.556, 0.8)) == "+51.2 [-53.4, +55.6]"
    assert str(Difference(-1e-17, -4e-4, 0.0, 0.0)) == "+0.0 [+0.0, +0.0]"
    assert str(RewardDifference(0.51249, -0.53451, 2.0, 0.8)) == "+0.512 [-0.535, +2.000]"
    assert str(RewardDifference(-1e-17, -4e-4, 0.0, 0.0)) == "+0.000 [+0.000, +0.000]"
    assert found.to_dict() == {"difference": 0.5, "low": 0.0, "high": 1.0, "share_better": found.share_better}


def test_the_interval_is_that_of_a_paired_mean():
    """With many problems, the interval equals the normal interval of the mean gain. Problem difficulty cancels."""
    rng = np.random.default_rng(0)
    hardness = rng.random(400)
    gains = rng.normal(0.02, 0.1, 400)
    (found,) = paired_bootstrap(hardness[:, None], (hardness + gains)[:, None])
    half = 1.96 * gains.std() / np.sqrt(400)
    # A percentile of 10,000 draws has a standard error of 1.4% of `half`. The 3.5th percentile would be 7.5% off.
    assert found.low == pytest.approx(gains.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(gains.mean() + half, abs=0.05 * half)


def test_problems_are_matched_by_their_ids():
    first, second = run([0.0, 1.0, 1.0], ids=[5, 6, 7]), run([1.0, 1.0, 0.0], ids=[7, 6, 5])
    found = compare(first, second)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@8", "maj@2", "maj@4"]
    assert all((one.low, one.high, one.share_better) == (0, 0, 0) for one in found.values())
    assert matched(first, second).problem_ids == [5, 6, 7]
    # If the runs differ in their number of samples, the smaller number limits k.
    assert list(compare(first, run([1.0] * 3, 2, ids=[5, 6, 7]))) == ["pass@1", "pass@2"]


def test_other_problems_are_an_error():
    first = run([0.5] * 3, ids=[5, 6, 7])
    message = (
        r"^The runs must have the same problems \(by problem_id, or by prompt if neither run has that column\): 1 of 3 "
        r"in the first are not in the second, 2 of 4 in the second are not in the first\.$"
    )
    with pytest.raises(ValueError, match=message):
        compare(first, run([0.5] * 4, ids=[5, 6, 8, 9]))
    with pytest.raises(ValueError, match=r"3 of 3 have a different correct answer in the second, such as problem 5"):
        compare(first, run([0.5] * 3, ids=[5, 6, 7], truth="9"))


def test_a_matched_run_keeps_what_is_known_of_its_samples():
    first = encode([["1"], ["2"]], ["1", "3"], problem_ids=["a", "b"])
    second = encode([["3"], ["2"]], ["3", "1"], [[0.5], [0.25]], ["b", "a"], {"level": ["5", "1"]})
    found = matched(first, second)
    assert found.codes_PS.tolist() == [[1], [0]]
    assert found.scores_PS.tolist() == [[0.25], [0.5]]
    assert (list(found.problem_ids), list(found.truths), found.groups) == (
        ["a", "b"], ["1", "3"], {"level": ["1", "5"]},
    )  # fmt: skip
    assert matched(second, first).scores_PS is None


def test_greedy_answers_are_compared_if_both_runs_have_them():
    """Greedy answers are compared by problem: the second run loses problem 5, and wins problems 6 and 7."""
    first, second = run([0.2, 0.5, 0.7], ids=[5, 6, 7]), run([0.4, 0.6, 0.2], seed=1, ids=[7, 5, 6])
    before = replace(first, greedy_P=np.array([True, False, False]))
    after = replace(second, greedy_P=np.array([True, False, True]), temperatures=[0.7])
    found = compare(before, after)
    assert next(iter(found)) == "greedy"
    assert found["greedy"].difference == pytest.approx(1 / 3)
    gains = paired_bootstrap(np.array([[1.0], [0.0], [0.0]]), np.array([[0.0], [1.0], [1.0]]))
    assert found.pop("greedy") == gains[0]
    assert found == compare(first, second) == compare(before, second) == compare(first, after)
    assert matched(before, after).greedy_P.tolist() == [False, True, True]
    assert matched(before, after).temperatures == [0.7]


def test_draws_are_those_of_the_seed():
    first, second = run([0.2, 0.5, 0.7, 0.4], 2), run([0.4, 0.6, 0.2, 0.9], 2, seed=1)
    assert compare(first, second) == compare(first, second, seed=0)
    gains = np.random.default_rng(0).normal(size=(30, 1))
    assert paired_bootstrap(0 * gains, gains) == paired_bootstrap(0 * gains, gains, seed=0)
    assert compare(first, second, seed=7) == compare(first, second, seed=7) != compare(first, second)


@pytest.mark.slow
def test_shares_of_draws():
    assert share_best(np.array([[1.0, 1.0, 0.0]] * 5)).tolist() == [0.5, 0.5, 0.0]
    rounded = np.array([[0.1 + 0.2, 0.3]] * 5)  # equal but for rounding
    assert share_best(rounded).tolist() == [0.5, 0.5]
    assert share_best(np.array([[0.5 + 2e-13, 0.5]])).tolist() == [0.5, 0.5]
    assert share_best(np.array([[0.5 + 2e-12, 0.5]])).tolist() == [1.0, 0.0]
    values = np.random.default_rng(0).normal([0.0, 0.1], 1, (400, 2))
    assert 0.5 < share_best(values)[1] < 1
    assert share_best(values, seed=3).tolist() == share_best(values, seed=3).tolist()
    assert share_best(values).tolist() == share_best(values, seed=0).tolist() != share_best(values, seed=1).tolist()


def test_rounding_is_no_gain():
    (found,) = paired_bootstrap(np.array([[0.3]] * 5), np.array([[0.1 + 0.2]] * 5))
    assert (found.difference, found.share_better) == (pytest.approx(0, abs=1e-12), 0)


def test_an_unknown_difference_is_shown_as_nan():
    unknown = (float("nan"),) * 4
    assert str(Difference(*unknown)) == str(RewardDifference(*unknown)) == "+nan [+nan, +nan]"


@pytest.mark.parametrize("shape", [(3, 1), (2, 2), (3,), (0, 2)])
def test_runs_of_another_shape_are_not_broadcast(shape):
    with pytest.raises(ValueError, match=r"the same shape \(P, M\)"):
        paired_bootstrap(np.zeros((3, 2)), np.zeros(shape))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_to_compare_are_finite(value):
    with pytest.raises(ValueError, match="must be finite"):
        paired_bootstrap(np.zeros((2, 1)), np.array([[0.0], [value]]))
