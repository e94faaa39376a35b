"""Figure 4: TOPR against positives only by each protocol, with many generations of each test problem."""

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, summary
from benchmarks.statistics import Interval, Measured, difference, interval, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict, judge, markdown_table

GENERATIONS = 64  # the paper's
MAJ_KS = (1, 2, 4, 8, 16, 32)
# Beside the rivals `topr` (c = 0) and `positives_only` (by equal steps), which have rates of their own.
ARMS = {
    "removed": Arm("main", 1.0, "removed"),
    "rows": Arm("main", 1.0, "rows"),
    "mean": Arm("main", 0.5),
    "group_mean": Arm("main", "group_mean"),
}
CHOICES: Choices = [{"learning_rate": rate} for rate in arms.ADAMW_RATES]
LABELS = {
    "base": "base model",
    "topr": "TOPR, c = 0 (the paper's)",
    "mean": "TOPR, p~ = 50%",
    "group_mean": "TOPR, group mean",
    "removed": "positives only: wrong answers removed, one pass (the paper's)",
    "steps": "positives only: TOPR's batches, wrong answers at weight 0",
    "rows": "positives only: as many steps, all of right answers",
}


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    rivals = [
        {
            "claim": "against_positives", "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival) if rival != "base" else None,
        }
        for seed in range(profile.seeds)
        for rival in (("base",) if seed == 0 else ()) + ("topr", "positives_only")
    ]  # fmt: skip
    own = []
    for name, arm in ARMS.items():
        try:
            rate = arms.best(store, arm, CHOICES).learning_rate
        except Unfinished:
            continue
        own += [
            {"claim": "against_positives", "rival": name, "seed": seed, "learning_rate": rate}
            for seed in range(profile.seeds)
        ]
    return rivals + arms.planned(store, dict.fromkeys(ARMS.values(), CHOICES), []) + own


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    if cell["claim"] == "arms":
        return arms.work(cell, profile)
    model = base_model("main")
    if cell["rival"] in ARMS:
        arm = replace(ARMS[cell["rival"]], learning_rate=cell["learning_rate"])
        model, _ = arms.trained(arm, profile, cell["seed"])
    elif cell["rival"] != "base":
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
    of: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in LABELS}
    for cell, result in store.results(cells(profile, store)):
        if cell["claim"] == "against_positives":
            name = "steps" if cell["rival"] == "positives_only" else cell["rival"]
            of[name][cell["seed"]] = result
    picture = _picture(of, out)
    largest = max(MAJ_KS)
    passed = {name: {seed: (r["pass@1"], r["error"]) for seed, r in runs.items()} for name, runs in of.items()}
    voted = {name: {seed: (r["maj"][str(largest)], nan) for seed, r in runs.items()} for name, runs in of.items()}
    low = {name: seldom_solved(runs) for name, runs in of.items()}

    def gap(values: dict[str, Measured], name: str = "topr", other: str = "removed") -> Interval:
        return difference(values[name], values[other])

    def said(values: dict[str, Measured]) -> str:
        ours, theirs = (over_seeds(values[name]).percent() for name in ("topr", "removed"))
        return f"TOPR {ours}%, positives only {theirs}%, difference {gap(values).percent(signed=True)} points"

    table = markdown_table(
        ["", "pass@1 (%)", f"maj@{largest} (%)", f"problems with 0-4 right answers of {GENERATIONS} (%)"],
        [
            [LABELS[name], *(over_seeds(values[name]).percent() for values in (passed, voted, low))]
            for name in LABELS
        ],
    )  # fmt: skip
    return [
        Verdict(
            "Fig. 4: TOPR is above positives only (wrong answers removed, one pass over the rest), in pass@1 and maj@n",
            "TOPR higher on GSM8K and MATH",
            f"c = 0; pass@1: {said(passed)}; maj@{largest}: {said(voted)}",
            judge(gap(passed).low > 0, gap(voted).low > 0),
            WHY,
            picture,
        ),
        Verdict(
            "Fig. 4: fewer problems with 0–4 right answers of 64 than with positives only (wrong answers removed, one "
            "pass over the rest)",
            "fewer with TOPR",
            f"c = 0; share of such problems: {said(low)}",
            judge(gap(low).high < 0),
            WHY,
            picture,
        ),
        Verdict(
            "Beyond the paper's Fig. 4: TOPR at higher shares, and positives only by each protocol",
            "",
            f"p~ = 50% minus positives only, points of pass@1 and of maj@{largest}: "
            + "; ".join(
                f"{LABELS[other].partition(': ')[2]} {gap(passed, 'mean', other).percent(signed=True)}, "
                f"{gap(voted, 'mean', other).percent(signed=True)}"
                for other in ("removed", "steps", "rows")
            ),
            MEASURED,
            details=table,
        ),
    ]


def _picture(of: dict[str, dict[int, dict[str, Any]]], out: Path) -> str:
    picture, (majority, cardinality) = figure(2, 4.2, 3.4)
    shown = {
        "base": ("base model", COLOURS["base"]), "removed": ("positives only, one pass", COLOURS["removed"]),
        "steps": ("positives only, equal steps", COLOURS["positives_only"]),
        "rows": ("positives only, repeated", COLOURS["positives_repeated"]),
        "topr": ("TOPR, c = 0", COLOURS["topr"]), "mean": ("TOPR, p~ = 50%", COLOURS["mean"]),
    }  # fmt: skip
    width = 0.8 / len(shown)
    for n, (name, (label, color)) in enumerate(shown.items()):
        runs = list(of[name].values())
        maj = [interval([r["maj"][str(k)] for r in runs]) for k in MAJ_KS]
        curve(majority, list(MAJ_KS), maj, label, color=color, marker="o", ms=3)
        shares = _cardinality(of[name])
        cardinality.bar(
            [x + (n - (len(shown) - 1) / 2) * width for x in range(len(BINS))], [100 * share.mean for share in shares],
            width, yerr=[0 if share.half != share.half else 100 * share.half for share in shares], capsize=1.5,
            color=color, label=label, error_kw={"lw": 0.8},
        )  # fmt: skip
    majority.set(xscale="log", xlabel="n", ylabel="maj@n (%)", title="Majority of n answers")
    majority.set_xticks(MAJ_KS, [str(k) for k in MAJ_KS])
    majority.minorticks_off()
    majority.legend()
    cardinality.set_xticks(range(len(BINS)), [f"{a}" if a == b else f"{a}–{b}" for a, b in BINS])
    cardinality.set(
        xlabel=f"right answers among {GENERATIONS}", ylabel="test problems (%)", title="How often a problem is solved"
    )
    return save(picture, out, "fig4")


BINS = ((0, 0), (1, 4), (5, 16), (17, 32), (33, 48), (49, 63), (64, 64))
WHY = (
    "A tiny model that makes random slips: its right answers already teach all that the task needs, while wrong "
    "answers differ from right ones in one digit, and pushing them down also moves what they share with right ones. "
    "At c = 0 negatives have most of the weight here; Fig. 5 and 6 show the share p~ at which TOPR does best."
)


def _cardinality(runs: dict[int, dict[str, Any]]) -> list[Interval]:
    """Share of problems in each bin."""
    return [
        interval([sum(r["cardinality"][a : b + 1]) / sum(r["cardinality"]) for r in runs.values()]) for a, b in BINS
    ]


def seldom_solved(runs: dict[int, dict[str, Any]]) -> Measured:
    """Share of problems with 0 to 4 right answers, by seed."""
    return {seed: (sum(r["cardinality"][:5]) / sum(r["cardinality"]), nan) for seed, r in runs.items()}
