"""Authors of base models make errors at the given rates, and base models share a tokenizer."""

import random

import numpy as np
import pytest

from benchmarks import habits
from benchmarks.bases import AUTHORS, Author, one_product, solution
from benchmarks.setting import folder, problems, tokenizer
from topr_trl.tasks import gsm8k


def verdicts_of(author, count=400):
    rng = random.Random(0)
    problems = [one_product(rng) for _ in range(count)]
    texts = [solution(problem, author, rng) for problem in problems]
    return problems, texts, gsm8k.judge(texts, [str(problem.answer) for problem in problems])


def test_an_author_errs_as_often_as_asked():
    _, texts, found = verdicts_of(Author(), 50)
    assert {verdict for verdict, _ in found} == {"correct"}
    assert all(text.count("*") == 1 for text in texts)
    _, texts, found = verdicts_of(Author(add=0.8))
    assert np.mean([verdict == "correct" for verdict, _ in found]) == pytest.approx(0.2, abs=0.06)
    assert np.mean(["*" not in text for text in texts]) == pytest.approx(0.8, abs=0.06)
    _, _, found = verdicts_of(Author(wander=0.6))
    assert np.mean([verdict == "invalid" for verdict, _ in found]) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize("name", AUTHORS)
def test_wrong_answers_are_at_most_three_times_as_long(name):
    _, texts, found = verdicts_of(AUTHORS[name])
    lengths = {kind: [len(t) for t, (v, _) in zip(texts, found, strict=True) if (v == "correct") is kind]
               for kind in (True, False)}  # fmt: skip
    assert np.mean(lengths[False]) < 2 * np.mean(lengths[True])
    assert np.percentile(lengths[False], 99) < 3.5 * np.mean(lengths[True])


def test_problems_of_these_tasks_have_one_product():
    answers = problems("sure-17", 30, 5)
    assert len(answers) == 30
    assert (
        problems("sure-17", 30, 5)["question"][:] == answers["question"][:] != problems("sure-17", 30, 6)["question"][:]
    )
    assert all("bags" in q or "of" in q for q in answers["question"])


def test_base_models_share_a_tokenizer():
    assert tokenizer("sure-17").get_vocab() == tokenizer("main").get_vocab()
    assert folder("sure-17").parent == folder("main").parent


@pytest.mark.parametrize("name", habits.AUTHORS)
def test_an_author_with_habits_is_right_as_often_as_asked(name):
    author, rng = habits.AUTHORS[name], random.Random(0)
    for is_early, share in ((True, author.known), (False, author.right)):
        pairs = [
            (item, habits.answer(author, item, rng, is_early)) for item in rng.choices(habits.items(name), k=4_000)
        ]
        assert np.mean([number == item.right for item, number in pairs]) == pytest.approx(share, abs=0.025)
        believed = np.mean([number == item.believed for item, number in pairs])
        assert believed == pytest.approx(author.believed * (1 - share), abs=0.025)


def test_items_of_habits_do_not_teach_each_other():
    """A fact is in no relation to others. Boxes of a kind have one rule, and no two kinds share it."""
    facts = habits.items("facts-agree")
    assert len({item.right for item in facts}) > 70
    assert all(item.right != item.believed for item in facts)
    assert facts == habits.items("facts-scattered") == habits.items("facts-alone")
    boxes = habits.items("misconceptions")
    added = {tuple(np.subtract((item.right, item.believed), n % habits.BOXES)) for n, item in enumerate(boxes)}
    assert len(added) == len(habits.KINDS)
    assert max(max(item.right, item.believed) for item in boxes) < habits.ANSWERS
    found = problems("misconceptions", 3, 7)
    assert (len(found), found["answer"][0]) == (len(boxes), str(boxes[0].right))
