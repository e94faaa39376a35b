"""Each rival's learning rate: the best of one shared grid, by pass@1 on validation problems after one epoch."""

from typing import Any

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile, base_model, candidates, evaluate, summary
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict
from topr_trl import curate

TUNING_SEEDS = (1000,)  # candidates, order and problems that no other claim uses


def cells(profile: Profile, store: Store, task: str = "main") -> list[Cell]:
    if len(profile.learning_rates) == 1:
        return []
    return [
        {
            "claim": "learning_rates", "profile": profile.name, "task": task, "rival": rival, "learning_rate": rate,
            "seed": seed,
        }
        for rival in RIVALS
        for rate in profile.learning_rates
        for seed in TUNING_SEEDS
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model(cell["task"])
    rows = training_rows(cell["task"], profile, cell["seed"])
    objective = RIVALS[cell["rival"]][1](model, rows)
    train(model, objective, profile.steps, cell["learning_rate"], cell["seed"])
    return summary(evaluate(model, cell["task"], profile, seed=cell["seed"], split="validation"))


def training_rows(task: str, profile: Profile, seed: int):
    """One epoch's rows, uniform from the candidates of this seed: the same for every rival."""
    rows = candidates(task, profile, seed)
    size = min(profile.steps * 32, len(rows))
    return rows[curate(rows.rewards, rows.groups, "uniform", size, seed=seed).indices]


def best(store: Store, profile: Profile, rival: str, task: str = "main") -> float:
    """The rate with the highest mean over the tuning seeds; the lower one of equals."""
    if len(profile.learning_rates) == 1:
        return profile.learning_rates[0]
    return max(profile.learning_rates, key=lambda rate: (mean_pass(store, profile, rival, rate, task), -rate))


def mean_pass(store: Store, profile: Profile, rival: str, rate: float, task: str = "main") -> float:
    results = [
        result
        for cell, result in store.results(cells(profile, store, task))
        if (cell["rival"], cell["learning_rate"]) == (rival, rate)
    ]
    if len(results) < len(TUNING_SEEDS):
        raise Unfinished(f"the learning rate of {rival} has not been chosen: run the claim learning_rates")
    return sum(result["pass@1"] for result in results) / len(results)


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    if len(done) < len(RIVALS) * len(profile.learning_rates) * len(TUNING_SEEDS):
        return []
    chosen = ", ".join(f"{RIVALS[rival][0]} {best(store, profile, rival):g}" for rival in RIVALS)
    edge = [
        RIVALS[r][0]
        for r in RIVALS
        if best(store, profile, r) in (min(profile.learning_rates), max(profile.learning_rates))
    ]
    return [
        Verdict(
            "Learning rates: each rival's best of "
            + ", ".join(f"{rate:g}" for rate in profile.learning_rates)
            + " on validation problems, one epoch, a seed that nothing else uses",
            "",
            chosen + (f". At an end of the grid: {', '.join(edge)}" if edge else ""),
            MEASURED,
        )
    ]
