"""What was published since TOPR, on base models that are wrong in different ways; and the taper's power as a dial."""

from pathlib import Path

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.cells import Cell, Store
from benchmarks.losses import LOSSES
from benchmarks.setting import Profile
from benchmarks.statistics import difference, over_seeds
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
SEEDS = 3
CHOICES: Choices = [{"learning_rate": rate} for rate in arms.ADAMW_RATES]
# TOPR's own two, and positives only, for comparison.
OURS = "TOPR, p~ = 50 %"
TOPR = {"TOPR, c = 0": "p", OURS: 0.5, "positives only": 1.0}


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

    ends = {
        (base, label): arms.measured(store, arm, CHOICES, range(SEEDS))
        for base in BASES
        for label, arm in tried(base).items()
    }
    labels = list(tried(BASES[0]))
    published = [label for label in labels if label not in TOPR and "taper" not in label]
    gaps = {}
    for base in BASES:
        best = max(published, key=lambda label, base=base: over_seeds(ends[base, label]).mean)
        gaps[base] = (difference(ends[base, OURS], ends[base, best]), best)
    said = ", ".join(f"{base} {gap.percent(signed=True)} ({best})" for base, (gap, best) in gaps.items())
    table = markdown_table(
        ["loss", *BASES], [[label, *(over_seeds(ends[base, label]).percent() for base in BASES)] for label in labels]
    )
    return [
        Verdict(
            "Other losses for stored rows, and the taper's power",
            "",
            f"pass@1 (%) after one pass, each at its own best rate. {OURS} minus the best of the others: {said}",
            MEASURED,
            details=table,
            headline=(
                "**Other losses for stored rows** (OAPL, DRO, W-REINFORCE, Reinforce-Rej, BAPO), one pass, each at its "
                f"own best rate: points of pass@1 of {OURS} above the best of them: {said}."
            ),
        )
    ]
