import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
from datasets import Dataset

from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.settings import ProblemArguments
from topr_trl.sandbox.worker_pool import WorkerPool
from topr_trl.tasks import TASKS, hendrycks_math
from topr_trl.tasks.hendrycks_math import extract_boxed

pytest.importorskip("math_verify", reason="needs the extra math")
from topr_trl.tasks import math_equality as math_equal

MATH_500 = Path(__file__).parents[3] / "shared" / "data" / "math500_test.jsonl"
needs_data = pytest.mark.skipif(not MATH_500.is_file(), reason="MATH-500 is not beside this checkout")
PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_answers.jsonl").open()]


@pytest.fixture(scope="module", autouse=True)
def few_workers():
    """Use two workers instead of one per core."""
    pool = WorkerPool(Path(math_equal.__file__), "judge", workers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hendrycks_math, "pool", lambda: pool)
        yield
    pool.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4}, no: \boxed{5}. I hope it is right", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \fbox{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"$\boxed 12$.", "12"),
        (r"\boxed {7}", "7"),
        (r"\\boxed{7}", "7"),  # escaped once too often
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{5}}}", "5"),
        (r"\boxed{4} then \boxed{5", "4"),
        ("\\boxed{\n5\n}", "5"),
        (r"\boxed{5", None),
        (r"\boxed{}", None),
        (r"\boxed{4} \boxed{ }", None),
        (r"\boxed", None),
        ("It is 5.", None),
        # Boxes without braces, as TeX reads them.
        (r"$\boxed5$", "5"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed \frac{1}{2}.", r"\frac{1}{2}"),
        ("\\" * 1_000_000, None),  # must take linear time
    ],
)
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("-0.50", Fraction(-1, 2)), (r"\frac{-3}{6}", Fraction(-1, 2)), (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("3 1/2", Fraction(7, 2)), (r"2 \times 10^{-3}", Fraction(1, 500)), ("10^2", 100),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("1/0", None), ("x", None), ("", None), (".", None), ("1.2.3", None), (r"2\pi", None),
    ],
)  # fmt: skip
def test_numbers_are_exact(text, number):
    assert math_equal.as_number(text) == number


# Pairs on which the judge and a person disagree, with the reason.
KNOWN_DISAGREEMENTS = {
    ("4=5", "5"): "the right side of an equation is taken for the answer",
    (r"1 \text{ in } 4", r"\frac{1}{4}"): "odds in words are not read",
    (r"2516_{\text{eight}}", "2516_8"): "a base in words is not read",
    (r"x \equiv 3 \pmod{7}", "3"): "congruences are not read, unless they are literally the truth",
}


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        ("3 PM", "3 AM", False),
        (r"3:00 \text{ a.m.}", r"3:00 \text{ p.m.}", False),
        (r"3\text{ PM}", "3:00 p.m.", True),
        (r"5 \text{ yes}", r"5 \text{ no}", False),
        (r"5, \text{Yes}", r"5, \text{No}", False),
        (r"3 \text{ hours}", "3 minutes", False),
        (r"3 \text{ feet}", r"3 \mathrm{~ft}", True),
        (r"3 \text{ cm}^2", r"3 \text{ cm}^3", False),
        (r"3 \text{ square cm}", r"3 \text{ cm}^2", True),
        (r"\$5", "5 cents", False),
        (r"\$5", r"5 \text{ dollars}", True),
        (r"5 \text{ feet per second}", r"5 \text{ feet per minute}", False),
        (r"5 \text{ minutes early}", r"5 \text{ minutes late}", False),
        (r"2 \text{ left}", r"2 \text{ right}", False),
        (r"5 \text{ ways}", r"5 \text{ arrangements}", True),  # names of the same thing
        (r"5 \text{ feet}", r"5 \text{ feet per second}", True),  # A missing word is no contradiction.
        (r"5 \text{ feet}", "5", True),
        (r"60 \text{ miles per hour}", r"60 \text{ mph}", True),
        (r"60 \text{ km per hour}", "60 mph", False),
        # Units in lists and tuples.
        (r"30^\circ \text{ and } 150^\circ", "30, 150", True),
        (r"(2, 30^\circ)", "(2, 30)", True),
        (r"(2, 30^\circ)", r"(2, \frac{\pi}{6})", True),
        (r"(3 \text{ cm}, 4 \text{ cm})", "(3, 4)", True),
        (r"(3 \text{ cm}, 4 \text{ cm})", r"(3 \text{ m}, 4 \text{ m})", False),
        (r"(3, 4) \text{ cm}", "(3, 4)", True),
        (r"5 \text{ heads}, 3 \text{ tails}", "5, 3", True),
        (r"5 \text{ heads}, 3 \text{ tails}", r"3 \text{ heads}, 5 \text{ tails}", False),
    ],
)
def test_words_after_a_number_count_if_they_contradict(given, truth, equal):
    for pair in ([given, truth], [truth, given]):
        assert (math_equal.judge(pair)[0] == "correct") is equal


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        (r"3, 5, \text{ and } 7", "3, 5, 7", True),
        (r"x=1, \text{ or } x=-2", "1,-2", True),
        # Thousands inside a formula.
        (r"\frac{2}{1,005}", r"\frac{2}{1005}", True),
        (r"\frac{20,000}{\pi}", r"\frac{20000}{\pi}", True),
        (r"1,000\pi", r"1000\pi", True),
        ("1/1,024", r"\frac{1}{1024}", True),
        (r"\{1,200\}", "1200", False),
        # Names.
        (r"(r,\theta)=(3,\frac{\pi}{2})", r"(3,\frac{\pi}{2})", True),
        (r"\mathbf{v}=\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"\overrightarrow{AB}=(1,2)", "(1,2)", True),
        (r"S=\{1,2\}", r"\{1,2\}", True),
        (r"S=\{1,2\}", r"\{1,3\}", False),
        (r"D=[0,1)\cup(3,\infty)", r"[0,1)\cup(3,\infty)", True),
        # Products without a sign.
        (r"6\binom{5}{2}", "60", True),
        (r"6\binom{5}{2}", "16", False),
        ("(2)(3)", "6", True),
        ("(2)(3)", "5", False),
        ("2(3)(4)", "24", True),
        (r"12\left(\frac{3}{4}\right)", "9", True),
        ("5(1/2)", "5.5", False),
        ("1/2(3)", "1.5", True),
        (r"\binom{5}{2}\binom{4}{2}", "60", True),
        (r"\sum_{k=0}^5\binom{5}{k}", "32", True),
        (r"\log_2(8)", "3", True),
        (r"2\frac{1}{2}", "2.5", True),
        ("(2516)_8", "2516_8", True),
        ("(2516)_{7}", "2516_8", False),
        (r"\mathbb{R} \setminus \{3\}", r"(-\infty,3)\cup(3,\infty)", True),
        (r"\mathbb{R} \setminus \{4\}", r"(-\infty,3)\cup(3,\infty)", False),
        (r"\text{10 days}", "10", True),
        (r"\text{10 days}", r"10 \text{ hours}", False),
        (r"\text{3 or more}", "3", False),
        (r"\begin{pmatrix} 1 \\[4pt] 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    ],
)
def test_notations(given, truth, equal):
    assert (math_equal.judge([given, truth])[0] == "correct") is equal


@pytest.mark.slow
def test_agreement_with_a_person():
    assert len(PAIRS) >= 300
    assert 0.4 < sum(pair["equal"] for pair in PAIRS) / len(PAIRS) < 0.6
    assert len({pair["subject"] for pair in PAIRS}) == 7
    judged = hendrycks_math.judge(
        [rf"Thus \boxed{{{pair['given']}}}." for pair in PAIRS], [pair["truth"] for pair in PAIRS]
    )
    found = {
        (pair["given"], pair["truth"])
        for pair, (verdict, _) in zip(PAIRS, judged, strict=True)
        if (verdict == "correct") != pair["equal"]
    }
    # Answers with unbalanced braces form no box, so they are wrong, as the person says.
    assert found == set(KNOWN_DISAGREEMENTS)


@pytest.mark.parametrize(
    ("given", "truth", "verdict"),
    [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", "incorrect"),
        (r"\frac{2}{52!}", r"\frac{1}{52!}", "incorrect"),
        (r"e^{-40}", r"e^{-41}", "incorrect"),
        (r"\frac{1}{2^{99}}", r"2^{-99}", "correct"),
        (r"3\text{ or more}", "3", "incorrect"),
        (r"5\text{ factorial}", "5", "incorrect"),
        (r"5 \text{ miles North}", r"5 \text{ miles south}", "incorrect"),
        (r"3 \text{ Million}", "3", "incorrect"),
        (r"30 \text{ Degrees}", "30", "correct"),
        (r"3\text{ m}", "3", "correct"),
        (r"\mathbb{R}", r"(-\infty,\infty)", "correct"),
        (r"\begin{pmatrix}\end{pmatrix}", "(1,2)", "incorrect"),
        ("(a+b+c+d+f+g+h)^{10}", "5", "incorrect"),
        ("CAB", "BAC", "incorrect"),
        ("(CAB)", r"\text{CAB}", "correct"),
        ("cab", "abc", "correct"),
        (r"x > 3 \text{ or } x < -1", r"(-\infty,-1)\cup(3,\infty)", "correct"),
        (r"x > 3 \text{ or } x \le -1", r"(-\infty,-1)\cup(3,\infty)", "incorrect"),
        (r"(1, 2) \cup (3, 4) \text{ cm}", r"(1,2)\cup(3,4)", "correct"),
        (r"(3, \infty) \text{ meters}", "x > 3", "correct"),
    ],
)
def test_tiny_values_words_and_large_expansions(given, truth, verdict):
    assert hendrycks_math.judge([rf"\boxed{{{given}}}"], [truth])[0][0] == verdict


def box(content):
    return rf"\boxed{{{content}}}"


MANY = 10_000
# Texts of models and adversaries, with the verdict for the truth 5. None: invalid or incorrect, depending on speed.
HOSTILE = {
    "It is 5.": "invalid", "": "invalid", box(""): "invalid", box(" "): "invalid", box("?"): "invalid",
    box(r"\frac{"): "invalid", box(r"\text{}"): "invalid", box(r"\cdot"): "invalid", r"\boxed{\frac{1}{2}": "invalid",
    box("9" * 10_000_000): "invalid", "9" * 10_000_000: "invalid", r"\boxed{" * 1_500_000: "invalid",
    box("{" * MANY + "5" + "}" * MANY): "invalid", box("(" * MANY + "5" + ")" * MANY): "invalid",
    box(r"\frac{1}{" * MANY + "5" + "}" * MANY): "invalid", box("(" * 400 + "5" + ")" * 400): "correct",
    box("{" * 400 + "5" + "}" * 400): None, box(r"\sqrt{" * 100 + "5" + "}" * 100): None, box("(" * 900): "invalid",
    box("-" * 600 + "5"): None, box(r"10^{10^{10}}"): None, box("9^{9^{9^9}}"): None, box("2^{99999999999}"): None,
    box("100000!"): None, box("(10^{10})!"): None, box(r"\binom{10^{9}}{10^{8}}"): None,
    box(r"\sum_{k=1}^{10^{12}} \frac{1}{k}"): None, box("(x+y+z+1)^{200}"): None,
    box(r"\begin{pmatrix}" + (" & ".join(["1"] * 200) + r"\\") * 200 + r"\end{pmatrix}"): "invalid",
    box(r"\begin{pmatrix}" + r"1&2&3\\" * 100 + r"\end{pmatrix}"): "incorrect", box("1," * 400 + "1"): "incorrect",
    box(r"1\pm " * 100 + "1"): None, box("9" * 900): "incorrect", box("x=" * 300 + "5"): None,
    box("\x00\ud800"): "invalid", box("__import__('os').system('x')"): "invalid",
}  # fmt: skip


@pytest.mark.weekly
def test_hostile_answers_are_judged_in_bounded_time():
    start = time.monotonic()
    judged = hendrycks_math.judge(list(HOSTILE), ["5"] * len(HOSTILE))
    assert time.monotonic() - start < 6 * len(HOSTILE)
    for (text, expected), (verdict, extracted) in zip(HOSTILE.items(), judged, strict=True):
        assert verdict in ((expected,) if expected else ("incorrect", "invalid")), text[:60]
        assert (extracted is None) == (verdict == "invalid")
        assert len(extracted or "") < 10_000


def test_nothing_is_never_right():
    nothing = ["", "no box", box(""), box("{}"), box("$$"), box("?"), box(r"\frac{"), box("x^2+")]
    truths = ["", "5", "", "{}", "", "0", r"\frac{1}{2}", "x^2"]
    for truth in ("5", r"\text{no}", r"\emptyset", "0"):
        assert {v for v, _ in hendrycks_math.judge(nothing, [truth] * len(nothing))} == {"invalid"}
    assert {v for v, _ in hendrycks_math.judge(nothing, truths)} == {"invalid"}
    # An answer that cannot be parsed is right if its text is that of the truth.
    odd = r"\text{all } n \equiv 3 \pmod 7"
    assert hendrycks_math.judge([box(odd), box(odd + ".")], [odd, odd]) == [("correct", odd)] * 2


def test_equal_answers_count_as_one_vote():
    given = [
        box(x) for x in (r"\frac{2}{4}", "0.5", ".50", r"\sqrt{8}", r"2\sqrt2", "1,2", "2, 1", "(1,2)", "x+1", "1+x",
                              r"30^\circ, 2 \text{ cm}", "30, 2")
    ]  # fmt: skip
    extracted = [answer for _, answer in hendrycks_math.judge(given, ["7"] * len(given))]
    assert extracted == ["1/2"] * 3 + ["2*sqrt(2)"] * 2 + ["1, 2"] * 2 + ["(1, 2)"] + ["x + 1"] * 2 + ["2, 30"] * 2
    assert hendrycks_math.judge(given[:3], [r"\frac12"] * 3) == [("correct", r"\frac12")] * 3


@needs_data
def test_gold_solutions_are_right_and_others_wrong():
    raw = hendrycks_math.load(str(MATH_500), "test")
    problems = hendrycks_math.prepare(raw)
    assert len(problems) == 500
    truths = problems["answer"][:]
    assert {v for v, _ in hendrycks_math.judge(raw["solution"][:], truths)} == {"correct"}
    # The gold solutions pass by literal equality. With other spacing, the answers have to be parsed.
    assert {v for v, _ in hendrycks_math.judge([box(rf"\; {t} \,.") for t in truths], truths)} == {"correct"}
    others = truths[:]
    random.Random(0).shuffle(others)
    judged = hendrycks_math.judge([box(other) for other in others], truths)
    wrong = [(o, t) for o, t, (v, _) in zip(others, truths, judged, strict=True) if v == "correct" and o != t]
    assert wrong == []  # In these pairs, answers with different texts are never equal.
    assert {v for v, _ in judged} == {"correct", "incorrect"}  # Every answer of the set can be parsed.


@needs_data
def test_real_rows():
    problems = hendrycks_math.prepare(hendrycks_math.load(str(MATH_500), "test"))
    assert set(problems.column_names) == {"problem_id", "question", "prompt", "answer", "subject", "level"}
    assert set(problems["level"]) == {1, 2, 3, 4, 5}
    assert len(set(problems["subject"])) == 7
    assert len(set(problems["prompt"])) == 500


def test_exemplars_are_right():
    assert len(hendrycks_math.EXEMPLARS) == 4
    assert [extract_boxed(worked) for _, worked in hendrycks_math.EXEMPLARS] == [
        r"\frac{1}{2}, 3", r"\frac{2}{15}", "2", "4",
    ]  # fmt: skip


def test_prompt():
    prompt = hendrycks_math.build_prompt(" How many? ")
    assert prompt.count("Problem:") == 5
    assert prompt.endswith("Problem: How many?\nSolution:")
    assert hendrycks_math.build_prompt("How many?", 0) == "Problem: How many?\nSolution:"


def rows(count=8):
    return Dataset.from_dict(
        {
            "problem": [f"What is {i} + 1?" for i in range(count)],
            "solution": [rf"It is $\boxed{{{i}}}$, no, $\boxed{{{i + 1}}}$." for i in range(count)],
            "level": ["Level 5", "Level ?", "3", *["Level 1"] * (count - 3)],
            "type": ["Algebra", *["Geometry"] * (count - 1)],
        }
    )


def test_rows_of_other_shapes():
    problems = hendrycks_math.prepare(rows(), 0)
    assert problems["answer"][:3] == ["1", "2", "3"]
    assert problems["level"][:4] == [5, None, 3, 1]
    assert problems["subject"][:2] == ["Algebra", "Geometry"]
    bare = hendrycks_math.prepare(rows().select_columns(["problem", "solution"]), 0)
    assert set(bare.column_names) == {"problem_id", "question", "prompt", "answer"}
    with pytest.raises(ValueError, match="columns problem, solution"):
        hendrycks_math.prepare(rows().remove_columns("problem"))
    with pytest.raises(ValueError, match=r"Row 0: .*'solution'"):
        hendrycks_math.prepare(Dataset.from_dict({"problem": ["?"], "solution": ["5"]}))
    with pytest.raises(ValueError, match=r"Row 1: .*'solution'"):
        hendrycks_math.prepare(Dataset.from_dict({"problem": ["?", "?"], "solution": [r"\boxed{5}", None]}))
    with pytest.raises(ValueError, match=r"`problem` .*row 0 .*None"):
        hendrycks_math.prepare(Dataset.from_dict({"problem": [None], "answer": ["5"]}))
    odd = Dataset.from_dict({"problem": ["?"], "answer": ["5"], "level": ["Level ²"]})
    huge = Dataset.from_dict({"problem": ["?"], "answer": ["5"], "level": ["1" * 20]})
    assert hendrycks_math.prepare(huge, 0)["level"][:] == [None]
    assert hendrycks_math.prepare(odd, 0)["level"][:] == [None]  # ² is a digit, but not a number.
    with pytest.raises(ValueError, match="between 0 and 4"):
        hendrycks_math.prepare(rows(), 5)


def test_exemplars_of_the_training_split(tmp_path):
    drawn = hendrycks_math.draw_exemplars(rows(), 2)
    assert any(question == "What is 0 + 1?" for question, _ in drawn)  # the only problem of its subject
    assert hendrycks_math.draw_exemplars(rows(), 2) == drawn
    with pytest.raises(ValueError, match="num_shots is 9, but only"):
        hendrycks_math.draw_exemplars(rows(), 9)
    path = tmp_path / "train.jsonl"
    rows().to_json(path)
    args = ProblemArguments(
        task="math", dataset_name=str(path), test_dataset_name=str(path), training_shots=True, num_shots=3
    )
    for prompt in load_problems(args, "train")["prompt"]:
        assert prompt.count("Problem:") == 4
        assert prompt.count(prompt.rpartition("Problem:")[2].split("\n")[0]) == 1  # No problem is its own example.
    with pytest.raises(ValueError, match="training_shots"):
        ProblemArguments(training_shots=True)


def test_the_hub(monkeypatch):
    configs = {"algebra": ["train", "test"], "geometry": ["train", "test"]}
    monkeypatch.setattr(hendrycks_math, "get_dataset_config_names", lambda name: list(configs))
    monkeypatch.setattr(hendrycks_math, "get_dataset_split_names", lambda name, config: configs[config])
    loaded = []

    def load_dataset(name, config, split):
        loaded.append((name, config, split))
        return rows(4).remove_columns("type")

    monkeypatch.setattr(hendrycks_math, "load_dataset", load_dataset)
    whole = hendrycks_math.load("some/math", "train")
    assert loaded == [("some/math", "algebra", "train"), ("some/math", "geometry", "train")]
    assert whole["subject"][:] == ["algebra"] * 4 + ["geometry"] * 4
    configs["default"] = ["test"]
    assert len(hendrycks_math.load("some/math", "test")) == 4
    assert loaded[-1] == ("some/math", "default", "test")
    with pytest.raises(ValueError, match="has the splits test, not train"):
        hendrycks_math.load("some/math", "train")


@pytest.mark.slow
def test_the_task_of_the_problems():
    assert ProblemArguments().task_of_problems is TASKS["gsm8k"]
    math = ProblemArguments(task="math", dataset_name="some/math")
    assert math.task_of_problems is TASKS["math"]
    assert (math.num_shots, ProblemArguments().num_shots) == (4, 8)
