"""Every metric reaches the trackers under its name in docs/metrics.md."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainers.test_completions_table import COLUMNS
from tests.trainers.test_metrics import NAMES
from topr_trl.trainers.metrics import without_ratio

TRACKERS = ("tensorboard", "wandb", "trackio")
ARRIVE = {"offline": {f"{mode}/{name}" for name in NAMES for mode in ("train", "eval")}}
# The online run uses each batch twice. Its evaluations sample completions, so all ratios are 1 and are not logged.
ARRIVE["online"] = {f"train/{name}" for name in NAMES} | {
    f"eval/{name}" for name in without_ratio(dict.fromkeys(NAMES))
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with an offline and an online run, both reported to all installed trackers."""
    installed = [name for name in TRACKERS if find_spec(name)]
    if not installed:
        pytest.skip(f"none of {', '.join(TRACKERS)} is installed")
    out = tmp_path_factory.mktemp("runs")
    subprocess.run(
        [sys.executable, Path(__file__).with_name("trackers_script.py"), out, *installed],
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(out), "TRACKIO_DIR": str(out / "trackio")},
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    return out


def records_of_wandb(path):
    """Yield the records of a run file, which is a log in LevelDB's format after a header of seven bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        length, kind = struct.unpack("<4xHB", data[place : place + 7])
        if kind == 0:  # the rest of a block of 32 KiB, too short for a record
            place += 32_768 - place % 32_768
            continue
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offline", "online"])
def test_tensorboard(runs, kind):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (events,) = (runs / kind / "runs").rglob("events.*")
    read = accumulator.EventAccumulator(str(events)).Reload()
    assert set(read.Tags()["scalars"]) >= ARRIVE[kind]
    assert [event.step for event in read.Scalars("train/topr/weight_mean")] == [2]
    assert 0 < read.Scalars("train/topr/weight_mean")[0].value <= 1


@pytest.mark.slow
def test_wandb(runs):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((runs / "wandb").glob("offline-run-*/*.wandb"))
    kinds: list[str] = []
    for file in files:
        logged = {}
        for record in map(Record.FromString, records_of_wandb(file)):
            logged.update({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        kind = "offline" if "eval/topr/weight_mean" in logged else "online"
        kinds.append(kind)
        assert logged.keys() >= ARRIVE[kind]
        assert 0 < float(logged["train/topr/weight_mean"]) <= 1
        table = json.loads((file.parent / "files" / json.loads(logged["completions/path"])).read_text())
        assert set(table["columns"]) == set(COLUMNS)
        assert table["data"]
    assert sorted(kinds) == ["offline", "online"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offline", "online"])
def test_trackio(runs, kind):
    pytest.importorskip("trackio")
    rows = sqlite3.connect(runs / "trackio" / f"{kind}.db").execute("SELECT run_name, metrics FROM metrics")
    logged = {}
    for run, metrics in rows:
        assert run == kind
        logged.update(json.loads(metrics))
    assert logged.keys() >= ARRIVE[kind]
    assert 0 < logged["train/topr/weight_mean"] <= 1
    assert logged["completions"]["_value"][0].keys() == set(COLUMNS)
