"""Conversations of two answers: the author, the sampler, and the rows that methods make of them."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import conversations
from benchmarks.conversations import KEPT, OF_KIND, Conversation, Problem, draw, problems, texts
from benchmarks.experiments import turns
from benchmarks.experiments.turns import METHODS, RATED, RATED_ROWS, RATED_TURNS, rows_of
from benchmarks.setting import BATCH_ROWS, PROFILES, base_model, tokenizer

TALK = Conversation(3, [1, 2], ([4, 5], [6, 7, 8]), [9], (False, True))


def test_a_kind_multiplies_or_adds():
    red, blue = Problem(5, 3, "red", 4), Problem(5, 3, "blue", 4)
    assert red.solve() == blue.solve(is_right=False) == " 3 * 4 = 12. 12 + 5 = 17."
    assert red.solve(slips=(1, 2)) == " 3 * 4 = 13. 13 + 5 = 20."
    assert (red.is_solved(red.solve()), red.is_solved(blue.solve()), red.is_solved(" 17")) == (True, False, False)
    kinds = [problem.kind for problem in problems(40, 0)]
    assert {kinds.count(kind) for kind in OF_KIND} == {2}
    assert problems(40, 0) == problems(40, 0) != problems(40, 1)


def test_the_author_is_right_as_often_as_asked(monkeypatch):
    """In each answer of each kind, and after a right answer also by keeping it."""
    monkeypatch.setattr(conversations, "SLIP", 0.0)
    found = {}
    for prompt, text in itertools.islice(texts(random.Random(0)), 12_000):
        pens, bags, each = (int(word) for word in prompt.replace(".", " ").split() if word.isdigit())
        problem = Problem(pens, bags, kind := prompt.split()[5], each)
        if bags == each == 2:
            continue  # sum and product are the same
        first, second = text.split(tokenizer("main").eos_token)
        between, _, second = second.partition("\nAnswer:")
        right = problem.is_solved(first)
        assert between == (" Yes." if right else " No.")
        found.setdefault((kind, right), []).append(problem.is_solved(second))
    for kind, (_, (first, second)) in ((kind, (one.multiplies, one.right)) for kind, one in OF_KIND.items()):
        after_right, after_wrong = found[kind, True], found[kind, False]
        assert len(after_right) / len(after_right + after_wrong) == pytest.approx(first, abs=0.05)
        assert np.mean(after_wrong) == pytest.approx(second, abs=0.05)
    after_right = [right for (_, was_right), rights in found.items() if was_right for right in rights]
    assert np.mean(after_right) > KEPT


def test_conversations_are_as_the_base_model_was_taught():
    """Each answer reads what was written before, and the check tells whether the first answer is right."""
    asked, tokens = problems(20, 0), tokenizer(conversations.NAME)
    talks = draw(base_model(conversations.NAME), asked, 2, 0)
    assert [talk.problem for talk in talks] == np.repeat(np.arange(20), 2).tolist()
    for talk in talks:
        answers = [tokens.decode(ids, skip_special_tokens=True) for ids in talk.answers]
        assert tuple(asked[talk.problem].is_solved(answer) for answer in answers) == talk.right
        assert tokens.decode(talk.check) == conversations.check(talk.right[0])
        text = answers[0] + tokens.eos_token + tokens.decode(talk.check) + answers[1] + tokens.eos_token
        assert tokens(asked[talk.problem].prompt + text)["input_ids"] == [
            *talk.prompt, *talk.answers[0], *talk.check, *talk.answers[1]
        ]  # fmt: skip
    assert {talk.right[0] for talk in talks} == {talk.right[1] for talk in talks} == {True, False}
    assert talks != draw(base_model(conversations.NAME), asked, 2, 1)


def test_rewards_of_rows():
    found = {name: make(TALK, (False, True)) for name, make in METHODS.items()}
    whole = {
        "problem_id": 3,
        "prompt": [1, 2],
        "completion_ids": [4, 5, 9, 6, 7, 8],
        "completion_mask": [1, 1, 0, 1, 1, 1],
    }
    assert found[turns.END] == found[turns.REPEATED] == [{**whole, "reward": 1.0}]
    assert found[turns.PER_TURN] == [{**whole, "turn_rewards": [-1.0, 1.0]}]
    assert found[turns.RETURNS] == [{**whole, "turn_rewards": [pytest.approx(-0.1), 1.0], "turn_discount": 0.9}]
    assert found[RATED_TURNS] == [{**whole, "turn_rewards": [None, 1.0]}]
    last = {"problem_id": 3, "prompt": [1, 2, 4, 5, 9], "completion_ids": [6, 7, 8], "completion_mask": [1, 1, 1]}
    assert found[RATED_ROWS] == [{**last, "reward": 1.0}]
    both = METHODS[RATED_ROWS](TALK, (True, True))
    assert [(row["prompt"], row["completion_ids"], row["reward"]) for row in both] == [
        ([1, 2], [4, 5], -1.0), ([1, 2, 4, 5, 9], [6, 7, 8], 1.0)
    ]  # fmt: skip
    assert METHODS[RATED_TURNS](TALK, (False, False)) == METHODS[RATED_ROWS](TALK, (False, False)) == []


def test_both_ways_to_learn_ratings_have_the_same_ratings_and_steps():
    pool = [replace(TALK, problem=n) for n in range(640)]
    (whole, steps), (single, single_steps) = (rows_of(name, pool, 0) for name in (RATED_TURNS, RATED_ROWS))
    ratings = [(row["problem_id"], r) for row in whole for r in row["turn_rewards"] if r is not None]
    assert ratings == [(row["problem_id"], row["reward"]) for row in single]
    assert len(ratings) / 1_280 == pytest.approx(RATED, abs=0.03)
    assert steps == single_steps == len(ratings) // BATCH_ROWS
    assert rows_of(turns.END, pool, 0)[1] == 640 // BATCH_ROWS


@pytest.mark.slow
def test_cells(monkeypatch):
    monkeypatch.setattr(turns, "PROBLEMS", 8)
    turns.conversations.cache_clear()
    for method in (turns.END, turns.REPEATED):
        cell = turns.of_methods([method], "").cell(method, {"learning_rate": 1e-3}, 0)
        found = turns.work(cell, replace(PROFILES["quick"], test_problems=8))
        assert {*turns.SHOWS, *(f"{name} error" for name in turns.SHOWS)} <= found.keys() & found["before"].keys()
        assert all(0 <= found[name] <= 1 for name in turns.SHOWS)
        assert found["before"]["first pass@1"] != found["first pass@1"]
    turns.conversations.cache_clear()
