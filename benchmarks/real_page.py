"""Tables, numbers and comparisons of the pretrained model, for docs/results.md and real_model.md."""

from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import real_model
from benchmarks.cells import Store, Unfinished
from benchmarks.experiment import TUNING_SEED
from benchmarks.experiments.controls import TOPR
from benchmarks.report import Found, bold, fill_page, marked, percent, table
from benchmarks.setting import HERE
from benchmarks.statistics import Interval, interval, over_problems

PAGE = HERE / "real_model.md"
REAL = "qwen2.5-coder-0.5b"
IN_PROGRESS = "A run of a 0.5B model on GSM8K is in progress; expectations: `benchmarks/real_model.md`."
_STRATA = {"0 of 8": (0, 0), "1 or 2 of 8": (1, 2), "3 or more of 8": (3, 8)}  # correct answers of the untrained model


def write(page: Path, real: Store | None = None) -> Path:
    """Write the page of the pretrained model with further tables.

    Args:
        page: page to write.
        real: results on a pretrained model. Default: the published results.
    """
    store = real or real_model.open_store(HERE / "results")
    tables: dict[str, Callable[[], str]] = {
        "strata": lambda: strata(store),
        "rates": lambda: rates(store),
        "greedy": lambda: greedy_strata(store),
    }
    return fill_page(PAGE, page, tables, {})


def section(store: Store) -> str:
    """Return the tables of the pretrained model that have results, or one sentence if there are none."""
    found = []
    for lead, made in (
        ("In percent. Bold: the interval is above the untrained model at its best "
         "temperature.", main_table),
        ("TOPR's default minus each method, in points, paired by seed and problem:", differences),
    ):  # fmt: skip
        try:
            found += [lead, made(store)]
        except Unfinished:
            continue
    return "\n\n".join(found) or IN_PROGRESS


def main_table(store: Store) -> str:
    """Return a table of the pretrained model's accuracy, untrained and by method.

    A value is bold if its interval is above the untrained model's at each temperature. In greedy answers and pass@1,
    this is the better of the two.
    """
    untrained = _untrained(store)
    measures = ("greedy", "pass@1", "maj@4", "pass@4", "invalid")
    best = {name: max(found.get(name, 0.0) for found in untrained.values()) for name in measures}
    best["greedy"] = best["pass@1"] = max(best["greedy"], best["pass@1"])
    rows = [
        [f"untrained, T = {at}", *(percent(found[name]) if name in found else "" for name in measures), ""]
        for at, found in untrained.items()
    ]
    try:
        methods = _ends(store)
    except Unfinished:
        methods = {}
    for method, ends in methods.items():
        shown = []
        for name in measures:
            if name in ("greedy", "pass@1", "pass@4"):
                found = over_problems([_by_problem(one, name) for one in ends.values()])
                shown.append(bold(found.percent(), found.low > best[name]))
            else:
                shown.append(interval([one[name] for one in ends.values()]).percent())
        rows.append([method, *shown, str(len(ends))])
    return table(["", *measures, "runs"], rows)


def differences(store: Store) -> str:
    """Return a table of TOPR's default minus each other method on the pretrained model, paired by seed and problem."""
    rows, ends = [], _ends(store)
    for method, others in ends.items():
        if method == TOPR:
            continue
        gaps = [marked(_difference(ends[TOPR], others, name)) for name in ("greedy", "pass@1")]
        rows.append([method, *gaps])
    return table(["TOPR (default) minus", "greedy", "pass@1"], rows)


def greedy_strata(store: Store) -> str:
    """Return a table of changes in greedy accuracy by the untrained model's answers, in points of all problems."""
    untrained, ends = _untrained(store)["1"], _ends(store)
    greedy, right = (np.array(_by_problem(untrained, "greedy")), np.array(untrained["right_by_problem"]))
    parts = {"right": greedy > 0}
    parts |= {
        f"wrong, {name} samples right": (greedy == 0) & (right >= low) & (right <= high)
        for name, (low, high) in _STRATA.items()
    }
    rows = []
    for name, part in parts.items():
        changes = [np.mean([_by_problem(one, "greedy") for one in of.values()], 0) - greedy for of in ends.values()]
        shown = (f"{100 * float(change[part].sum()) / len(greedy):+.1f}" for change in changes)
        rows.append([f"greedy answer {name}", str(part.sum()), *shown])
    return table(["before training", "problems", *ends], rows)


def strata(store: Store) -> str:
    """Return a table of pass@1 by the number of correct answers among the untrained model's eight samples."""
    right = np.array(_untrained(store)["1"]["right_by_problem"])
    parts = {name: (right >= low) & (right <= high) for name, (low, high) in _STRATA.items()}
    rows = [["untrained", *(percent(float(right[part].mean()) / 8) for part in parts.values())]]
    for method, ends in _ends(store).items():
        values = np.array([_by_problem(one, "pass@1") for one in ends.values()])
        rows.append([method, *(over_problems(values[:, part].tolist()).percent() for part in parts.values())])
    columns = [f"{name} (problems: {part.sum()})" for name, part in parts.items()]
    return table(["", *columns], rows)


def rates(store: Store) -> str:
    """Return a table of greedy accuracy and pass@1 of the runs that choose a learning rate, by method and rate."""
    experiment, found = real_model.experiment(REAL), {}
    for cell, result in store.results(experiment.cells(store)):
        if cell["seed"] == TUNING_SEED:
            found[cell["method"], cell["learning_rate"]] = f"{percent(result['greedy'])}, {percent(result['pass@1'])}"
    if not found:
        raise Unfinished("no rates have been tried")
    tried = sorted({rate for _, rate in found})
    rows = []
    for method in dict.fromkeys(method for method, _ in found):
        best = (experiment.best(store, method) or {}).get("learning_rate")
        rows.append([method, *(bold(found.get((method, rate), ""), rate == best) for rate in tried)])
    return table(["", *(f"{rate:g}" for rate in tried)], rows)


def _untrained(store: Store) -> dict[str, dict[str, Any]]:
    """Return the results of the untrained pretrained model by temperature."""
    found = store.get(real_model.untrained_cell(REAL))
    if found is None:
        raise Unfinished(f"{REAL} has not been measured before training")
    return found


def _ends(store: Store) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the results by seed of each method with enough results.

    Raises:
        Unfinished: TOPR's default lacks results.
    """
    experiment = real_model.experiment(REAL)
    ends = {method: experiment.ends(store, method, real_model.SCORE) for method in experiment.methods}
    enough = {method: found for method, found in ends.items() if len(found) >= real_model.FIRST}
    if TOPR not in enough:
        raise Unfinished(f"{TOPR} has not been run")
    return enough


def _gain(store: Store, method: str, measure: str, at: str) -> Interval:
    """Return a method's gain over the untrained model at a temperature."""
    before = np.array(_by_problem(_untrained(store)[at], measure))
    ends = _ends(store).get(method, {})
    if not ends:
        raise Unfinished(f"{method} has not been run")
    return over_problems([np.subtract(_by_problem(one, measure), before).tolist() for one in ends.values()])


def _votes(store: Store) -> list[Interval]:
    """Return each method's gain in maj@4 (over seeds) and pass@4 over the untrained model at temperature 0.3."""
    before = _untrained(store)["0.3"]
    found = []
    for method, ends in _ends(store).items():
        votes = interval([one["maj@4"] - before["maj@4"] for one in ends.values()])
        found += [votes, _gain(store, method, "pass@4", "0.3")]
    return found


def _ahead(store: Store, first: str, second: str, measure: str) -> Interval:
    """Return the first method's accuracy minus the second's."""
    ends = _ends(store)
    if not {first, second} <= set(ends):
        raise Unfinished(f"{first} or {second} has not been run")
    return _difference(ends[first], ends[second], measure)


def _difference(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]], measure: str) -> Interval:
    """Return `first - second` of results by seed, paired by seed and problem."""
    pairs = [(first[seed], second[seed]) for seed in first.keys() & second.keys()]
    return over_problems([np.subtract(*(_by_problem(one, measure) for one in pair)).tolist() for pair in pairs])


BALANCED, REPEATED = "TOPR, balanced rows, 50%", "positives repeated"
NUMBERS: dict[str, Callable[[Store], Found]] = {
    "real_balanced": lambda store: _gain(store, BALANCED, "greedy", "1"),
    "real_repeated": lambda store: _gain(store, REPEATED, "greedy", "1"),
    "real_gap": lambda store: _ahead(store, BALANCED, REPEATED, "greedy"),
    "real_default": lambda store: _ahead(store, BALANCED, TOPR, "greedy"),
    "real_once": lambda store: _ahead(store, BALANCED, "positives once", "greedy"),
    "real_sampled_default": lambda store: _ahead(store, REPEATED, TOPR, "pass@1"),
    "real_sampled": lambda store: _gain(store, REPEATED, "pass@1", "1"),
    "real_sharpened": lambda store: _gain(store, REPEATED, "pass@1", "0.3"),
    "real_votes": _votes,
}


def _by_problem(result: dict[str, Any], measure: str) -> list[float]:
    """Return the accuracy on each test problem."""
    if measure == "greedy":
        return [float(count) for count in result["greedy_by_problem"]]
    samples, k = result["samples"], int(measure.removeprefix("pass@"))
    return [1 - comb(samples - right, k) / comb(samples, k) for right in result["right_by_problem"]]
