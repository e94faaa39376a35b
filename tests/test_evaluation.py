from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from datasets import Dataset

from topr_trl.evaluation import evaluate_candidates, evaluate_samples
from topr_trl.expectations import pass_at_k
from topr_trl.report import comparison_table, plot_comparison


@pytest.mark.parametrize(("samples", "correct", "k"), [(6, 2, 1), (6, 2, 3), (6, 0, 2), (6, 6, 1), (5, 1, 5)])
def test_pass_at_k_is_the_share_of_draws(samples, correct, k):
    draws = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(np.mean([any(draw) for draw in draws]))


def majority(answers):
    """The most frequent valid answer, the first seen of equals."""
    counts = Counter(answer for answer in answers if answer is not None)
    return counts.most_common(1)[0][0] if counts else None


def make(seed=0, problems=60, samples=12):
    rng = np.random.default_rng(seed)
    skill = rng.random(problems)
    answers = [["7" if rng.random() < s else rng.choice(["1", "2", ""]) or None for _ in range(samples)] for s in skill]
    return answers, ["7"] * problems


def test_estimates_agree_with_slow_ones():
    answers, truths = make()
    result = evaluate_samples(answers, truths, pass_ks=[1, 4], maj_ks=[1, 5, 12], seed=1)
    assert result.pass_at[1].value == pytest.approx(np.mean([[a == "7" for a in row] for row in answers]))
    assert result.maj_at[12].value == pytest.approx(np.mean([majority(row) == "7" for row in answers]), abs=0.05)
    assert np.isnan(result.maj_at[12].standard_error)
    assert result.to_dict()["maj_at"][12]["standard_error"] is None
    rng = np.random.default_rng(2)
    slow = np.mean(
        [[majority(rng.permutation(np.array(row, object))[:5]) == "7" for row in answers] for _ in range(300)]
    )
    assert result.maj_at[5].value == pytest.approx(slow, abs=0.01)
    assert result.maj_at[1].value == pytest.approx(result.pass_at[1].value, abs=0.02)
    assert sum(result.shares.values()) == pytest.approx(1)
    assert sum(result.cardinality) == 60
    assert len(result.cardinality) == 13


def test_standard_error_is_the_papers():
    # K = 1 of S: V is the variance of a mean of single draws without replacement; sqrt(V / (S - 1)) then.
    answers, truths = make(problems=40, samples=8)
    correct = np.array([[a == "7" for a in row] for row in answers])
    rng = np.random.default_rng(0)
    means = [np.mean([row[rng.integers(8)] for row in correct]) for _ in range(4_000)]
    error = evaluate_samples(answers, truths, seed=3).pass_at[1].standard_error
    assert error == pytest.approx(np.sqrt(np.var(means) / 7), rel=0.25)
    # K = 1 of S = 2 for 400 problems that are right half the time: V is 1/4 of 1/400, and S - K is 1.
    pairs = evaluate_samples([["7", "1"]] * 400, ["7"] * 400, seed=3).pass_at[1].standard_error
    assert pairs == pytest.approx(np.sqrt(0.25 / 400), rel=0.2)


def test_invalid_never_wins_a_vote():
    result = evaluate_samples([[None, None, "5"]], ["5"], maj_ks=[3])
    assert result.maj_at[3].value == 1.0
    assert evaluate_samples([[None, None, None]], ["5"], maj_ks=[3]).maj_at[3].value == 0.0


@pytest.mark.parametrize(
    ("answers", "truths", "ks", "message"),
    [
        ([], [], [1], "at least one"),
        ([["1"]], ["1", "2"], [1], "as many problems as truths"),
        ([["1"], ["1", "2"]], ["1", "2"], [1], r"1 of 2 problems have fewer"),
        ([["1"]], ["1"], [2], "k must be between 1"),
    ],
)
def test_bad_input(answers, truths, ks, message):
    with pytest.raises(ValueError, match=message):
        evaluate_samples(answers, truths, pass_ks=ks)


def test_report(tmp_path):
    answers, truths = make()
    runs = {name: evaluate_samples(answers, truths, maj_ks=[12]) for name in ("before", "after")}
    table = comparison_table(runs)
    assert "pass@1" in table
    assert "±" in table
    assert "nan" not in table
    assert len({len(line) for line in table.splitlines()[:-1]}) == 1
    plot_comparison(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_candidates_are_grouped_by_their_problem():
    """Whatever the order of the rows: problem 3 has one right answer of two, problem 8 two."""
    rows = Dataset.from_dict(
        {"problem_id": [3, 8, 3, 8], "extracted": ["1", "2", None, "2"], "answer": ["1", "2", "1", "2"]}
    )
    evaluation = evaluate_candidates(rows)
    assert evaluation.pass_at[1].value == 0.75
    assert evaluation.cardinality == [0, 1, 1]
    assert (evaluation.num_problems, evaluation.num_samples) == (2, 2)
    with pytest.raises(ValueError, match="same number of samples"):
        evaluate_candidates(rows.select([0, 1, 2]))
