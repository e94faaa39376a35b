import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from topr_trl import OfflineTOPRConfig, SamplingArguments, load_candidates
from topr_trl.checkpoints import model_fingerprint
from topr_trl.cli import commands
from topr_trl.cli import main as cli
from topr_trl.generation.vllm import VLLMArguments
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import Settings, StageArguments, inputs_of
from topr_trl.tasks import arithmetic


def settings(out, source=None, model=None, **training):
    stage = StageArguments(
        num_train_problems=10, num_test_problems=4, num_shots=0, problems_per_shard=4, eval_samples=3,
        output=str(out), input=str(source) if source else None,
    )  # fmt: skip
    defaults = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_steps": 2,
                "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 8}  # fmt: skip
    return Settings(
        stage, SamplingArguments(num_candidates=4, max_new_tokens=80), VLLMArguments(),
        OfflineTOPRConfig(str(out), **{**defaults, **training}), ModelConfig(model_name_or_path=model, dtype="float32"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Ten problems with four candidates each, in three shards."""
    root = tmp_path_factory.mktemp("run")
    stages.run("sample", settings(root / "candidates"))
    stages.run("score", settings(root / "scored", root / "candidates"))
    return root / "scored"


def test_sample_and_score(scored):
    rows = load_candidates(scored)
    assert len(list(scored.glob("*.parquet"))) == 3
    assert rows["problem_id"][:] == [i for i in range(10) for _ in range(4)]
    assert len({tuple(ids) for ids in rows["completion_ids"]}) > 10
    assert {"reward", "verdict", "sampler_logps", "finish_reason"} <= set(rows.column_names)
    assert manifest.read(scored)["rows"] == 40


def test_a_killed_stage_makes_only_the_shards_that_are_missing(scored, tmp_path, monkeypatch):
    whole = load_candidates(scored)["completion_ids"][:]
    now = settings(tmp_path / "candidates")
    stages.run("sample", now)
    shards = sorted((tmp_path / "candidates").glob("*.parquet"))
    shards[1].unlink()
    before = [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])]
    stages.run("sample", now)
    assert [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])] == before
    assert load_candidates(tmp_path / "candidates")["completion_ids"][:] == whole
    monkeypatch.setattr(stages, "_sampler", None)  # finished: no model is loaded
    stages.run("sample", now)


def test_workers_share_the_shards(scored, tmp_path):
    for k in (1, 0):
        now = settings(tmp_path)
        now.stage.worker = f"{k}/2"
        stages.run("sample", now)
        assert len(list(tmp_path.glob("*.parquet"))) == (1 if k else 3)
    assert manifest.read(tmp_path)["files"] is None  # open: who started the workers finishes
    stages.run("sample", settings(tmp_path))
    assert load_candidates(tmp_path)["completion_ids"][:] == load_candidates(scored)["completion_ids"][:]


def test_seeds_of_stages_shards_splits_and_iterations_differ(tmp_path):
    seeds = []
    for iteration in range(4):
        for split in ("train", "test"):
            now = settings(tmp_path)
            now.stage.iteration, now.stage.split = iteration, split
            seeds += [now.seed("sample", shard) for shard in range(50)] + [now.seed("curate"), now.seed("train")]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**31


def test_going_on_with_another_number_of_rows_a_step_is_an_error(scored, tmp_path):
    stages.run("curate", settings(tmp_path / "curated", scored))
    now = settings(tmp_path / "model", tmp_path / "curated", gradient_accumulation_steps=2)
    trainer, rows = stages._trainer(now), 2 * now.training.per_device_train_batch_size

    def on(processes):
        return SimpleNamespace(num_processes=processes, is_main_process=True, wait_for_everyone=lambda: None)

    for _ in range(2):
        stages._check_batch(trainer, tmp_path, on(1))
    with pytest.raises(ValueError, match=f"started with {rows} rows a step, and now there are {8 * rows}"):
        stages._check_batch(trainer, tmp_path, on(8))


def test_curate_applies_baseline_and_rule(scored, tmp_path):
    stages.run("curate", settings(tmp_path, scored, baseline="mean", curation="uniform", iteration_size=25))
    rows, before = load_candidates(tmp_path), load_candidates(scored)
    assert len(rows) == 25
    mean = np.mean(before["reward"])
    assert rows["reward"][:] == pytest.approx([raw - mean for raw in rows["raw_reward"]])
    assert 0 < mean + 1 < 2
    keys = list(zip(rows["problem_id"], rows["sample_id"], strict=True))
    assert len(set(keys)) == 25
    assert keys == sorted(keys)


@pytest.mark.parametrize("lacking", [[], ["sample_id"], ["problem_id", "sample_id"]])
@pytest.mark.parametrize("share", [None, 0.5])
def test_curated_folders_do_not_depend_on_the_shards(scored, tmp_path, share, lacking):
    table = pa.concat_tables([pq.read_table(shard) for shard in stages.shards_of(scored)])
    table, one = table.drop_columns(lacking), tmp_path / "one.parquet"
    pq.write_table(table, one)
    scored = tmp_path / "cut"  # in the middle of a problem
    scored.mkdir()
    for k, rows in enumerate((table.slice(0, 18), table.slice(18, 0), table.slice(18))):
        pq.write_table(rows, scored / f"part-{k}.parquet")
    how = {"curation": "anna_karenina", "iteration_size": 20, "effective_positive_share": share}
    stages.run("curate", settings(tmp_path / "a", scored, **how))
    stages.run("curate", settings(tmp_path / "b", one, **how))
    a, b = load_candidates(tmp_path / "a"), load_candidates(tmp_path / "b")
    for name in ("completion_ids", "reward"):
        assert a[name][:] == b[name][:]
    if share:
        rewards = np.array(a["reward"])
        assert rewards[rewards > 0].sum() / np.abs(rewards).sum() == pytest.approx(share)


def test_log_mu_train_evaluate(scored, tmp_path, model):
    stages.run("curate", settings(tmp_path / "curated", scored))
    stages.run("log-mu", settings(tmp_path / "log_mu", tmp_path / "curated"))
    rows = load_candidates(tmp_path / "log_mu")
    assert len(rows) == 40
    assert set(rows["mu_fingerprint"]) == {model_fingerprint(model)}
    for row in rows:
        if row["reward"] > 0:
            assert row["mu_logps"] is None
        else:  # the sampler computed in the same precision, with other shapes
            assert row["mu_logps"] == pytest.approx(row["sampler_logps"], abs=1e-3)
    distance = manifest.read(tmp_path / "log_mu")["sampler_distance"]
    assert 0 < distance["token"] < 1e-4
    assert not (tmp_path / "log_mu" / manifest.WORK).exists()

    stages.run("train", settings(tmp_path / "model", tmp_path / "log_mu", log_completions=True, logging_steps=2))
    assert pq.read_metadata(tmp_path / "model" / "completions" / "completions_00002.parquet").num_rows == 8
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model_fingerprint(trained) != model_fingerprint(model)
    assert json.loads((tmp_path / "model" / "trainer_state.json").read_text())["log_history"]

    now = settings(tmp_path / "candidates", model=str(tmp_path / "model"))
    now.stage.split = "test"
    stages.run("sample", now)
    stages.run("score", settings(tmp_path / "scored", tmp_path / "candidates"))
    stages.run("evaluate", settings(tmp_path / "results", tmp_path / "scored"))
    result = json.loads((tmp_path / "results" / "evaluation.json").read_text())
    assert (result["num_problems"], result["num_samples"]) == (4, 3)


def test_an_adapter_is_merged(scored, tmp_path):
    pytest.importorskip("peft")
    now = settings(tmp_path / "model", scored)
    now.model.use_peft, now.model.lora_target_modules = True, ["q_proj", "v_proj"]
    stages.run("train", now)
    base = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert (tmp_path / "model" / "adapter" / "adapter_config.json").is_file()


def test_what_the_results_do_not_depend_on_is_no_input(scored, tmp_path):
    now = settings(tmp_path / "candidates")
    now.stage.split = "test"
    before = inputs_of("sample", now)
    more = replace(now, sampling=replace(now.sampling, num_candidates=64))
    more.stage.num_train_problems = 99
    assert inputs_of("sample", more) == before
    train = {**inputs_of("train", settings(tmp_path / "a", scored))}
    assert inputs_of("train", settings(tmp_path / "b", scored, logging_steps=7, save_steps=9)) == train
    shown = {"log_completions": True, "num_completions_to_print": 2}
    assert inputs_of("train", settings(tmp_path / "b", scored, **shown)) == train
    assert inputs_of("train", settings(tmp_path / "b", scored, learning_rate=2e-3)) != train
    assert inputs_of("train", settings(tmp_path / "b", scored, log_mu="sampler")) != train


def test_more_workers_than_shards(tmp_path):
    now = settings(tmp_path)
    now.stage.worker = "7/8"
    stages.run("sample", now)
    assert not list(tmp_path.glob("*.parquet"))


def test_rows_of_other_people(tmp_path):
    # Text alone, with rewards; no ids, no sampling order.
    rows = {"prompt": ["1 + 1 ="] * 3 + ["2 + 2 ="] * 3, "completion": [" 2", " 3", " 4", " 4", " 5", " 6"],
            "reward": [1.0, -1.0, -1.0] * 2}  # fmt: skip
    source = tmp_path / "theirs.parquet"
    pq.write_table(pa.table(rows), source)
    stages.run("score", settings(tmp_path / "scored", source))
    stages.run(
        "curate", settings(tmp_path / "curated", tmp_path / "scored", curation="anna_karenina", iteration_size=4)
    )
    curated = load_candidates(tmp_path / "curated")
    assert sorted(curated["reward"]) == [-1.0, -1.0, 1.0, 1.0]
    stages.run("log-mu", settings(tmp_path / "log_mu", tmp_path / "curated"))
    stages.run("train", settings(tmp_path / "model", tmp_path / "log_mu"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_rows_are_judged_by_their_task(scored, tmp_path):
    pytest.importorskip("math_verify")
    rows = {
        "prompt": ["1/2 + 1/4 ="] * 2,
        "completion": [r"\boxed{0.75}", "The answer is 4."],
        "answer": [r"\frac34"] * 2,
    }
    pq.write_table(pa.table(rows), tmp_path / "theirs.parquet")
    now = settings(tmp_path / "math", tmp_path / "theirs.parquet")
    now.stage.task = "math"
    stages.run("score", now)
    assert load_candidates(tmp_path / "math")["verdict"][:] == ["correct", "invalid"]
    assert inputs_of("score", now)["task"] == "math"
    # Sampled for embedded problems, which are GSM8K's kind whatever the task is called.
    stages.run("sample", settings(tmp_path / "candidates"))
    now = settings(tmp_path / "gsm8k", tmp_path / "candidates")
    now.stage.task = "math"
    assert inputs_of("score", now)["task"] == "gsm8k"
    stages.run("score", now)
    assert load_candidates(tmp_path / "gsm8k")["verdict"][:] == load_candidates(scored)["verdict"][:]


def test_a_torn_checkpoint_is_not_resumed_from(tmp_path):
    from accelerate import PartialState

    for step, state in ((2, "{}"), (4, '{"global_step": 4}'), (10, '{"global'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state:
            (folder / "trainer_state.json").write_text(state)
    assert stages._last_whole_checkpoint(tmp_path, PartialState()).endswith("checkpoint-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_the_embedded_model_is_the_default(tmp_path):
    assert settings(tmp_path).model_path == str(arithmetic.CARELESS_MODEL)


def test_a_baseline_given_to_train_is_applied_to_rows_that_were_not_curated(scored, tmp_path):
    now = settings(tmp_path / "model", scored, baseline=0.5)
    assert sorted(set(stages._trainer(now).train_dataset["reward"])) == [-1.5, 0.5]
    stages.run("curate", settings(tmp_path / "curated", scored, baseline=0.5))
    now = settings(tmp_path / "other", tmp_path / "curated", baseline=0.5)
    assert sorted(set(stages._trainer(now).train_dataset["reward"])) == [-1.5, 0.5]
    assert stages._trainer(settings(tmp_path / "silent", tmp_path / "curated"))
    assert stages._trainer(settings(tmp_path / "same", tmp_path / "curated", baseline=".50"))
    with pytest.raises(ValueError, match=r"baseline=0\.9, but the rows of .*curated were chosen with baseline=0\.5"):
        stages._trainer(settings(tmp_path / "unheard", tmp_path / "curated", baseline=0.9))


def test_log_mu_of_rows_that_name_a_model_and_have_none(scored, tmp_path):
    (tmp_path / "bare").mkdir()
    for shard in scored.glob("*.parquet"):
        rows = pq.read_table(shard)
        pq.write_table(
            rows.append_column("mu_fingerprint", pa.array(["x"] * len(rows))), tmp_path / "bare" / shard.name
        )
    stages.run("log-mu", settings(tmp_path / "log_mu", tmp_path / "bare"))
    rows = load_candidates(tmp_path / "log_mu")
    assert "mu_logps" in rows.column_names
    assert "x" not in rows["mu_fingerprint"][:]


def test_a_local_model_is_known_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    now = settings(tmp_path / "out", model="owner/model")
    now.stage.dataset_name = "rows.jsonl"
    known = inputs_of("sample", now)
    assert (known["model"], known["dataset_name"]) == (str(tmp_path / "owner/model"), str(tmp_path / "rows.jsonl"))
    now = settings(tmp_path / "out", model="owner/other")
    assert inputs_of("sample", now)["model"] == "owner/other"


def embedded(command, *given):
    return commands._settings_of_the_embedded_model(command, list(given))


def test_settings_of_the_embedded_model(tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("num_shots: 3\nlearning_rate: 1.0e-3\n")
    assert "--num_shots=0" in embedded("iterate")
    given = embedded("iterate", "--config", str(tmp_path / "own.yaml"))
    assert given == embedded("iterate", *commands._apart(f"--config={tmp_path / 'own.yaml'}"))
    assert not any(setting.startswith(("--num_shots", "--learning_rate")) for setting in given)
    assert any(setting.startswith("--curation") for setting in given)
    assert not any(setting.startswith(("--curation", "--iteration_size")) for setting in embedded("train"))
    assert "--iteration_size=6000" in embedded("iterate")
    for own in (["--curation", "anna_karenina"], ["--curation=anna_karenina"]):  # its size is the rule's own
        assert not any(setting.startswith(("--curation", "--iteration_size")) for setting in embedded("iterate", *own))
    seen = []
    monkeypatch.setattr(stages, "run", lambda command, settings: seen.append(settings))
    for command, *given in (["curate"], ["sample", "--model-name-or-path", "own"], ["sample"]):
        cli.main([command, *given])
    assert [now.training.curation for now in seen] == ["none"] * 3
    assert [now.stage.num_shots for now in seen] == [8, 8, 0]


def test_what_users_can_mend_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["topr", "score", "--input", "nowhere", "--output", "out"])
    with pytest.raises(
        SystemExit, match=r"topr score: There is no nowhere to read \(--input\)\. \(--debug shows where\)"
    ):
        cli.console()
    monkeypatch.setattr("sys.argv", ["topr", "score", "--debug", "--input", "nowhere", "--output", "out"])
    with pytest.raises(FileNotFoundError):
        cli.console()
