"""Evaluations side by side: as tables, files, pictures, and a section of a model card."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tabulate import tabulate

from topr_trl.evaluation.answers import Samples
from topr_trl.evaluation.bootstrap import Difference, compare
from topr_trl.evaluation.estimates import Evaluation, evaluate_in_full, shared_ks
from topr_trl.evaluation.plots import COLORS, plot_evaluations, plot_progress
from topr_trl.rewards import INVALID

_CURVES = {"pass": "pass_at", "maj": "maj_at", "weighted_sc": "weighted_sc_at", "best": "best_at"}
EVALUATION = "evaluation.json"
PICTURE = "evaluation.png"  # of the card of a model


class Evaluations(dict[str, Evaluation]):
    """Evaluations side by side, by name: `Evaluations(before=..., after=...)`.

    `print` shows them as a table; the card of a model takes them as a section (`topr_trl.model_card`).
    """

    def __str__(self) -> str:
        return "\n".join([plain_table(["", *self], self._rows()), *self._notes()]) if self else "No evaluations."

    def _rows(self) -> list[list[str]]:
        """Return a label and one cell per evaluation for each measure, at the k that all have, and for each share.

        Greedy accuracy comes first, if an evaluation has it.
        """
        runs, rows = list(self.values()), []
        if any(run.greedy for run in runs):
            rows += [["greedy (T=0)", *(str(run.greedy or "") for run in runs)]]
        for measure, curve in _CURVES.items():
            curves = [getattr(run, curve) for run in runs]
            rows += [[f"{measure}@{k}", *(str(other[k]) for other in curves)] for k in shared_ks(curves)]
        return rows + [[share, *(f"{100 * run.shares[share]:.1f}%" for run in runs)] for share in runs[0].shares]

    def _notes(self) -> list[str]:
        """Return the lines below the table: how answers were drawn, and what looks wrong."""
        runs = list(self.values())
        counts = ({run.num_problems for run in runs}, {run.num_samples for run in runs})
        problems, samples = (" or ".join(map(str, sorted(count))) for count in counts)
        at = {name: _at(run.temperatures) for name, run in self.items()}
        same = len(set(at.values())) == 1
        notes = [f"({problems} problems, {samples} samples each{at[next(iter(at))] * same}; ± is two standard errors)"]
        if not same:
            notes += [f"{name}: sampled{how or ' at an unknown temperature'}." for name, how in at.items()]
        if any(run.greedy for run in runs):
            notes += ["(greedy: one answer per problem; its ± is over the problems, the others' over the samples)"]
        return notes + [
            f"{name}: no sample has an answer. Is it the right --task, and do prompts ask for its form of answers "
            "(--num_shots)?"
            for name, run in self.items()
            if run.shares[INVALID] == 1
        ]

    def plot(self, path: str | Path | IO[bytes]) -> None:
        """Draw accuracy and kinds of answers from one evaluation to the next, see `plot_progress`."""
        plot_progress(self, path)

    def write_card_section(self, folder: Path, tested_on: str | None = None) -> str:
        """The section of a model card, in Markdown; the picture `evaluation.png` is written if matplotlib is installed.

        Args:
            folder: of the card, for the picture.
            tested_on: the problems, and how completions were drawn.
        """
        parts = ["## Evaluation"]
        parts += [f"Tested on {tested_on}."] if tested_on else []
        table = tabulate(self._rows(), ["measure", *self], "github", disable_numparse=True, stralign=None)
        parts += [table, "\n".join(self._notes())]
        if find_spec("matplotlib"):
            draw = plot_evaluations if len(self) <= len(COLORS) else plot_progress
            draw(self, folder / PICTURE)
            parts += [f"![{' and '.join(self)}]({PICTURE})"]
        return "\n\n".join(parts) + "\n"


def _at(temperatures: Sequence[float]) -> str:
    """Return the temperatures in words, with a space before; an empty text if they are unknown."""
    return f" at T={' and '.join(f'{value:g}' for value in temperatures)}" if temperatures else ""


def groups_table(evaluation: Evaluation) -> str:
    """Problems, pass@1 and maj@k by subject and by level, where known; else an empty text."""
    parts = []
    for column, groups in evaluation.groups.items():
        ks = list(next(iter(groups.values())).maj_at)
        rows = [
            [name, group.num_problems, group.pass_at_1, *(group.maj_at[k] for k in ks)]
            for name, group in groups.items()
        ]
        parts.append(plain_table([column, "problems", "pass@1", *(f"maj@{k}" for k in ks)], rows))
    return "\n\n".join(parts)


def differences_table(names: tuple[str, str], differences: Mapping[str, Difference]) -> str:
    """Differences of two runs in points, with their 95% intervals."""
    rows = [
        [
            measure,
            f"{100 * found.difference:+.1f}",
            f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
            f"{100 * found.share_better:.1f}%",
        ]
        for measure, found in differences.items()
    ]
    note = f"({names[1]} minus {names[0]}, in points; paired bootstrap over the problems)"
    return "\n".join([plain_table(["", "difference", "95% interval", "draws with a gain"], rows), note])


def plain_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for the terminal: the first column on the left, the others on the right, as they are."""
    align = ("left", *["right"] * (len(header) - 1))
    return tabulate(rows, header, disable_numparse=True, colalign=align)


def write_report(folder: Path, runs: Mapping[str, Samples], seed: int = 0) -> str:
    """Evaluate one run, or two side by side, write the results to a folder, and return the tables for the terminal.

    Files: `evaluation.json` of the first run; for two runs `comparison.json` with both and their differences; the
    picture `evaluation.png` or `comparison.png`, if matplotlib is installed.

    Raises:
        ValueError: the two runs differ in their problems, see `topr_trl.evaluation.bootstrap.compare`.
    """
    names = list(runs)
    differences = compare(runs[names[0]], runs[names[1]], seed) if len(runs) == 2 else None
    evaluations = Evaluations({name: evaluate_in_full(samples, seed) for name, samples in runs.items()})
    plain = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    (folder / EVALUATION).write_text(json.dumps(plain[names[0]], indent=1))
    parts = [str(evaluations)]
    if differences is None:
        parts += [groups_table(evaluations[names[0]])]
    else:
        found = {measure: difference.to_dict() for measure, difference in differences.items()}
        both = {"runs": plain, "differences": found}
        (folder / "comparison.json").write_text(json.dumps(both, indent=1))
        parts += [differences_table((names[0], names[1]), differences)]
    if find_spec("matplotlib"):
        plot_evaluations(evaluations, folder / (PICTURE if differences is None else "comparison.png"), differences)
    else:
        parts += ["No picture: matplotlib is not installed (the extra `plots`)."]
    return "\n\n".join(filter(None, parts))


def read_evaluation(path: Path) -> Evaluation:
    """Read a file `evaluation.json` of `topr evaluate`; a ValueError if it is damaged, or not such a file."""
    try:
        return Evaluation.from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or was not written by topr evaluate: {error!r}.") from error
