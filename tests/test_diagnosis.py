"""Problems are counted by kind, and agreement is the share of a problem's other answers that are the same."""

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from topr_trl.data.preparation import ScoredRows
from topr_trl.diagnosis import KINDS, agreements, answer_keys, diagnose

# One problem of each kind, in the order of `KINDS`: rewards and answers.
PROBLEMS = [
    ([1, 1, 1], "aaa"),
    ([1, 1, 0, 0], "aabc"),
    ([1, 0, 0], "abb"),
    ([0, 0, 0, 0], "aaab"),
    ([1], "a"),
]


def columns(problems):
    ids = [n for n, (rewards, _) in enumerate(problems) for _ in rewards]
    return [float(r) for rewards, _ in problems for r in rewards], ids, [a for _, answers in problems for a in answers]


def test_agreement_is_the_share_of_the_other_completions():
    with np.errstate(all="raise"):
        found = agreements(np.array([0, 0, 0, 1, 1, 2]), ["x", "x", "y", "x", "x", "x"])
    assert found[:5].tolist() == [0.5, 0.5, 0.0, 1.0, 1.0]
    assert np.isnan(found[5])


def test_a_problem_of_each_kind():
    found = diagnose(*columns(PROBLEMS))
    assert list(found.counts.values()) == [1] * 5
    assert found.agreement == pytest.approx((3 * 2 / 3 + 0) / 4)


def test_the_table_has_the_kinds_that_occur():
    assert str(diagnose(*columns([PROBLEMS[0], PROBLEMS[3]]))).splitlines() == [
        "2 problems:",
        "always right               50.0%  nothing to learn",
        "no right answer            50.0%  several iterations with curation='repeated_positives', or more samples",
        "Problems without a right answer: wrong answers agree in 50%.",
    ]
    assert "agree" not in str(diagnose(*columns(PROBLEMS[:3])))


def test_the_advice_is_for_problems_without_a_right_answer():
    advice = diagnose(*columns([PROBLEMS[1], PROBLEMS[3]])).advice
    assert advice.startswith("1 of 2 problems")
    assert "agree in 50%" in advice
    assert advice.endswith(f"{KINDS['no right answer']}.")
    assert not diagnose(*columns([PROBLEMS[2], PROBLEMS[4]])).advice


def test_completions_without_an_answer_do_not_agree():
    for nothing in (None, float("nan")):
        assert diagnose([1, 0, 0], ["a", "b", "b"], ["7", nothing, nothing]).agreement == 0
    messages = pd.Series([[{"content": text}] for text in ("7", "8", "8")], index=[5, 6, 7])
    assert diagnose([1, 0, 0], ["a", "b", "b"], messages).agreement == 1


def test_the_answer_is_the_first_value():
    assert answer_keys(["", "1", None], [None, "x", "y"]) == ["", "1", "y"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from("abc")), min_size=2, max_size=40))
def test_the_order_of_rows_does_not_matter(rows):
    if len({right for _, right, _ in rows}) < 2:
        return
    ids, rights, answers = zip(*rows, strict=True)
    found = diagnose(np.array(rights, dtype=float), ids, answers)
    back = diagnose(np.array(rights[::-1], dtype=float), ids[::-1], answers[::-1])
    assert found.counts == back.counts
    assert found.agreement == pytest.approx(back.agreement, nan_ok=True)
    assert sum(found.counts.values()) == len(set(ids))
    assert set(found.counts) == set(KINDS)


def test_rows_without_a_reward_are_left_out():
    found = diagnose([1.0, None, 0.0, 0.0, 0.0], [0, 0, 0, 1, 1], "abbcc")
    assert found == diagnose([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], "abcc")
    assert found.agreement == 1


def test_rewards_can_be_booleans():
    assert diagnose([True, False, False, False], [0, 0, 1, 1], "abcc") == diagnose([1, 0, 0, 0], [0, 0, 1, 1], "abcc")


@pytest.mark.parametrize(
    ("rewards", "answers", "message"),
    [
        ([1.0, 1.0], "ab", "two values"),
        ([1.0, 0.5, 0.0], "abc", "two values.*3"),
        ([1.0, 0.0], "a", "answers.* 2 rewards, not 1"),
        ([1.0, 0.0, 0.0, 0.0], "abcd", "^problem_ids .* 4 rows"),
    ],
)
def test_rows_without_a_diagnosis(rewards, answers, message):
    with pytest.raises(ValueError, match=message):
        diagnose(rewards, [0] * min(len(rewards), 3), answers)


MESSAGES = [[{"role": "assistant", "content": text}] for text in "xyxxrw"]


@pytest.mark.parametrize(
    ("columns", "agreement"),
    [
        ({"completion": list("xyxxrw")}, 1 / 2),
        ({"completion": MESSAGES}, 1 / 2),
        ({"completion_ids": [[n] for n in (1, 2, 1, 1, 3, 4)], "prompt_ids": [[1]] * 4 + [[2]] * 2}, 1 / 2),
        ({"completion": list("xyxxrw"), "extracted": ["1", "1", "1", "1", "2", "3"]}, 1),
        # Without an extracted answer, null or empty, the text is compared.
        ({"completion": list("xyxxrw"), "extracted": ["1", "", "1", "", "2", "3"]}, 1 / 6),
        ({"completion": list("xyxxrw"), "extracted": [None] * 6}, 1 / 2),
        ({"completion": [text * 99 for text in "xyxxrw"]}, 1 / 2),
        ({"completion_ids": [[], [2], [], [], [3], [4]], "prompt_ids": [[1]] * 4 + [[2]] * 2}, 1 / 2),
    ],
)
def test_the_answer_of_a_row(columns, agreement, monkeypatch):
    monkeypatch.setattr("topr_trl.data.preparation._DIAGNOSED_AT_ONCE", 4)
    rows = Dataset.from_dict({"prompt": [*"aaaabb"], "reward": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0], **columns})
    assert ScoredRows.read("train", rows).diagnose().agreement == pytest.approx(agreement)


def test_compared_texts_are_named():
    """Completions that give the same answer can have different texts."""
    rows = Dataset.from_dict({"prompt": [*"aaab"], "reward": [0.0, 0.0, 0.0, 1.0], "completion": [*"xyzw"]})
    found = ScoredRows.read("train", rows).diagnose()
    assert found.advice
    assert "agree" not in found.advice
    assert "texts agree in 0%" in str(found)
    assert "Whole texts were compared" in str(found)
    known = ScoredRows.read("train", rows.add_column("extracted", [*"xyzw"])).diagnose()
    assert "answers agree in 0%" in known.advice
    assert "texts" not in str(known)


def test_the_answer_of_a_rollout_is_in_its_last_row():
    rows = Dataset.from_dict({
        "prompt": [*"aaaa"], "problem_id": [0] * 4, "rollout_id": [0, 0, 1, 2], "completion": [*"xyyz"],
        "reward": [0.0, 0.0, 0.0, 1.0],
    })  # fmt: skip
    assert ScoredRows.read("train", rows).diagnose().counts["some right answers"] == 1


def test_most_completions_right_with_different_texts():
    found = diagnose([1, 1, 1, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4, [*"abcdefgh"])
    assert found.counts["most common answer right"] == found.counts["some right answers"] == 1


def test_graded_rewards_have_no_diagnosis():
    rows = Dataset.from_dict({"prompt": [*"aab"], "completion": [*"xyz"], "reward": [0.0, 0.5, 1.0]})
    assert ScoredRows.read("train", rows).diagnose() is None
