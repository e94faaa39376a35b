"""Compare methods over 20 rounds of training on the model's own rows, and measure the diversity of its answers.

Each run has the learning rate that is best after four rounds. Some runs are repeated with lower rates.
"""

from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.experiment import TUNING_SEED, Choice, Experiment, next_rate, rates
from benchmarks.loops import rounds
from benchmarks.rows import Rows
from benchmarks.setting import TEST_SEED, VALIDATION_SEED, Profile, model_hash, problems, sample, summary
from topr_trl import evaluate_rows

BASES = ("misconception-10", "wanders-3")
TUNING_ROUNDS, EVERY = 4, 4
KS = (1, 4, 16, 64, 256)
END = "curve/-1/pass@1"
# Share of positives and curation, by name of the run.
RUNS: dict[str, tuple[float | str, str]] = {
    "p~ 50%": (0.5, "uniform"),
    "c = 0": ("p", "uniform"),
    "group mean": ("group_mean", "uniform"),
    "positives only": (1.0, "positives"),
    "positives, repeated": (1.0, rounds.REPEATED),  # as many steps as the other runs, with correct answers only
    "Anna Karenina": ("p", "anna_karenina"),
}
LOWER = ("p~ 50%", "group mean", "positives only", "positives, repeated"), ("p~ 50%", "positives, repeated")


def _of(base: str, names: Any, title: str, **more: Any) -> Experiment:
    return Experiment(
        "long_run", {name: {"run": name} for name in names}, rates(3e-5, 1e-4, 3e-4), range(3), (END,), title,
        {"base": base, "weights": model_hash(base)}, further=2, shows=("pass/1", "maj/64", "pass/64"), **more,
    )  # fmt: skip


def at_best(base: str) -> Experiment:
    """Return the comparison at the best learning rates after four rounds."""
    return _of(base, RUNS, f"20 rounds: {base}")


def at_lower(base: str, times: int) -> Experiment:
    """Return the comparison at the next lower rates in the series 1, 3, 10, or two steps lower."""

    def lower(store: Store, method: str, measure: str) -> Choice | None:
        best = at_best(base).best(store, method)
        for _ in range(times if best else 0):
            best = {"learning_rate": next_rate(best["learning_rate"], up=False)}
        return best

    return _of(
        base,
        LOWER[times - 1],
        f"20 rounds, {('the next lower rate', 'two rates lower')[times - 1]}: {base}",
        tuned=lower,
    )


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons."""
    return [*map(at_best, BASES), at_lower(BASES[0], 1), at_lower(BASES[0], 2)]


QUICK = [at_best("main").cell("p~ 50%", {"learning_rate": 1e-4}, 0)]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    base, seed, (share, curation) = cell["base"], cell["seed"], RUNS[cell["run"]]
    is_tuning, curve = seed == TUNING_SEED, []
    number = TUNING_ROUNDS if is_tuning else profile.rounds

    def after(model: Any, done: int, candidates: int) -> None:
        if done % EVERY and done != number:
            return
        questions = problems(base, 150, VALIDATION_SEED if is_tuning else TEST_SEED)
        found = evaluate_rows(sample(model, base, questions, 16, seed), maj_ks=(8,), pass_ks=(1, 16))
        more = {"maj@8": found.maj_at[8].value, "pass@16": found.pass_at[16].value}
        curve.append({"iteration": done, "sampled": float(candidates), **summary(found), **more})

    model = rounds.trained(base, share, curation, number, cell["learning_rate"], seed, after)
    return {"curve": curve, **({} if is_tuning or profile.is_quick else _end(model, base, seed))}


def _end(model: Any, base: str, seed: int) -> dict[str, Any]:
    """Return pass@k, maj@k, entropy and the number of different answers per problem, from many completions."""
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
