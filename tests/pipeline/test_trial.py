import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from topr_trl import load_rows, save_rows
from topr_trl.cli import main
from topr_trl.cli.trial import recommend
from topr_trl.data.tables import read_table
from topr_trl.evaluation.bootstrap import share_best
from topr_trl.pipeline import stages, steps
from topr_trl.pipeline.arguments import SampleArguments, ScoreArguments, TrialArguments
from topr_trl.pipeline.lineage import lineage
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.trial import ARMS, GIVEN_LOG_MU, run_trial, split


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Twelve problems with four completions each."""
    folder = str(tmp_path_factory.mktemp("trial") / "rows")
    stages.run(
        "sample", SampleArguments(output_dir=folder, num_train_problems=12, num_shots=0, num_generations=4,
                                  max_new_tokens=80, use_cpu=True),
    )  # fmt: skip
    stages.run("score", ScoreArguments(input=folder, output_dir=folder))
    return folder


def trial(source, out, **more):
    quick = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 1,
             "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 8, "max_new_tokens": 80,
             "num_generations_eval": 2, "held_out_problems": 3, "trial_rows": 16}  # fmt: skip
    return TrialArguments(input=str(source), output_dir=str(out), **{**quick, **more})


# Rows.


def test_held_out_problems_are_not_trained_on(scored, tmp_path):
    by_answers, count = split(trial(scored, tmp_path), Path(scored), tmp_path / "rows")
    assert (by_answers, count) == (True, 16)
    training, problems = load_rows(tmp_path / "rows" / "training"), read_table(tmp_path / "rows" / "problems.parquet")
    assert (len(training), len(problems)) == (16, 3)
    assert not set(training["prompt"]) & set(problems["prompt"])
    assert set(problems.column_names) == {"prompt", "answer", "problem_id"}
    assert list(lineage(tmp_path / "rows")) == ["sample", "score", "split"]
    again = split(trial(scored, tmp_path), Path(scored), tmp_path / "rows")
    assert again == (True, 16)
    with pytest.raises(ValueError, match=r"trial_rows: 16 there, 17 now"):
        split(trial(scored, tmp_path, trial_rows=17), Path(scored), tmp_path / "rows")


def test_held_out_rows_keep_their_rewards_and_the_log_mu_that_they_brought(scored, tmp_path):
    rows = load_rows(scored).remove_columns(["answer", "problem_id"])
    own = [[-0.5] * len(ids) for ids in rows["completion_ids"]]
    save_rows(rows.add_column("mu_logps", own), tmp_path / "logged")
    given = trial(tmp_path / "logged", tmp_path / "out")
    by_answers, _ = split(given, tmp_path / "logged", tmp_path / "out" / "rows")
    assert by_answers is False
    held_out, training = (load_rows(tmp_path / "out" / "rows" / name) for name in ("held-out", "training"))
    assert len(held_out) == 12
    assert sorted(set(held_out["problem_id"])) == [0, 1, 2]
    assert held_out[GIVEN_LOG_MU][:] == [-0.5 * len(ids) for ids in held_out["completion_ids"]]
    assert "mu_logps" not in held_out.column_names
    assert "mu_logps" in training.column_names
    assert not set(training["prompt"]) & set(held_out["prompt"])


def test_labels_are_rewards(scored, tmp_path):
    rows = load_rows(scored)
    plain = rows.select_columns(["prompt", "completion"]).add_column("label", [r > 0 for r in rows["reward"]])
    save_rows(plain, tmp_path / "labels")
    split(trial(tmp_path / "labels", tmp_path), tmp_path / "labels", tmp_path / "rows")
    assert set(load_rows(tmp_path / "rows" / "training")["reward"]) == {1.0, -1.0}


def test_what_cannot_be_tried_is_refused_first(scored, tmp_path):
    rows = load_rows(scored)
    save_rows(rows.filter(lambda row: row["problem_id"] < 5), tmp_path / "few")
    with pytest.raises(ValueError, match=r"needs at least 6; the rows of .*few are of 5"):
        split(trial(tmp_path / "few", tmp_path), tmp_path / "few", tmp_path / "rows")
    assert not list((tmp_path / "rows").glob("*"))  # it can be tried again with other rows
    save_rows(rows.remove_columns("answer"), tmp_path / "unknown")
    with pytest.raises(ValueError, match=r"needs the columns prompt \(text\), answer and extracted"):
        split(trial(tmp_path / "unknown", tmp_path, test_by="answers"), tmp_path / "unknown", tmp_path / "rows")
    with pytest.raises(ValueError, match="name their folder or file with --input"):
        run_trial(TrialArguments(output_dir=str(tmp_path / "x"), use_cpu=True, bf16=False))
    assert not (tmp_path / "x").exists()


def test_problems_that_have_their_prompts_are_sampled_as_they_are(scored, tmp_path):
    split(trial(scored, tmp_path), Path(scored), tmp_path / "rows")
    file = str(tmp_path / "rows" / "problems.parquet")
    args = SampleArguments(dataset_name=file, test_dataset_name=file, num_shots=3, use_cpu=True)
    assert load_problems(args, "test")["prompt"][:] == read_table(file)["prompt"][:]


# Recommendation.


def test_the_best_arm_and_those_that_cannot_be_told_from_it():
    rng = np.random.default_rng(0)
    problems = rng.random(200)  # how easy they are: the same for all
    arms = ARMS[:4]
    gains = dict(zip((None, *arms), (0.0, 0.10, 0.101, 0.05, -0.05), strict=True))
    values = {arm: problems + gain + rng.normal(0, 0.05, 200) for arm, gain in gains.items()}
    found = recommend(values)
    assert {found.best, *found.level} == {arms[0], arms[1]}
    assert found.arms[-1] == arms[3]
    assert found.behind[arms[2]].high < 0
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares[arms[3]] == 0


def test_shares_of_draws():
    assert share_best(np.array([[1.0, 1.0, 0.0]] * 5)).tolist() == [0.5, 0.5, 0.0]
    values = np.random.default_rng(0).normal([0.0, 0.1], 1, (400, 2))
    assert 0.5 < share_best(values)[1] < 1


# The command.


@pytest.fixture
def here(monkeypatch):
    """Stages run in this process, which is all that is different."""
    monkeypatch.setattr(steps, "_HERE", tuple(stages.STAGES))


@pytest.mark.parametrize("test_by", ["answers", "rewards"])
def test_a_trial(scored, tmp_path, here, capsys, test_by):
    out = tmp_path / "out"
    given = vars(trial(scored, out, test_by=test_by))
    names = ("input", "output_dir", "use_cpu", "bf16", "gradient_checkpointing", "max_steps", "disable_tqdm",
             "per_device_train_batch_size", "max_new_tokens", "num_generations_eval", "held_out_problems", "trial_rows",
             "test_by", "learning_rate")  # fmt: skip
    command = ["trial", *(part for name in names for part in (f"--{name}", str(given[name])))]
    main.main(command)
    said = capsys.readouterr().out
    best = json.loads((out / "trial.json").read_text())["arms"]
    assert len(best) == 1 + len(ARMS) + 4
    assert sum(arm["best_in_draws"] or 0 for arm in best) == pytest.approx(1)
    assert {arm["settings"]["learning_rate"] for arm in best if arm["settings"]} == {3.33e-4, 1e-3, 3e-3}
    recommended = yaml.safe_load((out / "recommended.yaml").read_text())
    assert recommended == next(arm["settings"] for arm in best if arm["settings"])
    assert "Recommended: " in said
    assert ("estimated from the rewards" in said) == (test_by == "rewards")
    page = (out / "trial.html").read_text()
    assert page.count("<tr>") == 1 + len(best)
    main.main(command)
    again = capsys.readouterr().out
    steps_of_it = (2 if test_by == "answers" else 1) + 10 * (3 if test_by == "answers" else 2)
    assert again.count(f"/{steps_of_it}] ") == said.count(f"/{steps_of_it}] ") == steps_of_it
    assert again.count("done before") == steps_of_it
    assert json.loads((out / "trial.json").read_text())["arms"] == best
    if test_by == "rewards":
        before = next(arm for arm in best if arm["settings"] is None)
        held_out = load_rows(out / "rows" / "held-out")
        assert before["mean"] == pytest.approx(np.mean(held_out["reward"]))
        assert before["effective_samples"] == pytest.approx(4)


def test_a_trial_is_started_in_one_process(scored, tmp_path, monkeypatch):
    now = trial(scored, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Start topr trial in one process"):
        run_trial(now)


def test_settings_that_a_trial_tries_are_not_set(tmp_path):
    for name in ("preset", "baseline", "effective_positive_share"):
        with pytest.raises(ValueError, match=f"There is no setting --{name}. It is a setting of topr"):
            main.main(["trial", f"--{name}", "1"])
