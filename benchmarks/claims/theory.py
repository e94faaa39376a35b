"""Figure 2 and Propositions 3.1 and 3.2, from the package's own functions: no model, no sampling."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cells import Cell, Store
from benchmarks.pictures import figure, save
from benchmarks.rivals import ppo_objective
from benchmarks.setting import Profile
from benchmarks.verdicts import DOES_NOT, HOLDS, Verdict, judge
from topr_trl import PRESETS, TruncationLimits, objective, taper, topr_loss

RESPONSES = 12


def cells(profile: Profile, store: Store) -> list[Cell]:
    return [{"claim": "theory", "part": part} for part in ("identity", "bound")]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    return {"identity": identity, "bound": bound}[cell["part"]]()


def policy(generator: torch.Generator) -> Tensor:
    """(K,) log-probabilities of a random policy over K responses, float64."""
    return torch.randn(RESPONSES, generator=generator, dtype=torch.float64).log_softmax(0)


def identity() -> dict[str, Any]:
    """Prop. 3.1, every term computed apart, for random π, μ, R and c.

    With R± the masses `Σ μ |R|` of the positive and of the negative responses and μ± ∝ μ |R| on them,
    `L(π) = Σ μ (R - c) log π = -R+ KL(μ+‖π) + R- KL(μ-‖π) + c KL(μ‖π) + C`, where C depends on μ alone. (The paper
    states it for the loss, -L.) C is computed at π = μ and the identity checked at other policies.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    trials = 1_000
    for _ in range(trials):
        mu, pi = policy(generator), policy(generator)
        rewards = torch.randn(RESPONSES, generator=generator, dtype=torch.float64)
        c = float(torch.randn(1, generator=generator))

        def direct(logps: Tensor, mu=mu, rewards=rewards, c=c) -> Tensor:
            # The package's loss of naive REINFORCE, each response a single token.
            mask = torch.ones(RESPONSES, 1)
            losses_B = topr_loss(logps[:, None], mu, rewards - c, mask, PRESETS["reinforce"]).losses_B
            return -(mu.exp() * losses_B).sum()

        def by_parts(logps: Tensor, mu=mu, rewards=rewards, c=c) -> Tensor:
            total = c * _kl(mu.exp(), logps)
            for sign in (1, -1):
                mass = (mu.exp() * (sign * rewards).clamp(min=0)).to(torch.float64)
                total = total - sign * mass.sum() * _kl(mass / mass.sum(), logps)
            return total

        worst = max(worst, abs(float((direct(pi) - direct(mu)) - (by_parts(pi) - by_parts(mu)))))
    return {"trials": trials, "largest_difference": worst}


def _kl(p: Tensor, log_q: Tensor) -> Tensor:
    return (torch.special.xlogy(p, p) - p * log_q).sum()


def bound() -> dict[str, Any]:
    """Prop. 3.2: gradient ascent on J over the logits of a softmax policy, for several a-: bounded only for a- = 0."""
    curves = {}
    for a_neg in (0.0, 0.05, 0.2, 1.0):
        generator = torch.Generator().manual_seed(1)
        mu = policy(generator)
        rewards = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(RESPONSES // 2)
        limits = TruncationLimits(1.0, 1.0, a_neg, 1.0)
        logits = mu.clone().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=1.0)
        curve = []
        for step in range(10_001):
            value = objective(logits.log_softmax(0), mu, rewards, limits)
            if not value.isfinite():  # a ratio below e^-745 has no logarithm in float64: J has left what can be written
                break
            if step in {0, 1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000}:
                curve.append([step, float(value)])
            optimizer.zero_grad()
            (-value).backward()
            optimizer.step()
        curves[str(a_neg)] = curve
    # J <= Σ μ ρ(x) R over the positives, whose log-probabilities are at most 0: an upper bound that any policy obeys.
    positives = rewards > 0
    supremum = float((mu.exp() * (1 - mu))[positives].sum())
    return {"curves": curves, "upper_bound": supremum}


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = {cell["part"]: result for cell, result in store.results(cells(profile, store))}
    _fig2(out)
    identity_, bound_ = done["identity"], done["bound"]
    picture, (axes,) = figure(1, 4.8, 3.3)
    for a_neg, points in bound_["curves"].items():
        axes.plot(
            [max(step, 0.8) for step, _ in points],
            [value for _, value in points],
            marker="o",
            ms=3,
            label=f"a⁻ = {a_neg}",
        )
    axes.axhline(bound_["upper_bound"], color="#888888", ls=":", label="upper bound for a⁻ = 0")
    axes.set(
        xscale="log",
        yscale="symlog",
        xlabel="gradient ascent steps",
        ylabel="objective J",
        title="J is bounded for a⁻ = 0 only",
    )
    axes.legend(fontsize=7.5)
    name = save(picture, out, "prop3.2")
    last = {float(a): points[-1][1] for a, points in bound_["curves"].items()}
    grows = {float(a): points[-1][1] > 1.5 * points[-2][1] for a, points in bound_["curves"].items()}
    steps = {float(a): points[-1][0] for a, points in bound_["curves"].items()}
    return [
        Verdict(
            "Fig. 2: J keeps a gradient where PPO's objective is flat",
            "drawing",
            "drawn from `topr_trl.taper` and the benchmark's PPO loss",
            HOLDS if _ppo_is_flat_and_topr_is_not() else DOES_NOT,
            "",
            "fig2.png",
        ),
        Verdict(
            "Prop. 3.1: the loss is two KL terms, and the baseline adds -c·KL(μ‖π)",
            "identity",
            f"largest difference of the two sides over {identity_['trials']:,} random (π, μ, R, c): "
            f"{identity_['largest_difference']:.1e}",
            judge(identity_["largest_difference"] < 1e-12),
        ),
        Verdict(
            "Prop. 3.2: J is bounded above for a⁻ = 0 and unbounded for a⁻ > 0",
            "proposition",
            "gradient ascent, 10,000 steps or until a ratio underflows: "
            + ", ".join(f"a⁻ = {a:g}: J = {value:.3g} after {steps[a]:,} steps" for a, value in last.items())
            + f"; the bound for a⁻ = 0 is {bound_['upper_bound']:.3f}",
            # Past that bound, and growing with the steps: by half or more since a third of them.
            judge(
                last[0.0] <= bound_["upper_bound"], *(grows[a] and last[a] > bound_["upper_bound"] for a in last if a)
            ),
            "",
            name,
        ),
    ]


EPSILON = 0.2


def _objectives(ratio: Tensor, reward: float) -> tuple[Tensor, Tensor]:
    """J (with b+ = 1 + ε, as in the paper's drawing) and the PPO objective of single completions, by their ratio."""
    tapered = taper(ratio, 1.0, 1.0 + EPSILON) if reward > 0 else taper(ratio, 0.0, 1.0)
    return tapered * reward, ppo_objective(ratio, torch.tensor(reward), EPSILON)


def _ppo_is_flat_and_topr_is_not() -> bool:
    flat = []
    for reward, outside in ((1.0, 2.0), (-1.0, 0.4)):
        ratio = torch.tensor([outside], dtype=torch.float64, requires_grad=True)
        topr, ppo = (
            torch.autograd.grad(value, ratio, retain_graph=True)[0].item() for value in _objectives(ratio, reward)
        )
        flat.append(ppo == 0 and topr != 0)
    return all(flat)


def _fig2(out: Path) -> None:
    picture, (axes,) = figure(1, 4.8, 3.3)
    ratio = torch.linspace(0.05, 2.5, 400, dtype=torch.float64)
    for reward, colour in ((1.0, "#2a9d8f"), (-1.0, "#d1495b")):
        topr, ppo = _objectives(ratio, reward)
        axes.plot(ratio, topr, color=colour, lw=2, label=f"TOPR{', b⁺ = 1.2' if reward > 0 else ''}, R = {reward:+.0f}")
        axes.plot(ratio, ppo, color=colour, ls="--", label=f"PPO, R = {reward:+.0f}")
    axes.set(xlabel="ratio π/μ", ylabel="objective", ylim=(-3, 2.2), title="Objectives of TOPR and PPO")
    axes.legend(fontsize=7.5, ncols=2, loc="lower left")
    save(picture, out, "fig2")
