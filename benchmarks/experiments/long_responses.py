"""Measure how long a negative keeps its weight, by its length and by the source of log μ.

A long response is a session (`benchmarks.sessions`), so a small model can have responses of 40 to 8,000 tokens.

The source of log μ is the trainer, a sampler with weights in bfloat16, or a sampler with top-k.
"""

from typing import Any

import numpy as np
import torch

from benchmarks.cells import Cell, Store
from benchmarks.loops.training import adamw, update
from benchmarks.rows import Rows
from benchmarks.sessions import Sessions
from benchmarks.setting import PROFILES, Profile, base_model, candidates

PARTS = (1, 12, 50, 200)  # answers of a session; an answer has about 40 tokens
SOURCES = ("trainer", "bfloat16", "top-k")
TOP_K = 3  # keeps 99.4% of the probability mass on average
LEARNING_RATES = (1e-4, 1e-5)
SEEDS, SESSIONS, HELD_OUT = 2, 8, 32  # sessions of an update, and held-out sessions whose weights are measured
MEASURED_AT = (0, 1, 2, 5, 10, 20)


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Return the cells. The samplers' log μ is only measured at the higher rate."""
    return [
        {"claim": "long_responses", "parts": parts, "source": source, "learning_rate": rate, "seed": seed}
        for seed in range(SEEDS)
        for parts in PARTS
        for source in SOURCES
        for rate in LEARNING_RATES
        if source == "trainer" or rate == LEARNING_RATES[0]
    ]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    model, parts = base_model("main"), cell["parts"]
    pool = as_the_sampler_says(candidates("main", profile, cell["seed"]), cell["source"])
    rng = np.random.default_rng(cell["seed"])
    watched_groups = rng.permutation(np.unique(pool.groups))[: profile.problems // 4]
    is_watched = np.isin(pool.groups, watched_groups)
    watched = Sessions(pool, rng.choice(np.flatnonzero(is_watched), (HELD_OUT, parts)))
    optimizer = adamw(model, cell["learning_rate"])
    curve_, trained = [{"update": 0, **watched.weights(model)}], {}
    for step in range(1, MEASURED_AT[-1] + 1):
        batch = Sessions(pool, rng.choice(np.flatnonzero(~is_watched), (SESSIONS, parts)))
        update(model, optimizer, batch.loss(model))
        if step == 1:  # the effect of a step on its own negatives
            trained = batch.weights(model)
        if step in MEASURED_AT:
            curve_.append({"update": step, **watched.weights(model)})
    return {"curve": curve_, "trained": trained, "tokens": watched.tokens}


def as_the_sampler_says(rows: Rows, source: str) -> Rows:
    """Return rows with log μ from one of `SOURCES`. The given rows have the trainer's log μ."""
    if source == "bfloat16":
        return rows.scored_by(base_model("main").to(torch.bfloat16))
    return rows.scored_by(base_model("main"), TOP_K) if source == "top-k" else rows


def tables(store: Store) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of the table: mean weight, and share of weights below 0.01."""
    done, rows = store.results(cells(PROFILES["full"], store)), []
    kinds = [(source, LEARNING_RATES[0]) for source in SOURCES] + [(SOURCES[0], LEARNING_RATES[1])]
    for parts in PARTS if done else ():
        row = []
        for source, rate in kinds:
            runs = [result for cell, result in done
                    if (cell["parts"], cell["source"], cell["learning_rate"]) == (parts, source, rate)]  # fmt: skip
            row += [
                " / ".join(f"{100 * np.mean([r['curve'][at][what] for r in runs]):.0f}" for what in ("weight", "dead"))
                for at in (0, -1)
            ]
            tokens = np.mean([run["tokens"] for run in runs])
        rows.append([f"{tokens:,.0f}", *row])
    header = [f"{source}, rate {rate:g}, {when}" for source, rate in kinds
              for when in ("at first", f"after {MEASURED_AT[-1]}")]  # fmt: skip
    title = "Negatives that were not trained on: mean weight / share under 0.01, by length and log μ (%)"
    return [(title, ["tokens", *header], rows)] if rows else []
