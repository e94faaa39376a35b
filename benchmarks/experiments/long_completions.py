"""Compare ratios of long completions: which one still learns from negatives at thousands of tokens?

A completion is a session (`benchmarks.sessions`) of a model whose greedy answers are mostly wrong. All sessions are
drawn from the base model's answers before training, so rows are as old as the number of updates. Expectations:
benchmarks/long_completions.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cells import Cell, Store
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.loops.training import adamw, update
from benchmarks.rows import Rows
from benchmarks.sessions import ANSWER, DPPO, POSITIVES, POWER, REPEATED, Sessions
from benchmarks.setting import Profile, base_model, candidates, evaluate, summary

TASK = "sure-17"
SESSIONS = {1: 64, 4: 16, 16: 8, 64: 2}  # sessions of an update, by the number of answers in a session
TOKENS = 40  # tokens of an answer, on average
ANYWHERE, FEW, NONE = "anywhere", "in 20% of a good session", "only in bad sessions"
# Shares of right answers in good and bad sessions of more than one answer, by the place of mistakes.
SHARES_RIGHT = {ANYWHERE: (0.5, 0.05), FEW: (0.8, 0.5), NONE: (1.0, 0.5)}
MEASURED_AT = (64, 256)  # updates
LONGER = 1_024  # updates of the run that tests whether short segments taper too little
SEEDS = 3
WATCHED = 32  # sessions whose weights are measured, of problems that are not trained on
NAMES = {
    "sequence (TOPR)": "sequence", "segment": "segment 64", "segment of 16": "segment 16",
    "segment of 256": "segment 256", "one per answer": ANSWER, "prefix": "prefix", "power": POWER, "token": "token",
    "DPPO": DPPO, "positives only": POSITIVES, "positives repeated": REPEATED,
}  # fmt: skip


class Setting(NamedTuple):
    """Sessions of `parts` answers of a model, with mistakes anywhere, in one half of a bad session, or as in `GOOD`."""

    parts: int
    mistakes: str = ANYWHERE
    task: str = TASK

    @property
    def fields(self) -> Cell:
        """Return the fields of the cells."""
        task = {} if self.task == TASK else {"task": self.task}
        return {"parts": self.parts, "mistakes": self.mistakes, **task}

    def __str__(self) -> str:
        where = "" if self.mistakes == ANYWHERE else f", mistakes {self.mistakes}"
        return f"{TOKENS * self.parts:,} tokens{where}" + ("" if self.task == TASK else f", {self.task}")


# `main` makes random mistakes. On this model, a taper that is too weak does harm.
NOISY = Setting(16, task="main")
EARLY, LATE = (Setting(16, mistakes) for mistakes in ("early", "late"))
GOOD = (Setting(16, FEW), Setting(16, NONE))  # settings in which good sessions have fewer mistakes
WITHOUT_GOOD = [*map(Setting, SESSIONS), NOISY, EARLY, LATE]
SETTINGS = [*WITHOUT_GOOD, *GOOD]
BOTH = (Setting(4), Setting(16))  # settings with a comparison after 64 updates, too; the others only have one after 256
COMPARED = [
    (setting, updates) for setting in SETTINGS for updates in (MEASURED_AT if setting in BOTH else MEASURED_AT[-1:])
]
# Two tables: by length of the completions, and other numbers of updates, models and mistakes.
LENGTHS = [(setting, MEASURED_AT[-1]) for setting in map(Setting, SESSIONS)]
OTHERS = [each for each in COMPARED if each not in LENGTHS]
# Settings in which a method is run. Methods that are not listed are run with mistakes anywhere on `TASK`.
SETTINGS_OF = {
    "sequence (TOPR)": SETTINGS, "segment": SETTINGS, "prefix": [s for s in WITHOUT_GOOD if s != NOISY],
    "positives only": [s for s in WITHOUT_GOOD if s not in (EARLY, LATE)],
    "positives repeated": [s for s in SETTINGS if s not in (EARLY, LATE)],
    "segment of 16": WITHOUT_GOOD, "segment of 256": [Setting(16)], "DPPO": [Setting(16)],
    "token": [NOISY], "power": [*map(Setting, (1, 4, 16))],
}  # fmt: skip


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons: one per setting and number of updates, each with its own rates."""
    return [*(of_setting(setting, updates) for setting, updates in COMPARED), longer()]


def longer() -> Experiment:
    """Return the comparison of segments of 64, 16 and 1 token after many updates on `main`, all at one rate."""
    methods = {name: {"level": NAMES[name]} for name in ("segment", "segment of 16", "token")}
    return Experiment(
        "long_completions", methods, (), range(2), ("curve/-1/pass@1",), f"{LONGER:,} updates: {NOISY}",
        {**NOISY.fields, "updates": LONGER}, tuned=lambda *_: {"learning_rate": 3e-5},
        shows=("curve/-1/pass@1", "curve/-1/greedy", "curve/-1/invalid"),
    )  # fmt: skip


def measure(updates: int, shown: str) -> str:
    """Return the path of a measure after some updates in the result of a cell."""
    return f"curve/{MEASURED_AT.index(updates)}/{shown}"


def of_setting(setting: Setting, updates: int = MEASURED_AT[-1]) -> Experiment:
    """Return the comparison in a setting after some updates."""
    return Experiment(
        "long_completions", _methods(setting), rates(3e-5, 1e-4, 3e-4), range(SEEDS), (measure(updates, "pass@1"),),
        f"{updates} updates: {setting}", setting.fields, further=1,
        shows=(measure(updates, "pass@1"), measure(updates, "greedy")),
    )  # fmt: skip


def _methods(setting: Setting) -> dict[str, Cell]:
    """Return the fields of the cells of each method. With one answer, some ratios equal the sequence's."""
    anywhere = [Setting(parts) for parts in SESSIONS]
    same = ("segment 64", ANSWER, POWER) if setting.parts == 1 else ()
    return {
        name: {"level": "sequence" if level in same else level}
        for name, level in NAMES.items()
        if setting in SETTINGS_OF.get(name, anywhere)
    }


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell.

    Returns:
        `curve`: accuracy and the negatives' mean weight by quarter of a session, after each of `MEASURED_AT`, and
            after the last update.
    """
    setting = Setting(cell["parts"], cell["mistakes"], cell.get("task", TASK))
    task, seed, level = setting.task, cell["seed"], cell["level"]
    model = base_model(task)
    pool = candidates(task, profile, seed).scored_by(model)
    rng = np.random.default_rng(seed)
    is_watched = np.isin(pool.groups, rng.permutation(np.unique(pool.groups))[: profile.problems // 10])
    watched_sessions = drawing(pool, np.flatnonzero(is_watched), setting, rng)(WATCHED)
    trained = drawing(pool, np.flatnonzero(~is_watched), setting, rng, level)
    split = "validation" if seed == TUNING_SEED else "test"
    optimizer, curve = adamw(model, cell["learning_rate"]), []
    updates = cell.get("updates", MEASURED_AT[-1])
    for step in range(1, updates + 1):
        update(model, optimizer, trained(SESSIONS[setting.parts]).loss(model, level))
        if step in (*MEASURED_AT, updates):
            greedy = evaluate(model, task, profile, 1, seed, split, temperature=0.0)
            curve.append({
                "update": step, "greedy": greedy.pass_at[1].value,
                **summary(evaluate(model, task, profile, 4, seed, split)),
                "weights": watched_sessions.weights_by_quarter(model, level),
            })  # fmt: skip
    return {"curve": curve}


def drawing(
    pool: Rows, places: np.ndarray, setting: Setting, rng: np.random.Generator, level: str = ""
) -> Callable[[int], Sessions]:
    """Return a function that draws sessions from some rows of a pool: good and bad in turn, or only good ones.

    `SHARES_RIGHT` has the shares of right answers. With `mistakes="early"`, the first half of a session with reward -1
    is wrong, and its second half is like a session with reward 1. With `"late"`, it is the other way round.
    """
    parts, mistakes, _ = setting
    is_right = pool.rewards > 0
    right, wrong = places[is_right[places]], places[~is_right[places]]

    def session(reward: float) -> np.ndarray:
        if parts == 1:
            return rng.choice(right if reward > 0 else wrong, 1)
        good, bad = SHARES_RIGHT.get(mistakes, SHARES_RIGHT[ANYWHERE])
        share_P = np.full(parts, good if reward > 0 else bad)
        if reward < 0 and mistakes in ("early", "late"):
            is_late_P = np.arange(parts) >= parts // 2
            share_P = np.where(is_late_P == (mistakes == "early"), good, 0.0)
        return np.where(rng.random(parts) < share_P, rng.choice(right, parts), rng.choice(wrong, parts))

    def draw(count: int) -> Sessions:
        rewards_S = np.resize([1.0] if level == REPEATED else [1.0, -1.0], count)
        return Sessions(pool, np.stack([session(reward) for reward in rewards_S]), rewards_S)

    return draw
