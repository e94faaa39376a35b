"""Which share of positives is best under which optimizer, what predicts it, and what the taper is worth."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import arms
from benchmarks.arms import Arm, Choices
from benchmarks.cells import Cell, Store
from benchmarks.gradients import gains, moments, shares_of_least_noise
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.setting import Profile, base_model, candidates, model_hash
from benchmarks.statistics import Measured, difference, interval, over_seeds
from benchmarks.verdicts import Verdict, markdown_table

BASES = ("slips-30", "misconception-10", "sure-17", "wanders-10")
SHARES = (0.2, 0.35, 0.5, 0.8, 1.0)
SEEDS = 3
RATES = {
    "adamw": arms.ADAMW_RATES,
    "sgd": (0.03, 0.1, 0.3),
    "whole": (0.01, 0.03, 0.1),
    "tensors": (0.003, 0.01, 0.03),
    "muon": (1e-4, 3e-4, 1e-3),
    "adafactor": (3e-5, 1e-4, 3e-4),
    "signs": (1e-5, 3e-5, 1e-4),
}
NO_TAPER = {"adamw": (0.2, 0.5), "sgd": (0.2, 0.5)}
ROWS = 1_000  # of each sign, for moments of gradients


def _choices(optimizer: str) -> Choices:
    return [{"learning_rate": rate} for rate in RATES[optimizer]]


def tuned() -> dict[Arm, Choices]:
    """The arms, and the rates that each is tried with."""
    found = {
        Arm(base, share, optimizer=optimizer): _choices(optimizer)
        for optimizer in RATES
        for base in BASES
        for share in SHARES
    }
    for optimizer, shares in NO_TAPER.items():
        found |= {Arm("sure-17", share, optimizer=optimizer, loss="no taper"): _choices(optimizer) for share in shares}
    return found


def gradients_cell(base: str) -> Cell:
    """The cell of a base model's gradients, which the claim `predictors` reads, too."""
    return {"claim": "optimizers", "part": "gradients", "base": base, "weights": model_hash(base)}


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return [gradients_cell("sure-17")]
    return [gradients_cell(base) for base in BASES] + arms.planned(store, tuned(), range(SEEDS))


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    return of_gradients(cell["base"], profile) if cell.get("part") == "gradients" else arms.work(cell, profile)


def of_gradients(base: str, profile: Profile) -> dict[str, Any]:
    """Mean squared norms by sign, and what each optimizer gains by share, at the base model."""
    pool, model = candidates(base, profile, arms.TUNING_SEED), base_model(base)
    rng = np.random.default_rng(0)
    places = [rng.permutation(np.flatnonzero((pool.rewards > 0) == sign))[:ROWS] for sign in (True, False)]
    right, wrong = (moments(model, pool[found]) for found in places)
    p, shares = float((pool.rewards > 0).mean()), np.linspace(0.02, 1.0, 50)
    sizes = [parameter.numel() for parameter in model.parameters()]
    cosine = torch.nn.functional.cosine_similarity(right.means_2D.mean(0), wrong.means_2D.mean(0), dim=0)
    return {
        "p": p,
        "rows": [len(found) for found in places],
        "least_noise": shares_of_least_noise(right, wrong, p),
        "norms": {"right": float(right.norms_N.mean()), "wrong": float(wrong.norms_N.mean())},
        # Of 1, how few coordinates hold the gradient: (Σ m²)² / (D Σ m⁴).
        "spread": {"right": _spread(right.squares_2D.mean(0)), "wrong": _spread(wrong.squares_2D.mean(0))},
        "cosine": float(cosine),
        "shares": shares.round(2).tolist(),
        "gains": {name: values.tolist() for name, values in gains(right, wrong, p, shares, sizes).items()},
    }


def _spread(squares_D: torch.Tensor) -> float:
    return float(squares_D.sum() ** 2 / squares_D.square().sum() / len(squares_D))


# Report.

# What an optimizer's own step is, among those whose gains are computed.
STEP = {"sgd": "whole", "whole": "whole", "tensors": "tensors", "adamw": "adamw", "signs": "signs"}


def near(share: float) -> float:
    """The share tried that is next to it."""
    return min(SHARES, key=lambda tried: abs(tried - share))


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    if profile.is_quick:
        return []
    ends = {arm: arms.measured(store, arm, rates, range(SEEDS)) for arm, rates in tuned().items()}

    def end(base: str, optimizer: str, share: float, loss: str = "taper") -> Measured:
        return ends[Arm(base, share, optimizer=optimizer, loss=loss)]

    def mean(base: str, optimizer: str, share: float) -> float:
        return over_seeds(end(base, optimizer, share)).mean

    top = {
        (base, name): max(SHARES, key=lambda s, base=base, name=name: mean(base, name, s))
        for base in BASES
        for name in RATES
    }

    def regret(base: str, optimizer: str, share: float) -> float:
        return mean(base, optimizer, top[base, optimizer]) - mean(base, optimizer, near(share))

    gradients = {base: store.get(gradients_cell(base)) or {} for base in BASES}
    least = {base: gradients[base]["least_noise"]["gradients"] for base in BASES}
    own = {
        (base, name): gradients[base]["shares"][int(np.argmax(gradients[base]["gains"][step]))]
        for base in BASES
        for name, step in STEP.items()
    }
    table = markdown_table(
        ["base model", "optimizer", *(f"{share:.0%}" for share in SHARES), "predicted"],
        [
            [
                base, name, *(over_seeds(end(base, name, share)).percent() for share in SHARES),
                f"{own[base, name]:.0%}" if name in STEP else "",
            ]
            for base in BASES
            for name in RATES
        ],
    )  # fmt: skip
    one_number = {(base, name): regret(base, name, least[base]) for base in BASES for name in ("sgd", "whole")}
    as_adamw = {base: regret(base, "adamw", top[base, "signs"]) for base in BASES}
    tensors = {
        name: difference(end("sure-17", name, 0.2), end("sure-17", name, 1.0)) for name in ("muon", "tensors", "sgd")
    }
    trained = [(base, name) for base in BASES for name in STEP]
    own_regret = interval([regret(*each, own[each]) for each in trained])
    below = {s: interval([regret(*each, own[each]) - regret(*each, s) for each in trained]) for s in SHARES}
    taper = {
        (name, share): difference(end("sure-17", name, share), end("sure-17", name, share, "no taper"))
        for name, shares in NO_TAPER.items()
        for share in shares
    }

    kinds = {  # positive where the hypothesis says so
        (base, name): difference(*(end(base, name, s) for s in ((0.2, 1.0) if base == "sure-17" else (1.0, 0.2))))
        for base in BASES
        for name in RATES
    }

    def points(values: dict[Any, float]) -> str:
        return ", ".join(
            f"{' '.join(map(str, key)) if isinstance(key, tuple) else key} {100 * value:.1f}"
            for key, value in values.items()
        )

    return [
        HYPOTHESES["second_moment"].judged(
            f"predicted {', '.join(f'{base} {share:.0%}' for base, share in least.items())}; points lost there: "
            f"{points(one_number)}",
            all(lost <= 0.02 for lost in one_number.values()),
            details=table,
        ),
        HYPOTHESES["coordinates"].judged(
            f"best on `sure-17`: signs {top['sure-17', 'signs']:.0%}, AdamW {top['sure-17', 'adamw']:.0%}; points that "
            f"AdamW loses at the best share of signs: {points(as_adamw)}",
            top["sure-17", "signs"] >= 0.8,
            all(lost <= 0.02 for lost in as_adamw.values()),
        ),
        HYPOTHESES["tensors"].judged(
            "p~ = 20% minus 100% on `sure-17`: "
            + ", ".join(f"{name} {gap.percent(signed=True)}" for name, gap in tensors.items()),
            tensors["muon"].low > 0,
            tensors["tensors"].low > 0,
        ),
        HYPOTHESES["own_metric"].judged(
            f"mean regret in points: {own_regret.percent()}; minus that of a constant share: "
            + ", ".join(f"{s:.0%} {gap.percent(signed=True)}" for s, gap in below.items())
            + " (as it was written, the criterion has no interval)",
            all(gap.high < 0 for gap in below.values()),
        ),
        HYPOTHESES["kind_of_error"].judged(
            "p~ = 20% minus 100% on `sure-17`, 100% minus 20% on the others, points: "
            + ", ".join(f"{base} {name} {gap.percent(signed=True)}" for (base, name), gap in kinds.items()),
            all(gap.mean > 0 for gap in kinds.values()),
        ),
        HYPOTHESES["taper"].judged(
            "with the taper minus without, `sure-17`: "
            + ", ".join(f"{name} {s:.0%} {gap.percent(signed=True)}" for (name, s), gap in taper.items()),
            all(gap.low > 0 for gap in taper.values()),
        ),
    ]
