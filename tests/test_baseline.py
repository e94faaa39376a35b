import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from topr_trl import PRESETS, topr_loss
from topr_trl.baseline import baseline_for_positive_share, effective_positive_share, subtract_baseline
from topr_trl.curation import compose, curate


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 0.99, 1.0])
def test_closed_form_of_eq_12(p, share):
    rewards = np.where(np.arange(100) < 100 * p, 1.0, -1.0)
    c = baseline_for_positive_share(rewards, share)
    assert c == pytest.approx((p - share) / (p + share - 2 * p * share))
    assert p * (1 - c) / (1 + (1 - 2 * p) * c) == pytest.approx(share)  # Eq. 12
    assert effective_positive_share(rewards - c) == pytest.approx(share)


@settings(max_examples=300, deadline=None)
@given(rewards=st.lists(st.integers(-20, 20).map(lambda r: r / 4), min_size=2, max_size=30), share=st.floats(0.01, 1))
@example(rewards=[4.25, 4.25, 4.5], share=0.9999999999999999)  # before clipping, the baseline is slightly below 4.25
def test_any_rewards_reach_any_share(rewards, share):
    assume(len(set(rewards)) > 1)
    c = baseline_for_positive_share(rewards, share)
    assert min(rewards) <= c < max(rewards)
    assert effective_positive_share(np.array(rewards) - c) == pytest.approx(share, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.integers(-9, 9), min_size=2, max_size=20), low=st.floats(-10, 10), step=st.floats(0, 5),
)  # fmt: skip
def test_share_falls_with_the_baseline(rewards, low, step):
    shares = [effective_positive_share(np.array(rewards) - c) for c in (low, low + step)]
    if not np.isnan(shares).any():
        assert shares[1] <= shares[0] + 1e-12


def test_minus_one_leaves_positives_only():
    rewards = [1.0, -1.0, -1.0]
    assert baseline_for_positive_share(rewards, 1.0) == -1.0
    assert subtract_baseline(rewards, -1.0).tolist() == [2.0, 0.0, 0.0]
    assert (subtract_baseline([0.1, 0.1, 0.1, 1.0], 0, share=1.0) >= 0).all()  # rounding must not give -1e-17


def test_rounding_carries_no_share_past_one():
    assert effective_positive_share([0.0, *[1.0] * 5, 6.247501962177227e26, 2.9999999999999997e38, 3e38]) == 1


def test_a_tiny_share_leaves_the_highest_reward_positive():
    assert baseline_for_positive_share([-1.0, 1.0], 1e-17) < 1  # the nearest float is 1, which would leave no positive


def test_rewards_in_half_precision_are_summed_in_double():
    assert effective_positive_share(np.repeat(np.float16([300, -300]), 300)) == 0.5  # the sum 90,000 overflows float16


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_share_outside_its_range(share):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        baseline_for_positive_share([1.0, -1.0], share)


def test_equal_rewards_say_which_range_is_possible():
    with pytest.raises(ValueError, match=r"All 3 rewards are -1.*the share can only be 1 or 0"):
        baseline_for_positive_share([-1.0] * 3, 0.2)
    assert baseline_for_positive_share([-1.0] * 3, 1.0) == -1.0
    with pytest.raises(ValueError, match=r"^There are no rewards, so the baseline cannot be computed\.$"):
        baseline_for_positive_share([float("nan")], 0.5)


def test_means():
    nan = float("nan")
    assert subtract_baseline([1.0, 0.0, nan], "mean").tolist()[:2] == [0.5, -0.5]
    centred = subtract_baseline([1.0, 0.0, 4.0, nan, 2.0], "group_mean", ["a", "a", "b", "b", "b"])
    assert centred.tolist()[:3] == [0.5, -0.5, 1.0]
    assert np.isnan(centred[3])
    assert centred[4] == -1.0
    assert np.isnan(subtract_baseline([nan, nan], "group_mean", [0, 0])).all()
    assert subtract_baseline([nan, 1.0, 3.0], "mean").tolist()[1:] == [-1.0, 1.0]
    assert subtract_baseline([3.0, nan], "group_mean", [0, 0])[0] == 0  # the only reward of a group is its mean
    assert subtract_baseline(np.array([0.1], dtype=np.float32), 0).dtype == np.float64


@pytest.mark.parametrize("baseline", ["mean", "group_mean"])
def test_rewards_at_the_mean_have_no_sign(baseline):
    for reward in np.arange(1, 100) / 100:
        for scale in (1.0, 1e6 / 3):
            assert not subtract_baseline([scale * reward] * 7, baseline, [0] * 7).any()
        below, at, above = subtract_baseline([reward, 2 * reward, 3 * reward], baseline, [0] * 3)
        assert (below < 0, at, above > 0) == (True, 0, True)
    assert subtract_baseline([], baseline, []).size == 0


def test_float32_rewards_at_the_baseline_have_no_sign():
    rewards = np.float32([0.1, 0.3, 0.1 + 1e-6])  # in float32, 0.1 is above 0.1 in float64
    assert np.sign(subtract_baseline(rewards, 0.1)).tolist() == [0, 1, 1]


def test_bad_baselines():
    with pytest.raises(ValueError, match=r"^baseline='group_mean' needs .* group_ids\.$"):
        subtract_baseline([1.0], "group_mean")


def test_share_of_nothing_is_not_a_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a division by 0 would warn
        assert np.isnan(effective_positive_share([0.0, 0.0]))
    assert effective_positive_share([1e300, -5e299, -5e299]) == 0.5


# Dividing by |y| makes the expected gradient depend on the baseline.

# Each length has four completions, and one of them is right. So the mean reward of each length is -0.5.
LENGTHS_B = torch.tensor([1, 2, 4, 8]).repeat_interleave(4)
REWARDS_B = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64).repeat(4)
# Lengths are not equally likely. The first token determines the completion, so log π of the other tokens is 0.
PROBABILITIES_B = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).repeat_interleave(4) / 4


def expected_step(baseline, length_normalization=True):
    """Return the expected descent direction of the logits at π = μ."""
    logits_B = PROBABILITIES_B.log().requires_grad_()
    first_BT = torch.nn.functional.one_hot(torch.zeros(16, dtype=torch.long), 8)
    logps_BT = logits_B.log_softmax(0)[:, None] * first_BT
    mask_BT = torch.arange(8) < LENGTHS_B[:, None]
    rewards_B = torch.tensor(subtract_baseline(REWARDS_B, baseline))
    loss = topr_loss(
        logps_BT, logps_BT.detach(), rewards_B, mask_BT, PRESETS["topr"], length_normalization=length_normalization
    )
    assert (loss.weights == 1).all()
    (gradient_B,) = torch.autograd.grad((PROBABILITIES_B * loss.losses_B).sum(), logits_B)
    return -gradient_B


def change_of_length(step_B):
    """Return the derivative of E|y| along a step of the logits."""
    logits_B = PROBABILITIES_B.log().requires_grad_()
    (slope_B,) = torch.autograd.grad((logits_B.softmax(0) * LENGTHS_B).sum(), logits_B)
    return float(slope_B @ step_B)


def test_without_the_division_the_expected_gradient_does_not_depend_on_the_baseline():
    # E[R ∇log π] - c E[∇log π], and E[∇log π] = 0.
    for baseline in (0, 0.75, "mean"):
        torch.testing.assert_close(expected_step(baseline, False), expected_step(-1, False), atol=1e-15, rtol=0)


def test_with_the_division_the_baseline_moves_the_length():
    # Let a = (R - c) / |y|. The step of logit k is π_k (a_k - E a).
    # E|y| moves by Σ_k π_k² (|y_k| - E|y|)(a_k - E a) along it.
    # With c = 0 the mean of a is -0.5 / |y| at each length. E|y| = 2.6, E[1/|y|] = 0.6125 and E a = -0.30625.
    # A length with probability p adds p²/4 (|y| - 2.6)(-0.5/|y| + 0.30625):
    # 0.0124 - 0.000759375 + 0.0025375 + 0.003290625 = 0.01746875. The sum is proportional to E R - c.
    assert change_of_length(expected_step(0)) == pytest.approx(0.01746875, abs=1e-15)  # toward long completions
    assert change_of_length(expected_step("mean")) == pytest.approx(0, abs=1e-15)
    assert change_of_length(expected_step(-1)) == pytest.approx(-0.01746875, abs=1e-15)  # toward short ones


IDS = [0, 0, 1]


@pytest.mark.parametrize(
    "wrong", [[[1.0], [0.0]], 1.0, ["1.0", "0.0"], [True, False], [True, None], [1.0, np.inf], [1e301]]
)
def test_rewards_are_numbers_in_one_dimension(wrong):
    calls = (
        effective_positive_share,
        lambda rewards: baseline_for_positive_share(rewards, 0.5),
        lambda rewards: subtract_baseline(rewards, "mean"),
        lambda rewards: compose(rewards, [0, 1]),
        lambda rewards: curate(rewards, [0, 1]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^rewards must be"):
            call(wrong)


@pytest.mark.parametrize(("wrong", "kind"), [(["1.0"], "<U3"), ([True, None], "bool")])
def test_the_kind_of_wrong_rewards_is_named(wrong, kind):
    with pytest.raises(ValueError, match=f"not {kind} of shape"):
        subtract_baseline(wrong, "mean")


def test_a_missing_reward_may_be_none():
    np.testing.assert_equal(subtract_baseline([1.0, None, 0], "mean"), [0.5, np.nan, -0.5])


@pytest.mark.parametrize("baseline", [np.nan, np.inf, "median", None, np.array([0.0, 1.0, 2.0])])
def test_a_baseline_is_one_finite_number_or_a_name(baseline):
    expected = f"baseline must be a finite number or one of mean, group_mean, not {baseline!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        subtract_baseline([1.0, 0.0, 1.0], baseline)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 0], "one id for each of 3 rows"),
        ([[0], [0], [1]], "one id for each of 3 rows"),
        ([1.0, np.nan, np.nan], "row 1 has no id"),
        ([1, None, None], "row 1 has no id"),
        (["a", "b", None], "row 2 has no id"),
        (np.array([1, pd.NA, pd.NA], dtype=object), "row 1 has no id"),
        (pd.Series([1.0, 2.0, None]), "row 2 has no id"),
        (np.array(["2026-01-01", "NaT", "NaT"], dtype="datetime64[D]"), "row 1 has no id"),
        (["1", 1, 2], "of one type, not numbers and text"),
        (np.array(["1", 1, 2], dtype=object), "of one type, not numbers and text"),
        ([2.0**53, 2.0**53 + 2, 1.0], "may be rounded"),
        ([2**53 + 1, 2, 0.5], "may be rounded"),
    ],
)
def test_each_row_has_an_id_of_its_own_group(ids, message):
    with pytest.raises(ValueError, match=f"^group_ids.*{message}"):
        subtract_baseline([1.0, 0.0, 1.0], "group_mean", ids)
    with pytest.raises(ValueError, match=f"^problem_ids.*{message}"):
        curate([1.0, 0.0, 1.0], ids)


@pytest.mark.parametrize(
    "ids", [IDS, np.array(IDS), torch.tensor(IDS), ["a", "a", "b"], np.array(["a", "a", "b"]),
            [2**60, 2**60, 2**60 + 1], [2**70, 2**70, 2**70 + 1], [1.5, 1.5, 2.0**52],
            [np.str_("a"), "a", "b"], pd.Series(["a", "a", "b"])],
)  # fmt: skip
def test_ids_of_any_one_type_make_groups(ids):
    assert subtract_baseline([1.0, 0.0, 1.0], "group_mean", ids).tolist() == [0.5, -0.5, 0.0]
    assert curate([1.0, -1.0, 1.0], ids).problems == 2
