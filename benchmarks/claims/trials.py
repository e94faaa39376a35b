"""What `topr trial` recommends, and how far that is from the best setting there is.

A trial trains and tests each setting once. What a setting is worth is measured apart: trainings on the rows of other
seeds, tested on other problems.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms, code_task
from benchmarks.arms import Arm
from benchmarks.cells import Cell, Store
from benchmarks.setting import OF_OTHER_TASKS, Profile, base_model, model_hash, problems, sample, tokenizer
from benchmarks.statistics import interval
from benchmarks.verdicts import Verdict, judge, markdown_table
from topr_trl import save_rows
from topr_trl.cli.trial import recommend
from topr_trl.pipeline import trial
from topr_trl.pipeline.arguments import TrialArguments

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
CODE = "code"  # the rows of examples/code_generation.py, whose rewards are all that a trial knows
TRIALS, CODE_SEEDS = 3, 3
TRIAL_SEED = 11  # and the next ones: rows that nothing else uses
RATE = 1e-4  # given to the trial
RATES = (3.33e-5, 1e-4, 3e-4)  # that it may come to
# The settings that it tries, as the benchmarks name them.
REPEATED = "positives-repeated"
SHARES: dict[str, float | str] = {
    "paper": "p", "share-20": 0.2, "share-50": 0.5, "share-80": 0.8, "group-mean": "group_mean", "positives-only": 1.0,
    REPEATED: 1.0,
}  # fmt: skip
WITHIN = 0.02  # of the best: what a recommendation is meant to reach


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    found = [_trial(base, TRIAL_SEED + n) for base in (*BASES, CODE) for n in range(TRIALS)]
    return found + [cell for base in (*BASES, CODE) for of_one in _worth(base, profile).values() for cell in of_one]


def _trial(base: str, seed: int) -> Cell:
    weights = {} if base == CODE else {"weights": model_hash(base)}
    return {"claim": "trials", "part": "trial", "base": base, **weights, "learning_rate": RATE, "seed": seed}


def _worth(base: str, profile: Profile) -> dict[tuple[str, float], list[Cell]]:
    """The cells that say what each setting is worth, by its name and rate."""
    every = [(name, rate) for name in SHARES for rate in RATES]
    if base != CODE:
        return {
            (name, rate): [
                Arm(base, SHARES[name], "rows" if name == REPEATED else "steps", learning_rate=rate).cell(seed)
                for seed in range(profile.seeds)
            ]
            for name, rate in every
        }
    return {
        (name, rate): [
            {"claim": "trials", "part": CODE, "setting": name, "learning_rate": rate, "seed": seed}
            for seed in range(CODE_SEEDS)
        ]
        for name, rate in every
    }


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    if cell["claim"] == "arms":
        return arms.work(cell, profile)
    if cell["part"] == CODE:
        (arm,) = (arm for arm in trial.ARMS if arm.name == cell["setting"])
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
        )  # fmt: skip
        outcome = trial.run_trial(args)
    found = recommend(outcome.values, cell["seed"])
    of_arms = {arm: _names(arm, args) for arm in found.arms if arm is not None}
    return {
        "recommended": list(of_arms[found.recommended]),
        "best_in_draws": found.shares[found.recommended],
        "ties": "default",
        "rows": outcome.trained_rows,
        "by_answers": outcome.by_answers,
        "means": {f"{name}, {rate:g}": found.means[arm] for arm, (name, rate) in of_arms.items()},
    }


def _rows_and_model(cell: Cell, profile: Profile, folder: Path) -> tuple[Path, Path]:
    """Where the model lies, and the rows that a trial is given."""
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


def _names(arm: trial.Arm, args: TrialArguments) -> tuple[str, float]:
    """An arm's name without its rate, and the rate."""
    return arm.name.removesuffix("-low-rate").removesuffix("-high-rate"), arm.rate(args)


# Report.


_HIGHEST_MEAN = (
    ". These trials recommended the highest mean. `topr trial` now recommends the default unless another setting is "
    "better by an interval; the trials were not repeated"
)


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    rows, lost, always, recommended = [], {}, {rate: [] for rate in RATES}, []
    ties: set[str | None] = set()
    for base in (*BASES, CODE):
        worth = {
            key: float(np.mean([result["end"]["pass@1"] for _, result in store.results(found)]))
            for key, found in _worth(base, profile).items()
        }
        best = max(worth, key=lambda key, worth=worth: worth[key])
        trials = store.results([_trial(base, TRIAL_SEED + n) for n in range(TRIALS)])
        chosen = [(name, rate) for _, result in trials for name, rate in [result["recommended"]]]
        lost[base] = interval([worth[best] - worth[key] for key in chosen])
        recommended += chosen
        ties |= {result.get("ties") for _, result in trials}
        for rate in RATES:
            always[rate].append(worth[best] - worth[REPEATED, rate])
        rows.append([
            base, f"{best[0]}, {best[1]:g}: {100 * worth[best]:.1f}",
            "; ".join(f"{name}, {rate:g}: {100 * worth[name, rate]:.1f}" for name, rate in chosen),
            lost[base].percent(), f"{100 * (worth[best] - worth['paper', RATE]):.1f}",
        ])  # fmt: skip
    header = ["rows", "best setting: pass@1 (%)", "recommended, by trial", "points lost",
              "points lost at c = 0 and the given rate"]  # fmt: skip
    constants = ", ".join(f"{100 * float(np.mean(losses)):.2f} at {rate:g}" for rate, losses in always.items())
    return [
        Verdict(
            "`topr trial` recommends a setting within 2 points of the best",
            "",
            f"points of pass@1 below the best of {len(worth)} settings, mean over {TRIALS} trials: "
            + ", ".join(f"{base} {gap.percent()}" for base, gap in lost.items())
            + f". {sum(name == REPEATED for name, _ in recommended)} of {len(recommended)} recommendations are "
            f"{REPEATED}. Mean over the {len(lost)} kinds of rows: the trial loses "
            f"{100 * float(np.mean([gap.mean for gap in lost.values()])):.2f} points; {REPEATED} on all rows, without "
            f"a trial, loses {constants}" + (_HIGHEST_MEAN if None in ties else ""),
            judge(*(gap.mean <= WITHIN for gap in lost.values())),
            details=markdown_table(header, rows),
        )
    ]
