"""The built-in task: generated word problems in GSM8K's format, and their solutions.

With it the whole loop of the paper (sample, score, curate, train, evaluate) runs on a laptop without a download. The
bundled model learned from a careless author, so it can solve the problems but makes mistakes, as a base model does:
it gets a step wrong now and then, and sometimes forgets the line that states the answer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset

# The bundled model and its tokenizer, made by scripts/make_careless_model.py.
CARELESS_MODEL = Path(__file__).parent / "careless_model"

# A smaller model that checks solutions just as carelessly; made by the same script with --verifier.
CARELESS_VERIFIER = Path(__file__).parent / "careless_verifier"

# Settings for the bundled model: it is small, so it learns with large steps.
CARELESS_SETTINGS = {
    "max_new_tokens": 96, "num_shots": 0, "num_train_problems": 400, "num_test_problems": 400,
    "learning_rate": 1e-4, "optim": "adamw_torch", "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
    "curation": "uniform", "iteration_size": 6_000, "logging_steps": 50, "dtype": "float32",
    "use_cpu": not torch.accelerator.is_available(),
}  # fmt: skip

_NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Joy", "Kai", "Lea")
_THINGS = ("apples", "pens", "cards", "shells", "stamps", "coins", "beads", "books", "nuts", "pins")
_BOXES = ("bags", "boxes", "packs", "jars", "trays")

# Each step takes the running total to the next one: (text of the story, symbol). `{x}` and `{y}` are the step's
# numbers; a step with two numbers adds their product.
_STEPS = (
    ("{name} gets {x} {boxes} of {y} {things}.", "+*"),
    ("{name} finds {x} more.", "+"),
    ("{name} gives away {x}.", "-"),
)


@dataclass(frozen=True)
class Problem:
    """A word problem: its text, and the start value and steps `(symbol, x, y)` that lead to the answer."""

    question: str
    start: int
    steps: tuple[tuple[str, int, int], ...]
    answer: int


def make_problem(rng: random.Random, num_steps: int = 2) -> Problem:
    """A random problem of `num_steps` steps; the running total never falls below zero."""
    name, things, boxes = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    total = start = rng.randint(2, 30)
    sentences, steps = [f"{name} has {start} {things}."], []
    for _ in range(num_steps):
        text, symbol = rng.choice(_STEPS if total > 2 else _STEPS[:2])
        x, y = rng.randint(2, 9), 1
        if symbol == "+*":
            y = rng.randint(2, 9)
        elif symbol == "+":
            x = rng.randint(2, 30)
        else:
            x = rng.randint(1, min(30, total - 1))
        total += -x if symbol == "-" else x * y
        sentences.append(text.format(name=name, things=things, boxes=boxes, x=x, y=y))
        steps.append((symbol, x, y))
    question = " ".join([*sentences, f"How many {things} does {name} have now?"])
    return Problem(question, start, tuple(steps), total)


def solve(problem: Problem, result: Callable[[int], int] = int, times: Callable[[], str] = lambda: "*") -> str:
    """A worked solution that ends with `The answer is N.`

    `result` gives what the author finds instead of each right value; later steps go on with it. `times` gives what the
    author does where two numbers are to be multiplied: "*" or "+".
    """
    total, lines = problem.start, []
    for symbol, x, y in problem.steps:
        if symbol == "+*":
            sign = times()
            product = result(x * y if sign == "*" else x + y)
            lines.append(f"{x} {sign} {y} = {product}.")
            x = product
        sign = "-" if symbol == "-" else "+"
        after = result(total - x if sign == "-" else total + x)
        lines.append(f"{total} {sign} {x} = {after}.")
        total = after
    return " ".join([*lines, f"The answer is {total}."])


def arithmetic_dataset(num_problems: int, seed: int = 0, num_steps: int = 2) -> Dataset:
    """Problems in GSM8K's shape: columns `question` and `answer` (worked solution, then `#### N`).

    The same seed always gives the same problems; two seeds share practically none.
    """
    rng = random.Random(seed)
    problems = [make_problem(rng, num_steps) for _ in range(num_problems)]
    answers = [f"{solve(p).rpartition(' The answer is')[0]}\n#### {p.answer}" for p in problems]
    return Dataset.from_dict({"question": [p.question for p in problems], "answer": answers})
