"""Figure 8 until nothing moves: many iterations with μ renewed, and what is left of the variety of answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import TUNING_SEED, Choices, after_baseline
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rounds import chosen, drawn, train_on
from benchmarks.rows import Rows
from benchmarks.setting import (
    TEST_SEED,
    VALIDATION_SEED,
    Profile,
    base_model,
    model_hash,
    problems,
    sample,
    summary,
)
from benchmarks.statistics import Interval, Measured, difference, interval
from benchmarks.verdicts import Verdict, markdown_table
from topr_trl import evaluate_rows

BASES = ("misconception-10", "wanders-3")
ITERATIONS, TUNING_ITERATIONS, EVERY, SEEDS = 20, 4, 4, 3
CHOICES: Choices = [{"learning_rate": rate} for rate in (3e-5, 1e-4, 3e-4)]
FURTHER = 2
CANDIDATES = 16  # of each problem in each iteration
# How many of the next lower rates are measured, too.
LOWER = {"misconception-10": {"p~ 50%": 2, "group mean": 1, "positives only": 1, "positives, repeated": 2}}
KS = (1, 4, 16, 64, 256)
REPEATED = "repeated"
# Share of positives and curation, by what a run is called.
RUNS: dict[str, tuple[float | str, str]] = {
    "c = 0": ("p", "uniform"),
    "p~ 50%": (0.5, "uniform"),
    "group mean": ("group_mean", "uniform"),
    "positives only": (1.0, "positives"),
    "positives, repeated": (1.0, REPEATED),  # as many steps as the others, all of right answers
    "Anna Karenina": ("p", "anna_karenina"),
}


def _cell(base: str, run: str, choice: dict[str, Any], seed: int) -> Cell:
    return {"claim": "long_run", "base": base, "weights": model_hash(base), "run": run, **choice, "seed": seed}


def _tuned(store: Store, base: str, run: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What is tried, and what ends highest after a few iterations on a seed apart; None as yet."""

    def end(choice: dict[str, Any]) -> float | None:
        result = store.get(_cell(base, run, choice, TUNING_SEED))
        return result["curve"][-1]["pass@1"] if result else None

    return arms.tune(CHOICES, FURTHER, end)


def best_choice(store: Store, base: str, run: str) -> dict[str, Any]:
    """The rate of a run.

    Raises:
        Unfinished: not all rates have been tried.
    """
    best = _tuned(store, base, run)[1]
    if best is None:
        raise Unfinished(f"{run} on {base} has not been tuned: run the claim long_run")
    return best


def cells(profile: Profile, store: Store) -> list[Cell]:
    return [] if profile.is_quick else [cell for base in BASES for cell in _of_base(store, base)]


def _of_base(store: Store, base: str) -> list[Cell]:
    """Those that are known as yet: which rates are reported depends on what was tried."""
    found = []
    for run in RUNS:
        tried, best = _tuned(store, base, run)
        found += [_cell(base, run, choice, TUNING_SEED) for choice in tried]
        if best is not None:
            found += [_cell(base, run, one, seed) for one in with_lower(base, run, best) for seed in range(SEEDS)]
    return found


def _missing(store: Store, base: str) -> bool:
    return bool(store.unfinished(_of_base(store, base)))


def with_lower(base: str, run: str, best: dict[str, Any]) -> list[dict[str, Any]]:
    """The best choice of a run, then those at lower rates."""
    found = [best]
    for _ in range(LOWER.get(base, {}).get(run, 0)):
        found.append(best | {"learning_rate": arms.next_rate(found[-1]["learning_rate"], up=False)})
    return found


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    base, seed, (share, curation) = cell["base"], cell["seed"], RUNS[cell["run"]]
    is_tuning = seed == TUNING_SEED
    model, curve_points = base_model(base), []
    repeated = curation == REPEATED
    rule = "positives" if repeated else curation
    for iteration in range(1, (TUNING_ITERATIONS if is_tuning else ITERATIONS) + 1):
        pool = drawn(model, base, CANDIDATES, seed, iteration)
        rows = chosen(pool, rule, seed, iteration, repeated)
        train_on(model, rows, lambda rows: after_baseline(rows, share), cell["learning_rate"], seed, iteration)
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
    rows = Rows.of(dataset)
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


# By base, run, and how many rates below the best: rate, result of each seed.
Runs = dict[tuple[str, str, int], tuple[float, list[dict[str, Any]]]]


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    bases = [base for base in BASES if not _missing(store, base)]
    if not bases:
        raise Unfinished("no base model has all of its runs")
    found = _found(store, bases)

    def ends(base: str, run: str, what: str, k: int, lower: int = 0) -> Measured:
        _, results = found[base, run, lower]
        return {seed: (result[what][str(k)], float("nan")) for seed, result in enumerate(results)}

    def gap(base: str, k: int, other: str) -> Interval:
        return difference(ends(base, "p~ 50%", "pass", k), ends(base, other, "pass", k))

    def said(other: str) -> str:
        return "; ".join(
            f"{base}: pass@1 {gap(base, 1, other).percent(signed=True)}, pass@64 "
            f"{gap(base, 64, other).percent(signed=True)}"
            for base in bases
        )

    gained = {
        (base, run): {
            name: difference(ends(base, run, *what, 1), ends(base, run, *what))
            for name, what in {"pass@1": ("pass", 1), "maj@64": ("maj", 64), "pass@64": ("pass", 64)}.items()
        }
        for base, runs in LOWER.items()
        if base in bases
        for run in runs
    }
    slow = {
        (base, run): difference(ends(base, "c = 0", "maj", 64), ends(base, run, "maj", 64, lower))
        for base, run, lower in found
        if run in ("p~ 50%", "positives, repeated") and found[base, run, lower][0] == found[base, "c = 0", 0][0]
    }
    equal = _at_equal_rates(found, ends)
    return [
        HYPOTHESES["long_run"].judged(
            "p~ = 50% minus positives only (wrong answers removed in each iteration) after 20 iterations, points: "
            + said("positives only"),
            all(gap(base, 64, "positives only").low > 0 and gap(base, 1, "positives only").low <= 0 for base in bases),
            picture=_picture(found, bases, out),
            details=_table(found),
            headline=_headline(found, bases),
        ),
        HYPOTHESES["long_repeated"].judged(
            "p~ = 50% minus right answers repeated to as many steps, after 20 iterations, points: "
            + said("positives, repeated")
            + (f". At equal rates, p~ = 50% minus positives only: {equal}" if equal else ""),
            all(gap(base, 64, "positives, repeated").low > 0 for base in bases),
            all(gap(base, 1, "positives, repeated").high < 0 for base in bases),
        ),
        HYPOTHESES["long_rate"].judged(
            "the next lower rate minus the one that is best after 4 iterations, points: "
            + "; ".join(
                f"{base}, {run}: " + ", ".join(f"{name} {gain.percent(signed=True)}" for name, gain in of_run.items())
                for (base, run), of_run in gained.items()
            ),
            all(of_run["maj@64"].low > 0 and of_run["pass@64"].low > 0 for of_run in gained.values()),
            all(of_run["pass@1"].high >= 0 for of_run in gained.values()),
            picture=_of_rates(found, [base for base in bases if base in LOWER], out),
        ),
        HYPOTHESES["long_slow"].judged(
            "maj@64 of c = 0 minus that of others at the rate of c = 0, points: "
            + "; ".join(f"{base}, {run} {gap.percent(signed=True)}" for (base, run), gap in slow.items()),
            all(gap.low <= 0 for gap in slow.values()),
        ),
    ]


def _at_equal_rates(found: Runs, ends: Callable[..., Measured]) -> str:
    """Compare p~ = 50% with positives only and with positives repeated, wherever both have a run at the same rate."""
    said = []
    for (base, run, lower), (rate, _) in found.items():
        if run not in ("positives only", "positives, repeated"):
            continue
        for level in (n for b, r, n in found if (b, r) == (base, "p~ 50%") and found[b, r, n][0] == rate):
            gaps = (
                f"{name} "
                + difference(ends(base, "p~ 50%", *what, level), ends(base, run, *what, lower)).percent(signed=True)
                for name, what in {"pass@1": ("pass", 1), "maj@64": ("maj", 64), "pass@64": ("pass", 64)}.items()
            )
            said.append(f"{base}, {run} at {rate:g}: {', '.join(gaps)}")
    return "; ".join(said)


def _found(store: Store, bases: list[str]) -> Runs:
    found: Runs = {}
    for base in bases:
        for run in RUNS:
            for lower, choice in enumerate(with_lower(base, run, best_choice(store, base, run))):
                results = store.results([_cell(base, run, choice, seed) for seed in range(SEEDS)])
                found[base, run, lower] = (choice["learning_rate"], [result for _, result in results])
    return found


_COLOURS = {
    "c = 0": COLOURS["topr"], "p~ 50%": COLOURS["mean"], "group mean": COLOURS["topr_group_sign"],
    "positives only": COLOURS["removed"], "positives, repeated": COLOURS["positives_repeated"],
    "Anna Karenina": COLOURS["anna_karenina"],
}  # fmt: skip


def _headline(found: Runs, bases: list[str]) -> str:
    shown = ("p~ 50%", "positives, repeated", "positives only", "c = 0")
    ends = [
        f"{base}: "
        + ", ".join(
            f"{run} "
            + " / ".join(
                f"{100 * interval([r[what][k] for r in found[base, run, 0][1]]).mean:.1f}"
                for what, k in (("pass", "1"), ("maj", "64"), ("pass", "64"))
            )
            for run in shown
        )
        for base in bases
    ]
    return (
        f"**{ITERATIONS} iterations with μ renewed**, each at the rate that is best after {TUNING_ITERATIONS}; "
        f"pass@1 / maj@64 / pass@64 at the end, in percent: {'; '.join(ends)}."
    )


def _of_rates(found: Runs, bases: list[str], out: Path) -> str:
    """What a run has of pass@1 and of the majority at each of its rates."""
    picture, axes = figure(len(bases), 5.2, 3.8)
    markers = dict(zip(sorted({rate for rate, _ in found.values()}), "v^osDP", strict=False))
    for panel, base in zip(axes, bases, strict=True):
        for run in RUNS:
            of_run = [found[key] for key in found if key[:2] == (base, run)]
            pass_1 = [100 * interval([r["pass"]["1"] for r in results]).mean for _, results in of_run]
            majority = [interval([r["maj"]["64"] for r in results]) for _, results in of_run]
            panel.errorbar(
                pass_1, [100 * m.mean for m in majority], [100 * m.half for m in majority], label=run,
                color=_COLOURS[run], lw=1, elinewidth=0.6, capsize=2,
            )  # fmt: skip
            for (rate, _), x, y in zip(of_run, pass_1, majority, strict=True):
                panel.plot(x, 100 * y.mean, marker=markers[rate], ms=6, color=_COLOURS[run])
        panel.set(xlabel=f"pass@1 after {ITERATIONS} iterations (%)", ylabel="maj@64 (%)", title=base)
    for rate, marker in markers.items():
        axes[0].plot([], [], marker, color="#888888", label=f"rate {rate:.0e}".replace("e-0", "e-"))
    axes[0].legend(fontsize=7, loc="lower left")
    return save(picture, out, "long_run_rates")


def _picture(found: Runs, bases: list[str], out: Path) -> str:
    picture, axes = figure(2 * len(bases), 3.6, 3.3)
    steps = list(range(EVERY, ITERATIONS + 1, EVERY))
    for n, base in enumerate(bases):
        for run in RUNS:
            _, results = found[base, run, 0]
            points = [interval([r["curve"][i]["pass@1"] for r in results]) for i in range(len(steps))]
            curve(axes[2 * n], steps, points, run, color=_COLOURS[run], marker="o", ms=3)
            passed = [interval([r["pass"][str(k)] for r in results]) for k in KS]
            curve(axes[2 * n + 1], list(KS), passed, run, color=_COLOURS[run], marker="o", ms=3)
        axes[2 * n].set_xticks(steps)
        axes[2 * n].set(xlabel="iteration", ylabel="pass@1 (%)", title=base)
        axes[2 * n + 1].set(xscale="log", xlabel="k", ylabel="pass@k (%)", title=f"{base}, after {ITERATIONS}")
        axes[2 * n + 1].set_xticks(KS, [str(k) for k in KS])
        axes[2 * n + 1].minorticks_off()
    axes[1].legend(loc="lower right", fontsize=7)
    return save(picture, out, "long_run")


def _table(found: Runs) -> str:
    header = ["base model", "run", "rate", *(f"pass@{k}" for k in KS), "maj@64", "never solved", "entropy (nats)",
              "different answers of 256"]  # fmt: skip
    rows = [
        [
            base, run, f"{rate:g}", *(interval([r["pass"][str(k)] for r in results]).percent() for k in KS),
            interval([r["maj"]["64"] for r in results]).percent(),
            interval([r["never_solved"] for r in results]).percent(),
            f"{interval([r['entropy'] for r in results]).mean:.1f}",
            f"{interval([r['different_answers'] for r in results]).mean:.1f}",
        ]
        for (base, run, _), (rate, results) in found.items()
    ]  # fmt: skip
    return markdown_table(header, rows)
