"""Conversations of two answers to one problem, with a check between them, and the author of their base model.

A problem has a number of pens, and bags of a kind. A bag of ten kinds multiplies (6 bags of 7 are 42 pens), and a bag
of the other ten adds (13 pens). The author often does the other one. After the first answer, the check says `Yes` or
`No`, and the author answers again. A first answer that is right is kept with the probability `KEPT`. Otherwise, the
author solves the problem anew. For each kind, the author has one probability of doing the right thing in the first
answer, and another one in the second. So each answer can be right or wrong without the other.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from benchmarks.decoding import draw_ids
from benchmarks.habits import KINDS
from benchmarks.setting import tokenizer
from topr_trl.tasks import gsm8k

NAME, STEPS = "two-turns", 1_200  # base model, and steps of its training
RIGHT_OF_KIND, SLIP, KEPT = (0.05, 0.1, 0.2, 0.35), 0.05, 0.6  # SLIP: probability that a result is slightly wrong
LONGEST = 32  # tokens of an answer; a right one has at most 25
_RESULT = re.compile(r"= (\d+)\.$")


@dataclass(frozen=True)
class Kind:
    """Whether bags of a kind multiply, and the author's probabilities of doing that right in the two answers."""

    multiplies: bool
    right: tuple[float, float]


def _kinds() -> dict[str, Kind]:
    rng = random.Random(0)
    levels = [rng.sample(RIGHT_OF_KIND * 5, len(KINDS)) for _ in range(2)]
    return {kind: Kind(n % 2 == 0, (levels[0][n], levels[1][n])) for n, kind in enumerate(KINDS)}


OF_KIND = _kinds()


@dataclass(frozen=True)
class Problem:
    """Number of pens, and bags of a kind with the number of pens in a bag."""

    pens: int
    bags: int
    kind: str
    each: int

    @property
    def prompt(self) -> str:
        question = f"{self.pens} pens and {self.bags} {self.kind} bags of {self.each}."
        return gsm8k.build_prompt(question, num_shots=0)

    def solve(self, is_right: bool = True, slips: Sequence[int] = (0, 0)) -> str:
        """Return a solution with the right operation or the other one. `slips` are added to the two results."""
        multiplies = OF_KIND[self.kind].multiplies == is_right
        bags = max(0, (self.bags * self.each if multiplies else self.bags + self.each) + slips[0])
        total = max(0, bags + self.pens + slips[1])
        return f" {self.bags} {'*' if multiplies else '+'} {self.each} = {bags}. {bags} + {self.pens} = {total}."

    def is_solved(self, text: str) -> bool:
        """Return whether the last result of a text is right."""
        found, right = _RESULT.search(text), _RESULT.search(self.solve())
        return found is not None and right is not None and found[1] == right[1]


def problems(count: int, seed: int) -> list[Problem]:
    """Return problems with equally many of each kind."""
    rng = random.Random(seed)
    return [_problem(rng, KINDS[n % len(KINDS)]) for n in range(count)]


def _problem(rng: random.Random, kind: str) -> Problem:
    return Problem(rng.randint(2, 30), rng.randint(2, 9), kind, rng.randint(2, 9))


def check(is_right: bool) -> str:
    """Return the context between the two answers."""
    return f" {'Yes' if is_right else 'No'}.\nAnswer:"


def texts(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield prompts and conversations of the author without end, for the training of the base model."""
    while True:
        problem = _problem(rng, rng.choice(KINDS))
        first = _answer(problem, 0, rng)
        is_right = problem.is_solved(first)
        second = first if is_right and rng.random() < KEPT else _answer(problem, 1, rng)
        yield problem.prompt, first + tokenizer(NAME).eos_token + check(is_right) + second


def _answer(problem: Problem, turn: int, rng: random.Random) -> str:
    slips = [rng.choice((-10, -2, -1, 1, 2, 10)) * (rng.random() < SLIP) for _ in range(2)]
    return problem.solve(rng.random() < OF_KIND[problem.kind].right[turn], slips)


@dataclass(frozen=True)
class Conversation:
    """Token ids of the prompt, the two answers and the check between them, and whether the answers are right."""

    problem: int
    prompt: list[int]
    answers: tuple[list[int], list[int]]
    check: list[int]
    right: tuple[bool, bool]


def draw(
    model: PreTrainedModel, asked: list[Problem], count: int, seed: int, temperature: float = 1.0
) -> list[Conversation]:
    """Return `count` conversations about each problem."""
    tokens = tokenizer(NAME)
    talks = [problem for problem in asked for _ in range(count)]
    prompts = [tokens(problem.prompt)["input_ids"] for problem in talks]

    def answers(before: list[list[int]], seed: int) -> tuple[list[list[int]], list[bool]]:
        """Return token ids of an answer after each text, and whether it is right."""
        drawn = [ids for ((ids, *_),) in draw_ids(model, tokens, before, 1, LONGEST, seed, temperature)]
        texts = tokens.batch_decode(drawn, skip_special_tokens=True)
        return drawn, [problem.is_solved(text) for problem, text in zip(talks, texts, strict=True)]

    first, first_right = answers(prompts, seed)
    checks = [tokens(check(is_right))["input_ids"] for is_right in first_right]
    before = [prompt + ids + between for prompt, ids, between in zip(prompts, first, checks, strict=True)]
    final, final_right = answers(before, seed + 100_000)  # The same seed would repeat the random numbers.
    return [
        Conversation(n // count, prompts[n], (first[n], final[n]), checks[n], (first_right[n], final_right[n]))
        for n in range(len(talks))
    ]
