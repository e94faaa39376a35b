"""Beyond the paper: log μ from another engine than the trainer's, and its effect on long completions.

`spread` measures by how much the log-probability of a token differs between a forward in float32 and one in bfloat16
(the mismatch of a sampler). `training` trains with that noise on log μ, summed over as many tokens as a response of
50, 500 or 5,000 would have.
"""

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import curve, figure, save
from benchmarks.rivals import Direct, raw, tapered
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, summary
from benchmarks.statistics import Measured, difference, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict, markdown_table
from topr_trl import PRESETS, truncated_weights

LENGTHS = (0, 50, 500, 5_000)
SIGMAS = (0.01, 0.03)  # of a token's log-probability; see `spread`
LOG_RATIOS = (0, -2, -5)  # true log π/μ of a negative
SEEDS = 3


def cells(profile: Profile, store: Store) -> list[Cell]:
    if profile.is_quick:
        return []
    shared = {"claim": "log_mu_noise"}
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
    rows, _ = epoch_rows("main", profile, cell["seed"])
    differences = (
        torch.cat(rows.mu_logps) - torch.cat(rows.scored_by(base_model("main").to(torch.bfloat16)).mu_logps).float()
    )
    sigma, bias = float(differences.std()), float(differences.mean())
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for tokens in LENGTHS[1:]:
        noise = sigma * tokens**0.5 * torch.randn(100_000, generator=generator) + bias * tokens
        for log_ratio in LOG_RATIOS:
            w = truncated_weights(log_ratio + noise, -torch.ones(len(noise)), PRESETS["topr"])
            weights[f"{tokens}, {log_ratio}"] = float(w.mean())
    return {"sigma": sigma, "bias": bias, "weights": weights}


def training(cell: Cell, profile: Profile) -> dict[str, Any]:
    model = base_model("main")
    rows, _ = epoch_rows("main", profile, cell["seed"])
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


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))
    spreads = [result for cell, result in done if cell["part"] == "spread"]
    trained = [(cell, result) for cell, result in done if cell["part"] == "training"]
    spread_ = spreads[0]

    def measured(tokens: int, sigma: float) -> Measured:
        return {
            c["seed"]: (r["pass@1"], r["error"])
            for c, r in trained
            if c["tokens"] == tokens and (c["sigma"] == sigma or not tokens)
        }

    def lost(tokens: int, sigma: float) -> str:
        return difference(measured(tokens, sigma), measured(0, sigma)).percent(signed=True)

    picture, (axes,) = figure(1, 4.8, 3.3)
    for sigma in SIGMAS:
        points = [over_seeds(measured(tokens, sigma)) for tokens in LENGTHS]
        curve(axes, list(range(len(LENGTHS))), points, f"noise of {sigma:g} per token", marker="o", ms=3)
    axes.set_xticks(range(len(LENGTHS)), ["trainer's log μ"] + [f"{tokens:,} tokens" for tokens in LENGTHS[1:]])
    axes.set(ylabel="pass@1 (%)", title="TOPR with noise on log μ")
    axes.legend()
    name = save(picture, out, "log_mu_noise")
    weights = spread_["weights"]
    header = ["true π/μ of a negative", "no noise", *(f"{n:,} tokens" for n in LENGTHS[1:])]
    table = [[f"e^{r}", f"{exp(r):.3f}", *(f"{weights[f'{n}, {r}']:.3f}" for n in LENGTHS[1:])] for r in LOG_RATIOS]
    return [
        Verdict(
            "Beyond the paper: log μ of another engine moves the ratio of long completions (simulated)",
            "",
            f"the trainer's model in float32 and in bfloat16 differs by σ = {spread_['sigma']:.4f} per token (mean "
            f"{spread_['bias']:+.1e}); over n tokens that is taken as normal noise of σ√n on log μ of the completion. "
            "The table gives the mean weight of negatives under it: those at π = μ lose weight, those that were "
            "tapered get some back. Training with such noise on the log μ of completions of forty tokens, as if they "
            f"had n: pass@1 without {over_seeds(measured(0, SIGMAS[0])).percent()}%; with noise minus that, "
            + "; ".join(
                f"at σ = {sigma:g}: " + ", ".join(f"{lost(n, sigma)} points (n = {n:,})" for n in LENGTHS[1:])
                for sigma in SIGMAS
            ),
            MEASURED,
            "",
            name,
            markdown_table(header, table),
        )
    ]
