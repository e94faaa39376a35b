"""Figure 7: plain importance sampling against TOPR at the same rates, gradient clip 1 and 100, 60% negatives."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.claims import base
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import BATCH_ROWS, Profile, base_model, candidates, evaluate, summary
from benchmarks.statistics import Interval, Measured, difference, interval
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge, markdown_table, not_seen
from topr_trl import curate

CLIPS = (1.0, 100.0)
METHODS = ("topr", "opr")


def rates(profile: Profile, store: Store) -> tuple[float, ...]:
    """TOPR's own and the next of the grid: the paper changes nothing but the weights."""
    grid = profile.learning_rates
    own = grid.index(best(store, profile, "topr"))
    return grid[own : own + 2]


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
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
    last: dict[tuple[str, float, float], Measured] = {}
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
                last[rival, clip, rate] = {
                    c["seed"]: (r["curve"][-1]["pass@1"], r["curve"][-1]["error"])
                    for c, r in done
                    if (c["rival"], c["clip"], c["learning_rate"]) == (rival, clip, rate)
                }
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
        axes.set(xlabel="optimizer steps")
    panels[0].legend(fontsize=7.5)
    name = save(picture, out, "fig7")

    def row(rival: str, clip: float, rate: float) -> list[str]:
        shown = [ends[rival, clip, rate, what].percent() for what in ("pass@1", "invalid")]
        return [RIVALS[rival].label, f"{rate:g}", f"{clip:g}", *shown, f"{norms[rival, clip, rate]:.2g}"]

    loose = {r: difference(last["opr", CLIPS[1], r], last["opr", CLIPS[0], r]) for r in (own, high)}
    parts = {
        "TOPR improves at clip 100": all(
            ends["topr", CLIPS[1], r, "pass@1"].low > start["pass@1"] for r in (own, high)
        ),
        "plain IS ends below the base model at clip 100": any(
            ends["opr", CLIPS[1], r, "pass@1"].high < start["pass@1"] for r in (own, high)
        ),
        "plain IS does worse at clip 100 than at clip 1": any(gap.high < 0 for gap in loose.values()),
    }
    header = ["method", "learning rate", "clip", "pass@1, %", "invalid, %", "largest gradient norm"]
    rows = [["base model", "", "", f"{100 * start['pass@1']:.1f}", f"{100 * start['invalid']:.1f}", ""]]
    rows += [row(rival, clip, rate) for rate in (own, high) for rival in METHODS for clip in CLIPS]
    return [
        Verdict(
            "Fig. 7: with a loose gradient clip plain importance sampling harms the model, TOPR still improves it",
            "31% bad answers with plain IS at clip 100, 12% with the base model",
            f"at TOPR's learning rate, {own:g}, and the next, {high:g}, 60% negatives, {profile.steps} steps. pass@1 "
            "of plain IS at clip 100 minus that at clip 1: "
            + ", ".join(f"{gap.percent(signed=True)} points (rate {r:g})" for r, gap in loose.items())
            + not_seen(parts),
            judge(*parts.values()),
            f"What breaks plain IS here is the learning rate, with either clip: few of its gradients are above 1, and "
            f"none of TOPR's. And 60% negatives is not much: of the base model's own answers "
            f"{1 - start['pass@1']:.0%} are negative, in the paper a third.",
            name,
            markdown_table(header, rows),
        )
    ]
