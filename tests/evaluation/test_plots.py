import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.bootstrap import compare
from topr_trl.evaluation.estimates import Estimate, evaluate_in_full
from topr_trl.evaluation.figure_style import DPI, WIDTH
from topr_trl.evaluation.plots import _figure_of_progress, plot_evaluations, plot_progress
from topr_trl.evaluation.rewards import RewardSamples, evaluate_rewards


def make(seed, samples, scored=True, groups=None):
    rng = np.random.default_rng(seed)
    answers = rng.choice(["7", "1", "2"], (30, samples)).tolist()
    return encode(answers, ["7"] * 30, rng.random((30, samples)).tolist() if scored else None, groups=groups)


@pytest.mark.parametrize(("samples", "columns"), [((1,), ()), ((2,), ("level",)), ((4, 16), ("subject", "level"))])
def test_pictures(tmp_path, samples, columns):
    groups = {column: ["a", "b", "none"] * 10 for column in columns}
    runs = {f"run {i}": make(i, size, i == 0, groups) for i, size in enumerate(samples)}
    differences = compare(*runs.values()) if len(runs) == 2 else None
    path = tmp_path / "picture.png"
    plot_evaluations({name: evaluate_in_full(run) for name, run in runs.items()}, path, differences)
    width, height = Image.open(path).size
    assert width == WIDTH * DPI
    assert (height > 3.7 * DPI) == (len(runs) == 2 or bool(columns))


def test_pictures_can_be_read_on_dark_pages(tmp_path):
    """The background is transparent, and no text or line is nearly black."""
    run = evaluate_in_full(make(0, 4, groups={"level": ["a", "b", "none"] * 10}))
    for draw in (plot_evaluations, plot_progress):
        draw({"a": run}, tmp_path / "picture.png")
        pixels = np.array(Image.open(tmp_path / "picture.png"))
        opaque = pixels[..., 3] > 250
        assert not opaque[0, 0]
        assert pixels[opaque][:, :3].max(axis=1).min() > 0x70


def test_colors_are_defined_in_one_place():
    root = Path(__file__).parents[2]
    files = [path for folder in ("topr_trl", "scripts", "benchmarks") for path in (root / folder).rglob("*.py")]
    colored = [path.name for path in files if re.search(r"[\"']#[0-9a-fA-F]{6}", path.read_text())]
    assert colored == ["figure_style.py"]


@pytest.mark.slow
def test_greedy_accuracy_is_drawn(tmp_path):
    runs = {name: evaluate_in_full(make(0, 4)) for name in ("a", "b")}
    drawn = replace(runs["b"], greedy=Estimate(0.5, 0.1))
    for draw in (plot_evaluations, plot_progress):
        for greedy in (False, True):
            draw(runs | ({"b": drawn} if greedy else {}), tmp_path / "picture.svg")
            # matplotlib writes each text as a comment above its path.
            assert ("<!-- greedy" in (tmp_path / "picture.svg").read_text()) == greedy


def test_a_column_that_one_run_lacks_is_left_out(tmp_path):
    runs = {"a": make(0, 4, groups={"level": ["1"] * 30}), "b": make(1, 4)}
    plot_evaluations({name: evaluate_in_full(run) for name, run in runs.items()}, tmp_path / "picture.svg")
    assert "By level" not in (tmp_path / "picture.svg").read_text()


def test_one_evaluation_has_its_measures_on_the_axis():
    rewards = RewardSamples(np.random.default_rng(0).random((30, 4)), list(range(30)), np.full(30, 0.5), [1.0])
    figure = _figure_of_progress({"model": evaluate_rewards(rewards, 0.5)})
    shown = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    assert shown == [["mean", "greedy", "best@2", "best@4"], ["pass@1", "pass@2", "pass@4"], ["passed", "not passed"]]
