"""Figure 9: what part of the effective weight questions of each difficulty have, as the baseline c varies."""

from itertools import pairwise
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
    return [{"claim": "difficulty", "profile": profile.name, "seed": 0}]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    generations = GENERATIONS if profile.seeds > 1 else profile.candidates
    rows = candidates("main", profile, cell["seed"], generations)
    # Half of the generations measure the difficulty, the other half are the data set: no row counts itself.
    position = np.array([np.sum(rows.groups[:i][-generations:] == group) for i, group in enumerate(rows.groups)])
    measuring = position % 2 == 0
    accuracy = {g: (rows.rewards[measuring & (rows.groups == g)] > 0).mean() for g in np.unique(rows.groups)}
    bucket = np.array([min(int(accuracy[g] * BUCKETS), BUCKETS - 1) for g in rows.groups[~measuring]])
    rewards = rows.rewards[~measuring]
    weights = {}
    for share in SHARES:
        mass = np.abs(rewards - baseline_for_positive_share(rewards, share))
        by_bucket = np.bincount(bucket, weights=mass, minlength=BUCKETS)
        weights[str(share)] = (by_bucket / by_bucket.sum()).tolist()
    counts = np.bincount([min(int(a * BUCKETS), BUCKETS - 1) for a in accuracy.values()], minlength=BUCKETS)
    return {"weights": weights, "problems": counts.tolist()}


# Report.


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    if not done:
        return []
    result = done[0][1]
    picture, (axes,) = figure(1, 5.4, 3.4)
    places = [f"{10 * b}–{10 * (b + 1)}" for b in range(BUCKETS)]
    colours = colormaps["viridis"].resampled(len(SHARES))
    for i, share in enumerate(SHARES):
        weights = [100 * w for w in result["weights"][str(share)]]
        axes.plot(places, weights, marker="o", ms=3, color=colours(i), label=f"p~ = {share:.0%}")
    axes.set(
        xlabel="right answers of the base model (%)",
        ylabel="effective weight (%)",
        title="Weight of problems by difficulty",
    )
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7.5)
    name = save(picture, profile, "fig9")
    hard = {share: sum(result["weights"][str(share)][:2]) for share in SHARES}
    problems = sum(result["problems"][:2]) / sum(result["problems"])
    falls = all(hard[a] >= hard[b] for a, b in pairwise(SHARES))
    return [
        Verdict(
            "Fig. 9: the higher c (the lower p~), the more weight difficult problems have",
            "curves",
            f"problems that the base model solves in under 20 % of tries ({problems:.0%} of all) have this part of the "
            "weight: " + ", ".join(f"p~ {share:.0%}: {100 * hard[share]:.0f} %" for share in SHARES),
            judge(falls),
            "",
            name,
        )
    ]
