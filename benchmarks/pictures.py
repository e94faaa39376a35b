"""Draw the pictures of the page of results."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cells import Store, Unfinished
from benchmarks.experiments import long_completions as long
from benchmarks.experiments import wrong_answers
from benchmarks.statistics import Interval, interval, over_seeds
from topr_trl.evaluation.figure_style import DPI, LOOK, POSITIVE, PREFIX, SEGMENT, TOPR, WIDTH

STYLES = {
    "sequence (TOPR)": (TOPR, "-"), "segment": (SEGMENT, "-"), "segment of 16": (SEGMENT, "--"),
    "one per answer": (SEGMENT, ":"), "prefix": (PREFIX, "-"), "positives repeated": (POSITIVE, "-"),
}  # fmt: skip


def draw_long_completions(store: Store, path: Path) -> None:
    """Draw pass@1 after training by length of completions, and the weights of negatives by place in a completion.

    Raises:
        Unfinished: there are fewer than two lengths that all methods have results for.
    """
    lengths = [parts for parts in long.SESSIONS if _is_finished(store, parts)]
    if len(lengths) < 2:
        raise Unfinished("two lengths have not been run by all methods")
    path.parent.mkdir(exist_ok=True)
    with rc_context(LOOK):
        _figure_of(store, lengths).savefig(path, dpi=DPI)


def _figure_of(store: Store, lengths: list[int]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    accuracy, weights = figure.subplots(1, 2)
    tokens = [long.TOKENS * parts for parts in lengths]
    for name, (color, line) in STYLES.items():
        ends = [long.of_setting(long.Setting(parts)).measured(store, name) for parts in lengths]
        _draw(accuracy, tokens, map(over_seeds, ends), color=color, linestyle=line, label=name)
        if name == "positives repeated":  # negatives have no weight
            continue
        longest = long.of_setting(long.Setting(lengths[-1])).ends(store, name)
        by_quarter = np.mean([one["curve"][0]["weights"] for one in longest.values()], axis=0)
        weights.plot(["1st", "2nd", "3rd", "4th"], by_quarter, line, color=color, marker="o", markersize=4)
    accuracy.set(
        title=f"pass@1, {long.MEASURED_AT[-1]} updates, %", xlabel="tokens of a completion", xscale="log",
        xticks=tokens, xticklabels=[f"{each:,}" for each in tokens],
    )  # fmt: skip
    accuracy.minorticks_off()
    weights.set(
        title=f"weight of negatives, {long.MEASURED_AT[0]} updates",
        xlabel=f"quarter of {tokens[-1]:,} tokens", ylim=(-0.03, 1.03),
    )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_good_sessions(store: Store, path: Path) -> None:
    """Draw accuracy after training by the share of right answers in good sessions of 640 tokens.

    Raises:
        Unfinished: a setting has not been run by all methods.
    """
    settings = [long.Setting(16), *long.GOOD]
    shares = [100 * long.SHARES_RIGHT[setting.mistakes][0] for setting in settings]
    names = ("segment", "sequence (TOPR)", "positives repeated")
    if not all(long.of_setting(setting).has_all_seeds(store, name) for setting in settings for name in names):
        raise Unfinished("not all shares have been run")
    with rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, (shown, title) in zip(panels, {"pass@1": "sampled, %", "greedy": "greedy, %"}.items(), strict=True):
            for name in names:
                ends = [
                    long.of_setting(one).measured(store, name, long.measure(long.MEASURED_AT[-1], shown))
                    for one in settings
                ]
                _draw(panel, shares, map(over_seeds, ends), color=STYLES[name][0], label=name)
            panel.set(title=title, xlabel="right answers in good completions, %", xticks=shares, ylim=(-3, 103))
            panel.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=DPI)


def _draw(panel: Axes, places: Sequence[float], found: Iterable[Interval], marker: str = "o", **style: Any) -> None:
    """Draw a line of means in percent, with their intervals."""
    means, halves = zip(*((100 * one.mean, 100 * one.half) for one in found), strict=True)
    panel.errorbar(places, means, halves, marker=marker, markersize=4, capsize=2, **style)


def _is_finished(store: Store, parts: int) -> bool:
    """Return whether all seeds of the drawn methods have been run with this number of answers."""
    return all(long.of_setting(long.Setting(parts)).has_all_seeds(store, name) for name in STYLES)


RECIPES = {
    wrong_answers.REPEATED: (POSITIVE, "o"), wrong_answers.DEFAULT: (TOPR, "s"),
    wrong_answers.WEIGHTED: (SEGMENT, "^"),
}  # fmt: skip


def draw_wrong_answers(store: Store, path: Path) -> None:
    """Draw the share of unsolved problems that eight samples solve, by iteration, recipe and base model.

    Raises:
        Unfinished: a base has not been run by all recipes.
    """
    bases = wrong_answers.BASES
    if not all(wrong_answers.of_base(base).is_finished(store) for base in bases):
        raise Unfinished("not all recipes have been run")
    with rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        for base, panel in zip(bases, figure.subplots(2, 2, sharex=True, sharey=True).flat, strict=True):
            of_base = wrong_answers.of_base(base)
            untrained = [end["curve"][0]["agreement"] for end in of_base.ends(store, wrong_answers.CONTROL).values()]
            for name, (color, marker) in RECIPES.items():
                ends = of_base.ends(store, name).values()
                solved_SI = [[step["unsolved"]["pass@8"] for step in (*end["curve"], end["end"])] for end in ends]
                found = map(interval, zip(*solved_SI, strict=True))
                _draw(panel, range(wrong_answers.ITERATIONS + 1), found, color=color, marker=marker, label=name)
            panel.set(title=f"{base}; agreement {np.mean(untrained):.2f}", xlabel="iterations", ylim=(-3, 90))
            panel.grid(axis="y")
            panel.label_outer()
        figure.supylabel("unsolved problems solved, %", fontsize=9)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=DPI)


PICTURES = {
    "long_completions.png": draw_long_completions, "good_sessions.png": draw_good_sessions,
    "wrong_answers.png": draw_wrong_answers,
}  # fmt: skip
