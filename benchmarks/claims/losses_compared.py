"""What was published since TOPR, on base models that are wrong in different ways; and the taper's power as a dial."""

from pathlib import Path

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.cells import Cell, Store
from benchmarks.losses import LOSSES
from benchmarks.setting import Profile
from benchmarks.statistics import over_seeds
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
SEEDS = 3
CHOICES: Choices = [{"learning_rate": rate} for rate in arms.ADAMW_RATES]
# TOPR's own two, and positives only, for comparison.
TOPR = {"TOPR, c = 0": "p", "TOPR, p~ = 50 %": 0.5, "positives only": 1.0}


def tried(base: str) -> dict[str, Arm]:
    """Arms by what they are called."""
    own = {label: Arm(base, share) for label, share in TOPR.items()}
    return own | {name: Arm(base, "p", loss=name) for name in LOSSES if name != "taper"}


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    return arms.planned(store, {arm: CHOICES for base in BASES for arm in tried(base).values()}, range(SEEDS))


work = arms.work


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:

    def end(arm: Arm) -> str:
        return over_seeds(arms.measured(store, arm, CHOICES, range(SEEDS))).percent()

    labels = list(tried(BASES[0]))
    table = markdown_table(
        ["loss", *BASES], [[label, *(end(tried(base)[label]) for base in BASES)] for label in labels]
    )
    return [
        Verdict(
            "Losses published since TOPR, and the taper's power",
            "",
            "pass@1 (%) after one pass, each at its own best rate",
            MEASURED,
            details=table,
        )
    ]
