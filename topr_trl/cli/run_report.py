"""Run `topr plot`, which writes one HTML page with the curves, rows and evaluations of a run."""

import io
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr_trl.cli import html as page
from topr_trl.cli.run_report_curves import PANELS, draw_panel, has_metric, last_step
from topr_trl.evaluation.report import EVALUATION, Evaluations, read_evaluation
from topr_trl.pipeline import manifest
from topr_trl.pipeline import run_folders as layout
from topr_trl.trainers.checkpoints import STATE

_RECENT_ROWS = 2_000  # maximum number of logged rows to choose from
_SHOWN_ROWS = 5  # maximum number of rows of each kind
_MAX_CHARACTERS = 400  # the page folds longer texts


@dataclass
class PlotArguments:
    """Settings of `topr plot`."""

    input: str = field(
        metadata={"help": "output_dir of a trainer or of topr iterate. The run can still be in progress."}
    )
    output: str | None = field(
        default=None, metadata={"help": f"Page to write. Default: {manifest.PAGE} in the input folder."}
    )


@dataclass
class Run:
    """Logs, rows and evaluations of a run, read from its folder.

    Attributes:
        name (`str`): Name of the folder.
        histories (`dict[str, list]`): `log_history` of each training run, by name, in order.
        rows (`pa.Table` or `None`): Latest logged rows with a column `weight`, from the last training run that has any.
        evaluations (`Evaluations`): Evaluations of the models on the test problems, by model name, in order.
    """

    name: str
    histories: dict[str, list[dict[str, Any]]]
    rows: pa.Table | None
    evaluations: Evaluations

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of all training runs."""
        return sum(map(last_step, self.histories.values()))


def plot_command(args: PlotArguments) -> None:
    """Write the page of a run, and print its path.

    Args:
        args (`PlotArguments`): Settings of the command.

    Raises:
        FileNotFoundError: the folder does not exist, or has neither a log nor an evaluation.
        ValueError: an evaluation is damaged.
        ImportError: the extra `plots` is not installed.
    """
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ImportError(f'topr plot needs {package}: run pip install ".[plots]" in the clone.')
    run = read_run(Path(args.input))
    path = Path(args.output or Path(args.input) / manifest.PAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(run), encoding="utf-8")
    if run.steps == 0:
        print("There are no steps yet. A trainer writes its log with each checkpoint (save_steps) and when it ends.")
    counts = {"optimizer step": run.steps, "evaluated model": len(run.evaluations),
              "logged row": run.rows.num_rows if run.rows else 0}  # fmt: skip
    print(f"{path}: " + ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items() if n))


def read_run(folder: Path) -> Run:
    """Read a run from its folder.

    Args:
        folder (`Path`): `output_dir` of a trainer or of `topr iterate`.

    Raises:
        FileNotFoundError: the folder does not exist, or has neither a log nor an evaluation.
        ValueError: an evaluation is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} (--input).")
    iterations = layout.iteration_folders(folder)
    trainings = {path.name: path / layout.MODEL for path in iterations} or {folder.name: folder}
    histories = {name: history for name, path in trainings.items() if (history := _read_history(path))}
    tested = (layout.iteration_folder(folder, 0), *iterations)
    tests = {path.name: layout.results_folder(path) for path in tested} | {folder.name: folder}
    files = {name: results / EVALUATION for name, results in tests.items()}
    evaluations = Evaluations({name: read_evaluation(path) for name, path in files.items() if path.is_file()})
    if not histories and not evaluations:
        raise FileNotFoundError(
            f"{folder} has neither {STATE} nor {EVALUATION}. Set --input to the output_dir of a trainer or of topr "
            f"iterate. A new run writes {STATE} at its first checkpoint, after save_steps steps (default: 500)."
        )
    rows, before = None, 0
    for name, path in trainings.items():
        steps = last_step(histories.get(name, []))
        if (found := _read_logged_rows(path)) is not None:
            # Count steps over all training runs, as the curves do.
            place = found.column_names.index("step")
            rows = found.set_column(place, "step", pc.add(found["step"], before))
        before += steps
    return Run(folder.resolve().name, histories, rows, evaluations)


def _newest_files(training: Path, *patterns: str) -> list[Path]:
    """Return the files of a training run that match a pattern, newest first, including files of a running stage."""
    places = (training, training / manifest.WORK)
    names = {path: path.relative_to(place) for place in places for pattern in patterns for path in place.glob(pattern)}
    # Files with the same time are ordered by the step in their names. The file written at the end has no step.
    step = {path: float(re.sub(r"\D", "", str(name)) or "inf") for path, name in names.items()}
    return sorted(names, key=lambda path: (path.stat().st_mtime_ns, step[path]), reverse=True)


def _read_history(training: Path) -> list[dict[str, Any]]:
    """Return the newest `log_history`, or [] if there is none. Trainers write it at each checkpoint and at the end."""
    for path in _newest_files(training, STATE, f"checkpoint-*/{STATE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # A trainer may be writing the file.
            history = [entry for entry in json.loads(path.read_text())["log_history"] if _is_log_entry(entry)]
            if history:
                return history
    return []


def _is_log_entry(entry: Any) -> bool:
    step = entry.get("step") if isinstance(entry, dict) else None
    return type(step) is int and 0 <= step < 2**53  # plots use float64, which is exact only below 2**53


def _read_logged_rows(training: Path) -> pa.Table | None:
    """Return the latest logged rows, without repeats of a prompt with the same completion.

    Return None if no logged table has a column `weight`.
    """
    tables: list[pa.Table] = []
    for path in _newest_files(training, "completions/completions_*.parquet"):
        with suppress(OSError, pa.ArrowInvalid):  # A trainer may be writing the file.
            table = pq.read_table(path)
            if "weight" in table.column_names:
                tables.append(table)
        if sum(table.num_rows for table in tables) >= _RECENT_ROWS:
            break
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
    # A prompt or completion can be a list of messages, which cannot be a key. Its `repr` can.
    latest = {repr(text): place for place, text in reversed(list(enumerate(texts)))}
    return table.take(sorted(latest.values())).slice(0, _RECENT_ROWS)


def rows_to_show(rows: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Choose rows for the page: negatives by their weight w, and positives by their ratio π/μ.

    Args:
        rows (`pa.Table`): Logged rows with the columns `advantage`, `weight` and, if it is known, `log_ratio`.

    Returns:
        `dict`: rows by kind, such as `"Negatives with the highest weights"`. Kinds without rows are left out.
    """
    if "log_ratio" not in rows.column_names:
        rows = rows.append_column("log_ratio", pa.nulls(len(rows)))
    # `to_numpy` converts unknown values (null) to NaN.
    rewards, weights, ratios = (rows[name].cast("double").to_numpy() for name in ("advantage", "weight", "log_ratio"))
    # A row has no weight before an optimizer step uses it.
    negative, positive = np.flatnonzero((rewards < 0) & ~np.isnan(weights)), np.flatnonzero(rewards > 0)
    by_weight = negative[np.lexsort((-ratios[negative], -weights[negative]))]
    by_ratio = positive[np.argsort(-ratios[positive], kind="stable")]
    by_ratio = by_ratio[~np.isnan(ratios[by_ratio])]
    chosen = {
        "Negatives with the highest weights": by_weight[:_SHOWN_ROWS],
        "Negatives with the lowest weights": by_weight[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
        "Positives with the highest π/μ": by_ratio[:_SHOWN_ROWS],
        "Positives with the lowest π/μ": by_ratio[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
    }
    if len(by_ratio) == 0:  # With TOPR's limits, positives have no ratio: their weights do not depend on it.
        chosen["Positives"] = positive[:_SHOWN_ROWS]
    return {kind: rows.take(places).to_pylist() for kind, places in chosen.items() if len(places)}


def render(run: Run) -> str:
    """Render the page of a run as HTML."""
    panels = [panel for panel in PANELS if any(has_metric(panel, history) for history in run.histories.values())]
    accuracy = io.BytesIO()
    if run.evaluations:
        run.evaluations.plot(accuracy)
    return page.render(
        "run_report.html",
        run=run,
        table=str(run.evaluations) if run.evaluations else None,
        accuracy=page.picture_source(accuracy.getvalue(), "png"),
        panels=[(panel, page.figure_source(draw_panel(panel, run.histories))) for panel in panels],
        kinds=rows_to_show(run.rows) if run.rows is not None else {},
        long=_MAX_CHARACTERS,
    )
