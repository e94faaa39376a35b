"""Fill in the tables, numbers and comparative words of README.md, docs/results.md and docs/which_method.md."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import real_model, real_page
from benchmarks.cells import Store, Unfinished
from benchmarks.decoded import GREEDY
from benchmarks.experiment import Experiment, value
from benchmarks.experiments import (
    ALL,
    against_positives,
    controls,
    long_completions,
    long_run,
    online,
    planned,
    protocols,
    staleness,
    temperatures,
    trials,
    wrong_answers,
)
from benchmarks.experiments.controls import BASES, METHODS, SEEDS, TOPR
from benchmarks.experiments.long_completions import LENGTHS, OTHERS, Setting
from benchmarks.report import Found, counted, fill_page, percent, table, texts
from benchmarks.setting import HERE, PROFILES
from benchmarks.statistics import Interval, difference, over_seeds

PAGE, CHOICE_PAGE = (HERE.parent / "docs" / name for name in ("results.md", "which_method.md"))
PAGES = (PAGE, CHOICE_PAGE, HERE.parent / "README.md")
LONG_PICTURE = HERE.parent / "docs" / "results" / "long_completions.png"


def write(store: Store, page: Path = PAGE, real: Store | None = None, template: Path = PAGE) -> Path:
    """Write a page with the tables, numbers and comparative words of the results.

    Args:
        store: results on small models.
        page: page to write.
        real: results on a pretrained model. Default: the published results.
        template: page with the text and the markers.
    """
    pretrained = real or real_model.open_store(HERE / "results")
    tables: dict[str, Callable[[], str]] = {
        "against": lambda: against_table(store),
        "greedy": lambda: controls_table(store, GREEDY),
        "sampled": lambda: controls_table(store, "pass@1"),
        "long": lambda: long_table(store, LENGTHS),
        "long_greedy": lambda: long_table(store, LENGTHS, "greedy"),
        "long_others": lambda: long_table(store, OTHERS),
        "wrong_answers": lambda: wrong_answers_table(store),
        "run": lambda: what_was_run(store),
        "real": lambda: real_page.section(pretrained),
    }
    numbers = {name: partial(number, store) for name, number in NUMBERS.items()}
    numbers |= {name: partial(number, pretrained) for name, number in real_page.NUMBERS.items()}
    return fill_page(template, page, tables, texts(numbers))


# Tables of small models.


def against_table(store: Store) -> str:
    """Return a table that compares TOPR's default with other methods, on models with mostly wrong greedy answers."""
    rows = []
    for method in METHODS:
        if method == TOPR:
            continue
        rows.append([method, *(_said(_wrong_mode(store, TOPR, method, measure)) for measure in controls.MEASURES)])
    return table(["TOPR's default against", "greedy", "sampled at temperature 1"], rows)


def _wrong_mode(store: Store, first: str, second: str, measure: str) -> list[Interval]:
    """Return `first` minus `second` on each model with mostly wrong greedy answers."""
    experiments = [_finished_controls(store, base) for base in controls.WRONG_MODE]
    return [difference(*(one.measured(store, name, measure) for name in (first, second))) for one in experiments]


def _said(gaps: list[Interval]) -> str:
    said = []
    for kind, of_kind in counted(gaps).items():
        ends = sorted({f"{100 * abs(gap.mean):.0f}" for gap in of_kind}, key=float)
        by = "" if kind == "level" else f", by {' to '.join([ends[0], ends[-1]][: len(ends)])}"
        said.append(f"{kind} on {len(of_kind)}{by}")
    return "; ".join(said)


def controls_table(store: Store, measure: str) -> str:
    """Return a table of a measure after training, by method and base model.

    The first two rows are base models without training: with the decoding of the measure, and at their best
    temperature. A value is bold if its interval is above the second row.
    """
    bases = [base for base in BASES if _is_finished(store, base)]
    if not bases:
        raise Unfinished("no base model has been trained by all methods")
    rows = _untrained_rows(store, bases, measure == GREEDY)
    bests = [_best_untrained(store, base)[0] for base in bases]
    for method in METHODS:
        cells = []
        for base, best in zip(bases, bests, strict=True):
            found = over_seeds(controls.of_base(store, base).measured(store, method, measure))
            cells.append(f"**{found.percent()}**" if found.low > best else found.percent())
        rows.append([method, *cells])
    return table(["", *bases], rows)


def _is_finished(store: Store, base: str) -> bool:
    try:
        experiment = controls.of_base(store, base)
    except Unfinished:
        return False
    return all(len(experiment.ends(store, method, m)) == SEEDS for method in METHODS for m in controls.MEASURES)


def _finished_controls(store: Store, base: str) -> Experiment:
    if not _is_finished(store, base):
        raise Unfinished(f"not all methods have been run on {base}")
    return controls.of_base(store, base)


def _best_untrained(store: Store, base: str) -> tuple[float, str]:
    """Return the base model's best accuracy without training, and the temperature for it."""
    found = temperatures.by_temperature(store, base)
    at = max(found, key=lambda temperature: found[temperature])
    return found[at], f"T = {at:g}"


def _untrained_rows(store: Store, bases: list[str], is_greedy: bool) -> list[list[str]]:
    """Return two rows of base models without training: with the decoding of the table, and at the best temperature."""
    at, how = (0.0, "greedy") if is_greedy else (1.0, "T = 1")
    best = [_best_untrained(store, base) for base in bases]
    return [
        [f"base model, {how}", *(percent(temperatures.by_temperature(store, base)[at]) for base in bases)],
        ["base model, best temperature", *(f"{percent(value)} ({which})" for value, which in best)],
    ]


def long_table(store: Store, compared: Sequence[tuple[Setting, int]], shown: str = "pass@1") -> str:
    """Return a table of the measure `shown`, with a row per ratio and a column per setting and number of updates.

    Results are after 256 updates, unless the header names another number of updates. If columns have different base
    models, the first two rows are the base models without training, as in `controls_table`. A value is bold if the
    interval of its difference from TOPR's ratio is above 0. A method has no value until all its seeds have been run. A
    setting has no column until TOPR's ratio and segments have values.
    """
    header, tasks, columns = [""], [], []
    for setting, updates in compared:
        experiment = long_completions.of_setting(setting, updates)
        path = long_completions.measure(updates, shown)
        ended = [name for name in experiment.methods if experiment.has_all_seeds(store, name)]
        found = {name: experiment.measured(store, name, path) for name in ended}
        if not {"sequence (TOPR)", "segment"} <= set(found):
            continue
        header.append(str(setting) + ("" if updates == long_completions.MEASURED_AT[-1] else f", {updates} updates"))
        tasks.append(setting.task)
        topr, cells = next(iter(found.values())), {}
        for name, values in found.items():
            gap, text = difference(values, topr), over_seeds(values).percent()
            cells[name] = f"**{text}**" if gap.low > 0 else text
        columns.append(cells)
    if not columns:
        raise Unfinished("long_completions has not been run")
    names = [name for name in long_completions.NAMES if any(name in cells for cells in columns)]
    rows = [[name, *(cells.get(name, "") for cells in columns)] for name in names]
    untrained = _untrained_rows(store, tasks, shown == "greedy") if len(set(tasks)) > 1 else []
    return table(header, [*untrained, *rows])


def wrong_answers_table(store: Store) -> str:
    """Return a table by recipe and base model: the share of unsolved problems that are solved after six iterations.

    A value is bold if its difference from repeated right answers is above 0.
    """
    experiments = [wrong_answers.of_base(base) for base in wrong_answers.BASES]
    experiments = [one for one in experiments if one.is_finished(store)]
    if not experiments:
        raise Unfinished("wrong_answers has not been run")
    begins = [list(one.ends(store, wrong_answers.REPEATED).values()) for one in experiments]
    agreement, unsolved = (
        [float(np.mean([value(result, path) for result in results])) for results in begins]
        for path in ("curve/0/agreement", "curve/0/unsolved/problems")
    )
    rows = [
        ["wrong answers agree, before training (%)", *map(percent, agreement)],
        ["unsolved problems", *(f"{count:.0f}" for count in unsolved)],
    ]
    for method in wrong_answers.RECIPES:
        cells = []
        for one in experiments:
            found = one.measured(store, method)
            gap, text = difference(found, one.measured(store, wrong_answers.REPEATED)), over_seeds(found).percent()
            cells.append(f"**{text}**" if gap.low > 0 else text)
        rows.append([method, *cells])
    return table(["", *(one.fields["base"] for one in experiments)], rows)


def what_was_run(store: Store) -> str:
    """Return the number of cells, their time, machines and versions."""
    cells = [cell for name in ALL for cell in planned(name, PROFILES["full"], store)]
    entries = store.entries(list({json.dumps(cell, sort_keys=True): cell for cell in cells}.values()))
    hours = sum(entry["seconds"] for entry in entries) / 3600
    machines = sorted({entry["machine"] for entry in entries})
    versions = {name: sorted({entry["versions"][name] for entry in entries}) for name in ("torch", "trl")}
    listed = ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())
    return f"{len(entries):,} runs, {hours:.0f} process-hours ({'; '.join(machines)}); {listed}."


# Single numbers.


def _gap(
    store: Store, first: tuple[Experiment, str], second: tuple[Experiment, str], shown: str = ""
) -> Interval:  # fmt: skip
    """Return the difference between two methods, paired by seed."""
    found = [experiment.measured(store, method, shown) for experiment, method in (first, second)]
    if not all(found):
        raise Unfinished(f"{first[1]} or {second[1]} has not been run")
    return difference(*found)


def _of_bases(store: Store, first: str, second: str, at_32: bool = False) -> list[Interval]:
    """Return `first` minus `second` on each base model."""
    experiments = [protocols.at_32(base) if at_32 else protocols.of_base(base) for base in protocols.BASES]
    return [_gap(store, (one, first), (one, second)) for one in experiments]


def _fig4(store: Store, shown: str) -> Interval:
    experiment = against_positives.experiments(store)[-1]
    return _gap(store, (experiment, against_positives.MAIN), (experiment, "positives, once"), shown)


def _percent(store: Store, experiment: Experiment, method: str) -> str:
    found = experiment.measured(store, method)
    if not found:
        raise Unfinished(f"{method} has not been run")
    return over_seeds(found).percent()


def _stale(store: Store, method: str) -> Interval:
    return _gap(store, (staleness.STALE, method), (staleness.FRESH, method))


def _lower(store: Store, run: str, shown: str) -> Interval:
    base = long_run.BASES[0]
    return _gap(store, (long_run.at_lower(base, 1), run), (long_run.at_best(base), run), shown)


def _long(store: Store, base: int, first: str, second: str, shown: str) -> Interval:
    experiment = long_run.at_best(long_run.BASES[base])
    return _gap(store, (experiment, first), (experiment, second), shown)


_ONLINE = online.label(online.REPLAY, 1, 0.75), online.label(online.REFERENCE, 4)


def _online(store: Store, base: str, completions: int = online.COMPLETIONS, shown: str = online.END) -> Interval:
    """Return TOPR with replay minus TRL's default with four uses, after all completions."""
    return _gap(store, *((online.of_method(base, name, completions), name) for name in _ONLINE), shown)


def _online_share(store: Store, base: str) -> str:
    share, low, high = online.share_needed(store, base, *_ONLINE)
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def _without_replay(store: Store) -> list[Interval]:
    """Return TOPR minus TRL's default on each base model, both with four uses."""
    names = [online.label(method, 4) for method in (online.REPLAY, online.REFERENCE)]
    return [_gap(store, *((online.of_method(base, name), name) for name in names)) for base in online.BASES]


def _segments(
    store: Store, setting: Setting, first: str = "segment", second: str = "sequence (TOPR)", shown: str = "pass@1",
    updates: int = long_completions.MEASURED_AT[-1], second_updates: int = 0,
) -> Interval:  # fmt: skip
    """Return a measure of one ratio minus that of another one, after some updates."""
    measured = []
    for name, after in ((first, updates), (second, second_updates or updates)):
        experiment = long_completions.of_setting(setting, after)
        measured.append(experiment.measured(store, name, long_completions.measure(after, shown)))
    if not all(measured):
        raise Unfinished(f"{first} or {second} has not been run")
    return difference(*measured)


def _solved(store: Store, base: str, first: str, second: str = wrong_answers.REPEATED) -> Interval:
    """Return `first` minus `second`, in the share of unsolved problems that are solved after six iterations."""
    experiment = wrong_answers.of_base(base)
    return _gap(store, (experiment, first), (experiment, second))


def _rivals(store: Store, measure: str) -> list[Interval]:
    """Return TOPR's default minus each method of TRL, on each model with mostly wrong greedy answers."""
    return [gap for rival in _RIVALS for gap in _wrong_mode(store, TOPR, rival, measure)]


_RIVALS = ("DAPO (TRL's GRPO)", "DPO", "KTO")
_AGREEING = ("facts-agree", "facts-alone")
_LONG = [Setting(parts) for parts in (4, 16, 64)]  # at least 160 tokens
_MISTAKES = (long_completions.EARLY, long_completions.LATE)


def _lost(store: Store, name: str) -> str:
    return f"{100 * float(np.mean([lost[name] for lost in trials.lost(store).values()])):.1f}"


NUMBERS: dict[str, Callable[[Store], Found]] = {
    "once": lambda store: _of_bases(store, protocols.TOPR, protocols.REMOVED),
    "steps": lambda store: _of_bases(store, protocols.TOPR, protocols.STEPS, at_32=True),
    "repeated": lambda store: _of_bases(store, protocols.TOPR, protocols.REPEATED),
    "repeated_first": lambda store: _of_bases(store, protocols.REPEATED, protocols.TOPR),
    "repeated_sampled": lambda store: _wrong_mode(store, "positives repeated", TOPR, "pass@1"),
    "repeated_greedy": lambda store: _wrong_mode(store, "positives repeated", TOPR, GREEDY),
    "rivals": lambda store: _rivals(store, "pass@1"),
    "rivals_greedy": lambda store: _rivals(store, GREEDY),
    "half_the_steps": lambda store: _of_bases(store, protocols.HALF, protocols.TOPR),
    "balanced": lambda store: _of_bases(store, protocols.BALANCED, protocols.TOPR),
    "repeated_balanced": lambda store: _of_bases(store, protocols.REPEATED, protocols.BALANCED),
    "paper_baseline": lambda store: _of_bases(store, protocols.TOPR, "TOPR, c = 0"),
    "fig4": lambda store: _fig4(store, "pass@1"),
    "fig4_vote": lambda store: _fig4(store, "maj/32"),
    "stale_topr": lambda store: _stale(store, staleness.TOPR),
    "stale_m2po": lambda store: _stale(store, "M2PO"),
    "stale_dapo": lambda store: _stale(store, "TRL's default (DAPO)"),
    "recomputed": lambda store: _percent(store, staleness.AT_TOPRS_RATE, staleness.RECOMPUTED),
    "lower_vote": lambda store: _lower(store, "p~ 50%", "maj/64"),
    "lower_pass": lambda store: _lower(store, "p~ 50%", "pass/1"),
    "anna_karenina": lambda store: _long(store, 0, "Anna Karenina", "c = 0", "pass/1"),
    "anna_karenina_2": lambda store: _long(store, 1, "Anna Karenina", "c = 0", "pass/1"),
    "online_sure": lambda store: _online_share(store, "sure-17"),
    "online_main": lambda store: _online_share(store, "main"),
    "online_hard": lambda store: _online(store, "hard"),
    "online_hard_long": lambda store: _online(store, "hard", online.LONG),
    "pass32_sure": lambda store: _online(store, "sure-17", shown=online.PASS_32),
    "pass32_main": lambda store: _online(store, "main", shown=online.PASS_32),
    "pass32_hard": lambda store: _online(store, "hard", shown=online.PASS_32),
    "pass32_hard_long": lambda store: _online(store, "hard", online.LONG, online.PASS_32),
    "without_replay": _without_replay,
    "segment": lambda store: [_segments(store, one) for one in _LONG],
    "segment_positives": lambda store: [_segments(store, one, second="positives only") for one in _LONG],
    "segment_main": lambda store: _segments(store, long_completions.NOISY),
    "segment_mistakes": lambda store: [_segments(store, one) for one in _MISTAKES],
    "segment_stopped": lambda store: _segments(store, Setting(4), second_updates=long_completions.MEASURED_AT[0]),
    "sequence_positives": lambda store: [
        _segments(store, one, "sequence (TOPR)", "positives only") for one in _LONG[1:]
    ],
    "segment_16": lambda store: [_segments(store, one, "segment of 16", "segment") for one in _LONG],
    "segment_16_short": lambda store: _segments(store, Setting(1), "segment of 16", "segment"),
    "segment_16_main": lambda store: _segments(store, long_completions.NOISY, "segment of 16", "segment"),
    "segment_16_mistakes": lambda store: [_segments(store, one, "segment of 16") for one in _MISTAKES],
    "solved_default": lambda store: [_solved(store, base, wrong_answers.DEFAULT) for base in _AGREEING],
    "solved_default_scattered": lambda store: _solved(store, "facts-scattered", wrong_answers.DEFAULT),
    "solved_weighted": lambda store: [_solved(store, base, wrong_answers.WEIGHTED) for base in _AGREEING],
    "solved_weighted_scattered": lambda store: _solved(store, "facts-scattered", wrong_answers.WEIGHTED),
    "trial_count": trials.recommended,
    "trial_default": lambda store: _lost(store, trials.DEFAULT),
    "trial_repeated": lambda store: _lost(store, trials.REPEATED),
}
