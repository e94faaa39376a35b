"""Train in rounds, like the paper: sample candidates, select rows, and train for one epoch on these rows.

The random seed of a round is 100 · seed + round.
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from benchmarks.loops.training import train
from benchmarks.methods import Objective, topr
from benchmarks.rows import Rows
from benchmarks.setting import BATCH_ROWS, base_model, problems, sample
from topr_trl import curate
from topr_trl.curation import ROWS_PER_PROBLEM

PROBLEMS = 200  # the same in all rounds of a seed
CANDIDATES = 16  # completions of each problem in each round
REPEATED = "repeated"  # correct answers, repeated until there are as many rows as in the paper


def trained(
    base: str,
    share: float | str,
    curation: str,
    rounds: int,
    learning_rate: float,
    seed: int,
    after: Callable[[PreTrainedModel, int, int], None],
) -> PreTrainedModel:
    """Return the model after some rounds of TOPR.

    Args:
        base: task, see `benchmarks.setting`.
        share: effective share of positives, see `benchmarks.methods.at_share`.
        curation: rule for `topr_trl.curate`, or `REPEATED`.
        rounds: number of rounds.
        learning_rate: learning rate.
        seed: seed of problems, completions and order.
        after: function that is called after each round with the model, the round and the number of candidates.
    """
    model, questions = base_model(base), problems(base, PROBLEMS, 100 + seed)
    size = round(ROWS_PER_PROBLEM * PROBLEMS)
    rule = "positives" if curation == REPEATED else curation

    def choose(pool: Rows, own: int) -> Objective:
        found = curate(pool.rewards, pool.groups, rule, size, seed=own).indices
        return topr(share).make(model, pool[np.resize(found, size) if curation == REPEATED else found], pool)

    for number in range(1, rounds + 1):
        own = 100 * seed + number
        pool = Rows.of(sample(model, base, questions, CANDIDATES, own))
        one(model, pool, choose, learning_rate, own)
        after(model, number, len(pool))
    return model


def one(
    model: PreTrainedModel, pool: Rows, choose: Callable[[Rows, int], Objective], learning_rate: float, seed: int
) -> None:
    """Train for one epoch on the rows that `choose` makes of a pool."""
    objective = choose(pool, seed)
    train(model, objective, -(-objective.size // BATCH_ROWS), learning_rate, seed)
