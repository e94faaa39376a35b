"""Train on rows of a policy that is many updates old.

Each update uses two problems with four completions each. The completions come from the policy of at least `age`
updates ago, or from the base model in the first updates. Rows are sampled in blocks, so they are `age` to `age` + 63
updates old (0 to 3 for age 0).
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.loops.training import adamw, update
from benchmarks.methods import METHODS, Objective
from benchmarks.rows import Rows
from benchmarks.setting import base_model, problems, sample

PROBLEMS, GROUP, BLOCK, FRESH_BLOCK = 2, 4, 64, 4  # problems per update, completions per problem, updates per block
# TOPR with log μ of the current policy instead of the sampler. This corresponds to trainers that recompute "old
# log-probabilities" for stale rows.
RESCORED = "topr_rescored"


def trained(
    method: str,
    age: int,
    updates: int,
    learning_rate: float,
    seed: int,
    num_problems: int,
    after: Callable[[PreTrainedModel, int], None],
) -> PreTrainedModel:
    """Return the base model `main` after some updates.

    Args:
        method: name in `benchmarks.methods.METHODS`, or `RESCORED`.
        age: minimum age of the rows in updates, a multiple of `BLOCK`.
        updates: number of updates.
        learning_rate: learning rate.
        seed: seed of problems and completions.
        num_problems: number of training problems.
        after: function that is called before the first block and after each block, with the model and the number of
            updates.
    """
    model, sampler, questions = base_model("main"), base_model("main"), problems("main", num_problems, 100 + seed)
    rng, optimizer, block = np.random.default_rng(seed), adamw(model, learning_rate), BLOCK if age else FRESH_BLOCK
    snapshots: dict[int, dict[str, Any]] = {}
    objective: Objective | Any = None
    after(model, 0)
    for start in range(0, updates, block):
        if age:
            snapshots[start] = copy.deepcopy(model.state_dict())
            sampler.load_state_dict(snapshots[max(start - age, 0)])
        else:
            sampler = model
        chosen = questions.select(rng.choice(len(questions), block * PROBLEMS, replace=False))
        rows = Rows.of(sample(sampler, "main", chosen, GROUP, seed * 1_000_000 + start))
        if method == RESCORED:
            rows = rows.scored_by(model)
        if objective is None:
            objective = METHODS["topr" if method == RESCORED else method].make(model, rows, rows)
        objective.renew(rows)
        model.train()
        for pair in np.array_split(np.unique(rows.groups), block):
            update(model, optimizer, objective.loss(np.flatnonzero(np.isin(rows.groups, pair))))
        after(model, start + block)
    return model
