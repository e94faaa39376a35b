"""Figure 4: TOPR against positives only, with many generations of each test problem."""

from math import nan
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, summary
from benchmarks.statistics import Interval, Measured, difference, interval, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge

GENERATIONS = 64  # the paper's
MAJ_KS = (1, 2, 4, 8, 16, 32)


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    return [
        {
            "claim": "against_positives", "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival) if rival != "base" else None,
        }
        for seed in range(profile.seeds)
        for rival in (("base",) if seed == 0 else ()) + ("topr", "positives_only")
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    if cell["rival"] != "base":
        rows, pool = epoch_rows("main", profile, cell["seed"])
        objective = RIVALS[cell["rival"]].make(model, rows, pool)
        train(model, objective, profile.steps, cell["learning_rate"], cell["seed"])
    evaluation = evaluate(model, "main", profile, GENERATIONS, cell["seed"], maj_ks=MAJ_KS)
    return {
        **summary(evaluation),
        "maj": {str(k): estimate.value for k, estimate in evaluation.maj_at.items()},
        "cardinality": evaluation.cardinality,
    }


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))
    of = {name: {c["seed"]: r for c, r in done if c["rival"] == name} for name in ("base", "topr", "positives_only")}
    picture, (majority, cardinality) = figure(2, 4.2, 3.4)
    maj = {name: {k: interval([r["maj"][str(k)] for r in runs.values()]) for k in MAJ_KS} for name, runs in of.items()}
    shares = {name: _cardinality(runs) for name, runs in of.items()}
    for name, label in (("base", "base model"), ("positives_only", "positives only"), ("topr", "TOPR")):
        curve(majority, list(MAJ_KS), list(maj[name].values()), label, color=COLOURS[name], marker="o", ms=3)
        places = [x + {"base": -0.27, "positives_only": 0.0, "topr": 0.27}[name] for x in range(len(BINS))]
        heights = [100 * share.mean for share in shares[name]]
        errors = [0 if share.half != share.half else 100 * share.half for share in shares[name]]
        cardinality.bar(
            places, heights, 0.27, yerr=errors, capsize=1.5, color=COLOURS[name], label=label, error_kw={"lw": 0.8}
        )
    majority.set(xscale="log", xlabel="n", ylabel="maj@n (%)", title="Majority of n answers")
    majority.set_xticks(MAJ_KS, [str(k) for k in MAJ_KS])
    majority.minorticks_off()
    majority.legend()
    cardinality.set_xticks(range(len(BINS)), [f"{a}" if a == b else f"{a}–{b}" for a, b in BINS])
    cardinality.set(
        xlabel=f"right answers among {GENERATIONS}", ylabel="test problems (%)", title="How often a problem is solved"
    )
    cardinality.legend()
    name = save(picture, out, "fig4")
    passed = {n: {seed: (r["pass@1"], r["error"]) for seed, r in of[n].items()} for n in ("topr", "positives_only")}
    gap = difference(passed["topr"], passed["positives_only"])
    low = {n: seldom_solved(of[n]) for n in ("topr", "positives_only")}
    gap_low = difference(low["topr"], low["positives_only"])

    def passes(name: str) -> str:
        return over_seeds(passed[name]).percent()

    largest = max(MAJ_KS)
    voted = {n: {seed: (r["maj"][str(largest)], nan) for seed, r in of[n].items()} for n in ("topr", "positives_only")}
    gap_maj = difference(voted["topr"], voted["positives_only"])
    return [
        Verdict(
            "Fig. 4: TOPR is above positives only, in pass@1 and maj@n",
            "TOPR higher on GSM8K and MATH",
            f"pass@1: TOPR {passes('topr')}, positives only {passes('positives_only')} %, difference "
            f"{gap.percent(signed=True)} points; maj@{largest}: TOPR {maj['topr'][largest].percent()}, positives only "
            f"{maj['positives_only'][largest].percent()}, base model {maj['base'][largest].percent()} %, TOPR minus "
            f"positives only {gap_maj.percent(signed=True)} points",
            judge(gap.low > 0, gap_maj.low > 0),
            WHY,
            name,
        ),
        Verdict(
            "Fig. 4: fewer problems with 0–4 right answers of 64 than with positives only",
            "fewer with TOPR",
            f"base model {over_seeds(seldom_solved(of['base'])).percent()} %, TOPR "
            f"{over_seeds(low['topr']).percent()} %, positives only "
            f"{over_seeds(low['positives_only']).percent()} % of the problems, difference "
            f"{gap_low.percent(signed=True)} points",
            judge(gap_low.high < 0),
            WHY,
            name,
        ),
    ]


BINS = ((0, 0), (1, 4), (5, 16), (17, 32), (33, 48), (49, 63), (64, 64))
WHY = (
    "A tiny model that makes random slips: its right answers already teach all that the task needs, while wrong "
    "answers differ from right ones in one digit, and pushing them down also moves what they share with right ones. "
    "At c = 0 negatives have most of the weight here; Fig. 5 and 6 show the share p~ at which TOPR does best. "
    "(Positives only takes all steps here, with its negatives at weight 0; the paper drops them, and takes fewer.)"
)


def _cardinality(runs: dict[int, dict[str, Any]]) -> list[Interval]:
    """Share of problems in each bin."""
    return [
        interval([sum(r["cardinality"][a : b + 1]) / sum(r["cardinality"]) for r in runs.values()]) for a, b in BINS
    ]


def seldom_solved(runs: dict[int, dict[str, Any]]) -> Measured:
    """Share of problems with 0 to 4 right answers, by seed."""
    return {seed: (sum(r["cardinality"][:5]) / sum(r["cardinality"]), nan) for seed, r in runs.items()}
