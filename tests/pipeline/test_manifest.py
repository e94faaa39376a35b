import json
import multiprocessing
import time

import pytest

from topr_trl.pipeline import manifest


def test_a_finished_stage_is_known_by_its_inputs_and_files(tmp_path):
    folder, inputs = tmp_path / "stage", {"seed": 1, "limits": (0.0, 1.0)}
    assert manifest.begin(folder, inputs) is False
    assert manifest.begin(folder, inputs) is False  # begun, not finished
    (folder / "rows.parquet").write_bytes(b"rows")
    (folder / manifest.WORK).mkdir()
    (folder / manifest.WORK / "scratch").write_bytes(b"scratch")
    manifest.finish(folder, rows=4, note="kept")
    known = manifest.read(folder)
    assert (known["rows"], known["note"]) == (4, "kept")
    assert known["files"] == {"rows.parquet": {"bytes": 4, "sha256": known["files"]["rows.parquet"]["sha256"]}}
    assert manifest.begin(folder, inputs) is True
    (folder / "rows.parquet").write_bytes(b"row")  # cut off
    assert manifest.begin(folder, inputs) is False
    assert not (folder / "rows.parquet").exists()  # or whoever makes what is missing would leave it


def test_rows_that_another_folder_holds_too_can_be_dropped(tmp_path):
    folder = tmp_path / "candidates"
    manifest.begin(folder, {"seed": 1})
    (folder / "rows.parquet").write_bytes(b"rows")
    manifest.drop(folder, tmp_path / "scored")  # not finished: nothing is removed
    assert (folder / "rows.parquet").is_file()
    manifest.finish(folder, rows=4)
    before = manifest.fingerprint(folder)
    manifest.check_kept(folder)
    for _ in range(2):
        manifest.drop(folder, tmp_path / "scored")
        assert not (folder / "rows.parquet").exists()
        assert manifest.begin(folder, {"seed": 1}) is True
    assert manifest.fingerprint(folder) == before
    manifest.check_whole(folder)
    with pytest.raises(ValueError, match="remove both folders"):
        manifest.check_kept(folder)


def test_results_for_other_settings_are_an_error_that_names_them(tmp_path):
    manifest.begin(tmp_path, {"seed": 3, "top_p": 1.0})
    manifest.begin(tmp_path, {"seed": 1, "top_p": 1.0})  # it has made nothing yet
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match=r"other settings \(seed: 1 there, 2 now\)"):
        manifest.begin(tmp_path, {"seed": 2, "top_p": 1.0})


def test_fingerprint_follows_the_content(tmp_path):
    prints = []
    for content in (b"one", b"two", b"one"):
        folder = tmp_path / str(len(prints))
        manifest.begin(folder, {})
        (folder / "rows").write_bytes(content)
        prints.append(manifest.fingerprint(folder))  # without a finished manifest: by names and sizes
        manifest.finish(folder, rows=1)
        prints.append(manifest.fingerprint(folder))
    assert prints[0] == prints[2] == prints[4]
    assert prints[1] == prints[5] != prints[3]


def _hold(folder, seconds):
    with manifest.lock(folder):
        (folder / "held").touch()
        time.sleep(seconds)


def test_the_lock_ends_with_its_process(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, 600))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    with manifest.lock(tmp_path):  # waits for nobody
        pass


@pytest.mark.parametrize("content", ['{"inputs": {}, "files": []}', "[" * 100_000, "null", '{"inputs": {}}'])
def test_what_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / manifest.NAME).write_text(content)
    with pytest.raises(ValueError, match=r"_manifest\.json is damaged"):
        manifest.begin(tmp_path, {})


@pytest.mark.parametrize("name", ["../victim", "link/victim", "/victim", "sub/../../victim", "..", "\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
    folder, victim = tmp_path / "stage", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"victim")
    (folder / "link").symlink_to(tmp_path)
    (folder / manifest.NAME).write_text(json.dumps({"inputs": {}, "files": {name: {"bytes": 1}}}))
    for work in (manifest.begin, manifest.drop):
        with pytest.raises(ValueError, match="names a file outside of its folder"):
            work(folder, {})
    assert victim.is_file()


def test_files_of_something_else_are_not_taken_for_results(tmp_path):
    (tmp_path / "candidates-00000-of-00001.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match="files that no stage has written"):
        manifest.begin(tmp_path, {"seed": 1})


def _work(folder, order, name, shared, seconds):
    with manifest.lock(folder, shared=shared):
        order.put((time.monotonic(), f"{name} begins"))
        time.sleep(seconds)
        order.put((time.monotonic(), f"{name} ends"))


def test_workers_share_a_lock_and_who_closes_waits_for_them(tmp_path):
    context = multiprocessing.get_context("fork")
    order = context.Queue()
    workers = [context.Process(target=_work, args=(tmp_path, order, "worker", True, 1.0)) for _ in range(2)]
    for worker in workers:
        worker.start()
    seen = [order.get(timeout=10) for _ in range(2)]
    closing = context.Process(target=_work, args=(tmp_path, order, "closing", False, 0.0))
    closing.start()
    seen += [order.get(timeout=10) for _ in range(4)]
    # A queue does not keep the order of several processes.
    assert [what for _, what in sorted(seen)] == ["worker begins"] * 2 + ["worker ends"] * 2 + [
        "closing begins",
        "closing ends",
    ]
    for process in (*workers, closing):
        process.join()
