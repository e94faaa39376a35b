"""Write tables of results, and fill in tables and numbers of pages.

The text of a page is written by hand. A page has markers for tables, single numbers and comparative words, by name:

    <!-- table NAME -->            <!--NAME-->+4.6 ± 2.4<!--/-->            <!--word:NAME-->ahead<!--/-->
    <!-- end -->

A word follows from the same intervals as the number of its name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.cells import Store, Unfinished
from benchmarks.experiment import Experiment
from benchmarks.experiments import ALL, compared
from benchmarks.statistics import Interval, difference, over_seeds

NOT_YET = "Not measured yet."
_TABLE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_NUMBER = re.compile(r"<!--((?:word:)?\w+)-->.*?<!--/-->")

Texts = Mapping[str, Callable[[], str]]


def fill(text: str, tables: Texts, numbers: Texts) -> str:
    """Return the text of a page with new tables and numbers."""

    def found(texts: Texts, name: str) -> str:
        try:
            return texts[name]()
        except Unfinished:
            return NOT_YET

    text = _TABLE.sub(lambda m: f"<!-- table {m[1]} -->\n\n{found(tables, m[1])}\n\n<!-- end -->", text)
    return _NUMBER.sub(lambda m: f"<!--{m[1]}-->{found(numbers, m[1])}<!--/-->", text)


def fill_page(template: Path, page: Path, tables: Texts, numbers: Texts) -> Path:
    """Write a page with the text of a template. The template can be the page itself."""
    page.write_text(fill(template.read_text(encoding="utf-8"), tables, numbers), encoding="utf-8")
    return page


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), "|".join(["---"] * len(header)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def percent(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.1f}"


def points(gap: Interval) -> str:
    """Return a difference in points."""
    return gap.percent(signed=True)


Found = Interval | list[Interval] | str


def number(found: Found) -> str:
    """Return a difference, or the range of several differences, in points. A text is returned as it is."""
    if isinstance(found, str):
        return found
    if isinstance(found, Interval):
        return points(found)
    means = [gap.mean for gap in found]
    return f"{100 * min(means):+.1f} to {100 * max(means):+.1f}"


def word(found: Found) -> str:
    """Return whether a difference is above 0 by its interval: ahead, level or behind. Count several differences."""
    if isinstance(found, list):
        kinds = counted(found)
        if len(kinds) == 1:
            return f"{word(found[0])} on {'both' if len(found) == 2 else f'all {len(found)}'}"
        return ", ".join(f"{kind} on {len(gaps)}" for kind, gaps in kinds.items())
    assert isinstance(found, Interval)
    if found.half != found.half:
        raise Unfinished("a difference of one run has no interval")
    return "ahead" if found.low > 0 else "behind" if found.high < 0 else "level"


def counted(gaps: Iterable[Interval]) -> dict[str, list[Interval]]:
    """Return differences by their word, without the words that no difference has."""
    kinds: dict[str, list[Interval]] = {"ahead": [], "behind": [], "level": []}
    for gap in gaps:
        kinds[word(gap)].append(gap)
    return {kind: found for kind, found in kinds.items() if found}


def texts(found: Mapping[str, Callable[[], Found]]) -> Texts:
    """Return the text of each number, and under `word:NAME` its word."""
    numbers = {name: lambda make=make: number(make()) for name, make in found.items()}
    return numbers | {f"word:{name}": lambda make=make: word(make()) for name, make in found.items()}


def bold(text: str, is_bold: bool) -> str:
    """Return the text in bold if `is_bold` is set, else unchanged."""
    return f"**{text}**" if is_bold else text


def marked(gap: Interval) -> str:
    """Return a difference in points, which is bold if its interval excludes 0."""
    return bold(points(gap), gap.low > 0 or gap.high < 0)


def name_of(shown: str) -> str:
    """Return the name of a measure: pass@1 for "curve/-1/pass@1", maj@32 for "maj/32"."""
    *_, kind, last = ["", *shown.split("/")]
    return f"{kind}@{last}" if last.isdigit() else last


def compare(store: Store, experiment: Experiment) -> str:
    """Return the table of an experiment: each method's rate, results, and difference from the first method."""
    first, shown = next(iter(experiment.methods)), experiment.shows or experiment.measures
    rows = []
    for method in experiment.methods:
        best = [experiment.best(store, method, measure) for measure in experiment.measures]
        found = {name: experiment.measured(store, method, name) for name in shown}
        gaps = [
            "" if method == first else marked(difference(experiment.measured(store, first, name), found[name]))
            for name in shown
        ]
        chosen = ", ".join(" and ".join(f"{x:g}" for x in choice.values()) for choice in best if choice)
        rows.append([method, chosen, *(over_seeds(one).percent() for one in found.values()), *gaps])
    chosen = "rate and rows per step" if any("batch_rows" in one for one in experiment.choices) else "rate"
    names = [name_of(name) for name in shown]
    return table(["", chosen, *names, *(f"{first} minus this, {name}" for name in names)], rows)


def appendix(store: Store) -> str:
    """Return the page with the tables of all experiments."""
    parts = [
        "# Tables of all experiments",
        "Written by `python -m benchmarks --published --report`; do not edit. In percent and points; ± is a 95% "
        "interval over seeds; bold: the interval of the difference leaves out 0. What each experiment measures is "
        "in `benchmarks/experiments/`. Where there are several rates, each measure has its own. Unfinished experiments "
        "are left out.",
    ]
    for name in ALL:
        try:
            parts += _sections(store, name)
        except Unfinished:
            parts += [f"## {name}", NOT_YET]
    return "\n\n".join(parts) + "\n"


def _sections(store: Store, name: str) -> list[str]:
    parts: list[str] = []
    for experiment in compared(name, store):
        if experiment.title and experiment.is_finished(store):
            parts += [f"## {experiment.title}", compare(store, experiment)]
    for title, header, rows in ALL[name].tables(store) if hasattr(ALL[name], "tables") else ():
        parts += [f"## {title}", table(header, rows)]
    return parts
