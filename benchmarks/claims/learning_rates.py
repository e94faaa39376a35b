"""Each rival's learning rate: the best of one shared grid, by pass@1 on validation problems after one epoch."""

from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, model_hash, summary
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

TUNING_SEED = 1000  # completions, order and problems that no other claim uses
# On the harder task: the paper's rivals, TRL's default, and the variant that beats TOPR on the main one.
OF_TASK = {
    "main": tuple(RIVALS),
    "hard": ("topr", "positives_only", "tis", "ppo", "dpo", "trl_dapo", "topr_group_sign"),
}


def rates_of(profile: Profile, task: str) -> tuple[float, ...]:
    """The grid; on the harder task without its ends, which were no rival's best on the main one."""
    return profile.learning_rates if task == "main" else profile.learning_rates[1:-1]


def cells(profile: Profile, store: Store, task: str = "main") -> list[Cell]:
    if len(profile.learning_rates) == 1:
        return []
    return [
        {
            "claim": "learning_rates", "task": task, "model": model_hash(task), "rival": rival, "learning_rate": rate,
            "seed": TUNING_SEED,
        }
        for rival in OF_TASK[task]
        for rate in rates_of(profile, task)
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model(cell["task"])
    rows, pool = epoch_rows(cell["task"], profile, cell["seed"])
    objective = RIVALS[cell["rival"]].make(model, rows, pool)
    train(model, objective, profile.steps, cell["learning_rate"], cell["seed"])
    return summary(evaluate(model, cell["task"], profile, seed=cell["seed"], split="validation"))


def best(store: Store, profile: Profile, rival: str, task: str = "main") -> float:
    """The rate with the highest pass@1; the lower one of equals.

    Raises:
        Unfinished: the rates of this rival have not all been tried.
    """
    if len(profile.learning_rates) == 1:
        return profile.learning_rates[0]
    tried = {
        cell["learning_rate"]: result["pass@1"]
        for cell, result in store.results(cells(profile, store, task))
        if cell["rival"] == rival
    }
    if len(tried) < len(rates_of(profile, task)):
        raise Unfinished(f"the learning rate of {rival} has not been chosen: run the claim learning_rates")
    return max(sorted(tried), key=lambda rate: tried[rate])


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    rates = profile.learning_rates
    results = {(cell["rival"], cell["learning_rate"]): r["pass@1"] for cell, r in store.results(cells(profile, store))}
    rows = []
    for rival in OF_TASK["main"]:
        chosen = best(store, profile, rival)
        shown = [(f"{100 * results[rival, rate]:.1f}", rate == chosen) for rate in rates]
        rows.append([RIVALS[rival].label, *(f"**{x}**" if bold else x for x, bold in shown)])
    return [
        Verdict(
            "Learning rates",
            "",
            "each rival's best of one grid (bold), by pass@1 (%) on validation problems after one epoch. Each number "
            "has a sampling error of about one point and comes from one seed, so near ties say nothing. Runs of "
            "several epochs use the same rate",
            MEASURED,
            details=markdown_table(["method", *(f"{rate:g}" for rate in rates)], rows),
        )
    ]
