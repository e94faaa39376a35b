"""Figures 5 and 6: accuracy against the effective share of positives p~, for p = 10 % and 50 %, TOPR and TIS.

Beyond the paper: p~ reached by choosing rows instead of by the baseline, and the paper's optimum at several rates.
"""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import Direct, tapered
from benchmarks.setting import BATCH_ROWS, Profile, base_model, candidates, evaluate, summary
from benchmarks.statistics import Interval, interval
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge
from topr_trl import baseline_for_positive_share, curate

SHARES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
POSITIVES = (0.1, 0.5)
# p~ by choosing rows, at c = 0: the share of positives is then p~ itself.
CHOSEN_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
SEEDS = 3


def cells(profile: Profile, store: Store) -> list[Cell]:
    full = profile.seeds > 1
    shared = {"claim": "positive_share", "profile": profile.name}
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


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    if not done:
        return []
    rate = {cell["method"]: cell["learning_rate"] for cell, _ in reversed(done)}  # the first: each method's best

    def points(by: str, method: str, p: float | None, learning_rate: float | None = None) -> dict[float, Interval]:
        wanted = (by, method, learning_rate or rate[method])
        chosen = [
            (cell["share"], result)
            for cell, result in done
            if (cell["by"], cell["method"], cell["learning_rate"]) == wanted and p in (None, cell["p"])
        ]
        return {
            share: interval(
                [r["pass@1"] for s, r in chosen if s == share], [r["error"] for s, r in chosen if s == share]
            )
            for share in sorted({s for s, _ in chosen})
        }

    picture, axes = figure(3, 3.9, 3.4)
    for p, style in zip(POSITIVES, ("-", "--"), strict=True):
        for method, label in (("topr", "TOPR"), ("tis", "TIS")):
            line = points("baseline", method, p)
            curve(
                axes[0],
                list(line),
                list(line.values()),
                f"{label}, p = {p:.0%}",
                color=COLOURS[method],
                ls=style,
                marker="o",
                ms=3,
            )
    axes[0].set(title="Fig. 5 and 6: p~ set by the baseline", ylabel="pass@1 (%)")
    for (by, p, label), colour in zip(
        (
            ("baseline", 0.1, "by c, p = 10 %"),
            ("baseline", 0.5, "by c, p = 50 %"),
            ("rows", None, "by choosing rows, c = 0"),
        ),
        ("#d1495b", "#edae49", "#30638e"),
        strict=True,
    ):
        line = points(by, "topr", p)
        curve(axes[1], list(line), list(line.values()), label, color=colour, marker="o", ms=3)
    axes[1].set(title="TOPR: p~ by c against p~ by rows")
    rates = sorted({cell["learning_rate"] for cell, _ in done})
    for learning_rate, style in zip(rates, ("-", "--"), strict=False):
        for method, label in (("topr", "TOPR"), ("tis", "TIS")):
            line = points("baseline", method, POSITIVES[0], learning_rate)
            curve(
                axes[2], list(line), list(line.values()), f"{label}, rate {learning_rate:g}",
                color=COLOURS[method], ls=style, marker="o", ms=3,
            )  # fmt: skip
    axes[2].set(title="p = 10 %, two learning rates")
    for a in axes:
        a.set(xscale="log", xlabel="effective share of positives p~")
        a.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1 %", "3 %", "10 %", "30 %", "100 %"])
        a.minorticks_off()
        a.legend(fontsize=7.5)
    name = save(picture, profile, "fig5-6")

    topr, tis = ({p: points("baseline", method, p) for p in POSITIVES} for method in ("topr", "tis"))
    top = {p: max(topr[p], key=lambda share: topr[p][share].mean) for p in POSITIVES}
    # Shares whose interval reaches the best one's mean are as good.
    level = {p: [s for s, point in topr[p].items() if point.high >= topr[p][top[p]].mean] for p in POSITIVES}
    low = min(topr[0.1])
    few = 0.1 if 0.1 in topr[0.1] else low
    verdicts = [
        Verdict(
            "Fig. 5: accuracy is highest at p~ of 10–20 %, whatever p is",
            "10–20 % on GSM8K, for p = 10 % and 50 %",
            "; ".join(
                f"p = {p:.0%}: best at p~ = {top[p]:.0%} ({topr[p][top[p]].percent()} %), as good at "
                + ", ".join(f"{s:.0%}" for s in level[p] if s != top[p])
                for p in POSITIVES
            ),
            judge(*(any(0.1 <= share <= 0.2 for share in level[p]) for p in POSITIVES)),
            WHY_BEST,
            name,
        ),
        Verdict(
            "Fig. 5: lower again past p~ = 50 %",
            "a fall towards 100 %",
            "; ".join(f"p = {p:.0%}: {topr[p][top[p]].percent()} % at best, {topr[p][1.0].percent()} % at p~ = 100 %"
                      for p in POSITIVES if 1.0 in topr[p]),
            judge(*(topr[p][1.0].high < topr[p][top[p]].mean for p in POSITIVES if 1.0 in topr[p])),
            "",
            name,
        ) if 1.0 in topr[0.1] else None,
        Verdict(
            "Fig. 6: TOPR is robust at low p~ where TIS fails",
            "curves at p = 10 %",
            "p = 10 %, pass@1 of TOPR / TIS: "
            + ", ".join(f"p~ {s:.0%}: {topr[0.1][s].percent()} / {tis[0.1][s].percent()}" for s in topr[0.1]),
            judge(topr[0.1][few].low > tis[0.1][few].high),
            "",
            name,
        ),
    ]  # fmt: skip
    rows = points("rows", "topr", None)
    both = [share for share in rows if share in topr[0.1]]
    if both:
        gaps = {share: rows[share].mean - topr[0.1][share].mean for share in both}
        verdicts.append(
            Verdict(
                "A share reached by choosing rows is slightly better than the same share by c",
                "slightly higher",
                "p~ by rows / by c (p = 10 %): "
                + ", ".join(f"{s:.0%}: {rows[s].percent()} / {topr[0.1][s].percent()}" for s in both),
                judge(*(gap > 0 for gap in gaps.values())),
                "",
                name,
            )
        )
    return [verdict for verdict in verdicts if verdict]


WHY_BEST = (
    "How much weight negatives bear depends on the learning rate, on the length of a response and on how far π may "
    "move; a response here has 36 tokens and 80 steps move π far, so negatives need a smaller share than on GSM8K."
)
