"""A run as one HTML page that needs no server and no account: evaluations, curves, rows by weight."""

import base64
import io
import json
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr_trl.checkpoints import STATE
from topr_trl.cli.curves import PANELS, draw, has, last_step
from topr_trl.evaluation.report import Evaluations, read_evaluation
from topr_trl.pipeline import manifest

# Rows of the last logs that are looked through, and of each kind that is shown.
_RECENT_ROWS = 2_000
_SHOWN_ROWS = 5
_LONG = 400  # characters of a text that are shown before it is folded


@dataclass
class PlotArguments:
    """What `topr plot` reads and writes.

    Parameters:
        input (`str`): `output_dir` of a trainer, or of the loop; finished or not.
        output (`str`, *optional*): The page; default: `report.html` in the input.
    """

    input: str = field(metadata={"help": "output_dir of a trainer or of topr iterate, finished or not."})
    output: str | None = field(default=None, metadata={"help": "The page. Default: report.html in the input."})


@dataclass
class Run:
    """What a run has left on disk.

    Attributes:
        name: of its folder.
        histories: `log_history` of its trainings, by name, in order.
        rows: completions that the last training has logged last, with `weight` and the like; or None.
        evaluations: of the loop's models on the test problems, by name, in order.
    """

    name: str
    histories: dict[str, list[dict[str, Any]]]
    rows: pa.Table | None
    evaluations: Evaluations

    @property
    def steps(self) -> int:
        """Optimiser steps of all trainings."""
        return sum(map(last_step, self.histories.values()))


def plot_command(args: PlotArguments) -> None:
    """Read a run, write its page, say where it is.

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
    page = render(run)
    path.write_text(page, encoding="utf-8")
    if run.steps == 0:
        print("No steps are known yet: a training writes its log with each checkpoint (save_steps), and when it ends.")
    counts = {"optimiser step": run.steps, "evaluated model": len(run.evaluations),
              "logged row": run.rows.num_rows if run.rows else 0}  # fmt: skip
    print(f"{path}: " + ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n))


def read_run(folder: Path) -> Run:
    """What there is of a trainer's `output_dir`, or of the loop's.

    Raises:
        FileNotFoundError: there is no such folder, or neither a log nor an evaluation in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} (--input).")
    of_loop = [path for path in folder.glob("iteration-*") if path.name.removeprefix("iteration-").isdigit()]
    iterations = sorted(of_loop, key=lambda path: int(path.name.removeprefix("iteration-")))
    trainings = {path.name: path / "model" for path in iterations} or {folder.name: folder}
    histories = {name: history for name, path in trainings.items() if (history := _history(path))}
    tests = {path.name: path / "test" / "results" for path in (folder / "base", *iterations)} | {folder.name: folder}
    files = {name: results / "evaluation.json" for name, results in tests.items()}
    evaluations = Evaluations({name: read_evaluation(path) for name, path in files.items() if path.is_file()})
    if not histories and not evaluations:
        raise FileNotFoundError(
            f"{folder} has neither {STATE} nor evaluation.json: name the output_dir of a trainer or of topr iterate. A "
            "run that has just begun writes the first at its first checkpoint."
        )
    rows, before = None, 0
    for name, path in trainings.items():
        steps = last_step(histories.get(name, []))
        if (found := _logged_rows(path, steps)) is not None:  # its steps count on, as the curves do
            place = found.column_names.index("step")
            rows = found.set_column(place, "step", pc.add(found["step"], before))
        before += steps
    return Run(folder.resolve().name, histories, rows, evaluations)


def _places(training: Path) -> tuple[Path, Path]:
    """Where a trainer's files are: in its output_dir, and under way in a stage of the loop."""
    return training, training / manifest.WORK


def _states(training: Path) -> list[Path]:
    """What a training has written at its end and with each checkpoint, the newest last."""
    found = [path for place in _places(training) for path in (place / STATE, *place.glob(f"checkpoint-*/{STATE}"))]
    return sorted((path for path in found if path.is_file()), key=_written)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _history(training: Path) -> list[dict[str, Any]]:
    """The longest log of the training that was logged last: of its end, or of its last checkpoint.

    A folder may hold checkpoints of an earlier one, whose log begins otherwise.
    """
    histories = [history for path in _states(training) if (history := _load(path))]
    if not histories:
        return []
    latest = histories[-1]
    return max((h for h in histories if repr(h[: len(latest)]) == repr(latest)), key=last_step)


def _load(path: Path) -> list[dict[str, Any]]:
    try:
        history: list[dict[str, Any]] = json.loads(path.read_text())["log_history"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or a trainer is writing it
        return []
    return history


def _logged_rows(training: Path, last: int) -> pa.Table | None:
    """The rows that were logged last, each once, with the column `weight`; None if there are none.

    Args:
        last: the step up to which the training's log is known. What is of a later one, and older than that log, is of
            an earlier training in this folder.
    """
    known = max(map(_written, _states(training)), default=0)
    tables: list[pa.Table] = []
    paths = sorted(
        (p for place in _places(training) for p in place.glob("completions/completions_*.parquet")), key=_step
    )
    for path in reversed(paths):
        if _step(path) > last and _written(path) < known:
            continue
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid):  # torn
            continue
        if "weight" in table.column_names:
            tables.append(table)
        if sum(table.num_rows for table in tables) >= _RECENT_ROWS:
            break
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
    latest = {text: place for place, text in reversed(list(enumerate(texts)))}
    return table.take(sorted(latest.values())).slice(0, _RECENT_ROWS)


def _step(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem) or 0)


@dataclass
class Kind:
    """Rows of one kind, for the page."""

    title: str
    rows: list[dict[str, Any]]


def kinds_of(rows: pa.Table) -> list[Kind]:
    """Rows worth a look: negatives that push most and least, positives that are likeliest and least likely."""
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    number = {name: np.array([np.nan if x is None else x for x in columns[name]], dtype=float)
              for name in ("advantage", "weight", "log_ratio") if name in columns}  # fmt: skip
    rewards, weights = number["advantage"], number["weight"]
    ratios = number.get("log_ratio", np.full(len(weights), np.nan))
    # A row whose turn has not come has no weight yet.
    negative, positive = np.flatnonzero((rewards < 0) & ~np.isnan(weights)), np.flatnonzero(rewards > 0)
    by_weight = negative[np.lexsort((-ratios[negative], -weights[negative]))]
    by_ratio = positive[np.argsort(-ratios[positive], kind="stable")]
    by_ratio = by_ratio[~np.isnan(ratios[by_ratio])]
    chosen = {
        "Negatives that weigh most": by_weight[:_SHOWN_ROWS],
        "Negatives that are tapered most": by_weight[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
        "Positives that became likeliest": by_ratio[:_SHOWN_ROWS],
        "Positives that became least likely": by_ratio[_SHOWN_ROWS:][::-1][:_SHOWN_ROWS],
    }
    if len(by_ratio) == 0:  # their ratio is not needed, so it may not be known
        chosen["Positives"] = positive[:_SHOWN_ROWS]
    return [
        Kind(title, [{name: values[i] for name, values in columns.items()} for i in places.tolist()])
        for title, places in chosen.items()
        if len(places)
    ]


def render(run: Run) -> str:
    """The page. Texts of rows are escaped: they are a model's, or a user's."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    template = environment.from_string(Path(__file__).with_name("run_report.html").read_text("utf-8"))
    panels = [panel for panel in PANELS if any(has(panel, history) for history in run.histories.values())]
    accuracy = io.BytesIO()
    if run.evaluations:
        run.evaluations.plot(accuracy)
    return template.render(
        run=run,
        table=str(run.evaluations) if run.evaluations else None,
        accuracy=_source(accuracy.getvalue(), "png"),
        panels=[(panel, _source(_svg(draw(panel, run.histories)), "svg+xml")) for panel in panels],
        kinds=kinds_of(run.rows) if run.rows is not None else [],
        long=_LONG,
    )


def _svg(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _source(picture: bytes, kind: str) -> str:
    """A picture inside the page, for `src`."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3g}"
