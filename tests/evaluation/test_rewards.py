from itertools import combinations

import numpy as np
import pytest
from datasets import Dataset

from topr_trl import Evaluation, Evaluations, save_rows
from topr_trl.evaluation.answers import samples_of
from topr_trl.evaluation.estimates import evaluate_in_full
from topr_trl.evaluation.report import read_evaluation, write_report
from topr_trl.evaluation.rewards import (
    RewardSamples,
    best_moments,
    compare_rewards,
    evaluate_rewards,
    read_reward_samples,
    reward_samples_of,
)
from topr_trl.hub.model import results_metadata
from topr_trl.pipeline.problems import check_rows

NAN = float("nan")
REWARDS = np.array([[0.5, -1.0, 2.0, 0.0], [1.0, NAN, 0.25, NAN], [NAN, NAN, NAN, NAN]])


def samples(rewards=REWARDS, **more):
    return RewardSamples(np.asarray(rewards, dtype=float), list(range(len(rewards))), **more)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_best_at_k_is_the_mean_over_all_draws(k):
    means, variances = best_moments(samples(), k)
    for rewards, mean, variance in zip(REWARDS, means, variances, strict=True):
        draws = [np.nanmax(draw) for draw in combinations(rewards, k) if not np.isnan(draw).all()]
        if not draws:
            assert np.isnan(mean)
            continue
        assert mean == pytest.approx(np.mean(draws))
        assert variance == pytest.approx(np.var(draws))


def test_the_estimates_of_rewards_of_one_and_zero_are_those_of_answers():
    right = [[1, 0, 0, 1], [0, 0, 0, 1]]
    rows = {"problem_id": [0] * 4 + [1] * 4, "answer": ["7"] * 8,
            "extracted": ["7" if x else "8" for x in np.ravel(right)]}  # fmt: skip
    answers, found = evaluate_in_full(samples_of(Dataset.from_dict(rows))), evaluate_rewards(samples(right), 1.0)
    assert found.pass_at == answers.pass_at
    assert found.cardinality == answers.cardinality
    for k, estimate in {1: found.reward, **found.best_reward_at}.items():
        assert estimate.value == pytest.approx(answers.pass_at[k].value)
        assert estimate.standard_error == pytest.approx(answers.pass_at[k].standard_error, nan_ok=True)


def test_without_a_threshold_there_is_no_pass_at_k():
    found = evaluate_rewards(samples(greedy_P=np.array([1.0, NAN, 0.0])))
    # Means of the problems: 1.5 / 4 and 1.25 / 2.
    assert found.reward.value == pytest.approx((0.375 + 0.625) / 2)
    assert found.greedy_reward.value == 0.5
    assert evaluate_rewards(samples([[1.0, NAN, NAN]]), 0.5).shares["not passed"] == 0  # 1 - 1/3 - 2/3 is below 0
    assert (found.pass_at, found.maj_at, found.shares) == ({}, {}, {"without a reward": 0.5})
    assert Evaluation.from_dict(found.to_dict()).to_dict() == found.to_dict()
    assert str(Evaluation.from_dict(found.to_dict()).reward) == str(found.reward)
    text = str(Evaluations(before=found, after=evaluate_rewards(samples(REWARDS[:1]), 0.5)))
    assert "best reward@2" in text
    assert "at least 0.5" in text
    assert "pass@1" not in text


def test_rows_to_samples():
    rows = {"prompt": ["a", "b", "a", "b", "a"], "reward": [1.0, None, 0.5, 2.0, 0.0]}
    with pytest.raises(ValueError, match="same number of samples"):
        reward_samples_of(Dataset.from_dict(rows))
    rows = {"problem_id": ["x", "y", "x", "y"], "reward": [1.0, None, 0.5, 2.0], "temperature": [1.0, 1.0, 0.0, 0.0]}
    found = reward_samples_of(Dataset.from_dict(rows))
    np.testing.assert_equal(found.rewards_PS, [[1.0], [NAN]])
    np.testing.assert_equal(found.greedy_P, [0.5, 2.0])
    assert (found.problem_ids, found.temperatures) == (["x", "y"], [1.0])
    with pytest.raises(ValueError, match="None of the 2 rows"):
        reward_samples_of(Dataset.from_dict({"prompt": ["a", "b"], "reward": [None, None]}))
    with pytest.raises(ValueError, match="Rows to evaluate need the columns reward, prompt"):
        reward_samples_of(Dataset.from_dict({"reward": [1.0]}))
    with pytest.raises(ValueError, match="no rows to evaluate"):
        reward_samples_of(Dataset.from_dict({"prompt": [], "reward": []}))


def test_labels_are_evaluated_as_rewards(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]})
    np.testing.assert_equal(reward_samples_of(rows).rewards_PS, [[1.0], [-1.0]])
    save_rows(rows, tmp_path)
    np.testing.assert_equal(read_reward_samples(tmp_path).rewards_PS, [[1.0], [-1.0]])
    check_rows(tmp_path, "evaluate", None)
    given = rows.add_column("reward", [0.5, 2.0])
    np.testing.assert_equal(reward_samples_of(given).rewards_PS, [[0.5], [2.0]])


def test_a_problem_has_one_greedy_row():
    rows = {"problem_id": ["x"] * 3, "reward": [1.0, 0.5, 0.0], "temperature": [1.0, 0.0, 0.0]}
    with pytest.raises(ValueError, match="exactly one; 1 of 1 problems"):
        reward_samples_of(Dataset.from_dict(rows))
    with pytest.raises(ValueError, match="`temperature` must hold numbers"):
        reward_samples_of(Dataset.from_dict({**rows, "temperature": ["hot"] * 3}))


def test_two_runs_without_common_rewards_cannot_be_compared():
    first, second = (RewardSamples(np.array([[a], [b]]), [0, 1], np.array([b, a])) for a, b in ((1.0, NAN), (NAN, 1.0)))
    with pytest.raises(ValueError, match="No problem has rewards in both runs"):
        compare_rewards(first, second)
    third = RewardSamples(np.array([[2.0], [NAN]]), [0, 1], np.array([2.0, NAN]))
    assert set(compare_rewards(first, third)) == {"reward"}  # no problem has greedy rewards in both


def test_two_runs_are_paired_by_problem(tmp_path):
    first = samples([[0.0, 1.0], [2.0, 3.0]])
    second = RewardSamples(np.array([[2.5, 3.5], [1.0, 2.0]]), [1, 0])
    found = compare_rewards(first, second, pass_threshold=1.5)
    assert found["reward"].difference == pytest.approx(0.75)  # gains of 1.0 and 0.5
    assert found["best reward@2"].difference == pytest.approx(0.75)
    assert found["pass@1"].difference == pytest.approx(0.25)  # gains of 1/2 and 0
    assert str(found["reward"]).startswith("+0.750 [")
    report = write_report(tmp_path, {}, 0, {"one": first, "other": second}, 1.5)
    assert "+0.750" in report
    assert "+25.0" in report
    assert (tmp_path / "comparison.json").is_file()
    with pytest.raises(ValueError, match="same problems"):
        compare_rewards(first, samples([[0.0, 1.0]]))


@pytest.mark.slow
def test_with_a_threshold_answers_are_not_used(tmp_path):
    rows = {"problem_id": [0] * 3, "answer": ["7"] * 3, "extracted": ["7"] * 3, "temperature": [1.0, 1.0, 0.0],
            "level": ["1"] * 3}  # fmt: skip
    runs = {"run": samples_of(Dataset.from_dict(rows))}
    rewards = {"run": samples([[0.2, 0.9]], greedy_P=np.array([0.1]))}
    write_report(tmp_path, runs, 0, rewards, 0.5)
    found = read_evaluation(tmp_path / "evaluation.json")
    assert (found.pass_at[1].value, found.greedy, found.groups) == (0.5, None, {})
    assert found.greedy_reward.value == 0.1
    write_report(tmp_path, runs, 0, rewards)
    assert read_evaluation(tmp_path / "evaluation.json").greedy.value == 1


def test_the_card_of_a_model_has_its_reward():
    found = results_metadata(evaluate_rewards(samples(), 0.5), "org/prompts")
    values = {result.metric_type: result.metric_value for result in found}
    assert values["reward"] == 0.5
    assert values["pass@1"] == 25.0  # 2, 1 and 0 of 4 samples pass
