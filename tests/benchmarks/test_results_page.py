"""README.md and pages of docs/ match the stored results, and the appendix has all numbers that were written by hand."""

import re
from pathlib import Path

import pytest

from benchmarks import pictures, real_model, real_page, report, results_page
from benchmarks.__main__ import TABLES, published
from benchmarks.cells import Store, Unfinished
from benchmarks.experiment import TUNING_SEED
from benchmarks.experiments import controls, long_completions, temperatures
from benchmarks.results_page import PAGE, PAGES
from benchmarks.statistics import Interval

RATE = {"learning_rate": 3e-4}
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


def decoded(greedy: float, sampled: float) -> dict[str, float]:
    values = {"greedy": greedy, "pass@1": sampled, "maj@8": sampled, "maj@32": sampled}
    return {**values, **{f"{name} error": 0.01 for name in values}}


@pytest.fixture
def store(tmp_path) -> Store:
    """Return made-up results. At the middle rate, TOPR reaches 80% on each base model, and other methods reach 60%."""
    store = Store(tmp_path / "results")
    sampled = {"0.3": decoded(0.1, 0.2), "0.7": decoded(0.1, 0.3), "1": decoded(0.1, 0.25)}
    for base in controls.BASES:
        store.add(temperatures.cell(base), sampled, 60.0, "")
        experiment = controls.of_base(store, base)
        for method in controls.METHODS:
            end = 0.8 if method == controls.TOPR else 0.6
            for choice in experiment.choices:
                found = decoded(end if choice == RATE else 0.3, end if choice == RATE else 0.3)
                store.add(experiment.cell(method, choice, TUNING_SEED), found, 60.0, "")
            for seed in range(controls.SEEDS):
                store.add(experiment.cell(method, RATE, seed), decoded(end, end), 60.0, "")
    return store


def test_tables_of_a_store(store):
    table = results_page.controls_table(store, "pass@1")
    assert "| base model, T = 1 | 25.0 |" in table
    assert "| base model, best temperature | 30.0 (T = 0.7) |" in table
    assert "| TOPR (default) | **80.0 ± 1.2** |" in table  # three seeds: 2 · 0.01 / √3 = 0.012
    assert "| KTO | ahead on 4, by 20 | ahead on 4, by 20 |" in results_page.against_table(store)
    (_, header, rows), *_ = temperatures.tables(store)
    assert header[2:] == ["greedy", "T = 0.3", "T = 0.7", "T = 1", "maj@32"]
    assert rows[1][1:] == ["wrong mode", "10.0", "20.0", "**30.0**", "25.0", "25.0"]
    compared = report.compare(store, controls.of_base(store, "main"))
    assert "| KTO | 0.0003, 0.0003 | 60.0 ± 2.0 | 60.0 ± 1.2 | 60.0 ± 1.2 | **+20.0 ± 2.8** |" in compared


def test_a_method_below_the_base_models_best_temperature_is_not_bold(store):
    better = {"0.3": decoded(0.1, 0.795), "0.7": decoded(0.1, 0.3), "1": decoded(0.1, 0.25)}
    store.add(temperatures.cell(controls.BASES[0]), better, 60.0, "")
    table = results_page.controls_table(store, "pass@1")
    assert "| base model, best temperature | 79.5 (T = 0.3) |" in table
    assert "| TOPR (default) | 80.0 ± 1.2 |" in table


def test_without_results_the_page_says_so(tmp_path):
    nothing = Store(tmp_path / "nothing")
    text = results_page.write(nothing, tmp_path / "page.md", nothing).read_text()
    assert text.count(f"-->{report.NOT_YET}<!--/-->") == PAGE.read_text().count("<!--/-->")
    assert text.count(f"\n\n{report.NOT_YET}\n\n<!-- end -->") == 8
    assert text.count(real_page.IN_PROGRESS) == 1
    assert report.NOT_YET in report.appendix(nothing)


# A pretrained model.


def ended(greedy, right, samples=4):
    return {
        "greedy_by_problem": greedy, "right_by_problem": right, "samples": samples, "greedy": sum(greedy) / len(greedy),
        "pass@1": sum(right) / len(right) / samples, "maj@4": 0.5, "pass@4": 0.75, "invalid": 0.1,
    }  # fmt: skip


BEST = real_model.RATES[1]


@pytest.fixture
def real(tmp_path) -> Store:
    """Return made-up results on six problems. With greedy decoding, TOPR solves two, and positives repeated three."""
    store = Store(tmp_path / "real")
    untrained = {
        "1": ended([1, 0, 0, 0, 0, 0], [8, 4, 1, 2, 0, 0], 8), "0.3": ended([1, 0, 0, 0, 0, 0], [4, 2, 0, 0, 0, 0])
    }  # fmt: skip
    store.add(real_model.untrained_cell(real_page.REAL), untrained, 60.0, "")
    experiment = real_model.experiment(real_page.REAL)
    for method, greedy in (("TOPR (default)", [1, 1, 0, 0, 0, 0]), ("positives repeated", [1, 1, 1, 0, 0, 0])):
        for rate in real_model.RATES:
            cell = experiment.cell(method, {"learning_rate": rate}, TUNING_SEED)
            score = 0.5 if rate == BEST else 0.25
            store.add(cell, {"greedy": score, "pass@1": score, real_model.SCORE: score}, 60.0, "")
        for seed in range(real_model.REPETITIONS):
            end = ended(greedy, [4, 4, 2, 2, 0, 0])
            store.add(experiment.cell(method, {"learning_rate": BEST}, seed), end, 60.0, "")
    return store


def test_tables_of_a_pretrained_model(real):
    table = real_page.main_table(real)
    assert "| untrained, T = 1 | 16.7 | 31.2 | 50.0 | 75.0 | 10.0 |  |" in table
    # Two of six greedy answers are right: 1.96 · sqrt(6/5 · 1/3 · 2/3 / 6) = 0.413.
    assert "| TOPR (default) | 33.3 ± 41.3 | 50.0 ± 35.8 | 50.0 ± 0.0 | 66.7 ± 41.3 | 10.0 ± 0.0 | 5 |" in table
    assert "c = 0" not in table
    assert "| positives repeated | -16.7 ± 32.7 | +0.0 ± 0.0 |" in real_page.differences(real)
    section = real_page.section(real)
    assert real_page.IN_PROGRESS not in section
    assert section.count("TOPR (default)") == 2  # a row in one table, and the header of another
    assert "| TOPR (default) | 25.0, 25.0 | **50.0, 50.0** | 25.0, 25.0 |" in real_page.rates(real)
    strata = real_page.strata(real)
    assert "0 of 8 (problems: 2) | 1 or 2 of 8 (problems: 2) | 3 or more of 8 (problems: 2)" in strata
    assert "| untrained | 0.0 | 18.8 | 75.0 |" in strata
    assert "| TOPR (default) | 0.0 ± 0.0 | 50.0 ± 0.0 | 100.0 ± 0.0 |" in strata
    # Before training, one greedy answer of six is right. TOPR solves another problem, which 4 of 8 samples solved.
    greedy = real_page.greedy_strata(real)
    assert "| before training | problems | positives repeated | TOPR (default) |" in greedy
    assert "| greedy answer right | 1 | +0.0 | +0.0 |" in greedy
    assert "| greedy answer wrong, 3 or more of 8 samples right | 1 | +16.7 | +16.7 |" in greedy
    assert "| greedy answer wrong, 1 or 2 of 8 samples right | 2 | +16.7 | +0.0 |" in greedy


def test_gains_on_a_pretrained_model(real):
    repeated = real_page.REPEATED
    assert real_page._gain(real, repeated, "greedy", "1").mean == pytest.approx(2 / 6)
    assert real_page._gain(real, repeated, "pass@1", "0.3").mean == pytest.approx(0.25)
    assert real_page._ahead(real, repeated, "TOPR (default)", "greedy").mean == pytest.approx(1 / 6)
    with pytest.raises(Unfinished):
        real_page._gain(real, real_page.BALANCED, "greedy", "1")
    with pytest.raises(Unfinished):
        real_page._ahead(real, repeated, real_page.BALANCED, "greedy")


def add_long_completions(store, settings):
    """Add made-up results. Prefix is best, at a rate of 1e-4."""
    for base in ("sure-17", "main"):
        by_temperature = {"0.3": decoded(0.1, 0.2), "0.7": decoded(0.1, 0.2), "1": decoded(0.1, 0.25)}
        store.add(temperatures.cell(base), by_temperature, 60.0, "")
    ends = {"sequence": 0.3, "prefix": 0.6}
    for setting in settings:
        experiment = long_completions.of_setting(setting)
        for method, cell in experiment.methods.items():
            for choice in experiment.choices:
                end = ends.get(cell["level"], 0.3) - (0.1 if choice["learning_rate"] != 1e-4 else 0.0)
                one = {"greedy": end, "pass@1": end, "pass@1 error": 0.01, "weights": [0.9, 0.5, 0.2, 0.1]}
                for seed in (TUNING_SEED, *experiment.seeds):
                    store.add(experiment.cell(method, choice, seed), {"curve": [one, one]}, 60.0, "")


def test_a_length_without_results_has_no_column(tmp_path):
    store = Store(tmp_path / "results")
    with pytest.raises(Unfinished):
        results_page.long_table(store, long_completions.LENGTHS)
    add_long_completions(store, long_completions.SETTINGS[:2])
    assert results_page.long_table(store, long_completions.LENGTHS).splitlines()[0] == "|  | 40 tokens | 160 tokens |"
    with pytest.raises(Unfinished):
        pictures.draw_long_completions(Store(tmp_path / "nothing"), tmp_path / "long.png")


def test_tables_and_picture_of_long_completions(tmp_path):
    store = Store(tmp_path / "results")
    add_long_completions(store, long_completions.SETTINGS)
    lines = results_page.long_table(store, long_completions.LENGTHS).splitlines()
    assert lines[0] == "|  | 40 tokens | 160 tokens | 640 tokens | 2,560 tokens |"
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}
    assert "base model, T = 1" not in rows  # one base model
    assert rows["sequence (TOPR)"].startswith("| sequence (TOPR) | 30.0 ± 1.2 |")
    assert rows["prefix"].startswith("| prefix | **60.0 ± 1.2** |")
    assert "token" not in rows
    lines = results_page.long_table(store, long_completions.OTHERS).splitlines()
    both = "160 tokens, 64 updates | 640 tokens, 64 updates"
    assert lines[0] == f"|  | {both} | 640 tokens, main | 640 tokens, mistakes early | 640 tokens, mistakes late |"
    assert "| token |  |  | 30.0 ± 1.2 |  |  |" in lines
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}
    assert rows["base model, T = 1"].count(" 25.0 ") == len(long_completions.OTHERS)
    assert rows["base model, best temperature"].count(" 25.0 (T = 1) ") == len(long_completions.OTHERS)
    assert "60.0 ± 0.0" in results_page.long_table(store, long_completions.LENGTHS, "greedy")
    pictures.draw_long_completions(store, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 10_000
