"""How the pictures look, and how they are saved."""

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.statistics import Interval

rcParams["svg.hashsalt"] = "topr_trl"  # the same picture gives the same file
rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                 "legend.frameon": False, "font.size": 9, "axes.titlesize": 10})  # fmt: skip

COLOURS = {
    "base": "#888888", "topr": "#d1495b", "positives_only": "#2a9d8f", "reinforce": "#3d405b", "opr": "#8d6a9f",
    "tis": "#edae49", "ppo": "#00798c", "dpo": "#30638e", "kto": "#7fb069", "trl_dapo": "#003d5b",
    "trl_grpo": "#5f7a8a", "trl_gspo": "#a3b18a", "trl_cispo": "#bc6c25", "trl_vespo": "#9a031e", "asymre": "#588157",
    "m2po": "#5a189a", "topr_token": "#ef8a9a", "topr_geometric": "#e07a5f", "topr_group_sign": "#f2a6b3",
    "topr_rescored": "#b56576", "mean": "#6a040f", "removed": "#8fbc5a",
    "positives_repeated": "#1b4d3e", "uniform": "#d1495b", "positives": "#2a9d8f",
    "anna_karenina": "#30638e",
}  # fmt: skip


def figure(columns: int, width: float = 3.6, height: float = 3.1) -> tuple[Figure, list[Axes]]:
    picture = Figure(figsize=(width * columns, height), layout="constrained")
    axes = picture.subplots(1, columns, squeeze=False)[0]
    return picture, list(axes)


def save(picture: Figure, out: Path, name: str) -> str:
    """As PNG and SVG; returns the name of the PNG."""
    out.mkdir(parents=True, exist_ok=True)
    picture.savefig(out / f"{name}.png", dpi=130)
    picture.savefig(out / f"{name}.svg", metadata={"Date": None})
    return f"{name}.png"


def curve(axes: Axes, x: list[float], points: list[Interval], label: str, **style: Any) -> None:
    """A line through the means, with a band of the intervals; in percent."""
    (line,) = axes.plot(x, [100 * p.mean for p in points], label=label, **style)
    axes.fill_between(
        x, [100 * p.low for p in points], [100 * p.high for p in points], color=line.get_color(), alpha=0.12, lw=0
    )
