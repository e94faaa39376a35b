"""`TOPRTrainer` beside `GRPOTrainer` in training: what a completion that was sampled is worth, used once or often."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import TUNING_SEED
from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.online import COMPLETIONS, GENERATION_ROWS, SAMPLES_AT_END, TOPR, TRL, OnlineArm, run
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.setting import Profile
from benchmarks.statistics import Interval, interval
from benchmarks.verdicts import MEASURED, Verdict, markdown_table

BASES = ("main", "sure-17", "hard")  # slips, a confident mistake, more steps per problem
ON_ALL = ("trl_dapo", "trl_gspo", "topr_mean")
POSITIVES = "topr_positives"
OTHERS = ("trl_vespo", "topr_paper", "trl_cispo", "trl_sapo", "trl_masked", "trl_grpo")
REPLAYED, SHARES = "topr_mean", (0.75, 0.5, 0.25)
RATES = {1: (1e-4, 3e-4, 1e-3), 4: (3e-5, 1e-4, 3e-4), 16: (1e-5, 3e-5, 1e-4)}  # by how often a batch is used
FURTHER = 2
SEEDS = 5
LONG = 3 * COMPLETIONS  # of a few arms, at the rate that is best for them after `COMPLETIONS`
REFERENCE = "trl_dapo"
# One seed chooses the rates. What the others are measured by is run at its two best rates, any method at all that one
# seed can't tell apart from its best; the one that ends highest with all seeds counts.
FINALISTS, LEVEL = {REFERENCE: 2}, 0.005
QUICK, QUICK_COMPLETIONS = (OnlineArm("main", REFERENCE, 4), OnlineArm("main", REPLAYED, replay_share=0.75)), 1_024
# The page shows the arms that are finished: all of them take a day of two cores.
REPORTS_WHAT_IS_FINISHED = True


def _arms(base: str, methods: Sequence[str], *uses: int) -> list[OnlineArm]:
    return [
        # Used 16 times, so many completions would take too long.
        OnlineArm(base, method, count, completions=COMPLETIONS // 2 if count >= 16 else COMPLETIONS)
        for count in uses
        for method in methods
    ]


# What matters most comes first; a stage begins when the one before it is finished.
STAGES = (
    [OnlineArm("main", REPLAYED, replay_share=share) for share in SHARES]
    + _arms("main", (*ON_ALL, "topr_group_mean"), 4, 1),
    *(
        [OnlineArm(base, REPLAYED, replay_share=SHARES[0]), *_arms(base, ON_ALL, 4), *_arms(base, ON_ALL, 1)]
        for base in ("sure-17", "hard")
    ),
    # Where the base model is rarely right, most negatives are of problems without a right answer: is it better without?
    [OnlineArm(base, "topr_group_mean", replay_share=SHARES[0]) for base in reversed(BASES)],
    # On the first task, GRPO with four uses keeps up with it until its curve flattens: here too, only later?
    [
        OnlineArm("hard", REFERENCE, 4, completions=LONG),
        OnlineArm("hard", REPLAYED, replay_share=SHARES[0], completions=LONG),
    ],
    _arms("main", ON_ALL, 16),
    _arms("main", (POSITIVES,), 4),
    [OnlineArm("main", POSITIVES, replay_share=SHARES[0])],  # with four uses it ends above the others: here, too?
    _arms("main", OTHERS, 4),  # where methods differ most
    _arms("main", (POSITIVES, *OTHERS), 1),
    _arms("main", ("topr_group_mean", "trl_cispo", "trl_vespo"), 16) + _arms("sure-17", ON_ALL, 16),
)


def _tuned(store: Store, arm: OnlineArm) -> tuple[list[OnlineArm], list[OnlineArm]]:
    """The arm at the rates that are tried, and at those that are run with all seeds: none before all are tried."""
    if arm.completions > COMPLETIONS:  # a stage after the one of the shorter runs
        shorter = MeasuredArm.at_best_rate(store, replace(arm, completions=COMPLETIONS))
        return [], [replace(arm, learning_rate=shorter.arm.learning_rate)]

    def end(choice: dict[str, Any]) -> float | None:
        result = store.get(replace(arm, **choice).cell(TUNING_SEED))
        return None if result is None else 0.0 if result["failed"] else float(result["curve"][-1]["pass@1"])

    tried, best = arms.tune([{"learning_rate": rate} for rate in RATES[arm.uses]], FURTHER, end)
    by_end = [] if best is None else sorted(((end(choice) or 0.0, choice) for choice in tried), key=lambda one: -one[0])
    level = sum(accuracy > by_end[0][0] - LEVEL for accuracy, _ in by_end)
    finalists = [choice for _, choice in by_end[: max(FINALISTS.get(arm.method, 1), level)]]
    return [replace(arm, **choice) for choice in tried], [replace(arm, **choice) for choice in finalists]


def _with_all_seeds(*arms_at_a_rate: OnlineArm) -> list[Cell]:
    return [arm.cell(seed) for arm in arms_at_a_rate for seed in range(SEEDS)]


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return [arm.cell(seed=0) for arm in QUICK]
    planned: list[Cell] = []
    for stage in STAGES:
        tuned = [_tuned(store, arm) for arm in stage]
        planned += [one.cell(TUNING_SEED) for tried, _ in tuned for one in tried]
        planned += [cell for _, finalists in tuned for cell in _with_all_seeds(*finalists)]
        if store.unfinished(planned):
            break
    return planned


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    arm, seed = OnlineArm.of(cell), cell["seed"]
    if profile.is_quick:
        return run(arm, QUICK_COMPLETIONS, seed)
    if seed == TUNING_SEED:
        return run(arm, arm.completions // 2, seed, "validation")
    return run(arm, arm.completions, seed)


# Report.


def _label(arm: OnlineArm) -> str:
    replayed = f", {arm.replay_share:.0%} used again" if arm.replay_share else ""
    return {**TRL, **TOPR}[arm.method][0] + replayed


class MeasuredArm:
    """An arm at one rate, with the results of all seeds."""

    def __init__(self, store: Store, arm: OnlineArm) -> None:
        self.arm = arm
        self.results = [result for _, result in store.results(_with_all_seeds(arm))]
        self.tested_after = np.array([0, *arm.tested_after])
        # A run that has failed stays where it was.
        by_run = [[point["pass@1"] for point in result["curve"]] for result in self.results]
        self.pass_at_1 = np.array([run + run[-1:] * (len(self.tested_after) - len(run)) for run in by_run])

    @classmethod
    def at_best_rate(cls, store: Store, arm: OnlineArm) -> "MeasuredArm":
        """Of the rates that are run with all seeds, the one that ends highest.

        Raises:
            Unfinished: not all of them have been run.
        """
        finalists = _tuned(store, arm)[1]
        if not finalists or store.unfinished(_with_all_seeds(*finalists)):
            raise Unfinished(f"{arm} has not been run")
        return max((cls(store, one) for one in finalists), key=lambda found: found.points[-1].mean)

    @property
    def points(self) -> list[Interval]:
        return [interval(of_seeds) for of_seeds in self.pass_at_1.T.tolist()]

    @property
    def _ended(self) -> list[dict[str, Any]]:
        """The results of the runs that have not failed."""
        return [result for result in self.results if not result["failed"]]

    @property
    def seconds(self) -> list[float]:
        curves = [[point["seconds"] for point in result["curve"]] for result in self._ended]
        return np.mean(curves, axis=0).tolist() if curves else []

    @property
    def label(self) -> str:
        return _label(self.arm)

    @property
    def pass_at_end(self) -> str:
        """pass@k with `SAMPLES_AT_END`, in percent."""
        return _mean([100 * result["end"][f"pass@{SAMPLES_AT_END}"] for result in self._ended], digits=0)

    @property
    def entropy(self) -> str:
        """At the end, in nats per token."""
        return _mean([result["entropy"] for result in self._ended], digits=2)


def _mean(values: list[float], digits: int) -> str:
    return f"{np.mean(values):.{digits}f}" if values else "-"


def needed(tested_after: Sequence[float], curve: Sequence[float], accuracy: float) -> float:
    """Completions after which a curve first has this accuracy, by straight lines between its points; or infinity."""
    places = np.flatnonzero(np.asarray(curve) >= accuracy)
    if len(places) == 0:
        return np.inf
    n = int(places[0])
    if n == 0:
        return float(tested_after[0])
    part = (accuracy - curve[n - 1]) / (curve[n] - curve[n - 1])
    return float(tested_after[n - 1] + part * (tested_after[n] - tested_after[n - 1]))


def needed_by(method: MeasuredArm, target: MeasuredArm) -> tuple[float, float, float]:
    """Completions until `method` is as accurate as `target` ends: of the mean curves, and 95% of the bootstrap.

    Seeds are drawn with replacement, the same ones for both.
    """
    drawn = np.random.default_rng(0).integers(SEEDS, size=(2_000, SEEDS))
    counts = [
        needed(method.tested_after, method.pass_at_1[seeds].mean(0), target.pass_at_1[seeds, -1].mean())
        for seeds in (np.arange(SEEDS), *drawn)
    ]
    low, high = np.quantile(counts[1:], (0.025, 0.975), method="nearest")
    return counts[0], float(low), float(high)


def _count(count: float) -> str:
    return "not reached" if np.isinf(count) else f"{count:,.0f}"


def _needed(method: MeasuredArm, target: MeasuredArm) -> str:
    count, low, high = needed_by(method, target)
    return _count(count) if np.isinf(low) else f"{_count(count)} ({_count(low)} to {_count(high)})"


def _planned() -> dict[tuple[str, int], list[OnlineArm]]:
    """The arms of each table: of a base, and of runs of so many completions; those of half as many are with them."""
    tables: dict[tuple[str, int], list[OnlineArm]] = {}
    for arm in (arm for stage in STAGES for arm in stage):
        tables.setdefault((arm.base, max(arm.completions, COMPLETIONS)), []).append(arm)
    return tables


def _finished(store: Store, planned: list[OnlineArm]) -> tuple[list[MeasuredArm], list[OnlineArm]]:
    """The arms that are, and those that are not."""
    found, missing = [], []
    for arm in planned:
        try:
            found.append(MeasuredArm.at_best_rate(store, arm))
        except Unfinished:
            missing.append(arm)
    return found, missing


def _by_rate(store: Store, planned: list[OnlineArm]) -> str:
    """Where each arm is on the tuning seed at each rate, those too that have not been run with all seeds."""
    ends: dict[tuple[str, int], dict[float, str]] = {}
    for arm in planned:
        for one in _tuned(store, arm)[0]:
            if result := store.get(one.cell(TUNING_SEED)):
                end = "failed" if result["failed"] else f"{100 * result['curve'][-1]['pass@1']:.1f}"
                ends.setdefault((_label(arm), arm.uses), {})[one.learning_rate] = end
    rates = sorted({rate for of_arm in ends.values() for rate in of_arm})
    rows = [
        [label, str(uses), *(of_arm.get(rate, "-") for rate in rates)]
        for (label, uses), of_arm in sorted(ends.items(), key=lambda one: one[0][1])
    ]
    return (
        "\n\nOf the seed that chooses the rate: pass@1 (%) on other problems after half as many completions, by "
        "learning rate. It shows at which rate each method breaks.\n\n"
        + markdown_table(["method", "uses in a row", *(f"{rate:g}" for rate in rates)], rows)
    )


def _named(missing: list[OnlineArm]) -> str:
    by_uses = {
        uses: ", ".join(_label(arm) for arm in missing if arm.uses == uses)
        for uses in sorted({arm.uses for arm in missing})
    }
    return "; ".join(f"with {uses} use{'s' * (uses > 1)}: {names}" for uses, names in by_uses.items())


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    if profile.is_quick:
        return []
    verdicts = []
    for (base, completions), planned in _planned().items():
        found, missing = _finished(store, planned)
        if any(m.arm.method in TRL for m in found):
            verdict = _verdict(base, completions, found, missing, out)
            if completions <= COMPLETIONS:  # longer runs are at the rate of these
                verdict = replace(verdict, details=verdict.details + _by_rate(store, planned))
            verdicts.append(verdict)
    return verdicts


def _verdict(base: str, completions: int, found: list[MeasuredArm], missing: list[OnlineArm], out: Path) -> Verdict:
    task, picture, sampled, rates = base, base, f"{completions:,} completions", "its own best rate"
    if completions > COMPLETIONS:
        task, picture, rates = f"{base}, {sampled}", f"{base}-long", "the best rate of shorter runs"
    if any(m.arm.completions < completions for m in found):
        sampled += " (half as many where each is used 16 times)"
    target = max((m for m in found if m.arm.method in TRL), key=lambda m: m.points[-1].mean)
    rows = [
        [
            m.label, str(m.arm.uses), f"{m.arm.learning_rate:g}", m.points[-1].percent(), _needed(m, target),
            m.pass_at_end, m.entropy,
            f"{m.arm.completions // GENERATION_ROWS * m.arm.steps:,}", f"{m.seconds[-1]:.0f}" if m.seconds else "-",
            str(sum(result["failed"] for result in m.results)),
        ]
        for m in sorted(found, key=lambda m: (m.arm.uses, m.arm.replay_share))
    ]  # fmt: skip
    accuracy = target.points[-1].percent()
    header = ["method", "uses in a row", "rate", "pass@1 (%)", f"completions until {100 * target.points[-1].mean:.1f}%",
              f"pass@{SAMPLES_AT_END} (%)", "entropy", "steps", "seconds", "failed"]  # fmt: skip
    zero_and_one = ""
    if any(m.arm.method == "topr_paper" for m in found):
        zero_and_one = ". With rewards of 0 and 1, TOPR with c = 0 is positives only; nothing else changes"
    return Verdict(
        f"Online, {task}: what a sampled completion is worth, used once or often",
        "",
        f"after {sampled}, each method at {rates}, {SEEDS} seeds. Of TRL's methods, {target.label} with "
        f"{target.arm.uses} uses ends highest, at {accuracy}%; how many completions the others need for that, with 95% "
        "of the bootstrap over seeds. Seconds are the time of one core, without tests; sampling costs this model little"
        + zero_and_one
        + (f". Planned and not measured: {_named(missing)}" if missing else ""),
        MEASURED,
        picture=_picture(picture, found, out),
        details=markdown_table(header, rows),
        headline=_headline(task, found, target),
    )


def _headline(task: str, found: list[MeasuredArm], target: MeasuredArm) -> str:
    """How the arm with most rows used again ends beside the best of TRL's; "" where there is none."""
    again = max(found, key=lambda m: m.arm.replay_share)
    if not again.arm.replay_share:
        return ""
    above = interval((again.pass_at_1[:, -1] - target.pass_at_1[:, -1]).tolist()).percent(signed=True)
    count = needed_by(again, target)[0]
    needs = f"needs {count / target.arm.completions:.0%} of its completions for the same accuracy"
    if np.isinf(count):
        needs = "does not reach its accuracy"
    return (
        f"Online, {task}, from as many completions: TOPR with {again.arm.replay_share:.0%} of each step's rows used "
        f"again ends {above} points beside {target.label} with {target.arm.uses} uses of each batch, and {needs}"
    )


_DRAWN = {
    (REFERENCE, 0.0): COLOURS[REFERENCE],
    ("trl_vespo", 0.0): COLOURS["trl_vespo"],
    ("topr_mean", 0.0): COLOURS["topr"],
    ("topr_group_mean", 0.0): "#edae49",
    ("topr_mean", max(SHARES)): "#2a9d8f",
    ("topr_group_mean", max(SHARES)): "#8d6a9f",
    (POSITIVES, max(SHARES)): "#5a5a5a",
}


def _picture(name: str, found: list[MeasuredArm], out: Path) -> str:
    picture, (by_completions, by_steps, by_seconds) = figure(3, 3.6, 3.4)
    for m in found:
        colour = _DRAWN.get((m.arm.method, m.arm.replay_share))
        if colour is None:
            continue
        style = {1: "-", 4: "--", 16: ":"}[m.arm.uses]
        label = m.label + (f", {m.arm.uses} uses" if m.arm.uses > 1 else "")
        steps = m.arm.steps / m.arm.generation_rows * m.tested_after
        for axes, x in ((by_completions, m.tested_after), (by_steps, steps), (by_seconds, np.array(m.seconds))):
            if len(x):
                curve(axes, x.tolist(), m.points, label, color=colour, ls=style, marker="o", ms=2.5)
    for axes, unit in ((by_completions, "completions sampled"), (by_steps, "optimizer steps"), (by_seconds, "seconds")):
        axes.set(xlabel=unit, ylabel="pass@1 (%)")
    picture.legend(*by_completions.get_legend_handles_labels(), fontsize=6, loc="outside right upper")
    return save(picture, out, f"online-{name}")
