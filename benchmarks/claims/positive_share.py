"""Figures 5 and 6: accuracy against the effective share of positives p~, for p = 10 % and 50 %, TOPR and TIS.

Beyond the paper: p~ reached by choosing rows instead of by the baseline, and the paper's optimum at several rates.
"""

from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.claims import base
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import Direct, tapered
from benchmarks.setting import BATCH_ROWS, Profile, base_model, candidates, evaluate, summary
from benchmarks.statistics import Measured, difference, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge
from topr_trl import baseline_for_positive_share, curate

SHARES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
POSITIVES = (0.1, 0.5)
# p~ by choosing rows, at c = 0: the share of positives is then p~ itself. Where p~ is p the two ways are the same run.
CHOSEN_SHARES = (0.03, 0.2, 0.3, 0.75)
SEEDS = 3
Shares = dict[float, dict[float, Measured]]  # by p and p~


def cells(profile: Profile, store: Store) -> list[Cell]:
    full = profile.seeds > 1
    shared = {"claim": "positive_share"}
    rate = {method: best(store, profile, method) if full else profile.learning_rates[0] for method in ("topr", "tis")}
    by_baseline = [
        {
            **shared,
            "by": "baseline",
            "method": method,
            "p": p,
            "share": share,
            "learning_rate": rate[method],
            "seed": seed,
        }
        for seed in range(SEEDS if full else 1)
        for p in POSITIVES
        for method in ("topr", "tis")
        for share in (SHARES if full else (0.05, 0.5))
    ]
    by_rows = [
        {
            **shared,
            "by": "rows",
            "method": "topr",
            "p": share,
            "share": share,
            "learning_rate": rate["topr"],
            "seed": seed,
        }
        for seed in range(SEEDS if full else 0)
        for share in CHOSEN_SHARES
    ]
    # The same at the other of two rates, to see how the best share depends on the step size.
    other_rate = [
        {**cell, "learning_rate": next(r for r in RATES if r != cell["learning_rate"])}
        for cell in by_baseline
        if full and cell["p"] == POSITIVES[0] and cell["seed"] == 0
    ]
    return by_baseline + by_rows + other_rate


RATES = (3e-5, 1e-4)


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    rows = candidates("main", profile, cell["seed"])
    size = profile.steps * BATCH_ROWS
    rows = rows[curate(rows.rewards, rows.groups, "positive_share", size, cell["p"], seed=cell["seed"]).indices]
    # With one sign only there is nothing to solve, and nothing to set.
    baseline = baseline_for_positive_share(rows.rewards, cell["share"]) if cell["by"] == "baseline" else 0.0
    objective = Direct(model, rows, tapered(cell["method"]), lambda rows: rows.rewards - baseline)
    train(model, objective, profile.steps, cell["learning_rate"], cell["seed"])
    return {**summary(evaluate(model, "main", profile, seed=cell["seed"])), "baseline": baseline, "rows": len(rows)}


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done, start = store.results(cells(profile, store)), base.point(store, profile)
    rate = {cell["method"]: cell["learning_rate"] for cell, _ in reversed(done)}  # the first: each method's best

    def points(by: str, method: str, p: float | None, learning_rate: float | None = None) -> dict[float, Measured]:
        wanted = (by, method, learning_rate or rate[method])
        found: dict[float, Measured] = {}
        for cell, result in done:
            if (cell["by"], cell["method"], cell["learning_rate"]) == wanted and p in (None, cell["p"]):
                found.setdefault(cell["share"], {})[cell["seed"]] = (result["pass@1"], result["error"])
        return dict(sorted(found.items()))

    topr, tis = ({p: points("baseline", method, p) for p in POSITIVES} for method in ("topr", "tis"))
    rows = points("rows", "topr", None) | {p: topr[p][p] for p in POSITIVES if p in topr[p]}
    rows = dict(sorted(rows.items()))
    name = _picture(out, points, topr, tis, rows, start)
    if profile.seeds == 1:
        return []
    return [
        *_best_share(topr, name),
        *_topr_and_tis(topr[POSITIVES[0]], tis[POSITIVES[0]], start, name),
        _by_rows(rows, topr[POSITIVES[0]], name),
    ]


def _picture(
    out: Path, points: Any, topr: Shares, tis: Shares, rows: dict[float, Measured], start: dict[str, float]
) -> str:
    picture, axes = figure(3, 3.9, 3.4)

    def draw(panel: Any, line: dict[float, Measured], label: str, **style: Any) -> None:
        if line:
            curve(panel, list(line), [over_seeds(m) for m in line.values()], label, marker="o", ms=3, **style)

    for p, style in zip(POSITIVES, ("-", "--"), strict=True):
        draw(axes[0], topr[p], f"TOPR, p = {p:.0%}", color=COLOURS["topr"], ls=style)
        draw(axes[0], tis[p], f"TIS, p = {p:.0%}", color=COLOURS["tis"], ls=style)
        draw(axes[1], topr[p], f"by c, p = {p:.0%}", color=COLOURS["topr"], ls=style)
    draw(axes[1], rows, "by choosing rows, c = 0", color=COLOURS["anna_karenina"])
    for rate, style in zip(RATES, ("--", "-"), strict=True):
        for method, label in (("topr", "TOPR"), ("tis", "TIS")):
            line = points("baseline", method, POSITIVES[0], rate)
            draw(axes[2], line, f"{label}, rate {rate:g}", color=COLOURS[method], ls=style)
    axes[0].set(title="Fig. 5 and 6: p~ set by the baseline", ylabel="pass@1 (%)")
    axes[1].set(title="TOPR: p~ by c against p~ by rows")
    axes[2].set(title=f"p = {POSITIVES[0]:.0%}, two learning rates")
    for panel in axes:
        panel.axhline(100 * start["pass@1"], color=COLOURS["base"], ls=":", label="base model")
        panel.set(xscale="log", xlabel="effective share of positives p~", ylim=(-2, None))
        panel.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1 %", "3 %", "10 %", "30 %", "100 %"])
        panel.minorticks_off()
        panel.legend(fontsize=7)
    return save(picture, out, "fig5-6")


def _best_share(topr: Shares, name: str) -> list[Verdict]:
    top = {p: max(topr[p], key=lambda share: over_seeds(topr[p][share]).mean) for p in POSITIVES}
    level = {
        p: [s for s in topr[p] if s != top[p] and difference(topr[p][top[p]], topr[p][s]).low <= 0] for p in POSITIVES
    }
    fall = {p: difference(topr[p][0.5], topr[p][1.0]) for p in POSITIVES}
    return [
        Verdict(
            "Fig. 5: accuracy is highest at p~ of 10–20 %, whatever p is",
            "10–20 % on GSM8K, for p = 10 % and 50 %",
            "; ".join(
                f"p = {p:.0%}: highest at p~ = {top[p]:.0%} ({over_seeds(topr[p][top[p]]).percent()} %), not to be "
                f"told from it: {', '.join(f'{s:.0%}' for s in level[p]) or 'none'}"
                for p in POSITIVES
            ),
            judge(*(0.1 <= top[p] <= 0.2 for p in POSITIVES)),
            "How much weight negatives bear depends on the learning rate and on how far π moves. Within an epoch this "
            "small model moves further from μ than 8 billion parameters at 5e-7, and its negatives need less weight.",
            name,
        ),
        Verdict(
            "Fig. 5: past p~ = 50 % accuracy falls",
            "a fall towards 100 %, positives only",
            "pass@1 at p~ = 50 % less that at 100 %: "
            + "; ".join(f"p = {p:.0%}: {fall[p].percent(signed=True)} points" for p in POSITIVES),
            judge(*(gap.low > 0 for gap in fall.values())),
            "See Fig. 4: on this task positives alone teach nearly all.",
            name,
        ),
    ]


def _topr_and_tis(
    topr: dict[float, Measured], tis: dict[float, Measured], start: dict[str, float], name: str
) -> list[Verdict]:
    few = [share for share in topr if share <= 0.2]
    best_ = {method: max(over_seeds(m).mean for m in line.values()) for method, line in (("TOPR", topr), ("TIS", tis))}
    return [
        Verdict(
            "Fig. 6: TOPR is robust at low p~, where TIS fails",
            "curves at p = 10 %",
            f"p = 10 %, base model {100 * start['pass@1']:.1f} %, pass@1 of TOPR / TIS: "
            + ", ".join(f"p~ {s:.0%}: {over_seeds(topr[s]).percent()} / {over_seeds(tis[s]).percent()}" for s in topr),
            judge(
                all(over_seeds(topr[s]).mean > start["pass@1"] for s in few if s >= 0.1),
                all(difference(topr[s], tis[s]).low > 0 for s in few),
            ),
            "",
            name,
        ),
        Verdict(
            "Fig. 6: at its best share TIS is as good as TOPR or slightly better",
            "slightly higher on GSM8K",
            f"best of the curve: TOPR {100 * best_['TOPR']:.1f} %, TIS {100 * best_['TIS']:.1f} %",
            judge(best_["TIS"] >= best_["TOPR"] - 0.01),
            "",
            name,
        ),
    ]


def _by_rows(rows: dict[float, Measured], topr: dict[float, Measured], name: str) -> Verdict:
    both = [share for share in rows if share in topr and share != POSITIVES[0]]
    seeds = sorted(topr[both[0]])
    gaps = {seed: (float(np.mean([rows[s][seed][0] - topr[s][seed][0] for s in both])), nan) for seed in seeds}
    gap = over_seeds(gaps)
    return Verdict(
        "A share reached by choosing rows is slightly better than the same share by c",
        "slightly higher",
        "p~ by rows / by c (p = 10 %): "
        + ", ".join(f"{s:.0%}: {over_seeds(rows[s]).percent()} / {over_seeds(topr[s]).percent()}" for s in both)
        + f"; difference on average {gap.percent(signed=True)} points",
        judge(gap.low > 0),
        "",
        name,
    )
