"""A round of the paper's loop on a tiny model: candidates are drawn, rows are chosen, and one epoch is trained on them.

Each round and each seed has a random number of its own, 100 · seed + round.
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from benchmarks.rivals import Direct, tapered
from benchmarks.rows import Rows
from benchmarks.setting import BATCH_ROWS, problems, sample
from benchmarks.training import train
from topr_trl import curate
from topr_trl.curation import ROWS_PER_PROBLEM

PROBLEMS = 200


def drawn(model: PreTrainedModel, base: str, count: int, seed: int, number: int) -> Rows:
    """`count` completions of each problem; the problems are the same in all rounds of a seed."""
    return Rows.of(sample(model, base, problems(base, PROBLEMS, 100 + seed), count, 100 * seed + number))


def chosen(pool: Rows, curation: str, seed: int, number: int, repeated: bool = False) -> Rows:
    """The rows of a round, as many as the paper's; fewer may be there, unless they are `repeated`."""
    size = round(ROWS_PER_PROBLEM * PROBLEMS)
    found = curate(pool.rewards, pool.groups, curation, size, seed=100 * seed + number).indices
    return pool[np.resize(found, size) if repeated else found]


def train_on(
    model: PreTrainedModel,
    rows: Rows,
    rewards: Callable[[Rows], np.ndarray],
    learning_rate: float,
    seed: int,
    number: int,
) -> None:
    """One epoch of TOPR, in place; `rewards` are those after the baseline."""
    objective = Direct(model, rows, tapered("topr"), rewards)
    train(model, objective, -(-len(rows) // BATCH_ROWS), learning_rate, 100 * seed + number)
