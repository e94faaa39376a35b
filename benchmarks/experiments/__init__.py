"""Experiments: methods, learning rates, seeds, and functions that run a cell.

A module has `experiments(store)` or `cells(profile, store)`, and `work(cell, profile)`, which runs a cell. A module
with cells for the quick profile lists them in `QUICK`. An experiment may need results of the experiments before it.
"""

from types import ModuleType
from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.experiment import Experiment, once
from benchmarks.experiments import (
    against_positives,
    controls,
    long_completions,
    long_responses,
    long_run,
    online,
    protocols,
    rivals,
    staleness,
    temperatures,
    trials,
    turns,
    wrong_answers,
)
from benchmarks.setting import Profile

ALL: dict[str, ModuleType] = {
    "temperatures": temperatures,
    "controls": controls,
    "rivals": rivals,
    "protocols": protocols,
    "against_positives": against_positives,
    "staleness": staleness,
    "online": online,
    "long_run": long_run,
    "long_responses": long_responses,
    "long_completions": long_completions,
    "trials": trials,
    "wrong_answers": wrong_answers,
    "turns": turns,
}


# Modules of cells whose claim is not the name of an experiment.
_CLAIMS = {"arms": protocols, "learning_rates": against_positives}


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell of any experiment."""
    found: dict[str, Any] = {**ALL, **_CLAIMS}[cell["claim"]].work(cell, profile)
    return found


def planned(name: str, profile: Profile, store: Store) -> list[Cell]:
    """Return the cells of an experiment that can be planned now.

    Raises:
        Unfinished: results of a different experiment are missing.
    """
    module = ALL[name]
    if profile.is_quick:
        return list(getattr(module, "QUICK", ()))
    if hasattr(module, "cells"):
        return list(module.cells(profile, store))
    found: list[Cell] = []
    for experiment in module.experiments(store):
        found += experiment.cells(store)
        if getattr(module, "IN_STAGES", False) and store.unfinished(found):
            break
    return once(found)


def compared(name: str, store: Store) -> list[Experiment]:
    """Return the comparisons of methods in an experiment."""
    module = ALL[name]
    return list(module.experiments(store)) if hasattr(module, "experiments") else []
