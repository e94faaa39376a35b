"""Write the page of `topr look`: a single HTML file that shows texts of models only as plain text."""

import base64
import io
import json
import re
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topr_trl.curation import counted
from topr_trl.data.tables import atomic_write
from topr_trl.diagnosis import KINDS
from topr_trl.evaluation.figure_style import LOOK
from topr_trl.report.contents import RECORDING, Contents, read_contents
from topr_trl.report.curves import PANELS, draw_panel, has_metric, last_step, warnings_of
from topr_trl.report.results import (
    Results,
    advice_on_rows,
    bars_of_rows,
    cost_of_rows,
    describe_rows,
    recipes_of_rows,
    results_of,
)
from topr_trl.report.samples import (
    Section,
    section_of_logged,
    section_of_rows,
    sections_of_tests,
    tables_of,
)

_MOST_BYTES = 4_000_000  # limit for the JSON of all sections, in bytes; above the limit, the page shows fewer problems
Json = dict[str, Any]


def write_page(folder: Path, output: Path) -> list[str]:
    """Write the page of a folder. Return its first sentences, and a line with the numbers of each section.

    Args:
        folder (`Path`): Folder or file, see `read_contents`.
        output (`Path`): HTML file to write.

    Raises:
        FileNotFoundError: the folder does not exist, or there is nothing to show.
        ValueError: rows, an evaluation or a manifest are damaged.
    """
    contents = read_contents(folder)
    page, sections = _page(contents)
    # "<" could end the script that holds the JSON.
    parts = {"TITLE": escape(contents.name), "DATA": json.dumps(page, allow_nan=False).replace("<", "\\u003c")}
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    with atomic_write(output) as partial:
        if contents.kind == RECORDING:
            partial.touch(0o600)  # Only the user can read a recording.
        partial.write_text(re.sub("@(TITLE|DATA)@", lambda part: parts[part[1]], template), "utf-8", "replace")
    return [*filter(None, [" ".join(page["sentences"])]), *map(str, sections)]


def _page(contents: Contents) -> tuple[Json, list[Section]]:
    for unfinished in [test for test in contents.tests if not test.is_finished()]:
        contents.tests.remove(unfinished)
        contents.notes.append(f"{unfinished.name} is still being tested, so its test is left out.")
    try:
        found = results_of(contents.tests, contents.pass_threshold)
    except ValueError as error:
        found = Results([], "", [])
        contents.notes.append(f"The tests cannot be evaluated: {error}")
    sentences = list(found.sentences)
    if contents.trial:
        best = next((arm for arm in contents.trial["arms"] if arm["recommended"]), None)
        none = "Nothing is recommended: no setting improved on the starting model."
        sentences.insert(0, f"Recommended: {best['label']}, learning rate {best['learning_rate']:g}." if best else none)
    trained = tables_of(contents.read_rows)
    sections = sections_of_tests(tables_of(contents.tests))
    sections += [*map(section_of_rows, trained), *map(section_of_logged, tables_of(contents.logged))]
    _shrink(sections)
    newest = next((one for one in reversed(sections) if set(one.counts) & set(KINDS)), None)
    uses_segments = any(values.get("ratio_level") == "segment" for values in contents.settings.values())
    repeats = any(values.get("curation") == "repeated_positives" for values in contents.settings.values())
    warned = [note for history in contents.histories.values() for note in warnings_of(history, uses_segments)]
    steps = sum(map(last_step, contents.histories.values()))
    return {
        "name": contents.name,
        "kind": contents.kind + (f", {counted(steps, 'optimizer step')}" if steps else ""),
        "sentences": sentences,
        "advice": found.advice + (advice_on_rows(newest.counts, repeats) if newest else []),
        "warnings": list(dict.fromkeys(warned)),
        "notes": contents.notes,
        "table": found.table,
        "trial": contents.trial["table"] if contents.trial else [],
        "sections": [vars(one) for one in sections],
        "rows": [
            {"name": one.name, "facts": describe_rows(one), "bars": bars_of_rows(one)}
            | ({"recipes": recipes_of_rows(one), "cost": cost_of_rows(one)} if contents.kind == "Rows" else {})
            for one in trained
        ],
        "curves": _curves(contents),
        "settings": {stage: {name: str(v) for name, v in one.items()} for stage, one in contents.settings.items()},
    }, sections  # fmt: skip


def _shrink(sections: list[Section]) -> None:
    """Keep fewer cards for each tag, down to 2, until the sections fit into a page."""
    for per_tag in (20, 10, 5, 2):
        if len(json.dumps([vars(one) for one in sections])) <= _MOST_BYTES:
            break
        for section in sections:
            section.keep(per_tag)


def _curves(contents: Contents) -> list[Json]:
    """Return the curves as SVG images, or [] without logs or without matplotlib."""
    if not contents.histories:
        return []
    if find_spec("matplotlib") is None:
        contents.notes.append('There are no curves, because matplotlib is not installed: pip install ".[plots]".')
        return []
    from matplotlib import rc_context

    panels = [panel for panel in PANELS if any(has_metric(panel, log) for log in contents.histories.values())]
    found = []
    for panel in panels:
        image = io.BytesIO()
        with rc_context(LOOK):
            draw_panel(panel, contents.histories).savefig(image, format="svg", metadata={"Date": None})
        source = f"data:image/svg+xml;base64,{base64.b64encode(image.getvalue()).decode()}"
        found.append({"title": panel.title, "meaning": panel.meaning, "source": source})
    return found
