"""The command `topr trial`: rows in; a table, a recommended YAML and a page out."""

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from topr_trl.cli import html as page
from topr_trl.evaluation.bootstrap import Difference, paired_bootstrap, share_best
from topr_trl.evaluation.estimates import Estimate, greedy_estimate
from topr_trl.evaluation.report import plain_table
from topr_trl.pipeline.settings import TrialArguments
from topr_trl.pipeline.trial import DEFAULT, Arm, Outcome, run_trial

_BEFORE = "before training"  # the label of the model that no arm has changed
_DIGITS = 9  # of a mean: equal values have means that differ by rounding, and the first of equals is the best
_FEW = 2.0  # effective samples per problem, below which an estimate from rewards says little


@dataclass(frozen=True)
class Recommendation:
    """The conclusions of a trial.

    Attributes:
        arms: that were tried, best first; None is the model before.
        means: by arm.
        errors: standard errors over the problems, by arm.
        behind: how far each arm is behind the best one, paired by problem.
        shares: in which share of the bootstrap's draws of problems each trained arm is best.
    """

    arms: list[Arm | None]
    means: dict[Arm | None, float]
    errors: dict[Arm | None, float]
    behind: dict[Arm | None, Difference]
    shares: dict[Arm | None, float]

    @property
    def best(self) -> Arm:
        """The trained arm with the highest mean."""
        return next(arm for arm in self.arms if arm is not None)

    @property
    def recommended(self) -> Arm:
        """The default at the given learning rate, unless the best arm is better than it by an interval."""
        return next((arm for arm in self.level if arm.name == DEFAULT), self.best)

    @property
    def better_than_none(self) -> bool:
        """Whether the recommended arm improved on the starting model."""
        return self.means[self.recommended] > self.means[None]

    @property
    def level(self) -> list[Arm]:
        """Trained arms that cannot be told from the best."""
        return [arm for arm in self.arms if arm not in (None, self.best) and self.behind[arm].high >= 0]


def recommend(values: dict[Arm | None, NDArray[np.float64]], seed: int = 0) -> Recommendation:
    """Rank arms by their mean over the held-out problems; intervals by a paired bootstrap over these."""
    means = {arm: round(float(value.mean()), _DIGITS) for arm, value in values.items()}
    errors = {arm: float(value.std(ddof=1)) / len(value) ** 0.5 for arm, value in values.items()}
    arms = sorted(values, key=lambda arm: -means[arm])
    best = next(arm for arm in arms if arm is not None)
    others = np.stack([values[arm] for arm in arms], axis=1)
    behind = paired_bootstrap(np.repeat(values[best][:, None], len(arms), axis=1), others, seed)
    trained = [arm for arm in arms if arm is not None]
    shares = share_best(np.stack([values[arm] for arm in trained], axis=1), seed)
    return Recommendation(
        arms, means, errors, dict(zip(arms, behind, strict=True)), dict(zip(trained, map(float, shares), strict=True))
    )


def trial_command(args: TrialArguments) -> None:
    """Run a trial, print what it found, and write `recommended.yaml`, `trial.json` and, with matplotlib, a page."""
    outcome = run_trial(args)
    found = recommend(outcome.values, args.seed)
    out = args.folder
    settings = out / "recommended.yaml"
    if found.better_than_none:
        settings.write_text(yaml.safe_dump(_settings(args, found.recommended)))
    else:
        settings.unlink(missing_ok=True)
    (out / "trial.json").write_text(json.dumps(_plain(args, outcome, found), indent=1))
    text = f"{_table(args, outcome, found)}\n\n{_said(args, outcome, found)}"
    shown = ""
    if found.better_than_none:
        shown = f"The recommended settings are in {settings}, for topr train and topr iterate --config. "
    if find_spec("matplotlib") and find_spec("jinja2"):
        (out / "trial.html").write_text(_page(args, outcome, found), encoding="utf-8")
        shown += f"{out}/trial.html shows it."
    print(f"\n{text}\n\n{shown}".rstrip(), flush=True)


# What a learning rate means nothing without.
_WITH_THE_RATE = ("optim", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps",
                  "num_train_epochs", "max_grad_norm")  # fmt: skip


def _settings(args: TrialArguments, arm: Arm) -> dict[str, Any]:
    plain = args.to_dict()
    return {**{name: plain[name] for name in _WITH_THE_RATE}, "learning_rate": arm.rate(args), **arm.settings}


def _rows(args: TrialArguments, outcome: Outcome, found: Recommendation) -> list[list[str]]:
    rows = []
    for arm in found.arms:
        gap = found.behind[arm]
        rows.append([
            arm.label if arm else _BEFORE,
            f"{arm.rate(args):g}" if arm else "",
            *([_percent(greedy_estimate(outcome.greedy[arm]))] if outcome.greedy else []),
            _percent(Estimate(found.means[arm], found.errors[arm])),
            "" if arm == found.best else str(gap),
            f"{100 * found.shares[arm]:.0f}%" if arm else "",
        ])  # fmt: skip
    return rows


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} ± {200 * estimate.standard_error:.1f}"


def _header(args: TrialArguments, outcome: Outcome) -> list[str]:
    greedy = ["right answers at T=0 (%)"] if outcome.greedy else []
    return ["", "learning rate", *greedy, _measure(args, outcome), "vs. best [95% CI]", "best in bootstrap"]


def _measure(args: TrialArguments, outcome: Outcome) -> str:
    return f"right answers at T={args.temperature:g} (%)" if outcome.by_answers else "mean reward x 100"


def _table(args: TrialArguments, outcome: Outcome, found: Recommendation) -> str:
    return plain_table(_header(args, outcome), _rows(args, outcome, found))


def _said(args: TrialArguments, outcome: Outcome, found: Recommendation) -> str:
    """The recommendation in words, and how sure it is."""
    problems = len(outcome.values[None])
    how = "sampled and judged" if outcome.by_answers else "estimated from the rewards of their rows"
    lines = [
        f"Trained on {outcome.trained_rows:,} rows, tested on {problems} other problems ({how}; ± is two standard "
        "errors over the problems).",
    ]
    if outcome.greedy:
        lines.append(
            f"Settings are ranked by the answers that were sampled at temperature {args.temperature:g}. At temperature "
            "0 each problem has one answer, the greedy one."
        )
    best, recommended = (f"{arm.label}, learning rate {arm.rate(args):g}" for arm in (found.best, found.recommended))
    if not found.better_than_none:
        lines.append(
            f"Nothing is recommended: {recommended} did not improve on the starting model, and no setting is better "
            f"than it by an interval. Try other learning rates, or look at the rows. The best setting was {best}."
        )
    elif found.recommended == found.best:
        lines.append(f"Recommended: {best}.")
    else:
        lines.append(f"Recommended: {recommended}, the default. {best}, ends higher, but not by an interval.")
    if found.level:
        names = ", ".join(f"{arm.label} at {arm.rate(args):g}" for arm in found.level)
        lines.append(f"Not distinguishable from {best}: {names}.")
    rates = [arm.rate(args) for arm in found.arms if arm is not None]
    if len(set(rates)) > 1 and found.best.rate(args) in (edges := (min(rates), max(rates))):
        side = "lowest" if found.best.rate(args) == edges[0] else "highest"
        lines.append(f"The best setting has the {side} learning rate that was tried. A better one may be beyond it.")
    lines.append(
        "c is the baseline, and p~ the positives' share of the weight that a baseline leads to: see docs/settings.md."
    )
    lines.append("Intervals are over the problems: another seed of the trainings would add to them.")
    few = [arm for arm, count in outcome.effective_samples.items() if arm is not None and count < _FEW]
    if few:
        lines.append(
            f"After {len(few)} of {len(outcome.effective_samples) - 1} trainings fewer than {_FEW:g} rows per problem "
            "count in the estimates: the trained models are far from the one that wrote the rows, and the estimates "
            "say little. If the answers can be judged, use --test_by answers."
        )
    return "\n".join(lines)


def _plain(args: TrialArguments, outcome: Outcome, found: Recommendation) -> dict[str, Any]:
    return {
        "by_answers": outcome.by_answers,
        "held_out_problems": len(outcome.values[None]),
        "trained_rows": outcome.trained_rows,
        "arms": [
            {
                "label": arm.label if arm else _BEFORE,
                "settings": _settings(args, arm) if arm else None,
                "mean": found.means[arm],
                "standard_error": found.errors[arm],
                "to_the_best": found.behind[arm].to_dict(),
                "best_in_draws": found.shares.get(arm),
                "recommended": found.better_than_none and arm == found.recommended,
                "greedy": asdict(greedy_estimate(outcome.greedy[arm])) if outcome.greedy else None,
                "effective_samples": outcome.effective_samples.get(arm),
            }
            for arm in found.arms
        ],
    }


def _page(args: TrialArguments, outcome: Outcome, found: Recommendation) -> str:
    """The page as HTML."""
    return page.render(
        "trial.html",
        name=args.folder.resolve().name,
        header=_header(args, outcome),
        rows=_rows(args, outcome, found),
        said=_said(args, outcome, found).split("\n"),
        picture=_picture(args, outcome, found),
        settings=yaml.safe_dump(_settings(args, found.recommended)) if found.better_than_none else "",
    )


def _picture(args: TrialArguments, outcome: Outcome, found: Recommendation) -> str:
    """Draw the mean of each arm with two standard errors, the best at the top and the recommended one in red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.8 + 0.32 * len(found.arms)), layout="constrained")
    panel = figure.subplots()
    for place, arm in enumerate(reversed(found.arms)):
        color = "#888888" if arm is None else "#d1495b" if arm == found.recommended else "#30638e"
        panel.errorbar(100 * found.means[arm], place, xerr=200 * found.errors[arm], fmt="o", capsize=3, color=color)
    names = [f"{arm.label}, {arm.rate(args):g}" if arm else _BEFORE for arm in reversed(found.arms)]
    panel.set_yticks(range(len(names)), names)
    panel.set_xlabel(_measure(args, outcome))
    panel.grid(axis="x", alpha=0.3)
    return page.svg(figure)
