"""Train on rows of a policy that is many updates old.

Each update reads two problems with four answers each, by the policy as it was `age` updates ago; the base model where
there is none so old. Rows are drawn in blocks, so they are `age` to `age` + 63 updates old, or 0 to 3.
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

PROBLEMS, GROUP, BLOCK, FRESH_BLOCK = 2, 4, 64, 4  # problems of an update, answers to each; updates of a block
# TOPR with log μ by the policy that is about to train, not by the one that wrote the rows: what "old log-probabilities"
# recomputed by a trainer are when the rows are stale.
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
    """Return the model of `main` after some updates.

    Args:
        method: name of `benchmarks.methods.METHODS`, or `RESCORED`.
        age: age of the rows in updates.
        updates: number of updates.
        learning_rate: learning rate.
        seed: seed of problems and completions.
        num_problems: number of training problems.
        after: called before the first block and after each one, with the model and the number of updates.
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
