import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topr_trl.curation import CURATIONS, REPEATING, ROWS_PER_PROBLEM, compose, curate

# Three problems with samples 0 to 3. Samples 1 and 3 of the first problem and sample 2 of the second are right.
REWARDS = np.array([-1, 1, -1, 1, -1, -1, 1, -1, -1, -1, -1, -1.0])
PROBLEMS = np.repeat([10, 20, 30], 4)


def test_anna_karenina_keeps_the_first_positive_of_each_problem():
    curated = curate(REWARDS, PROBLEMS, "anna_karenina", size=5)
    assert {1, 6} <= set(curated.indices)
    assert 3 not in curated.indices
    assert (curated.chosen_positives, len(curated.indices), curated.shortfall) == (2, 5, 0)
    assert (REWARDS[curated.indices] < 0).sum() == 3
    assert (curated.problems, curated.problems_without_positive) == (3, 1)


def test_first_is_by_sampling_order_not_by_table_order():
    backwards = np.arange(12)[::-1]
    samples = np.tile([0, 1, 2, 3], 3)
    curated = curate(REWARDS[backwards], PROBLEMS[backwards], "anna_karenina", 2, sample_ids=samples[backwards])
    assert set(backwards[curated.indices]) == {1, 6}
    without = curate(REWARDS[backwards], PROBLEMS[backwards], "anna_karenina", 2)
    assert set(backwards[without.indices]) == {3, 6}


@pytest.mark.parametrize("rule", CURATIONS)
def test_with_sample_ids_the_order_of_the_table_does_not_matter(rule):
    rng = np.random.default_rng(0)
    problems, samples = np.repeat(np.arange(50), 8), np.tile(np.arange(8), 50)
    rewards = np.where(rng.random(400) < 0.3, 1.0, -1.0)
    shuffled = rng.permutation(400)
    size = None if rule == "none" else 90
    share = 0.3 if rule == "positive_share" else 0.5
    a = curate(rewards, problems, rule, size, share, samples, seed=7).indices
    b = curate(rewards[shuffled], problems[shuffled], rule, size, share, samples[shuffled], seed=7).indices
    assert set(a) == set(shuffled[b])


@pytest.mark.parametrize("rule", CURATIONS)
def test_seeds(rule):
    rng = np.random.default_rng(0)
    rewards, problems = np.where(rng.random(400) < 0.5, 1.0, -1.0), np.repeat(np.arange(50), 8)
    first = curate(rewards, problems, rule, 100, seed=3).indices
    assert len(set(first)) == len(first)  # no row twice
    np.testing.assert_array_equal(first, curate(rewards, problems, rule, 100, seed=3).indices)
    np.testing.assert_array_equal(
        curate(rewards, problems, rule, 100).indices, curate(rewards, problems, rule, 100, seed=0).indices
    )
    if rule != "none":
        assert set(first) != set(curate(rewards, problems, rule, 100, seed=4).indices)


def test_in_words():
    curated = curate(np.tile([1.0, -1.0], 1_000), np.repeat(range(1_000), 2), "uniform", 1_500)
    share = f"{curated.chosen_positives / 1_500:.1%}"
    assert str(curated) == (
        f"1,500 rows, {share} positive, chosen from 1,000 positives and 1,000 negatives of 1,000 problems "
        "(0 without a positive)"
    )
    every = curate([1.0, -1.0, -1.0], [0] * 3, "none")
    assert str(every) == "3 rows, 33.3% positive: 1 positive and 2 negatives of 1 problem (0 without a positive)"
    with pytest.warns(UserWarning, match="no positive and no negative row"):
        empty = curate([], [], "anna_karenina", 3)
    assert str(empty).startswith("0 rows, 0.0% positive")
    assert str(empty).endswith("; 3 fewer than requested")


def test_signs_that_are_missing_are_named():
    for rewards, missing in (
        ([-1.0] * 2, "no positive"),
        ([1.0] * 2, "no negative"),
        ([float("nan")] * 2, "no positive and no negative"),
    ):
        for rule in ("positive_share", "balanced", "anna_karenina"):
            with pytest.warns(UserWarning, match=f"curation='{rule}': there is {missing} row"):
                curate(rewards, [0, 0], rule, 2)


def test_warnings_name_the_line_that_called():
    for rewards in ([-1.0, -1.0], [1.0, -1.0]):
        with pytest.warns(UserWarning, match="curation='positive_share'") as caught:
            curate(rewards, [0, 0], "positive_share", 4)
        assert caught[0].filename == __file__


def test_uniform_curation_of_negatives_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(curate([-1.0] * 8, [0] * 8, "uniform", 4).indices) == 4


def test_uniform_is_uniform():
    counts = np.zeros(12)
    for seed in range(600):
        counts[curate(REWARDS, PROBLEMS, "uniform", 4, seed=seed).indices] += 1
    # Each row is drawn with probability 1/3: 200 of 600, standard deviation 11.5.
    assert (np.abs(counts - 200) < 5 * 11.5).all()


def test_positives():
    assert curate(REWARDS, PROBLEMS, "positives").indices.tolist() == [1, 3, 6]
    assert len(curate(REWARDS, PROBLEMS, "positives", 2).indices) == 2


@pytest.mark.parametrize(
    ("size", "share", "rows", "positives"),
    [(4, 0.5, 4, 2), (10, 0.1, 10, 1), (None, 0.5, 6, 3), (None, 0.25, 12, 3), (None, 1, 3, 3), (None, 0, 9, 0)],
)
def test_fixed_share(size, share, rows, positives):
    curated = curate(REWARDS, PROBLEMS, "positive_share", size, share)
    assert (len(curated.indices), curated.chosen_positives) == (rows, positives)


@pytest.mark.parametrize(
    ("rule", "size", "rows", "positives"),
    [("balanced", None, 12, 6), ("balanced", 6, 6, 3), ("repeated_positives", None, 12, 12),
     ("repeated_positives", 40, 40, 40), ("repeated_positives", 2, 2, 2)],
)  # fmt: skip
def test_rules_repeat_positives_and_no_negative(rule, size, rows, positives):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curated = curate(REWARDS, PROBLEMS, rule, size)
    assert (len(curated.indices), curated.chosen_positives, curated.shortfall) == (rows, positives, 0)
    counts = np.bincount(curated.indices, minlength=12)
    assert counts[REWARDS < 0].max() <= 1
    assert np.ptp(counts[REWARDS > 0]) <= 1
    assert curated.indices.tolist() == sorted(curated.indices)


def test_balanced_says_that_it_leaves_out_right_rows():
    with pytest.warns(UserWarning, match="leaves out 4 of 6 right completions, because there are fewer wrong ones: 2"):
        curate([1.0] * 6 + [-1.0] * 2, range(8), "balanced")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curate([1.0] * 6 + [-1.0] * 6, range(12), "balanced")


def test_rules_that_repeat_leave_out_rows_that_teach_nothing():
    # With the mean of each problem as baseline, the rows of the problem without a right answer have R = 0.
    rewards, curated = compose(REWARDS, PROBLEMS, baseline="group_mean", rule="repeated_positives")
    assert set(curated.indices) <= set(range(8))
    assert (len(rewards), curated.chosen_positives, curated.available_positives) == (len(REWARDS), len(REWARDS), 3)
    assert rewards.all()
    with pytest.warns(UserWarning, match="no negative"):  # rewards of 0 and 1 with the baseline 0
        assert len(curate([1.0, 0.0, 0.0], [0, 1, 2], "balanced").indices) == 0


def test_positives_are_counted_after_the_second_baseline():
    raw = np.array([1.0, 0.6, 0.5, *np.linspace(0.0, 0.2, 9)])
    rewards, curated = compose(raw, np.arange(12), effective_positive_share=0.5, rule="positive_share")
    assert curated.chosen_positives == (rewards >= 0).sum()
    assert rewards[rewards > 0].sum() == pytest.approx(-rewards[rewards < 0].sum())
    # Three rows are above the baseline of all rows, but only one is above the baseline of these three.
    raw = [1.0, 0.6, 0.6, 0.2, 0.2, 0.0]
    assert compose(raw, range(6), effective_positive_share=0.5, rule="positives")[1].chosen_positives == 1
    rewards, curated = compose([1.0, 0.5, 0.0], [0] * 3, effective_positive_share=0.5, rule="uniform")
    assert (rewards.tolist(), curated.chosen_positives) == ([0.5, 0.0, -0.5], 2)


def test_the_summary_is_for_the_second_baseline_and_invents_no_repeats():
    # With the baseline of all rows, only the row with 0.6 is a positive. With the second one, the rows with 0.4 are.
    raw = [0.6, 0.2, 0.4, 0.4]
    rewards, curated = compose(raw, [0, 0, 1, 1], effective_positive_share=0.2, rule="uniform", size=3)
    assert curated.indices.tolist() == [1, 2, 3]
    assert (rewards > 0).tolist() == [False, True, True]
    assert str(curated) == (
        "3 rows, 66.7% positive, chosen from 3 positives and 1 negative of 2 problems (0 without a positive)"
    )
    assert str(compose([1.0], [0], baseline=0.0)[1]).startswith("1 row, 100.0% positive: 1 positive and 0 neg")


def test_balanced_says_how_many_rows_are_different():
    assert str(curate(REWARDS, PROBLEMS, "balanced")).endswith("(1 without a positive); 9 different rows")
    with pytest.warns(UserWarning, match="too few rows"):
        short = curate(REWARDS, PROBLEMS, "balanced", 40)
    assert str(short).endswith("; 12 different rows; 22 fewer than requested")  # 9 negatives are half of 18


def test_balanced_chooses_other_rows_with_another_seed():
    first, second = (curate(REWARDS, PROBLEMS, "balanced", 8, seed=seed).indices for seed in (0, 1))
    assert set(first[REWARDS[first] < 0]) != set(second[REWARDS[second] < 0])
    extra = {tuple(np.flatnonzero(np.bincount(curate(REWARDS, PROBLEMS, "balanced", 8, seed=s).indices) > 1))
             for s in range(20)}  # fmt: skip
    assert extra == {(1,), (3,), (6,)}  # one of the three positives is repeated, and the seed decides which


def test_shares_of_0_and_1_need_one_sign_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(curate([1.0] * 4, [0] * 4, "positive_share", positive_share=1.0).indices) == 4
        assert len(curate([-1.0] * 4, [0] * 4, "positive_share", positive_share=0.0).indices) == 4
        assert len(curate([1.0] * 4, [0] * 4, "repeated_positives").indices) == 4


def test_too_few_positives_keep_the_share_and_give_up_size():
    with pytest.warns(UserWarning, match="too few rows, so 6 are chosen instead of 10"):
        curated = curate(REWARDS, PROBLEMS, "positive_share", 10, 0.5)
    assert (len(curated.indices), curated.chosen_positives, curated.shortfall) == (6, 3, 4)


def test_too_few_negatives_are_not_replaced_by_positives():
    with pytest.warns(UserWarning, match="too few rows"):
        curated = curate([1, 1, -1.0], [0, 0, 1], "anna_karenina", 3)
    assert curated.indices.tolist() == [0, 2]


def test_more_problems_than_rows():
    curated = curate(np.ones(10), np.arange(10), "uniform", 4)
    assert len(curated.indices) == 4
    with pytest.warns(UserWarning, match="no negative row"):
        assert len(curate(np.ones(10), np.arange(10), "anna_karenina", 4).indices) == 4


def test_default_size_of_anna_karenina_is_the_papers_proportion():
    assert pytest.approx(50_000, abs=1e-6) == ROWS_PER_PROBLEM * 7_473
    rewards = np.tile([1.0] + [-1.0] * 63, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curated = curate(rewards, np.repeat(np.arange(100), 64), "anna_karenina")
        few = curate([1.0, -1.0, -1.0], [0, 0, 0], "anna_karenina")
    assert len(curated.indices) == round(100 * 50_000 / 7_473) == 669
    assert (len(few.indices), few.shortfall) == (3, 0)
    assert curated.chosen_positives / 669 == pytest.approx(0.149, abs=1e-3)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 1.0, float("nan")]), st.integers(0, 4)), max_size=40),
    rule=st.sampled_from(CURATIONS), size=st.one_of(st.none(), st.integers(1, 50)), share=st.floats(0, 1),
)  # fmt: skip
def test_laws(data, rule, size, share):
    rewards, problems = (np.array([d[i] for d in data], dtype=float) for i in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curated = curate(rewards, problems, rule, size, share if rule == "positive_share" else 0.5)
    chosen = curated.indices
    counts = np.bincount(chosen, minlength=len(rewards))
    if rule in REPEATING:
        repeated = counts[rewards > 0]
        assert repeated.size == 0 or np.ptp(repeated) <= 1
        counts = counts[~(rewards > 0)]
        assert counts[rewards[~(rewards > 0)] == 0].sum() == 0
    assert counts.max(initial=0) <= 1
    assert not np.isnan(rewards[chosen]).any()
    assert curated.chosen_positives == (rewards[chosen] >= 0).sum()
    assert curated.shortfall >= 0
    if rule == "anna_karenina":
        assert len(set(problems[chosen][rewards[chosen] >= 0])) == curated.chosen_positives
    share = {"positive_share": share, "balanced": 0.5, "repeated_positives": 1.0}.get(rule)
    if share is not None and len(chosen):
        assert abs(curated.chosen_positives - share * len(chosen)) <= 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="curation must be one of"):
        curate([1.0], [0], "best")
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        curate([1.0], [0], positive_share=2)
    with pytest.raises(ValueError, match=r"positive_share=1 .*'balanced'\. Remove it"):
        curate([1.0, -1.0], [0, 0], "balanced", positive_share=1.0)
    with pytest.raises(ValueError, match=r"^The rule 'balanced' .*Remove effective_positive_share"):
        compose([1.0, -1.0], [0, 0], rule="balanced", effective_positive_share=0.8)
    with pytest.raises(ValueError, match=r"^Returns .*Remove effective_positive_share"):
        compose([1.0, -1.0], [0, 0], turns=[0, 1], effective_positive_share=0.8)


def test_compose_signs_by_the_baseline():
    zero_one = (REWARDS + 1) / 2
    rewards, curated = compose(zero_one, PROBLEMS, baseline=0.5, rule="anna_karenina", size=5)
    assert curated.chosen_positives == 2
    assert sorted(set(rewards)) == [-0.5, 0.5]


def test_compose_reaches_the_share_on_the_chosen_rows():
    rewards, curated = compose(REWARDS, PROBLEMS, effective_positive_share=0.2, rule="anna_karenina", size=5)
    assert rewards[rewards > 0].sum() / np.abs(rewards).sum() == pytest.approx(0.2)
    assert curated.chosen_positives == 2


def test_balanced_takes_the_mean_of_the_chosen_rows_as_baseline():
    for raw, size in ((REWARDS, 1.0), ((REWARDS + 1) / 2, 0.5)):
        rewards, curated = compose(raw, PROBLEMS, baseline="mean", rule="balanced")
        assert len(rewards) == len(curated.indices) == 12
        assert rewards.tolist() == [size if right else -size for right in REWARDS[curated.indices] > 0]
        assert rewards.sum() == 0
    # A row without a reward is no third value. With a single value, nothing says which rows are right.
    assert len(compose([1.0, float("nan"), 0.0], [0] * 3, rule="balanced")[0]) == 2
    for raw in (1.0, float("nan")):
        with pytest.warns(UserWarning, match="no positive"):
            assert len(compose([raw] * 4, [0] * 4, rule="balanced")[0]) == 0


@pytest.mark.parametrize(("count", "named"), [(3, "3: 0, 0.5, 1"), (5, "5: 0, 0.25, 0.5, 0.75, …")])
def test_balanced_refuses_graded_rewards(count, named):
    with pytest.raises(ValueError, match=rf"balanced.* two values.* have {named}\. .*repeated_positives"):
        compose(np.linspace(0, 1, count), range(count), rule="balanced")


def test_a_share_that_uses_every_row_is_not_lost_to_rounding():
    # In floating point, 3 / (1 - 0.7) is slightly below 10.
    assert len(curate([1.0] * 7 + [-1.0] * 3, range(10), "positive_share", None, 0.7).indices) == 10


def test_compose_keeps_the_first_baseline_where_the_chosen_are_alike():
    # For all candidates, p~ = 1/2 needs 1 - c = 2 c, so c = 1/3. For a single row, no baseline gives p~ = 1/2.
    rewards, _ = compose([1.0, 0.0, 0.0], [0, 1, 1], effective_positive_share=0.5, rule="uniform", size=1)
    assert rewards[0] == pytest.approx(2 / 3) or rewards[0] == pytest.approx(-1 / 3)


def test_compose_leaves_rows_and_rewards_as_they_are_unless_told():
    rewards, curated = compose(REWARDS, PROBLEMS)
    np.testing.assert_array_equal(rewards, REWARDS)
    assert curated.indices.tolist() == list(range(12))


@pytest.mark.parametrize("seed", [0, 5])
def test_compose_curates_with_what_it_is_given(seed):
    samples = np.tile([3, 2, 1, 0], 3)  # reversed: the last row of a problem was sampled first
    given = {"seed": seed} if seed else {}
    rewards, curated = compose(REWARDS, PROBLEMS, rule="anna_karenina", size=5, sample_ids=samples, **given)
    expected = curate(REWARDS, PROBLEMS, "anna_karenina", 5, sample_ids=samples, seed=seed)
    np.testing.assert_array_equal(curated.indices, expected.indices)
    assert {3, 6} <= set(curated.indices)
    assert len(rewards) == 5


def test_a_mean_is_that_of_all_candidates():
    """The mean includes the rows that were not chosen. A group is a problem."""
    rewards, curated = compose(REWARDS, PROBLEMS, baseline="mean", rule="positives")
    assert rewards.tolist() == pytest.approx([1.5] * 3)  # the mean is (3 - 9) / 12
    rewards, curated = compose(REWARDS, PROBLEMS, baseline="group_mean", rule="positives", size=7)
    assert curated.chosen_positives == 3 + 4  # in the problem without a right answer, all rows have R = 0
    assert sorted(set(rewards.round(9))) == [0, 1, 1.5]


@pytest.mark.parametrize(
    ("baseline", "subtracted"),
    [("mean", [4, 2, 4, 2, 4, 2]), ("group_mean", [3, 1, 3, 1, 6, 4]), (1.0, [1] * 6)],
)
def test_returns_have_a_mean_for_each_turn(baseline, subtracted):
    returns, problems, turns = np.array([2.0, 0, 4, 2, 6, 4]), [0, 0, 0, 0, 1, 1], [0, 1] * 3
    rewards, _ = compose(returns, problems, baseline=baseline, turns=turns)
    assert rewards.tolist() == (returns - subtracted).tolist()


@pytest.mark.parametrize("sample_ids", [["0", "1", "2"], [0, None, 2], [0, 1], [0.0, np.nan, 1.0], [[0], [1], [2]]])
def test_sample_ids_are_numbers_for_all_rows(sample_ids):
    with pytest.raises(ValueError, match=r"^sample_ids"):
        curate([1.0, -1.0, 1.0], [0, 0, 0], "anna_karenina", sample_ids=sample_ids)


@pytest.mark.parametrize("size", [0, -1, 1.5, float("nan"), "2"])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(ValueError, match=r"size must be a whole number of rows, at least 1"):
        curate([1.0, -1.0], [0, 0], "uniform", size)
