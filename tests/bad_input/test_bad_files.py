"""Files and folders that cannot be read or written. See `bad_input.py`."""

import json
from typing import Any

from bad_input import Case, Kit, cases, kit, no_shard, unchanged
from transformers import AutoModelForCausalLM

from topr_trl import load_rows
from topr_trl.data.tables import save_rows
from topr_trl.pipeline import manifest

__all__ = ["kit"]

SAMPLE = (
    "sample --output_dir out --num_shots 0 --num_train_problems 4 --problems_per_shard 2 --num_generations 2 "
    "--max_new_tokens 8 --use_cpu true"
)

CURATE = "curate --input rows --output_dir out"


def read(given: str, words: str, name: str, content: bytes) -> Case:
    """`topr curate` reads a file with this content."""

    def do(kit: Kit) -> None:
        (kit.folder / name).write_bytes(content)
        kit.note()
        kit.topr("curate --output_dir out --input", name)

    return Case(given, do, words, no_shard, SystemExit)


def finished(kit: Kit) -> Any:
    """Return the folder of a finished stage, with two shards."""
    folder, rows = kit.folder / "rows", kit["rows"]
    manifest.begin(folder, "score", {"seed": 1})
    for k in range(2):
        save_rows(rows.select(range(4 * k, 4 * k + 4)), folder, k, 2)
    manifest.finish(folder, "score", 8)
    return folder


def damaged(given: str, words: str, damage: Any) -> Case:
    """`topr curate` reads the folder of a finished stage after `damage` has changed it."""

    def do(kit: Kit) -> None:
        damage(finished(kit))
        kit.note()
        kit.topr(CURATE)

    return Case(given, do, words, unchanged, SystemExit)


def _cut(folder: Any) -> None:
    shard = folder / "rows-00001-of-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:-50])
    (folder / manifest.NAME).unlink()


def _overwritten(folder: Any) -> None:
    shard = folder / "rows-00001-of-00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:4] + b"\xff" * 400 + content[404:])  # same size as in the manifest


def _of_another_task(folder: Any) -> None:
    path = folder / manifest.NAME
    known = json.loads(path.read_text())
    known["stages"] = {"sample": {**known["stages"]["score"], "inputs": {"task": "gsm9k"}}}
    path.write_text(json.dumps(known))


# fmt: off
READ = [
    read("an empty file", "rows.jsonl, empty, no row", "rows.jsonl", b""),
    read("a truncated line", "rows.jsonl, download", "rows.jsonl", b'{"prompt": "a", "reward": 1}\n{"prompt": '),
    damaged("a truncated shard", "rows/rows-00001-of-00002.parquet, download", _cut),
    damaged("a shard with damage inside", "rows/rows-00001-of-00002.parquet, download", _overwritten),
    damaged("a shard is missing", "rows, missing, rows-00000-of-00002.parquet, run the stage again",
        lambda folder: min(folder.glob("*.parquet")).unlink()),
    Case("a manifest of a task that there is not",
        lambda kit: [_of_another_task(finished(kit)), kit.topr("score --input rows --output_dir out")],
        "rows, 'gsm9k', gsm8k, math, version", no_shard, SystemExit),
]
# fmt: on


def written(given: str, words: str, before: Any, arguments: str) -> Case:
    """A command fails, and does not change the files that `before` makes."""

    def do(kit: Kit) -> None:
        before(kit)
        kit.note()
        kit.topr(arguments)

    return Case(given, do, words, unchanged, SystemExit)


def _thesis(kit: Kit) -> None:
    kit.out.mkdir()
    (kit.out / "thesis.tex").write_text("years of work")


# fmt: off
FOLDERS = [
    written("an `output_dir` of the loop that holds other files", "out, thesis.tex, empty folder", _thesis,
        "iterate --output_dir out"),
    written("an output that is a file", "out, file, folder", lambda kit: [finished(kit), kit.out.write_text("a")],
        CURATE),
    written("a task without built-in problems, and no dataset", "task math, --dataset_name, --task gsm8k",
        lambda kit: (kit.folder / "a").touch(), f"{SAMPLE} --task math"),
]
# fmt: on


def _full(kit: Kit) -> None:
    kit.small_disk("16k")
    kit.topr(SAMPLE)


def _goes_on(kit: Kit) -> None:
    first = sorted(kit.out.glob("*.parquet"))
    assert [path.name for path in first] == ["rows-00000-of-00002.parquet"]
    kit.before = {path: path.read_bytes() for path in first}
    kit.small_disk("1m")
    kit.topr(SAMPLE)
    unchanged(kit)
    assert len(load_rows(kit.out)) == 8


def _full_of_checkpoints(kit: Kit) -> None:
    kit.small_disk("2200k")
    kit.offline(kit["rows"], save_strategy="steps", save_steps=1, save_only_model=True)


def _full_of_optimizer(kit: Kit) -> None:
    kit.small_disk("2200k")
    kit.offline(kit["rows"], save_strategy="steps", save_steps=1, optim="adamw_torch")


def _one_checkpoint(kit: Kit) -> None:
    checkpoint = kit.out / "checkpoint-1"
    assert not list(kit.out.glob("checkpoint-2/trainer_state.json"))
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 1


def _no_checkpoint(kit: Kit) -> None:
    assert list(kit.out.glob("checkpoint-1/*.safetensors"))
    assert not list(kit.out.glob("*/trainer_state.json"))


# fmt: off
FULL = [
    Case("the disk is full while `topr sample` writes its second shard", _full, "No space left",
        _goes_on, SystemExit),
    Case("the disk is full while the second checkpoint is written", _full_of_checkpoints,
        "out/checkpoint-2, disk, full, make room", _one_checkpoint, OSError),
    Case("the disk is full while the state of the optimizer is written", _full_of_optimizer,
        "out/checkpoint-1, disk, full, make room", _no_checkpoint, OSError),
]
# fmt: on


@cases([*READ, *FOLDERS, *FULL])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
