"""Compare a reward for each of two answers with one reward at the end, and ratings of some answers with single rows.

Expectations and outcomes: benchmarks/rewards_per_turn.md. All methods of a comparison read the same conversations, and
take as many steps. The other columns of a row are token ids.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from benchmarks.cells import Cell, Store
from benchmarks.conversations import NAME, OF_KIND, Conversation, draw, problems
from benchmarks.decoding import DRAWS
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.methods import SMALL
from benchmarks.setting import BATCH_ROWS, TEST_SEED, VALIDATION_SEED, Profile, base_model, model_hash, tokenizer
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer

PROBLEMS, CANDIDATES, SAMPLES, DISCOUNT, RATED = 400, 8, 4, 0.9, 0.3
END, PER_TURN, RETURNS, REPEATED = "one reward at the end", "a reward per turn", "returns", "right ones repeated"
REPEATED_TURNS, OWN_MEANS = "right turns repeated", "a reward per turn, own means"
RATED_TURNS, RATED_ROWS = "ratings as a reward per turn", "ratings as rows of their own"
FINAL, FIRST = "final greedy", "first greedy"
SHOWS = (FINAL, "final pass@1", FIRST, "first pass@1")

Row = dict[str, Any]


def row(one: Conversation, **rewards: Any) -> Row:
    """Return a row with both answers."""
    first, second = one.answers
    return {
        "problem_id": one.problem, "prompt": one.prompt, "completion_ids": [*first, *one.check, *second],
        "completion_mask": [1] * len(first) + [0] * len(one.check) + [1] * len(second), **rewards,
    }  # fmt: skip


def last_turn(one: Conversation, turn: int) -> Row:
    """Return a row that ends with an answer and learns only this answer."""
    before = [] if turn == 0 else [*one.answers[0], *one.check]
    return {
        "problem_id": one.problem, "prompt": one.prompt + before, "completion_ids": one.answers[turn],
        "completion_mask": [1] * len(one.answers[turn]), "reward": _rewards(one)[turn],
    }  # fmt: skip


def _rewards(one: Conversation) -> list[float]:
    return [1.0 if is_right else -1.0 for is_right in one.right]


def _discounted(one: Conversation) -> Row:
    first, final = _rewards(one)
    return row(one, turn_rewards=[first + DISCOUNT * final, final], turn_discount=DISCOUNT)


# Functions that return the rows of a conversation, given which of its answers are rated.
METHODS: dict[str, Callable[[Conversation, Sequence[bool]], list[Row]]] = {
    END: lambda one, _: [row(one, reward=_rewards(one)[1])],
    PER_TURN: lambda one, _: [row(one, turn_rewards=_rewards(one))],
    RETURNS: lambda one, _: [_discounted(one)],
    REPEATED: lambda one, _: [row(one, reward=_rewards(one)[1])],
    REPEATED_TURNS: lambda one, _: [row(one, turn_rewards=_rewards(one))],
    # A discount only tells the trainer to take means per turn index.
    OWN_MEANS: lambda one, _: [row(one, turn_rewards=_rewards(one), turn_discount=1.0)],
    RATED_TURNS: lambda one, rated: [
        row(one, turn_rewards=[r if is_rated else None for r, is_rated in zip(_rewards(one), rated, strict=True)])
    ] * any(rated),
    RATED_ROWS: lambda one, rated: [last_turn(one, turn) for turn in (0, 1) if rated[turn]],
}  # fmt: skip


def of_methods(names: Sequence[str], title: str) -> Experiment:
    """Return a comparison. Rates are chosen for the greedy accuracy of the final answer."""
    return Experiment(
        "turns", {name: {"method": name} for name in names}, rates(1e-4, 3e-4, 1e-3), range(5), (FINAL,), title,
        further=3, fields={"weights": model_hash(NAME), "draws": DRAWS, "rows": PROBLEMS * CANDIDATES}, shows=SHOWS,
    )  # fmt: skip


def rewarded() -> Experiment:
    """Return the comparison of rewards. The primary one is that of the first two methods."""
    return of_methods(
        (PER_TURN, END, RETURNS, REPEATED, REPEATED_TURNS, OWN_MEANS), "Two answers with a check between them"
    )


def rated() -> Experiment:
    """Return the comparison of two ways to learn from ratings of some answers."""
    return of_methods((RATED_TURNS, RATED_ROWS), f"Two answers, of which {RATED:.0%} are rated")


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons."""
    return [rewarded(), rated()]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell.

    Returns:
        `first greedy`, `final pass@1` and so on: accuracies of the two answers, with standard errors over the problems.
        `kept` and `repaired`: accuracy of final samples after a right and after a wrong first answer.
        `multiplying`: greedy accuracy of the final answer for bags that multiply, which are half of the problems.
        `before`: the same of the base model.
    """
    seed = cell["seed"]
    rows, steps = rows_of(cell["method"], conversations(seed), seed)
    curation = "repeated_positives" if cell["method"] in (REPEATED, REPEATED_TURNS) else "none"
    model = trained(rows, steps, cell["learning_rate"], seed, curation)
    split = VALIDATION_SEED if seed == TUNING_SEED else TEST_SEED
    return {**tested(model, profile.test_problems, split), "before": untrained(profile.test_problems, split)}


@lru_cache
def conversations(seed: int) -> list[Conversation]:
    """Return the base model's conversations about the training problems of a seed."""
    return draw(base_model(NAME), problems(PROBLEMS, 100 + seed), CANDIDATES, seed)


def rows_of(method: str, pool: list[Conversation], seed: int) -> tuple[list[Row], int]:
    """Return the rows of a method, and the number of steps: one for each 32 conversations, or for 32 ratings."""
    rated_N2 = np.random.default_rng(seed).random((len(pool), 2)) < RATED
    rows = [one for talk, rated in zip(pool, rated_N2, strict=True) for one in METHODS[method](talk, rated)]
    read = rated_N2.sum() if method in (RATED_TURNS, RATED_ROWS) else len(pool)
    return rows, max(1, int(read) // BATCH_ROWS)


def trained(rows: list[Row], steps: int, learning_rate: float, seed: int, curation: str) -> PreTrainedModel:
    """Return the base model after some steps, which read the rows about once."""
    with tempfile.TemporaryDirectory() as out:
        args = OfflineTOPRConfig(
            out, learning_rate=learning_rate, max_steps=steps, per_device_train_batch_size=-(-len(rows) // steps),
            optim="adamw_torch", save_strategy="no", seed=seed, curation=curation, share_prompts=False, **SMALL,
        )  # fmt: skip
        trainer = OfflineTOPRTrainer(base_model(NAME), args, Dataset.from_list(rows), processing_class=tokenizer(NAME))
        trainer.train()
    return trainer.model


@lru_cache
def untrained(count: int, split: int) -> dict[str, Any]:
    """Return the accuracies of the base model."""
    return tested(base_model(NAME), count, split)


def tested(model: PreTrainedModel, count: int, split: int) -> dict[str, Any]:
    """Return the accuracies of a model on some problems."""
    asked = problems(count, split)
    greedy_P2 = np.array([one.right for one in draw(model, asked, 1, 0, temperature=0.0)])
    sampled_PS2 = np.array([one.right for one in draw(model, asked, SAMPLES, 0)]).reshape(count, SAMPLES, 2)
    found: dict[str, Any] = {}
    for turn, name in enumerate(("first", "final")):
        for kind, values_P in (("greedy", greedy_P2[:, turn]), ("pass@1", sampled_PS2[..., turn].mean(1))):
            found[f"{name} {kind}"] = float(values_P.mean())
            found[f"{name} {kind} error"] = float(values_P.std(ddof=1) / np.sqrt(count))
    first, final = sampled_PS2[..., 0], sampled_PS2[..., 1]
    multiplies_P = np.array([OF_KIND[problem.kind].multiplies for problem in asked])
    found["multiplying"] = float(greedy_P2[multiplies_P, 1].mean())
    return found | {"kept": _mean(final[first]), "repaired": _mean(final[~first])}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
