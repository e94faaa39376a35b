"""Name the folders in a run of `topr iterate`.

run/
    imported/            rows, if --rows is a file from another system
    base/                the starting model
        test/rollouts/       rows of the test problems
        test/results/        evaluation.json, evaluation.txt, plots
    iteration-1/
        rollouts/        rows to train on
        model/           weights after training
        test/            test of this model, as in base/
    iteration-2/ ...
"""

from pathlib import Path

IMPORTED = "imported"  # Other commands that import rows use this subfolder of their output folder, too.
MODEL, ROLLOUTS, TEST = "model", "rollouts", "test"
_BASE, _ITERATION, _RESULTS = "base", "iteration-", "results"


def iteration_folder(run: Path, number: int) -> Path:
    """Return the folder of an iteration. Iteration 0 is the starting model."""
    return run / (f"{_ITERATION}{number}" if number else _BASE)


def iteration_folders(run: Path) -> list[Path]:
    """Return the folders of all iterations that have started, in order, without the starting model."""
    found = [path for path in run.glob(f"{_ITERATION}*") if path.name.removeprefix(_ITERATION).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_ITERATION)))


def test_folder(iteration: Path) -> Path:
    """Return the folder of an iteration's test."""
    return iteration / TEST


def results_folder(iteration: Path) -> Path:
    """Return the folder with the test results of an iteration."""
    return test_folder(iteration) / _RESULTS


def check_own(run: Path) -> None:
    """Raise a ValueError if a folder has files, and no loop has written to the folder.

    Imported rows and hidden files, such as locks and `.DS_Store`, are allowed.
    """
    others = [path for path in sorted(run.glob("*")) if path.name != IMPORTED and not path.name.startswith(".")]
    has_begun = test_folder(iteration_folder(run, 0)).is_dir() or iteration_folder(run, 1).is_dir()
    if others and not has_begun:
        raise ValueError(f"{run} has {others[0].name}, which topr did not write. Use an empty folder.")
