"""Compare the settings of `topr trial` with the best of them, and count what the trials recommended.

A trial trains and tests each setting once. The value of a setting is measured in separate training runs, with the rows
of different seeds and different test problems. The stored trials recommended the highest mean, an older rule.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import code_task
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.experiments import protocols
from benchmarks.setting import OF_OTHER_TASKS, PROFILES, Profile, base_model, model_hash, problems, sample, tokenizer
from topr_trl import save_rows
from topr_trl.cli.trial_report import recommend
from topr_trl.pipeline.arms import ARMS, Arm
from topr_trl.pipeline.settings import TrialArguments
from topr_trl.pipeline.trial import run_trial

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
CODE = "code"  # rows of examples/code_generation.py; a trial only knows their rewards
TRIALS, CODE_SEEDS = 3, 3
TRIAL_SEED = 11  # first of `TRIALS` seeds, whose rows are not used elsewhere
RATE = 1e-4  # given to the trial
RATES = (3.33e-5, 1e-4, 3e-4)  # rates that the trial tries
DEFAULT, REPEATED = "share-50", "positives-repeated"
# Share of positives of each arm of a trial, for `benchmarks.methods.at_share`.
SHARES: dict[str, float | str] = {
    "paper": "p", "share-20": 0.2, "share-50": 0.5, "share-80": 0.8, "group-mean": "group_mean", "positives-only": 1.0,
    REPEATED: 1.0,
}  # fmt: skip


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Return the cells of trials, and of the value of each setting."""
    found = [_trial(base, TRIAL_SEED + n) for base in (*BASES, CODE) for n in range(TRIALS)]
    return found + [cell for base in (*BASES, CODE) for of_one in _worth(base).values() for cell in of_one]


def _trial(base: str, seed: int) -> Cell:
    weights = {} if base == CODE else {"weights": model_hash(base)}
    return {"claim": "trials", "part": "trial", "base": base, **weights, "learning_rate": RATE, "seed": seed}


def _worth(base: str) -> dict[tuple[str, float], list[Cell]]:
    """Return the cells that measure the value of each setting, by its name and rate."""
    found = {}
    for name, share in SHARES.items():
        arm = {"share": share, "protocol": "rows" if name == REPEATED else "steps", "batch_rows": 32}
        for rate in RATES:
            found[name, rate] = (
                [{"claim": "trials", "part": CODE, "setting": name, "learning_rate": rate, "seed": seed}
                 for seed in range(CODE_SEEDS)]
                if base == CODE
                else [protocols.arms(base, {name: arm}, []).cell(name, {"learning_rate": rate}, seed)
                      for seed in range(5)]
            )  # fmt: skip
    return found


def lost(store: Store) -> dict[str, dict[str, float]]:
    """Return the pass@1 that each setting loses at its best rate against the best setting, by base.

    Raises:
        Unfinished: not all settings have been measured.
    """
    if store.unfinished(cells(PROFILES["full"], store)):
        raise Unfinished("not all trials have been run")
    found = {}
    for base in (*BASES, CODE):
        worth = {
            key: float(np.mean([result["end"]["pass@1"] for _, result in store.results(cells)]))
            for key, cells in _worth(base).items()
        }
        best = max(worth.values())
        found[base] = {name: best - max(worth[name, rate] for rate in RATES) for name in SHARES}
    return found


def recommended(store: Store, *bases: str) -> str:
    """Return how many trials recommended repeated positives. They recommended the setting with the highest mean."""
    trials = store.results([_trial(base, TRIAL_SEED + n) for base in bases or (*BASES, CODE) for n in range(TRIALS)])
    if not trials:
        raise Unfinished("no trials have been run")
    return f"{sum(result['recommended'][0] == REPEATED for _, result in trials)} of {len(trials)}"


def tables(store: Store) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of the table of trials."""
    if store.unfinished(cells(PROFILES["full"], store)):
        return []
    rows = [
        [base, *(f"{100 * by_name[name]:.1f}" for name in (DEFAULT, REPEATED)), recommended(store, base)]
        for base, by_name in lost(store).items()
    ]
    header = ["rows", "default, at its best rate", "right answers repeated, at their best rate", "trials for these"]
    return [("Points of pass@1 below the best of 21 settings, and trials that recommended repeating", header, rows)]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    if cell["part"] == CODE:
        (arm,) = (arm for arm in ARMS if arm.name == cell["setting"])
        rows = profile.steps * 32
        return {"end": code_task.run(arm, cell["learning_rate"], rows, cell["seed"])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = _rows_and_model(cell, profile, folder)
        longest = code_task.MAX_NEW_TOKENS if cell["base"] == CODE else OF_OTHER_TASKS
        args = TrialArguments(
            input=str(rows), output_dir=str(folder / "trial"), model_name_or_path=str(model), seed=cell["seed"],
            learning_rate=cell["learning_rate"], lr_scheduler_type="constant", optim="adamw_torch",
            per_device_train_batch_size=32, per_device_eval_batch_size=128, max_new_tokens=longest, use_cpu=True,
            bf16=False, gradient_checkpointing=False, dtype="float32", report_to="none", disable_tqdm=True,
            decode="sample",
        )  # fmt: skip
        outcome = run_trial(args)
    found = recommend(outcome.values, cell["seed"])
    of_arms = {arm: _names(arm, args) for arm in found.arms if arm is not None}
    return {
        "recommended": list(of_arms[found.recommended]),
        "best_in_draws": found.shares[found.recommended],
        "ties": "recipes",
        "rows": outcome.trained_rows,
        "by_answers": outcome.by_answers,
        "means": {f"{name}, {rate:g}": found.means[arm] for arm, (name, rate) in of_arms.items()},
    }


def _rows_and_model(cell: Cell, profile: Profile, folder: Path) -> tuple[Path, Path]:
    """Return the folders with the model and the rows of a trial."""
    if cell["base"] == CODE:
        return code_task.folder() / "warm-up", code_task.folder() / "log"
    base, seed = cell["base"], cell["seed"]
    model = base_model(base)
    save_rows(
        sample(model, base, problems(base, profile.problems, 100 + seed), profile.candidates, seed), folder / "rows"
    )
    model.save_pretrained(folder / "model")
    tokenizer(base).save_pretrained(folder / "model")
    return folder / "model", folder / "rows"


def _names(arm: Arm, args: TrialArguments) -> tuple[str, float]:
    """Return an arm's name without the suffix of its rate, and the rate."""
    return arm.recipe, arm.rate(args)
