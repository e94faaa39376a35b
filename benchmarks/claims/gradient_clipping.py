"""Figure 7: plain importance sampling against TOPR at the same rates, gradient clip 1 and 100, 60 % negatives."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.claims import base
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import BATCH_ROWS, Profile, base_model, candidates, evaluate, summary
from benchmarks.statistics import Interval, interval
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge, markdown_table
from topr_trl import curate

CLIPS = (1.0, 100.0)
METHODS = ("topr", "opr")


def rates(profile: Profile, store: Store) -> tuple[float, ...]:
    """TOPR's own and the next of the grid: the paper changes nothing but the weights."""
    grid = profile.learning_rates
    own = grid.index(best(store, profile, "topr"))
    return grid[own : own + 2]


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    return [
        {"claim": "gradient_clipping", "rival": rival, "clip": clip, "seed": seed, "learning_rate": rate}
        for seed in range(profile.seeds)
        for rate in rates(profile, store)
        for rival in METHODS
        for clip in CLIPS
    ]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    pool = candidates("main", profile, cell["seed"])
    size = profile.steps * BATCH_ROWS
    rows = pool[curate(pool.rewards, pool.groups, "positive_share", size, 0.4, seed=cell["seed"]).indices]
    objective = RIVALS[cell["rival"]].make(model, rows, pool)

    def measure(step: int) -> dict[str, float]:
        return summary(evaluate(model, "main", profile, seed=cell["seed"]))

    at = (profile.steps // 2, profile.steps)
    return train(model, objective, profile.steps, cell["learning_rate"], cell["seed"], at, measure, cell["clip"])


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))
    start, (own, high) = base.point(store, profile), rates(profile, store)
    picture, panels = figure(4, 3.4, 3.3)
    ends: dict[tuple[str, float, float, str], Interval] = {}
    norms: dict[tuple[str, float, float], float] = {}
    for place, rate in enumerate((own, high)):
        for rival in METHODS:
            for clip, style in zip(CLIPS, ("-", "--"), strict=True):
                runs = [r for c, r in done if (c["rival"], c["clip"], c["learning_rate"]) == (rival, clip, rate)]
                label = f"{RIVALS[rival].label}, clip {clip:g}"
                steps = [0] + [point["step"] for point in runs[0]["curve"]]
                for what in ("pass@1", "invalid"):
                    points = [Interval(start[what], 0.0)]
                    points += [interval([r["curve"][i][what] for r in runs]) for i in range(len(steps) - 1)]
                    ends[rival, clip, rate, what] = points[-1]
                    if what == "invalid":
                        curve(panels[2 * place], steps, points, label, color=COLOURS[rival], ls=style)
                norms[rival, clip, rate] = float(np.max([r["gradient_norms"] for r in runs]))
                trace = np.median([r["gradient_norms"] for r in runs], axis=0)
                panels[2 * place + 1].plot(
                    range(1, len(trace) + 1), trace, color=COLOURS[rival], ls=style, label=label, lw=1
                )
        panels[2 * place].set(ylabel="invalid answers (%)", title=f"Invalid answers, rate {rate:g}", ylim=(-2, None))
        panels[2 * place + 1].set(
            yscale="log", title=f"Gradient norm, rate {rate:g}", ylabel="before clipping; median of the seeds"
        )
    for axes in panels:
        axes.set(xlabel="optimiser steps")
    panels[0].legend(fontsize=7.5)
    name = save(picture, out, "fig7")

    def row(rival: str, clip: float, rate: float) -> list[str]:
        shown = [ends[rival, clip, rate, what].percent() for what in ("pass@1", "invalid")]
        return [RIVALS[rival].label, f"{rate:g}", f"{clip:g}", *shown, f"{norms[rival, clip, rate]:.2g}"]

    header = ["", "learning rate", "clip", "pass@1", "invalid", "largest gradient norm"]
    rows = [["base model", "", "", f"{100 * start['pass@1']:.1f}", f"{100 * start['invalid']:.1f}", ""]]
    rows += [row(rival, clip, rate) for rate in (own, high) for rival in METHODS for clip in CLIPS]
    return [
        Verdict(
            "Fig. 7: with a loose gradient clip plain importance sampling harms the model, TOPR still improves it",
            "31 % bad answers with plain IS at clip 100, against 12 % of the base model",
            f"at TOPR's learning rate, {own:g}, and the next, {high:g}, 60 % negatives, {profile.steps} steps",
            judge(
                all(ends["topr", 100.0, rate, "pass@1"].low > start["pass@1"] for rate in (own, high)),
                any(ends["opr", 100.0, rate, "pass@1"].high < start["pass@1"] for rate in (own, high)),
                any(ends["opr", 100.0, rate, "invalid"].low > start["invalid"] for rate in (own, high)),
            ),
            "AdamW divides each step by the size of past gradients, so that a huge gradient cannot make a huge step, "
            "clipped or not; it makes the following steps small instead.",
            name,
            markdown_table(header, rows),
        )
    ]
