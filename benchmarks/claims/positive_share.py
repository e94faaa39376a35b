"""Figures 5 and 6: accuracy against the effective share of positives p~, for p = 10% and 50%, TOPR and TIS.

Both methods at the same two learning rates, the best of each at its natural share: the paper changes the weights only,
and where negatives bear more weight a rate that was good can be too high.
Beyond the paper: p~ reached by choosing rows instead of by the baseline.
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
from benchmarks.verdicts import Verdict, judge, markdown_table
from topr_trl import baseline_for_positive_share, curate

SHARES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
POSITIVES = (0.1, 0.5)
METHODS = {"topr": "TOPR", "tis": "TIS"}
# p~ by choosing rows, at c = 0: the share of positives is then p~ itself. Where p~ is p the two ways are the same run.
CHOSEN_SHARES = (0.03, 0.2, 0.3, 0.75)
SEEDS = 3

Curve = dict[float, Measured]  # by p~


def rates(profile: Profile, store: Store) -> list[float]:
    """TOPR's best and TIS's best, the lower first."""
    return sorted({best(store, profile, method) for method in METHODS})


def cells(profile: Profile, store: Store) -> list[Cell]:
    full = not profile.is_quick
    shared = {"claim": "positive_share"}
    by_baseline = [
        {**shared, "by": "baseline", "method": method, "p": p, "share": share, "learning_rate": rate, "seed": seed}
        for seed in range(SEEDS if full else 1)
        for rate in rates(profile, store)
        for p in POSITIVES
        for method in METHODS
        for share in (SHARES if full else (0.05, 0.5))
    ]
    rate = best(store, profile, "topr")
    by_rows = [
        {**shared, "by": "rows", "method": "topr", "p": share, "share": share, "learning_rate": rate, "seed": seed}
        for seed in range(SEEDS if full else 0)
        for share in CHOSEN_SHARES
    ]
    return by_baseline + by_rows


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
    own, both = best(store, profile, "topr"), rates(profile, store)

    def points(by: str, method: str, p: float | None, rate: float) -> Curve:
        found: Curve = {}
        for cell, result in done:
            same = (cell["by"], cell["method"], cell["learning_rate"]) == (by, method, rate)
            if same and p in (None, cell["p"]):
                found.setdefault(cell["share"], {})[cell["seed"]] = (result["pass@1"], result["error"])
        return dict(sorted(found.items()))

    curves = {(m, p, r): points("baseline", m, p, r) for m in METHODS for p in POSITIVES for r in both}
    by_c = {p: curves["topr", p, own] for p in POSITIVES}
    rows = points("rows", "topr", None, own) | {p: by_c[p][p] for p in POSITIVES if p in by_c[p]}
    rows = dict(sorted(rows.items()))
    name = _picture(out, curves, by_c, rows, both, start)
    if profile.is_quick:
        return []
    return [
        *_best_share(by_c, name),
        *_topr_and_tis({(m, r): curves[m, POSITIVES[0], r] for m in METHODS for r in both}, both, start, name),
        _by_rows(rows, by_c[POSITIVES[0]], name),
    ]


def _picture(
    out: Path,
    curves: dict[Any, Curve],
    by_c: dict[float, Curve],
    rows: Curve,
    both: list[float],
    start: dict[str, float],
) -> str:
    picture, axes = figure(len(both) + 1, 3.9, 3.4)

    def draw(panel: Any, line: Curve, label: str, **style: Any) -> None:
        curve(panel, list(line), [over_seeds(m) for m in line.values()], label, marker=".", ms=4, **style)

    for panel, rate in zip(axes, both, strict=False):
        for p, style in zip(POSITIVES, ("-", "--"), strict=True):
            for method, label in METHODS.items():
                draw(panel, curves[method, p, rate], f"{label}, p = {p:.0%}", color=COLOURS[method], ls=style)
        panel.set(title=f"p~ set by the baseline, learning rate {rate:g}")
    for p, style in zip(POSITIVES, ("-", "--"), strict=True):
        draw(axes[-1], by_c[p], f"by c, p = {p:.0%}", color=COLOURS["topr"], ls=style)
    draw(axes[-1], rows, "by choosing rows, c = 0", color=COLOURS["anna_karenina"])
    axes[-1].set(title="TOPR: p~ by c against p~ by rows")
    axes[0].set(ylabel="pass@1 (%)")
    for panel in axes:
        panel.axhline(100 * start["pass@1"], color=COLOURS["base"], ls=":", label="base model")
        panel.set(xscale="log", xlabel="effective share of positives p~", ylim=(-2, 52))
        panel.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1%", "3%", "10%", "30%", "100%"])
        panel.minorticks_off()
        panel.legend(fontsize=7, handlelength=3.5)
    return save(picture, out, "fig5-6")


def _best_share(topr: dict[float, Curve], name: str) -> list[Verdict]:
    top = {p: max(topr[p], key=lambda share: over_seeds(topr[p][share]).mean) for p in POSITIVES}
    level = {
        p: [s for s in topr[p] if s != top[p] and difference(topr[p][top[p]], topr[p][s]).low <= 0] for p in POSITIVES
    }
    fall = {p: difference(topr[p][0.5], topr[p][1.0]) for p in POSITIVES}
    return [
        Verdict(
            "Fig. 5: accuracy is highest at p~ of 10–20%, whatever p is",
            "10–20% on GSM8K, for p = 10% and 50%",
            "at TOPR's learning rate, "
            + "; ".join(
                f"p = {p:.0%}: highest at p~ = {top[p]:.0%} ({over_seeds(topr[p][top[p]]).percent()}%), not "
                f"distinguishable from it: {', '.join(f'{s:.0%}' for s in level[p]) or 'none'}"
                for p in POSITIVES
            ),
            judge(*(0.1 <= top[p] <= 0.2 for p in POSITIVES)),
            "On this task right answers alone teach nearly everything (Fig. 4), at both learning rates, and negatives "
            "take weight from them.",
            name,
        ),
        Verdict(
            "Fig. 5: past p~ = 50% accuracy falls (at 100%: positives only, as many steps)",
            "a fall towards 100%, positives only",
            "pass@1 at p~ = 50% minus that at 100%: "
            + "; ".join(f"p = {p:.0%}: {fall[p].percent(signed=True)} points" for p in POSITIVES),
            judge(*(gap.low > 0 for gap in fall.values())),
            "See Fig. 4: with as many steps, positives alone teach nearly everything on this task.",
            name,
        ),
    ]


def _topr_and_tis(
    curves: dict[tuple[str, float], Curve], both: list[float], start: dict[str, float], name: str
) -> list[Verdict]:
    table = [
        [f"{rate:g}", label, *(over_seeds(curves[method, rate][share]).percent() for share in SHARES)]
        for rate in both
        for method, label in METHODS.items()
    ]
    few = [share for share in SHARES if share < 0.3]
    tops = {m: max((p for r in both for p in curves[m, r].values()), key=lambda p: over_seeds(p).mean) for m in METHODS}
    gap = difference(tops["tis"], tops["topr"])
    kept = {m: min(over_seeds(curves[m, r][s]).mean for r in both for s in (0.1, 0.2)) for m in METHODS}
    return [
        Verdict(
            "Fig. 6: TOPR is robust at low p~, where TIS fails",
            "at p = 10% TOPR keeps its accuracy at low p~, TIS does not",
            f"p = 10%, pass@1 (%) by p~ in the table, base model {100 * start['pass@1']:.1f}%. TOPR minus TIS: "
            + "; ".join(
                f"at rate {r:g}: "
                + ", ".join(
                    f"{difference(curves['topr', r][s], curves['tis', r][s]).percent(signed=True)} (p~ {s:.0%})"
                    for s in (0.1, 0.2)
                )
                for r in both
            )
            + " points",
            judge(
                all(
                    difference(curves["topr", r][s], curves["tis", r][s]).low > 0 for r in both for s in few if s >= 0.1
                ),
                kept["topr"] > start["pass@1"],
                kept["tis"] < start["pass@1"],
            ),
            "At the lower rate neither fails, and they cannot be told apart. At the higher one TIS collapses where "
            "TOPR keeps most, but where nearly all of the weight is negative the taper only slows TOPR's fall.",
            name,
            markdown_table(["learning rate", "method", *(f"p~ {share:.0%}" for share in SHARES)], table),
        ),
        Verdict(
            "Fig. 6: at its best share TIS is as good as TOPR or slightly better",
            "slightly higher on GSM8K",
            f"highest points at p = 10%: TOPR {over_seeds(tops['topr']).percent()}%, TIS "
            f"{over_seeds(tops['tis']).percent()}%; TIS minus TOPR {gap.percent(signed=True)} points"
            + (": they cannot be told apart" if gap.low <= 0 <= gap.high else ""),
            judge(gap.high > 0),
            "",
            name,
        ),
    ]


def _by_rows(rows: Curve, by_c: Curve, name: str) -> Verdict:
    both = [share for share in rows if share in by_c and share != POSITIVES[0]]
    gaps = {
        seed: (float(np.mean([rows[share][seed][0] - by_c[share][seed][0] for share in both])), nan)
        for seed in range(SEEDS)
    }
    gap = over_seeds(gaps)
    return Verdict(
        "A share reached by choosing rows is slightly better than the same share by c",
        "slightly higher, consistently",
        "pass@1 by rows minus that by c (p = 10%): "
        + ", ".join(f"p~ {s:.0%}: {difference(rows[s], by_c[s]).percent(signed=True)}" for s in both)
        + f"; on average {gap.percent(signed=True)} points",
        judge(gap.low > 0, all(difference(rows[s], by_c[s]).mean > 0 for s in both)),
        "The gain is at the high shares, where choosing rows has several times as many different right answers as "
        "p = 10% of the rows weighted up.",
        name,
    )
