"""Run `topr trial`, print a table of its results, and write them as JSON, a YAML file of settings, and a page."""

import json
import shlex
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import ModelConfig

from topr_trl.evaluation.bootstrap import Difference, paired_bootstrap, share_best
from topr_trl.evaluation.estimates import Estimate, greedy_estimate
from topr_trl.evaluation.report import plain_table
from topr_trl.pipeline.arms import RECIPES, Arm
from topr_trl.pipeline.manifest import PAGE
from topr_trl.pipeline.settings import TrialArguments, field_names
from topr_trl.pipeline.stage_inputs import values_of
from topr_trl.pipeline.stages.curate import CHOICE
from topr_trl.pipeline.stages.train import RESULT
from topr_trl.pipeline.trial import Outcome, run_trial
from topr_trl.report.contents import TRIAL
from topr_trl.report.page import write_page
from topr_trl.trainers.run_identity import compared_settings

_STARTING_MODEL = "before training"  # label of the starting model
_GREEDY_LABEL = "correct answers at T=0 (%)"
_DECIMALS = 9  # number of decimals of a mean, so that rounding errors do not rank equal arms
_FEW_PROBLEMS = 30  # with fewer held-out problems, a trial says that its ranking is mostly chance
_MIN_EFFECTIVE_SAMPLES = 2.0  # effective samples per problem that a reliable estimate from rewards needs


@dataclass(frozen=True)
class Recommendation:
    """Ranking of the arms (tested settings) of a trial, and the recommended arm.

    The arm None is the model before training. The other arms are called trained arms.

    Attributes:
        arms (`list`): Arms, best first.
        means (`dict`): Mean result of each arm over the problems.
        behind (`dict`): Mean of each arm minus the mean of the best trained arm, from a bootstrap paired by problem.
        shares (`dict`): Share of bootstrap draws in which an arm is the best trained arm, by trained arm.
    """

    arms: list[Arm | None]
    means: dict[Arm | None, float]
    behind: dict[Arm | None, Difference]
    shares: dict[Arm | None, float]

    @property
    def best(self) -> Arm:
        """Return the trained arm with the highest mean."""
        return next(arm for arm in self.arms if arm is not None)

    @property
    def recommended(self) -> Arm:
        """Return the first of `RECIPES` that is the best trained arm or in `level`, and better than no training.

        If no recipe meets these conditions, return the best trained arm.
        """
        candidates = [arm for arm in (self.best, *self.level) if self.means[arm] > self.means[None]]
        preferred = (arm for name in RECIPES for arm in candidates if arm.recipe == name)
        return next(preferred, self.best)

    @property
    def better_than_none(self) -> bool:
        """Whether the recommended arm improved on the starting model."""
        return self.means[self.recommended] > self.means[None]

    @property
    def level(self) -> list[Arm]:
        """Return the trained arms, except the best, whose difference from the best has 0 in its 95% interval."""
        return [arm for arm in self.arms if arm not in (None, self.best) and self.behind[arm].high >= 0]


def recommend(values: dict[Arm | None, NDArray[np.float64]], seed: int = 0) -> Recommendation:
    """Rank arms by their mean over the held-out problems, with intervals from a paired bootstrap over these problems.

    Args:
        values (`dict`): Result on each held-out problem, by arm. The arm None is the model before training.
        seed (`int`, defaults to `0`): Seed of the bootstrap.

    Returns:
        [`Recommendation`]: the ranking. In a tie, the arm that comes first in `values` ranks higher.
    """
    means = {arm: round(float(value.mean()), _DECIMALS) for arm, value in values.items()}
    arms = sorted(values, key=lambda arm: -means[arm])
    best = next(arm for arm in arms if arm is not None)
    others = np.stack([values[arm] for arm in arms], axis=1)
    behind = paired_bootstrap(np.repeat(values[best][:, None], len(arms), axis=1), others, seed)
    trained = [arm for arm in arms if arm is not None]
    shares = share_best(np.stack([values[arm] for arm in trained], axis=1), seed)
    return Recommendation(
        arms, means, dict(zip(arms, behind, strict=True)), dict(zip(trained, map(float, shares), strict=True))
    )


def trial_command(args: TrialArguments) -> None:
    """Run a trial, print its results, and write them to files.

    The files are `trial.json`, `recommended.yaml` if a setting is recommended, and the page of `topr look`.

    Args:
        args (`TrialArguments`): Settings of the command.
    """
    outcome = run_trial(args)
    found = recommend(outcome.values, args.seed)
    out = args.folder
    settings = out / "recommended.yaml"
    if found.better_than_none:
        settings.write_text(yaml.safe_dump(_settings_of_arm(args, found.recommended)))
    else:
        settings.unlink(missing_ok=True)
    results = _results_as_json(args, outcome, found)
    (out / TRIAL).write_text(json.dumps(results, indent=1))
    header, *rows = results["table"]
    text = f"{plain_table(header, rows)}\n\n{_describe_recommendation(args, outcome, found)}"
    shown = ""
    if found.better_than_none:
        config = shlex.quote(str(settings))
        shown = f"Use the recommended settings with topr train --config {config}, or with topr iterate. "
    write_page(out, out / PAGE)
    print(f"\n{text}\n\n{shown}{out / PAGE} shows the results and completions.", flush=True)


# The best learning rate depends on these settings, so `recommended.yaml` always contains them.
_SETTINGS_WITH_RATE = ("optim", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps",
                       "num_train_epochs", "max_grad_norm")  # fmt: skip


def _settings_of_arm(args: TrialArguments, arm: Arm) -> dict[str, Any]:
    """Return the settings with which `topr train` repeats the training of an arm on other rows.

    The result has the arm's settings and learning rate. Further settings that determine the weights are included if
    they interact with the learning rate or differ from their defaults. The seed is left out.
    """
    names = {*compared_settings(args), *RESULT, *field_names(ModelConfig)} - {*CHOICE, "seed", "iteration"}
    given = json.loads(json.dumps(values_of(args, sorted(names))))  # Enumerations become text.
    # transformers replaces None with the default of AcceleratorConfig, and removes `use_configured_state`.
    of_accelerator = {name: v for name, v in AcceleratorConfig().to_dict().items() if name != "use_configured_state"}
    defaults = {each.name: each.default for each in fields(args)} | {"accelerator_config": of_accelerator}
    kept = {name: value for name, value in given.items() if name in _SETTINGS_WITH_RATE or value != defaults[name]}
    return {**kept, "learning_rate": arm.rate(args), **arm.settings}


def _table(args: TrialArguments, outcome: Outcome, found: Recommendation) -> list[list[str]]:
    """Return the table of the terminal and of the page. The first row is the header."""
    greedy = [_GREEDY_LABEL] if outcome.greedy else []
    samples = f"correct answers at T={args.temperature:g} (%)" if outcome.by_answers else "mean reward x 100"
    rows = [["", "learning rate", *greedy, samples, "vs. best [95% CI]", "best in bootstrap"]]
    for arm in found.arms:
        gap = found.behind[arm]
        rows.append([
            arm.label if arm else _STARTING_MODEL,
            f"{arm.rate(args):g}" if arm else "",
            *([_format_percent(greedy_estimate(outcome.greedy[arm]))] if outcome.greedy else []),
            _format_percent(_estimate(outcome.sampled[arm])),
            "" if arm == found.best else str(gap),
            f"{100 * found.shares[arm]:.0f}%" if arm else "",
        ])  # fmt: skip
    return rows


def _estimate(values_P: NDArray[np.float64]) -> Estimate:
    return Estimate(float(values_P.mean()), float(values_P.std(ddof=1)) / len(values_P) ** 0.5)


def _format_percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} ± {200 * estimate.standard_error:.1f}"


def _describe_recommendation(args: TrialArguments, outcome: Outcome, found: Recommendation) -> str:
    """Return the recommendation and its uncertainty in sentences, one paragraph per line."""
    problems = len(outcome.values[None])
    source = "measured with new answers" if outcome.by_answers else "estimated from the rewards of their rows"
    lines = [
        f"Each training run read {outcome.trained_rows:,} rows. Results on {problems} other problems were {source}. "
        "± is two standard errors over the problems.",
    ]
    if outcome.greedy:
        lines.append(
            f"Settings are ranked by {'the greedy answers (T=0)' if outcome.by_greedy else 'the sampled answers'}, as "
            f"--decode {outcome.decode} says. At T=0, each problem has one answer."
        )
    best, recommended = (f"{arm.label}, learning rate {arm.rate(args):g}" for arm in (found.best, found.recommended))
    if not found.better_than_none:
        lines.append(
            f"Nothing is recommended: no setting improved on the starting model. The best was {best}. Try other "
            "learning rates, or look at the rows."
        )
    elif found.recommended == found.best:
        lines.append(f"Recommended: {best}.")
    else:
        lines.append(
            f"Recommended: {recommended}. The best setting was {best}, but the 95% interval of the difference contains "
            "0. Among such settings that improved the model, a trial prefers repeated positives, then balanced rows, "
            "then the default."
        )
    if found.behind[None].low > 0:
        lines.append(f"Even {best} is behind the starting model: the 95% interval excludes 0.")
    elif found.behind[None].high >= 0:
        lines.append(f"{best} cannot be distinguished from the starting model: the 95% interval contains 0.")
    if problems < _FEW_PROBLEMS:
        lines.append(f"With {problems} held-out problems, the ranking is mostly chance. Use rows of more problems.")
    if found.level:
        names = ", ".join(f"{arm.label} at {arm.rate(args):g}" for arm in found.level)
        lines.append(f"These settings cannot be distinguished from {best}: {names}.")
    rates = [arm.rate(args) for arm in found.arms if arm is not None]
    if len(set(rates)) > 1 and found.best.rate(args) in (edges := (min(rates), max(rates))):
        end, next_rate = ("lowest", "lower") if found.best.rate(args) == edges[0] else ("highest", "higher")
        lines.append(f"The best setting has the {end} learning rate of the trial. A {next_rate} one may be better.")
    lines.append(
        'c is the baseline. p~ is the effective share of positives, which a baseline determines. See "Settings" '
        "in the documentation."
    )
    lines.append("The intervals reflect the choice of test problems, but not the training seed.")
    few = [
        arm for arm, count in outcome.effective_samples.items() if arm is not None and count < _MIN_EFFECTIVE_SAMPLES
    ]
    if few:
        lines.append(
            f"For {len(few)} of {len(outcome.effective_samples) - 1} trained models, the effective sample size is "
            f"below {_MIN_EFFECTIVE_SAMPLES:g} rows per problem. Their estimates are unreliable, because these models "
            "are far from the model that wrote the rows. If the answers can be judged, use --test_by answers."
        )
    return "\n".join(lines)


def _results_as_json(args: TrialArguments, outcome: Outcome, found: Recommendation) -> dict[str, Any]:
    return {
        "by_answers": outcome.by_answers,
        "decode": outcome.decode,
        "held_out_problems": len(outcome.values[None]),
        "trained_rows": outcome.trained_rows,
        "table": _table(args, outcome, found),
        "arms": [
            {
                "label": arm.label if arm else _STARTING_MODEL,
                "folder": arm.name if arm else "base",
                "learning_rate": arm.rate(args) if arm else None,
                "settings": _settings_of_arm(args, arm) if arm else None,
                "mean": found.means[arm],
                "sampled": asdict(_estimate(outcome.sampled[arm])),
                "standard_error": _estimate(outcome.values[arm]).standard_error,
                "to_the_best": found.behind[arm].to_dict(),
                "best_in_draws": found.shares.get(arm),
                "recommended": found.better_than_none and arm == found.recommended,
                "greedy": asdict(greedy_estimate(outcome.greedy[arm])) if outcome.greedy else None,
                "effective_samples": outcome.effective_samples.get(arm),
            }
            for arm in found.arms
        ],
    }
