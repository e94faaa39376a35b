"""What it costs in accuracy that `topr iterate --overlap N` trains on rows of a model N iterations older."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arms import after_baseline
from benchmarks.cells import Cell, Store
from benchmarks.pictures import curve, figure, save
from benchmarks.rounds import PROBLEMS, chosen, drawn, train_on
from benchmarks.rows import Rows
from benchmarks.setting import Profile, base_model, evaluate, model_hash, summary
from benchmarks.statistics import Measured, difference, interval, over_seeds
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("main", "misconception-10")
OVERLAPS, SEEDS = (0, 1, 2), 5
ITERATIONS, CANDIDATES, RATE = 8, 16, 1e-4


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    return [
        {"claim": "overlapped", "base": base, "weights": model_hash(base), "overlap": overlap, "seed": seed}
        for base in BASES
        for seed in range(SEEDS)
        for overlap in OVERLAPS
    ]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Every iteration has the same number of candidates, and log μ of those who wrote them."""
    base, seed, model = cell["base"], cell["seed"], base_model(cell["base"])

    def written(iteration: int) -> Rows:
        return chosen(drawn(model, base, CANDIDATES, seed, iteration), "uniform", seed, iteration)

    waiting = deque(written(iteration) for iteration in range(1, cell["overlap"] + 2))
    points = []
    for iteration in range(1, ITERATIONS + 1):
        rows = waiting.popleft()
        train_on(model, rows, lambda rows: after_baseline(rows, 0.5), RATE, seed, iteration)
        evaluation = evaluate(model, base, replace(profile, test_problems=150), 20, seed, maj_ks=(16,))
        points.append({**summary(evaluation), "maj@16": evaluation.maj_at[16].value})
        if (later := iteration + cell["overlap"] + 1) <= ITERATIONS:
            waiting.append(written(later))
    return {"curve": points}


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))

    def measured(base: str, overlap: int, place: int) -> Measured:
        return {
            cell["seed"]: (result["curve"][place]["pass@1"], result["curve"][place]["error"])
            for cell, result in done
            if (cell["base"], cell["overlap"]) == (base, overlap)
        }

    picture, axes = figure(len(BASES), 3.8, 3.2)
    for panel, base in zip(axes, BASES, strict=True):
        for overlap in OVERLAPS:
            points = [over_seeds(measured(base, overlap, place)) for place in range(ITERATIONS)]
            curve(panel, list(range(1, ITERATIONS + 1)), points, f"overlap {overlap}", marker="o", ms=3)
        panel.set(xlabel="iteration", ylabel="pass@1 (%)", title=base)
    axes[0].legend()
    voted = {
        (base, overlap): interval(
            [r["curve"][-1]["maj@16"] for c, r in done if (c["base"], c["overlap"]) == (base, overlap)]
        )
        for base in BASES
        for overlap in OVERLAPS
    }
    rows = [
        [
            base, str(overlap), *(over_seeds(measured(base, overlap, place)).percent() for place in (1, 3, -1)),
            voted[base, overlap].percent(),
            ""
            if overlap == 0
            else difference(measured(base, overlap, -1), measured(base, 0, -1)).percent(signed=True),
        ]
        for base in BASES
        for overlap in OVERLAPS
    ]  # fmt: skip
    header = ["base model", "overlap", "pass@1 after 2 iterations (%)", "after 4", f"after {ITERATIONS}",
              f"maj@16 after {ITERATIONS}", f"pass@1 minus that without overlap, after {ITERATIONS}"]  # fmt: skip
    return [
        Verdict(
            "Sampling beside training: rows by a model that is one or two iterations older",
            "",
            f"p~ = 50%, rate {RATE:g}, {PROBLEMS * CANDIDATES:,} completions in each iteration; with overlap N the "
            "rows of an iteration are by the model of N iterations before the newest",
            MEASURED,
            picture=save(picture, out, "overlapped"),
            details=markdown_table(header, rows),
        )
    ]
