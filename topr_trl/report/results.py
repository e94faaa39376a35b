"""Describe results and rows in sentences and tables, and give advice."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np

from topr_trl.baseline import effective_positive_share
from topr_trl.curation import REPEATING, counted
from topr_trl.data.usable_rows import have_answers, in_all_shards
from topr_trl.diagnosis import KINDS
from topr_trl.evaluation.answers import read_samples
from topr_trl.evaluation.bootstrap import Difference, compare
from topr_trl.evaluation.estimates import Estimate, Evaluation, RewardEstimate, evaluate_in_full
from topr_trl.evaluation.report import Evaluations
from topr_trl.evaluation.rewards import compare_rewards, evaluate_rewards, read_reward_samples
from topr_trl.report.contents import Rows
from topr_trl.report.samples import Table
from topr_trl.rewards import INVALID
from topr_trl.settings.shared import CurationArguments

# Advise a lower temperature if greedy accuracy exceeds sampled accuracy by more than 5 percentage points.
_TEMPERATURE_GAP = 0.05
_ROUNDING = 1e-6  # larger differences between two means are not rounding errors
_MANY_INVALID = 0.05  # if a larger share of completions has no answer, advise reading some of them
_MANY_TIMES = 100  # a difference that takes over 100 times as many problems to show is too small to matter
_CHARACTERS = 4  # approximate number of characters per token
_FLOPS_PER_PARAMETER = 8  # operations per token, with gradient checkpointing; `topr plan` also counts attention
_FLOPS_PER_HOUR = 0.4 * 989e12 * 3600  # 40% of the peak of an H100, as in `topr plan`
_LEAST_SHARE = 0.1  # kinds of problems with a smaller share are not named


# Measures in the sentences, the most important measure first.
_MEASURES: dict[str, tuple[str, Callable[[Evaluation], Estimate | None]]] = {
    "greedy": ("Greedy answers", lambda found: found.greedy),
    "greedy reward": ("Greedy reward", lambda found: found.greedy_reward),
    "pass@1": ("Sampled answers", lambda found: found.pass_at.get(1)),
    "reward": ("Reward", lambda found: found.reward),
}


@dataclass(frozen=True)
class Results:
    """Results on the test problems.

    Attributes:
        sentences (`list[str]`): The results in words.
        table (`str`): All measures of all models.
        advice (`list[str]`): Sentences that advise next steps.
    """

    sentences: list[str]
    table: str
    advice: list[str]


def results_of(tests: Sequence[Rows], pass_threshold: float | None = None) -> Results:
    """Evaluate the completions of the same test problems by each model.

    Args:
        tests (`Sequence[Rows]`): Completions of each model, in order of training.
        pass_threshold (`float`, *optional*): Minimum reward to pass. With a threshold, answers are not used.

    Raises:
        FileNotFoundError, ValueError: rows are missing or damaged, for instance because sampling has not finished.
    """
    if not tests:
        return Results([], "", [])
    paths = {one.name: one.path for one in tests if one.path is not None}
    evaluations, differences = _measured(paths, pass_threshold)
    first, last = (list(evaluations.values())[place] for place in (0, -1))
    sentences: list[str] = []
    advice: list[str] = []
    for name, (label, estimate) in _MEASURES.items():
        if name in differences:
            sentences.append(_change(label, estimate(first), estimate(last), differences[name]))
            advice = advice or _on_certainty(differences[name], last.num_problems)
        elif len(evaluations) == 1 and estimate(last) is not None:
            sentences.append(f"{label}: {estimate(last)}, on {counted(last.num_problems, 'problem')}.")
    sampled = last.pass_at.get(1)
    if last.greedy and sampled and last.greedy.value - sampled.value > _TEMPERATURE_GAP:
        advice.append(
            f"Sampled answers are right less often than greedy ones ({sampled} against {last.greedy}): decode at a "
            "lower temperature."
        )
    if (share := last.shares.get(INVALID, 0.0)) > _MANY_INVALID:
        advice.append(f"{share:.0%} of the samples have no answer: read some of them below, marked “no answer”.")
    return Results(sentences, str(evaluations), advice)


def _measured(paths: Mapping[str, Path], pass_threshold: float | None) -> tuple[Evaluations, dict[str, Difference]]:
    """Return the evaluations, and the differences of the last model from the first."""
    if pass_threshold is None and all(in_all_shards(path, have_answers) for path in paths.values()):
        samples = {name: read_samples(path) for name, path in paths.items()}
        answers = list(samples.values())
        found = Evaluations({name: evaluate_in_full(one) for name, one in samples.items()})
        return found, compare(answers[0], answers[-1]) if answers[1:] else {}
    of_rewards = {name: read_reward_samples(path) for name, path in paths.items()}
    rewards = list(of_rewards.values())
    found = Evaluations({name: evaluate_rewards(one, pass_threshold) for name, one in of_rewards.items()})
    return found, compare_rewards(rewards[0], rewards[-1], pass_threshold) if rewards[1:] else {}


def _change(label: str, before: Estimate | None, after: Estimate | None, gap: Difference) -> str:
    verdict = "better" if gap.low > 0 else "worse" if gap.high < 0 else "not distinguishable"
    is_reward = isinstance(after, RewardEstimate)
    difference, _, interval = str(gap).partition(" ")
    said = f"{verdict} ({difference}{'' if is_reward else ' points'}, 95% interval {interval})"
    assert before is not None
    assert after is not None
    if abs(after.value - before.value - gap.difference) > _ROUNDING:
        return f"{label}: {said}, on the problems that have rewards from both models."
    first, last = (f"{one.value:.3f}" if is_reward else f"{100 * one.value:.1f}%" for one in (before, after))
    return f"{label}: {first} → {last}, {said}."


def _on_certainty(gap: Difference, problems: int) -> list[str]:
    """Return advice on how many problems would show a difference.

    Return [] if the interval does not contain 0, or if the difference is 0.
    """
    if gap.low > 0 or gap.high < 0 or gap.difference == 0:
        return []
    toward_zero = gap.difference - gap.low if gap.difference > 0 else gap.high - gap.difference
    needed = max(2 * problems, ceil(problems * (toward_zero / abs(gap.difference)) ** 2 / 100) * 100)
    if needed > _MANY_TIMES * problems:
        return ["The difference is too small to tell from chance: treat the models as equal."]
    return [f"The difference may be chance: about {needed:,} test problems would tell, if it is as large as it looks."]


def advice_on_rows(counts: dict[str, int], repeats: bool) -> list[str]:
    """Return advice for each kind of problem with a share of at least 10%, except "always right".

    Args:
        counts (`dict[str, int]`): Number of problems of each kind in `KINDS`. Other names are ignored.
        repeats (`bool`): Whether the model was trained on repeated right answers. Then no advice says to repeat them.
    """
    done = {"always right", "some right answers"} if repeats else {"always right"}
    known = {kind: count for kind, count in counts.items() if kind in KINDS and kind not in done}
    total = sum(counts.get(kind, 0) for kind in KINDS)
    most = sorted(known, key=lambda kind: -known[kind])
    return [
        f"{known[kind] / total:.0%} of the problems: {kind}. What helps: {KINDS[kind]}."
        for kind in most
        if known[kind] / total >= _LEAST_SHARE
    ]


def describe_rows(rows: Table) -> list[list[object]]:
    """Return facts about rows, as pairs of a name and a text."""
    table, count = rows.table, rows.table.num_rows
    facts: list[list[object]] = [["completions", f"{count:,}"], ["problems", f"{len(rows.places):,}"]]
    rewards_N, known_N = rows.rewards_N, ~np.isnan(rows.rewards_N)
    facts.append(["without a reward", f"{int((~known_N).sum()):,}"])
    if known_N.any() and len(np.unique(rewards_N[known_N])) > 1:
        positive = float((rewards_N[known_N] > rewards_N[known_N].mean()).mean())
        facts.append(["with a reward above the mean", f"{positive:.0%}"])
    if "reward_after_baseline" in table.column_names:
        chosen = int((~np.isnan(rows.column("reward_after_baseline"))).sum())
        facts.append(["chosen by the recipe", f"{chosen:,}"])
    if texts := rows.texts("completion"):
        repeated = count - len(set(zip(map(str, rows.problems), texts, strict=True)))
        lengths = np.quantile([len(text) for text in texts], [0.5, 0.95, 1]).astype(int)
        facts.append(["same text for the same problem", f"{repeated:,}"])
        facts.append(["characters (median, 95%, longest)", " / ".join(f"{one:,}" for one in lengths)])
    if rows.greedy_N.any():
        facts.append(["greedy (not trained on)", f"{int(rows.greedy_N.sum()):,}"])
    return facts


def recipes_of_rows(rows: Table) -> list[list[str]]:
    """Return a table of the rows that training would read with each recipe.

    If completions are not either right or wrong, the table has only the default `curation="none"`.
    """
    counts_N = np.flatnonzero(rows.is_last_N & ~rows.greedy_N & ~np.isnan(rows.rewards_N))
    found = [["curation", "rows to train on", "right or above the baseline", "their share of the weight", "times read"]]
    for rule in ("none", *REPEATING) if rows.has_two_values else ("none",):
        try:
            with warnings.catch_warnings(action="ignore"):  # The user did not choose the rules.
                given = rows.rewards_N[counts_N], rows.problem_N[counts_N]
                rewards, curated = CurationArguments(curation=rule).choose(*given, seed=0)
            share = effective_positive_share(rewards)
        except ValueError as error:  # Training would refuse these rows for the same reason.
            found.append([rule, str(error), "", "", ""])
            continue
        positive = rewards > 0
        reads = np.bincount(curated.indices[positive], minlength=1).max()
        shown = "" if np.isnan(share) else f"{share:.0%}"
        found.append([rule, f"{len(rewards):,}", f"{int(positive.sum()):,}", shown, f"{reads:,}"])
    return found


def cost_of_rows(rows: Table) -> str:
    """Return the approximate time of an epoch with 8 billion parameters, and a `topr plan` command for these rows.

    Return "" if prompts or completions are missing, or if turns have rewards of their own.
    """
    texts = rows.texts("prompt"), rows.texts("completion")
    if not all(texts) or rows.is_by_turn:  # An epoch reads a conversation once, whatever the number of its rewards.
        return ""
    prompt, completion = (max(1, round(np.mean(list(map(len, each))) / _CHARACTERS)) for each in texts)
    tokens, problems = rows.table.num_rows * (prompt + completion), len(rows.places)
    hours = _FLOPS_PER_PARAMETER * 8e9 * tokens / _FLOPS_PER_HOUR
    time = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"
    return (
        f"An epoch over all rows has about {tokens:,} tokens, at {_CHARACTERS} characters per token. With 8 billion "
        f"parameters, that is {time} of an H100. For your model and GPUs, run: topr plan --model 8b "
        f"--num_train_problems {problems} --num_generations {ceil(rows.table.num_rows / problems)} "
        f"--prompt_tokens {prompt} --max_new_tokens {completion}"
    )


def bars_of_rows(rows: Table) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return bar charts: number of completions by reward, and number of problems by number of right completions."""
    charts = []
    rewards_N = rows.rewards_N[rows.is_last_N & ~np.isnan(rows.rewards_N)]
    if len(rewards_N):
        values, counts = np.unique(rewards_N, return_counts=True)
        if len(values) > 12:
            counts, edges = np.histogram(rewards_N, 10)
            named = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
        else:
            named = [f"{value:g}" for value in values]
        charts.append(("completions by reward", list(zip(named, map(int, counts), strict=True))))
    if rows.has_two_values:
        right_N = np.where(rows.is_last_N, np.nan_to_num(rows.values_N), 0)
        right = [int(right_N[place].sum()) for place in rows.places.values()]
        counts = np.bincount(right)
        if 2 < len(counts) <= 40:
            charts.append(("problems by right completions", [(str(n), int(count)) for n, count in enumerate(counts)]))
    return charts
