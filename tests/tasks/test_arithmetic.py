import random

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
    texts = [solve_carelessly(p, rng, slip=0.25, forget=0.15) for p in problems]
    answers = [gsm8k.extract_answer(t) for t in texts]
    assert 0.12 < sum(a is None for a in answers) / 2_000 < 0.18
    right = sum(a == str(p.answer) for a, p in zip(answers, problems, strict=True)) / 2_000
    assert 0.35 < right < 0.45


def test_the_bundled_model_and_its_tokenizer_agree(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    text = "Ünïcode, 12,345 and <|endoftext|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(text)["input_ids"]) < model.config.vocab_size
