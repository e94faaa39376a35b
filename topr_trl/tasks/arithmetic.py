"""Generate word problems in GSM8K's format, and their solutions: the built-in task.

With this task, the whole loop of the paper (sample, score, curate, train, evaluate) runs on a laptop without a
download. The bundled model was trained on solutions of a simulated author with a misconception. For "3 boxes with 4
pens each", the author adds 3 and 4 most of the time. Therefore, the model's most likely answer to most problems is
wrong. The author also makes random mistakes, and sometimes does not state the answer.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset

# Folder of the bundled model and its tokenizer, made by scripts/make_careless_model.py.
CARELESS_MODEL = Path(__file__).parent / "careless_model"

# Folder of the bundled verifier, which checks solutions and is often wrong. The same script makes it with --verifier.
CARELESS_VERIFIER = Path(__file__).parent / "careless_verifier"

# Defaults for the bundled model. The model is small, so it needs a high learning rate.
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


class Sentence(NamedTuple):
    """Template of a sentence in a problem, and its effect on the running total.

    Attributes:
        text (`str`): Text with the placeholders `{name}`, `{things}`, `{boxes}`, `{x}` and `{y}`.
        symbol (`str`): `"+"` adds x, `"-"` subtracts x, `"+*"` adds x times y.
    """

    text: str
    symbol: str


OF = Sentence("{name} gets {x} {boxes} of {y} {things}.", "+*")
EACH = Sentence("{name} gets {x} {boxes} with {y} {things} each.", "+*")
FINDS = Sentence("{name} finds {x} more.", "+")
GIVES = Sentence("{name} gives away {x}.", "-")

# The sentence of a step is drawn from this tuple, so `EACH` is twice as likely as `OF` or `FINDS`.
SENTENCES = (EACH, EACH, OF, FINDS, GIVES)


class Step(NamedTuple):
    """Step of a problem: its sentence and its numbers. `y` is 1 if the sentence has no `{y}`."""

    sentence: Sentence
    x: int
    y: int


@dataclass(frozen=True)
class Problem:
    """Word problem: its text, the start value, the steps and the answer."""

    question: str
    start: int
    steps: tuple[Step, ...]
    answer: int


def make_problem(rng: random.Random, num_steps: int = 2, sentences: Sequence[Sentence] = SENTENCES) -> Problem:
    """Draw a problem of `num_steps` steps. The running total stays above zero.

    Args:
        rng (`random.Random`): Source of randomness.
        num_steps (`int`, *optional*, defaults to `2`): Number of steps.
        sentences (`Sequence[Sentence]`, *optional*, defaults to `SENTENCES`): Sentences to draw from. A sentence that
            is listed twice is drawn twice as often.

    Raises:
        ValueError: `sentences` has no sentence that adds, so the total could reach zero.
    """
    if all(sentence.symbol == "-" for sentence in sentences):
        raise ValueError("sentences must include a sentence that adds, such as FINDS.")
    name, things, boxes = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    total = start = rng.randint(2, 30)
    written, steps = [f"{name} has {start} {things}."], []
    for _ in range(num_steps):
        possible = sentences if total > 2 else [one for one in sentences if one.symbol != "-"]
        sentence = rng.choice(possible)
        x, y = rng.randint(2, 9), 1
        if sentence.symbol == "+*":
            y = rng.randint(2, 9)
        elif sentence.symbol == "+":
            x = rng.randint(2, 30)
        else:
            x = rng.randint(1, min(30, total - 1))
        total += -x if sentence.symbol == "-" else x * y
        written.append(sentence.text.format(name=name, things=things, boxes=boxes, x=x, y=y))
        steps.append(Step(sentence, x, y))
    question = " ".join([*written, f"How many {things} does {name} have now?"])
    return Problem(question, start, tuple(steps), total)


def solve(
    problem: Problem, result: Callable[[int], int] = int, times: Callable[[Sentence], str] = lambda sentence: "*"
) -> str:
    """Return a worked solution that ends with "The answer is N.". By default, the solution is correct.

    Args:
        problem ([`Problem`]): Problem to solve.
        result (`Callable[[int], int]`, *optional*): Function that maps the correct value of a calculation to the value
            that the author writes. Later calculations use the written value.
        times (`Callable[[Sentence], str]`, *optional*): Function that returns the operation, `"*"` or `"+"`, that the
            author uses for a sentence with a product.
    """
    total, lines = problem.start, []
    for sentence, x, y in problem.steps:
        if sentence.symbol == "+*":
            sign = times(sentence)
            product = result(x * y if sign == "*" else x + y)
            lines.append(f"{x} {sign} {y} = {product}.")
            x = product
        sign = "-" if sentence.symbol == "-" else "+"
        after = result(total - x if sign == "-" else total + x)
        lines.append(f"{total} {sign} {x} = {after}.")
        total = after
    return " ".join([*lines, f"The answer is {total}."])


def arithmetic_dataset(
    num_problems: int, seed: int = 0, num_steps: int = 2, sentences: Sequence[Sentence] = SENTENCES
) -> Dataset:
    """Return problems in GSM8K's format: columns `question` and `answer` (worked solution, then `#### N`).

    The same seed always gives the same problems. Different seeds share almost no problems.

    Args:
        num_problems (`int`): Number of rows.
        seed (`int`, *optional*, defaults to `0`): Seed of the problems.
        num_steps (`int`, *optional*, defaults to `2`): Number of steps of each problem.
        sentences (`Sequence[Sentence]`, *optional*, defaults to `SENTENCES`): Sentences to draw from, as in
            [`make_problem`].
    """
    rng = random.Random(seed)
    problems = [make_problem(rng, num_steps, sentences) for _ in range(num_problems)]
    answers = [f"{solve(p).rpartition(' The answer is')[0]}\n#### {p.answer}" for p in problems]
    return Dataset.from_dict({"question": [p.question for p in problems], "answer": answers})
