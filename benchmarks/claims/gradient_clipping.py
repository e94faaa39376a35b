"""Figure 7: plain importance sampling against TOPR, gradient clip 1 and 100, 60 % negatives."""

from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.claims import rivals_compared
from benchmarks.claims.learning_rates import best
from benchmarks.claims.rivals_compared import base_point
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import BATCH_ROWS, Profile, base_model, candidates, evaluate, summary
from benchmarks.statistics import Interval, interval
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge
from topr_trl import curate

CLIPS = (1.0, 100.0)


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    return [
        {
            "claim": "gradient_clipping", "profile": profile.name, "rival": rival, "clip": clip, "seed": seed,
            "learning_rate": best(store, profile, rival),
        }
        for seed in range(profile.seeds)
        for rival in ("topr", "opr")
        for clip in CLIPS
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    rows = candidates("main", profile, cell["seed"])
    rows = rows[
        curate(rows.rewards, rows.groups, "positive_share", profile.steps * BATCH_ROWS, 0.4, seed=cell["seed"]).indices
    ]
    objective = RIVALS[cell["rival"]][1](model, rows)

    def measure(step: int) -> dict[str, float]:
        return summary(evaluate(model, "main", profile, seed=cell["seed"]))

    measure_at = (profile.steps // 2, profile.steps)
    trained = train(
        model, objective, profile.steps, cell["learning_rate"], cell["seed"], measure_at, measure, cell["clip"]
    )
    return {"curve": trained["curve"], "gradient_norms": trained["gradient_norms"]}


# Report.


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    if not done:
        return []
    base = base_point(store.results(rivals_compared.cells(profile, store)))
    picture, (accuracy, invalid, norms) = figure(3, 3.9, 3.3)
    ends = {}
    for rival, colour in (("topr", COLOURS["topr"]), ("opr", COLOURS["opr"])):
        for clip, style in zip(CLIPS, ("-", "--"), strict=True):
            runs = [r for c, r in done if (c["rival"], c["clip"]) == (rival, clip)]
            label = f"{RIVALS[rival][0]}, clip {clip:g}"
            steps = [0] + [point["step"] for point in runs[0]["curve"]]
            for axes, what in ((accuracy, "pass@1"), (invalid, "invalid")):
                points = [interval([r["curve"][i][what] for r in runs]) for i in range(len(steps) - 1)]
                start = [Interval(base[what], 0.0)] if base else []
                curve(axes, steps[1 - len(start) :], start + points, label, color=colour, ls=style)
                ends[rival, clip, what] = points[-1]
            trace = np.median([r["gradient_norms"] for r in runs], axis=0)
            norms.plot(range(1, len(trace) + 1), trace, color=colour, ls=style, label=label, lw=1)
            ends[rival, clip, "norm"] = float(np.max([r["gradient_norms"] for r in runs]))
    accuracy.set(ylabel="pass@1 (%)", title="Accuracy")
    invalid.set(ylabel="invalid answers (%)", title="Invalid answers")
    norms.set(yscale="log", title="Gradient norm before clipping, median of seeds")
    for axes in (accuracy, invalid, norms):
        axes.set(xlabel="optimiser steps")
    accuracy.legend(fontsize=7.5)
    name = save(picture, profile, "fig7")

    def said(rival: str, clip: float) -> str:
        return (
            f"{RIVALS[rival][0]} at clip {clip:g}: pass@1 {ends[rival, clip, 'pass@1'].percent()} %, invalid "
            f"{ends[rival, clip, 'invalid'].percent()} %, largest gradient norm {ends[rival, clip, 'norm']:.2g}"
        )

    start = base["pass@1"] if base else 0.0
    return [
        Verdict(
            "Fig. 7: with a loose gradient clip plain importance sampling harms the model, TOPR still improves it",
            "31 % bad answers against 12 % of the base model with plain IS at clip 100",
            "; ".join(said(rival, clip) for rival in ("topr", "opr") for clip in CLIPS)
            + (f"; base {100 * start:.1f} %, invalid {100 * base['invalid']:.1f} %" if base else ""),
            judge(
                all(ends["topr", clip, "pass@1"].low > start for clip in CLIPS),
                ends["opr", 100.0, "pass@1"].high < start,
                ends["opr", 100.0, "norm"] > 10 * ends["topr", 100.0, "norm"],
            ),
            WHY,
            name,
        )
    ]


WHY = (
    "AdamW divides each step by the size of past gradients, so that a huge gradient cannot make a huge step, clipped "
    "or not; it instead makes the following steps small."
)
