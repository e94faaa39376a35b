"""The command `topr plot`: a run as one HTML page that needs no server and no account."""

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
from topr_trl.cli.run_report_curves import PANELS, draw, has, last_step
from topr_trl.evaluation.report import EVALUATION, Evaluations, read_evaluation
from topr_trl.pipeline import manifest
from topr_trl.pipeline import run_folders as layout
from topr_trl.trainers.checkpoints import STATE

_RECENT_ROWS = 2_000  # that are searched for rows worth a look
_SHOWN_ROWS = 5  # of each kind
_LONG = 400  # characters; the rest of a text is folded


@dataclass
class PlotArguments:
    """Settings of `topr plot`."""

    input: str = field(metadata={"help": "output_dir of a trainer or of topr iterate, finished or not."})
    output: str | None = field(
        default=None, metadata={"help": "Page to write. Default: report.html in the input folder."}
    )


@dataclass
class Run:
    """Logs, rows and evaluations of a run, read from its folder."""

    name: str  # of its folder
    histories: dict[str, list[dict[str, Any]]]  # `log_history` of its trainings, by name, in order
    rows: pa.Table | None  # what the last training logged last, with `weight` and other columns
    evaluations: Evaluations  # of the models of the loop on the test problems, in order

    @property
    def steps(self) -> int:
        """Optimizer steps of all trainings."""
        return sum(map(last_step, self.histories.values()))


def plot_command(args: PlotArguments) -> None:
    """Write the page of a run, and print where it is.

    Raises:
        FileNotFoundError: there is no such folder, or it has nothing to show.
        ImportError: the extra `plots` is not installed.
    """
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ImportError(f"topr plot needs {package}: pip install topr_trl[plots].")
    run = read_run(Path(args.input))
    path = Path(args.output or Path(args.input) / "report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(run), encoding="utf-8")
    if run.steps == 0:
        print("There are no steps yet: a training writes its log with each checkpoint (save_steps) and at its end.")
    counts = {"optimizer step": run.steps, "evaluated model": len(run.evaluations),
              "logged row": run.rows.num_rows if run.rows else 0}  # fmt: skip
    print(f"{path}: " + ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n))


def read_run(folder: Path) -> Run:
    """Read the `output_dir` of a trainer, or of the loop.

    Raises:
        FileNotFoundError: there is no such folder, or neither a log nor an evaluation in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} (--input).")
    iterations = layout.iteration_folders(folder)
    trainings = {path.name: path / layout.MODEL for path in iterations} or {folder.name: folder}
    histories = {name: history for name, path in trainings.items() if (history := _history(path))}
    tested = (layout.iteration_folder(folder, 0), *iterations)
    tests = {path.name: layout.results_folder(path) for path in tested} | {folder.name: folder}
    files = {name: results / EVALUATION for name, results in tests.items()}
    evaluations = Evaluations({name: read_evaluation(path) for name, path in files.items() if path.is_file()})
    if not histories and not evaluations:
        raise FileNotFoundError(
            f"{folder} has neither {STATE} nor {EVALUATION}: name the output_dir of a trainer or of topr iterate. A "
            "new run writes the first at its first checkpoint."
        )
    rows, before = None, 0
    for name, path in trainings.items():
        steps = last_step(histories.get(name, []))
        if (found := _logged_rows(path)) is not None:  # its steps continue those before, as in the curves
            place = found.column_names.index("step")
            rows = found.set_column(place, "step", pc.add(found["step"], before))
        before += steps
    return Run(folder.resolve().name, histories, rows, evaluations)


def _newest_first(training: Path, *patterns: str) -> list[Path]:
    """Files in its output_dir, and in that of a stage of the loop that is still running."""
    places = (training, training / manifest.WORK)
    found = [path for place in places for pattern in patterns for path in place.glob(pattern)]
    step = {path: int(re.sub(r"\D", "", path.stem) or 0) for path in found}
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, step[path]), reverse=True)


def _history(training: Path) -> list[dict[str, Any]]:
    """The newest log: a training writes it with each checkpoint, and when it ends."""
    for path in _newest_first(training, STATE, f"checkpoint-*/{STATE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a trainer is writing it
            history = [entry for entry in json.loads(path.read_text())["log_history"] if _is_entry(entry)]
            if history:
                return history
    return []


def _is_entry(entry: Any) -> bool:
    step = entry.get("step") if isinstance(entry, dict) else None
    return type(step) is int and 0 <= step < 2**53


def _logged_rows(training: Path) -> pa.Table | None:
    """The rows that were logged last, each once, with the column `weight`; None if there are none."""
    tables: list[pa.Table] = []
    for path in _newest_first(training, "completions/completions_*.parquet"):
        with suppress(OSError, pa.ArrowInvalid):  # a trainer is writing it
            table = pq.read_table(path)
            if "weight" in table.column_names:
                tables.append(table)
        if sum(table.num_rows for table in tables) >= _RECENT_ROWS:
            break
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
    latest = {repr(text): place for place, text in reversed(list(enumerate(texts)))}  # may be messages
    return table.take(sorted(latest.values())).slice(0, _RECENT_ROWS)


def rows_to_show(rows: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Rows worth a look, by kind: negatives of most and least weight, most and least likely positives."""
    if "log_ratio" not in rows.column_names:
        rows = rows.append_column("log_ratio", pa.nulls(len(rows)))
    # An unknown number is NaN.
    rewards, weights, ratios = (rows[name].cast("double").to_numpy() for name in ("advantage", "weight", "log_ratio"))
    # A row that no step has used yet has no weight.
    negative, positive = np.flatnonzero((rewards < 0) & ~np.isnan(weights)), np.flatnonzero(rewards > 0)
    by_weight = negative[np.lexsort((-ratios[negative], -weights[negative]))]
    by_ratio = positive[np.argsort(-ratios[positive], kind="stable")]
    by_ratio = by_ratio[~np.isnan(ratios[by_ratio])]
    chosen = {
        "Negatives of most weight": by_weight[:_SHOWN_ROWS],
        "Negatives of least weight": by_weight[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
        "Most likely positives, relative to μ": by_ratio[:_SHOWN_ROWS],
        "Least likely positives, relative to μ": by_ratio[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
    }
    if len(by_ratio) == 0:  # no weight depends on their ratio, so it may be unknown
        chosen["Positives"] = positive[:_SHOWN_ROWS]
    return {kind: rows.take(places).to_pylist() for kind, places in chosen.items() if len(places)}


def render(run: Run) -> str:
    """The page as HTML."""
    panels = [panel for panel in PANELS if any(has(panel, history) for history in run.histories.values())]
    accuracy = io.BytesIO()
    if run.evaluations:
        run.evaluations.plot(accuracy)
    return page.render(
        "run_report.html",
        run=run,
        table=str(run.evaluations) if run.evaluations else None,
        accuracy=page.source(accuracy.getvalue(), "png"),
        panels=[(panel, page.svg(draw(panel, run.histories))) for panel in panels],
        kinds=rows_to_show(run.rows) if run.rows is not None else {},
        long=_LONG,
    )
