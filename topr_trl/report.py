"""Evaluations side by side: as a table for the terminal and as a picture."""

from collections.abc import Mapping
from pathlib import Path

from topr_trl.evaluation import Evaluation


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """A table with a column for each evaluation; intervals are the paper's ±2 standard errors, in points."""
    names, runs = list(evaluations), list(evaluations.values())
    rows = [(f"pass@{k}", [str(run.pass_at[k]) for run in runs]) for k in runs[0].pass_at]
    rows += [(f"maj@{k}", [str(run.maj_at[k]) for run in runs]) for k in runs[0].maj_at]
    rows += [(share, [f"{100 * run.shares[share]:.1f} %" for run in runs]) for share in runs[0].shares]
    first = max(len(label) for label, _ in rows) + 2
    width = max(12, *(len(name) for name in names), *(len(cell) for _, cells in rows for cell in cells)) + 2
    lines = [" " * first + "".join(f"{name:>{width}}" for name in names)]
    lines.append("─" * len(lines[0]))
    lines += [f"{label:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows]
    lines.append(f"({runs[0].num_problems} problems, {runs[0].num_samples} samples each; ± is two standard errors)")
    return "\n".join(lines)


def plot_comparison(evaluations: Mapping[str, Evaluation], path: str | Path) -> None:
    """Accuracies with their intervals, and shares of correct, incorrect and invalid answers, as a PNG or SVG.

    Raises:
        ImportError: matplotlib is not installed (`pip install topr_trl[plots]`).
    """
    from matplotlib.figure import Figure

    names, runs = list(evaluations), list(evaluations.values())
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    accuracy, shares = figure.subplots(1, 2)
    labels = [f"pass@{k}" for k in runs[0].pass_at] + [f"maj@{k}" for k in runs[0].maj_at]
    for label in labels:
        kind, k = label.split("@")
        estimates = [(run.pass_at if kind == "pass" else run.maj_at)[int(k)] for run in runs]
        errors = [200 * e.standard_error if e.standard_error == e.standard_error else 0 for e in estimates]
        accuracy.errorbar(names, [100 * e.value for e in estimates], errors, marker="o", capsize=3, label=label)
    accuracy.set(ylabel="accuracy (%)", ylim=(0, 100), title="Test accuracy")
    accuracy.margins(x=0.15)
    accuracy.grid(axis="y", alpha=0.3)
    accuracy.legend(frameon=False)
    bottom = [0.0] * len(runs)
    for share, colour in zip(runs[0].shares, ("#2a9d8f", "#e9c46a", "#d1495b"), strict=True):
        values = [100 * run.shares[share] for run in runs]
        shares.bar(names, values, bottom=bottom, color=colour, label=share, width=0.5)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    shares.set(ylabel="samples (%)", ylim=(0, 100), title="Answers")
    shares.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
