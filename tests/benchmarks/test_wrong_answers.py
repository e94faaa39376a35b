"""Recipes for wrong answers have the rows and weights that they promise."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from benchmarks import pretrained, setting
from benchmarks.cells import Store
from benchmarks.experiments import wrong_answers
from benchmarks.experiments.wrong_answers import RECIPES, agreement
from benchmarks.rows import Rows
from benchmarks.setting import PROFILES, base_model, tokenizer
from topr_trl.diagnosis import agreements
from topr_trl.tasks import gsm8k

GROUPS = np.repeat([0, 1, 2], 4)
ANSWERS = ["1", "1", "1", "2", "5", "6", "7", "8", "3", "9", "9", "9"]  # wrong but for "3"
REWARDS = np.where(np.array(ANSWERS) == "3", 1.0, -1.0)


def pool(rewards=REWARDS):
    means = np.array([rewards[group == GROUPS].mean() for group in GROUPS])
    nothing = [[0]] * 12
    return Rows(nothing, nothing, rewards, GROUPS, [], means, means, agreements(GROUPS, ANSWERS))


def test_agreement_of_a_model_is_over_problems_without_a_right_answer():
    assert agreement(pool()) == pytest.approx(2 / 3 * 3 / 8)  # problem 2 has a right answer


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    """Recipes never lower a right answer. All but `once` read as many rows as there are."""
    rows, after = RECIPES[name](pool(), 0)
    assert len(rows) == len(after) == (1 if name == "right answers once" else 12)
    assert (after[REWARDS[rows] > 0] > 0).all()
    assert (after[REWARDS[rows] < 0] <= 0).all()


def test_the_weight_of_wrong_answers():
    def weights(name):
        rows, after = RECIPES[name](pool(), 0)
        return np.bincount(rows, after, minlength=12)

    for name, share in ((wrong_answers.DEFAULT, 0.5), ("TOPR, p~ 20%", 0.2), (wrong_answers.BALANCED, 0.5)):
        found = weights(name)
        assert found[8] / np.abs(found).sum() == pytest.approx(share)
    assert weights(wrong_answers.CONTROL)[:8].tolist() == [0] * 8  # problems without a right answer
    found = weights(wrong_answers.WEIGHTED)
    assert found[3:8].tolist() == [0] * 5  # answers that no other sample gave
    assert np.abs(found).mean() == pytest.approx(1)
    assert found[0] / found[8] == pytest.approx(-(2 / 3) / (11 / 12) / (0.5 * 12))
    found = weights(wrong_answers.DRAWN)
    assert found[3:8].tolist() == [0] * 5
    assert found[found < 0].sum() == -2  # half of 12 rows, times the mean agreement of wrong rows, 4 / 11
    assert weights(wrong_answers.CHOSEN).tolist() == weights(wrong_answers.REPEATED).tolist()


@pytest.mark.parametrize("rewards", [np.ones(12), -np.ones(12)])
@pytest.mark.parametrize("name", RECIPES)
def test_one_kind_of_answers(name, rewards):
    rows, after = RECIPES[name](pool(rewards), 0)
    assert len(rows) == len(after) <= 12
    assert np.isfinite(after).all()


@pytest.mark.slow
def test_a_temperature_of_the_rows_is_that_of_the_loss(monkeypatch):
    """At the first step π is μ, if both are at the temperature of the rows."""
    seen = []
    monkeypatch.setattr(wrong_answers, "tapered", lambda _: lambda *args: seen.append(args) or args[0].sum())
    cell = wrong_answers.of_base("main").cell(wrong_answers.DEFAULT, {"learning_rate": 1e-4}, 0)
    small = replace(PROFILES["quick"], problems=4, test_problems=2)
    wrong_answers.work({**cell, "temperature": 0.5, "iterations": 1}, small)
    logps_BT, mu_BT, mask_BT, _ = seen[0]
    torch.testing.assert_close(logps_BT[mask_BT], mu_BT[mask_BT], atol=1e-4, rtol=1e-4)


def test_comparisons_to_come_have_known_recipes(monkeypatch, tmp_path):
    monkeypatch.setattr(wrong_answers, "model_hash", lambda base: "hash")
    to_come = [
        *map(wrong_answers.on_gpu, pretrained.BASES),
        [wrong_answers.in_one_pass(), wrong_answers.of_sessions(1.0)],
    ]
    for experiment in chain(*to_come):
        planned = experiment.cells(Store(tmp_path))
        assert {cell["recipe"] for cell in planned} <= {
            *RECIPES,
            *wrong_answers.RIVALS,
            *wrong_answers.LEVELS,
            wrong_answers.UNTAPERED,
        }
        assert len({str(cell) for cell in planned}) == len(planned) == 3 * len(experiment.methods)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        wrong_answers.WEIGHTED,
        wrong_answers.SEGMENTS,
        *(
            pytest.param(name, marks=pytest.mark.weekly)
            for name in ("KTO, β 0.1", "DPO, β 0.1", "GRPO (TRL's default loss)")
        ),
    ],
)
def test_a_pretrained_model_is_trained_with_an_adapter(recipe, monkeypatch, tmp_path):
    """The model of the experiment is not in the repository, so a small one takes its place."""
    base_model("main").save_pretrained(tmp_path / "small")
    tokenizer("main").save_pretrained(tmp_path / "small")
    monkeypatch.setattr(setting, "CACHE", tmp_path)
    monkeypatch.setattr(pretrained, "BASES", {"small": 40})
    monkeypatch.setattr(pretrained, "EXAMPLES", {"small": pretrained.WORKED})
    monkeypatch.setattr(wrong_answers, "PRETRAINED_PROBLEMS", 6)
    monkeypatch.setattr(wrong_answers.OfSessions, "size", 64)
    monkeypatch.setattr(wrong_answers, "PRETRAINED_TESTS", {"small": 8})
    # Half of the answers count as right.
    monkeypatch.setattr(gsm8k, "judge", lambda texts, _: [("correct" if len(t) % 2 else "incorrect", t) for t in texts])
    cell = {"base": "small", "recipe": recipe, "learning_rate": 1e-3, "seed": 0, "iterations": 1}
    found = wrong_answers.work(cell, PROFILES["quick"])
    assert found["curve"][0]["problems"] == 6
    assert found["test"]["problems"] == 8
