"""Compare how methods use wrong answers over six iterations on the same problems.

Predictions and results: benchmarks/wrong_answers_over_iterations.md.

The problems that a first draw of the untrained model never solves are the *unsolved* ones. They are scored on fresh
draws. Those of which no draw had a right answer so far are *unseen*: only wrong answers can raise their chance.

A recipe makes rows and their R from the completions of an iteration. Each recipe reads as many rows as there are
completions, except right answers once. One iteration on SmolLM2 (`benchmarks.pretrained`) also compares TRL's
trainers, and ratios of sessions (one reward for several answers).
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from benchmarks import habits, pretrained, sessions
from benchmarks.cells import Cell, Store
from benchmarks.decoding import DRAWS
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.experiments import long_completions
from benchmarks.loops import rounds
from benchmarks.methods import METHODS, Direct, Objective, at_share, balanced, dpo, kto, tapered
from benchmarks.rows import Rows
from benchmarks.setting import (
    BATCH_ROWS,
    TEST_SEED,
    VALIDATION_SEED,
    Profile,
    base_model,
    model_hash,
    problems,
    sample,
    untrained,
)

CANDIDATES, ITERATIONS, COLD = 8, 6, 0.3
AGREE = 0.5  # agreement above which *chosen by agreement* and *weighted where they agree* use wrong answers
UNTRAINED = "untrained"
KTO, DPO, GRPO = "KTO, β 0.1", "DPO, β 0.1", "GRPO (TRL's default loss)"
REPEATED, DEFAULT, BALANCED, CONTROL = "repeated right answers", "TOPR (default)", "balanced rows", "mean per problem"
WEIGHTED, DRAWN, CHOSEN = "weighted by agreement", "drawn by agreement", "chosen by agreement"
WHERE_AGREED, UNTAPERED = "weighted where they agree", "balanced rows, no taper"
BASES = ("facts-agree", "facts-alone", "misconceptions", "facts-scattered")
# All problems follow one rule.
RULED = ("sure-17", "slips-30", "bundled", "main", "misconception-10", "sure-3")
WARM_METHODS = (REPEATED, WEIGHTED)  # methods of which iterations on SmolLM2 are published
ONE_PASS = (BALANCED, REPEATED, DEFAULT, UNTAPERED, KTO, DPO, GRPO)
# Levels of the ratio of sessions, see `benchmarks.sessions`. A session is drawn for each update.
SEGMENTS, GOOD = "segments", "good sessions repeated"
LEVELS = {SEGMENTS: "segment 64", GOOD: sessions.REPEATED}
PARTS, SESSION_ROWS = 8, 32 * BATCH_ROWS  # answers of a session, and in all updates
SOLVED = "end/unsolved/pass@8"
SHOWS = (SOLVED, "end/unsolved/greedy", "end/greedy", "end/pass@1", "end/pass@8")
PRETRAINED_PROBLEMS, WARM = 96, 0.4  # training problems, and temperature at which wrong answers agree more
PRETRAINED_TESTS = {pretrained.SMOL: 384, pretrained.QWEN: 96}  # greedy answers; the first 96 problems are also sampled
SPLIT_DRAW = 99  # number of the draw that splits the problems


def repeated(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return right rows, as many as in the pool."""
    right = np.random.default_rng(seed).permutation(np.flatnonzero(pool.rewards > 0))
    chosen = np.resize(right, len(pool)) if len(right) else right
    return chosen, np.ones(len(chosen))


def right_once(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.flatnonzero(pool.rewards > 0)
    return chosen, np.ones(len(chosen))


def shared(share: float | str, pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, with R for an effective share of positives."""
    return np.arange(len(pool)), at_share(share)(pool)


def half_right(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = balanced(pool, seed)
    return chosen, pool.rewards[chosen]


def weighted(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, with wrong ones weighted by their agreement, and a mean |R| of 1."""
    right = pool.rewards > 0
    share = min(max(right.mean(), 1 / len(pool)), 1 - 1 / len(pool))
    after = np.where(right, 0.5 / share, -pool.agreements / (1 - share))
    return np.arange(len(pool)), after / max(np.abs(after).mean(), 1e-9)


def drawn(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return repeated right rows, and wrong rows drawn by their agreement: half of all rows if wrong answers agree."""
    rng, right = np.random.default_rng(seed), pool.rewards > 0
    chances = np.where(right, 0.0, pool.agreements)
    wrong = round(len(pool) / 2 * chances.sum() / max((~right).sum(), 1))
    bad = rng.choice(len(pool), wrong, p=chances / chances.sum()) if wrong else np.arange(0)
    good = rng.permutation(np.flatnonzero(right))
    good = np.resize(good, len(pool) - wrong) if len(good) else good
    chosen = np.concatenate([good, bad])
    return chosen, pool.rewards[chosen]


def agreement(pool: Rows) -> float:
    """Return the mean agreement of the answers to the problems without a right one, or NaN without such problems."""
    unsolved = pool.group_means == -1
    return float(pool.agreements[unsolved].mean()) if unsolved.any() else float("nan")


def chosen(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the default if wrong answers agree, and repeated right rows otherwise."""
    return shared("mean", pool, seed) if agreement(pool) > AGREE else repeated(pool, seed)


def where_agreed(pool: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, weighted by agreement, if wrong answers agree, and repeated right rows otherwise."""
    return weighted(pool, seed) if agreement(pool) > AGREE else repeated(pool, seed)


RECIPES = {
    "right answers once": right_once,
    REPEATED: repeated,
    DEFAULT: partial(shared, "mean"),
    BALANCED: half_right,
    "TOPR, p~ 20%": partial(shared, 0.2),
    "TOPR, c = 0": partial(shared, "p"),
    WEIGHTED: weighted,
    DRAWN: drawn,
    CHOSEN: chosen,
    WHERE_AGREED: where_agreed,
    CONTROL: partial(shared, "group_mean"),
}


RIVALS = {
    KTO: partial(kto, beta=0.1),
    DPO: partial(dpo, beta=0.1),
    GRPO: METHODS["trl_dapo"].make,
}


def of_base(base: str, temperature: float = WARM) -> Experiment:
    """Return the comparison over iterations on one base model. Only pretrained models read `temperature`.

    Rates are chosen separately for sampled and greedy answers (pretrained model: only for sampled ones). Models whose
    problems follow one rule compare only the methods of the primary prediction.
    """
    if base in pretrained.BASES:
        seeds = 5 if temperature == WARM else 3
        return replace(of_pretrained(base, temperature, seeds, 5, *WARM_METHODS), measures=(SOLVED,))
    names = RECIPES if base in habits.AUTHORS else (REPEATED, DEFAULT, WEIGHTED)
    return Experiment(
        "wrong_answers", {name: {"recipe": name} for name in names}, rates(1e-4, 3e-4, 1e-3), range(5),
        (SOLVED, "end/greedy"), f"Six iterations on the same problems: {base}", further=3,
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS}, shows=SHOWS,
    )  # fmt: skip


def of_pretrained(base: str, temperature: float, seeds: int, iterations: int, *names: str) -> Experiment:
    """Return the comparison on a pretrained model with rows of a temperature."""
    return Experiment(
        "wrong_answers", {name: {"recipe": name} for name in names}, rates(3e-5, 1e-4, 3e-4), range(seeds),
        (SOLVED, "end/greedy"),
        f"{iterations} iterations on the same problems: {base}, rows at temperature {temperature:g}",
        further=3, shows=SHOWS,
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS, "temperature": temperature,
                "iterations": iterations},
    )  # fmt: skip


class OfSessions:
    """Loss of sessions that are drawn from a pool for each update, see `long_completions`."""

    rows_per_item, size = 1, SESSION_ROWS

    def __init__(self, model: PreTrainedModel, pool: Rows, level: str, seed: int, temperature: float) -> None:
        self.model, self.level, self.temperature = model, level, temperature
        setting, rng = long_completions.Setting(PARTS), np.random.default_rng(seed)
        self.draw = long_completions.drawing(pool, np.arange(len(pool)), setting, rng, level)

    def loss(self, indices: np.ndarray) -> torch.Tensor:
        return self.draw(len(indices) // PARTS).loss(self.model, self.level, self.temperature)


def in_one_pass(names: Iterable[str] = ONE_PASS, seeds: int = 8, rows: str = "", **fields: Any) -> Experiment:
    """Return the comparison with rivals on SmolLM2 in one pass, with the best rate for greedy answers."""
    base = pretrained.SMOL
    return Experiment(
        "wrong_answers", {name: {"recipe": name} for name in names}, rates(3e-5, 1e-4, 3e-4), range(seeds),
        ("test/greedy",), f"One pass: {base}{rows}", further=3,
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS, "iterations": 1, **fields},
        shows=("test/greedy", "test/pass@1", "test/pass@8", f"test/pass@1 at {COLD}", "test/invalid greedy"),
    )  # fmt: skip


def of_sessions(temperature: float) -> Experiment:
    """Return the comparison of ratios of sessions on SmolLM2, with answers of a temperature."""
    rows = f", sessions of {PARTS} answers of temperature {temperature:g}"
    return in_one_pass(LEVELS, 3, rows, temperature=temperature)


def before(base: str) -> Experiment:
    """Return the untrained model's scores on the test problems of the other experiments with one pass."""
    return Experiment(
        "wrong_answers", {UNTRAINED: {"recipe": UNTRAINED}}, [], range(1), ("test/greedy",),
        fields={"base": base, "weights": model_hash(base), "draws": DRAWS, "iterations": 1},
        tuned=lambda *_: {"learning_rate": 0.0},
    )  # fmt: skip


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons that a CPU runs."""
    return [*over_iterations(), before(pretrained.SMOL), in_one_pass(), *map(of_sessions, (WARM, 1.0))]


def over_iterations() -> list[Experiment]:
    """Return the comparisons over iterations that a CPU runs."""
    return [*map(of_base, (*BASES, *RULED, pretrained.SMOL)), of_base(pretrained.SMOL, 1.0)]


def on_gpu(base: str) -> list[Experiment]:
    """Return the comparisons over iterations on a pretrained model that a GPU runs, in the order to run them."""
    names = (REPEATED, WEIGHTED, DEFAULT, BALANCED, "TOPR, c = 0")
    if base == pretrained.QWEN:
        found = [of_pretrained(base, WARM, 3, 4, REPEATED, WEIGHTED)]
    else:
        found = [of_pretrained(base, WARM, 5, 5, *names), of_pretrained(base, 1.0, 3, 5, *names)]
    # A GPU samples other rows, so its results are not compared with those of a CPU.
    return [replace(one, fields={**one.fields, "device": "cuda"}) for one in found]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    base, seed, recipe = cell["base"], cell["seed"], cell["recipe"]
    iterations, temperature = cell.get("iterations", ITERATIONS), cell.get("temperature", 1.0)
    size = PRETRAINED_PROBLEMS if base in pretrained.BASES else profile.problems
    torch.manual_seed(seed)  # a new adapter begins with random weights
    model, questions = base_model(base), problems(base, size, 100 + seed)

    def drawn(number: int, own: int, count: int, heat: float) -> Rows:
        if not number:  # the same for all methods
            return untrained(base, size, seed, count, own, heat)
        return Rows.of(sample(model, base, questions, count, own, heat))

    def choose(pool: Rows, own: int) -> Objective:
        if recipe in RIVALS:
            return RIVALS[recipe](model, pool, pool)
        if recipe in LEVELS:
            return OfSessions(model, pool, LEVELS[recipe], own, temperature)
        rows, after = RECIPES[BALANCED if recipe == UNTAPERED else recipe](pool, own)
        loss = tapered("reinforce" if recipe == UNTAPERED else "topr")
        return Direct(model, pool[rows], loss, lambda _: after, temperature)

    unsolved = _right(drawn(0, 100 * seed + SPLIT_DRAW, CANDIDATES, temperature)) == 0
    curve, seen = [], ~unsolved  # problems of which a right answer was drawn
    for number in range(min(2, iterations) if profile.is_quick else iterations):
        greedy, own = _right(drawn(number, seed, 1, 0.0)), 100 * seed + number
        pool = drawn(number, own, CANDIDATES, temperature)
        if recipe != UNTRAINED:
            rounds.one(model, pool, choose, cell["learning_rate"], own)
        right = _right(pool)
        curve.append({
            **_scores(right, greedy, unsolved), "agreement": agreement(pool), "p": float((pool.rewards > 0).mean()),
            "unseen": int((~seen).sum()), "first seen": int((~seen & (right > 0)).sum()),
        })  # fmt: skip
        seen |= right > 0
    draw = 100 * seed + iterations
    result: dict[str, Any] = {"curve": curve}
    if iterations > 1:
        result["end"] = _test(model, base, questions, size, draw, temperature, unsolved)
        result["end"]["unseen"] = "".join(map(str, (~seen).astype(int)))
    if base not in habits.AUTHORS:  # no other item follows from these
        tests = PRETRAINED_TESTS.get(base, profile.test_problems)
        others = problems(base, tests, VALIDATION_SEED if seed == TUNING_SEED else TEST_SEED)
        sampled = size if base in pretrained.BASES else tests
        result["test"] = _test(model, base, others, sampled, draw, temperature)
    return result


def _right(rows: Rows) -> np.ndarray:
    """Return (P,) the number of right completions of each problem."""
    return np.bincount(rows.groups, rows.rewards > 0).astype(int)


def _test(
    model: PreTrainedModel, base: str, questions: Dataset, sampled: int, seed: int, temperature: float,
    unsolved: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return scores of greedy answers and, on the first problems, of samples at two temperatures.

    `outcomes` has the number of right samples of each problem.
    """
    answers, first = sample(model, base, questions, 1, seed, 0.0), questions.select(range(sampled))
    right, cold = (
        _right(Rows.of(sample(model, base, first, CANDIDATES, seed, heat))) for heat in (temperature, COLD)
    )  # fmt: skip
    return {
        **_scores(right, greedy := _right(Rows.of(answers)), unsolved),
        f"pass@1 at {COLD}": float(cold.mean()) / CANDIDATES,
        "invalid greedy": float(np.mean([verdict == "invalid" for verdict in answers["verdict"]])),
        "outcomes": {name: "".join(map(str, found)) for name, found in (("right", right), ("greedy", greedy))},
        **({} if unsolved is None else {"split": "".join(map(str, unsolved.astype(int)))}),
    }


def _scores(right: np.ndarray, greedy: np.ndarray, unsolved: np.ndarray | None = None) -> dict[str, Any]:
    """Return accuracies with standard errors over the problems, also of the unsolved ones."""
    values = {"pass@1": right / CANDIDATES, "pass@8": right > 0, "greedy": greedy}
    found: dict[str, Any] = {"problems": len(greedy)}
    for name, value in values.items():
        found |= {name: float(np.mean(value)), f"{name} error": float(np.std(value, ddof=1) / np.sqrt(len(value)))}
    return found if unsolved is None else {**found, "unsolved": _scores(right[unsolved], greedy[unsolved])}
