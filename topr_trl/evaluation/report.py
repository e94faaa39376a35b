"""Report evaluations side by side: tables, files, plots, and a section of a model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tabulate import tabulate

from topr_trl.evaluation.answers import Samples
from topr_trl.evaluation.bootstrap import Difference, compare
from topr_trl.evaluation.estimates import Evaluation, evaluate_in_full, shared_ks
from topr_trl.evaluation.figure_style import RUNS
from topr_trl.evaluation.plots import plot_evaluations, plot_progress
from topr_trl.evaluation.rewards import RewardSamples, compare_rewards, evaluate_rewards
from topr_trl.rewards import INVALID

# Attributes of an evaluation, by the label of their rows: single estimates, and estimates by k.
_SINGLE = {"greedy (T=0)": "greedy", "greedy reward (T=0)": "greedy_reward", "reward": "reward"}
_CURVES = {
    "best reward": "best_reward_at", "pass": "pass_at", "maj": "maj_at", "weighted_sc": "weighted_sc_at",
    "best": "best_at",
}  # fmt: skip
EVALUATION = "evaluation.json"
PICTURE = "evaluation.png"  # plot of a model card, and of a report on one run


class Evaluations(dict[str, Evaluation]):
    """Dictionary of evaluations by name. Tables and plots show them side by side, in insertion order.

    `print` shows a table. Assign the evaluations to `trainer.evaluations` to add them to the model card.

    Example:

    ```python
    >>> from topr_trl import Evaluations, evaluate_samples

    >>> before = evaluate_samples([["9", "7"], ["8", None]], truths=["7", "8"])
    >>> after = evaluate_samples([["7", "7"], ["8", None]], truths=["7", "8"])
    >>> print(Evaluations(before=before, after=after))
                     before         after
    ---------  ------------  ------------
    pass@1     50.0% ± 70.7  75.0% ± 50.0
    correct           50.0%         75.0%
    incorrect         25.0%          0.0%
    invalid           25.0%         25.0%
    (2 problems, 2 samples each; ± is two standard errors)
    ```
    """

    def __str__(self) -> str:
        return "\n".join([plain_table(["", *self], self._rows()), *self._notes()]) if self else "No evaluations."

    def _check_not_empty(self) -> None:
        if not self:
            raise ValueError("There are no evaluations to show. Add one, as in Evaluations(before=..., after=...).")

    def _rows(self) -> list[list[str]]:
        """Return the rows of the table: a label and one cell per evaluation.

        A single estimate is shown if any evaluation has it. A measure is shown at each k that all evaluations have.
        """
        runs, rows = list(self.values()), []
        for label, name in _SINGLE.items():
            estimates = [getattr(run, name) for run in runs]
            if any(estimates):
                rows += [[label, *(str(estimate or "") for estimate in estimates)]]
        for measure, name in _CURVES.items():
            curves = [getattr(run, name) for run in runs]
            rows += [[f"{measure}@{k}", *(str(curve[k]) for curve in curves)] for k in shared_ks(curves)]
        shares = dict.fromkeys(share for run in runs for share in run.shares)
        return rows + [[share, *(f"{100 * run.shares.get(share, 0):.1f}%" for run in runs)] for share in shares]

    def _notes(self) -> list[str]:
        """Return the lines below the table: a description of the sampling, and a warning if no sample has an answer."""
        runs = list(self.values())
        counts = ({run.num_problems for run in runs}, {run.num_samples for run in runs})
        problems, samples = (" or ".join(map(str, sorted(count))) for count in counts)
        at = {name: _at(run.temperatures) for name, run in self.items()}
        same = len(set(at.values())) == 1
        notes = [f"({problems} problems, {samples} samples each{at[next(iter(at))] * same}; ± is two standard errors)"]
        if not same:
            notes += [f"{name}: sampled{how or ' at an unknown temperature'}." for name, how in at.items()]
        if any(run.greedy or run.greedy_reward for run in runs):
            notes += [
                "(greedy: one answer per problem; its ± is over the problems, and the ± of other measures "
                "over the samples)"
            ]
        notes += [
            f"(a completion passes with a reward of at least {threshold:g})"
            for threshold in sorted({run.pass_threshold for run in runs if run.pass_threshold is not None})
        ]
        return notes + [
            f"{name}: no sample has an answer. Check that --task is correct, and that prompts show its answer format "
            "(--num_shots)."
            for name, run in self.items()
            if run.shares.get(INVALID) == 1
        ]

    def plot(self, path: str | Path | IO[bytes]) -> None:
        """Plot rewards, accuracies and shares of answers in the order of the evaluations. See `plot_progress`.

        Args:
            path (`str`, `Path` or binary file):
                File to write. The suffix of a path sets the format. A binary file gets a PNG.

        Raises:
            ValueError: there are no evaluations.
            ImportError: matplotlib is not installed (`pip install ".[plots]"` in the clone).
        """
        self._check_not_empty()
        plot_progress(self, path)

    def write_card_section(self, folder: Path, tested_on: str | None = None) -> str:
        """Return a section of a model card, in Markdown, and write its plot if matplotlib is installed.

        Args:
            folder (`Path`):
                Folder of the card. The plot is saved in this folder as `evaluation.png`.
            tested_on (`str`, *optional*):
                Description of the problems and the sampling, to complete "Tested on". `None` omits this sentence.

        Raises:
            ValueError: there are no evaluations.
        """
        self._check_not_empty()
        parts = ["## Evaluation"]
        parts += [f"Tested on {tested_on}."] if tested_on else []
        table = tabulate(self._rows(), ["measure", *self], "github", disable_numparse=True, stralign=None)
        parts += [table, "\n".join(self._notes())]
        if find_spec("matplotlib"):
            by_reward = any(run.reward for run in self.values())
            draw = plot_evaluations if len(self) <= len(RUNS) and not by_reward else plot_progress
            draw(self, folder / PICTURE)
            parts += [f"![{' and '.join(self)}]({PICTURE})"]
        return "\n\n".join(parts) + "\n"


def _at(temperatures: Sequence[float]) -> str:
    """Return text such as `" at T=0.7"`, or empty text if the temperatures are unknown."""
    return f" at T={' and '.join(f'{value:g}' for value in temperatures)}" if temperatures else ""


def groups_table(evaluation: Evaluation) -> str:
    """Return tables of pass@1 and maj@k by subject and by level, or empty text if both are unknown."""
    parts = []
    for column, groups in evaluation.groups.items():
        ks = list(next(iter(groups.values())).maj_at)
        rows = [
            [name, group.num_problems, group.pass_at_1, *(group.maj_at[k] for k in ks)]
            for name, group in groups.items()
        ]
        parts.append(plain_table([column, "problems", "pass@1", *(f"maj@{k}" for k in ks)], rows))
    return "\n\n".join(parts)


def differences_table(names: tuple[str, str], differences: Mapping[str, Difference]) -> str:
    """Return a table of the differences between two runs, with 95% intervals."""
    rows = []
    for measure, found in differences.items():
        difference, _, interval = str(found).partition(" ")
        rows.append([measure, difference, interval, f"{100 * found.share_better:.1f}%"])
    units = "in units of the reward and in points" if "reward" in differences else "in points"
    note = f"({names[1]} minus {names[0]}, {units}; paired bootstrap over the problems)"
    return "\n".join([plain_table(["", "difference", "95% interval", "draws with a gain"], rows), note])


def plain_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table for the terminal, with a left-aligned first column and right-aligned other columns."""
    align = ("left", *["right"] * (len(header) - 1))
    return tabulate(rows, header, disable_numparse=True, colalign=align)


def write_report(
    folder: Path,
    runs: Mapping[str, Samples],
    seed: int = 0,
    rewards: Mapping[str, RewardSamples] | None = None,
    pass_threshold: float | None = None,
) -> str:
    """Evaluate one or two runs, write the results to a folder, and return tables for the terminal.

    The file `evaluation.json` contains the results of the first run. For two runs, `comparison.json` contains the
    results of both runs and their differences. If matplotlib is installed, the plot is `evaluation.png` for one run,
    and `comparison.png` for two runs.

    Args:
        folder (`Path`):
            Folder to write to.
        runs (`Mapping[str, Samples]`):
            Answers of each run by name. Empty if the runs have only rewards.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap, and of the draws for weighted self-consistency.
        rewards (`Mapping[str, RewardSamples]`, *optional*):
            Rewards of each run by name, to report the mean reward and the highest reward of k samples.
        pass_threshold (`float`, *optional*):
            Minimum reward for a sample to pass. With a threshold, all results are based on rewards and not on answers.

    Returns:
        `str`: the tables.

    Raises:
        ValueError: the two runs differ in their problems or true answers, or no problem has rewards in both runs.
    """
    rewards = rewards or {}
    runs = runs if pass_threshold is None else {}
    names = list(runs or rewards)
    differences = _compare_two(runs, rewards, pass_threshold, seed) if len(names) == 2 else None
    evaluations = Evaluations({name: _evaluate_both(name, runs, rewards, pass_threshold, seed) for name in names})
    plain = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    (folder / EVALUATION).write_text(json.dumps(plain[names[0]], indent=1))
    parts = [str(evaluations)]
    if differences is None:
        parts += [groups_table(evaluations[names[0]])]
    else:
        found = {measure: difference.to_dict() for measure, difference in differences.items()}
        both = {"runs": plain, "differences": found}
        (folder / "comparison.json").write_text(json.dumps(both, indent=1))
        parts += [differences_table((names[0], names[1]), differences)]
    picture = folder / (PICTURE if differences is None else "comparison.png")
    if not find_spec("matplotlib"):
        parts += ['There is no plot, because matplotlib is not installed: run pip install ".[plots]" in the clone.']
    elif rewards:
        plot_progress(evaluations, picture)
    else:
        plot_evaluations(evaluations, picture, differences)
    return "\n\n".join(filter(None, parts))


def _evaluate_both(
    name: str,
    runs: Mapping[str, Samples],
    rewards: Mapping[str, RewardSamples],
    pass_threshold: float | None,
    seed: int,
) -> Evaluation:
    """Evaluate the answers of a run, its rewards, or both."""
    if name not in rewards:
        return evaluate_in_full(runs[name], seed)
    by_reward = evaluate_rewards(rewards[name], pass_threshold)
    if name not in runs:
        return by_reward
    names = ("reward", "best_reward_at", "greedy_reward")
    return replace(evaluate_in_full(runs[name], seed), **{each: getattr(by_reward, each) for each in names})


def _compare_two(
    runs: Mapping[str, Samples], rewards: Mapping[str, RewardSamples], pass_threshold: float | None, seed: int
) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    if runs:
        first, second = runs.values()
        found |= compare(first, second, seed)
    if rewards:
        one, other = rewards.values()
        found |= compare_rewards(one, other, pass_threshold, seed)
    return found


def read_evaluation(path: Path) -> Evaluation:
    """Read an `evaluation.json` that `topr evaluate` wrote. A damaged file raises a ValueError."""
    try:
        return Evaluation.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or was not written by topr evaluate: {error!r}.") from error
