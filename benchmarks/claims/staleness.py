"""Beyond the paper: every batch from a policy 0, 64, 256 or 1,024 updates old.

Each update reads two problems with four answers each, by the policy as it was `age` updates ago; the base model where
there is none so old, so that at age 1,024 all rows are the base model's. From 64 on, the rows of 64 updates are drawn
at once, and are between `age` and `age + 63` updates old; at age 0 those of 4 updates, which are 0 to 3 old.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.rows import Rows
from benchmarks.setting import Profile, base_model, evaluate, problems, sample, summary
from benchmarks.statistics import Interval, Measured, difference, over_seeds
from benchmarks.training import update
from benchmarks.verdicts import MEASURED, Verdict, judge, markdown_table

AGES = (0, 64, 256, 1024)
UPDATES, PROBLEMS, GROUP, BLOCK, FRESH_BLOCK, SEEDS = 1024, 2, 4, 64, 4, 2
# `topr_rescored` is TOPR with log μ by the policy that is about to train, not by the one that wrote the rows: what
# "old log-probabilities" recomputed by a trainer are when the rows are stale.
VARIANTS = ("topr_rescored", "topr_token", "topr_group_sign")
OTHERS = ("m2po", "trl_dapo", "trl_vespo")
METHODS = ("topr", *VARIANTS, *OTHERS)
AGE_OF_VARIANTS = 256  # the age at which published studies see a degradation
MEASURED_AT = (256, 512, UPDATES)
LABELS = {name: RIVALS[name].label if name in RIVALS else "“TOPR”, log μ recomputed" for name in METHODS}


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Each at its own best rate one step down the grid, as there are many more updates; TOPR's variants at TOPR's."""
    if profile.is_quick:
        return []
    grid = profile.learning_rates

    def rate(method: str) -> float:
        own = grid.index(best(store, profile, "topr" if method in VARIANTS else method))
        return grid[max(own - 1, 0)]

    return [
        {"claim": "staleness", "method": method, "age": age, "seed": seed, "learning_rate": rate(method)}
        for seed in range(SEEDS)
        for age in AGES
        for method in METHODS
        if method not in VARIANTS or age == AGE_OF_VARIANTS
    ]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model, sampler, seed, age = base_model("main"), base_model("main"), cell["seed"], cell["age"]
    questions = problems("main", profile.problems, 100 + seed)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"], weight_decay=0.0)
    block = BLOCK if age else FRESH_BLOCK
    snapshots, objective, curve_ = {}, None, [{"update": 0, **_point(model, profile, seed)}]
    for start in range(0, UPDATES, block):
        if age:
            snapshots[start] = copy.deepcopy(model.state_dict())
            sampler.load_state_dict(snapshots[max(start - age, 0)])
        else:
            sampler = model
        chosen = questions.select(rng.choice(len(questions), block * PROBLEMS, replace=False))
        rows = Rows.of(sample(sampler, "main", chosen, GROUP, seed * 1_000_000 + start))
        if cell["method"] == "topr_rescored":
            rows = rows.scored_by(model)
        if objective is None:
            name = "topr" if cell["method"] == "topr_rescored" else cell["method"]
            objective = RIVALS[name].make(model, rows, rows)
        objective.renew(rows)
        model.train()
        for pair in np.array_split(np.unique(rows.groups), block):
            update(model, optimizer, objective.loss(np.flatnonzero(np.isin(rows.groups, pair))))
        if start + block in MEASURED_AT:
            curve_.append({"update": start + block, **_point(model, profile, seed)})
    return {"curve": curve_}


def _point(model: Any, profile: Profile, seed: int) -> dict[str, float]:
    return summary(evaluate(model, "main", profile, 2, seed))


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))

    def measured(method: str, age: int, place: int = -1) -> Measured:
        return {
            c["seed"]: (r["curve"][place]["pass@1"], r["curve"][place]["error"])
            for c, r in done
            if (c["method"], c["age"]) == (method, age)
        }

    name = _picture(out, measured)
    table = [
        [
            f"**{LABELS[method]}**" if method == "topr" else LABELS[method],
            *(over_seeds(found).percent() if (found := measured(method, age)) else "" for age in AGES),
        ]
        for method in METHODS
    ]
    loss = {method: difference(measured(method, 256), measured(method, 0)) for method in ("topr", *OTHERS)}
    above = [LABELS[m] for m in OTHERS if difference(measured("topr", 256), measured(m, 256)).low > 0]
    below = [LABELS[m] for m in OTHERS if difference(measured("topr", 256), measured(m, 256)).high < 0]
    worse = [LABELS[m] for m in VARIANTS if difference(measured("topr", 256), measured(m, 256)).low > 0]
    return [
        Verdict(
            "Beyond the paper: rows that are 256 updates old degrade TOPR, but not M2PO",
            "so published studies of M2PO and of losses like TOPR's (arXiv 2510.01161)",
            f"pass@1 after {UPDATES:,} updates, by the age of the rows, in the table. At 256 minus at 0: "
            + ", ".join(f"{LABELS[m]} {gap.percent(signed=True)}" for m, gap in loss.items())
            + f" points. At 256 TOPR is above {', '.join(above) or 'none'}, and below {', '.join(below) or 'none'} of "
            "the others",
            judge(loss["topr"].high < 0 <= loss["m2po"].high),
            "With log μ of the policy that wrote a row, the taper knows how stale it is. If the policy that is about "
            "to train recomputes log μ (“recomputed”; a trainer's own old log-probabilities are of this kind), it does "
            "not, and naive REINFORCE's collapse is back.",
            name,
            markdown_table(["pass@1, %", *(f"{age:,} updates old" for age in AGES)], table),
            headline=(
                f"**Old rows**: after {UPDATES:,} updates on rows that are 256 updates old, pass@1 minus that on fresh "
                f"rows: TOPR {loss['topr'].percent(signed=True)}, "
                + ", ".join(f"{LABELS[m]} {gap.percent(signed=True)}" for m, gap in loss.items() if m != "topr")
                + " points."
            ),
        ),
        Verdict(
            "Beyond the paper: which change to TOPR makes it degrade on old rows",
            "",
            f"TOPR minus the variant at {AGE_OF_VARIANTS} updates: "
            + ", ".join(
                f"{LABELS[m]} {difference(measured('topr', 256), measured(m, 256)).percent(signed=True)}"
                for m in VARIANTS
            )
            + f" points; below TOPR: {', '.join(worse) or 'none'}",
            MEASURED,
            "",
            name,
        ),
    ]


def _picture(out: Path, measured: Any) -> str:
    picture, axes = figure(len(AGES), 3.1, 4.0)
    for panel, age in zip(axes, AGES, strict=True):
        for method in METHODS:
            if method in VARIANTS and age != AGE_OF_VARIANTS:
                continue
            runs = [measured(method, age, place) for place in range(len(MEASURED_AT) + 1)]
            points = [Interval(over_seeds(run).mean, 0.0) for run in runs]
            for seed in runs[0]:  # so few that a band would say less than they do
                thin = {"color": COLOURS[method], "lw": 0.6, "alpha": 0.7}
                panel.plot([0, *MEASURED_AT], [100 * run[seed][0] for run in runs], **thin)
            style = {"lw": 2.6} if method == "topr" else {"ls": "--" if method in VARIANTS else "-"}
            curve(panel, [0, *MEASURED_AT], points, LABELS[method], color=COLOURS[method], **style)
        title = "rows of the base model" if age == max(AGES) else f"rows {age:,} updates old" if age else "fresh rows"
        panel.set(title=title, xlabel="updates", ylim=(-2, 60))
    axes[0].set(ylabel="pass@1 (%)")
    handles, labels = axes[AGES.index(AGE_OF_VARIANTS)].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return save(picture, out, "staleness")
