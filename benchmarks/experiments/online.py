"""Compare `TOPRTrainer` with `GRPOTrainer` by accuracy per sampled completion.

Completions are used once or several times.
"""

from typing import Any

import numpy as np

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.loops.online import COMPLETIONS, METHODS, OnlineArm, run
from benchmarks.setting import Profile, model_hash

BASES = ("main", "sure-17", "hard")  # slips, a confident mistake, more steps per problem
SHARES = (0.75, 0.5, 0.25)
RATES = {1: rates(1e-4, 3e-4, 1e-3), 4: rates(3e-5, 1e-4, 3e-4)}  # by the number of uses of a batch
LONG = 3 * COMPLETIONS
END, PASS_32 = "curve/-1/pass@1", "end/pass@32"
REFERENCE, REPLAY = "trl_dapo", "topr_mean"


def label(method: str, uses: int = 1, replay: float = 0.0) -> str:
    """Return the label of a method, with its replay share or number of uses."""
    again = f", {replay:.0%} used again" if replay else ", 4 uses" if uses == 4 else ""
    return METHODS[method][0] + again


def _of(base: str, uses: int, *methods: str | tuple[str, float]) -> Experiment:
    """Return a comparison. A pair of a method and a share replays this share of rows.

    One seed chooses the learning rates. TRL's default is run at its two best rates, and each method at all rates within
    `level` of its best value. The rate with the highest mean over all seeds is reported.
    """
    pairs = [(one, 0.0) if isinstance(one, str) else one for one in methods]
    return Experiment(
        "online", {
            label(method, uses, share): {"method": method, "uses": uses, "replay_share": share}
            for method, share in pairs
        },
        RATES[uses], range(5), (END,), f"Online, {base}, {COMPLETIONS:,} completions", {
            "base": base, "completions": COMPLETIONS, "weights": model_hash(base)
        },
        further=2, finalists={label(REFERENCE, uses): 2}, level=0.005, shows=(END, PASS_32),
    )  # fmt: skip


def _longer(shorter: Experiment, method: str) -> Experiment:
    """Return runs of a method that are three times as long, at the best learning rate of the shorter runs."""
    return Experiment(
        "online", {method: shorter.methods[method]}, (), range(5), (END,), f"Online, hard, {LONG:,} completions",
        {**shorter.fields, "completions": LONG}, tuned=shorter.best, shows=(END, PASS_32),
    )  # fmt: skip


_ON_ALL = (REFERENCE, "trl_gspo", REPLAY)
_HARD = _of("hard", 1, (REPLAY, 0.75), ("topr_group_mean", 0.75), *_ON_ALL), _of("hard", 4, *_ON_ALL)
_EXPERIMENTS = [
    _of("main", 1, *((REPLAY, share) for share in SHARES), ("topr_group_mean", 0.75), ("topr_positives", 0.75),
        "topr_group_mean", *_ON_ALL),
    _of("main", 4, "topr_group_mean", "topr_positives", "trl_vespo", "trl_grpo", *_ON_ALL),
    _of("sure-17", 1, (REPLAY, 0.75), ("topr_group_mean", 0.75), *_ON_ALL), _of("sure-17", 4, *_ON_ALL),
    *_HARD, _longer(_HARD[1], label(REFERENCE, 4)), _longer(_HARD[0], label(REPLAY, 1, 0.75)),
]  # fmt: skip


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons. Each starts after the previous comparisons are complete (`IN_STAGES`)."""
    return _EXPERIMENTS


IN_STAGES = True
QUICK = [_EXPERIMENTS[0].cell(label(REPLAY, 1, 0.75), {"learning_rate": 1e-4, "completions": 1_024}, 0)]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    arm, seed = OnlineArm.of(cell), cell["seed"]
    if seed == TUNING_SEED:
        return run(arm, arm.completions // 2, seed, "validation", at_end=False)
    return run(arm, arm.completions, seed, at_end=not profile.is_quick)


# Completions that a method needs to reach the accuracy of a different method.


def of_method(base: str, method: str, completions: int = COMPLETIONS) -> Experiment:
    """Return the comparison with a method."""
    (experiment,) = (
        one for one in _EXPERIMENTS
        if method in one.methods and one.fields["base"] == base and one.fields["completions"] == completions
    )  # fmt: skip
    return experiment


def find(store: Store, base: str, method: str, completions: int = COMPLETIONS) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of completions, and pass@1 by seed at each number. A failed run keeps its last value.

    Raises:
        Unfinished: the method has not been run.
    """
    experiment = of_method(base, method, completions)
    best, results = experiment.best(store, method), list(experiment.ends(store, method).values())
    if best is None or not results:
        raise Unfinished(f"{method} has not been run online on {base}")
    places = [0, *OnlineArm.of(experiment.cell(method, best, 0)).tested_after]
    runs = [[point["pass@1"] for point in result["curve"]] for result in results]
    return np.array(places), np.array([run + run[-1:] * (len(places) - len(run)) for run in runs])


def needed(tested_after: np.ndarray, curve: np.ndarray, accuracy: float) -> float:
    """Return the number of completions at which a curve reaches an accuracy, by linear interpolation, or infinity."""
    places = np.flatnonzero(curve >= accuracy)
    if len(places) == 0:
        return np.inf
    n = int(places[0])
    if n == 0:
        return float(tested_after[0])
    part = (accuracy - curve[n - 1]) / (curve[n] - curve[n - 1])
    return float(tested_after[n - 1] + part * (tested_after[n] - tested_after[n - 1]))


def share_needed(store: Store, base: str, method: str, target: str, completions: int = COMPLETIONS) -> list[float]:
    """Return the completions that a method needs for the target's final accuracy, as a share of those the target needs.

    Also return its 95% bounds, from a bootstrap over seeds, with the same seeds for both methods.
    """
    (at, ours), (_, theirs) = (find(store, base, one, completions) for one in (method, target))
    drawn = np.random.default_rng(0).integers(len(ours), size=(2_000, len(ours)))
    shares = []
    for seeds in (np.arange(len(ours)), *drawn):
        end = theirs[seeds, -1].mean()
        ours_needed, theirs_needed = (needed(at, curve[seeds].mean(0), end) for curve in (ours, theirs))
        shares.append(ours_needed / theirs_needed)
    low, high = np.quantile(shares[1:], (0.025, 0.975), method="nearest")
    return [shares[0], float(low), float(high)]
