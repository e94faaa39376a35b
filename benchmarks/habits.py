"""Problems whose solutions do not teach each other, and the authors of their base models.

Each item has a right answer, which the author rarely gives, and wrong ones:

- `facts-agree`: the right answer is any number, and the author believes in one wrong number.
- `facts-alone`: the same, but the author is never right more often, so nothing tells what right answers have in common.
- `facts-scattered`: the author has no belief, and gives any wrong number.
- `misconceptions`: there are 20 kinds of boxes. A kind adds its own number to that of the box, and the author adds
  another one. So a solved box teaches boxes of its kind, but no others. Right answers are nearly never given.

In the first half of training, the author is right in `KNOWN` of the answers, so that the model can know what is right
(not for `facts-alone`).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from datasets import Dataset

from topr_trl.tasks import gsm8k

KNOWN = 0.3
KINDS = ("red", "blue", "green", "old", "new", "small", "large", "round", "flat", "tall",
         "wide", "thin", "warm", "cold", "dry", "wet", "soft", "hard", "light", "dark")  # fmt: skip
ANSWERS, FACTS, BOXES = 100, 200, 20  # possible answers (chance is 1%), facts, boxes of each kind


@dataclass(frozen=True)
class Author:
    """Probabilities of the author's answers in the second half of training.

    Attributes:
        right: probability of the right answer.
        believed: probability of the item's believed wrong answer. All other answers are any wrong number.
        known: probability of the right answer in the first half.
        has_kinds: whether answers follow a rule for each kind of box.
        steps: number of training steps.
    """

    right: float
    believed: float
    known: float = KNOWN
    has_kinds: bool = False
    steps: int = 3_000


AUTHORS = {
    "facts-agree": Author(right=0.01, believed=0.92),
    "facts-alone": Author(right=0.03, believed=0.92, known=0.03, steps=6_000),
    "facts-scattered": Author(right=0.01, believed=0.0),
    "misconceptions": Author(right=0.003, believed=0.95, has_kinds=True, steps=6_000),
}


@dataclass(frozen=True)
class Item:
    """Question with the right answer and the believed one."""

    question: str
    right: int
    believed: int


@lru_cache
def items(name: str) -> tuple[Item, ...]:
    """Return all items of a task. They are the same for all seeds."""
    rng = random.Random(0)
    if not AUTHORS[name].has_kinds:
        pairs = [rng.sample(range(ANSWERS), 2) for _ in range(FACTS)]
        return tuple(Item(f"How many pens has box {n}?", *pair) for n, pair in enumerate(pairs))
    added = {kind: rng.sample(range(1, ANSWERS - BOXES), 2) for kind in KINDS}
    return tuple(
        Item(f"How many pens has the {kind} box {n}?", *(n + more for more in added[kind]))
        for kind in KINDS
        for n in range(BOXES)
    )


def problems(name: str) -> Dataset:
    """Return all items as problems in GSM8K's format."""
    return Dataset.from_list([{"question": item.question, "answer": f"#### {item.right}"} for item in items(name)])


def answer(author: Author, item: Item, rng: random.Random, is_early: bool) -> int:
    """Return an answer of the author, in the first or the second half of training."""
    chance, right = rng.random(), author.known if is_early else author.right
    if chance < right:
        return item.right
    if chance < right + author.believed * (1 - right):
        return item.believed
    return rng.choice([number for number in range(ANSWERS) if number != item.right])


def texts(name: str, batch_size: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield the prompts and answers of the author's training, in batches of `batch_size`."""
    author = AUTHORS[name]
    for n in range(author.steps * batch_size):
        item = rng.choice(items(name))
        number = answer(author, item, rng, is_early=n < author.steps * batch_size / 2)
        yield gsm8k.build_prompt(item.question, num_shots=0), f" The answer is {number}."
