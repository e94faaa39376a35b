"""Test that a comparison of two completions becomes two rows, and that the better one is never guessed."""

import pytest

from topr_trl.importing.format import NotOfFormat, Unrewarded
from topr_trl.importing.formats.comparisons import rows
from topr_trl.importing.recognition import format_of

USER, FOUR, FIVE = ({"role": role, "content": text} for role, text in (("user", "Legs?"), ("assistant", "4"),
                                                                        ("assistant", "5")))  # fmt: skip
SYSTEM = {"role": "system", "content": "Count."}


def words(value):
    return value if isinstance(value, str) else " | ".join(turn["content"] for turn in value)


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"input": {"messages": [USER], "tools": []}, "preferred_output": [FOUR], "non_preferred_output": [FIVE]},
         "Legs?"),
        ({"conversations": [{"from": "human", "value": "Legs?"}], "chosen": {"from": "gpt", "value": "4"},
          "rejected": {"from": "gpt", "value": "5"}}, "Legs?"),
        ({"messages": [SYSTEM, USER, FOUR], "rejected_response": "5"}, "Count. | Legs?"),
        ({"messages": [SYSTEM, USER, FOUR], "rejected_messages": [SYSTEM, USER, FIVE]}, "Count. | Legs?"),
        ({"messages": [USER, FOUR], "rejected_messages": [FIVE]}, "Legs?"),
        ({"instruction": "Legs?", "chosen_answer": "4", "rejected_answer": "5", "chosen_score": 9}, "Legs?"),
        ({"conversation_a": [USER, FIVE], "conversation_b": [USER, FOUR], "winner": "model_b"}, "Legs?"),
        *(({"conversation_a": [USER, FIVE, *more], "conversation_b": [USER, FOUR, *more], "winner": "model_b",
            "turn": 1}, "Legs?") for more in ([], [USER, FOUR], [USER, FIVE])),
        ({"prompt": "Legs?", "response_0": "5", "response_1": "4", "better_response_id": 1, "safer_response_id": 0},
         "Legs?"),
        ({"prompt": "Legs?", "response_a": "4", "response_b": "5", "winner": "A", "preferred_id": "x7"}, "Legs?"),
        ({"prompt": '["Legs?"]', "response_a": '["5"]', "response_b": '["4"]', "winner_model_a": "0",
          "winner_model_b": "1", "winner_tie": "0"}, "Legs?"),
        ({"question": "Legs?", "output_1": "5", "output_2": "4", "preference": 2.0}, "Legs?"),
        ({"context": [USER], "response1": "4", "response2": "5", "overall_preference": -1}, "Legs?"),
        ({"prompt": "Legs?", "response_1": "4", "response_2": "5", "preference_strength": -2,
          "preference_statement": "Response 2 is worse", "preference_id": 2}, "Legs?"),
        ({"prompt": "Legs?", "response_1": "4", "response_2": "5", "preference_strength": "-1",
          "individual_preference": [{"score": 1}]}, "Legs?"),
        ({"prompt": "Legs?", "response_a": "5", "response_b": "4", "winner": "[[B]]", "winner_reason": "a"}, "Legs?"),
        ({"prompt": "Legs?", "response_a": "5", "response_b": "4", "winner": "A is wrong. My verdict: [[B>>A]]"},
         "Legs?"),
        ({"prompt": "Legs?", "response_a": "5", "response_b": "4", "verdict": "Assistant B"}, "Legs?"),
        ({"prompt": "Legs?", "response_a": "5", "response_b": "4", "vote": "response_b",
          "preference_strength": -3}, "Legs?"),
    ],
)  # fmt: skip
def test_the_better_one_has_reward_1(record, prompt):
    assert format_of(record) == "comparisons"
    made = [(words(row["prompt"]), words(row["completion"]), row["reward"]) for row in rows(record)]
    assert made == [(prompt, "4", 1.0), (prompt, "5", -1.0)]


@pytest.mark.parametrize(
    "verdict",
    [
        {"winner": "tie (bothbad)"},
        {"winner": "[[C]]"},
        {"verdict": "Both are right: [[A = B]]"},
        {"winner": "[[tie]]"},
        {"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1},
    ],
)
def test_ties(verdict):
    assert rows({"prompt": "Legs?", "response_a": "4", "response_b": "5", **verdict}) == ["tied"]


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ({}, "no field names the better one.*winner"),
        ({"label": 1}, "no field names the better one.*winner"),
        ({"winner": "gpt-4"}, "winner is 'gpt-4', which is not understood.*response_b or tie.*--ignore_fields winner"),
        ({"winner": "Assistant A is better than Assistant B"}, "winner is 'Assistant A is.*--ignore_fields winner"),
        ({"verdict": "not_a"}, "verdict is 'not_a'.*--ignore_fields verdict"),
        ({"winner": "[[A]] or [[B]]"}, "winner is '..A.. or ..B..'.*--ignore_fields winner"),
        ({"winner": "-a"}, "winner is '-a'.*--ignore_fields winner"),
        ({"winner": "Both are good, and A is better"}, "winner is 'Both.*--ignore_fields winner"),
        ({"winner": "a", "human_preference": -1}, "human_preference is '-1'.*--ignore_fields human_preference"),
        ({"label": "tie", "preference": "rather a"}, "preference is 'rather a'.*--ignore_fields preference"),
        ({"preference_strength": 2}, "no field names the better one.*winner"),
        ({"winner": "a", "human_preference": "b"}, "winner, human_preference name different ones.*--ignore_fields"),
    ],
)
def test_an_unknown_verdict_is_refused(verdict, why):
    with pytest.raises(NotOfFormat, match=why):
        rows({"prompt": "Legs?", "response_a": "4", "response_b": "5", **verdict})


def test_the_judged_turn_ends_both_conversations():
    """In MT-Bench, a verdict on the second turn is about the second answers."""
    first, second = ([USER, each, USER, each] for each in (FOUR, FIVE))
    record = {"conversation_a": first, "conversation_b": second, "winner": "model_a"}
    given = (1, 2.0, "1", None)
    lengths = [len(row["completion"]) for turn in given for row in rows({**record, "turn": turn})]
    assert lengths == [1, 1, 3, 3, 1, 1, 3, 3]
    for turn in (0, 3):
        with pytest.raises(NotOfFormat, match=f"turn is '{turn}', .* 2 questions. Count turns from 1.*--ignore_fields"):
            rows({**record, "turn": turn})


def test_only_a_missing_verdict_can_be_skipped():
    record = {"prompt": "Legs?", "response_1": "4", "response_2": "5"}
    for verdict in ({}, {"winner": None}, {"winner": ""}):
        with pytest.raises(Unrewarded, match="no field names the better one"):
            rows({**record, **verdict})
    with pytest.raises(NotOfFormat) as error:
        rows({**record, "preference": 0})
    assert error.type is NotOfFormat


@pytest.mark.parametrize("empty", ["response_a", "response_b", "prompt"])
def test_an_empty_answer_or_question_of_an_arena(empty):
    record = {"prompt": '["Legs?"]', "response_a": '["4"]', "response_b": '["5"]', "winner_model_a": 1}
    assert rows({**record, empty: "[null]"}) == []


@pytest.mark.parametrize("worse", [None, []])
def test_an_empty_worse_completion(worse):
    assert rows({"messages": [USER, FOUR], "rejected_messages": worse}) == []


def test_a_record_without_two_completions_is_refused():
    with pytest.raises(NotOfFormat, match="lacks two completions"):
        rows({"prompt": "Legs?", "response_a": "4", "winner": "a"})


@pytest.mark.parametrize(("strength", "better"), [(-2, "one"), ("3", "two"), (0.0, None), (4, ValueError)])
def test_the_scale_of_helpsteer(strength, better):
    record = {"prompt": "Legs?", "response_1": "one", "response_2": "two", "preference_strength": strength}
    if better is ValueError:
        with pytest.raises(NotOfFormat, match=r"preference_strength is '4'.*--ignore_fields preference_strength"):
            rows(record)
        return
    first = rows(record)[0]
    assert first == "tied" if better is None else words(first["completion"]) == better


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(NotOfFormat, match="response_b is a list of 2 texts, and its prompt must be a list of as many"):
        rows({"prompt": ["Legs?"], "response_a": ["4"], "response_b": ["5", "6"], "winner": "a"})


def test_choices_of_a_question_are_no_comparison():
    letters = {f"answer_{side}": text for side, text in zip("abcd", "2345", strict=True)}
    assert format_of({"question": "Legs?", **letters}) is None
