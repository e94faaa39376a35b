"""Evaluations side by side: as tables for the terminal, as files and as a picture."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from topr_trl.evaluation.answers import Samples
from topr_trl.evaluation.bootstrap import Difference, compare
from topr_trl.evaluation.estimates import Evaluation, evaluate_in_full, shared_ks
from topr_trl.evaluation.plots import plot_evaluations
from topr_trl.rewards import INVALID

_CURVES = {"pass": "pass_at", "maj": "maj_at", "weighted_sc": "weighted_sc_at", "best": "best_at"}


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """A table with a column for each evaluation, see `comparison_rows`."""
    return "\n".join([*_table(list(evaluations), comparison_rows(evaluations)), *comparison_notes(evaluations)])


def comparison_rows(evaluations: Mapping[str, Evaluation]) -> list[tuple[str, list[str]]]:
    """Measures and shares with a cell for each evaluation; intervals are the paper's ±2 standard errors, in points.

    There are the k that all of them have.
    """
    runs = list(evaluations.values())
    rows = []
    for measure, curve in _CURVES.items():
        curves = [getattr(run, curve) for run in runs]
        rows += [(f"{measure}@{k}", [str(other[k]) for other in curves]) for k in shared_ks(curves)]
    return rows + [(share, [f"{100 * run.shares[share]:.1f} %" for run in runs]) for share in runs[0].shares]


def comparison_notes(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """What is to be said below the table: of how many samples it is, and what is strange."""
    runs = list(evaluations.values())
    sizes = sorted({run.num_samples for run in runs})
    samples = f"{sizes[0]} samples" if len(sizes) == 1 else f"{' or '.join(map(str, sizes))} samples"
    return [f"({runs[0].num_problems} problems, {samples} each; ± is two standard errors)"] + [
        f"{name}: no sample has an answer. Is it the right --task, and do prompts ask for its form of answers?"
        for name, run in evaluations.items()
        if run.shares[INVALID] == 1
    ]


def groups_table(evaluation: Evaluation) -> str:
    """Problems, pass@1 and maj@k by subject and by level, as far as known; else an empty text."""
    parts = []
    for column, groups in evaluation.groups.items():
        ks = list(next(iter(groups.values())).maj_at)
        names = ["problems", "pass@1", *(f"maj@{k}" for k in ks)]
        rows = [
            (name, [str(group.num_problems), str(group.pass_at_1), *(str(group.maj_at[k]) for k in ks)])
            for name, group in groups.items()
        ]
        parts.append("\n".join(_table(names, rows, column)))
    return "\n\n".join(parts)


def differences_table(names: tuple[str, str], differences: Mapping[str, Difference]) -> str:
    """Differences of two runs in points, with their 95 % intervals."""
    columns = ["difference", "95 % interval", "draws with a gain"]
    rows = [
        (
            measure,
            [
                f"{100 * found.difference:+.1f}",
                f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
                f"{100 * found.share_better:.1f} %",
            ],
        )
        for measure, found in differences.items()
    ]
    note = f"({names[1]} minus {names[0]}, in points; paired bootstrap over the problems)"
    return "\n".join([*_table(columns, rows), note])


def _table(names: list[str], rows: list[tuple[str, list[str]]], corner: str = "") -> list[str]:
    first = max(len(label) for label in (corner, *(label for label, _ in rows))) + 2
    width = max(12, *(len(name) for name in names), *(len(cell) for _, cells in rows for cell in cells)) + 2
    header = f"{corner:<{first}}" + "".join(f"{name:>{width}}" for name in names)
    body = [f"{label:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows]
    return [header, "─" * len(header), *body]


def write_report(folder: Path, runs: Mapping[str, Samples], seed: int = 0) -> str:
    """Evaluate one run, or two side by side, and write down what is found.

    Files: `evaluation.json`, of the first run; with a second one `comparison.json`, of both and of their differences; a
    picture `evaluation.png` or `comparison.png`, if matplotlib is installed.

    Args:
        folder: to write to.
        runs: by name; one or two.
        seed: of the draws.

    Returns:
        The tables for the terminal.

    Raises:
        ValueError: two runs have not the same problems, see `topr_trl.evaluation.bootstrap.compare`.
    """
    names = list(runs)
    differences = compare(runs[names[0]], runs[names[1]], seed) if len(runs) == 2 else None
    evaluations = {name: evaluate_in_full(samples, seed) for name, samples in runs.items()}
    plain = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    _write_json(folder / "evaluation.json", plain[names[0]])
    parts = [comparison_table(evaluations)]
    if differences is None:
        parts += [groups_table(evaluations[names[0]])]
    else:
        found = {measure: difference.to_dict() for measure, difference in differences.items()}
        _write_json(folder / "comparison.json", {"runs": plain, "differences": found})
        parts += [differences_table((names[0], names[1]), differences)]
    if find_spec("matplotlib"):
        plot_evaluations(
            evaluations, folder / ("evaluation.png" if differences is None else "comparison.png"), differences
        )
    else:
        parts += ["No picture: matplotlib is not installed (the extra `plots`)."]
    return "\n\n".join(filter(None, parts))


def read_evaluation(path: Path) -> Evaluation:
    """What `topr evaluate` wrote to a file `evaluation.json`.

    Raises:
        ValueError: it is damaged, or something else.
    """
    try:
        return Evaluation.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no evaluation that topr evaluate wrote, or is damaged: {error!r}.") from error


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
