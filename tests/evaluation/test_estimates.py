import json
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset

from topr_trl.evaluation import estimates as evaluation
from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.estimates import (
    Evaluation,
    RewardEstimate,
    evaluate_in_full,
    evaluate_rows,
    evaluate_samples,
    weighted_sc_estimate,
    weighted_sc_solved,
)


def make(seed=0, problems=60, samples=12):
    rng = np.random.default_rng(seed)
    skill = rng.random(problems)
    answers = [["7" if rng.random() < s else rng.choice(["1", "2", ""]) or None for _ in range(samples)] for s in skill]
    return answers, ["7"] * problems


def test_invalid_never_wins_a_vote():
    result = evaluate_samples([[None, None, "5"]], ["5"], maj_ks=[3])
    assert result.maj_at[3].value == 1.0
    assert list(result.shares.values()) == pytest.approx([1 / 3, 0, 2 / 3])
    assert evaluate_samples([[None, None, None]], ["5"], maj_ks=[3]).maj_at[3].value == 0.0


@pytest.mark.parametrize(("answers", "truths"), [([], []), ([["1"]], ["1", "2"])])
def test_each_problem_has_answers_and_a_truth(answers, truths):
    with pytest.raises(ValueError, match="at least one problem, and one true answer for each"):
        evaluate_samples(answers, truths)


def test_weighted_self_consistency_by_hand():
    # The sum of scores is 0.9 for "1" and 0.5 + 0.5 = 1.0 for "2". The invalid sample does not count. With k = 4, "2"
    # therefore wins the weighted vote, and "1" is the best sample.
    samples = [["1", "2", None, "2"]]
    scores = [[0.9, 0.5, 5.0, 0.5]]

    def value(truth, k):
        run = evaluate_samples(samples, [truth], scores=scores, weighted_sc_ks=[k], best_ks=[k])
        return run.weighted_sc_at[k].value, run.best_at[k].value

    assert value("2", 4) == (1.0, 0.0)
    assert value("1", 4) == (0.0, 1.0)
    assert value("1", 1) == (0.25, 0.25)
    # "1" wins three of the six pairs: {1, 2}, {1, None} and {1, 2'}. The weighted vote is estimated from draws.
    assert value("1", 2) == (pytest.approx(0.5, abs=0.15), pytest.approx(0.5))


def test_ties_go_to_the_first_drawn_and_rounding_makes_none():
    """Sums that differ only by rounding are a tie, such as 0.1 + 0.2 and 0.3."""
    answers, scores = [["1", "1", "2", None], ["2", "1", "1", None]], [[0.1, 0.2, 0.3, 1.0], [0.3, 0.2, 0.1, 1.0]]
    samples, drawn = encode(answers, ["1", "1"], scores), np.tile(np.arange(4), (2, 1))
    assert weighted_sc_solved(samples, drawn).tolist() == [True, False]
    # Sums are compared to nine decimals relative to the largest score, so small scores differ too.
    for answers, scores in ((["1", "2"], [1e-12, 2e-12]), (["2", "1"], [1.0, 1.0 + 4e-10])):
        assert weighted_sc_solved(encode([answers], ["2"], [scores]), np.arange(2)[None]).all()
    # If all scores are zero or negative, a valid answer still wins.
    none = encode([[None, "1"], ["1", "2"]], ["1", "1"], [[0.0, 0.0], [-1.0, -2.0]])
    assert weighted_sc_solved(none, np.tile(np.arange(2), (2, 1))).all()


def test_scores_are_needed():
    with pytest.raises(ValueError, match=r"^Weighted .* need a score for each sample; there are no scores\.$"):
        evaluate_samples([["1", "2"]], ["1"], best_ks=[1])
    with pytest.raises(ValueError, match="need a score for each sample"):
        evaluate_samples([["1", "2"]], ["1"], weighted_sc_ks=[2])
    for names in (["easy"], ["easy"] * 3):
        with pytest.raises(ValueError, match=rf"groups\['level'\] has {len(names)} names.*each of 2 problems"):
            evaluate_samples([["1"], ["2"]], ["1", "2"], groups={"level": names})


def test_groups():
    answers = [["1", "1"], ["1", "2"], ["2", None]]
    run = evaluate_samples(answers, ["1"] * 3, groups={"subject": ["a", "b", "a"]})
    a, b = run.groups["subject"]["a"], run.groups["subject"]["b"]
    assert (a.num_problems, a.pass_at_1.value, a.maj_at) == (2, 0.5, {})
    assert (b.num_problems, b.pass_at_1.value) == (1, 0.5)
    voted = evaluate_samples(answers, ["1"] * 3, maj_ks=[1], groups={"subject": ["a", "b", "a"]}).groups["subject"]
    assert {name: group.maj_at[1].value for name, group in voted.items()} == {"a": 0.5, "b": 0.5}
    assert run.cardinality == [1, 1, 1]
    assert evaluate_samples([["1", "2", "3"]], ["1"]).cardinality == [0, 1, 0, 0]
    # One problem, half right: V = 1/4, SE = sqrt(1 * 1/4 / (2 - 1)).
    assert b.pass_at_1.standard_error == 0.5
    assert str(b.pass_at_1) == "50.0% ± 100.0"
    assert str(evaluate_samples([["1"]], ["1"]).pass_at[1]) == "100.0%"  # a single draw has no error


def test_greedy_accuracy_by_hand():
    """Three of four greedy answers are right: sqrt(0.75 · 0.25 / 4) = 0.2165. No other measure changes."""
    samples = encode([["1", "2"]] * 4, ["1"] * 4)
    plain = evaluate_in_full(samples)
    run = evaluate_in_full(replace(samples, greedy_P=np.array([True, True, False, True]), temperatures=[0.7]))
    assert run.greedy.value == 0.75
    assert run.greedy.standard_error == pytest.approx(0.21650635)
    assert str(run.greedy) == "75.0% ± 43.3"
    assert (plain.greedy, plain.temperatures, run.temperatures) == (None, [], [0.7])
    assert replace(run, greedy=None, temperatures=[]).to_dict() == plain.to_dict()


def test_everything_survives_json():
    answers, truths = make(samples=8)
    samples = encode(answers, truths, np.ones((60, 8)).tolist(), groups={"level": ["1", "2"] * 30})
    run = evaluate_in_full(replace(samples, greedy_P=np.arange(60) < 20, temperatures=[1.0]))
    assert list(run.pass_at) == [1, 2, 4, 8]
    assert list(run.maj_at) == list(run.weighted_sc_at) == list(run.best_at) == [2, 4]
    assert list(run.groups["level"]["1"].maj_at) == [4]
    # With equal scores, the weighted vote equals the majority vote.
    assert run.weighted_sc_at[4].value == pytest.approx(run.maj_at[4].value, abs=0.02)
    plain = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    again = Evaluation.from_dict(plain)
    assert again.to_dict() == run.to_dict()
    assert again.pass_at[1] == run.pass_at[1]
    assert again.groups == run.groups
    assert again.greedy == run.greedy
    assert np.isnan(again.pass_at[8].standard_error)
    reward, best = RewardEstimate(0.5, 0.1), RewardEstimate(0.75, float("nan"))
    rewarded = replace(run, reward=reward, greedy_reward=replace(reward, value=0.25), best_reward_at={4: best})
    again = Evaluation.from_dict(json.loads(json.dumps(rewarded.to_dict(), allow_nan=False)))
    assert (again.reward, again.greedy_reward) == (rewarded.reward, rewarded.greedy_reward)
    assert (str(again.reward), str(again.best_reward_at[4])) == ("0.500 ± 0.200", "0.750")
    old = {name: plain[name] for name in ("pass_at", "maj_at", "shares", "cardinality", "num_problems", "num_samples")}
    assert Evaluation.from_dict(old).groups == {}
    assert (Evaluation.from_dict(old).greedy, Evaluation.from_dict(old).temperatures) == (None, [])


def test_measures_that_do_not_apply_are_left_out():
    run = evaluate_in_full(encode([["1"], ["2"]], ["1", "1"], [[1.0], [0.5]]))
    assert (list(run.pass_at), run.maj_at, run.best_at) == ([1], {}, {})
    run = evaluate_in_full(encode(*make(samples=4)))
    assert (list(run.pass_at), list(run.maj_at), run.weighted_sc_at, run.best_at) == ([1, 2, 4], [2], {}, {})


@pytest.mark.parametrize("seed", [0, 3])
def test_draws_are_those_of_the_seed(seed):
    answers, truths = make(problems=7, samples=8)
    scores = np.random.default_rng(5).random((7, 8)).tolist()
    given, samples = {"seed": seed} if seed else {}, encode(answers, truths, scores)
    expected = weighted_sc_estimate(samples, 2, **given)
    assert expected == weighted_sc_estimate(samples, 2, seed, draws=100)  # The paper uses 100 draws.
    assert expected != weighted_sc_estimate(samples, 2, seed + 1)
    rows = Dataset.from_dict({
        "problem_id": np.repeat(range(7), 8), "extracted": [a for row in answers for a in row],
        "answer": ["7"] * 56, "score": [s for row in scores for s in row],
    })  # fmt: skip
    for run in (
        evaluation.evaluate(samples, weighted_sc_ks=[1, 2], **given),
        evaluate_in_full(samples, **given),
        evaluate_samples(answers, truths, scores=scores, weighted_sc_ks=[2], **given),
        evaluate_rows(rows, weighted_sc_ks=[2], **given),
    ):
        assert run.weighted_sc_at[2] == expected
    # With one sample, the vote is exact and equals pass@1.
    assert evaluation.evaluate(samples, weighted_sc_ks=[1]).weighted_sc_at[1] == run.pass_at[1]


def test_runs_are_compared_at_the_ks_that_all_have():
    first, second = dict.fromkeys([4, 2, 1, 8]), dict.fromkeys([1, 2, 4, 16])
    assert evaluation.shared_ks([first, second]) == [4, 2, 1]
    assert evaluation.shared_ks([second]) == [1, 2, 4, 16]


def test_scores_of_one_problem_do_not_round_those_of_another():
    # In the second problem, the right answer has the higher score.
    answers, truths = [["1", "2"], ["3", "4"]], ["1", "4"]
    samples = encode(answers, truths, scores=[[2e12, 1e12], [0.1, 0.9]])
    assert evaluation.weighted_sc_solved(samples, np.array([[0, 1], [0, 1]])).tolist() == [True, True]
