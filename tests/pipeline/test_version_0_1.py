"""Folders that version 0.1 wrote: one manifest per stage, without its name, beside rows in shards."""

import json

import pytest
from transformers import AutoTokenizer

from topr_trl import load_rows
from topr_trl.checkpoints import STATE
from topr_trl.data.tables import save_rows as save_as_today
from topr_trl.hub.push import pack
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import CurateArguments, EvaluateArguments, ScoreArguments, TrainArguments
from topr_trl.pipeline.lineage import lineage
from topr_trl.pipeline.training import _trainer
from topr_trl.pipeline.version_0_1 import check_no_loop
from topr_trl.tasks import arithmetic

SAMPLING = {
    "task": "gsm8k", "num_shots": 0, "training_shots": False, "split": "train", "problems_per_shard": 64,
    "num_train_problems": 2, "dataset_name": None, "num_candidates": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 500,
    "max_new_tokens": 48, "sampling_backend": "transformers", "sampling_batch_size": 512,
    "model": "the embedded model", "revision": "main", "dtype": None, "attention": None, "seed": 42, "iteration": 0,
}  # fmt: skip
CHOICE = {"baseline": "0.5", "effective_positive_share": None, "curation": "none", "iteration_size": None,
          "curation_positive_share": 0.5}  # fmt: skip
TRAINING = {"learning_rate": 1e-3, "optim": "adafactor", "preset": "topr", "seed": 42, "iteration": 1,
            "model": "the embedded model", "revision": "main", "dtype": None, "attention": None,
            "peft": None}  # fmt: skip


def save_rows(rows, folder, shard=0, shards=1):
    """As version 0.1 called them."""
    path = save_as_today(rows, folder, shard, shards)
    return path.rename(path.with_name(path.name.replace("rows-", "candidates-")))


def finished(folder, inputs, **notes):
    """The manifest that a finished stage of version 0.1 left beside its files."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != manifest.NAME]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": manifest._sha256(path)} for path in paths}
    content = {"inputs": inputs, "files": files, "rows": 8, "finished": "2026-01-01 12:00:00", **notes}
    (folder / manifest.NAME).write_text(json.dumps(content))
    return folder


@pytest.fixture
def sampled(rows, tmp_path):
    rows = rows.remove_columns("reward").add_column("answer", ["7"] * 8)
    save_rows(rows, tmp_path / "candidates")
    return finished(tmp_path / "candidates", SAMPLING)


@pytest.fixture
def curated(rows, tmp_path):
    """With the baseline taken off: 0.5 of rewards of +1 and -1."""
    rewards = rows["reward"][:]
    rows = rows.remove_columns("reward").add_column("reward", [reward - 0.5 for reward in rewards])
    save_rows(rows.add_column("raw_reward", rewards), tmp_path / "curated")
    return finished(tmp_path / "curated", {"input": "0123456789abcdef", **CHOICE}, curated={"size": 8})


def train(source, out, **settings):
    return TrainArguments(
        input=str(source), output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", disable_tqdm=True, max_steps=1, **settings,
    )  # fmt: skip


def test_rows_go_through_the_stages(sampled, tmp_path):
    before = (sampled / manifest.NAME).read_text()
    out = str(tmp_path / "rollouts")
    stages.run("score", ScoreArguments(input=str(sampled), output_dir=out, task="math"))  # it notes the task
    stages.run("curate", CurateArguments(input=out, output_dir=out, baseline="mean"))
    stages.run("train", train(out, tmp_path / "model"))
    rows = load_rows(out)
    assert rows["verdict"][:] == ["incorrect", "invalid", "incorrect", "correct"] * 2
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (sampled / manifest.NAME).read_text() == before
    assert list(lineage(tmp_path / "model")) == ["sample", "score", "curate", "train"]
    assert "| completions per prompt | 4 |" in pack(tmp_path / "model", "me/x").card


def test_columns_are_added_to_its_rows(sampled):
    stages.run("score", ScoreArguments(input=str(sampled), output_dir=str(sampled)))
    assert list(manifest.read(sampled).stages) == ["sample", "score"]
    assert "reward" in load_rows(sampled).column_names
    stages.run("evaluate", EvaluateArguments(input=str(sampled), output_dir=str(sampled.with_name("results"))))


def test_rewards_after_the_baseline_are_trained_on_as_they_are(curated, tmp_path):
    trainer, places = _trainer(train(curated, tmp_path / "model"))
    assert sorted(set(trainer.train_dataset["reward"])) == [-1.5, 0.5]
    assert len(places) == 8
    _trainer(train(curated, tmp_path / "same", baseline=".50"))
    with pytest.raises(ValueError, match=r"baseline=0\.9, but the rows of .*curated were chosen with baseline=0\.5"):
        _trainer(train(curated, tmp_path / "unheard", baseline=0.9))


def test_rows_are_pushed(sampled, tmp_path):
    parcel = pack(sampled, "me/rows")
    assert set(parcel.files) == {"candidates-00000-of-00001.parquet", manifest.NAME, "README.md"}
    assert "| written by | the small model that comes with topr_trl |" in parcel.card
    assert "| completions per prompt | 4 |" in parcel.card
    for name, content in parcel.files.items():
        (tmp_path / "loaded").mkdir(exist_ok=True)
        (tmp_path / "loaded" / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    assert manifest.fingerprint(tmp_path / "loaded") == manifest.fingerprint(sampled)


def test_no_path_of_this_machine_is_pushed(sampled, tmp_path):
    finished(sampled, {**SAMPLING, "dataset_name": str(tmp_path / "problems.jsonl")})
    assert str(tmp_path).encode() not in pack(sampled, "me/rows").files[manifest.NAME]


def test_a_model_is_pushed(model, tmp_path):
    folder = tmp_path / "iteration-1" / "model"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL).save_pretrained(folder)
    (folder / STATE).write_text('{"global_step": 7}')
    finished(folder, {"input": "0123456789abcdef", **TRAINING, **CHOICE})
    parcel = pack(folder, "me/x")
    assert "model.safetensors" in parcel.files
    for line in ("| steps | 7, learning rate 0.001, adafactor |", "| baseline | 0.5 |", "| rows | 8 |"):
        assert line in parcel.card
    assert "## Evaluation" not in parcel.card  # which results are of these weights is not known


def test_rows_that_were_removed_are_refused_with_where_they_are(sampled, tmp_path):
    scored = tmp_path / "scored"
    (sampled / manifest.NAME).write_text(
        json.dumps(json.loads((sampled / manifest.NAME).read_text()) | {"dropped": str(scored)})
    )
    next(sampled.glob("*.parquet")).unlink()
    for read in (
        lambda: manifest.check_whole(sampled),
        lambda: pack(sampled, "me/rows"),
        lambda: stages.run("score", ScoreArguments(input=str(sampled), output_dir=str(tmp_path / "out"))),
    ):
        with pytest.raises(ValueError, match=f"were removed by version 0.1 when {scored} had been made of them"):
            read()
    assert not (tmp_path / "out" / manifest.NAME).exists()


def test_what_was_under_way_is_refused(rows, tmp_path):
    """Its files had other names, so that what is missing could not be told."""
    folder = tmp_path / "rows"
    save_rows(rows, folder, 0, 2)
    (folder / manifest.NAME).write_text(json.dumps({"inputs": SAMPLING, "files": None}))
    for use in (lambda: manifest.begin(folder, "sample", SAMPLING), lambda: manifest.check_whole(folder)):
        with pytest.raises(
            ValueError, match=r"rows was begun by version 0\.1: finish it with that version, or remove it"
        ):
            use()


@pytest.mark.parametrize(
    ("stage", "inputs"),
    [
        ("sample", SAMPLING),
        ("score", {"input": "x", "task": "gsm8k"}),
        ("curate", {"input": "x", **CHOICE, "seed": 1, "iteration": 1}),
        ("log-mu", {"input": "x", **CHOICE, "preset": "topr", "seed": 1, "iteration": 1}),
        ("train", {"input": "x", **CHOICE, **TRAINING}),
        ("evaluate", {"input": "x", "seed": 1}),
    ],
)
def test_stages_are_told_apart_by_their_inputs(stage, inputs, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    assert list(manifest.read(finished(tmp_path, inputs)).stages) == [stage]


def test_a_loop_is_refused(tmp_path):
    (tmp_path / ".lock").touch()
    check_no_loop(tmp_path)
    (tmp_path / "base" / "test" / "candidates").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is a loop of version 0\.1: finish it with that version, or name another"):
        check_no_loop(tmp_path)
