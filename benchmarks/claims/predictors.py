"""Can the share be predicted from a base model and its rows? Regrets under AdamW, over all base models."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.bases import AUTHORS
from benchmarks.cells import Cell, Store
from benchmarks.claims.optimizers_compared import SHARES, gradients_cell, near, work
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.setting import Profile
from benchmarks.statistics import Interval, interval
from benchmarks.verdicts import Verdict, markdown_table

__all__ = ["cells", "report", "work"]

BASES = tuple(AUTHORS)
CHOICES: Choices = [{"learning_rate": rate} for rate in arms.ADAMW_RATES]
# The predictors that hypotheses are about: one was named before anything was run, one after a look at four models.
NAMED = {"predictor": "gain of adamw", "surprise": "second moment of log-probabilities"}
BESIDE = "50%"  # the constant that every rule is compared with
FEW = 0.25  # share of right answers, below which they are few
TRIED: tuple[float | str, ...] = ("p", *SHARES)


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    tuned = {Arm(base, share): CHOICES for base in BASES for share in TRIED}
    return [gradients_cell(base) for base in BASES] + arms.planned(store, tuned, range(profile.seeds))


# Report.


def predictions(gradients: dict[str, Any]) -> dict[str, float]:
    """Shares by predictor, from a base model's gradients."""
    by_gain = {
        f"gain of {name}": gradients["shares"][int(np.argmax(values))] for name, values in gradients["gains"].items()
    }
    by_noise = {
        name if "variance" in name else f"second moment of {name}": share
        for name, share in gradients["least_noise"].items()
    }
    return by_noise | by_gain


def _headline(regrets: dict[str, Interval], groups: str) -> str:
    best = min(regrets, key=lambda name: regrets[name].mean)
    return (
        f"**Effective share of positives, one pass, {len(BASES)} base models**: points of pass@1 lost against the best "
        f"of six shares of each (intervals over seeds): c = 0 {regrets['c = 0'].percent()}, 20% "
        f"{regrets['20%'].percent()}, 50% {regrets['50%'].percent()}, 100% {regrets['100%'].percent()}. {groups} The "
        f"best rule that predicts a share from rows and model loses {regrets[best].percent()}. Right answers repeated "
        "to as much computation end above every share."
    )


def _by_group(lost: dict[str, dict[str, float]], p: dict[str, float]) -> str:
    """Say what c = 0 and 50% lose where right answers are few and where they are many, and over base models.

    Args:
        lost: by rule and base model, the mean over seeds.
        p: share of right answers by base model.
    """
    few = [base for base in BASES if p[base] < FEW]
    many = [base for base in BASES if p[base] >= FEW]

    def mean(rule: str, bases: list[str]) -> str:
        return f"{100 * float(np.mean([lost[rule][base] for base in bases])):.1f}"

    over_bases = {rule: interval([lost[rule][base] for base in BASES]).percent() for rule in ("c = 0", BESIDE)}
    parts = [
        f"{label}, c = 0 loses {mean('c = 0', bases)}, {BESIDE} {mean(BESIDE, bases)} and 80% {mean('80%', bases)}"
        for label, bases in (
            (f"On the {len(few)} base models with under {FEW:.0%} right answers", few),
            (f"on the other {len(many)}", many),
        )
        if bases
    ]
    return (
        f"{'; '.join(parts)}. With intervals over base models instead of seeds, c = 0 loses {over_bases['c = 0']} and "
        f"{BESIDE} {over_bases[BESIDE]}."
    )


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    ends: dict[str, dict[float | str, list[float]]] = {base: {} for base in BASES}
    for base in BASES:
        for share in TRIED:
            found = arms.measured(store, Arm(base, share), CHOICES, range(profile.seeds))
            ends[base][share] = [accuracy for accuracy, _ in found.values()]
    top = {base: max(TRIED, key=lambda share, base=base: np.mean(ends[base][share])) for base in BASES}
    gradients = {base: store.get(gradients_cell(base)) or {} for base in BASES}
    predicted = {base: predictions(gradients[base]) for base in BASES}

    def lost(base: str, share: float | str) -> list[float]:
        """By seed."""
        at = share if share == "p" else near(float(share))
        return [best - here for best, here in zip(ends[base][top[base]], ends[base][at], strict=True)]

    rules: dict[str, dict[str, float | str]] = {
        **{name: {base: predicted[base][name] for base in BASES} for name in predicted[BASES[0]]},
        "c = 0": dict.fromkeys(BASES, "p"),
        **{f"{share:.0%}": dict.fromkeys(BASES, share) for share in SHARES},
    }
    by_seed = {name: np.mean([lost(base, shares[base]) for base in BASES], axis=0) for name, shares in rules.items()}
    regrets = {name: interval(values) for name, values in by_seed.items()}
    constants = [name for name in rules if name == "c = 0" or name.endswith("%")]
    rows = [
        [
            base, f"{gradients[base]['p']:.0%}", *(interval(ends[base][share]).percent() for share in TRIED),
            *(f"{predicted[base][name]:.0%}" for name in predicted[base]),
        ]
        for base in BASES
    ]  # fmt: skip
    header = ["base model", "p", "c = 0", *(f"{share:.0%}" for share in SHARES), *predicted[BASES[0]]]
    by_base = {name: {base: np.mean(lost(base, shares[base])) for base in BASES} for name, shares in rules.items()}
    worst = {name: max(losses, key=lambda base, losses=losses: losses[base]) for name, losses in by_base.items()}
    beside = [
        [
            name, regret.percent(), f"{100 * by_base[name][worst[name]]:.1f}, {worst[name]}",
            "" if name == BESIDE else interval(by_seed[BESIDE] - by_seed[name]).percent(signed=True),
        ]
        for name, regret in sorted(regrets.items(), key=lambda item: item[1].mean)
    ]  # fmt: skip
    own_header = ["rule", "mean regret", "largest regret", f"regret of {BESIDE} minus this"]
    groups = _by_group(by_base, {base: gradients[base]["p"] for base in BASES})
    tables = [f"{markdown_table(own_header, beside)}\n\n{groups}", markdown_table(header, rows)]
    verdicts = []
    for (hypothesis, named), table in zip(NAMED.items(), tables, strict=True):
        gained = {name: interval(by_seed[name] - by_seed[named]) for name in constants}
        verdicts.append(
            HYPOTHESES[hypothesis].judged(
                f"points of pass@1 lost against the best share of each of {len(BASES)} base models, on average: "
                f"{named} {regrets[named].percent()}. Constants lose more than it by "
                + ", ".join(f"{name} {gain.percent(signed=True)}" for name, gain in gained.items()),
                all(gain.low > 0 for gain in gained.values()),
                details=table,
                headline=_headline(regrets, groups) if hypothesis == "predictor" else "",
            )
        )
    return verdicts
