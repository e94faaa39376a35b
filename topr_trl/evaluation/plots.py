"""Plot evaluations side by side in one figure, or as a series that shows progress."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from topr_trl.evaluation.answers import GROUPINGS
from topr_trl.evaluation.bootstrap import Difference
from topr_trl.evaluation.estimates import Estimate, Evaluation, shared_ks
from topr_trl.evaluation.figure_style import DPI, GRAY, LOOK, NEGATIVE, NEITHER, POSITIVE, RUNS, TOPR, WIDTH
from topr_trl.evaluation.rewards import NOT_PASSED, PASSED
from topr_trl.rewards import CORRECT, INCORRECT

_SHARE_COLORS = dict.fromkeys((CORRECT, PASSED), POSITIVE) | dict.fromkeys((INCORRECT, NOT_PASSED), NEGATIVE)
_MARKS = ("o", "s", "^", "D")
_MOST_BARS = 32  # with more samples per problem, bars of several runs would be too thin
_GREEDY = (0, (1, 3))  # dotted line
_LINES = {"pass@k": "-", "maj@k": "--", "weighted SC@k": ":", "best@k": "-."}


def plot_evaluations(
    evaluations: Mapping[str, Evaluation], path: str | Path, differences: Mapping[str, Difference] | None = None
) -> None:
    """Plot one to four evaluations in one figure.

    The panels show:

    - pass@k and the other measures over k, with bands of ±2 standard errors, and greedy accuracy as a horizontal line
    - a histogram of the problems by their share of correct samples
    - pass@1 by subject and by level, if all evaluations have subjects or levels
    - the differences between two runs, with 95% intervals

    Args:
        evaluations (`Mapping[str, Evaluation]`):
            Evaluations by name.
        path (`str` or `Path`):
            File to write. Its suffix sets the format, such as PNG or SVG.
        differences (`Mapping[str, Difference]`, *optional*):
            Differences between two runs by measure. See [`compare`]. `None` omits their panel.

    Raises:
        ImportError: matplotlib is not installed (`pip install ".[plots]"` in the clone).
    """
    from matplotlib import rc_context

    with rc_context(LOOK):
        _figure_of(evaluations, differences).savefig(path, dpi=DPI)


def _figure_of(evaluations: Mapping[str, Evaluation], differences: Mapping[str, Difference] | None) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = [c for c in GROUPINGS if all(c in run.groups for run in evaluations.values())]
    longest = max((len(_members(evaluations, column)) for column in columns), default=0)
    heights = [3.6]
    heights += [] if differences is None else [1 + 0.2 * len(differences)]
    heights += [1.2 + 0.22 * longest * len(evaluations)] if columns else []
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    rows = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if len(evaluations) > 1:
        patches = [Patch(color=color, label=name) for color, name in zip(RUNS, evaluations, strict=False)]
        rows[0].legend(handles=patches, loc="outside upper center", ncols=len(patches))
    curves, cardinality = rows.pop(0).subplots(1, 2)
    _draw_curves(curves, evaluations)
    _draw_cardinality(cardinality, evaluations)
    if differences is not None:
        _draw_differences(rows.pop(0).subplots(), list(evaluations), differences)
    if columns:
        for panel, column in zip(rows[0].subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
            _draw_groups(panel, evaluations, column)
    return figure


def _draw_curves(panel: Any, evaluations: Mapping[str, Evaluation]) -> None:
    """Draw each run in its own color and each measure in its own line style. A single run has a color per measure."""
    one = len(evaluations) == 1
    first_greedy = next((run for run in evaluations.values() if run.greedy), None)
    for r, run in enumerate(evaluations.values()):
        for m, (measure, curve) in enumerate(_curves(run).items()):
            color, line = RUNS[m if one else r], "-" if one else _LINES[measure]
            ks, values = list(curve), np.array([100 * e.value for e in curve.values()])
            margins = np.array([200 * e.standard_error for e in curve.values()])  # matplotlib draws a gap for NaN
            panel.plot(ks, values, line, color=color, marker=_MARKS[m], markersize=4, label=measure if r == 0 else None)
            panel.fill_between(ks, values - margins, values + margins, color=color, alpha=0.15, linewidth=0)
            if np.isfinite(margins).sum() == 1:  # A band needs two points, so draw an error bar.
                panel.errorbar(ks, values, margins, fmt="none", ecolor=color, alpha=0.5)
        if run.greedy:
            color = GRAY if one else RUNS[r]
            panel.axhline(100 * run.greedy.value, color=color, linewidth=1, linestyle=_GREEDY,
                          label="greedy (T=0)" if run is first_greedy else None)  # fmt: skip
    low, high = panel.get_ylim()
    if high - low < 1:  # A tight axis would magnify differences below one percentage point.
        panel.set_ylim(low - 2.5, high + 2.5)
    panel.set_xscale("log", base=2)
    ticks = sorted({k for run in evaluations.values() for k in run.pass_at})
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.minorticks_off()
    panel.set(xlabel="k samples per problem", ylabel="problems solved (%)", title="Accuracy, ± 2 std. errors")
    panel.grid()
    for handle in panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2)).legend_handles:
        if not one:
            handle.set_color(GRAY)  # Colors stand for runs, so measures are gray in the legend.


def _curves(run: Evaluation) -> dict[str, dict[int, Estimate]]:
    first = {1: run.pass_at[1]} if 1 in run.pass_at else {}  # At k = 1, all measures equal pass@1.
    curves = {"maj@k": run.maj_at, "weighted SC@k": run.weighted_sc_at, "best@k": run.best_at}
    return {"pass@k": run.pass_at} | {name: {**first, **curve} for name, curve in curves.items() if curve}


def _draw_cardinality(panel: Any, evaluations: Mapping[str, Evaluation]) -> None:
    width = 0.84 / len(evaluations)
    for r, run in enumerate(evaluations.values()):
        share = np.array(run.cardinality) / run.num_problems * 100
        # The axis shows shares, so that runs with different numbers of samples are comparable.
        places = np.arange(len(share)) / run.num_samples * 100
        step = 100 / run.num_samples
        offset = (r - (len(evaluations) - 1) / 2) * width * step
        if len(evaluations) > 1 and run.num_samples > _MOST_BARS:  # Bars side by side would be too thin.
            edges = np.append(places, 100 + step) - step / 2
            panel.stairs(share, edges, fill=True, alpha=0.4, color=RUNS[r])
        else:
            panel.bar(places + offset, share, width * step, color=RUNS[r])
    panel.set_xticks(range(0, 101, 20))
    panel.set(xlabel="correct samples (%)", ylabel="problems (%)", title="Problems by correct samples")
    panel.grid(axis="y")
    panel.set_axisbelow(True)


def _draw_differences(panel: Any, names: list[str], differences: Mapping[str, Difference]) -> None:
    places = np.arange(len(differences))[::-1]
    for place, found in zip(places, differences.values(), strict=True):
        certain = found.low > 0 or found.high < 0
        color = RUNS[int(found.difference > 0)] if certain else GRAY
        panel.plot([100 * found.low, 100 * found.high], [place, place], color=color, linewidth=2)
        panel.plot(100 * found.difference, place, "o", color=color, markersize=5)
        panel.annotate(str(found), (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    panel.axvline(0, color=GRAY, linewidth=0.8)
    panel.set_yticks(places, list(differences))
    panel.set(xlabel="points, 95% interval (paired bootstrap)", title=f"{names[1]} minus {names[0]}")
    panel.grid(axis="x")


def _members(evaluations: Mapping[str, Evaluation], column: str) -> list[str]:
    return sorted({name for run in evaluations.values() for name in run.groups[column]})


def _draw_groups(panel: Any, evaluations: Mapping[str, Evaluation], column: str) -> None:
    members, width = _members(evaluations, column), 0.8 / len(evaluations)
    places = np.arange(len(members))[::-1]
    for r, run in enumerate(evaluations.values()):
        groups = [run.groups[column].get(member) for member in members]
        values = [100 * group.pass_at_1.value if group else 0.0 for group in groups]
        margins = np.nan_to_num([200 * group.pass_at_1.standard_error if group else 0.0 for group in groups])
        offset = ((len(evaluations) - 1) / 2 - r) * width
        panel.barh(places + offset, values, width, xerr=margins, color=RUNS[r], error_kw={"ecolor": GRAY, "lw": 1})
    found = {name: group.num_problems for run in evaluations.values() for name, group in run.groups[column].items()}
    panel.set_yticks(places, [f"{member} ({found[member]})" for member in members])
    panel.set_xlim(0, max(5, panel.get_xlim()[1]))
    panel.set(xlabel="pass@1 (%), ± 2 std. errors", title=f"By {column} (problems)")
    panel.grid(axis="x")
    panel.set_axisbelow(True)


def plot_progress(evaluations: Mapping[str, Evaluation], path: str | Path | IO[bytes]) -> None:
    """Plot the rewards, accuracies and shares of a series of evaluations. See [`Evaluation`].

    Rewards are plotted if all evaluations have them. The other panels are plotted if any evaluation has values.
    Measures of k samples are plotted at each k that all evaluations have. With one evaluation, the measures are on the
    axis.

    Args:
        evaluations (`Mapping[str, Evaluation]`):
            One or more evaluations by name, in the order of the plot.
        path (`str`, `Path` or binary file):
            File to write. The suffix of a path sets the format, such as PNG or SVG. A binary file gets a PNG.

    Raises:
        ImportError: matplotlib is not installed (`pip install ".[plots]"` in the clone).
    """
    from matplotlib import rc_context

    with rc_context(LOOK):
        _figure_of_progress(evaluations).savefig(path, dpi=DPI)


def _figure_of_progress(evaluations: Mapping[str, Evaluation]) -> Any:
    from matplotlib.figure import Figure

    runs = list(evaluations.values())
    drawn = [
        (_draw_rewards, all(run.reward for run in runs)),
        (_draw_accuracies, any(run.pass_at for run in runs)),
        (_draw_shares, any(run.shares for run in runs)),
    ]
    draws = [draw for draw, has_values in drawn if has_values]
    figure = Figure(figsize=(WIDTH, 2.8 * len(draws)), layout="constrained")
    for panel, draw in zip(figure.subplots(len(draws), 1, squeeze=False)[:, 0], draws, strict=True):
        draw(panel, evaluations)
        if len(runs) > 1:
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        panel.tick_params("x", rotation=0 if len(runs) < 5 else 45)
    return figure


def _draw_rewards(panel: Any, evaluations: Mapping[str, Evaluation]) -> None:
    runs = list(evaluations.values())
    best = [run.best_reward_at for run in runs]
    _draw_series(panel, evaluations, [run.reward for run in runs], label="mean")
    _draw_series(panel, evaluations, [run.greedy_reward for run in runs], label="greedy", linestyle=_GREEDY)
    for k in shared_ks(best):
        _draw_series(panel, evaluations, [curve[k] for curve in best], label=f"best@{k}")
    panel.set(ylabel="reward", title="Reward of test prompts")


def _draw_series(panel: Any, names: Iterable[str], estimates: Sequence[Estimate | None], **look: object) -> None:
    """Draw the estimates of a series of evaluations. Leave out evaluations without an estimate.

    A single evaluation has its measures on the axis instead of its name.
    """
    if len(estimates) == 1:
        names, look = [str(look["label"])], {"color": TOPR}
    known = [(name, each) for name, each in zip(names, estimates, strict=True) if each is not None]
    if known:
        errors = np.nan_to_num([2 * each.UNIT * each.standard_error for _, each in known])
        values = [each.UNIT * each.value for _, each in known]
        panel.errorbar([name for name, _ in known], values, errors, marker="o", markersize=4, capsize=3, **look)
    panel.margins(x=0.15)
    panel.grid(axis="y")


def _draw_accuracies(panel: Any, evaluations: Mapping[str, Evaluation]) -> None:
    runs = list(evaluations.values())
    for measure, curves in {"pass": [run.pass_at for run in runs], "maj": [run.maj_at for run in runs]}.items():
        for k in shared_ks(curves):
            look = {"linestyle": _LINES[f"{measure}@k"], "color": f"C{k.bit_length() - 1}", "label": f"{measure}@{k}"}
            _draw_series(panel, evaluations, [curve[k] for curve in curves], **look)
    greedy = [run.greedy for run in runs]
    _draw_series(panel, evaluations, greedy, label="greedy", linestyle=_GREEDY, color=GRAY)
    panel.set(ylabel="accuracy (%)", ylim=(0, 100), title="Test accuracy")


def _draw_shares(panel: Any, evaluations: Mapping[str, Evaluation]) -> None:
    names, runs = list(evaluations), list(evaluations.values())
    kinds = dict.fromkeys(share for run in runs for share in run.shares)
    bottom = [0.0] * len(runs)
    for share in kinds:
        values = [100 * run.shares.get(share, 0.0) for run in runs]
        if len(runs) == 1:
            names, bottom = [share], [0.0]
        panel.bar(names, values, bottom=bottom, color=_SHARE_COLORS.get(share, NEITHER), label=share, width=0.5)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    panel.set(ylabel="samples (%)", ylim=(0, 100), title="Answers")
