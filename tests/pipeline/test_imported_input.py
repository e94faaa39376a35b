"""Commands that read rows import files of other systems."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, pipeline

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.pipeline import manifest
from topr_trl.pipeline.imported_input import with_imported_input
from topr_trl.pipeline.run_folders import check_own
from topr_trl.pipeline.settings import IterateArguments, TrialArguments
from topr_trl.pipeline.stages.import_ import Import

THUMBS = "question,response,thumbs\n" + "".join(
    f"{n} + 1?,{n + good},{'up' if good else 'down'}\n" for n in range(8) for good in (1, 0)
)
QUIET = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--disable_tqdm", "true"]


@pytest.fixture
def feedback(tmp_path):
    (tmp_path / "feedback.csv").write_text(THUMBS)
    return str(tmp_path / "feedback.csv")


@pytest.fixture
def chat_model(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "chat-model")
    tokenizer.save_pretrained(tmp_path / "chat-model")
    return str(tmp_path / "chat-model")


@pytest.mark.slow
def test_one_command_trains_a_model_from_a_csv_of_thumbs(tmp_path, feedback, chat_model, capsys):
    """The trained model can be loaded and answers. A second run of the command trains nothing."""
    out = tmp_path / "trained"
    command = ["train", "--input", feedback, "--model_name_or_path", chat_model, "--output_dir", str(out), *QUIET,
               "--max_steps", "2", "--learning_rate", "1e-3"]  # fmt: skip
    main.main(command)
    assert "Recognized as table" in capsys.readouterr().out
    rows = load_rows(out / "imported")
    assert rows["reward"][:] == [1.0, -1.0] * 8
    trained, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out, chat_model))
    assert any((trained[name] != before[name]).any() for name in before)
    question = [{"role": "user", "content": "3 + 1?"}]
    answer = pipeline("text-generation", str(out))(question, max_new_tokens=4)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    assert answer["content"]
    done = manifest.read(out).stages["train"]
    assert done["sources"] == {"input": "imported"}
    main.main(command)
    assert manifest.read(out).stages["train"] == done


def test_settings_of_the_import_reach_it_and_not_the_rows(tmp_path, feedback, capsys):
    """`topr curate` imports a CSV with the given labels. The same settings are accepted for the imported rows."""
    given = ["--reward_fields", "thumbs", "--label_values", "up=2", "down=-1"]
    main.main(["curate", "--input", feedback, "--output_dir", str(tmp_path / "out"), *given])
    assert load_rows(tmp_path / "out")["reward"][:] == [2.0, -1.0] * 8
    rows = str(tmp_path / "out" / "imported")
    capsys.readouterr()
    main.main(["curate", "--input", rows, "--output_dir", str(tmp_path / "again"), *given])
    assert "Recognized" not in capsys.readouterr().out
    assert load_rows(tmp_path / "again")["reward"][:] == [2.0, -1.0] * 8


@pytest.mark.parametrize("given", [[], ["--reward_fields", "thumbs"]])
def test_shards_of_a_dataset_on_the_hub_can_be_of_another_system(tmp_path, given):
    (tmp_path / "data").mkdir()
    for k, (answer, thumbs) in enumerate([("2", "up"), ("3", "down")]):
        table = pa.table({"question": ["1 + 1?"], "response": [answer], "thumbs": [thumbs]})
        pq.write_table(table, tmp_path / "data" / f"train-0000{k}-of-00002.parquet")
    main.main(["curate", "--input", str(tmp_path / "data"), "--output_dir", str(tmp_path / "out"), *given])
    assert load_rows(tmp_path / "out")["reward"][:] == [1.0, -1.0]


def test_a_trial_and_a_loop_read_a_csv(tmp_path, feedback):
    """A trial and a loop get the imported rows, without the settings of the import."""
    given = {"output_dir": str(tmp_path / "out"), "label_values": ["up=3", "down=0"], "use_cpu": True, "bf16": False}
    for args in (TrialArguments(input=feedback, **given), IterateArguments(rows=feedback, **given)):
        made = with_imported_input(args)
        rows = made.input if isinstance(made, TrialArguments) else made.rows
        assert rows == str(tmp_path / "out" / "imported")
        assert load_rows(rows)["reward"][:2] == [3.0, 0.0]
        assert not made.reads_other_files
        assert args.label_values
    (tmp_path / "out" / ".DS_Store").touch()
    check_own(tmp_path / "out")  # The loop accepts the folder of the import.


@pytest.mark.parametrize(
    "records",
    [
        [{"prompt": "a", "completion": "b", "reward": 1.0}, {"prompt": "a", "completion": "c", "reward": 0.0}],
        [{"prompt": "a", "completion": "b", "reward": reward, "chosen": "x", "rejected": "y"} for reward in (1, 0)],
    ],
)
def test_rows_are_read_as_they_are(tmp_path, records, monkeypatch):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr(Import, "run", lambda stage: pytest.fail("rows were imported"))
    main.main(["curate", "--input", str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path / "out")])
    assert load_rows(tmp_path / "out")["prompt"][:] == ["a", "a"]


@pytest.mark.parametrize("setting", [("--completion", "last_turn"), ("--skip_unusable", "true")])
def test_settings_of_an_import_are_refused_for_rows(tmp_path, setting):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "reward": 1.0}')
    command = ["curate", "--input", str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path / "out"), *setting]
    with pytest.raises(ValueError, match=rf"{setting[0][2:]} has no effect.*a\.jsonl already holds rows"):
        main.main(command)


@pytest.mark.parametrize("given", [["--label_values", "up=1"], ["--reward_fields", "score"]])
def test_other_settings_than_those_of_the_import_are_refused(tmp_path, feedback, given):
    rows = str(tmp_path / "rows")
    main.main(["import", "--input", feedback, "--output_dir", rows, "--label_values", "up=2", "down=-1"])
    with pytest.raises(ValueError, match=r"has no effect.*rows already holds rows"):
        main.main(["curate", "--input", rows, "--output_dir", str(tmp_path / "out"), *given])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"chosen": "a", "rejected": "b"}', r"a\.jsonl, line 1: it has no prompt"),
        ("a.jsonl", '{"prompt": "a"}', "need the columns prompt, completion"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        main.main(["curate", "--input", str(tmp_path / name), "--output_dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("header", "given"),
    [("question,said,reward", ["--completion_field", "said"]), ("asked,response,reward", ["--prompt_field", "asked"])],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_one_named_column_of_a_table_suffices_if_the_other_has_a_known_name(tmp_path, suffix, header, given):
    values = ("2 + 3?", "5", "1")
    line = json.dumps(dict(zip(header.split(","), values, strict=True)))
    (tmp_path / f"a.{suffix}").write_text(f"{header}\n{','.join(values)}\n" if suffix == "csv" else line)
    main.main(["import", "--input", str(tmp_path / f"a.{suffix}"), "--output_dir", str(tmp_path / "rows"), *given])
    (row,) = load_rows(tmp_path / "rows").to_list()
    assert (row["prompt"][0]["content"], row["completion"][0]["content"], row["reward"]) == ("2 + 3?", "5", 1.0)


def test_words_in_json_lines_are_read_with_their_numbers(tmp_path):
    lines = [{"prompt": "a", "completion": "b", "reward": word} for word in ("good", "bad")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    main.main(["curate", "--input", str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path / "out"), "--label_values",
               "good=1", "bad=-1", "--chat", "false"])  # fmt: skip
    assert load_rows(tmp_path / "out").select_columns(["prompt", "reward"]).to_dict() == {
        "prompt": ["a", "a"], "reward": [1.0, -1.0],
    }  # fmt: skip


def test_several_processes_do_not_import(tmp_path, feedback, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"feedback\.csv does not contain rows.*topr import"):
        main.main(["curate", "--input", feedback, "--output_dir", str(tmp_path / "out")])
