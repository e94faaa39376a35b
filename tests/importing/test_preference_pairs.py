"""Test that a preference pair becomes two rows, with the common prompt split off."""

import pytest

from topr_trl.importing.format import NotOfFormat
from topr_trl.importing.formats.pairs import rows

ASKED, RIGHT, WRONG = ({"role": role, "content": text} for role, text in (("user", "3 + 4?"), ("assistant", "7"),
                                                                             ("assistant", "8")))  # fmt: skip
SYSTEM = {"role": "system", "content": "Add."}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def words(value):
    return value if isinstance(value, str) else [(turn["role"], turn["content"]) for turn in value]


def plain(record):
    return [(words(row["prompt"]), words(row["completion"]), row["reward"]) for row in rows(record)]


USER, ANSWERS = ("user", "3 + 4?"), [([("assistant", "7")], 1.0), ([("assistant", "8")], -1.0)]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, [USER]),
        ({"prompt": "3 + 4?", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, [USER]),
        ({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}, [USER]),
        ({"prompt": "3 + 4?", "chosen": [RIGHT], "rejected": [WRONG]}, [USER]),
        ({"question": "3 + 4?", "chosen": "7", "rejected": "8"}, [USER]),
        ({"system": "Add.", "question": "3 + 4?", "chosen": "7", "rejected": "8"}, [("system", "Add."), USER]),
        ({"system_prompt": "Add.", "prompt": "3 + 4?", "chosen": "7", "rejected": "8"}, [("system", "Add."), USER]),
        ({"system_prompt": "Add.", "chosen": [SYSTEM, ASKED, RIGHT], "rejected": [SYSTEM, ASKED, WRONG]},
         [("system", "Add."), USER]),
        ({"prompt": [SYSTEM, ASKED], "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
         [("system", "Add."), USER]),
        ({"instruction": "3 +", "input": "4?", "chosen": "7", "rejected": "8"}, [("user", "3 +\n4?")]),
        ({"instruction": "3 + 4?", "input": "", "chosen": "7", "rejected": "8"}, [USER]),
        ({"chosen": [*EARLIER, ASKED, RIGHT], "rejected": [*EARLIER, ASKED, WRONG]},
         [("user", "Hi"), ("assistant", "Hello"), USER]),
    ],
)  # fmt: skip
def test_messages(record, prompt):
    assert plain(record) == [(prompt, *answer) for answer in ANSWERS]


def test_text():
    assert plain({"prompt": "3 + 4 =", "chosen": " 17", "rejected": " 18"}) == [
        ("3 + 4 =", " 17", 1.0),
        ("3 + 4 =", " 18", -1.0),
    ]
    assert plain({"prompt": "3 + 4 =", "chosen": "3 + 4 = 7", "rejected": "3 + 4 = 8"})[1] == ("3 + 4 =", " 8", -1.0)
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 8 + 9?\n\nAssistant:"
    assert plain({"chosen": f"{start} 17", "rejected": f"{start} 18"}) == [(start, " 17", 1.0), (start, " 18", -1.0)]


def test_runs_that_part_at_an_earlier_turn_of_the_assistant():
    """If the first answers differ, the second answers follow different turns, so each completion has both answers."""
    more = {"role": "user", "content": "Sure?"}
    record = {"chosen": [ASKED, RIGHT, more, RIGHT], "rejected": [ASKED, WRONG, more, WRONG]}
    chosen, rejected = rows(record)
    assert words(chosen["prompt"]) == words(rejected["prompt"]) == [USER]
    assert words(rejected["completion"]) == [("assistant", "8"), ("user", "Sure?"), ("assistant", "8")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"chosen": [ASKED, RIGHT], "rejected": [ASKED]},
    ],
)
def test_pairs_that_teach_nothing_are_no_rows(record):
    assert rows(record) == []


def test_equal_answers_are_tied():
    assert rows({"prompt": "a", "chosen": "b", "rejected": "b"}) == ["tied"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"chosen": "3 + 4 = 17", "rejected": "3 + 4 = 18"}, "no prompt.*field prompt"),
        ({"chosen": "7", "rejected": [WRONG], "prompt": "a"}, "one of chosen and rejected is text"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "there is no prompt"),
        ({"chosen": [ASKED, RIGHT], "rejected": [EARLIER[0], WRONG]}, "do not start with the same messages"),
        (
            {"prompt": "9?", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
            "prompt differs from the prompt in the messages",
        ),
        (
            {"question": [{"role": "narrator", "content": "a"}], "chosen": "7", "rejected": "8"},
            "the role 'narrator'; known roles are",
        ),
        ({"chosen": 3, "rejected": {"a": 1}}, "rejected is .* must be text or messages"),
        (
            {name: f"\n\nAssistant: {name}\n\nHuman: Why?\n\nAssistant: So" for name in ("chosen", "rejected")},
            "tool or user messages.* list of messages",
        ),
        ({"question": "a", "chosen": "7", "rejected": "8<|im_start|>user"}, "tool or user messages"),
    ],
)
def test_pairs_whose_prompt_is_unknown(record, why):
    with pytest.raises(NotOfFormat, match=why):
        rows(record)
