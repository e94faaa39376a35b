"""Pictures of a training: what `topr_trl.trainers.metrics` and the trainers log, over the steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topr_trl.evaluation.plots import COLORS

_MOST_POINTS = 200  # more are drawn pale, under their running mean
_WINDOW = 25  # points of the running mean
_LINES = tuple(zip(COLORS, ("-", "--", ":"), strict=False))


@dataclass
class Panel:
    """Metrics drawn in one panel."""

    title: str
    meaning: str  # how to read it
    lines: Mapping[str, str]  # labels, each with the name of its metric
    band: tuple[str, str] | None = None  # metrics that bound a band around the first line
    scale: str = "linear"  # or "log" or "share" (0 to 1)


def _ratio(sign: str, meaning: str) -> Panel:
    name = f"topr/log_ratio/{sign}"
    return Panel(
        f"log π/μ of {sign}",
        meaning,
        {"median": f"{name}/q50", "mean": f"{name}/mean"},
        (f"{name}/q05", f"{name}/q95"),
    )


PANELS = (
    Panel("Reward", "Mean reward of completions sampled in training, and of held-out rows, if there are any.",
          {"sampled": "reward", "held out": "eval_reward"}),
    Panel("Loss", "Not a measure of success: its weights change, and it may rise while the model improves.",
          {"training": "loss", "held out": "eval_loss"}),
    Panel("Weights of negatives",
          "Mean w; share of tapered ones (w < 1); share of dead ones (w < 0.01), which teach nothing.",
          {"mean weight": "topr/weight_mean_negatives", "tapered": "topr/negatives_tapered",
           "dead": "topr/negatives_dead"}, scale="share"),
    _ratio("negatives", "Falls below 0 as the model unlearns them, and w falls with it; the band holds 90% of "
           "the completions. If it keeps falling while w stays at 1, the model collapses."),
    _ratio("positives", "Rises as the model learns them. If it falls, the model loses right answers too."),
    Panel("Positives",
          "Share of rows with R > 0, their share of Σ |R|, and of Σ w|R|, which counts after the taper.",
          {"of rows": "topr/positive_share", "of |R|": "topr/effective_positive_share",
           "of w|R|": "topr/realized_positive_share"}, scale="share"),
    Panel("Gradient norm", "Before clipping. A steady rise is an early sign of a collapse.",
          {"norm": "grad_norm"}, scale="log"),
    Panel("Length of completions", "Tokens. After a sudden change, look at the rows below.",
          {"mean": "completions/mean_length"}),
    Panel("Entropy", "Of the next token. Near 0 the model repeats itself.", {"mean": "entropy"}),
)  # fmt: skip


def series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Steps and values, each (n,), of a metric in a log; values are finite."""
    points = {e["step"]: float(e[name]) for e in history if isinstance(e.get(name), int | float)}
    steps, values = np.array(list(points)), np.array(list(points.values()))
    known = np.isfinite(values)
    return steps[known], values[known]


def last_step(history: Sequence[Mapping[str, Any]]) -> int:
    return max((entry.get("step", 0) for entry in history), default=0)


def has(panel: Panel, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a log has a metric of the panel."""
    return any(len(series(history, name)[0]) for name in panel.lines.values())


def draw(panel: Panel, histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Draw a panel as a matplotlib figure.

    Args:
        panel: one of `PANELS`.
        histories: the `log_history` of successive trainings, by name; steps continue from one to the next.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    axes: Any = figure.subplots()
    start, seen = 0, set()
    for name, history in histories.items():
        for look, (label, metric) in zip(_LINES, panel.lines.items(), strict=False):
            steps, values = series(history, metric)
            if len(steps) == 0:
                continue
            _line(axes, steps + start, values, look, None if label in seen else label)
            seen.add(label)
        if panel.band is not None:
            low, high = (series(history, border) for border in panel.band)
            if len(low[0]) and len(low[0]) == len(high[0]):
                axes.fill_between(low[0] + start, low[1], high[1], color=COLORS[0], alpha=0.15, linewidth=0)
        if len(histories) > 1:
            axes.axvline(start, color="#bbbbbb", linewidth=0.8)
            axes.annotate(name, (start, 1), xycoords=("data", "axes fraction"), fontsize=8, color="#777777",
                          xytext=(0, 2), textcoords="offset points")  # fmt: skip
        start += last_step(history)
    if panel.scale == "share":
        axes.set_ylim(-0.03, 1.03)
    if panel.scale == "log" and all(line.get_ydata().min() > 0 for line in axes.lines if line.get_label()[0] != "_"):
        axes.set_yscale("log")
    axes.set(xlabel="optimizer steps")
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if len(seen) > 1:
        figure.legend(loc="outside upper right", ncols=len(seen), frameon=False, fontsize=9)
    return figure


def _line(axes: Any, steps: NDArray[Any], values: NDArray[Any], look: tuple[str, str], label: str | None) -> None:
    color, style = look
    many = len(steps) > _MOST_POINTS
    if many:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.25)
        window = np.ones(_WINDOW)
        values = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    marker = "o" if len(steps) < 15 else None
    axes.plot(steps, values, style, color=color, linewidth=1.6, label=label, marker=marker, markersize=3)
