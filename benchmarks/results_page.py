"""Fill in the tables, numbers and comparative words of README.md, docs/results.md and docs/which_method.md."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    turns,
    wrong_answers,
)
from benchmarks.experiments.controls import BASES, METHODS, SEEDS, TOPR
from benchmarks.experiments.long_completions import LENGTHS, OTHERS, Setting
from benchmarks.pretrained import SMOL
from benchmarks.report import Found, bold, counted, fill_page, percent, table, texts
from benchmarks.setting import HERE, PROFILES
from benchmarks.statistics import Interval, difference, over_problems, over_seeds

PAGE, CHOICE_PAGE = (HERE.parent / "docs" / name for name in ("results.md", "which_method.md"))
PAGES = (PAGE, CHOICE_PAGE, HERE.parent / "README.md")


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
        "one_pass": lambda: one_pass_table(store),
        "turns": lambda: turns_table(store, turns.rewarded()),
        "turns_rated": lambda: turns_table(store, turns.rated()),
        "run": lambda: what_was_run(store),
        "real": lambda: real_page.section(pretrained),
    }
    numbers = {name: partial(function, store, *more) for function, numbers in _TABLES for name, more in numbers.items()}
    numbers |= {name: partial(number, pretrained) for name, number in real_page.NUMBERS.items()}
    return fill_page(template, page, tables, texts(numbers))


# Tables of small models.


def against_table(store: Store) -> str:
    """Return a table that compares TOPR's default with other methods, on models with mostly wrong greedy answers."""
    rows = []
    for method in METHODS:
        if method != TOPR:
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
            cells.append(bold(found.percent(), found.low > best))
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
            cells[name] = bold(over_seeds(values).percent(), difference(values, topr).low > 0)
        columns.append(cells)
    if not columns:
        raise Unfinished("long_completions has not been run")
    names = [name for name in long_completions.NAMES if any(name in cells for cells in columns)]
    rows = [[name, *(cells.get(name, "") for cells in columns)] for name in names]
    untrained = _untrained_rows(store, tasks, shown == "greedy") if len(set(tasks)) > 1 else []
    return table(header, [*untrained, *rows])


def wrong_answers_table(store: Store) -> str:
    """Return a table by recipe and base model: the share of unsolved problems that are solved at the end.

    A value is bold if its difference from repeated right answers is above 0.
    """
    experiments = [one for one in wrong_answers.over_iterations() if one.is_finished(store)]
    if not experiments:
        raise Unfinished("wrong_answers has not been run")
    begins = [list(one.ends(store, wrong_answers.REPEATED).values()) for one in experiments]
    agreement, problems, unsolved, again = (
        [float(np.mean([value(result, f"curve/0/{path}") for result in results])) for results in begins]
        for path in ("agreement", "problems", "unsolved/problems", "unsolved/pass@8")
    )
    rows = [
        ["wrong answers agree, before training (%)", *map(percent, agreement)],
        ["unsolved problems", *(f"{some:.0f} of {total:.0f}" for some, total in zip(unsolved, problems, strict=True))],
        ["untrained, second draw", *map(percent, again)],
    ]
    for method in wrong_answers.RECIPES:
        cells = []
        for one in experiments:
            if method not in one.methods:
                cells.append("")
                continue
            found = one.measured(store, method)
            gap = difference(found, one.measured(store, wrong_answers.REPEATED))
            cells.append(bold(over_seeds(found).percent(), gap.low > 0))
        rows.append([method, *cells])
    heats = [f", T = {one.fields['temperature']:g}" if "temperature" in one.fields else "" for one in experiments]
    return table(["", *(one.fields["base"] + heat for one, heat in zip(experiments, heats, strict=True))], rows)


def one_pass_table(store: Store) -> str:
    """Return a table by method of one pass on SmolLM2, after a row for the untrained model.

    An accuracy is bold if its interval is above the untrained model at its best temperature. The last two measures have
    no interval, because their errors over problems are not stored.
    """
    experiment = wrong_answers.in_one_pass()
    if not experiment.is_finished(store):
        raise Unfinished("one pass on SmolLM2 has not been run")
    (untrained,) = wrong_answers.before(SMOL).ends(store, wrong_answers.UNTRAINED).values()
    rows = [["untrained", *(percent(value(untrained, shown)) for shown in experiment.shows)]]
    ways = ("test/greedy", "test/pass@1", f"test/pass@1 at {wrong_answers.COLD}")
    best = max(value(untrained, shown) for shown in ways)
    for method in experiment.methods:
        cells = []
        for shown in experiment.shows:
            found = over_seeds(experiment.measured(store, method, shown))
            text = found.percent() if shown in experiment.shows[:3] else percent(found.mean)
            cells.append(bold(text, shown in ways[:2] and found.low > best))
        rows.append([method, *cells])
    return table(["", *(shown.removeprefix("test/") for shown in experiment.shows)], rows)


def _one_pass(
    store: Store, first: str, second: str, sessions_at: float | None = None, outcomes: str = "greedy"
) -> Interval:
    """Return the difference between two methods on SmolLM2, paired by seed and problem.

    Args:
        store: results.
        first, second: methods.
        sessions_at: temperature of the answers, if they are ratios of sessions.
        outcomes: `"greedy"` answers, or `"right"` ones of eight samples.
    """
    one_pass = wrong_answers.of_sessions(sessions_at) if sessions_at else wrong_answers.in_one_pass()
    ends = [one_pass.ends(store, name) for name in (first, second)]
    if not all(len(end) == len(one_pass.seeds) for end in ends):
        raise Unfinished(f"{first} or {second} has not been run")
    right = [[[int(x) for x in end["test"]["outcomes"][outcomes]] for end in found.values()] for found in ends]
    samples = 1 if outcomes == "greedy" else wrong_answers.CANDIDATES
    return over_problems(np.subtract(*map(np.array, right)) / samples)


def turns_table(store: Store, experiment: Experiment) -> str:
    """Return a table by method of a comparison in `turns`, after a row for the base model.

    A value is bold if the interval of its difference from the first method excludes 0.
    """
    if not experiment.is_finished(store):
        raise Unfinished("turns has not been run")
    first, *_ = experiment.methods
    before = next(iter(experiment.ends(store, first).values()))["before"]
    rows = [["base model", *(percent(before[shown]) for shown in experiment.shows)]]
    for method in experiment.methods:
        cells = []
        for shown in experiment.shows:
            found = experiment.measured(store, method, shown)
            gap = difference(found, experiment.measured(store, first, shown))
            cells.append(bold(over_seeds(found).percent(), gap.low > 0 or gap.high < 0))
        rows.append([method, *cells])
    return table(["", *experiment.shows], rows)


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
    store: Store, settings: list[Setting], first: str = "segment", second: str = "sequence (TOPR)",
    second_updates: int = long_completions.MEASURED_AT[-1], shown: str = "pass@1",
) -> Interval | list[Interval]:  # fmt: skip
    """Return pass@1 of one ratio after all updates minus that of another one after some updates, for each setting."""
    gaps = []
    for setting in settings:
        measured = []
        for name, updates in ((first, long_completions.MEASURED_AT[-1]), (second, second_updates)):
            experiment = long_completions.of_setting(setting, updates)
            measured.append(experiment.measured(store, name, long_completions.measure(updates, shown)))
        if not all(measured):
            raise Unfinished(f"{first} or {second} has not been run")
        gaps.append(difference(*measured))
    return gaps if len(gaps) > 1 else gaps[0]


def _solved(store: Store, bases: Sequence[str], method: str, shown: str = wrong_answers.SOLVED, *heat: float) -> Any:
    """Return a method minus repeated right answers, by default in the share of unsolved problems that are solved.

    `heat` is the temperature of the rows of pretrained models, see `wrong_answers.of_base`.
    """
    experiments = [wrong_answers.of_base(base, *heat) for base in bases]
    gaps = [_gap(store, (one, method), (one, wrong_answers.REPEATED), shown) for one in experiments]
    return gaps if len(gaps) > 1 else gaps[0]


def _turns(store: Store, first: str, second: str, shown: str = turns.FINAL) -> Interval:
    """Return the difference between two methods in `turns`."""
    experiment = turns.rewarded() if first in turns.rewarded().methods else turns.rated()
    return _gap(store, (experiment, first), (experiment, second), shown)


def _rivals(store: Store, measure: str) -> list[Interval]:
    """Return TOPR's default minus each method of TRL, on each model with mostly wrong greedy answers."""
    return [gap for rival in _RIVALS for gap in _wrong_mode(store, TOPR, rival, measure)]


_RIVALS = ("DAPO (TRL's GRPO)", "DPO", "KTO")
_OF_SESSIONS = (wrong_answers.SEGMENTS, wrong_answers.GOOD)
_SMALL = (*wrong_answers.BASES, *wrong_answers.RULED)
_AGREEING, _SCATTERED = _SMALL[:3], _SMALL[3:4]
_LONG = [Setting(parts) for parts in (4, 16, 64)]  # at least 160 tokens
_MISTAKES, _NOISY = [long_completions.EARLY, long_completions.LATE], [long_completions.NOISY]


def _lost(store: Store, name: str) -> str:
    return f"{100 * float(np.mean([lost[name] for lost in trials.lost(store).values()])):.1f}"


# The numbers of each function of a store, with its further arguments.
_TABLES: list[tuple[Callable[..., Found], dict[str, tuple[Any, ...]]]] = [
    (_of_bases, {
        "once": (protocols.TOPR, protocols.REMOVED),
        "steps": (protocols.TOPR, protocols.STEPS, True),
        "repeated": (protocols.TOPR, protocols.REPEATED),
        "repeated_first": (protocols.REPEATED, protocols.TOPR),
        "half_the_steps": (protocols.HALF, protocols.TOPR),
        "balanced": (protocols.BALANCED, protocols.TOPR),
        "repeated_balanced": (protocols.REPEATED, protocols.BALANCED),
        "paper_baseline": (protocols.TOPR, "TOPR, c = 0"),
    }),
    (_wrong_mode, {
        "repeated_greedy": ("positives repeated", TOPR, GREEDY),
    }),
    (_rivals, {"rivals": ("pass@1",), "rivals_greedy": (GREEDY,)}),
    (_fig4, {"fig4": ("pass@1",), "fig4_vote": ("maj/32",)}),
    (_stale, {
        "stale_topr": (staleness.TOPR,), "stale_m2po": ("M2PO",), "stale_dapo": ("TRL's default (DAPO)",),
    }),
    (_percent, {"recomputed": (staleness.AT_TOPRS_RATE, staleness.RECOMPUTED)}),
    (_lower, {"lower_vote": ("p~ 50%", "maj/64"), "lower_pass": ("p~ 50%", "pass/1")}),
    (_long, {
        "anna_karenina": (0, "Anna Karenina", "c = 0", "pass/1"),
        "anna_karenina_2": (1, "Anna Karenina", "c = 0", "pass/1"),
    }),
    (_online_share, {"online_sure": ("sure-17",), "online_main": ("main",)}),
    (_online, {
        "online_hard": ("hard",),
        "online_hard_long": ("hard", online.LONG),
        "pass32_sure": ("sure-17", online.COMPLETIONS, online.PASS_32),
        "pass32_main": ("main", online.COMPLETIONS, online.PASS_32),
        "pass32_hard": ("hard", online.COMPLETIONS, online.PASS_32),
        "pass32_hard_long": ("hard", online.LONG, online.PASS_32),
    }),
    (_without_replay, {"without_replay": ()}),
    (_segments, {
        "segment": (_LONG,),
        "segment_repeated": (_LONG, "segment", "positives repeated"),
        "segment_repeated_greedy": (_LONG, "segment", "positives repeated", long_completions.MEASURED_AT[-1], "greedy"),
        "segment_repeated_main": (_NOISY, "segment", "positives repeated"),
        "segment_repeated_few": (long_completions.GOOD[:1], "segment", "positives repeated"),
        "sequence_repeated_few": (long_completions.GOOD[:1], "sequence (TOPR)", "positives repeated"),
        "segment_repeated_none": (long_completions.GOOD[1:], "segment", "positives repeated"),
        "segment_main": (_NOISY,),
        "segment_mistakes": (_MISTAKES,),
        "segment_stopped": (_LONG[:1], "segment", "sequence (TOPR)", long_completions.MEASURED_AT[0]),
        "sequence_positives": (_LONG[1:], "sequence (TOPR)", "positives only"),
        "segment_16": (_LONG, "segment of 16", "segment"),
        "segment_16_main": (_NOISY, "segment of 16", "segment"),
        "segment_16_mistakes": (_MISTAKES, "segment of 16"),
    }),
    (_solved, {
        "solved_default": (_AGREEING, wrong_answers.DEFAULT),
        "solved_default_scattered": (_SCATTERED, wrong_answers.DEFAULT),
        "solved_default_ruled": (_SMALL[4:], wrong_answers.DEFAULT),
        "solved_weighted_ruled": (_SMALL[4:], wrong_answers.WEIGHTED),
        "solved_weighted_warm": ((SMOL,), wrong_answers.WEIGHTED),
        "solved_weighted_warm_test": ((SMOL,), wrong_answers.WEIGHTED, "test/greedy"),
        "solved_weighted_cold": ((SMOL,), wrong_answers.WEIGHTED, wrong_answers.SOLVED, 1.0),
        "solved_weighted_cold_test": ((SMOL,), wrong_answers.WEIGHTED, "test/greedy", 1.0),
        "solved_weighted": (_AGREEING, wrong_answers.WEIGHTED),
        "solved_weighted_scattered": (_SCATTERED, wrong_answers.WEIGHTED),
        "iterated_sampled": (_SMALL, wrong_answers.DEFAULT, "end/pass@1"),
        "iterated_greedy": (_SMALL, wrong_answers.DEFAULT, "end/greedy"),
    }),
    (_one_pass, {
        "one_pass_primary": (wrong_answers.BALANCED, wrong_answers.KTO),
        "one_pass_repeated": (wrong_answers.BALANCED, wrong_answers.REPEATED),
        "one_pass_taper": (wrong_answers.UNTAPERED, wrong_answers.BALANCED),
        "one_pass_dpo": (wrong_answers.BALANCED, wrong_answers.DPO),
        "one_pass_grpo": (wrong_answers.BALANCED, wrong_answers.GRPO),
        "one_pass_default": (wrong_answers.REPEATED, wrong_answers.DEFAULT),
        "sessions": (*_OF_SESSIONS, wrong_answers.WARM),
        "sessions_sampled": (*_OF_SESSIONS, wrong_answers.WARM, "right"),
        "sessions_cold": (*_OF_SESSIONS, 1.0),
        "sessions_cold_sampled": (*_OF_SESSIONS, 1.0, "right"),
    }),
    (_turns, {
        "turns_primary": (turns.PER_TURN, turns.END),
        "turns_first": (turns.PER_TURN, turns.END, turns.FIRST),
        "turns_returns": (turns.PER_TURN, turns.RETURNS),
        "turns_repeated": (turns.PER_TURN, turns.REPEATED),
        "turns_rated": (turns.RATED_TURNS, turns.RATED_ROWS),
    }),
    (trials.recommended, {"trial_count": ()}),
    (_lost, {"trial_default": (trials.DEFAULT,), "trial_repeated": (trials.REPEATED,)}),
]  # fmt: skip
