"""Beyond the paper: every batch from a policy 0, 64, 256 or 1,024 updates old.

Each update reads rows of the policy as it was `age` updates ago (of the base model while there is no older one).
From 64 on they are drawn for 64 updates at once, so that their age is between `age` and `age + 63`.
"""

import copy
from typing import Any

import numpy as np
import torch

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.rows import Rows
from benchmarks.setting import Profile, base_model, evaluate, problems, sample, summary
from benchmarks.statistics import Interval, interval
from benchmarks.training import batches, update
from benchmarks.verdicts import MEASURED, Verdict, judge

AGES = (0, 64, 256, 1024)
UPDATES, BATCH, GROUP, BLOCK, SEEDS = 1024, 8, 8, 64, 1
# `topr_rescored` is TOPR with log μ by the policy that is about to train, not by the one that wrote the rows: what
# "old log-probabilities" recomputed by a trainer are when the rows are stale.
METHODS = (
    "topr", "topr_rescored", "topr_token", "topr_geometric", "topr_group_sign", "positives_only", "m2po", "trl_dapo",
    "trl_vespo",
)  # fmt: skip
SAME_ON_POLICY = ("topr_rescored", "topr_token", "topr_geometric")  # at age 0 every ratio is 1, and they are TOPR


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    # Ten times the updates of one epoch: each rival's own rate, one step of the grid lower.
    rates = profile.learning_rates
    return [
        {
            "claim": "staleness", "profile": profile.name, "method": method, "age": age, "seed": seed,
            "learning_rate": rates[max(rates.index(best(store, profile, method.replace("_rescored", ""))) - 1, 0)],
        }
        for seed in range(SEEDS)
        for age in AGES
        for method in METHODS
        if age or method not in SAME_ON_POLICY
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model, sampler, seed, age = base_model("main"), base_model("main"), cell["seed"], cell["age"]
    questions = problems("main", profile.problems, 100 + seed)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"], weight_decay=0.0)
    block = min(BLOCK, age) or 1
    snapshots, objective, curve = {}, None, [{"update": 0, **_point(model, profile, seed)}]
    for start in range(0, UPDATES, block):
        if age:
            snapshots[start] = copy.deepcopy(model.state_dict())
            sampler.load_state_dict(snapshots[max(start - age, 0)])
        else:
            sampler = model
        chosen = questions.select(rng.choice(len(questions), block * BATCH // GROUP, replace=False))
        rows = Rows.of(sample(sampler, "main", chosen, GROUP, seed * 1_000_000 + start), sampler)
        if cell["method"] == "topr_rescored":
            rows = rows.scored_by(model)
        if objective is None:
            objective = RIVALS[cell["method"].replace("_rescored", "")][1](model, rows)
        objective.renew(rows)
        model.train()
        order = batches(len(rows), min(BATCH, len(rows)), seed + start)
        for _ in range(block):
            update(model, optimizer, objective.loss(next(order)))
        done = start + block
        if done in (128, 256, 512, UPDATES):
            curve.append({"update": done, **_point(model, profile, seed)})
    return {"curve": curve}


def _point(model: Any, profile: Profile, seed: int) -> dict[str, float]:
    return summary(evaluate(model, "main", profile, 2, seed))


# Report.


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    if not done:
        return []
    picture, axes = figure(len(AGES), 3.1, 4.0)
    for panel, age in zip(axes, AGES, strict=True):
        for method in METHODS:
            runs = [result["curve"] for cell, result in done if (cell["method"], cell["age"]) == (method, age)]
            if not runs:
                continue
            points = [
                interval([run[i]["pass@1"] for run in runs], [run[i]["error"] for run in runs])
                for i in range(len(runs[0]))
            ]
            style = {"lw": 2.6} if method == "topr" else {"ls": "--" if method.startswith("topr_") else "-"}
            curve(panel, [p["update"] for p in runs[0]], points, LABELS[method], color=COLOURS[method], **style)
        panel.set(title=f"rows {age:,} updates old", xlabel="updates", ylim=(-2, 100))
    axes[0].set(ylabel="pass@1 (%)")
    handles, labels = axes[-1].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    name = save(picture, profile, "staleness")

    def end(method: str, age: int) -> Interval | None:
        last = [r["curve"][-1] for c, r in done if (c["method"], c["age"]) == (method, age)]
        return interval([p["pass@1"] for p in last], [p["error"] for p in last]) if last else None

    def row(method: str) -> str:
        return f"{LABELS[method]} " + " / ".join(
            "–" if (e := end(method, age)) is None else e.percent() for age in AGES
        )

    ages = ", ".join(f"{age:,}" for age in AGES)
    fresh, stale = end("topr", 0), {age: end("topr", age) for age in AGES[1:]}
    variants = [m for m in ("topr_rescored", "topr_token", "topr_geometric", "topr_group_sign") if end(m, 256)]
    rivals = [m for m in ("m2po", "trl_dapo", "trl_vespo", "positives_only") if end(m, 256)]
    if fresh is None or not all(stale.values()) or not variants:
        return []
    return [
        Verdict(
            "Beyond the paper: TOPR on rows that are old",
            "published studies see TOPR-like losses degrade at 256 updates; M2PO reports none",
            f"pass@1 after {UPDATES:,} updates with rows {ages} updates old: "
            + "; ".join(map(row, ("topr", *rivals)))
            + " %",
            judge(*(end("topr", 256).low > end(m, 256).high for m in rivals)),
            "The verdict asks whether TOPR is above all of the others at 256.",
            name,
        ),
        Verdict(
            "Beyond the paper: which change to TOPR makes it degrade on old rows",
            "",
            f"pass@1 after {UPDATES:,} updates with rows {ages} updates old: "
            + "; ".join(map(row, ("topr", *variants)))
            + " %. Those that end below TOPR at 256: "
            + (", ".join(LABELS[m] for m in variants if end(m, 256).high < end("topr", 256).low) or "none"),
            MEASURED,
            "",
            name,
        ),
    ]


LABELS = {name: RIVALS[name][0] if name in RIVALS else "“TOPR”, log μ rescored" for name in METHODS}
