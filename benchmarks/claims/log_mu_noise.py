"""Beyond the paper: log μ from another engine than the trainer's, as long responses feel it.

`spread` measures by how much the log-probability of a token differs between a forward in float32 and one in bfloat16
(the mismatch of a sampler). `training` trains with that noise on log μ, summed over as many tokens as a response of
50, 500 or 5,000 would have.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best, training_rows
from benchmarks.pictures import curve, figure, save
from benchmarks.rivals import Direct, raw, tapered
from benchmarks.setting import Profile, base_model, evaluate, summary
from benchmarks.statistics import Interval, interval
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict
from topr_trl import PRESETS, truncated_weights

LENGTHS = (0, 50, 500, 5_000)
SIGMAS = (0.01, 0.03)  # of a token's log-probability; see `spread`
SEEDS = 3


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.seeds == 1:
        return []
    shared = {"claim": "log_mu_noise", "profile": profile.name}
    return [{**shared, "part": "spread", "seed": 0}] + [
        {
            **shared, "part": "training", "tokens": tokens, "sigma": sigma, "seed": seed,
            "learning_rate": best(store, profile, "topr"),
        }
        for seed in range(SEEDS)
        for tokens in LENGTHS
        for sigma in (SIGMAS if tokens else SIGMAS[:1])
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    return spread(cell, profile) if cell["part"] == "spread" else training(cell, profile)


def spread(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Token-level difference of log μ between float32 and bfloat16, and what it does to the weights of negatives."""
    rows = training_rows("main", profile, cell["seed"])
    differences = (
        torch.cat(rows.mu_logps) - torch.cat(rows.scored_by(base_model("main").to(torch.bfloat16)).mu_logps).float()
    )
    sigma, bias = float(differences.std()), float(differences.mean())
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for tokens in LENGTHS[1:]:
        # At π = μ every true ratio is 1: what is below is noise alone.
        noise = sigma * tokens**0.5 * torch.randn(100_000, generator=generator)
        w = truncated_weights(noise, -torch.ones(len(noise)), PRESETS["topr"])
        weights[str(tokens)] = {"mean": float(w.mean()), "below_half": float((w < 0.5).float().mean())}
    return {"sigma": sigma, "bias": bias, "weights": weights}


def training(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    rows = training_rows("main", profile, cell["seed"])
    rng = np.random.default_rng(cell["seed"])
    noise = cell["sigma"] * cell["tokens"] ** 0.5 * rng.standard_normal(len(rows))
    # On the first token of a response: only the sum counts.
    mu_logps = [
        logps + torch.cat([torch.tensor([shift]), torch.zeros(len(logps) - 1)]).float()
        for logps, shift in zip(rows.mu_logps, noise, strict=True)
    ]
    rows = replace(rows, mu_logps=mu_logps)
    train(model, Direct(model, rows, tapered("topr"), raw), profile.steps, cell["learning_rate"], cell["seed"])
    return summary(evaluate(model, "main", profile, seed=cell["seed"]))


# Report.


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    spreads = [result for cell, result in done if cell["part"] == "spread"]
    trained = [(cell, result) for cell, result in done if cell["part"] == "training"]
    if not spreads or not trained:
        return []
    measured = spreads[0]

    def after(tokens: int, sigma: float) -> Interval:
        runs = [r for c, r in trained if c["tokens"] == tokens and (c["sigma"] == sigma or not tokens)]
        return interval([r["pass@1"] for r in runs], [r["error"] for r in runs])

    picture, (axes,) = figure(1, 4.8, 3.3)
    for sigma in SIGMAS:
        points = [after(tokens, sigma) for tokens in LENGTHS]
        curve(axes, list(range(len(LENGTHS))), points, f"noise of {sigma:g} a token", marker="o", ms=3)
    axes.set_xticks(range(len(LENGTHS)), ["trainer's log μ"] + [f"{tokens:,} tokens" for tokens in LENGTHS[1:]])
    axes.set(ylabel="pass@1 (%)", title="TOPR with noise on log μ")
    axes.legend()
    name = save(picture, profile, "log_mu_noise")
    clean, worst = after(0, SIGMAS[0]), after(LENGTHS[-1], SIGMAS[-1])
    weights = measured["weights"]
    return [
        Verdict(
            "Beyond the paper: log μ of another engine moves the ratio of long responses",
            "",
            f"float32 against bfloat16: {measured['sigma']:.4f} a token (mean {measured['bias']:+.1e}). At π = μ, "
            "where every weight should be 1, that gives negatives a mean weight of "
            + ", ".join(f"{weights[str(n)]['mean']:.2f} ({n:,} tokens)" for n in LENGTHS[1:])
            + ". Training with noise on log μ, pass@1: trainer's own "
            + clean.percent()
            + "; "
            + "; ".join(
                f"{sigma:g} a token " + ", ".join(f"{after(n, sigma).percent()} ({n:,})" for n in LENGTHS[1:])
                for sigma in SIGMAS
            )
            + " %",
            MEASURED,
            ""
            if worst.high < clean.low
            else "Noise without a mean only scales negatives' weights down (a weight is at most 1); it does not change "
            "their sign, so TOPR stays stable and moves towards positives only.",
            name,
        )
    ]
