"""Where a run of `topr iterate` has its files.

run/
    base/                the model that the loop starts with
        test/rollouts/       rows of the test problems
        test/results/        evaluation.json, evaluation.txt, pictures
    iteration-1/
        rollouts/        rows that are trained on
        model/           weights after training on them
        test/            as above, of this model
    iteration-2/ ...
"""

from pathlib import Path

from topr_trl.pipeline.locks import LOCK

MODEL, ROLLOUTS = "model", "rollouts"
_BASE, _ITERATION, _TEST, _RESULTS = "base", "iteration-", "test", "results"


def iteration_folder(run: Path, number: int) -> Path:
    """The folder of an iteration; that of the model that the loop starts with for 0."""
    return run / (f"{_ITERATION}{number}" if number else _BASE)


def iteration_folders(run: Path) -> list[Path]:
    """Return the folders of iterations that have begun, in order, from the first on."""
    found = [path for path in run.glob(f"{_ITERATION}*") if path.name.removeprefix(_ITERATION).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_ITERATION)))


def test_folder(iteration: Path) -> Path:
    """Return the folder of an iteration's test."""
    return iteration / _TEST


def results_folder(iteration: Path) -> Path:
    """The results of the test of an iteration."""
    return test_folder(iteration) / _RESULTS


def begun(run: Path) -> bool:
    """Whether a loop has made anything in a folder."""
    return test_folder(iteration_folder(run, 0)).is_dir() or iteration_folder(run, 1).is_dir()


def check_own(run: Path) -> None:
    """Raise a ValueError for a folder with files that no loop has written."""
    others = [path for path in sorted(run.glob("*")) if not path.name.startswith(LOCK)]
    if others and not begun(run):
        raise ValueError(f"{run} has {others[0].name}, which topr did not write. Name an empty folder.")
