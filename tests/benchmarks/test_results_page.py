"""README.md and pages of docs/ match the stored results, and the appendix has all numbers that were written by hand."""

import re
from pathlib import Path

import pytest

from benchmarks import pictures, real_page, report, results_page
from benchmarks.__main__ import TABLES, published
from benchmarks.cells import Store
from benchmarks.results_page import PAGE, PAGES
from benchmarks.statistics import Interval

FROZEN = ("evidence.md", "wrong_answers.md", "gsm8k.md")  # pages of version 0.2


@pytest.mark.slow
def test_the_pages_show_the_results(tmp_path):
    """The pages match the published results. If this test fails, run `python -m benchmarks --published --report`."""
    store = published()
    for page in PAGES:
        assert results_page.write(store, tmp_path / page.name, template=page).read_text() == page.read_text()
    assert report.appendix(store) == TABLES.read_text()
    real = real_page.PAGE
    assert real_page.write(tmp_path / "real.md").read_text() == real.read_text()
    pictures.draw_long_completions(store, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 10_000


def by_hand(page: Path = PAGE) -> str:
    """Return the text of a page without its tables, numbers and words that follow from results."""
    return re.sub(r"<!-- table .*?<!-- end -->|<!--[\w:]+-->.*?<!--/-->", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_comparative_words_follow_from_an_interval(page):
    """A word of a comparison has a marker, `<!--word:NAME-->`. The definitions of the words are in italics."""
    assert "<!--word:" in page.read_text()
    assert re.findall(r"(?<!\*)\b(?:ahead|behind|level|beats?)\b", by_hand(page), re.IGNORECASE) == []


@pytest.mark.parametrize(("mean", "word"), [(0.03, "ahead"), (-0.03, "behind"), (0.01, "level"), (-0.01, "level")])
def test_a_word_follows_from_the_interval(mean, word):
    gap = Interval(mean, 0.02)
    assert report.word(gap) == word
    page = "<!--gap-->+9.9 ± 9.9<!--/--> <!--word:gap-->ahead<!--/-->"
    filled = report.fill(page, {}, report.texts({"gap": lambda: gap}))
    assert filled == f"<!--gap-->{100 * mean:+.1f} ± 2.0<!--/--> <!--word:gap-->{word}<!--/-->"
    assert [report.word([gap] * n) for n in (2, 3)] == [f"{word} on both", f"{word} on all 3"]


def test_words_of_several_differences_are_counted():
    gaps = [Interval(mean, 0.02) for mean in (0.01, 0.03, 0.05, -0.04)]
    assert report.word(gaps) == "ahead on 2, behind on 1, level on 1"
    assert report.number(gaps) == "-4.0 to +5.0"


def test_numbers_that_are_written_by_hand_are_in_the_appendix():
    text = by_hand()
    found = re.findall(r"[+-]?\d+\.\d ± \d+\.\d", text)
    frozen = "".join((TABLES.parent / name).read_text() for name in FROZEN)
    assert found
    assert not [number for number in found if number not in frozen]


def test_the_page_is_short():
    lines = re.sub(r"<!--.*?-->", " ", PAGE.read_text()).splitlines()
    words = " ".join(line for line in lines if not line.startswith("|")).split()
    assert len([word for word in words if any(map(str.isalnum, word))]) <= 1_600


def test_without_results_the_page_says_so(tmp_path):
    nothing = Store(tmp_path / "nothing")
    text = results_page.write(nothing, tmp_path / "page.md", nothing).read_text()
    assert text.count(f"-->{report.NOT_YET}<!--/-->") == PAGE.read_text().count("<!--/-->")
    assert text.count(f"\n\n{report.NOT_YET}\n\n<!-- end -->") == 11
    assert text.count(real_page.IN_PROGRESS) == 1
    assert report.NOT_YET in report.appendix(nothing)
    assert not {"nan", "+nan"} & {*report.appendix(nothing).split()}
