"""Figure 9: what part of the effective weight questions of each difficulty have, as the baseline c varies."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from benchmarks.cells import Cell, Store
from benchmarks.pictures import figure, save
from benchmarks.setting import Profile, candidates
from benchmarks.verdicts import Verdict, judge
from topr_trl import baseline_for_positive_share

GENERATIONS = 64
SHARES = (0.01, 0.1, 0.2, 0.5, 0.9, 1.0)
BUCKETS = 10


def cells(profile: Profile, store: Store) -> list[Cell]:
    return [{"claim": "difficulty", "seed": seed} for seed in range(min(profile.seeds, 3))]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    generations = GENERATIONS if not profile.is_quick else profile.candidates
    rows = candidates("main", profile, cell["seed"], generations)
    # Half of the generations measure the difficulty, the other half are the data set: no row counts itself.
    position = np.array([np.sum(rows.groups[:i][-generations:] == group) for i, group in enumerate(rows.groups)])
    measuring = position % 2 == 0
    accuracy = {g: (rows.rewards[measuring & (rows.groups == g)] > 0).mean() for g in np.unique(rows.groups)}
    bucket = np.array([min(int(accuracy[g] * BUCKETS), BUCKETS - 1) for g in rows.groups[~measuring]])
    rewards = rows.rewards[~measuring]
    problems = np.bincount([min(int(a * BUCKETS), BUCKETS - 1) for a in accuracy.values()], minlength=BUCKETS)
    weights = {}
    for share in SHARES:
        mass = np.abs(rewards - baseline_for_positive_share(rewards, share))
        a_problem = np.bincount(bucket, weights=mass, minlength=BUCKETS) / np.maximum(problems, 1)
        weights[str(share)] = (a_problem / a_problem.sum()).tolist()
    return {"weights": weights, "problems": problems.tolist()}


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    results = [result for _, result in store.results(cells(profile, store))]
    problems = np.sum([result["problems"] for result in results], axis=0)
    shown = [bucket for bucket in range(BUCKETS) if problems[bucket] >= 5]
    # Of what the shown buckets have together, in each seed.
    kept = {share: [np.array(result["weights"][str(share)]) for result in results] for share in SHARES}
    weights = {share: np.mean([w / w[shown].sum() for w in runs], axis=0) for share, runs in kept.items()}
    picture, (axes,) = figure(1, 5.4, 3.4)
    colours = colormaps["viridis"].resampled(len(SHARES))
    for i, share in enumerate(SHARES):
        places = [f"{10 * b}–{10 * (b + 1)}" for b in shown]
        axes.plot(places, 100 * weights[share][shown], marker="o", ms=3, color=colours(i), label=f"p~ = {share:.0%}")
    axes.set(
        xlabel="right answers of the base model (%)", ylabel="weight of a problem (%)",
        title="Average effective weight of a problem, by difficulty",
    )  # fmt: skip
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7.5)
    hardest, easiest = shown[0], shown[-1]
    ratio = {share: weights[share][hardest] / weights[share][easiest] for share in SHARES}
    return [
        Verdict(
            "Fig. 9: the higher c (the lower p~), the more weight difficult problems have",
            "the lower p~, the more weight difficult problems have",
            f"computed on the base model's completions, {len(results)} seeds: weight of a problem that the base "
            f"model solves in under {10 * (hardest + 1)}% of its tries, divided by "
            f"that of one solved in {10 * easiest}–{10 * (easiest + 1)}% ({problems[hardest]} and {problems[easiest]} "
            "problems): " + ", ".join(f"p~ {share:.0%}: {ratio[share]:.2f}" for share in SHARES),
            judge(all(ratio[a] > ratio[b] for a, b in pairwise(SHARES))),
            "",
            save(picture, out, "fig9"),
        )
    ]
