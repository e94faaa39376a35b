"""Draw curves of the metrics that trainers log, by optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topr_trl.evaluation.figure_style import GRAY, NEGATIVE, POSITIVE, TOPR
from topr_trl.limits import DEAD_WEIGHT

_MAX_POINTS = 200  # a line with more points is drawn pale, under its running mean
_SMOOTHING_POINTS = 25  # number of points in the running mean
_LINES = ("-", "--", ":")
_MOST_DEAD = 0.2  # share of dead negatives early in training that is still healthy


@dataclass
class Panel:
    """Figure with the curves of one or more metrics.

    Attributes:
        title (`str`): Title.
        meaning (`str`): Caption that explains the lines.
        lines (`Mapping[str, str]`): Name of the metric of each line, by the label of the line.
        band (`tuple[str, str]`, *optional*): Names of the metrics at the lower and upper edge of a band around the
            first line.
        scale (`str`, defaults to `"linear"`): `"linear"`, `"share"` for values from 0 to 1, or `"log"`, which becomes
            linear if a value is not above 0.
    """

    title: str
    meaning: str
    lines: Mapping[str, str]
    band: tuple[str, str] | None = None
    scale: str = "linear"


def _log_ratio_panel(sign: str, meaning: str) -> Panel:
    name = f"topr/log_ratio/{sign}"
    return Panel(
        f"log π/μ of {sign}",
        meaning,
        {"median": f"{name}/q50", "mean": f"{name}/mean"},
        (f"{name}/q05", f"{name}/q95"),
    )


PANELS = (
    Panel("Reward", "Mean reward of the completions sampled in training, and of held-out rows if the run has any.",
          {"sampled": "reward", "held out": "eval_reward"}),
    Panel("Loss", "The loss does not measure success. Its weights change, and it can rise while the model improves.",
          {"training": "loss", "held out": "eval_loss"}),
    Panel("Weights of negatives",
          "Mean weight w, share of tapered negatives (w < 1), and share of dead negatives (w < 0.01). The model learns "
          "nothing from dead negatives. With ratio_level='segment', w and log π/μ are means over the tokens of a "
          "completion, and most negatives are tapered early.",
          {"mean weight": "topr/weight_mean_negatives", "tapered": "topr/negatives_tapered",
           "dead": "topr/negatives_dead"}, scale="share"),
    _log_ratio_panel(
        "negatives",
        "The log-ratio falls below 0 as the model unlearns negatives, and w falls with it. The band contains 90% of "
        "the completions. If the log-ratio keeps falling while w stays at 1, the model collapses.",
    ),
    _log_ratio_panel(
        "positives",
        "The log-ratio rises as the model learns positives. If it falls, the model also loses correct answers.",
    ),
    Panel("log π per token", "Mean log π per token of the completions. It should rise for positives.",
          {"positives": "topr/logps/positives/token", "negatives": "topr/logps/negatives/token"}),
    Panel("Positives",
          "Share of positives (R > 0) in the number of rows, in Σ |R|, and in Σ w|R|, which includes the taper.",
          {"of rows": "topr/positive_share", "of |R|": "topr/effective_positive_share",
           "of w|R|": "topr/realized_positive_share"}, scale="share"),
    Panel("Gradient norm", "Norm before clipping. A steady rise is an early sign of a collapse.",
          {"norm": "grad_norm"}, scale="log"),
    Panel("Learning rate", "The schedule changes the rate during training.", {"rate": "learning_rate"}),
    Panel("Length of completions", "Number of tokens. After a sudden change, look at the rows below.",
          {"mean": "completions/mean_length"}),
    Panel("Entropy", "Entropy of the next token. Near 0, the model repeats itself.", {"mean": "entropy"}),
)  # fmt: skip


def series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the steps and the finite values of a metric.

    Args:
        history (`Sequence[Mapping]`): `log_history` of a trainer.
        name (`str`): Name of the metric.

    Returns:
        Two arrays of shape (n,): steps and values. They are empty if the log does not have the metric.
    """
    points = {entry["step"]: float(entry[name]) for entry in history if isinstance(entry.get(name), int | float)}
    steps, values = np.array(list(points)), np.array(list(points.values()))
    known = np.isfinite(values)
    return steps[known], values[known]


def last_step(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the last optimizer step in a log. Return 0 if the log is empty."""
    return max((entry.get("step", 0) for entry in history), default=0)


def has_metric(panel: Panel, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a log has a finite value for a line of the panel."""
    return any(len(series(history, name)[0]) for name in panel.lines.values())


def draw_panel(panel: Panel, histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Draw a panel as a matplotlib figure.

    Args:
        panel (`Panel`): One of `PANELS`.
        histories (`Mapping`): `log_history` of each training run, by name, in order. The curves of a run start where
            the run before it ends.

    Returns:
        `matplotlib.figure.Figure`: the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    axes: Any = figure.subplots()
    start, seen, lowest = 0, set(), np.inf
    for name, history in histories.items():
        for line, (label, metric) in zip(_LINES, panel.lines.items(), strict=False):
            steps, values = series(history, metric)
            if len(steps) == 0:
                continue
            _draw_line(axes, steps + start, values, (_color(metric), line), None if label in seen else label)
            seen.add(label)
            lowest = min(lowest, values.min())
        if panel.band is not None:
            low, high = (series(history, border) for border in panel.band)
            if len(low[0]) and len(low[0]) == len(high[0]):
                color = _color(panel.band[0])
                axes.fill_between(low[0] + start, low[1], high[1], color=color, alpha=0.15, linewidth=0)
        if len(histories) > 1:
            axes.axvline(start, color=GRAY, linewidth=0.8)
            axes.annotate(name, (start, 1), xycoords=("data", "axes fraction"), fontsize=8, color=GRAY,
                          xytext=(0, 2), textcoords="offset points")  # fmt: skip
        start += last_step(history)
    if panel.scale == "share":
        axes.set_ylim(-0.03, 1.03)
    if panel.scale == "log" and lowest > 0:
        axes.set_yscale("log")
    axes.set(xlabel="optimizer steps")
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if len(seen) > 1:
        figure.legend(loc="outside upper right", ncols=len(seen), frameon=False, fontsize=9)
    return figure


def _color(metric: str) -> str:
    """Return the color of positives, of negatives, or of all rows."""
    return NEGATIVE if "negatives" in metric else POSITIVE if "positive" in metric else TOPR


def _draw_line(axes: Any, steps: NDArray[Any], values: NDArray[Any], look: tuple[str, str], label: str | None) -> None:
    """Draw a line. A line with many points is drawn pale, under its running mean."""
    color, style = look
    many = len(steps) > _MAX_POINTS
    if many:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.25)
        window = np.ones(_SMOOTHING_POINTS)
        # At both ends of the line, the window contains fewer points, so divide by their number.
        values = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    marker = "o" if len(steps) < 15 else None
    axes.plot(steps, values, style, color=color, linewidth=1.6, label=label, marker=marker, markersize=3)


def warnings_of(history: Sequence[Mapping[str, Any]], uses_segments: bool = False) -> list[str]:
    """Return warnings about a log, by the rules of the documentation page "Metrics".

    Args:
        history (`Sequence[Mapping]`): `log_history` of a trainer.
        uses_segments (`bool`, defaults to `False`): Whether the run already has a ratio per segment.
    """
    found = []
    steps, dead = series(history, "topr/negatives_dead")
    early = dead[steps <= last_step(history) / 10]
    if len(early) and early.max() > _MOST_DEAD:
        segments = "With completions of 128 tokens or more, set ratio_level='segment'. Otherwise lower"
        found.append(
            f"{early.max():.0%} of the negatives were dead (w < {DEAD_WEIGHT:g}) in the first tenth of the steps. "
            f"{'Lower' if uses_segments else segments} the learning rate."
        )
    steps, ratios = series(history, "topr/log_ratio/negatives/q50")
    if len(ratios) and steps[0] <= 2 and ratios[0] < -2:
        found.append(
            f"The median log π/μ of the negatives was {ratios[0]:.1f} at the first log. It should start near 0: check "
            "that log μ comes from the model that wrote the rows."
        )
    _, logps = series(history, "topr/logps/positives/token")
    third = len(logps) // 3
    if third and logps[-third:].mean() < logps[:third].mean() - 0.1:
        found.append(
            f"log π per token of the positives fell from {logps[:third].mean():.2f} to {logps[-third:].mean():.2f}, "
            "which is a sign of collapse. Lower the learning rate."
        )
    return found
