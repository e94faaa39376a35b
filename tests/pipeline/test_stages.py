import json
import shutil
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.loops import stage_of
from topr_trl import OfflineTOPRTrainer, load_rows, save_rows
from topr_trl.cli.evaluate import evaluate_command
from topr_trl.data.tables import shards_of
from topr_trl.evaluation.report import EVALUATION, read_evaluation
from topr_trl.pipeline import locks, manifest, shards
from topr_trl.pipeline.lineage import facts_of_sampling, first_weights, lineage, sampling_of, weights_of
from topr_trl.pipeline.settings import seed_of
from topr_trl.pipeline.shards import write_shard
from topr_trl.pipeline.stage_inputs import task_of_rows
from topr_trl.pipeline.stages import sample, train
from topr_trl.pipeline.stages.curate import CurateArguments
from topr_trl.pipeline.stages.evaluate import Evaluate, EvaluateArguments
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments, last_whole_checkpoint, trainer_of_rows
from topr_trl.tasks import arithmetic
from topr_trl.trainers.fingerprints import model_fingerprint, mu_fingerprint

pytestmark = pytest.mark.slow

PROBLEMS = {"num_train_problems": 10, "num_test_problems": 4, "num_shots": 0, "problems_per_shard": 4}
TRAINING = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 2,
            "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 8}  # fmt: skip


def sampling(out, **more):
    given = {"num_generations": 4, "max_new_tokens": 80, "use_cpu": True, **PROBLEMS}
    return SampleArguments(output_dir=str(out), **{**given, **more})


def scoring(out, source=None, **more):
    return ScoreArguments(input=str(source or out), output_dir=str(out), **more)


def curation(out, source=None, **more):
    return CurateArguments(input=str(source or out), output_dir=str(out), **more)


def training(out, source, **more):
    return TrainArguments(input=str(source), output_dir=str(out), **{**TRAINING, **more})


def run(stage, *args, **more):
    kinds = {"sample": sampling, "score": scoring, "curate": curation, "log-mu": training, "train": training}
    return stage_of(stage, kinds[stage](*args, **more)).run()


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return a folder of scored rows: four completions for each of ten problems, in three shards."""
    rollouts = tmp_path_factory.mktemp("run") / "rollouts"
    run("sample", rollouts)
    run("score", rollouts)
    return rollouts


def chosen(folder):
    rows = load_rows(folder)
    return rows.filter(lambda R: R is not None, input_columns="reward_after_baseline")


def test_sample_and_score(scored):
    rows = load_rows(scored)
    assert len(list(scored.glob("*.parquet"))) == 3
    assert rows["problem_id"][:] == [i for i in range(10) for _ in range(4)]
    assert len({tuple(ids) for ids in rows["completion_ids"]}) > 10
    assert {"reward", "verdict", "sampler_logps", "finish_reason"} <= set(rows.column_names)
    known = manifest.read(scored)
    assert list(known.stages) == ["sample", "score"]
    assert known.stages["score"]["rows"] == 40
    counts = known.stages["score"]["scored"]
    assert {verdict: counts[verdict] for verdict in set(rows["verdict"])} == Counter(rows["verdict"])
    assert sum(counts.values()) == 40


@pytest.mark.parametrize(("answer", "says"), [("It is 2.", True), ("The answer is 2.", False)])
def test_mostly_invalid_answers_name_what_the_judge_reads(answer, says, tmp_path):
    rows = Dataset.from_dict({"prompt": ["1+1?"], "completion": [answer], "answer": ["2"]})
    save_rows(rows, tmp_path / "rows")
    done = Score(ScoreArguments(input=str(tmp_path / "rows"), output_dir=str(tmp_path / "out"))).run()
    assert ("'The answer is'" in Score.summary(done)) == says


def test_stages_add_columns_to_the_rows_and_keep_them_once(scored, tmp_path):
    """Stages give the same rows in place and in separate folders. pandas and datasets can read the folders."""
    rollouts = shutil.copytree(scored, tmp_path / "rollouts")
    before = load_rows(scored)
    run("curate", rollouts, curation="uniform", iteration_size=25)
    run("curate", tmp_path / "apart", scored, curation="uniform", iteration_size=25)
    run("log-mu", rollouts, rollouts)
    run("log-mu", tmp_path / "log_mu", tmp_path / "apart")
    inside, apart = pd.read_parquet(rollouts), pd.read_parquet(tmp_path / "log_mu")
    assert inside.drop(columns="mu_logps").equals(apart.drop(columns="mu_logps"))
    assert list(map(str, inside["mu_logps"])) == list(map(str, apart["mu_logps"]))
    assert inside["completion"].tolist() == before["completion"][:]
    assert inside["reward_after_baseline"].count() == 25
    rows = load_dataset("parquet", data_files=str(rollouts / "*.parquet"), split="train", cache_dir=str(tmp_path / "c"))
    assert len(rows) == 40
    assert len(list(rollouts.glob("*.parquet"))) == 3
    assert [path.name for path in rollouts.iterdir() if path.is_dir()] == []
    assert list(manifest.read(rollouts).stages) == ["sample", "score", "curate", "log-mu"]
    assert manifest.read(tmp_path / "log_mu").stages["log-mu"]["sources"] == {"input": "../apart"}
    assert list(lineage(tmp_path / "log_mu")) == ["sample", "score", "curate", "log-mu"]


@pytest.mark.parametrize("stage", ["score", "curate", "log-mu"])
def test_a_stage_that_is_killed_among_its_shards_goes_on(scored, tmp_path, monkeypatch, stage):
    rollouts = tmp_path / "rollouts"
    run("sample", rollouts)
    order = ["score", "curate", "log-mu"]
    for before in order[: order.index(stage)]:
        run(before, rollouts, *([rollouts] if before == "log-mu" else []))
    where = [rollouts] if stage == "log-mu" else []
    written = []

    def killed(table, path, name):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write_shard(table, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            run(stage, rollouts, *where)
    times = [path.stat().st_mtime_ns for path in written]
    with pytest.raises(ValueError, match="is not finished"):
        manifest.check_whole(rollouts)
    assert load_rows(rollouts)["completion_ids"][:] == load_rows(scored)["completion_ids"][:]
    run(stage, rollouts, *where)
    assert [path.stat().st_mtime_ns for path in written] == times  # These shards were kept.
    for rest in order[order.index(stage) + 1 :]:
        run(rest, rollouts, *([rollouts] if rest == "log-mu" else []))
    rows = load_rows(rollouts)
    assert rows["verdict"][:] == load_rows(scored)["verdict"][:]
    assert [mu is None for mu in rows["mu_logps"]] == [R > 0 for R in rows["reward"]]


def test_a_killed_stage_makes_only_the_shards_that_are_missing(scored, tmp_path, monkeypatch):
    whole = load_rows(scored)["completion_ids"][:]
    run("sample", tmp_path)
    shards = sorted(tmp_path.glob("*.parquet"))
    shards[1].unlink()
    before = [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])]
    run("sample", tmp_path)
    assert [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])] == before
    assert load_rows(tmp_path)["completion_ids"][:] == whole
    monkeypatch.setattr("topr_trl.pipeline.stages.sample._sampler", None)  # A finished stage loads no model.
    run("sample", tmp_path)


def test_greedy_rows_are_in_the_shards_of_their_problems(scored, tmp_path):
    how = {"greedy": True, "num_generations": 4}
    run("sample", tmp_path, **how)
    rows = load_rows(tmp_path)
    assert rows["temperature"][:] == [1.0, 1.0, 1.0, 1.0, 0.0] * 10
    assert rows["problem_id"][:] == [i for i in range(10) for _ in range(5)]
    assert [pq.read_metadata(path).num_rows for path in sorted(tmp_path.glob("*.parquet"))] == [20, 20, 10]
    # The sampled rows equal those of a folder without greedy rows.
    sampled = rows.filter(lambda temperature: temperature > 0, input_columns="temperature")
    assert sampled["completion_ids"][:] == load_rows(scored)["completion_ids"][:]
    sorted(tmp_path.glob("*.parquet"))[1].unlink()
    run("sample", tmp_path, **how)
    assert load_rows(tmp_path).to_list() == rows.to_list()
    assert facts_of_sampling(sampling_of(tmp_path))["completions per prompt"] == "4, and one greedy completion"
    # Greedy rows are scored and evaluated, but not trained on.
    run("score", tmp_path)
    for use in (lambda: run("curate", tmp_path), lambda: run("log-mu", tmp_path, tmp_path),
                lambda: run("train", tmp_path / "model", tmp_path)):  # fmt: skip
        with pytest.raises(ValueError, match=r"`temperature` must hold numbers above 0; row 4 holds 0\.0 .*greedy"):
            use()
    done = stage_of("evaluate", EvaluateArguments(input=str(tmp_path), output_dir=str(tmp_path / "results"))).run()
    right = [row["verdict"] == "correct" for row in load_rows(tmp_path) if row["temperature"] == 0]
    assert done["greedy"].startswith(f"{10 * sum(right)}.0% ± ")
    assert done["rows"] == 50
    assert Evaluate.summary(done) == f"greedy {done['greedy']}, pass@1 {done['pass@1']}"


def test_a_shard_that_is_lost_later_is_made_again_by_every_stage(scored, tmp_path):
    rollouts = shutil.copytree(scored, tmp_path / "rollouts")
    run("curate", rollouts)
    run("log-mu", rollouts, rollouts)
    before = load_rows(rollouts)
    for shard in (0, 1):
        sorted(rollouts.glob("*.parquet"))[shard].unlink()
        for stage in ("sample", "score", "curate", "log-mu"):
            run(stage, rollouts, *([rollouts] if stage == "log-mu" else []))
        assert load_rows(rollouts).to_list() == before.to_list()


@pytest.mark.parametrize(
    ("there", "stage"),
    [("curate", "score"), ("log-mu", "score"), ("log-mu", "curate"), ("curate", "sample"), ("score", "train"),
     ("train", "sample")],
)  # fmt: skip
def test_a_stage_neither_removes_nor_mixes_results_of_other_stages(scored, tmp_path, there, stage):
    folder = tmp_path / "there"
    run(there, folder, scored)
    before = manifest.fingerprint(folder)
    source = [folder] if stage in ("curate", "train") else []
    with pytest.raises(ValueError, match=rf"(?s)topr {there}.*output_dir"):
        run(stage, folder, *source)
    assert manifest.fingerprint(folder) == before


def test_a_stage_reads_another_folder_only_into_a_folder_of_its_own(scored, tmp_path):
    run("score", tmp_path, scored)
    with pytest.raises(ValueError, match=r"(?s)topr score.*output_dir"):
        run("curate", tmp_path, scored)
    run("curate", tmp_path)
    assert manifest.read(tmp_path).finished


def test_a_stage_that_leaves_out_later_columns_says_so_and_they_are_not_in_the_lineage(scored, tmp_path):
    run("curate", tmp_path / "chosen", scored, curation="positives")
    with pytest.warns(UserWarning, match="leaves out .* topr curate"):
        run("score", tmp_path / "again", tmp_path / "chosen")
    assert "reward_after_baseline" not in load_rows(tmp_path / "again").column_names
    assert set(lineage(tmp_path / "again")) == {"sample", "score"}
    assert set(lineage(tmp_path / "chosen")) == {"sample", "score", "curate"}


def test_a_stage_that_made_nothing_can_be_tried_again_with_other_settings(scored, tmp_path):
    rollouts = shutil.copytree(scored, tmp_path / "rollouts")
    before = manifest.fingerprint(rollouts)
    with pytest.raises(ValueError, match="chose no row"):
        run("curate", rollouts, baseline=2.0, curation="positives")
    assert manifest.fingerprint(rollouts) == before
    manifest.check_whole(rollouts)  # Other stages can read the folder.
    with pytest.raises(ValueError, match="longer than max_length"):
        run("train", tmp_path / "model", scored, max_length=3)
    run("train", tmp_path / "model", scored)
    # A stage that was killed before it wrote a shard can restart with other settings.
    manifest.begin(rollouts, "curate", {"baseline": "2.0"}, has_results=False)
    run("curate", rollouts, curation="uniform", iteration_size=20)
    with pytest.raises(ValueError, match="holds results for other settings"):
        run("curate", rollouts, curation="uniform", iteration_size=21)


def test_rows_that_have_log_mu_are_chosen_from_again(scored, tmp_path, model):
    run("curate", tmp_path / "first", scored, curation="uniform", iteration_size=15)
    run("log-mu", tmp_path / "first", tmp_path / "first")
    run("curate", tmp_path / "second", tmp_path / "first", curation="uniform", iteration_size=30, seed=1)
    assert "mu_logps" not in load_rows(tmp_path / "second").column_names
    run("log-mu", tmp_path / "second", tmp_path / "second")
    rows = chosen(tmp_path / "second")
    assert [mu is None for mu in rows["mu_logps"]] == [R > 0 for R in rows["reward"]]
    # If log μ came with the rows, it is kept.
    table = pa.concat_tables([pq.read_table(shard) for shard in shards_of(scored)])
    (tmp_path / "brought").mkdir()
    pq.write_table(table.append_column("mu_logps", table["sampler_logps"]), tmp_path / "brought" / "rows.parquet")
    run("curate", tmp_path / "third", tmp_path / "brought", curation="uniform", iteration_size=15)
    run("log-mu", tmp_path / "third", tmp_path / "third")
    run("curate", tmp_path / "fourth", tmp_path / "third", curation="uniform", iteration_size=30)
    assert load_rows(tmp_path / "fourth")["mu_logps"][:] == table["sampler_logps"].to_pylist()


def test_work_of_a_loop_that_was_killed_after_a_stage_is_removed(scored, tmp_path):
    rollouts = shutil.copytree(scored, tmp_path / "rollouts")
    (rollouts / manifest.WORK).mkdir()
    stage = stage_of("score", scoring(rollouts))
    assert stage.is_finished()
    stage.clean_up()
    assert not (rollouts / manifest.WORK).exists()


def test_workers_share_the_shards(scored, tmp_path):
    run("sample", tmp_path, worker="7/8")  # There are only three shards.
    assert not list(tmp_path.glob("*.parquet"))
    for k in (1, 0):
        run("sample", tmp_path, worker=f"{k}/2")
        assert len(list(tmp_path.glob("*.parquet"))) == (1 if k else 3)
        assert manifest.read(tmp_path).finished == (k == 0)  # The last worker finishes the stage.
    assert load_rows(tmp_path)["completion_ids"][:] == load_rows(scored)["completion_ids"][:]


def test_seeds_of_stages_shards_splits_and_iterations_differ():
    seeds = []
    for iteration in range(4):
        for split in ("train", "test"):
            seeds += [seed_of("sample", 42, iteration, split, shard) for shard in range(50)]
        seeds += [seed_of("curate", 42, iteration), seed_of("train", 42, iteration)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**31


def test_going_on_with_another_number_of_processes_is_an_error(scored, tmp_path, monkeypatch):
    """The number of processes is no input of the stage, so the checkpoint has the rows per step."""
    now = training(tmp_path / "model", scored, save_steps=1, max_steps=1)
    trainer_of_rows(now).train()
    monkeypatch.setattr(OfflineTOPRTrainer, "_rows_per_step", 8 * now.per_device_train_batch_size)
    with pytest.raises(ValueError, match=rf"processes\) is {now.per_device_train_batch_size} in the checkpoint"):
        trainer_of_rows(now).train(last_whole_checkpoint(tmp_path / "model" / "work", PartialState()))


def test_balanced_rows_are_trained_on_as_often_as_they_were_chosen(scored, tmp_path, model):
    folder = shutil.copytree(scored, tmp_path / "rows")
    run("curate", folder, curation="balanced")
    rows = chosen(folder)
    total = sum(rows["times_chosen"])
    assert total > len(rows)
    assert manifest.read(folder).stages["curate"]["chosen"] == total
    assert load_rows(folder).filter(lambda R: R is None, input_columns="reward_after_baseline")["times_chosen"][:] == [
        0
    ] * (40 - len(rows))
    done = run("train", tmp_path / "model", folder)
    assert done["rows"] == total
    run("curate", tmp_path / "again", folder, curation="none")
    assert "times_chosen" not in load_rows(tmp_path / "again").column_names
    save_rows(rows, tmp_path / "saved")  # The saved rows do not list their stages.
    run("curate", tmp_path / "all", tmp_path / "saved", curation="none")
    assert load_rows(tmp_path / "all")["times_chosen"][:] == [1] * len(rows)


def test_rollouts_of_several_rows_are_chosen_whole(scored, tmp_path):
    table = pa.concat_tables([pq.read_table(shard) for shard in shards_of(scored)])
    halves = table.append_column("rollout_id", [list(range(40))])
    (tmp_path / "rows").mkdir()
    for k in range(2):
        pq.write_table(halves, tmp_path / "rows" / f"part-{k}.parquet")
    run("curate", tmp_path / "curated", tmp_path / "rows", curation="repeated_positives", iteration_size=60)
    rows = load_rows(tmp_path / "curated")
    times = np.array(rows["times_chosen"])
    assert times[:40].tolist() == times[40:].tolist()
    assert times[:40].sum() == 60
    done = run("train", tmp_path / "model", tmp_path / "curated")
    assert done["rows"] == 60


@pytest.mark.parametrize(("share", "lacking"), [(None, []), (0.5, ["sample_id"]), (0.5, ["problem_id", "sample_id"])])
def test_chosen_rows_do_not_depend_on_the_shards(scored, tmp_path, share, lacking):
    table = pa.concat_tables([pq.read_table(shard) for shard in shards_of(scored)])
    table, one = table.drop_columns(lacking), tmp_path / "one.parquet"
    pq.write_table(table, one)
    scored = tmp_path / "cut"  # The cut is in the middle of a problem.
    scored.mkdir()
    for k, rows in enumerate((table.slice(0, 18), table.slice(18, 0), table.slice(18))):
        pq.write_table(rows, scored / f"part-{k}.parquet")
    how = {"curation": "anna_karenina", "iteration_size": 20, "effective_positive_share": share}
    run("curate", tmp_path / "a", scored, **how)
    run("curate", tmp_path / "b", one, **how)
    a, b = chosen(tmp_path / "a"), chosen(tmp_path / "b")
    for name in ("completion_ids", "reward_after_baseline"):
        assert a[name][:] == b[name][:]
    if share:
        rewards = np.array(a["reward_after_baseline"])
        assert rewards[rewards > 0].sum() / np.abs(rewards).sum() == pytest.approx(share)


def test_log_mu_train_evaluate(scored, tmp_path, model):
    rollouts = shutil.copytree(scored, tmp_path / "rollouts")
    run("curate", rollouts, curation="uniform", iteration_size=30)
    run("log-mu", rollouts, rollouts)
    rows = load_rows(rollouts)
    assert len(rows) == 40
    assert set(rows["mu_fingerprint"]) == {mu_fingerprint(model, 1.0)}
    for row in rows:
        if row["reward_after_baseline"] is None or row["reward"] > 0:
            assert row["mu_logps"] is None
        else:  # The sampler used the same precision, but other shapes.
            assert row["mu_logps"] == pytest.approx(row["sampler_logps"], abs=1e-3)
    assert sum(mu is not None for mu in rows["mu_logps"]) > 10
    distance = manifest.read(rollouts).stages["log-mu"]["sampler_distance"]
    assert 0 < distance["token"] < 1e-4
    assert not (rollouts / manifest.WORK).exists()

    run("train", tmp_path / "model", rollouts, log_completions=True, logging_steps=2)
    assert pq.read_metadata(tmp_path / "model" / "completions" / "completions_00002.parquet").num_rows == 8
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model_fingerprint(trained) != model_fingerprint(model)
    assert json.loads((tmp_path / "model" / "trainer_state.json").read_text())["log_history"]
    assert list(lineage(tmp_path / "model")) == ["sample", "score", "curate", "log-mu", "train"]

    test = tmp_path / "test"
    run("sample", test, model_name_or_path=str(tmp_path / "model"), split="test", num_generations=3)
    run("score", test)
    stage_of("evaluate", EvaluateArguments(input=str(test), output_dir=str(tmp_path / "results"))).run()
    result = json.loads((tmp_path / "results" / "evaluation.json").read_text())
    assert (result["num_problems"], result["num_samples"]) == (4, 3)
    assert weights_of(sampling_of(tmp_path / "results")) == {"weights": manifest.fingerprint(tmp_path / "model")}
    assert first_weights(tmp_path / "model") == {"model": "the bundled model of 0.3", "revision": "main"}

    following = {"model_name_or_path": str(tmp_path / "model"), "iteration": 2, "max_steps": 1}
    with pytest.warns(UserWarning, match="on 4 rows per step, and the iteration before on 8"):
        run("train", tmp_path / "next", scored, **following, per_device_train_batch_size=4)


def test_an_adapter_is_merged(scored, tmp_path):
    pytest.importorskip("peft")
    peft = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    more = {"model_revision": "v1", "chat_template_path": str(template)}
    run("train", tmp_path / "model", scored, **peft, **more)
    base = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if name.endswith(("q_proj.weight", "v_proj.weight"))}
    # PEFT loads this revision of the base model to merge the adapter.
    assert json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())["revision"] == "v1"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == template.read_text()


def test_settings_without_effect_on_the_results_are_no_input(scored, tmp_path):
    test = {"split": "test"}
    before = stage_of("sample", sampling(tmp_path, **test)).inputs()
    assert (
        stage_of("sample", sampling(tmp_path / "other", num_train_problems=99, worker="0/2", **test)).inputs() == before
    )
    assert stage_of("sample", sampling(tmp_path, num_generations=64, **test)).inputs() != before
    first = stage_of("train", training(tmp_path / "a", scored)).inputs()
    same = {"logging_steps": 7, "save_steps": 9, "log_completions": True, "num_completions_to_print": 2,
            "report_to": "none", "dataloader_num_workers": 2, "per_device_eval_batch_size": 64}  # fmt: skip
    assert stage_of("train", training(tmp_path / "b", scored, **same)).inputs() == first
    for name, value in {"learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 2.0, "num_train_epochs": 2.0,
                        "seed": 1, "use_peft": True, "dtype": "bfloat16"}.items():  # fmt: skip
        assert stage_of("train", training(tmp_path / "b", scored, **{name: value})).inputs() != first, name
    assert json.loads(json.dumps(first)) == first


def test_every_input_is_a_setting():
    """Stages skip names that a release of TRL or transformers has dropped, so a misspelled name would go unnoticed."""
    names = {field.name for field in fields(TrainArguments)} | {field.name for field in fields(SampleArguments)}
    known_elsewhere = {"tf32", "lr_scheduler_kwargs", "train_sampling_strategy", "optim_target_modules"}
    assert set(train.RESULT) | set(sample._INPUTS) <= names | known_elsewhere


def test_rows_of_other_people(tmp_path):
    # The rows have only text and rewards, without ids.
    rows = {"prompt": ["1 + 1 ="] * 3 + ["2 + 2 ="] * 3, "completion": [" 2", " 3", " 4", " 4", " 5", " 6"],
            "reward": [1.0, -1.0, -1.0] * 2}  # fmt: skip
    source = tmp_path / "theirs.parquet"
    pq.write_table(pa.table(rows), source)
    rollouts = tmp_path / "rollouts"
    done = run("score", rollouts, source)
    assert done["scored"] == {"correct": 0, "incorrect": 0, "invalid": 0, "kept": 6}
    run("curate", rollouts, curation="anna_karenina", iteration_size=4)
    assert sorted(chosen(rollouts)["reward"]) == [-1.0, -1.0, 1.0, 1.0]
    run("log-mu", rollouts, rollouts)
    run("train", tmp_path / "model", rollouts)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_rows_are_scored_by_their_task(scored, tmp_path):
    pytest.importorskip("math_verify")
    rows = {
        "prompt": ["1/2 + 1/4 ="] * 2,
        "completion": [r"\boxed{0.75}", "The answer is 4."],
        "answer": [r"\frac34"] * 2,
    }
    pq.write_table(pa.table(rows), tmp_path / "theirs.parquet")
    now = scoring(tmp_path / "math", tmp_path / "theirs.parquet", task="math")
    stage_of("score", now).run()
    assert load_rows(tmp_path / "math")["verdict"][:] == ["correct", "invalid"]
    assert stage_of("score", now).inputs()["task"] == "math"
    # These rows were sampled for the built-in problems.
    assert stage_of("score", scoring(tmp_path / "gsm8k", scored)).inputs()["task"] == "gsm8k"
    with pytest.raises(ValueError, match=r"--task math: .*sampled for the task gsm8k"):
        stage_of("score", scoring(tmp_path / "gsm8k", scored, task="math")).inputs()
    sampled = tmp_path / "sampled"
    manifest.begin(sampled, "sample", {"task": "math"})
    save_rows(Dataset.from_dict(rows), sampled)
    manifest.finish(sampled, "sample", 2)
    evaluate_command(EvaluateArguments(input=str(sampled), output_dir=str(tmp_path / "results"), use_cpu=True))
    assert read_evaluation(tmp_path / "results" / EVALUATION).pass_at[1].value == 0.5
    run("score", tmp_path / "elsewhere", sampled)
    assert task_of_rows(tmp_path / "elsewhere", None) == "math"


@pytest.mark.parametrize(
    ("is_deepspeed", "settings", "wrong"),
    [(True, {}, True), (True, {"use_peft": True}, False), (False, {}, False)],
)
def test_training_that_would_save_no_weights_is_refused(tmp_path, monkeypatch, is_deepspeed, settings, wrong):
    plugins = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3, zero3_save_16bit_model=False))
    trainer = Mock(accelerator=SimpleNamespace(state=plugins), is_deepspeed_enabled=is_deepspeed,
                   train=Mock(side_effect=InterruptedError))  # fmt: skip
    monkeypatch.setattr(train, "trainer_of_rows", lambda _: trainer)
    with pytest.raises(ValueError if wrong else InterruptedError, match="save no whole weights" if wrong else None):
        stage_of("train", training(tmp_path, tmp_path, **settings)).make()


def test_a_torn_checkpoint_is_not_resumed_from(tmp_path):
    for step, state in ((2, "{}"), (4, '{"global_step": 4}'), (10, '{"global'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state:
            (folder / "trainer_state.json").write_text(state)
    assert last_whole_checkpoint(tmp_path, PartialState()).endswith("checkpoint-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_a_baseline_given_to_train_is_applied_to_rows_that_were_not_curated(scored, tmp_path):
    def rewards(name, source, **more):
        return sorted(set(trainer_of_rows(training(tmp_path / name, source, **more)).train_dataset["reward"]))

    assert rewards("model", scored, baseline=0.5) == [-1.5, 0.5]
    run("curate", tmp_path / "curated", scored, baseline=0.5)
    assert rewards("other", tmp_path / "curated", baseline=0.5) == [-1.5, 0.5]
    assert rewards("silent", tmp_path / "curated") == [-1.5, 0.5]
    assert rewards("same", tmp_path / "curated", baseline=".50") == [-1.5, 0.5]
    refused = r"baseline=0\.9, but topr curate .*curated with baseline=0\.5"
    with pytest.raises(ValueError, match=refused):
        rewards("unheard", tmp_path / "curated", baseline=0.9)
    with pytest.raises(ValueError, match=refused):  # also in place
        run("log-mu", tmp_path / "curated", tmp_path / "curated", baseline=0.9)


def test_log_mu_of_rollouts_of_several_rows_is_refused(scored, tmp_path):
    table = pa.concat_tables([pq.read_table(shard) for shard in shards_of(scored)])
    halves = table.append_column("rollout_id", pa.array([n // 2 for n in range(len(table))]))
    same = pa.array([float(n % 4 < 2) for n in range(len(table))])
    halves = halves.set_column(halves.schema.get_field_index("reward"), "reward", same)
    pq.write_table(halves, tmp_path / "halves.parquet")
    with pytest.raises(ValueError, match=r"rollout_id.*topr train computes log μ"):
        run("log-mu", tmp_path / "mu", tmp_path / "halves.parquet")


def test_log_mu_of_rows_that_name_a_model_and_have_none(scored, tmp_path):
    (tmp_path / "bare").mkdir()
    for shard in scored.glob("*.parquet"):
        rows = pq.read_table(shard)
        pq.write_table(
            rows.append_column("mu_fingerprint", pa.array(["x"] * len(rows))), tmp_path / "bare" / shard.name
        )
    run("log-mu", tmp_path / "log_mu", tmp_path / "bare")
    rows = load_rows(tmp_path / "log_mu")
    assert "mu_logps" in rows.column_names
    assert "x" not in rows["mu_fingerprint"][:]


def test_a_file_of_problems_is_known_by_its_content(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    args = sampling(tmp_path / "out", dataset_name=str(file), test_dataset_name=str(file))
    of_loop = stage_of("sample", args)
    manifest.begin(tmp_path / "out", "sample", of_loop.inputs())
    file.write_text('{"question": "1 + 2?", "answer": "#### 3"}\n')
    now = stage_of("sample", args).inputs()
    with pytest.raises(ValueError, match=r"other settings \(dataset_name or test_dataset_name: not the same files\)"):
        manifest.begin(tmp_path / "out", "sample", now)
    with pytest.raises(ValueError, match=r"problems of .* have changed since this run"):  # as in a running loop
        of_loop.inputs()


def test_a_second_worker_with_other_settings_is_refused_before_the_first_shard(tmp_path):
    now = sampling(tmp_path, worker="0/2")
    with locks.lock(tmp_path, "-0-of-2"):  # The first worker is loading its model.
        manifest.begin(tmp_path, "sample", stage_of("sample", now).inputs())
        with pytest.raises(ValueError, match=r"temperature: 1.0 there, 0.2 now"):
            stage_of("sample", sampling(tmp_path, worker="1/2", temperature=0.2)).run()


def test_verdicts_of_others_are_no_business_of_rows_that_keep_their_reward(tmp_path):
    rows = {"prompt": ["a", "b"], "completion": ["c", "d"], "reward": [1.0, 0.0], "verdict": ["pass", "fail"]}
    pq.write_table(pa.table(rows), tmp_path / "theirs.parquet")
    assert run("score", tmp_path / "rows", tmp_path / "theirs.parquet")["scored"]["kept"] == 2
