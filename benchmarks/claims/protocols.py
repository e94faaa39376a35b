"""TOPR against positives only by three protocols, on base models that are wrong in different ways."""

from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import PROTOCOLS, Arm, Choices
from benchmarks.cells import Cell, Store
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.pictures import COLOURS, figure, save
from benchmarks.setting import Profile
from benchmarks.statistics import Interval, Measured, difference, over_seeds
from benchmarks.verdicts import Verdict, markdown_table

BASES = ("slips-30", "slips-3", "misconception-10", "misconception-3", "sure-17", "sure-3", "wanders-10", "wanders-3")
SHARES = ("p", 0.2, 0.5, "group_mean")
BALANCED, HALF = "balanced", "half"
CHOICES: Choices = [{"learning_rate": rate, "batch_rows": batch} for batch in (32, 8) for rate in arms.ADAMW_RATES]
AT_32 = [choice for choice in CHOICES if choice["batch_rows"] == 32]
# What the picture shows: share and protocol, marker and color.
SHOWN: dict[str, tuple[Any, str, str, str]] = {
    "TOPR, c = 0 (the paper's)": ("p", "steps", "v", COLOURS["opr"]),
    "positives only: wrong answers removed (the paper's)": (1.0, "removed", "s", COLOURS["removed"]),
    "positives only: as many steps": (1.0, "steps", "D", COLOURS["dpo"]),
    "TOPR, p~ = 50%": (0.5, "steps", "o", COLOURS["topr"]),
    "TOPR, half of the rows right answers, repeated": (0.5, BALANCED, "P", COLOURS["tis"]),
    "positives only: right answers repeated, as much computation": (1.0, "rows", "*", COLOURS["positives_only"]),
}
ALONE = {  # what positives only is given, by protocol
    "removed": "wrong answers removed", "steps": "as many steps", "rows": "repeated", HALF: "repeated, half the steps",
}  # fmt: skip
LABELS: dict[Any, str] = {"p": "c = 0", "group_mean": "group mean", 1.0: "positives only"}


def arms_of(base: str) -> list[Arm]:
    tapered = [*(Arm(base, share) for share in SHARES), Arm(base, 0.5, BALANCED)]
    return tapered + [Arm(base, 1.0, protocol) for protocol in (*PROTOCOLS, HALF)]


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return [Arm(base, share).cell(0) for base in QUICK for share in (0.5, 1.0)]
    own = {arm: CHOICES for base in BASES for arm in arms_of(base)}
    same = {Arm(base, share): AT_32 for base in BASES for share in (0.5, 1.0)}
    both = [cell for tuned in (own, same) for cell in arms.planned(store, tuned, range(profile.seeds))]
    return [cell for n, cell in enumerate(both) if cell not in both[:n]]


QUICK = ("main", "misconception-10", "sure-17", "wanders-10")  # one of each kind
work = arms.work


# Report.


def measured(store: Store, profile: Profile, arm: Arm, choices: Choices = CHOICES) -> Measured:
    """pass@1 of an arm at its best rate, and rows per step if they are among the choices, by seed."""
    return arms.measured(store, arm, choices, range(profile.seeds))


def _draw(ends: dict[tuple[str, Any, str], Measured], out: Path) -> str:
    picture, (panel,) = figure(1, 7.6, 4.6)
    for n, (label, (share, protocol, marker, color)) in enumerate(SHOWN.items()):
        points = [over_seeds(ends[base, share, protocol]) for base in BASES]
        heights = [-k + 0.3 - 0.6 * n / (len(SHOWN) - 1) for k in range(len(BASES))]
        means, halves = [100 * point.mean for point in points], [100 * point.half for point in points]
        panel.errorbar(means, heights, xerr=halves, fmt=marker, color=color, label=label, ms=5, lw=1)
    panel.set_yticks([-k for k in range(len(BASES))], BASES)
    panel.grid(visible=False, axis="y")
    for k in range(1, len(BASES)):
        panel.axhline(0.5 - k, color="#cccccc", lw=0.6)
    panel.set(xlabel="pass@1 after one pass over the rows (%), 95% intervals", xlim=(0, None))
    picture.legend(loc="outside upper left", ncols=2, fontsize=8)
    return save(picture, out, "protocols")


def _updates(store: Store, profile: Profile) -> str:
    """Say how many updates the protocol that removes wrong answers leaves."""
    made = []
    for base in BASES:
        arm = arms.best(store, Arm(base, 1.0, "removed"), CHOICES)
        steps = [result["steps"] for _, result in store.results([arm.cell(seed) for seed in range(profile.seeds)])]
        made.append(f"{base} {min(steps)} to {max(steps)} of {arm.batch_rows} rows")
    return (
        f"With wrong answers removed, positives only makes few updates: {', '.join(made)}; TOPR makes 80 of 32 rows or "
        "320 of 8"
    )


def _range(gaps: list[Interval]) -> str:
    low, high = (extreme(gap.mean for gap in gaps) for extreme in (min, max))
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    if profile.is_quick:
        return []
    ends = {(base, arm.share, arm.protocol): measured(store, profile, arm) for base in BASES for arm in arms_of(base)}
    gaps = {
        (base, protocol): difference(ends[base, 0.5, "steps"], ends[base, 1.0, protocol])
        for base in BASES
        for protocol in PROTOCOLS
        if protocol != "steps"
    } | {
        (base, "steps"): difference(*(measured(store, profile, Arm(base, share), AT_32) for share in (0.5, 1.0)))
        for base in BASES
    }
    few = [base for base in BASES if int(base.rpartition("-")[2]) <= 17]
    fewest = [base for base in BASES if base.endswith("-3")]
    header = ["base model", *(LABELS.get(s, f"p~ {s:.0%}" if isinstance(s, float) else s) for s in SHARES)]
    header.append("half right, half wrong")
    half, added = (
        {base: difference(ends[base, 0.5, BALANCED], ends[base, 1.0, protocol]) for base in BASES}
        for protocol in ("rows", HALF)
    )
    table = markdown_table(
        [*header, *(f"positives only, {ALONE[protocol]}" for protocol in (*PROTOCOLS, HALF))],
        [
            [base, *(over_seeds(ends[base, arm.share, arm.protocol]).percent() for arm in arms_of(base))]
            for base in BASES
        ],
    )

    def said(names: list[str], protocol: str) -> str:
        return ", ".join(f"{base} {gaps[base, protocol].percent(signed=True)}" for base in names)

    def above(gap: Interval) -> bool:
        return gap.low > 0

    once = _updates(store, profile)

    return [
        HYPOTHESES["protocol"].judged(
            f"TOPR at p~ = 50% minus positives only, points of pass@1: wrong answers removed, {said(few, 'removed')}; "
            f"as much computation, {said(list(BASES), 'rows')}; as many steps on the same rows, 32 per step, "
            f"{said(list(BASES), 'steps')}. {once}",
            all(above(gaps[base, "removed"]) for base in few),
            all(gaps[base, "rows"].low <= 0.02 for base in BASES),
            picture=_draw(ends, out),
            details=table,
            headline=(
                f"**Against positives only, one pass, {len(BASES)} base models**: p~ = 50% minus positives only, "
                "points of pass@1: wrong answers removed (the paper's protocol) "
                f"{_range([gaps[base, 'removed'] for base in BASES])} (few updates against many), as many steps on the "
                f"same rows {_range([gaps[base, 'steps'] for base in BASES])}, right answers repeated to as much "
                f"computation {_range([gaps[base, 'rows'] for base in BASES])}."
            ),
        ),
        HYPOTHESES["few"].judged(
            f"TOPR at p~ = 50% minus positives only with as much computation: {said(fewest, 'rows')}",
            sum(above(gaps[base, "rows"]) for base in fewest) >= 3,
        ),
        HYPOTHESES["balanced"].judged(
            "half right, half wrong minus positives only, with as much computation: "
            + ", ".join(f"{base} {gap.percent(signed=True)}" for base, gap in half.items()),
            all(gap.low <= 0.02 and gap.high >= -0.02 for gap in half.values()),
        ),
        HYPOTHESES["added"].judged(
            "half right, half wrong minus positives only in half as many steps: "
            + ", ".join(f"{base} {gap.percent(signed=True)}" for base, gap in added.items()),
            all(above(gap) for base, gap in added.items() if base.startswith("sure")),
            all(gap.high >= 0 for gap in added.values()),
        ),
    ]
