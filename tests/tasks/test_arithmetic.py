import random
from collections import Counter

import pytest

from scripts.make_careless_model import solve_carelessly
from topr_trl.tasks import arithmetic, gsm8k


def test_problems_have_gsm8k_shape_and_right_answers():
    rows = arithmetic.arithmetic_dataset(200, seed=1)
    problems = gsm8k.prepare(rows, num_shots=0)
    rng = random.Random(1)
    for row, answer in zip(rows, problems["answer"], strict=True):
        problem = arithmetic.make_problem(rng)
        assert row["question"] == problem.question
        assert int(answer) == problem.answer >= 0
        assert gsm8k.extract_answer(arithmetic.solve(problem)) == answer


def test_seeds():
    first = arithmetic.arithmetic_dataset(300, seed=1)["question"][:]
    assert first == arithmetic.arithmetic_dataset(300, seed=1)["question"][:]
    assert len(set(first) & set(arithmetic.arithmetic_dataset(300, seed=2)["question"][:])) < 5
    longer = arithmetic.arithmetic_dataset(1, seed=1, num_steps=5)["question"][0]
    assert longer.count(".") == 6


def test_the_author_is_as_careless_as_told():
    rng = random.Random(0)
    problems = [arithmetic.make_problem(rng) for _ in range(2_000)]
    texts = [solve_carelessly(p, rng, add=0.0, slip=0.25, forget=0.15) for p in problems]
    answers = [gsm8k.extract_answer(t) for t in texts]
    assert 0.12 < sum(a is None for a in answers) / 2_000 < 0.18
    right = sum(a == str(p.answer) for a, p in zip(answers, problems, strict=True)) / 2_000
    # On average 3.2 results per problem: 0.75 ** 3.2 * 0.85 = 0.34.
    assert 0.29 < right < 0.39


def test_the_author_adds_only_where_the_problem_says_each():
    rng = random.Random(0)
    for _ in range(300):
        problem = arithmetic.make_problem(rng)
        solution = solve_carelessly(problem, rng, add=1.0, slip=0.0, forget=0.0)
        sentences = [step.sentence for step in problem.steps]
        assert solution.count("*") == sentences.count(arithmetic.OF)
        if arithmetic.EACH not in sentences:
            assert gsm8k.extract_answer(solution) == str(problem.answer)
    counts = Counter(step.sentence for _ in range(2_000) for step in arithmetic.make_problem(rng).steps)
    assert counts[arithmetic.EACH] / 4_000 == pytest.approx(0.4, abs=0.03)


def test_other_sentences():
    with pytest.raises(ValueError, match="sentences must include a sentence that adds"):
        arithmetic.arithmetic_dataset(1, sentences=[arithmetic.GIVES])
    rows = arithmetic.arithmetic_dataset(100, seed=3, num_steps=3, sentences=[arithmetic.OF, arithmetic.GIVES])
    assert not any("each" in question or "finds" in question for question in rows["question"])


def test_the_bundled_model_and_its_tokenizer_agree(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    text = "Ünïcode, 12,345 and <|endoftext|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(text)["input_ids"]) < model.config.vocab_size
