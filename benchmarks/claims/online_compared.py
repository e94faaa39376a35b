"""`TOPRTrainer` beside `GRPOTrainer` in training: what a completion that was sampled is worth, used once or often."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import TUNING_SEED
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.online import COMPLETIONS, TESTED_AFTER, TOPR, TRL, OnlineArm, run
from benchmarks.pictures import curve, figure, save
from benchmarks.setting import Profile
from benchmarks.statistics import Interval, interval
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("main", "sure-17", "hard")  # slips, a confident mistake, more steps per problem
ON_ALL = ("trl_dapo", "trl_gspo", "topr_mean")  # the other methods are measured on the first only
# How often each generation batch is used: 16 times by some methods alone, since such runs take several times as long.
USES = {"main": (1, 4, 16), "sure-17": (1, 4, 16), "hard": (1, 4)}
ON_16 = (*ON_ALL, "trl_cispo", "trl_vespo", "topr_group_mean")
REPLAYED, SHARES = "topr_mean", (0.25, 0.5, 0.75)
RATES = {1: (1e-4, 3e-4, 1e-3), 4: (3e-5, 1e-4, 3e-4), 16: (1e-5, 3e-5, 1e-4)}  # by how often a batch is used
FURTHER = 2
SEEDS = 5
REFERENCE = "trl_dapo"
QUICK, QUICK_COMPLETIONS = (OnlineArm("main", REFERENCE, 4), OnlineArm("main", REPLAYED, replay_share=0.75)), 1_024


def tried(base: str) -> list[OnlineArm]:
    main = base == BASES[0]

    def methods(uses: int) -> Sequence[str]:
        return ON_ALL if not main else ON_16 if uses == 16 else [*TRL, *TOPR]

    found = [OnlineArm(base, method, uses) for uses in USES[base] for method in methods(uses)]
    if main:
        found += [OnlineArm(base, REPLAYED, replay_share=share) for share in SHARES]
    return found


def _tuned(store: Store, arm: OnlineArm) -> tuple[list[OnlineArm], OnlineArm | None]:
    def end(choice: dict[str, Any]) -> float | None:
        result = store.get(replace(arm, **choice).cell(TUNING_SEED))
        return None if result is None else 0.0 if result["failed"] else float(result["curve"][-1]["pass@1"])

    tried, best = arms.tune([{"learning_rate": rate} for rate in RATES[arm.uses]], FURTHER, end)
    return [replace(arm, **choice) for choice in tried], None if best is None else replace(arm, **best)


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return [arm.cell(seed=0) for arm in QUICK]
    tuning, reported = [], []
    for base in BASES:
        for arm in tried(base):
            of_arm, best = _tuned(store, arm)
            tuning += [one.cell(TUNING_SEED) for one in of_arm]
            reported += [best.cell(seed) for seed in range(SEEDS) if best]
    return tuning + reported


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    arm, seed = OnlineArm.of(cell), cell["seed"]
    if profile.is_quick:
        return run(arm, QUICK_COMPLETIONS, seed)
    if seed == TUNING_SEED:
        return run(arm, arm.completions // 2, seed, "validation")
    return run(arm, arm.completions, seed)


# Report.


def _best(store: Store, arm: OnlineArm) -> OnlineArm:
    best = _tuned(store, arm)[1]
    if best is None:
        raise Unfinished(f"{arm} has not been tuned")
    return best


def _points(arm: OnlineArm, results: list[dict[str, Any]]) -> list[Interval]:
    """pass@1 after each number of completions; a run that has failed stays where it was."""
    by_run = [[point["pass@1"] for point in result["curve"]] or [0.0] for result in results]
    held = [values + values[-1:] * (len(arm.tested_after) - len(values)) for values in by_run]
    return [interval(values) for values in zip(*held, strict=True)]


def needed(points: list[Interval], accuracy: float) -> float | None:
    """Completions after which the mean curve first has an accuracy, between the points by a straight line."""
    means = [point.mean for point in points]
    for n, mean in enumerate(means):
        if mean >= accuracy:
            if n == 0:
                return float(TESTED_AFTER[0])
            part = (accuracy - means[n - 1]) / (mean - means[n - 1])
            return TESTED_AFTER[n - 1] + part * (TESTED_AFTER[n] - TESTED_AFTER[n - 1])
    return None


def _label(arm: OnlineArm) -> str:
    replayed = f", {arm.replay_share:.0%} used again" if arm.replay_share else ""
    return {**TRL, **TOPR}[arm.method][0] + replayed


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    if profile.is_quick:
        return []
    best = {arm: _best(store, arm) for base in BASES for arm in tried(base)}
    found = {
        arm: [result for _, result in store.results([of_arm.cell(seed) for seed in range(SEEDS)])]
        for arm, of_arm in best.items()
    }
    points = {arm: _points(arm, results) for arm, results in found.items()}
    picture, axes = figure(len(BASES), 3.8, 3.4)
    verdicts = []
    for panel, base in zip(axes, BASES, strict=True):
        own = tried(base)
        target = max(points[arm][-1].mean for arm in own if arm.method == REFERENCE)
        rows = [
            [
                _label(arm), str(arm.uses), f"{best[arm].learning_rate:g}",
                points[arm][-1].percent(),
                "not reached" if (count := needed(points[arm], target)) is None else f"{count:,.0f}",
                f"{np.mean([r['curve'][-1]['seconds'] for r in found[arm] if r['curve']]):.0f}",
                str(sum(r["failed"] for r in found[arm])),
            ]
            for arm in own
        ]  # fmt: skip
        for arm in own:
            if arm.method in ON_ALL or arm.replay_share:
                curve(panel, list(arm.tested_after), points[arm], f"{_label(arm)}, {arm.uses}x", marker="o", ms=3)
        panel.set(xlabel="completions sampled", ylabel="pass@1 (%)", title=base)
        header = ["method", "uses", "rate", "pass@1 (%)", f"completions for {100 * target:.1f} %", "seconds", "failed"]
        verdicts.append(
            Verdict(
                f"Online, {base}: pass@1 by completions sampled, each method at its own best rate",
                "",
                f"after {COMPLETIONS:,} completions, half as many where they are used 16 times; {REFERENCE} reaches "
                f"{100 * target:.1f} % at best",
                MEASURED,
                picture="online.png",
                details=markdown_table(header, rows),
            )
        )
    axes[0].legend(fontsize=6)
    save(picture, out, "online")
    return verdicts
