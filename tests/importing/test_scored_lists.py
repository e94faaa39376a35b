"""Test that each completion of a list with scores becomes a row with its own score."""

import json

import pytest
import reading

ANSWERS = [
    {"response": text, "custom_system_prompt": system, "overall_score": score, "fine-grained_score": score / 2}
    for text, system, score in (("4", "Count.", 9), ("5", "Guess.", 2))
]


def imported(tmp_path, record, *given):
    (tmp_path / "lists.jsonl").write_text(json.dumps(record))
    rows = reading.imported(tmp_path, tmp_path / "lists.jsonl", *given)
    return [([turn["content"] for turn in row["prompt"]], row["completion"][0]["content"], row["reward"])
            for row in rows]  # fmt: skip


def test_each_completion_has_its_own_score_and_system_prompt(tmp_path):
    rows = imported(tmp_path, {"instruction": "Legs?", "completions": ANSWERS}, "--reward_fields", "overall_score")
    assert rows == [(["Count.", "Legs?"], "4", 9.0), (["Guess.", "Legs?"], "5", 2.0)]


def test_texts(tmp_path):
    answers = [{"text": "4", "score": 1}, {"text": "5", "score": 0}]
    assert imported(tmp_path, {"prompt": "Legs?", "responses": answers}) == [
        (["Legs?"], "4", 1.0),
        (["Legs?"], "5", 0.0),
    ]


def test_several_scores_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"overall_score, fine-grained_score may all be the reward.*--reward_fields"):
        imported(tmp_path, {"instruction": "Legs?", "completions": ANSWERS})


def test_other_text_can_only_be_left_out(tmp_path):
    record = {"instruction": "Legs?", "completions": ANSWERS, "wrong_answers": ["Five or six legs"]}
    given = (tmp_path, record, "--reward_fields", "overall_score")
    with pytest.raises(ValueError, match=r"wrong_answers .*may be the completion. To leave .*--ignore_fields wrong_a"):
        imported(*given)
    assert len(imported(*given, "--ignore_fields", "wrong_answers")) == 2
