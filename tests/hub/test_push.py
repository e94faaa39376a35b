import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hub_server import TOKEN, Repo, serve, start
from huggingface_hub import DatasetCard, ModelCard, constants

from tests.loops import stage_of, steps_of
from topr_trl import Evaluations, OfflineTOPRConfig, OfflineTOPRTrainer, evaluate_samples, load_rows
from topr_trl.cli import main as cli
from topr_trl.data.tables import save_rows, shard_path
from topr_trl.evaluation.estimates import Estimate
from topr_trl.hub import push_to_hub
from topr_trl.hub.dataset import COLUMNS, texts_by_others
from topr_trl.hub.model import results_metadata
from topr_trl.hub.push import _is_stale, pack
from topr_trl.importing import row_table
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import first_weights, lineage
from topr_trl.pipeline.settings import IterateArguments, stage_args
from topr_trl.pipeline.stages.curate import CurateArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments
from topr_trl.trainers.model_card import CITATION, add_section

HERE = Path(__file__).parent
SETTINGS = {
    "num_train_problems": 6, "num_test_problems": 3, "num_shots": 0, "problems_per_shard": 3, "num_generations": 4,
    "num_generations_eval": 2, "max_new_tokens": 40, "baseline": 0.25, "curation": "uniform", "iteration_size": 20,
    "learning_rate": 1e-3, "optim": "adamw_torch", "per_device_train_batch_size": 4, "bf16": False, "max_steps": 2,
    "report_to": "none", "gradient_checkpointing": False, "use_cpu": True, "dtype": "float32", "disable_tqdm": True,
}  # fmt: skip
PUSH = ["--use_cpu", "true", "--push_to_hub", "true"]
PICKLES = (".bin", ".pt", ".pth", ".pkl")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("push")]  # so that only one process runs the loop and pushes


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """Return the folder of a loop whose stages ran in this process."""
    out = tmp_path_factory.mktemp("loop")
    for step in steps_of(IterateArguments(output_dir=str(out), **SETTINGS)):
        step.stage.run()
    return out


@pytest.fixture(scope="module")
def hub(loop, tmp_path_factory):
    """Yield a Hub to which a new Python process pushed. The Hub's client reads its endpoint when it is imported."""
    out = tmp_path_factory.mktemp("pushed")
    with serve() as hub:
        start(hub, "pushed.py", out, loop)
        assert any(path.suffix in PICKLES for path in (out / "offline" / "checkpoint-2").iterdir())
        yield hub


@pytest.fixture
def online(monkeypatch):
    """Yield a Hub that this process uses."""
    with serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.mark.slow
@pytest.mark.processes
def test_trainers_push_their_checkpoints_and_cards(hub):
    repo = hub.repos["model", "me/offline"]
    steps = [f"Training in progress, step {k}" for k in (1, 2)]
    assert repo.messages[1:5] == [message for step in steps for message in (step, f"{step}, checkpoint")]
    assert "last-checkpoint/optimizer.pt" in repo.files
    card = ModelCard(repo.files["README.md"].decode())
    assert card.data.datasets == "me/sums"
    assert "| pass@1 | 50.0%" in card.text
    assert "| rows | 6 rows, 50.0% positive" in card.text
    assert repo.files["evaluation.png"].startswith(b"\x89PNG")
    assert hub.repos["model", "me/online"].private
    assert not repo.private
    online = hub.repos["model", "me/online"].files["README.md"].decode()
    assert 'model="me/online"' in online
    assert "| baseline | 0.5 |" in online
    assert CITATION in online


@pytest.mark.slow
@pytest.mark.processes
def test_topr_push_sends_no_pickle_and_replaces_shards(hub, loop):
    for name in ("me/solver", "me/from-a-checkpoint"):
        files = hub.repos["model", name].files
        assert not [path for path in files if path.endswith(PICKLES)]
        assert "model.safetensors" in files
        assert f'model="{name}"' in files["README.md"].decode()
    assert "| steps | 2, learning rate 0.001, adafactor |" in files["README.md"].decode()
    rows = hub.repos["dataset", "me/rows"]
    assert rows.private
    assert "rows-00000-of-00001.parquet" in rows.commits[1]
    shards = {path.name for path in (loop / "iteration-1" / "rollouts").glob("*.parquet")}
    assert {path for path in rows.files if path.endswith(".parquet")} == shards


def test_the_card_describes_each_column_of_imported_rows():
    assert set(row_table.COLUMNS) <= set(COLUMNS)


@pytest.mark.slow
def test_card_of_a_loop_s_model(loop):
    model = loop / "iteration-1" / "model"
    upload = pack(model, "me/solver")
    card = ModelCard(upload.card)
    assert upload.repo_type == "model"
    assert {"model.safetensors", "config.json", "tokenizer.json", "evaluation.png", "README.md"} <= set(upload.files)
    assert "training_args.bin" in upload.left_out
    assert {"topr", "trl"} <= set(card.data.tags)
    results = {name: folder / "test/results/evaluation.json" for name, folder in
               (("before", loop / "base"), ("after", loop / "iteration-1"))}  # fmt: skip
    shares = [100 * json.loads(path.read_text())["shares"]["correct"] for path in results.values()]
    assert f"| correct | {shares[0]:.1f}% | {shares[1]:.1f}% |" in card.text
    assert "![before and after](evaluation.png)" in card.text
    assert "| baseline | 0.25 |" in card.text
    assert "| curation | uniform |" in card.text
    known = json.loads((loop / "iteration-1/rollouts/_manifest.json").read_text())
    assert known["stages"]["curate"]["curated"].startswith("20 rows, ")
    assert f"| rows | {known['stages']['curate']['curated']} |" in card.text
    assert "| steps | 2, learning rate 0.001, adamw_torch |" in card.text
    assert "log μ of the model that training started from" in card.text
    assert "temperature, top-p, top-k | 1, 1, 500" in card.text
    assert 'pipeline("text-generation", model="me/solver")' in card.text
    assert "--dtype float32" in card.text
    assert CITATION in card.text
    assert "## Limits" in card.text


def test_the_card_shows_a_prompt_only_of_problems_that_are_public(loop, tmp_path, online):
    run = shutil.copytree(loop, tmp_path / "run")
    model = run / "iteration-1" / "model"
    example = repr(load_rows(run / "iteration-1/rollouts")["prompt"][0])
    assert example in ModelCard(pack(model, "me/solver").card).text
    note = json.loads((run / "iteration-1/rollouts/_manifest.json").read_text())
    sampled = note["stages"].pop("sample")  # as of imported rows
    (run / "iteration-1/rollouts/_manifest.json").write_text(json.dumps(note))
    assert example not in ModelCard(pack(model, "me/solver").card).text
    sampled["inputs"]["dataset_name"] = "me/problems"
    note["stages"] = {"sample": sampled, **note["stages"]}
    (run / "iteration-1/rollouts/_manifest.json").write_text(json.dumps(note))
    for repo in (None, Repo(private=True), Repo(private=False)):
        online.repos["dataset", "me/problems"] = repo
        assert (example in ModelCard(pack(model, "me/solver").card).text) == (repo is not None and not repo.private)
    online.gated = "auto"
    assert example not in ModelCard(pack(model, "me/solver").card).text


def test_results_of_other_weights_are_not_on_the_card(loop, tmp_path):
    run = shutil.copytree(loop, tmp_path / "run")
    note = run / "iteration-1/test/rollouts/_manifest.json"
    known = json.loads(note.read_text())
    known["stages"]["sample"]["inputs"]["weights"] = "of another model"
    note.write_text(json.dumps(known))
    assert "## Evaluation" not in pack(run / "iteration-1" / "model", "me/solver").card
    base, own = (run / name / "test" / "results" for name in ("base", "iteration-1"))
    assert "## Evaluation" in pack(run / "iteration-1" / "model", "me/solver", base, own).card


def test_results_of_a_model_without_a_manifest(loop, tmp_path):
    run = shutil.copytree(loop, tmp_path / "run")
    model, note = run / "iteration-1" / "model", run / "iteration-1/test/rollouts/_manifest.json"
    (model / manifest.NAME).unlink()
    (model / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model of another trainer\n")
    known = json.loads(note.read_text())
    known["stages"]["sample"]["inputs"]["weights"] = manifest.fingerprint(model)
    note.write_text(json.dumps(known))
    assert "| measure | after |" in pack(model, "me/solver").card


def test_metadata_is_of_a_whole_split_alone(loop, tmp_path):
    run = shutil.copytree(loop, tmp_path / "run")
    model, note = run / "iteration-1" / "model", run / "iteration-1/test/rollouts/_manifest.json"
    known = json.loads(note.read_text())
    for count, results in ((3, None), (None, {"greedy", "pass@1", "pass@2"})):
        known["stages"]["sample"]["inputs"] |= {"dataset_name": "openai/gsm8k", "num_test_problems": count}
        note.write_text(json.dumps(known))
        card = ModelCard(pack(model, "me/solver").card)
        assert ("the first 3 problems of [openai/gsm8k]" in card.text) == (count == 3)
        assert (card.data.eval_results and {r.metric_type for r in card.data.eval_results}) == results


def test_a_second_iteration_began_where_the_loop_did(loop, tmp_path):
    run = shutil.copytree(loop, tmp_path / "run")
    first, second = run / "iteration-1" / "model", shutil.copytree(run / "iteration-1", run / "iteration-2") / "model"
    for folder, stage, weights in ((second, "train", first), (run / "iteration-2/test/rollouts", "sample", second)):
        known = json.loads((folder / manifest.NAME).read_text())
        inputs = {n: v for n, v in known["stages"][stage]["inputs"].items() if n not in ("model", "revision")}
        known["stages"][stage]["inputs"] = inputs | {"weights": manifest.fingerprint(weights)}
        known["stages"][stage]["sources"]["weights"] = os.path.relpath(weights, folder)
        known["files"] |= {"config.json": known["files"].get("config.json", {}) | {"sha256": "another"}}
        (folder / manifest.NAME).write_text(json.dumps(known))
    assert manifest.fingerprint(first) != manifest.fingerprint(second)
    assert first_weights(second) == first_weights(first) == {"model": "the bundled model of 0.3", "revision": "main"}
    (run / "base/test/rollouts" / manifest.NAME).unlink()  # The tested weights are now unknown.
    assert "| measure | after |" in pack(first, "me/x").card


def test_card_of_rows(loop):
    for folder, split in (("iteration-1/rollouts", "train"), ("base/test/rollouts", "test")):
        upload = pack(loop / folder, "me/rows")
        card, rows = DatasetCard(upload.card), load_rows(loop / folder)
        assert upload.repo_type == "dataset"
        assert "_manifest.json" in upload.files
        assert card.data.configs[0]["data_files"] == [{"split": split, "path": "*.parquet"}]
        assert f"| completions | {len(rows)} |" in card.text
        count = rows["verdict"][:].count("correct")
        assert f"correct: {count} ({count / len(rows):.1%})" in card.text
        for name in rows.column_names:
            assert re.search(rf"^\| `{name}` \| `[^|]+` \| [^| ][^|]* \|$", card.text, re.MULTILINE), name
        assert "| temperature, top-p, top-k | 1, 1, 500 |" in card.text
        # Rows of the test problems include greedy completions, so their card does not suggest training on them.
        assert ("and one greedy completion |" in card.text) == (split == "test")
        assert ("OfflineTOPRTrainer" in card.text) == (split == "train")
    rows = load_rows(loop / "iteration-1/rollouts")
    text = pack(loop / "iteration-1/rollouts", "me/rows").card
    assert f"| fingerprint of μ | `{rows['mu_fingerprint'][0]}` |" in text
    assert "fingerprint of μ" not in pack(loop / "base/test/rollouts", "me/rows").card
    assert re.search(r"^\| `reward_after_baseline` \| .*none: 4 \(16\.7%\)", text, re.MULTILINE)


def test_rows_of_others_are_pushed_with_what_is_known(rows, tmp_path):
    rows.to_json(tmp_path / "rows.jsonl")
    upload = pack(tmp_path / "rows.jsonl", "me/rows")
    card = DatasetCard(upload.card)
    assert set(upload.files) == {"rows.jsonl", "README.md"}
    assert card.data.configs[0]["data_files"] == [{"split": "train", "path": "rows.jsonl"}]
    assert "8 completions for 2 problems:" in card.text
    assert "| `reward` | -1: 6 (75.0%), +1: 2 (25.0%) |" in card.text
    assert "How the rows were made" not in card.text
    assert 'OfflineTOPRTrainer("the-model-that-wrote-the-rows",' in card.text


def test_the_card_of_rows_trains_the_model_that_wrote_them(loop, tmp_path):
    """The trainer refuses the log μ of another model."""
    rows = shutil.copytree(loop / "iteration-1/rollouts", tmp_path / "rows")
    known = json.loads((rows / manifest.NAME).read_text())
    known["stages"]["sample"]["inputs"]["model"] = "me/writer"
    (rows / manifest.NAME).write_text(json.dumps(known))
    assert 'OfflineTOPRTrainer("me/writer",' in pack(rows, "me/rows").card


def test_a_card_that_somebody_wrote_is_kept(loop, tmp_path):
    files = pack(loop / "iteration-1" / "model", "me/solver").files
    for name in ("model.safetensors", "config.json"):
        shutil.copy(files[name], tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nMy words.\n")
    results = loop / "base" / "test" / "results"
    card = ModelCard(pack(tmp_path, "me/mine", before=results).card)
    assert card.data.license == "mit"
    assert card.text.index("My words.") < card.text.index("## Evaluation")
    assert "| measure | before |" in card.text


@pytest.mark.slow
def test_a_checkpoint_has_its_own_step_on_its_card(model, tokenizer, rows, tmp_path):
    trainer = OfflineTOPRTrainer(model, config(tmp_path, save_steps=1), rows, processing_class=tokenizer)
    trainer.train()
    trainer.evaluations = Evaluations(after=evaluate_samples([["7", "8"]], ["7"]))
    trainer.create_model_card()
    first, last = (pack(tmp_path / f"checkpoint-{step}", "me/x") for step in (1, 2))
    assert "| steps | 1, learning rate 5e-07, adafactor |" in first.card
    assert "| steps | 2, learning rate" in last.card
    assert "## Evaluation" in last.card  # The results are for the last step only.
    assert "## Evaluation" not in first.card
    assert ("evaluation.png" in last.files, "evaluation.png" in first.files) == (True, False)
    assert "optimizer.pt" in first.left_out


def test_an_adapter_s_card_is_the_trainer_s(model, tokenizer, rows, tmp_path):
    lora = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = config(tmp_path, save_steps=2)
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer, peft_config=lora).train()
    assert "More Information Needed" in (tmp_path / "checkpoint-2" / "README.md").read_text()  # PEFT's template
    with pytest.raises(ValueError, match=r"adapter_config.json has the base model /.*Push the merged model"):
        pack(tmp_path / "checkpoint-2", "me/x")
    adapter = tmp_path / "checkpoint-2" / "adapter_config.json"
    adapter.write_text(json.dumps({**json.loads(adapter.read_text()), "base_model_name_or_path": "me/base"}))
    upload = pack(tmp_path / "checkpoint-2", "me/x")
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= set(upload.files)
    assert "More Information Needed" not in upload.card
    assert CITATION in upload.card
    assert ModelCard(upload.card).data.library_name == "peft"


def config(folder, **settings):
    return OfflineTOPRConfig(
        str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", max_steps=2,
        save_strategy="steps", **settings,
    )  # fmt: skip


def test_evaluations_become_a_section_and_metadata(tmp_path):
    card = ModelCard("---\nmodel_name: mine\n---\n# Mine\n\n## Training procedure\n\nLong.\n")
    old, new = evaluate_samples([["7", "8"]], ["7"]), evaluate_samples([["7", "7"]], ["7"], maj_ks=[1])
    add_section(card, Evaluations(before=new, after=old).write_card_section(tmp_path))
    add_section(card, Evaluations(now=new).write_card_section(tmp_path))
    assert card.text.count("## Evaluation") == card.text.count("evaluation.png") == 1
    assert card.text.index("## Evaluation") < card.text.index("| now") < card.text.index("## Training procedure")
    card.data.eval_results = results_metadata(new, "openai/gsm8k")
    found = {result.metric_type: result.metric_value for result in ModelCard(str(card)).data.eval_results}
    assert found == {"pass@1": 100.0, "maj@1": 100.0}
    of_greedy = results_metadata(replace(new, greedy=Estimate(0.25, 0.1)), "openai/gsm8k")
    assert (of_greedy[0].metric_type, of_greedy[0].metric_value) == ("greedy", 25.0)


def test_the_trainer_s_card_has_its_evaluations(model, tokenizer, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.base_trainer.get_comet_experiment_url", lambda: "https://tracker.example/run")
    trainer = OfflineTOPRTrainer(model, config(tmp_path), rows, processing_class=tokenizer)
    trainer.create_model_card()
    assert "## Evaluation" not in (tmp_path / "README.md").read_text()
    trainer.evaluations = Evaluations(before=evaluate_samples([["7", "8"]], ["7"]))
    trainer.create_model_card("mine", dataset_name="openai/gsm8k", tags="sums")
    card = ModelCard.load(tmp_path / "README.md")
    assert {"sums", "topr", "generated_from_trainer"} <= set(card.data.tags)
    assert card.data.datasets == "openai/gsm8k"
    assert card.data.eval_results is None  # dataset_name is for training; the test set is unknown
    assert "licence" not in card.data.to_dict()
    assert card.text.count("](https://tracker.example/run)") == 1
    assert (tmp_path / "evaluation.png").is_file()


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage(run, what):
    """Damage a copy of a loop so that it cannot be pushed, and return the folder to push."""
    model, rows = run / "iteration-1" / "model", run / "iteration-1" / "rollouts"
    checkpoint = shutil.copytree(model, run / "checkpoint-2")
    (checkpoint / "_manifest.json").unlink()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}')
    if what == "unfinished":
        known = json.loads((rows / "_manifest.json").read_text())
        del known["stages"]["log-mu"]["finished"]
        (rows / "_manifest.json").write_text(json.dumps(known))
        return rows
    if what == "a loop":
        shutil.rmtree(checkpoint)
        return run
    if what == "empty":
        (run / "empty").mkdir()
        return run / "empty"
    if what == "lost shard":
        (rows / "_manifest.json").unlink()
        next(rows.glob("*.parquet")).unlink()
        return rows
    if what == "columns":
        (rows / "_manifest.json").unlink()
        shard = sorted(rows.glob("*.parquet"))[1]
        pq.write_table(pq.read_table(shard).drop_columns(["verdict"]), shard)
        return rows
    if what == "no rows":
        path = run / "rows.parquet"
        pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "completion": pa.array([], pa.string())}), path)
        return path
    if what == "torn":
        (checkpoint / "trainer_state.json").write_text('{"global_step"')
    if what == "pickled":
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    if what == "cut":
        cut(checkpoint / "model.safetensors")
    if what == "index":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    return checkpoint


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unfinished", "rollouts is not finished: run the stage"),
        ("a loop", "holds neither a model .* nor rows .* Push one of .*iteration-1/model"),
        ("empty", "empty holds neither a model .* nor rows"),
        ("lost shard", "holds 1 of 2 shards"),
        ("columns", "need the same columns, .* differ in verdict"),
        ("no rows", "There is no row in"),
        ("torn", "is incomplete: trainer_state.json"),
        ("pickled", "holds no weights as safetensors"),
        ("cut", "model.safetensors cannot be read"),
        ("index", "lacks 1 of 2 weight files, such as model-00001-of-00002.safetensors"),
        ("no card", "was trained is not known: there is no .*README.md"),
    ],
)
def test_folders_that_cannot_be_pushed(loop, tmp_path, what, message):
    folder = damage(shutil.copytree(loop, tmp_path / "run"), what)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        pack(folder, "me/x")
    assert "\n" not in str(raised.value)


def test_settings_that_cannot_be(loop, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    rows, model = loop / "iteration-1" / "rollouts", loop / "iteration-1" / "model"
    with pytest.raises(ValueError, match="hf auth login"):
        push_to_hub(rows, "me/x")
    with pytest.raises(ValueError, match="Repo id"):
        cli.main(["push", "--input", str(rows), "--repo_id", "me/x/y", "--dry_run"])
    with pytest.raises(FileNotFoundError, match="There is no nowhere to push"):
        pack(Path("nowhere"), "me/x")
    with pytest.raises(ValueError, match="are for the card of a model"):
        pack(rows, "me/x", before="results")
    with pytest.raises(FileNotFoundError, match="--before and --after"):
        pack(model, "me/x", before=tmp_path)
    with pytest.raises(ValueError, match="topr push --input FOLDER"):
        cli.main(["train", "--input", str(rows), "--output_dir", str(tmp_path / "x"), "--bf16", "false", *PUSH])


def test_private_rows_are_not_pushed_to_a_public_repository(tmp_path, online):
    save_rows(Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "reward": [1.0]}), tmp_path / "rows")
    repo = online.repos["dataset", "me/rows"] = Repo(private=False)
    with pytest.raises(ValueError, match=r"me/rows is public.*--private"):
        push_to_hub(tmp_path / "rows", "me/rows", private=True)
    assert len(repo.commits) == 1
    repo.private = True
    push_to_hub(tmp_path / "rows", "me/rows", private=True)
    assert len(repo.commits) == 2


def test_dry_run(loop, capsys):
    cli.main(["push", "--input", str(loop / "iteration-1" / "model"), "--repo_id", "me/x", "--dry_run"])
    printed = capsys.readouterr().out
    assert "bytes  model.safetensors" in printed
    assert "Left out: trainer_state.json, training_args.bin" in printed
    assert "# x\n" in printed


def test_a_report_is_left_out(tmp_path, monkeypatch, capsys):
    save_rows(Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "reward": [1.0]}), tmp_path / "rows")
    (tmp_path / "rows" / manifest.PAGE).write_text("a b")
    assert manifest.PAGE not in pack(tmp_path / "rows", "me/x").files
    monkeypatch.setattr("topr_trl.hub.push.push_to_hub", lambda *_: SimpleNamespace(repo_url="there"))
    cli.main(["push", "--input", str(tmp_path / "rows"), "--repo_id", "me/x"])
    said = capsys.readouterr().out
    assert "report.html is left out, because it shows rows." in said
    assert said.endswith("Pushed: there\n")


def test_a_push_removes_files_of_an_earlier_push(loop):
    """Loading would also read old files, such as an adapter's configuration beside a model, so a push removes them."""
    model = pack(loop / "iteration-1" / "model", "me/x")
    rows = pack(next((loop / "iteration-1" / "rollouts").glob("*.parquet")), "me/rows")
    assert _is_stale("adapter_config.json", model)
    assert _is_stale("model-00001-of-00002.safetensors", model)
    assert not _is_stale("config.json", model)  # The push replaces it.
    assert _is_stale("additional_chat_templates/tool.jinja", model)
    for own in ("notes.txt", "training_config.json", "elsewhere/model.safetensors"):
        assert not _is_stale(own, model)
    assert _is_stale(manifest.NAME, rows)
    assert not _is_stale("test.parquet", rows)  # The card names only the file that is pushed.
    assert _is_stale("test.parquet", pack(loop / "iteration-1" / "rollouts", "me/rows"))


def test_a_merged_adapter_has_the_card_of_its_model(loop, tmp_path):
    model = shutil.copytree(loop, tmp_path / "run") / "iteration-1" / "model"
    (model / "adapter").mkdir()
    shutil.copy(model / "model.safetensors", model / "adapter" / "adapter_model.safetensors")
    (model / "adapter" / "adapter_config.json").write_text("{}")
    (model / "adapter" / "README.md").write_text("# Model Card\n\n[More Information Needed]\n")  # PEFT's template
    card = ModelCard(pack(model / "adapter", "me/x").card)
    assert "More Information Needed" not in card.text
    for line in pack(model, "me/x").card.splitlines():
        if line.startswith(("| steps", "| pass@1")):
            assert line in card.text
    assert card.data.library_name == "peft"


def test_code_of_a_model_goes_with_it(loop, tmp_path):
    """A model's code is pushed only if its configuration names it, because loading the model then needs the code."""
    model = shutil.copytree(loop / "iteration-1" / "model", tmp_path / "model")
    (model / "modeling_mine.py").touch()
    assert "modeling_mine.py" in pack(model, "me/x").left_out
    own = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.M"}}
    (model / manifest.NAME).unlink()
    (model / "README.md").write_text("# Mine\n")
    (model / "config.json").write_text(json.dumps(own))
    assert "modeling_mine.py" in pack(model, "me/x").files
    (model / "config.json").rename(model / "tokenizer_config.json")  # An adapter has no config.json.
    (model / "adapter_config.json").write_text("{}")
    assert "modeling_mine.py" in pack(model, "me/x").files


def test_a_damaged_manifest_beside_a_model_is_not_its_own(loop, tmp_path):
    run = shutil.copytree(loop / "iteration-1", tmp_path / "run")
    (run / "other").mkdir()
    (run / "other" / manifest.NAME).write_text("{")
    assert pack(run / "model", "me/x").card


def test_the_card_of_a_model_tells_what_its_rows_were_chosen_with(loop, tmp_path):
    """The card shows the settings of `topr curate`, although `topr train` was run without them."""
    rows, curated, model = loop / "iteration-1" / "rollouts", tmp_path / "curated", tmp_path / "model"
    chosen = {"curation": "uniform", "baseline": "0.5", "iteration_size": 10}
    stage_of("curate", CurateArguments(input=str(rows), output_dir=str(curated), **chosen)).run()
    unsaid = {name: value for name, value in SETTINGS.items() if name not in chosen}
    stage_of(
        "train",
        stage_args(TrainArguments, IterateArguments(**unsaid), input=str(curated), output_dir=str(model)),
    ).run()
    card = pack(model, "me/x").card
    assert "| baseline | 0.5 |" in card
    assert "| curation | uniform |" in card
    assert "| rows | 10 rows, " in card


def test_what_was_blanked_out_is_not_published(tmp_path):
    inputs = {"redact": ["Jane Doe"], "where": ["user=jane"], "format": None}
    manifest.begin(tmp_path, "import", inputs)
    save_rows(Dataset.from_list([{"problem_id": "1", "prompt": "Hi [redacted]", "completion": "Hi"}]), tmp_path)
    empty = {"empty": {"count": 7, "first": ["-home-jane-secret/0.jsonl, line 1"]}}
    manifest.finish(tmp_path, "import", 1, left_out=empty, noted=empty)
    published = json.loads(pack(tmp_path, "me/rows").files[manifest.NAME])["stages"]["import"]
    assert published["inputs"] == {"redact": None, "where": None, "format": None}
    assert published["left_out"] == published["noted"] == {"empty": {"count": 7, "first": []}}


def test_a_relative_path_has_the_same_card(loop, monkeypatch):
    model = loop / "iteration-1" / "model"
    monkeypatch.chdir(model)
    assert pack(Path(), "me/x").card == pack(model, "me/x").card


def test_a_checkpoint_of_a_training_that_was_stopped(loop, tmp_path):
    run = shutil.copytree(loop, tmp_path / "run")
    model = run / "iteration-1" / "model"
    checkpoint = shutil.copytree(model, run / "checkpoint-1", ignore=shutil.ignore_patterns(manifest.NAME))
    known = json.loads((model / manifest.NAME).read_text())
    for name in ("rows", "finished"):
        del known["stages"]["train"][name]
    (model / manifest.NAME).write_text(json.dumps(known))
    checkpoint = shutil.move(checkpoint, model / manifest.WORK / "checkpoint-1")
    assert "# x" in pack(Path(checkpoint), "me/x").card


def test_rows_of_a_copy_that_are_as_they_were(tmp_path):
    """The lineage ends even if two folders with the same fingerprint name each other as their source."""
    rows = [{"problem_id": "1", "prompt": "1 + 1 = ", "completion": "2", "reward": 1.0, "answer": "2"}]
    first, again = tmp_path / "first", tmp_path / "again"
    for folder, source in ((first, again), (again, first)):
        fingerprint = manifest.fingerprint(source) if source.exists() else "x"
        inputs = {"input": fingerprint, "dataset_name": str(tmp_path), "model_init_kwargs": {"cache": [str(tmp_path)]}}
        manifest.begin(folder, "score", inputs, {"input": f"../{source.name}"})
        save_rows(Dataset.from_list(rows), folder)
        manifest.finish(folder, "score", 1)
    assert manifest.fingerprint(first) == manifest.fingerprint(again)
    upload = pack(again, "me/rows")
    assert list(lineage(again)) == ["score"]
    (first / manifest.NAME).write_text("damaged")
    assert list(lineage(again)) == ["score"]
    assert str(tmp_path).encode() not in upload.files[manifest.NAME]
    assert b"../" not in upload.files[manifest.NAME]  # Relative paths are removed, too.
    assert manifest.fingerprint(unpacked(upload, tmp_path / "pushed")) == manifest.fingerprint(again)


def unpacked(upload, folder):
    """Write the pushed files to a folder, as a download from the Hub would, and return the folder."""
    folder.mkdir()
    for name, content in upload.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return folder


TASK = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Look"}]
TRAJECTORY = [
    {"role": "assistant", "content": "I look."}, {"role": "tool", "content": "AWS_KEY=abc\nHOME=/root\x1b]0;"},
    {"role": "assistant", "content": "Done."},
]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"prompt": ["a"] * 2, "completion": [TRAJECTORY[:1], TRAJECTORY]}, "  tool: AWS_KEY=abc HOME=/root�]0;\n"),
        ({"prompt": ["a"], "completion": ["ls\nAWS_KEY=abc"], "completion_ids": [[1, 2]], "completion_mask": [[1, 0]]},
         "  ls AWS_KEY=abc\n"),
        ({"prompt": ["a"], "completion": ["ls"], "completion_ids": [[1, 2]], "completion_mask": [[1, 1]]}, None),
        ({"prompt": ["a"], "completion": [TRAJECTORY[:1]]}, None),
        ({"prompt": [TASK + TRAJECTORY[:2]], "completion": [TRAJECTORY[2:]]}, "  tool: AWS_KEY=abc HOME=/root�]0;\n"),
        ({"prompt": [TASK], "completion": [TRAJECTORY[2:]]}, None),
        ({"prompt": [[*TASK, TRAJECTORY[2], *TASK[1:]]], "completion": [TRAJECTORY[2:]]}, "  user: Look\n"),
        ({"prompt": ["a"], "completion_ids": [[1, 2]], "completion_mask": [[1, 0]]}, "  1 token ids in completion"),
        ({"prompt": ["a"], "completion": ["ls x"], "completion_ids": [[1, 2]], "sampler_logps": [[-1.0, None]]},
         "  ls x\n"),
    ],
)  # fmt: skip
def test_text_of_others_is_shown_and_asked_about(tmp_path, monkeypatch, capsys, columns, shown):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    save_rows(Dataset.from_dict({**columns, "reward": [1.0] * len(columns["prompt"])}), tmp_path / "rows")
    push = ["push", "--input", str(tmp_path / "rows"), "--repo_id", "me/x"]
    cli.main([*push, "--dry_run"])
    said = capsys.readouterr().out
    assert ("These rows hold texts from tools or users" in said) == (shown is not None)
    assert (shown or "") in said
    if shown:
        with pytest.raises(ValueError, match=r"rows was not pushed.* --yes"):
            cli.main(push)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda question: "")
        with pytest.raises(ValueError, match=r"rows was not pushed\. Look through"):
            cli.main(push)
        monkeypatch.setattr("builtins.input", lambda question: "y")
        with pytest.raises(ValueError, match="Pushing needs an account"):
            cli.main(push)
    capsys.readouterr()
    with pytest.raises(ValueError, match="Pushing needs an account"):
        cli.main([*push, "--yes"])
    assert ("These rows hold texts from tools or users" in capsys.readouterr().out) == (shown is not None)


def test_messages_that_are_kept_as_json_are_shown(tmp_path):
    """`datasets` 5 reads messages as JSON if only some of them have the key `tool_calls`."""
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = {"prompt": "a", "completion": [calling, {"role": "tool", "content": "secret"}], "reward": 1.0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert texts_by_others(tmp_path / "rows.jsonl") == ["tool: secret"]
    save_rows(load_rows(tmp_path / "rows.jsonl"), tmp_path / "rows")
    assert texts_by_others(tmp_path / "rows") == ["tool: secret"]


def test_the_text_shown_is_of_all_files(tmp_path):
    for n in range(3):
        told = [{"role": "tool", "content": f"file {n}, row {m}"} for m in range(9)]
        rows = Dataset.from_dict({"prompt": ["a"] * 9, "completion": [[TRAJECTORY[0], each] for each in told]})
        rows.to_parquet(shard_path(tmp_path, n, 3))
    assert texts_by_others(tmp_path) == [
        f"tool: file {n}, row {m}" for m, n in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    ]


def test_parts_of_a_trajectory_are_counted_once(tmp_path):
    columns = {
        "prompt": ["a"] * 4, "completion": ["b"] * 4, "problem_id": [0, 0, 0, 1], "rollout_id": ["x", "x", "y", None],
    }  # fmt: skip
    save_rows(Dataset.from_dict(columns), tmp_path / "rows")
    card = str(pack(tmp_path / "rows", "me/x").card)
    assert "4 rows of 3 trajectories for 2 problems" in card
    assert "| trajectories | 3 |" in card
