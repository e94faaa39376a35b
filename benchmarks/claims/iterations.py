"""Figure 8: eight iterations with rows chosen uniformly, positives only, and by the Anna Karenina rule.

Beyond the paper: the share p~ held by an automatic target against a baseline set by hand at the first iteration.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rounds import PROBLEMS, chosen, drawn, train_on
from benchmarks.setting import Profile, base_model, evaluate, summary
from benchmarks.statistics import Interval, difference, interval, over_seeds
from benchmarks.verdicts import MEASURED, Verdict, judge
from topr_trl import effective_positive_share, subtract_baseline
from topr_trl.baseline import baseline_for_positive_share

ITERATIONS, SEEDS = 8, 3
# curation: (completions of each problem, as in the paper), rule
CURATIONS = {"uniform": 16, "positives": 16, "anna_karenina": 64}
TARGET = 0.5  # p~ of the comparison of target and fixed baseline


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    shared = {"claim": "iterations", "learning_rate": best(store, profile, "topr")}
    curations = [
        {**shared, "curation": curation, "share": "none", "seed": seed}
        for seed in range(SEEDS)
        for curation in CURATIONS
    ]
    shares = [
        {**shared, "curation": "uniform", "share": share, "seed": seed}
        for seed in range(SEEDS)
        for share in ("target", "fixed baseline")
    ]
    return curations + shares


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model, seed, baseline = base_model("main"), cell["seed"], 0.0
    count = CURATIONS[cell["curation"]]
    curve = [_point(model, profile, seed)]
    for iteration in range(1, ITERATIONS + 1):
        candidates = drawn(model, "main", count, seed, iteration)
        rows = chosen(candidates, cell["curation"], seed, iteration)
        if cell["share"] == "target" or (cell["share"] == "fixed baseline" and iteration == 1):
            baseline = baseline_for_positive_share(rows.rewards, TARGET)
        rewards = subtract_baseline(rows.rewards, baseline)
        train_on(model, rows, lambda _, rewards=rewards: rewards, cell["learning_rate"], seed, iteration)
        curve.append({
            **_point(model, profile, seed), "rows": len(rows), "baseline": baseline,
            "tokens": sum(map(len, candidates.responses)), "positives": float((rows.rewards > 0).mean()),
            "effective_share": effective_positive_share(rewards),
        })  # fmt: skip
    return {"curve": curve}


def _point(model: Any, profile: Profile, seed: int) -> dict[str, float]:
    evaluation = evaluate(model, "main", replace(profile, test_problems=150), 20, seed, maj_ks=(16,))
    return {**summary(evaluation), "maj@16": evaluation.maj_at[16].value}


# Report.


def _names(cell: Cell) -> set[str]:
    """What a run is called in the report: its curation at c = 0, or how its share is held."""
    return {cell["curation"]} if cell["share"] == "none" else {cell["share"]}


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))
    runs = {name: [r["curve"] for c, r in done if (c["curation"], c["share"]) == (name, "none")] for name in CURATIONS}
    picture, axes = figure(4, 3.4, 3.3)
    labels = {"uniform": "uniform", "positives": "positives only", "anna_karenina": "Anna Karenina"}
    x = list(range(ITERATIONS + 1))

    def series(curves: list[Any], what: str) -> list[Interval]:
        return [interval([run[i][what] for run in curves]) for i in x]

    sampled = axes[2].twinx()
    sampled.set(ylabel="dashed: tokens sampled (millions)")
    sampled.grid(False)
    sampled.spines["right"].set_visible(True)
    for name, curves in runs.items():
        for panel, what in zip(axes, ("pass@1", "maj@16"), strict=False):
            curve(panel, x, series(curves, what), labels[name], color=COLOURS[name], marker="o", ms=3)
        rows = np.cumsum([np.mean([run[i].get("rows", 0) for run in curves]) for i in x])
        tokens = np.cumsum([np.mean([run[i].get("tokens", 0) for run in curves]) for i in x])
        axes[2].plot(x, rows / 1e3, color=COLOURS[name], label=f"{labels[name]}: rows")
        sampled.plot(x, tokens / 1e6, color=COLOURS[name], ls="--")
    ends = {s: [r["curve"] for c, r in done if c["share"] == s] for s in ("target", "fixed baseline")}
    for (held, curves), style in zip(ends.items(), ("-", "--"), strict=True):
        curve(axes[3], x, series(curves, "pass@1"), held, color="#5a189a", ls=style, marker="o", ms=3)
    curve(axes[3], x, series(runs["uniform"], "pass@1"), "c = 0", color=COLOURS["uniform"], marker="o", ms=3)
    sampled.set_ylim(0, 1.5 * sampled.get_ylim()[1])  # else the dashed line lies on the others
    axes[0].set(title="pass@1", ylabel="%")
    axes[1].set(title="maj@16")
    axes[2].set(title="cost so far", ylabel="rows trained on (thousands)")
    axes[3].set(title=f"p~ = {TARGET:.0%}, uniform rows: pass@1")
    for panel in axes:
        panel.set(xlabel="iteration")
        panel.legend(fontsize=7, handlelength=3.5)
    name = save(picture, out, "fig8")
    maj = {c: interval([run[-1]["maj@16"] for run in curves]) for c, curves in runs.items()}
    rows_ = {c: np.mean([sum(p.get("rows", 0) for p in run) for run in curves]) for c, curves in runs.items()}
    tokens_ = {c: np.mean([sum(p.get("tokens", 0) for p in run) for run in curves]) for c, curves in runs.items()}
    ak_share = np.mean([p["positives"] for run in runs["anna_karenina"] for p in run[1:]])
    finals = {
        name: {c["seed"]: (r["curve"][-1]["pass@1"], r["curve"][-1]["error"]) for c, r in done if name in _names(c)}
        for name in (*CURATIONS, "target", "fixed baseline")
    }
    end = {name: over_seeds(final) for name, final in finals.items()}
    of_target = {s: difference(finals["target"], finals[s]).percent(signed=True) for s in ("fixed baseline", "uniform")}
    ak, un = (difference(finals[a], finals[b]) for a, b in (("anna_karenina", "uniform"), ("uniform", "positives")))
    share = {s: np.mean([run[-1]["effective_share"] for run in curves]) for s, curves in ends.items()}
    return [
        Verdict(
            "Fig. 8: over eight iterations Anna Karenina sampling ends above uniform, and uniform above positives only "
            "(wrong answers removed, one pass over the rest), all at one rate",
            "GSM8K pass@1: Anna Karenina 79.6%, uniform 75.4%, positives only lower",
            f"{PROBLEMS} training problems, {SEEDS} seeds, at the learning rate that is best for TOPR on uniform rows; "
            f"base model: pass@1 {series(runs['uniform'], 'pass@1')[0].percent()}, maj@16 "
            f"{series(runs['uniform'], 'maj@16')[0].percent()}%; "
            + "; ".join(
                f"{labels[c]}: pass@1 {end[c].percent()}, maj@16 {maj[c].percent()}%, {rows_[c]:,.0f} rows, "
                f"{tokens_[c] / 1e6:.1f} million tokens sampled"
                for c in runs
            )
            + f"; Anna Karenina minus uniform {ak.percent(signed=True)}, uniform minus positives only "
            f"{un.percent(signed=True)} points of pass@1",
            judge(ak.low > 0, un.low > 0),
            f"Anna Karenina keeps {ak_share:.0%} positives in all iterations, uniform has as many as the model gets "
            "right. On this task TOPR needs most of the weight on positives (Fig. 5), and its learning rate is too "
            "high for so few: at its own best rate it is level with uniform rows on one base model "
            "([the long run](wrong_answers.md#long-run)).",
            name,
        ),
        Verdict(
            "Beyond the paper: an automatic target p~ against a baseline set once by hand",
            "",
            f"uniform rows, p~ = {TARGET:.0%} at the first iteration; after {ITERATIONS}: "
            + "; ".join(f"{s}: pass@1 {end[s].percent()}%, p~ now {share[s]:.0%}" for s in ends)
            + f"; c = 0: {end['uniform'].percent()}%. Target minus fixed baseline {of_target['fixed baseline']}, "
            f"target minus c = 0 {of_target['uniform']} points. As the model gets better, a fixed share gives its few "
            "mistakes more and more weight. `topr iterate` holds this share by default",
            MEASURED,
            "",
            name,
            headline=(
                f"**{ITERATIONS} iterations on `main`**, p~ held at {TARGET:.0%}, as `topr iterate` does by default: "
                f"pass@1 minus that with the first iteration's baseline, kept fixed, {of_target['fixed baseline']} "
                f"points, minus that with c = 0 {of_target['uniform']} points; all at the rate that is best for c = 0."
            ),
        ),
    ]
