"""Other losses for stored rows, on base models that are wrong in different ways; and the taper's power as a dial."""

from pathlib import Path

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.cells import Cell, Store
from benchmarks.losses import LOSSES
from benchmarks.setting import Profile
from benchmarks.statistics import Interval, difference, interval, over_seeds
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
SEEDS = 3
CHOICES: Choices = [{"learning_rate": rate} for rate in arms.ADAMW_RATES]
# TOPR's own two, and positives only, for comparison.
OURS = "TOPR, p~ = 50%"
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

_SOURCES = (
    "OAPL is of arXiv 2602.19362, DRO of 2405.19107, W-REINFORCE of 2506.01347, Reinforce-Rej of 2504.11343, BAPO of "
    "2510.18927: its limits are moved as its paper says, the upper one first and for what is not clipped, while its "
    "published code moves the lower one first, counts clipped tokens and clips negatives at 3. taper^τ: w = "
    "min((π/μ)^τ, 1)."
)


def _untrained(store: Store, base: str) -> Interval:
    """Share of right answers among the rows."""
    arm = arms.best(store, tried(base)[OURS], CHOICES)
    return interval([store.results([arm.cell(seed)])[0][1]["p"] for seed in range(SEEDS)])


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:

    ends = {
        (base, label): arms.measured(store, arm, CHOICES, range(SEEDS))
        for base in BASES
        for label, arm in tried(base).items()
    }
    labels = list(tried(BASES[0]))
    published = [label for label in labels if label not in TOPR and "taper" not in label]

    def above(labels: list[str]) -> str:
        """Say how far TOPR is above the best of some losses, by base model."""
        gaps = []
        for base in BASES:
            best = max(labels, key=lambda label, base=base: over_seeds(ends[base, label]).mean)
            gaps.append(f"{base} {difference(ends[base, OURS], ends[base, best]).percent(signed=True)} ({best})")
        return ", ".join(gaps)

    said, without = above(published), above([label for label in published if not label.startswith("DRO")])
    rates = {key: arms.best(store, tried(key[0])[key[1]], CHOICES).learning_rate for key in ends}
    table = markdown_table(
        ["loss", *BASES],
        [
            ["base model (training problems)", *(_untrained(store, base).percent() for base in BASES)],
            *(
                [label, *(f"{over_seeds(ends[base, label]).percent()}, {rates[base, label]:g}" for base in BASES)]
                for label in labels
            ),
        ],
    )
    return [
        Verdict(
            "Other losses for stored rows, and the taper's power",
            "",
            f"pass@1 (%) after one pass, and the rate that was best. {OURS} minus the best of the others: {said}. "
            f"Minus the best of the others but DRO: {without}",
            MEASURED,
            details=f"{table}\n\n{_SOURCES}",
            headline=(
                "**Other losses for stored rows** (OAPL, DRO, W-REINFORCE, Reinforce-Rej, BAPO), one pass, each at its "
                f"own best rate: points of pass@1 of {OURS} above the best of them: {said}; "
                f"above the best of them but DRO: {without}."
            ),
        )
    ]
