"""Train offline on completions of the base model, for one or several epochs."""

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.loops.training import train
from benchmarks.methods import Method, read
from benchmarks.setting import BATCH_ROWS, Profile, base_model, epoch_rows, evaluate, summary

MARKS = (0.5, 1, 2, 4)  # epochs after which a run of several epochs is tested


def trained(
    task: str,
    method: Method,
    profile: Profile,
    seed: int,
    learning_rate: float,
    batch_rows: int = BATCH_ROWS,
    epochs: int = 1,
    split: str = "test",
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train the base model of a task.

    Returns:
        The model, and a dictionary with `p` (share of correct answers), `steps`, the median `gradient_norm`, and, for
        several epochs, the `curve`.
    """
    model = base_model(task)
    rows, pool = epoch_rows(task, profile, seed)
    share = float((rows.rewards > 0).mean())
    rows, steps = read(rows, method.protocol, batch_rows, seed)
    objective = method.make(model, rows, pool)
    marks = tuple(round(mark * steps) for mark in MARKS if mark <= epochs) if epochs > 1 else ()
    done = train(
        model, objective, steps * epochs, learning_rate, seed, marks,
        lambda: summary(evaluate(model, task, profile, 4, seed, split)), batch_rows,
    )  # fmt: skip
    curve = {"curve": done["curve"]} if marks else {}
    return model, {
        "p": share, "steps": steps * epochs, "gradient_norm": float(np.median(done["gradient_norms"])), **curve
    }  # fmt: skip
