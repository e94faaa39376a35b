"""Make base models with different kinds and rates of errors, for the same kind of problem.

    python -m benchmarks.bases            # makes the missing models (minutes for each)

A problem has two steps, and exactly one of them is a multiplication. The models are trained from scratch on solutions
of a careless author. There are three kinds of errors:

- slips: some results are slightly wrong, and the answer is sometimes missing;
- misconception: the author often adds instead of multiplying;
- wanders: the author often repeats sentences of the problem and never states an answer.

`sure` models only have the misconception, and are trained until their arithmetic is correct. Therefore, all of their
wrong answers are of one kind, and the models are confident of them. The models of `benchmarks/habits.py` have answers
that do not follow from the problem. The model of `benchmarks/conversations.py` answers twice.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import set_seed

from benchmarks import conversations, habits
from benchmarks.setting import ONE_WORDING, folder, tokenizer
from scripts.make_careless_model import slipped, train_from_scratch
from topr_trl.tasks import gsm8k
from topr_trl.tasks.arithmetic import Problem, Sentence, make_problem, solve

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 96, 2, 4  # 0.3 million parameters, like `main`
BATCH_SIZE = 64


@dataclass(frozen=True)
class Author:
    """Probabilities of the author's errors.

    Attributes:
        slip: probability that a result is slightly wrong.
        forget: probability that the answer is missing.
        add: probability of adding instead of multiplying.
        wander: probability of sentences of the problem instead of an answer.
        steps: number of training steps, with `BATCH_SIZE` solutions each.
    """

    slip: float = 0.0
    forget: float = 0.0
    add: float = 0.0
    wander: float = 0.0
    steps: int = 2_000


# Names have the kind of errors and the approximate percentage of correct answers of the model. The author's percentage
# is higher, because the model learns products from few solutions.
AUTHORS = {
    "slips-60": Author(slip=0.10, forget=0.10),
    "slips-30": Author(slip=0.28, forget=0.10),
    "slips-10": Author(slip=0.62, forget=0.10),
    "slips-3": Author(slip=0.79, forget=0.55),
    "misconception-30": Author(slip=0.22, forget=0.10, add=0.15),
    "misconception-10": Author(slip=0.22, forget=0.10, add=0.55, steps=1_000),
    "misconception-3": Author(slip=0.22, forget=0.10, add=0.85),
    "sure-60": Author(add=0.40, steps=3_000),
    "sure-17": Author(add=0.83, steps=3_000),
    "sure-3": Author(add=0.97, steps=3_000),
    "wanders-30": Author(slip=0.08, wander=0.60),
    "wanders-10": Author(slip=0.08, wander=0.60, add=0.25, steps=1_000),
    "wanders-3": Author(slip=0.08, wander=0.60, add=0.88),
}
NAMES = (*AUTHORS, *habits.AUTHORS, conversations.NAME)


def one_product(rng: random.Random) -> Problem:
    """Return a problem of two steps with exactly one multiplication."""
    while True:
        problem = make_problem(rng, 2, ONE_WORDING)
        if sum(step.sentence.symbol == "+*" for step in problem.steps) == 1:
            return problem


def solution(problem: Problem, author: Author, rng: random.Random) -> str:
    """Return a solution by an author. Wrong solutions are at most about three times as long as correct ones."""

    def result(value: int) -> int:
        return slipped(value, rng) if rng.random() < author.slip else value

    def times(sentence: Sentence) -> str:
        return "+" if rng.random() < author.add else "*"

    *lines, answer = (f"{line}." for line in solve(problem, result, times).removesuffix(".").split(". "))
    if rng.random() < author.wander:
        story = [f"{sentence}." for sentence in problem.question.split(". ")[:-1]]
        return " ".join(lines[: rng.randint(0, len(lines))] + [rng.choice(story) for _ in range(rng.randint(2, 6))])
    return " ".join(lines + [answer] * (rng.random() >= author.forget))


def make(name: str, seed: int = 0) -> None:
    """Train a base model with the tokenizer of `main`, and save its weights in bfloat16."""
    set_seed(seed)
    rng = random.Random(f"{name}-{seed}")
    if name == conversations.NAME:
        steps, rows = conversations.STEPS, conversations.texts(rng)
    elif name in habits.AUTHORS:
        steps, rows = habits.AUTHORS[name].steps, habits.texts(name, BATCH_SIZE, rng)
    else:
        steps, rows = AUTHORS[name].steps, _solutions(AUTHORS[name], rng)
    model = train_from_scratch(
        lambda: next(rows), tokenizer("main"), HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, steps, BATCH_SIZE
    )
    model.bfloat16().save_pretrained(folder(name))


def _solutions(author: Author, rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        problem = one_product(rng)
        yield gsm8k.build_prompt(problem.question, num_shots=0), f" {solution(problem, author, rng)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bases", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="base", help="default: all missing models")
    for name in parser.parse_args().names or NAMES:
        if not (folder(name) / "model.safetensors").exists():
            print(name)
            make(name)


if __name__ == "__main__":
    main()
