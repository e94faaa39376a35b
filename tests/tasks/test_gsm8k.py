import pickle
from pathlib import Path

import pytest
from datasets import Dataset

from topr_trl.rewards import answer_reward, score_completions, verdict
from topr_trl.tasks import gsm8k
from topr_trl.tasks.task import TASKS

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="GSM8K's files are not beside this checkout")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("6 * 7 = 42. The answer is 42.", "42"),
        ("the answer is $1,234.50 in total", "1234.5"),
        ("The answer is 18.00", "18"),
        ("The answer is -5.", "-5"),
        ("The answer is 3. No: The answer is 4.", "4"),
        ("The answer is: 7 apples", "7"),
        ("The answer is 50% of it", "50"),
        ("The answer is\n12", None),
        ("The answer is twelve.", None),
        ("It is 42.", None),
        ("The answer is -0", "0"),
        ("The answer is .5", "0.5"),
        ("The answer is " + "9" * 10_000_000, None),
        ("The answer is 1e99999999", "1"),
        ("The answer is 1,234,567.", "1234567"),
        (r"The answer is -\$5.", "-5"),
        ("The answer is -$1,200.50", "-1200.5"),
        ("The answer is €12.00 per day", "12"),
        ("The answer is £3", "3"),
        ("The answer is −7.", "-7"),
        ("The answer is –7.", "-7"),
        ("The answer is 10–12", "10"),
        ("The answer is 1 1/2.", "1.5"),
        ("The answer is -2 1/3 cups", "-7/3"),
        ("The answer is 1 1/0", None),
        ("The answer is 12\u00a0345\u202f678", "12345678"),
        ("The answer is 12\u00a034", "12"),
        ("The answer is **42**.", "42"),
        (r"The answer is \boxed{42}.", "42"),
        ("So the answer is 42. Check: 6 * 7 = 42, which is 2 more than 40.", "42"),
        ("The answer is 12. The answer is unclear.", None),
        ("The answer is 2 * 9 = 18.", "18"),
        ("The answer is 36/2.", "18"),
        ("The answer is 3/4", "0.75"),
        ("The answer is -4/6", "-2/3"),
        ("The answer is 5/0", None),
        ("The answer is 5/\u0660", None),  # a zero, too
        ("The answer is:\n18", "18"),
        ("The answer is\n\n$$18$$", "18"),
        ("The answer is:\n\\[\n18\n\\]", "18"),
        (r"The answer is $-\frac{3}{4}$.", "-0.75"),
        (r"The answer is $2\dfrac12$ hours", "2.5"),
        (r"The answer is $\cfrac{3}{4}$", "0.75"),
        ("The answer is 1½.", "1.5"),
        ("The answer is 2 ⅔ cups", "8/3"),
        ("The answer is 1\u00a0¾", "1.75"),
        ("The answer is $1,100½.", "1100.5"),
        (r"The answer is \frac{ 1 }{ 2 }", "0.5"),
        ("The answer is 1 / 2, or 1⁄2", "0.5"),
        ("The answer is 1⁄2", "0.5"),
        ("The answer is 1'234'567", "1234567"),
        ("The answer is \u20115", "-5"),
        ("The answer is −\u00a07", "-7"),
        (r"The answer is 2 \frac{1}{2}, or - \frac{1}{2}", "2.5"),
        (r"The answer is - \frac{1}{2}", "-0.5"),
        (r"The answer is $1{,}080$.", "1080"),
    ],
)
def test_extract_answer(response, answer):
    assert gsm8k.extract_answer(response) == answer


def test_no_digit_is_lost():
    assert (
        gsm8k.normalize_number("1234567890123456789012345678901234567.50") == "1234567890123456789012345678901234567.5"
    )


def test_verdict_and_reward():
    assert [verdict(a, "4") for a in ("4", "5", None)] == ["correct", "incorrect", "invalid"]
    reward = answer_reward(gsm8k.judge)
    chat = [[{"role": "assistant", "content": "The answer is 4."}]]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    assert reward(["The answer is 4.", "4", "The answer is 5."], answer=["4"] * 3) == [1.0, -1.0, -1.0]
    assert reward([*chat, calls], answer=["4"] * 2, trainer_state=None) == [1.0, -1.0]
    again = pickle.loads(pickle.dumps(reward))  # AsyncGRPOTrainer sends the function to another process.
    assert (again.__name__, again(["4"], answer=["4"])) == ("answer_reward", [-1.0])


def test_exemplars_are_right():
    assert len(gsm8k.EXEMPLARS) == 8
    for example in gsm8k.EXEMPLARS:
        worked, _, stated = example.partition(" The answer is ")
        answer = gsm8k.extract_answer(example)
        assert stated == f"{answer}."
        assert answer in worked.partition("\nAnswer: ")[2], example


def test_prompt():
    prompt = gsm8k.build_prompt("How many?", 8)
    assert prompt.count("Question:") == 9
    assert prompt.endswith("Question: How many?\nAnswer:")
    assert gsm8k.build_prompt("How many?", 0) == "Question: How many?\nAnswer:"
    with pytest.raises(ValueError, match="between 0 and 8"):
        gsm8k.build_prompt("How many?", 9)


def test_malformed_rows():
    with pytest.raises(ValueError, match=r"question, answer; found \['question'\]"):
        gsm8k.prepare(Dataset.from_dict({"question": ["?"]}))
    with pytest.raises(ValueError, match=r"Row 0: .*#### N"):
        gsm8k.prepare(Dataset.from_dict({"question": ["?"], "answer": ["42"]}))
    for rows in ({"question": [None], "answer": ["#### 1"]}, {"question": ["?"], "answer": [None]}):
        with pytest.raises(ValueError, match=r"row 0 .*None"):
            gsm8k.prepare(Dataset.from_dict(rows))
    for number in ("1e999999", "1_000", "nan"):  # The first would have a million digits.
        with pytest.raises(ValueError, match=r"Row 0: .*#### N"):
            gsm8k.prepare(Dataset.from_dict({"question": ["?"], "answer": [f"#### {number}"]}))
    with pytest.raises(FileNotFoundError, match="no file"):
        gsm8k.load("nowhere.jsonl", "train")


def test_a_dataset_with_another_configuration(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "?", "answer": "#### 1"}')
    assert len(gsm8k.load(str(tmp_path), "train")) == 1
    with pytest.raises(ValueError, match="test"):
        gsm8k.load(str(tmp_path), "test")


@needs_data
@pytest.mark.parametrize(("name", "count"), [("gsm8k_train", 7_473), ("gsm8k_test", 1_319)])
def test_real_rows(name, count):
    raw = gsm8k.load(str(SHARED / f"{name}.jsonl"), "train")
    problems = gsm8k.prepare(raw)
    assert len(problems) == count
    gold = [
        f"{text.rpartition('####')[0]} The answer is {text.rpartition('####')[2].strip()}." for text in raw["answer"]
    ]
    reward = answer_reward(gsm8k.judge)
    assert set(reward(gold, answer=problems["answer"][:])) == {1.0}
    shifted = problems["answer"][1:] + problems["answer"][:1]
    agreeing = sum(a == b for a, b in zip(problems["answer"][:], shifted, strict=True))
    assert sum(r > 0 for r in reward(gold, answer=shifted)) == agreeing < 0.03 * count
    assert len(set(problems["prompt"])) == count


def test_candidates_are_scored():
    rows = Dataset.from_dict(
        {"completion": ["The answer is 4.", "The answer is 5.", "I give up."], "answer": ["4", "4", "4"]}
    )
    scored = score_completions(rows, gsm8k.judge)
    assert scored["extracted"][:] == ["4", "5", None]
    assert scored["verdict"][:] == ["correct", "incorrect", "invalid"]
    assert scored["reward"][:] == [1.0, -1.0, -1.0]


def test_of_messages_the_last_is_scored():
    messages = [
        [{"role": "assistant", "content": "The answer is 5."}, {"role": "assistant", "content": "The answer is 4."}]
    ]
    rows = Dataset.from_dict({"completion": messages, "answer": ["4"]})
    assert score_completions(rows, gsm8k.judge)["verdict"][:] == ["correct"]


def test_shards_without_a_valid_answer_have_the_type_of_the_others():
    valid, invalid = (Dataset.from_dict({"completion": [text], "answer": ["4"]}) for text in ("The answer is 4.", "?"))
    scored = [score_completions(rows, gsm8k.judge) for rows in (valid, invalid)]
    assert scored[0].features == scored[1].features


def test_right_answers_come_in_any_form():
    for truth in ("7", "7.0", " 7 ", "#### 7", "3 + 4 = 7\n#### 7"):
        assert gsm8k.judge(["The answer is 7.", "The answer is 8.", "Seven."], [truth] * 3) == [
            ("correct", truth), ("incorrect", "8"), ("invalid", None),
        ]  # fmt: skip
    for truth in ("seven", "$7", "#### seven"):
        with pytest.raises(ValueError, match=r"`answer`.*--reward_funcs"):
            gsm8k.judge(["The answer is 7."], [truth])
    for truth in ("1/2", "0.5", "#### 2/4"):
        assert gsm8k.judge(["The answer is 1/2.", "The answer is 0.5."], [truth] * 2) == [("correct", truth)] * 2


def test_a_number_that_is_too_long_in_normal_form_is_none():
    assert gsm8k.normalize_number("." + "5" * 38) == "0." + "5" * 38
    assert gsm8k.normalize_number("." + "5" * 39) is None


@pytest.mark.parametrize(("count", "expected"), [(None, 400), (0, 0), (3, 3)])
def test_built_in_problems(count, expected):
    assert len(TASKS["gsm8k"].first_rows(None, "test", count)) == expected
