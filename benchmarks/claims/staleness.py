"""Beyond the paper: every batch from a policy 256 updates old, beside batches of the policy itself.

Each update reads two problems with four answers each, by the policy as it was `age` updates ago; the base model where
there is none so old. At age 256 the rows of 64 updates are drawn at once, and are 256 to 319 updates old; at age 0
those of 4 updates, which are 0 to 3 old. Each method has the rate that is best for it on fresh rows; the variants of
TOPR, which are tried on old rows alone, the best there, and TOPR's rate as well.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arms import TUNING_SEED, tune
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.decoding import DRAWS
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.rows import Rows
from benchmarks.setting import Profile, base_model, evaluate, problems, sample, summary
from benchmarks.statistics import Interval, Measured, difference, over_seeds
from benchmarks.training import update
from benchmarks.verdicts import MEASURED, Verdict, judge, markdown_table

OLD = 256  # updates: the age at which published studies see a degradation
AGES = (0, OLD)
UPDATES, PROBLEMS, GROUP, BLOCK, FRESH_BLOCK = 1024, 2, 4, 64, 4
# `topr_rescored` is TOPR with log μ by the policy that is about to train, not by the one that wrote the rows: what
# "old log-probabilities" recomputed by a trainer are when the rows are stale.
VARIANTS = ("topr_rescored", "topr_token")
OTHERS = ("m2po", "trl_dapo", "trl_vespo")
METHODS = ("topr", *VARIANTS, *OTHERS)
ARMS = [(method, age) for age in AGES for method in METHODS if method not in VARIANTS or age == OLD]
TUNED_AT = {method: OLD if method in VARIANTS else 0 for method in METHODS}
RATES, FURTHER = (3e-5, 1e-4), 3
MEASURED_AT = (256, 512, UPDATES)
LABELS = {name: RIVALS[name].label if name in RIVALS else "“TOPR”, log μ recomputed" for name in METHODS}


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Those that tune each method; then, where that is done, those that are reported."""
    if profile.is_quick:
        return []
    tuning, reported = [], []
    for method, age in TUNED_AT.items():
        tuning += [_cell(method, age, rate, TUNING_SEED) for rate in _tuned(store, method)[0]]
        ages = [age for name, age in ARMS if name == method]
        reported += [
            _cell(method, age, rate, seed)
            for rate in _rates(store, method)
            for age in ages
            for seed in range(profile.seeds)
        ]
    return tuning + reported


def _rates(store: Store, method: str) -> list[float]:
    """Those that are reported, as far as they are known: the best, and of a variant TOPR's."""
    names = (method, "topr") if method in VARIANTS else (method,)
    return list(dict.fromkeys(rate for name in names if (rate := _tuned(store, name)[1])))


def _cell(method: str, age: int, rate: float, seed: int) -> Cell:
    return {
        "claim": "staleness", "method": method, "age": age, "learning_rate": rate, "seed": seed, "draws": DRAWS
    }  # fmt: skip


def _tuned(store: Store, method: str) -> tuple[list[float], float | None]:
    """The rates to try, and the best of them; None as yet."""

    def point(rate: float, place: int) -> float | None:
        result = store.get(_cell(method, TUNED_AT[method], rate, TUNING_SEED))
        return result["curve"][place]["pass@1"] if result else None

    untrained = point(RATES[0], 0) or 0.0
    choices = [{"learning_rate": rate} for rate in RATES]
    tried, best = tune(choices, FURTHER, lambda choice: point(choice["learning_rate"], -1), untrained)
    return [choice["learning_rate"] for choice in tried], best["learning_rate"] if best else None


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
        if start + block in (MEASURED_AT if seed != TUNING_SEED else MEASURED_AT[-1:]):
            curve_.append({"update": start + block, **_point(model, profile, seed)})
    return {"curve": curve_}


def _point(model: Any, profile: Profile, seed: int) -> dict[str, float]:
    split = "validation" if seed == TUNING_SEED else "test"
    return summary(evaluate(model, "main", profile, 2, seed, split))


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    rates = {method: rate for method in METHODS if (rate := _tuned(store, method)[1])}
    if len(rates) < len(METHODS):
        raise Unfinished("not every method has been tuned")

    def measured(method: str, age: int, place: int = -1, rate: float | None = None) -> Measured:
        planned = [_cell(method, age, rate or rates[method], seed) for seed in range(profile.seeds)]
        points = {cell["seed"]: result["curve"][place] for cell, result in store.results(planned)}
        return {seed: (found["pass@1"], found["error"]) for seed, found in points.items()}

    name = _picture(out, measured)
    shared = {method: measured(method, OLD, rate=rates["topr"]) for method in VARIANTS}
    table = [
        [
            f"**{LABELS[method]}**" if method == "topr" else LABELS[method], f"{rate:g}",
            *(
                over_seeds(measured(method, age, rate=rate)).percent() if (method, age) in ARMS else ""
                for age in AGES
            ),
        ]
        for method in METHODS
        for rate in _rates(store, method)
    ]  # fmt: skip
    lost = {method: difference(measured(method, OLD), measured(method, 0)) for method in ("topr", *OTHERS)}
    gaps = {method: difference(measured("topr", OLD), measured(method, OLD)) for method in (*VARIANTS, *OTHERS)}
    changes = {method: _difference_of_changes(measured, method) for method in OTHERS}
    beside = ", ".join(f"{LABELS[method]} {gap.percent(signed=True)}" for method, gap in changes.items())
    told = [LABELS[method] for method, gap in changes.items() if gap.low > 0 or gap.high < 0]
    above = [LABELS[method] for method in OTHERS if gaps[method].low > 0]
    below = [LABELS[method] for method in OTHERS if gaps[method].high < 0]
    worse = [LABELS[method] for method in VARIANTS if gaps[method].low > 0]
    return [
        Verdict(
            "Beyond the paper: rows that are 256 updates old degrade TOPR, but not M2PO",
            "so published studies of M2PO and of losses like TOPR's (arXiv 2510.01161)",
            f"pass@1 after {UPDATES:,} updates, by the age of the rows, in the table. Each has the rate that is best "
            f"for it on fresh rows, the variants of TOPR the best on old ones, and TOPR's. At {OLD} minus at 0: "
            + ", ".join(f"{LABELS[method]} {gap.percent(signed=True)}" for method, gap in lost.items())
            + f" points. The change of TOPR minus that of others: {beside} points. At {OLD} TOPR is above "
            f"{', '.join(above) or 'none'}, and below {', '.join(below) or 'none'} of the others",
            judge(lost["topr"].high < 0 <= lost["m2po"].high),
            "with log μ of the policy that wrote a row, the taper knows how stale it is. If the policy that is about "
            "to train recomputes log μ (“recomputed”; a trainer's own old log-probabilities are of this kind), it does "
            "not: at TOPR's rate naive REINFORCE's collapse is back, and a rate that is low enough to prevent it "
            "learns less.",
            name,
            markdown_table(["pass@1, %", "learning rate", *(f"{age:,} updates old" for age in AGES)], table),
            headline=(
                f"**Old rows**: after {UPDATES:,} updates on rows that are {OLD} updates old, pass@1 minus that on "
                f"fresh rows: TOPR {lost['topr'].percent(signed=True)}, "
                + ", ".join(f"{LABELS[method]} {lost[method].percent(signed=True)}" for method in OTHERS)
                + " points, each at the rate that is best for it on fresh rows. The change of TOPR minus that of "
                f"others: {beside}; {', '.join(told) or 'none'} can be told from it."
            ),
        ),
        Verdict(
            "Beyond the paper: which change to TOPR makes it degrade on old rows",
            "",
            f"TOPR minus the variant at {OLD} updates: "
            + ", ".join(
                f"{LABELS[method]} {gaps[method].percent(signed=True)} at its own best rate and "
                f"{difference(measured('topr', OLD), shared[method]).percent(signed=True)} at TOPR's"
                for method in VARIANTS
            )
            + f" points; below TOPR at its own best rate: {', '.join(worse) or 'none'}",
            MEASURED,
            "",
            name,
        ),
    ]


def _difference_of_changes(measured: Any, other: str) -> Interval:
    """Compare what old rows change for TOPR with what they change for another method, seed by seed."""

    def change(method: str) -> Measured:
        old, fresh = measured(method, OLD), measured(method, 0)
        return {
            seed: (old[seed][0] - fresh[seed][0], float(np.hypot(old[seed][1], fresh[seed][1])))
            for seed in old.keys() & fresh.keys()
        }

    return difference(change("topr"), change(other))


def _picture(out: Path, measured: Any) -> str:
    picture, axes = figure(len(AGES), 3.8, 4.0)
    for panel, age in zip(axes, AGES, strict=True):
        for method in (method for method, of_arm in ARMS if of_arm == age):
            points = [over_seeds(measured(method, age, place)) for place in range(len(MEASURED_AT) + 1)]
            style = {"lw": 2.6} if method == "topr" else {"ls": "--" if method in VARIANTS else "-"}
            curve(panel, [0, *MEASURED_AT], points, LABELS[method], color=COLOURS[method], **style)
        panel.set(title=f"rows {age:,} updates old" if age else "fresh rows", xlabel="updates", ylim=(-2, 60))
    axes[0].set(ylabel="pass@1 (%)")
    picture.legend(*axes[AGES.index(OLD)].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return save(picture, out, "staleness")
