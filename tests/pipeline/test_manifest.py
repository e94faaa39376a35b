import json

import pytest

from topr_trl.pipeline import locks, manifest


def test_a_finished_stage_is_known_by_its_inputs_and_files(tmp_path):
    folder, inputs = tmp_path / "stage", {"seed": 1, "limits": (0.0, 1.0)}
    assert manifest.begin(folder, "sample", inputs) is False
    assert manifest.begin(folder, "sample", inputs) is False  # started, not finished
    (folder / "rows.parquet").write_bytes(b"rows")
    (folder / manifest.WORK).mkdir()
    (folder / manifest.WORK / "scratch").write_bytes(b"scratch")
    manifest.finish(folder, "sample", rows=4, note="kept")
    known = manifest.read(folder)
    assert (known.stages["sample"]["rows"], known.stages["sample"]["note"]) == (4, "kept")
    assert known.files == {"rows.parquet": {"bytes": 4, "sha256": known.files["rows.parquet"]["sha256"]}}
    assert manifest.begin(folder, "sample", inputs) is True
    (folder / "rows.parquet").write_bytes(b"row")  # truncated
    assert manifest.begin(folder, "sample", inputs) is False
    assert not (folder / "rows.parquet").exists()  # Otherwise, the stage would keep the truncated file.


def test_several_stages_work_on_a_folder_one_after_the_other(tmp_path):
    manifest.begin(tmp_path, "sample", {"seed": 1})
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match="is not finished"):  # More rows may follow.
        manifest.begin(tmp_path, "score", {"task": "math"})
    manifest.finish(tmp_path, "sample", rows=4)
    before = manifest.fingerprint(tmp_path)
    assert manifest.begin(tmp_path, "score", {"task": "math"}) is False
    with pytest.raises(ValueError, match="is not finished"):
        manifest.check_whole(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"rows, scored")
    scratch = tmp_path / manifest.WORK / "log_mu_parts"
    scratch.mkdir(parents=True)
    assert manifest.begin(tmp_path, "sample", {"seed": 1}) is True  # The running stage may change its file.
    assert scratch.is_dir()  # The running stage needs these files.
    manifest.finish(tmp_path, "score", rows=4)
    assert not scratch.exists()
    assert manifest.fingerprint(tmp_path) != before
    manifest.check_whole(tmp_path)
    assert manifest.begin(tmp_path, "sample", {"seed": 1}) is True
    assert manifest.begin(tmp_path, "score", {"task": "math"}) is True
    with pytest.raises(ValueError, match=r"task: 'math' there, 'gsm8k' now"):
        manifest.begin(tmp_path, "score", {"task": "gsm8k"})
    (tmp_path / "rows.parquet").unlink()
    assert manifest.begin(tmp_path, "score", {"task": "math"}) is False
    assert manifest.begin(tmp_path, "sample", {"seed": 1}) is False  # `sample` must run again, too.


def test_files_of_other_programs_are_no_input(tmp_path):
    (tmp_path / "rows.jsonl").write_text("rows")
    before = manifest.fingerprint(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "rows.lock").touch()
    (tmp_path / ".lock").touch()
    assert manifest.fingerprint(tmp_path) == before
    (tmp_path / "more.jsonl").write_text("more")
    assert manifest.fingerprint(tmp_path) != before


def test_results_for_other_settings_are_an_error_that_names_them(tmp_path):
    manifest.begin(tmp_path, "sample", {"seed": 3, "top_p": 1.0})
    manifest.begin(tmp_path, "sample", {"seed": 1, "top_p": 1.0}, has_results=False)
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match=r"other settings \(seed: 1 there, 2 now\).*another output_dir, or remove"):
        manifest.begin(tmp_path, "sample", {"seed": 2, "top_p": 1.0})
    with pytest.raises(ValueError, match=r"model_revision: None there, 'v2' now"):
        manifest.begin(tmp_path, "sample", {"seed": 1, "top_p": 1.0, "revision": "v2"})
    with pytest.raises(ValueError, match=r"model_name_or_path: not the same files\)"):
        manifest.begin(tmp_path, "sample", {"seed": 1, "top_p": 1.0, "weights": "hash"})
    # A folder with the results of other stages may be the only copy of the rows, so removing it is no advice.
    manifest.finish(tmp_path, "sample", 1)
    manifest.begin(tmp_path, "curate", {"seed": 1}, has_results=False)
    manifest.finish(tmp_path, "curate", 1)
    with pytest.raises(ValueError, match=r"another output_dir\. .*results of sample\.$"):
        manifest.begin(tmp_path, "curate", {"seed": 2})
    # `topr evaluate` keeps the rows that it sampled inside its folder.
    manifest.begin(tmp_path, "evaluate", {"seed": 1})
    manifest.finish(tmp_path, "evaluate", 1)
    manifest.begin(tmp_path / "rollouts", "sample", {})
    with pytest.raises(ValueError, match=r"another output_dir\. To evaluate the same rows .* input to .*rollouts"):
        manifest.begin(tmp_path, "evaluate", {"seed": 2})


def test_fingerprint_follows_the_content(tmp_path):
    prints = []
    for content in (b"one", b"two", b"one"):
        folder = tmp_path / str(len(prints))
        manifest.begin(folder, "sample", {})
        (folder / "rows").write_bytes(content)
        prints.append(manifest.fingerprint(folder))  # before the stage has finished
        manifest.finish(folder, "sample", rows=1)
        prints.append(manifest.fingerprint(folder))
    assert prints[0] == prints[4] != prints[2]
    assert prints[1] == prints[5] != prints[3]
    (tmp_path / "a/train").mkdir(parents=True)
    (tmp_path / "a/train/rows").write_bytes(b"one")
    before = manifest.fingerprint(tmp_path / "a")
    (tmp_path / "a" / manifest.PAGE).write_bytes(b"the page of topr look")
    assert manifest.fingerprint(tmp_path / "a") == before
    (tmp_path / "a/train").rename(tmp_path / "a/test")
    assert manifest.fingerprint(tmp_path / "a") != before


@pytest.mark.parametrize("content", ['{"inputs": {}, "files": []}', "[" * 100_000, "null", '{"inputs": {}}',
                                     '{"stages": {}, "files": {}}', '{"stages": {"a": 1}, "files": {}}'])  # fmt: skip
def test_other_json_is_no_manifest(tmp_path, content):
    (tmp_path / manifest.NAME).write_text(content)
    with pytest.raises(ValueError, match=r"_manifest\.json is damaged"):
        manifest.begin(tmp_path, "sample", {})


@pytest.mark.parametrize("name", ["../victim", "link/victim", "/victim", "sub/../../victim", "..", "\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
    folder, victim = tmp_path / "stage", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"victim")
    (folder / "link").symlink_to(tmp_path)
    files = {name: {"bytes": 1}}
    content = {"stages": {"sample": {"inputs": {}, "sources": {}}}, "files": files}
    (folder / manifest.NAME).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="names a file outside its folder"):
        manifest.begin(folder, "sample", {})
    assert victim.is_file()


def test_files_of_something_else_are_not_taken_for_results(tmp_path):
    (tmp_path / "rows-00000-of-00001.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match="which topr did not write"):
        manifest.begin(tmp_path, "sample", {"seed": 1})
    (tmp_path / "other" / manifest.WORK).mkdir(parents=True)  # Finishing the stage would remove it.
    with pytest.raises(ValueError, match="has work, which topr did not write"):
        manifest.begin(tmp_path / "other", "sample", {"seed": 1})


def test_output_inside_an_input_is_not_its_content(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "one.jsonl").write_text("{}")
    before = manifest.fingerprint(tmp_path / "logs")
    with locks.lock(tmp_path / "logs" / "model"):
        assert manifest.fingerprint(tmp_path / "logs") == before
        manifest.begin(tmp_path / "logs" / "model", "train", {})
        (tmp_path / "logs" / "model" / "checkpoint").write_text("1")
        assert manifest.fingerprint(tmp_path / "logs") == before
    (tmp_path / "logs" / "more").mkdir()
    (tmp_path / "logs" / "more" / "two.jsonl").write_text("{}")
    assert manifest.fingerprint(tmp_path / "logs") != before


def test_the_page_of_topr_plot_is_no_result(tmp_path):
    manifest.begin(tmp_path, "train", {"seed": 1})
    (tmp_path / "report.html").write_text("2 steps")  # The user can plot a running stage.
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    manifest.finish(tmp_path, "train", rows=4)
    before = manifest.fingerprint(tmp_path)
    (tmp_path / "report.html").write_text("all of 4 steps")
    manifest.check_whole(tmp_path)
    assert manifest.begin(tmp_path, "train", {"seed": 1}) is True
    assert (tmp_path / "report.html").is_file()
    assert manifest.fingerprint(tmp_path) == before
