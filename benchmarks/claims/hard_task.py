"""All claims so far on a harder task: more steps, so that the base model is seldom right (the paper's MATH)."""

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.claims.rivals_compared import at, base_point, values_by_seed, work
from benchmarks.pictures import COLOURS, figure, save
from benchmarks.rivals import RIVALS
from benchmarks.setting import Profile
from benchmarks.verdicts import MEASURED, Verdict

__all__ = ["cells", "report", "work"]

# The paper's rivals, TRL's default, AsymRE, and the strongest claim on stale data.
CHOSEN = ("topr", "positives_only", "reinforce", "tis", "ppo", "dpo", "trl_dapo", "trl_vespo", "asymre", "m2po")
SEEDS = 3


def cells(profile: Profile, store: Store) -> list[Cell]:
    """One epoch at the learning rates found on the main task."""
    if profile.seeds == 1:
        return []
    return [
        {
            "claim": "hard_task", "profile": profile.name, "task": "hard", "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival) if rival != "base" else None, "epochs": 1,
        }
        for seed in range(SEEDS)
        for rival in (("base", *CHOSEN) if seed == 0 else CHOSEN)
    ]  # fmt: skip


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    base = base_point(done)
    if not base:
        return []
    names = [name for name in CHOSEN if values_by_seed(done, name, profile.steps)]
    picture, (axes,) = figure(1, 5.2, 3.4)
    order = sorted(names, key=lambda name: at(done, name, profile.steps).mean)
    for row, name in enumerate(order):
        point = at(done, name, profile.steps)
        axes.errorbar(100 * point.mean, row, xerr=100 * point.half, fmt="o", color=COLOURS[name], capsize=2)
    axes.axvline(100 * base["pass@1"], color=COLOURS["base"], ls=":", label="base model")
    axes.set_yticks(range(len(order)), [RIVALS[name][0] for name in order])
    axes.set(xlabel="pass@1 (%)", title="The harder task (four steps), after one epoch")
    axes.legend(loc="lower right")
    save(picture, profile, "hard")
    listed = ", ".join(f"{RIVALS[n][0]} {at(done, n, profile.steps).percent()}" for n in reversed(order))
    return [
        Verdict(
            "A harder task, on which the base model is seldom right (the paper's MATH)",
            "",
            f"base {100 * base['pass@1']:.1f} %; after one epoch {listed} %",
            MEASURED,
            picture="hard.png",
        )
    ]
