import json
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Value

from tests.loops import stage_of
from topr_trl import load_rows, save_rows
from topr_trl.cli import main
from topr_trl.cli.parsing import parse
from topr_trl.cli.trial_report import _describe_recommendation, _results_as_json, _settings_of_arm, recommend
from topr_trl.data.tables import read_table
from topr_trl.evaluation.answers import encode
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline import trial as trials
from topr_trl.pipeline.arms import ARMS, RECIPES
from topr_trl.pipeline.lineage import lineage
from topr_trl.pipeline.settings import TrialArguments, stage_args
from topr_trl.pipeline.split import GIVEN_LOG_MU, Split
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.stages.score import ScoreArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments, trainer_of_rows
from topr_trl.pipeline.trial import Outcome, run_trial


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return a folder of scored rows: four completions for each of twelve problems."""
    folder = str(tmp_path_factory.mktemp("trial") / "rows")
    stage_of(
        "sample", SampleArguments(output_dir=folder, num_train_problems=12, num_shots=0, num_generations=4,
                                  max_new_tokens=80, use_cpu=True),
    ).run()  # fmt: skip
    stage_of("score", ScoreArguments(input=folder, output_dir=folder)).run()
    return folder


def trial(source, out, **more):
    quick = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 1,
             "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 8, "max_new_tokens": 80,
             "num_generations_eval": 2, "held_out_problems": 3, "trial_rows": 16}  # fmt: skip
    return TrialArguments(input=str(source), output_dir=str(out), **{**quick, **more})


# Rows.


def splitting(source, out, **more):
    return Split(trial(source, out, **more)).run()


def test_held_out_problems_are_not_trained_on(scored, tmp_path):
    found = splitting(scored, tmp_path)
    assert (found["by_answers"], found["rows"]) == (True, 16)
    training, problems = load_rows(tmp_path / "rows" / "training"), read_table(tmp_path / "rows" / "problems.parquet")
    assert (len(training), len(problems)) == (16, 3)
    assert not set(training["prompt"]) & set(problems["prompt"])
    assert set(Counter(training["prompt"]).values()) == {4}  # whole problems
    assert set(problems.column_names) == {"prompt", "answer", "problem_id"}
    assert list(lineage(tmp_path / "rows")) == ["sample", "score", "split"]
    assert splitting(scored, tmp_path) == found
    with pytest.raises(ValueError, match=r"trial_rows: 16 there, 17 now"):
        splitting(scored, tmp_path, trial_rows=17)


@pytest.mark.parametrize("given", ["mu_logps", "sampler_logps"])
def test_held_out_rows_keep_their_rewards_and_the_log_mu_that_they_brought(given, scored, tmp_path):
    rows = load_rows(scored).remove_columns(["answer", "problem_id", "sampler_logps"])
    own = [[-0.5] * len(ids) for ids in rows["completion_ids"]]
    save_rows(rows.add_column(given, own), tmp_path / "logged")
    log_mu = "trainer" if given == "mu_logps" else "sampler"
    assert splitting(tmp_path / "logged", tmp_path / "out", log_mu=log_mu)["by_answers"] is False
    held_out, training = (load_rows(tmp_path / "out" / "rows" / name) for name in ("held-out", "training"))
    assert len(held_out) == 12
    assert sorted(set(held_out["problem_id"])) == [0, 1, 2]
    assert held_out[GIVEN_LOG_MU][:] == [-0.5 * len(ids) for ids in held_out["completion_ids"]]
    assert not {"mu_logps", "sampler_logps"} & set(held_out.column_names)
    assert given in training.column_names
    with pytest.raises(ValueError, match="log_mu: None there, 'sampler' now" if given == "mu_logps" else "log_mu"):
        splitting(tmp_path / "logged", tmp_path / "out", log_mu="sampler" if given == "mu_logps" else "trainer")
    assert not set(training["prompt"]) & set(held_out["prompt"])


def test_another_task_is_another_split(scored, tmp_path):
    save_rows(load_rows(scored), tmp_path / "logged")  # without a manifest, which would name the task
    assert splitting(tmp_path / "logged", tmp_path)["by_answers"] is True
    with pytest.raises(ValueError, match=r"task: 'gsm8k' there, 'math' now"):
        splitting(tmp_path / "logged", tmp_path, task="math")


def test_rows_that_have_been_through_the_stages(scored, tmp_path, capsys):
    """A trial drops the columns that `curate` and `log-mu` added to the rows."""
    rows = load_rows(scored)
    some = [[-0.5] * len(ids) if n % 2 else None for n, ids in enumerate(rows["completion_ids"])]
    rows = rows.add_column("mu_logps", some).add_column("mu_fingerprint", ["x"] * len(rows))
    rows = rows.add_column("times_chosen", [0, 3] * 24)
    save_rows(rows.add_column("reward_after_baseline", [None, 2.0] * 24), tmp_path / "worked")
    splitting(tmp_path / "worked", tmp_path / "out", test_by="rewards", disable_tqdm=False)
    assert re.search("mu_logps.* not read.*\n.*starting model", capsys.readouterr().out)
    for name in ("training", "held-out"):
        columns = set(load_rows(tmp_path / "out" / "rows" / name).column_names)
        assert not {"mu_logps", "mu_fingerprint", "reward_after_baseline", "times_chosen", GIVEN_LOG_MU} & columns


def test_training_in_a_trial_does_not_repeat_messages(scored, tmp_path, capsys):
    splitting(scored, tmp_path / "trial")
    training = tmp_path / "trial" / "rows" / "training"
    for out, says in ((tmp_path / "own", True), (tmp_path / "trial" / "paper" / "model", False)):
        capsys.readouterr()
        trainer_of_rows(stage_args(TrainArguments, trial(training, out, disable_tqdm=False)))
        assert ("TOPR:" in capsys.readouterr().out) == says


def test_labels_are_rewards(scored, tmp_path):
    rows = load_rows(scored)
    plain = rows.select_columns(["prompt", "completion"]).add_column("label", [r > 0 for r in rows["reward"]])
    save_rows(plain, tmp_path / "labels")
    splitting(tmp_path / "labels", tmp_path)
    assert set(load_rows(tmp_path / "rows" / "training")["reward"]) == {1.0, -1.0}


@pytest.mark.parametrize(
    ("rewards", "left_out"),
    [([1.0, -1.0], set()), ([1.0, 0.0], {"paper"}), ([-1.0, -2.0], set()), ([0.2, 0.7], {"paper"}),
     ([0.2, 0.7, 0.4], {"paper", "balanced"})],
)  # fmt: skip
def test_settings_that_are_the_same_on_these_rows_are_not_tried(scored, tmp_path, rewards, left_out):
    rows = load_rows(scored).remove_columns("reward")
    save_rows(rows.add_column("reward", (rewards * 24)[:48]), tmp_path / "logged")
    found = splitting(tmp_path / "logged", tmp_path / "out", test_by="rewards")["settings"]
    assert set(found) == {arm.name for arm in ARMS} - left_out


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("answer", lambda row: "-1"),  # The judge does not agree with the rewards.
        ("answer", lambda row: "assert f(1) == 2"),
        ("answer", lambda row: None),  # An import writes an empty column if its format can have answers.
        ("completion", lambda row: None if row["sample_id"] == 0 else row["completion"]),
        ("completion", lambda row: row["completion_ids"]),
    ],
)
def test_rows_that_the_judge_cannot_judge_are_tested_by_their_rewards(scored, tmp_path, column, value):
    rows = load_rows(scored)
    values = [value(row) for row in rows]
    feature = None if any(values) else Value("string")
    save_rows(rows.remove_columns(column).add_column(column, values, feature=feature), tmp_path / "given")
    assert splitting(tmp_path / "given", tmp_path / "out")["by_answers"] is False
    with pytest.raises(ValueError, match=r"test_by='answers': (?s:.*)--task, or .* --test_by rewards"):
        splitting(tmp_path / "given", tmp_path / "other", test_by="answers")


# A value other than the default for each setting that determines the trained weights.
OTHER_VALUES = {
    "ratio_level": "segment", "segment_tokens": 16, "length_normalization": False, "log_mu": "sampler",
    "weight_decay": 0.1, "warmup_steps": 5, "max_steps": 7, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs":
    {"num_cycles": 2}, "optim": "adamw_torch", "optim_args": "a=1", "optim_target_modules": "all-linear",
    "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7, "max_grad_norm": 0.5, "num_train_epochs": 2.0,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_length": 100, "sort_by_length": False,
    "share_prompts": False, "shuffle_dataset": True, "train_sampling_strategy": "sequential", "data_seed": 3,
    "dataloader_drop_last": True, "router_aux_loss_coef": 0.1, "eos_token": "<e>", "pad_token": "<p>",
    "accelerator_config": {"even_batches": False}, "dtype": "bfloat16", "model_name_or_path": "org/model",
    "model_revision": "r1", "attn_implementation": "eager", "use_peft": True, "lora_r": 4, "lora_alpha": 8,
    "lora_dropout": 0.1, "lora_target_modules": ["q_proj", "v_proj"], "use_rslora": True, "load_in_4bit": True,
}  # fmt: skip


@pytest.mark.parametrize("arm", [ARMS[2], ARMS[-1]], ids=lambda arm: arm.name)
def test_the_recommended_settings_are_those_that_were_tried(tmp_path, arm):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    known = {each.name for each in fields(TrialArguments)}  # Older versions of TRL have fewer settings.
    given = {name: value for name, value in OTHER_VALUES.items() if name in known}
    given["chat_template_path"] = str(template)
    settings = _settings_of_arm(trial(tmp_path, tmp_path / "out", **given), arm)
    expected = {**given, **arm.settings}
    assert settings.pop("accelerator_config")["even_batches"] is expected.pop("accelerator_config")["even_batches"]
    assert {name: value for name, value in expected.items() if settings.get(name) != value} == {}
    file = tmp_path / "recommended.yaml"
    file.write_text(yaml.safe_dump(settings))
    read = parse(
        "train", ["--config", str(file), "--use_cpu", "--report_to", "none", "--input", "x", "--output_dir", "y"]
    )
    assert {name: value for name, value in settings.items() if getattr(read, name) != value} == {}


def test_settings_at_their_defaults_are_recommended_only_if_the_learning_rate_depends_on_them(tmp_path):
    settings = _settings_of_arm(
        TrialArguments(input="rows", output_dir=str(tmp_path), use_cpu=True, bf16=False), ARMS[2]
    )
    assert set(settings) == {
        "learning_rate", "bf16", "optim", "lr_scheduler_type", "max_grad_norm",
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    }  # fmt: skip


def test_a_trial_that_cannot_run_is_refused_first(scored, tmp_path):
    rows = load_rows(scored)
    save_rows(rows.filter(lambda row: row["problem_id"] < 5), tmp_path / "few")
    with pytest.raises(ValueError, match=r"needs rows of at least 6 problems, .*few has 5"):
        splitting(tmp_path / "few", tmp_path)
    assert not manifest.results(tmp_path / "rows")  # The user can then try other rows.
    save_rows(rows.remove_columns("answer"), tmp_path / "unknown")
    with pytest.raises(ValueError, match=r"need the columns prompt and answer \(text\) and completion"):
        splitting(tmp_path / "unknown", tmp_path, test_by="answers")
    save_rows(rows.remove_columns("reward").add_column("reward", [1.0] * len(rows)), tmp_path / "good")
    with pytest.raises(ValueError, match="There is nothing to choose between: the rewards of the 16 rows"):
        splitting(tmp_path / "good", tmp_path)
    single = rows.select(range(0, len(rows), 4)).remove_columns("reward").add_column("reward", [1.0, -1.0] * 6)
    save_rows(single, tmp_path / "single")
    with pytest.raises(ValueError, match="several completions of each problem"):
        splitting(tmp_path / "single", tmp_path, test_by="rewards")
    with pytest.raises(ValueError, match="set --input to their folder or file"):
        run_trial(TrialArguments(output_dir=str(tmp_path / "x"), use_cpu=True, bf16=False))
    with pytest.raises(ValueError, match="cannot be in the folder of the rows"):
        run_trial(trial(scored, Path(scored) / "out"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"eos_token .* would apply to training and not to sampling"):
        run_trial(trial(scored, tmp_path / "y", eos_token="7"))


# Recommendation.


def test_the_best_arm_and_those_that_cannot_be_told_from_it():
    rng = np.random.default_rng(0)
    problems = rng.random(200)  # easiness of each problem, the same for all arms
    arms = ARMS[:4]
    gains = dict(zip((None, *arms), (0.0, 0.10, 0.101, 0.05, -0.05), strict=True))
    values = {arm: problems + gain + rng.normal(0, 0.05, 200) for arm, gain in gains.items()}
    found = recommend(values)
    assert {found.best, *found.level} == {arms[0], arms[1]}
    assert found.arms[-1] == arms[3]
    assert found.behind[arms[2]].high < 0
    assert found.recommended == found.best
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares[arms[3]] == 0


def test_arms_that_differ_by_rounding_are_equal():
    shown = np.array([0.1 + 0.2, 0.3])
    values = {None: shown - 0.1, ARMS[0]: np.array([0.3, 0.3]), ARMS[1]: shown, ARMS[2]: shown[::-1]}
    found = recommend(values)
    assert found.best == ARMS[0]
    assert found.level == [ARMS[1], ARMS[2]]
    assert found.recommended.name == "share-50"
    assert [found.shares[arm] for arm in ARMS[:3]] == pytest.approx([1 / 3] * 3)


def test_on_ties_the_first_recipe_is_recommended():
    """Eight problems are too few to tell a lucky setting from the recipes."""
    start, lucky = np.linspace(0.2, 0.6, 8), ARMS[0].at(3.0)
    values = {None: start, lucky: start + np.tile([0.4, -0.1], 4)}
    named = {arm.name: arm for arm in ARMS}
    for name in reversed(RECIPES):
        arm = named[name].at(1 / 3)
        values[arm] = start + 0.1
        found = recommend(values)
        assert (found.best, found.recommended) == (lucky, arm)
        assert found.better_than_none


def test_a_trial_says_how_sure_it_is(tmp_path):
    start = np.linspace(0.2, 0.6, 40)
    args = trial(tmp_path, tmp_path)

    def said(gain, count):
        values = {None: start[:count], ARMS[0]: start[:count] + gain[:count]}
        return _describe_recommendation(args, Outcome(values, True, {}, 16, {}, "sample"), recommend(values))

    unsure, sure = np.tile([0.4, -0.3], 20), np.full(40, 0.1)
    assert "cannot be distinguished from the starting model" in said(unsure, 40)
    assert "With 8 held-out problems, the ranking is mostly chance" in said(sure, 8)
    assert not re.search("starting model|mostly chance", said(sure, 40))
    assert "is behind the starting model: the 95% interval excludes 0" in said(-sure, 40)


def test_a_setting_that_does_not_improve_on_the_starting_model_is_not_recommended():
    start, better, recipe = np.array([0.5, 0.5]), ARMS[0], next(arm for arm in ARMS if arm.name == RECIPES[0])
    found = recommend({None: start, better: np.array([1.0, 0.2]), recipe: np.array([0.0, 0.8])})
    assert found.level == [recipe]
    assert found.recommended == better
    assert found.better_than_none
    found = recommend({None: start, better: np.array([0.8, 0.1]), recipe: np.array([0.0, 0.8])})
    assert not found.better_than_none


# Greedy answers.


def outcome_of(greedy, decode="greedy"):
    values = {None: np.array([0.5, 0.0, 1.0, 0.5]), ARMS[0]: np.array([0.5, 0.5, 1.0, 1.0])}
    return Outcome(values, True, {}, 16, greedy, decode)


def test_greedy_accuracy_is_beside_that_of_samples(tmp_path):
    args = trial(tmp_path, tmp_path, temperature=0.7)
    right = {None: np.array([True, True, True, False]), ARMS[0]: np.array([True, False, False, False])}
    outcome = outcome_of(right)
    assert recommend(outcome.values).arms == [None, ARMS[0]]
    outcome = outcome_of(right, "sample")
    found = recommend(outcome.values)
    assert found.arms == [ARMS[0], None]
    header, best, before = _results_as_json(args, outcome, found)["table"]
    assert header[2:4] == ["correct answers at T=0 (%)", "correct answers at T=0.7 (%)"]
    assert best[2] == "25.0 ± 43.3"  # sqrt(0.25 · 0.75 / 4) = 0.2165
    assert before[2] == "75.0 ± 43.3"
    assert "--decode sample" in _describe_recommendation(args, outcome, found)
    plain = _results_as_json(args, outcome, found)["arms"]
    assert [arm["greedy"]["value"] for arm in plain] == [0.25, 0.75]
    without = outcome_of({})
    assert "correct answers at T=0 (%)" not in _results_as_json(args, without, found)["table"][0]
    assert [arm["greedy"] for arm in _results_as_json(args, without, found)["arms"]] == [None, None]


def test_greedy_answers_are_in_the_order_of_the_problems(scored, tmp_path, monkeypatch):
    samples = encode([["7"], ["8"], ["7"]], ["7"] * 3, problem_ids=[2, 0, 1])
    greedy = replace(samples, greedy_P=np.array([False, True, False]))
    for greedy_P, expected in ((greedy.greedy_P, [True, False, False]), (None, None)):
        monkeypatch.setattr(trials, "read_samples", lambda rows, right=greedy_P: replace(samples, greedy_P=right))
        outcome = trials.outcome_of(trial(scored, tmp_path), {"by_answers": True, "rows": 16}, [None])
        assert outcome.sampled[None].tolist() == [0.0, 1.0, 1.0]
        assert outcome.greedy == {} if expected is None else outcome.greedy[None].tolist() == expected


def test_held_out_problems_get_a_greedy_completion(scored, tmp_path):
    with pytest.raises(ValueError, match="decode='sample'"):
        trial(scored, tmp_path, greedy=False)
    for more, expected in (({}, True), ({"greedy": False, "decode": "sample"}, False)):
        sample, _ = trials.steps_of(trial(scored, tmp_path, **more), {"by_answers": True, "rows": 16}, [None])
        assert sample.stage.args.greedy == expected


# The command.


@pytest.fixture
def here(monkeypatch):
    """Run all stages in this process."""
    for name in stages.descriptions():
        monkeypatch.setattr(stages.load(name), "runs_apart", False)


@pytest.mark.slow
@pytest.mark.parametrize("test_by", ["answers", pytest.param("rewards", marks=pytest.mark.weekly)])
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
    assert len(best) == 1 + len(ARMS) + 2 * len(RECIPES)
    assert sum(arm["best_in_draws"] or 0 for arm in best) == pytest.approx(1)
    assert {arm["settings"]["learning_rate"] for arm in best if arm["settings"]} == {3.33e-4, 1e-3, 3e-3}
    assert {arm["settings"]["per_device_train_batch_size"] for arm in best if arm["settings"]} == {8}
    if recommended := [arm for arm in best if arm["recommended"]]:
        assert yaml.safe_load((out / "recommended.yaml").read_text()) == recommended[0]["settings"]
        assert "Recommended: " in said
    else:
        assert not (out / "recommended.yaml").exists()
        assert "Nothing is recommended: " in said
    assert ("estimated from the rewards" in said) == (test_by == "rewards")
    text = (out / "report.html").read_text()
    page = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert len(page["trial"]) == 1 + len(best)
    names = [column["name"] for column in page["sections"][0]["cards"][0]["columns"]]
    assert (names[0] == "before training") == (test_by == "answers")
    assert not list(out.rglob("*.safetensors"))  # Models are removed after their test.
    with pytest.raises(ValueError, match="were removed after use"):
        manifest.check_whole(out / "paper" / "model")
    main.main(command)
    again = capsys.readouterr().out
    test_steps = 2 if test_by == "answers" else 1
    steps_of_it = test_steps + (len(ARMS) + 2 * len(RECIPES)) * (1 + test_steps)
    assert again.count(f"/{steps_of_it}] ") == said.count(f"/{steps_of_it}] ") == steps_of_it
    assert again.count("done before") == steps_of_it
    for text in (said, again):
        assert re.search(r"^[\d,]+ problems:\n", text, re.MULTILINE)
    assert json.loads((out / "trial.json").read_text())["arms"] == best
    assert all((arm["greedy"] is None) == (test_by == "rewards") for arm in best)
    assert ("correct answers at T=0 (%)" in said) == (test_by == "answers")
    if test_by == "rewards":
        before = next(arm for arm in best if arm["settings"] is None)
        held_out = load_rows(out / "rows" / "held-out")
        assert before["mean"] == pytest.approx(np.mean(held_out["reward"]), abs=1e-4)
        assert before["effective_samples"] == pytest.approx(4, abs=1e-4)
