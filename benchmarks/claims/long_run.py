"""Figure 8 until nothing moves: many iterations with μ renewed, and what is left of the variety of answers."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import TUNING_SEED, after_baseline
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.pictures import curve, figure, save
from benchmarks.rivals import Direct, tapered
from benchmarks.rows import Rows
from benchmarks.setting import (
    BATCH_ROWS,
    TEST_SEED,
    VALIDATION_SEED,
    Profile,
    base_model,
    model_hash,
    problems,
    sample,
    summary,
)
from benchmarks.statistics import difference, interval
from benchmarks.training import train
from benchmarks.verdicts import Verdict, markdown_table
from topr_trl import curate, evaluate_rows
from topr_trl.curation import ROWS_PER_PROBLEM

BASES = ("misconception-10", "wanders-3")
ITERATIONS, TUNING_ITERATIONS, EVERY, PROBLEMS, SEEDS = 20, 4, 4, 200, 3
RATES, FURTHER = (3e-5, 1e-4, 3e-4), 2  # and rates beyond these, where the best is at an end of them
KS = (1, 4, 16, 64, 256)
REPEATED = "repeated"
# Share of positives and curation, by what a run is called.
RUNS: dict[str, tuple[float | str, str]] = {
    "c = 0": ("p", "uniform"),
    "p~ 50 %": (0.5, "uniform"),
    "group mean": ("group_mean", "uniform"),
    "positives only": (1.0, "positives"),
    "positives, repeated": (1.0, REPEATED),  # as many steps as the others, all of right answers
    "Anna Karenina": ("p", "anna_karenina"),
}


def _cell(base: str, run: str, rate: float, seed: int) -> Cell:
    return {"claim": "long_run", "base": base, "weights": model_hash(base), "run": run, "learning_rate": rate,
            "seed": seed}  # fmt: skip


def _tuned(store: Store, base: str, run: str) -> tuple[list[float], float | None]:
    """The rates that are tried, and the one that ends highest after a few iterations on a seed apart; None as yet."""

    def end(rate: float) -> float | None:
        result = store.get(_cell(base, run, rate, TUNING_SEED))
        return result["curve"][-1]["pass@1"] if result else None

    return arms.best_rate(RATES, FURTHER, end)


def best_rate(store: Store, base: str, run: str) -> float:
    """Of a run.

    Raises:
        Unfinished: not all rates have been tried.
    """
    best = _tuned(store, base, run)[1]
    if best is None:
        raise Unfinished(f"{run} on {base} has not been tuned: run the claim long_run")
    return best


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    found = []
    for base in BASES:
        for run in RUNS:
            rates, best = _tuned(store, base, run)
            found += [_cell(base, run, rate, TUNING_SEED) for rate in rates]
            found += [_cell(base, run, best, seed) for seed in range(SEEDS) if best is not None]
    return found


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    base, seed, (share, curation) = cell["base"], cell["seed"], RUNS[cell["run"]]
    is_tuning = seed == TUNING_SEED
    model, curve_points = base_model(base), []
    count = 64 if curation == "anna_karenina" else 16
    for iteration in range(1, (TUNING_ITERATIONS if is_tuning else ITERATIONS) + 1):
        pool = Rows.of(sample(model, base, problems(base, PROBLEMS, 100 + seed), count, 100 * seed + iteration), model)
        size = round(ROWS_PER_PROBLEM * PROBLEMS)
        rule = "positives" if curation == REPEATED else curation
        chosen = curate(pool.rewards, pool.groups, rule, size, seed=100 * seed + iteration).indices
        rows = pool[np.resize(chosen, size) if curation == REPEATED else chosen]
        objective = Direct(model, rows, tapered("topr"), lambda rows: after_baseline(rows, share))
        train(model, objective, -(-len(rows) // BATCH_ROWS), cell["learning_rate"], 100 * seed + iteration)
        if iteration % EVERY == 0:
            curve_points.append({"iteration": iteration, "sampled": float(len(pool)), **_tested(model, base, seed)})
    end = {} if is_tuning else _end(model, base, seed)
    return {"curve": curve_points, **end}


def _tested(model: Any, base: str, seed: int) -> dict[str, float]:
    split = VALIDATION_SEED if seed == TUNING_SEED else TEST_SEED
    evaluation = evaluate_rows(sample(model, base, problems(base, 150, split), 16, seed), maj_ks=(8,), pass_ks=(1, 16))
    return {**summary(evaluation), "maj@8": evaluation.maj_at[8].value, "pass@16": evaluation.pass_at[16].value}


def _end(model: Any, base: str, seed: int) -> dict[str, Any]:
    """With many completions: pass@k, majorities, entropy and the number of different answers per problem."""
    dataset = sample(model, base, problems(base, 150, TEST_SEED), max(KS), seed)
    evaluation = evaluate_rows(dataset, pass_ks=KS, maj_ks=(16, 64))
    rows = Rows.of(dataset, model)
    answers: dict[int, set[Any]] = {}
    for problem, answer in zip(dataset["problem_id"], dataset["extracted"], strict=True):
        answers.setdefault(problem, set()).add(answer)
    return {
        "pass": {str(k): evaluation.pass_at[k].value for k in KS},
        "maj": {str(k): estimate.value for k, estimate in evaluation.maj_at.items()},
        "never_solved": evaluation.cardinality[0] / sum(evaluation.cardinality),
        "entropy": float(-np.mean([float(logps.sum()) for logps in rows.mu_logps])),  # nats per completion
        "different_answers": float(np.mean([len(found) for found in answers.values()])),
    }


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    if profile.seeds == 1:
        return []
    found = {
        (base, run): [store.get(_cell(base, run, best_rate(store, base, run), seed)) or {} for seed in range(SEEDS)]
        for base in BASES
        for run in RUNS
    }
    picture, axes = figure(2 * len(BASES), 3.6, 3.3)
    steps = list(range(EVERY, ITERATIONS + 1, EVERY))
    for n, base in enumerate(BASES):
        for run in RUNS:
            results = found[base, run]
            points = [interval([r["curve"][i]["pass@1"] for r in results]) for i in range(len(steps))]
            curve(axes[2 * n], steps, points, run, marker="o", ms=3)
            ends = [interval([r["pass"][str(k)] for r in results]) for k in KS]
            curve(axes[2 * n + 1], list(KS), ends, run, marker="o", ms=3)
        axes[2 * n].set(xlabel="iteration", ylabel="pass@1 (%)", title=base)
        axes[2 * n + 1].set(xscale="log", xlabel="k", ylabel="pass@k (%)", title=f"{base}, after {ITERATIONS}")
        axes[2 * n + 1].set_xticks(KS, [str(k) for k in KS])
        axes[2 * n + 1].minorticks_off()
    axes[0].legend()

    def gap(base: str, k: int, other: str = "positives only") -> Any:
        half, only = (
            {seed: (r["pass"][str(k)], float("nan")) for seed, r in enumerate(found[base, run])}
            for run in ("p~ 50 %", other)
        )
        return difference(half, only)

    def said(other: str) -> str:
        return "; ".join(
            f"{base}: pass@1 {gap(base, 1, other).percent(signed=True)}, pass@64 "
            f"{gap(base, 64, other).percent(signed=True)}"
            for base in BASES
        )

    rows = [
        [
            base, run, *(interval([r["pass"][str(k)] for r in found[base, run]]).percent() for k in KS),
            interval([r["maj"]["64"] for r in found[base, run]]).percent(),
            interval([r["never_solved"] for r in found[base, run]]).percent(),
            f"{interval([r['entropy'] for r in found[base, run]]).mean:.1f}",
            f"{interval([r['different_answers'] for r in found[base, run]]).mean:.1f}",
        ]
        for base in BASES
        for run in RUNS
    ]  # fmt: skip
    header = ["base model", "run", *(f"pass@{k}" for k in KS), "maj@64", "never solved", "entropy (nats)",
              "different answers of 256"]  # fmt: skip
    return [
        HYPOTHESES["long_run"].judged(
            "p~ = 50 % minus positives only (wrong answers removed in each iteration) after 20 iterations, points: "
            + said("positives only"),
            all(gap(base, 64).low > 0 and gap(base, 1).low <= 0 for base in BASES),
            picture=save(picture, out, "long_run"),
            details=markdown_table(header, rows),
        ),
        HYPOTHESES["long_repeated"].judged(
            "p~ = 50 % minus right answers repeated to as many steps, after 20 iterations, points: "
            + said("positives, repeated"),
            all(gap(base, 64, "positives, repeated").low > 0 for base in BASES),
            all(gap(base, 1, "positives, repeated").high < 0 for base in BASES),
        ),
    ]
