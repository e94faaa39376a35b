"""Fill the tables of the page *Results*, whose text is written by hand.

Replace the text between `<!-- table NAME -->` and `<!-- end -->` with a table of the results.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import real_model
from benchmarks.cells import Store, Unfinished
from benchmarks.claims import controls, temperatures
from benchmarks.claims.controls import BASES, METHODS, SEEDS
from benchmarks.decoded import GREEDY
from benchmarks.setting import HERE, Profile
from benchmarks.statistics import Interval, Measured, difference, interval, over_problems, over_seeds
from benchmarks.verdicts import markdown_table

_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TOPR = "TOPR (default)"
_NOT_YET = "Not measured yet."


def write(store: Store, profile: Profile, template: Path, page: Path, real: Store | None = None) -> None:
    """Write a page: the text of the template, with the tables that these results give.

    Args:
        store: results on small models.
        profile: sizes of these results.
        template: page with the text.
        page: page to write.
        real: results on a pretrained model; by default the published ones.
    """
    pretrained = real or real_model.open_store(HERE / "results")
    tables: dict[str, Callable[[Store, Profile], str]] = {
        "temperatures": temperatures_table,
        "greedy": lambda store, profile: controls_table(store, GREEDY),
        "sampled": lambda store, profile: controls_table(store, "pass@1"),
        "vote": lambda store, profile: controls_table(store, "maj@8"),
        "differences": differences_table,
        "run": what_was_run,
        "real": lambda *_: real_table(pretrained),
        "real_differences": lambda *_: real_differences(pretrained),
        "real_strata": lambda *_: real_strata(pretrained),
    }

    def filled(block: re.Match[str]) -> str:
        try:
            table = tables[block[2]](store, profile)
        except Unfinished:
            table = _NOT_YET
        return f"{block[1]}\n{table}\n\n{block[3]}"

    page.write_text(_BLOCK.sub(filled, template.read_text(encoding="utf-8")), encoding="utf-8")


def temperatures_table(store: Store, profile: Profile) -> str:
    """Return a table of each base model's accuracy before training, by temperature."""
    rows = []
    for base in temperatures.BASES:
        found = store.get(temperatures.cell(base))
        if found is None:
            continue
        values = temperatures.by_temperature(store, base)
        best = max(value for value, _ in values.values())
        shown = [f"**{_percent(value)}**" if value == best else _percent(value) for value, _ in values.values()]
        kind = "wrong mode" if temperatures.is_wrong_in_its_mode(store, base) else "noise around a right mode"
        rows.append([base, kind, *shown, _percent(found["1"][f"maj@{temperatures.K}"])])
    if not rows:
        raise Unfinished("no base model has been measured")
    columns = ["base model", "kind", "greedy", *(f"T = {t:g}" for t in temperatures.SAMPLES), f"maj@{temperatures.K}"]
    return markdown_table(columns, rows)


def controls_table(store: Store, measure: str) -> str:
    """Return a table of a measure after training, by method and base model.

    A value is bold where it is above what the base model reaches at any temperature, or for a vote by a vote. maj@8 is
    at the learning rate that is best for pass@1.
    """
    bases = _finished(store)
    untrained = [_best_untrained(store, base, measure) for base in bases]
    rows = [["base model at its best", *(f"{_percent(best)} ({how})" for best, how in untrained)]]
    for method in METHODS:
        cells = []
        for base, (best, _) in zip(bases, untrained, strict=True):
            found = over_seeds(_ends(store, base, method, measure))
            cells.append(f"**{found.percent()}**" if found.low > best else found.percent())
        rows.append([method, *cells])
    return markdown_table(["", *bases], rows)


def differences_table(store: Store, profile: Profile) -> str:
    """Return a table of TOPR's default minus each other method, paired by seed: greedy, and sampled."""
    bases, rows = _finished(store), []
    for method in METHODS:
        if method == _TOPR:
            continue
        for measure in controls.MEASURES:
            gaps = [difference(*(_ends(store, base, one, measure) for one in (_TOPR, method))) for base in bases]
            rows.append([method, measure, *(_marked(gap) for gap in gaps)])
    return markdown_table(["TOPR (default) minus", "", *bases], rows)


def what_was_run(store: Store, profile: Profile) -> str:
    """Return the number of cells, their time, machine and versions."""
    planned = [temperatures.cell(base) for base in temperatures.BASES]
    entries = store.entries(planned) + store.entries(controls.cells(profile, store))
    if not entries:
        raise Unfinished("nothing has been run")
    hours = sum(entry["seconds"] for entry in entries) / 3600
    machines = sorted({entry["machine"] for entry in entries})
    versions = {name: sorted({entry["versions"][name] for entry in entries}) for name in entries[0]["versions"]}
    listed = ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())
    return f"{len(entries)} cells, {hours:.1f} hours of one core ({'; '.join(machines)}); {listed}."


# A pretrained model.

REAL = "qwen2.5-coder-0.5b"
_STRATA = {"0 of 8": (0, 0), "1 or 2 of 8": (1, 2), "3 or more of 8": (3, 8)}  # right answers of the untrained model


def real_table(store: Store) -> str:
    """Return a table of the pretrained model's accuracy, untrained and by method.

    A value is bold where it is above what the untrained model reaches at any temperature.
    """
    untrained = _untrained(store)
    measures = ("greedy", "pass@1", "maj@4", "pass@4", "invalid")
    best = max(untrained["1"]["greedy"], *(found["pass@1"] for found in untrained.values()))
    rows = [
        [f"untrained, T = {at}", *(_percent(found[name]) if name in found else "" for name in measures)]
        for at, found in untrained.items()
    ]
    for method, ends in _real_ends(store).items():
        shown = []
        for name in measures:
            if name in ("greedy", "pass@1"):
                found = over_problems([_by_problem(one, name) for one in ends.values()])
                shown.append(f"**{found.percent()}**" if found.low > best else found.percent())
            else:
                shown.append(interval([one[name] for one in ends.values()]).percent())
        rows.append([method, *shown])
    return markdown_table(["", *measures], rows)


def real_differences(store: Store) -> str:
    """Return a table of TOPR's default minus each other method on the pretrained model, paired by seed and problem."""
    rows, ends = [], _real_ends(store)
    if _TOPR not in ends:
        raise Unfinished(f"{_TOPR} has not been run")
    for method, others in ends.items():
        if method == _TOPR:
            continue
        gaps = []
        for name in ("greedy", "pass@1"):
            pairs = [(_by_problem(ends[_TOPR][seed], name), _by_problem(others[seed], name)) for seed in others]
            gaps.append(_marked(over_problems([np.subtract(*pair).tolist() for pair in pairs])))
        rows.append([method, *gaps])
    return markdown_table(["TOPR (default) minus", "greedy", "pass@1"], rows)


def real_strata(store: Store) -> str:
    """Return a table of pass@1 by how many of eight answers of the untrained model are right."""
    right = np.array(_untrained(store)["1"]["right_by_problem"])
    parts = {name: (right >= low) & (right <= high) for name, (low, high) in _STRATA.items()}
    rows = [["untrained", *(_percent(float(right[part].mean()) / 8) for part in parts.values())]]
    for method, ends in _real_ends(store).items():
        values = np.array([_by_problem(one, "pass@1") for one in ends.values()])
        rows.append([method, *(over_problems(values[:, part].tolist()).percent() for part in parts.values())])
    columns = [f"{name} (problems: {part.sum()})" for name, part in parts.items()]
    return markdown_table(["", *columns], rows)


def _untrained(store: Store) -> dict[str, dict[str, Any]]:
    """Return the results of the untrained pretrained model by temperature."""
    found = store.get(real_model.untrained_cell(REAL))
    if found is None:
        raise Unfinished(f"{REAL} has not been measured before training")
    return found


def _real_ends(store: Store) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the results by seed of each method that has all of them."""
    experiment = real_model.experiment(REAL)
    ends = {method: experiment.ends(store, method, real_model.SCORE) for method in experiment.methods}
    return {method: found for method, found in ends.items() if len(found) == len(experiment.seeds)}


def _by_problem(result: dict[str, Any], measure: str) -> list[float]:
    """Return the accuracy on each test problem."""
    if measure == "greedy":
        return [float(count) for count in result["greedy_by_problem"]]
    return [count / result["samples"] for count in result["right_by_problem"]]


def _finished(store: Store) -> list[str]:
    """Return the base models on which all methods have been measured."""
    every = [(base, method, measure) for base in BASES for method in METHODS for measure in controls.MEASURES]
    lacking = {base for base, method, measure in every if len(_ends(store, base, method, measure)) < SEEDS}
    finished = [base for base in BASES if base not in lacking]
    if not finished:
        raise Unfinished("no base model has been trained by all methods")
    return finished


def _ends(store: Store, base: str, method: str, measure: str) -> Measured:
    tuned_for = measure if measure in controls.MEASURES else "pass@1"
    return controls.measured(store, base, method, measure, tuned_for)


def _best_untrained(store: Store, base: str, measure: str) -> tuple[float, str]:
    """Return the base model's best accuracy without training, and how it is reached."""
    found = {f"T = {at:g}": value for at, (value, _) in temperatures.by_temperature(store, base).items()}
    if measure.startswith("maj"):
        vote = f"maj@{temperatures.K}"
        found[vote] = store.results([temperatures.cell(base)])[0][1]["1"][vote]
    how = max(found, key=lambda name: found[name])
    return found[how], how


def _marked(gap: Interval) -> str:
    """Return a difference in points; bold if its interval leaves out 0."""
    text = gap.percent(signed=True)
    return f"**{text}**" if gap.low > 0 or gap.high < 0 else text


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
