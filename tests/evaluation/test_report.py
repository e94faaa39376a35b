import json
from dataclasses import replace

import numpy as np
import pytest

from topr_trl.evaluation import report
from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.estimates import Estimate, Evaluation, evaluate_samples
from topr_trl.evaluation.report import Evaluations, groups_table, write_report


def make(seed=0, problems=40, samples=8, scored=False, groups=None):
    rng = np.random.default_rng(seed)
    answers = rng.choice(["7", "1", "2", ""], (problems, samples), p=[0.4, 0.2, 0.2, 0.2])
    scores = rng.random((problems, samples)).tolist() if scored else None
    return encode([[a or None for a in row] for row in answers], ["7"] * problems, scores, groups=groups)


def evaluation(seed, **ks):
    rng = np.random.default_rng(seed)
    return evaluate_samples(rng.choice(["7", "1"], (30, 6)).tolist(), ["7"] * 30, **ks)


def test_table(tmp_path):
    runs = Evaluations(before=evaluation(0, maj_ks=[6]), after=evaluation(1, maj_ks=[6]))
    table = str(runs)
    assert "pass@1" in table
    assert "±" in table
    assert "nan" not in table
    assert len({len(line) for line in table.splitlines()[:-1]}) == 1
    assert table.splitlines()[-1] == "(30 problems, 6 samples each; ± is two standard errors)"
    runs.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_table_says_at_which_temperature_each_number_was_drawn():
    drawn, greedy = {"temperatures": [1.0]}, Estimate(0.5, 0.1)
    before, after = (replace(evaluation(seed), **drawn) for seed in (0, 1))
    lines = str(Evaluations(before=before, after=after)).splitlines()
    assert lines[-1] == "(30 problems, 6 samples each at T=1; ± is two standard errors)"
    assert not any("greedy" in line for line in lines)
    lines = str(Evaluations(before=before, after=replace(after, greedy=greedy))).splitlines()
    assert lines[2].split() == ["greedy", "(T=0)", "50.0%", "±", "20.0"]
    assert lines[2].endswith("50.0% ± 20.0")  # in the column of `after`
    assert lines[-2].endswith("6 samples each at T=1; ± is two standard errors)")
    assert lines[-1].startswith("(greedy: one answer per problem; its ± is over the problems")
    for warm, said in (([0.5, 0.7], "after: sampled at T=0.5 and 0.7."), ([], "sampled at an unknown temperature.")):
        lines = str(Evaluations(before=before, after=replace(after, temperatures=warm))).splitlines()
        assert lines[-3:-1] == ["(30 problems, 6 samples each; ± is two standard errors)", "before: sampled at T=1."]
        assert lines[-1].endswith(said)


def test_a_run_without_an_answer_gets_a_hint():
    runs = Evaluations(a=evaluation(0), b=evaluate_samples([[None, None]] * 3, ["7"] * 3))
    assert str(runs).splitlines()[-1].startswith("b: no sample has an answer. Check that --task is correct")


def test_a_table_has_the_k_that_all_runs_have():
    runs = {"old": evaluation(0, maj_ks=[4]), "new": evaluation(1, pass_ks=[1, 2], maj_ks=[2, 4])}
    for order in (runs, reversed(runs.items())):
        labels = [line.split()[0] for line in str(Evaluations(order)).splitlines()[2:-1]]
        assert labels == ["pass@1", "maj@4", "correct", "incorrect", "invalid"]


def test_the_section_of_a_card(tmp_path, monkeypatch):
    """The cells of a card's table are not padded, because facts in a card are found by their exact text."""
    runs = Evaluations(
        before=evaluate_samples([["7", "8"]] * 2, ["7"] * 2), after=evaluate_samples([["7"] * 2] * 2, ["7"] * 2)
    )
    section = runs.write_card_section(tmp_path, tested_on="10 problems")
    assert section == (
        "## Evaluation\n\nTested on 10 problems.\n\n"
        "| measure | before | after |\n|-----------|--------------|--------------|\n"
        "| pass@1 | 50.0% ± 70.7 | 100.0% ± 0.0 |\n| correct | 50.0% | 100.0% |\n| incorrect | 50.0% | 0.0% |\n"
        "| invalid | 0.0% | 0.0% |\n\n(2 problems, 2 samples each; ± is two standard errors)\n\n"
        "![before and after](evaluation.png)\n"
    )
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    bare = runs.write_card_section(tmp_path / "nowhere")
    assert bare.startswith("## Evaluation\n\n| measure")
    assert bare.endswith("standard errors)\n")


def test_any_number_of_evaluations(tmp_path):
    assert str(Evaluations()) == "No evaluations."
    for show in (Evaluations().plot, Evaluations().write_card_section):
        with pytest.raises(ValueError, match=r"no evaluations.*Evaluations\(before=\.\.\."):
            show(tmp_path / "plot.png")
    runs = Evaluations({f"iteration-{i}": evaluation(i) for i in range(7)})
    assert "![iteration-0 and iteration-1 and" in runs.write_card_section(tmp_path)
    assert (tmp_path / "evaluation.png").is_file()
    runs["more"] = evaluate_samples([["7", "1"]], ["7"])
    assert str(runs).splitlines()[-1] == "(1 or 30 problems, 2 or 6 samples each; ± is two standard errors)"


def test_one_run(tmp_path):
    groups = {"subject": ["algebra", "geometry"] * 20, "level": ["1", "2", "3", "none"] * 10}
    text = write_report(tmp_path, {"estimate": make(scored=True, groups=groups)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "evaluation.png"]
    found = Evaluation.from_dict(json.loads((tmp_path / "evaluation.json").read_text()))
    assert list(found.weighted_sc_at) == [2, 4]
    assert groups_table(found) in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("geometry")] == [["geometry", "20"]]
    assert "weighted_sc@4" in text


def test_two_runs(tmp_path):
    text = write_report(tmp_path, {"base": make(), "after": make(1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.json", "comparison.png", "evaluation.json"]
    plain = json.loads((tmp_path / "comparison.json").read_text())
    assert list(plain["runs"]) == ["base", "after"]
    assert plain["runs"]["base"] == json.loads((tmp_path / "evaluation.json").read_text())
    base, after = (Evaluation.from_dict(run).maj_at[4].value for run in plain["runs"].values())
    assert plain["differences"]["maj@4"]["difference"] == pytest.approx(after - base)
    assert "(after minus base, in points; paired bootstrap over the problems)" in text


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in write_report(tmp_path, {"estimate": make()})
    assert not list(tmp_path.glob("*.png"))
