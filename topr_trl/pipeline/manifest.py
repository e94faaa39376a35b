"""Read and write manifests, which record the inputs of stages and the files of finished stages.

A manifest is a file in the folder that a stage writes. A finished stage is skipped while its inputs stay the same.
Several stages can work in one folder, one after the other, if they add columns to the same rows.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topr_trl.data.tables import atomic_write
from topr_trl.pipeline.locks import LOCK
from topr_trl.pipeline.run_folders import ROLLOUTS

# pandas, pyarrow and datasets skip names that start with _ or . when they read a folder.
NAME = "_manifest.json"
WORK = "work"  # subfolder for temporary files and checkpoints, removed when the stage finishes
PAGE = "report.html"  # page of `topr look`, which users can write again during and after a stage
_NOT_FINISHED = "{} is not finished: run the stage that writes this folder again, until it finishes."

Json = dict[str, Any]
Entry = Json  # entry of a stage: `inputs` and `sources`; for a finished stage also `rows`, `finished` (time) and notes


@dataclass
class Manifest:
    """Record of the stages that worked in a folder, and of the folder's files.

    Attributes:
        stages (`dict[str, dict]`): Entries of the stages by name, in the order they ran.
        files (`dict[str, dict]`): Size (`bytes`) and checksum (`sha256`) of each file, as of the last finished stage.
            The keys are paths relative to the folder.
        discarded (`bool`): Whether the files were removed because no later stage reads them.
    """

    stages: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)
    discarded: bool = False

    @property
    def finished(self) -> bool:
        """Return whether all stages have finished."""
        return all("finished" in stage for stage in self.stages.values())


NEW, RESTART, BEGUN, DAMAGED, FINISHED = "new", "restart", "begun", "damaged", "finished"


def state(folder: Path, stage: str, inputs: Json, has_results: bool = True) -> str:
    """Return the state of a stage in its folder, without changing a file.

    Args:
        folder (`Path`): Folder that the stage writes.
        stage (`str`): Name of the stage.
        inputs (`dict`): Settings and files that determine the result, as JSON.
        has_results (`bool`, defaults to `True`): Whether the stage has written results to the folder. A stage without
            results can restart with other inputs.

    Returns:
        `NEW`, `RESTART` (started with other inputs, no results), `BEGUN` (started, not finished), `DAMAGED` (finished,
        but files are missing or have a different size), or `FINISHED`.

    Raises:
        ValueError: the folder holds results for other inputs, another unfinished stage, a damaged manifest, or files
            that topr did not write.
    """
    record = read(folder)
    if record is None:
        # Finishing the stage would remove the subfolder WORK.
        if foreign := results(folder) or [path for path in (folder / WORK,) if path.exists()]:
            raise ValueError(f"{folder} has {foreign[0].name}, which topr did not write. Use an empty folder.")
        return NEW
    entry = record.stages.get(stage)
    if entry is None:
        if not record.finished:
            raise ValueError(_NOT_FINISHED.format(folder))
        return NEW
    if changed := _describe_changes(entry["inputs"], json.loads(json.dumps(inputs))):
        if has_results or "finished" in entry:
            others = sorted(set(record.stages) - {stage})
            way_out = ", or remove this folder and the folders of later stages"
            if stage == "evaluate" and (rows := folder / ROLLOUTS / NAME).is_file():
                way_out = f". To evaluate the same rows again, also set input to {rows.parent}"
            elif others:
                way_out = f". This folder also has the results of {', '.join(others)}"
            raise ValueError(
                f"{folder} holds results for other settings ({'; '.join(changed)}). Use another output_dir{way_out}."
            )
        return RESTART
    if "finished" not in entry:
        return BEGUN
    return DAMAGED if _damaged(folder, record) else FINISHED


def begin(
    folder: Path,
    stage: str,
    inputs: Json,
    sources: Mapping[str, str] | None = None,
    has_results: bool = True,
) -> bool:
    """Prepare the folder of a stage: add the stage to the manifest, or remove damaged and temporary files.

    Args:
        folder (`Path`): Folder that the stage writes.
        stage (`str`): Name of the stage.
        inputs (`dict`): Settings and files that determine the result, as JSON.
        sources (`dict`, *optional*): Folders and files that the stage reads, by name, as paths relative to `folder`.
        has_results (`bool`, defaults to `True`): Whether the stage has written results to the folder.

    Returns:
        Whether the stage has finished, and no file is damaged.

    Raises:
        ValueError: the folder holds results for other inputs, another unfinished stage, a damaged manifest, or files
            that topr did not write.
    """
    current, record = state(folder, stage, inputs, has_results), read(folder) or Manifest()
    if current == RESTART or (current == FINISHED and record.finished):
        clean(folder)
    if current in (NEW, RESTART):
        record.stages[stage] = {"inputs": json.loads(json.dumps(inputs)), "sources": dict(sources or {})}
        _write(folder, record)
    if current == DAMAGED:  # All stages of this folder run again, and write only the missing files.
        for name in _damaged(folder, record):
            (folder / name).unlink(missing_ok=True)
        for entry in record.stages.values():
            entry.pop("finished", None)
        _write(folder, record)
    return current == FINISHED


# Inputs that are fingerprints of files, with the text that describes a difference.
_FINGERPRINTS = {
    **dict.fromkeys(("input", "compare", "rewards", "requests", "problems", "weights"), "not the same files"),
    "reward_code": "the file of a reward function has changed",
}
# Settings that determine an input with another name.
_SETTINGS = {
    "attention": "attn_implementation", "model": "model_name_or_path", "revision": "model_revision",
    "peft": "use_peft and the settings of LoRA", "weights": "model_name_or_path", "reward_code": "reward_funcs",
    "problems": "dataset_name or test_dataset_name",
}  # fmt: skip


def _describe_changes(there: Json, now: Json) -> list[str]:
    """Return a description of each input that differs."""
    return [
        f"{_SETTINGS.get(name, name)}: " + _FINGERPRINTS.get(name, f"{there.get(name)!r} there, {now.get(name)!r} now")
        for name in sorted({**there, **now})
        if there.get(name) != now.get(name)
    ]


def forget(folder: Path, stage: str) -> None:
    """Remove a stage that wrote no results from the manifest, and remove the temporary files of the folder.

    If no other stage is in the manifest, remove the manifest.
    """
    record = read(folder)
    assert record is not None
    del record.stages[stage]
    clean(folder)
    if record.stages:
        _write(folder, record)
    else:
        (folder / NAME).unlink()


def finish(folder: Path, stage: str, rows: int, **notes: object) -> None:
    """Record in the manifest that a stage has finished, with the sizes and checksums of the folder's result files.

    `results` selects the files. If all stages of the folder have finished, remove the temporary files.

    Args:
        folder (`Path`): Folder of the stage.
        stage (`str`): Name of the stage.
        rows (`int`): Number of rows.
        notes (`object`): Further values for the stage's entry, as JSON.
    """
    record = read(folder)
    assert record is not None
    record.files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in results(folder)
    }
    record.stages[stage] |= {**notes, "rows": rows, "finished": time.strftime("%Y-%m-%d %H:%M:%S")}
    _write(folder, record)
    if record.finished:
        clean(folder)


def clean(folder: Path) -> None:
    """Remove the temporary files in a folder: the subfolder `work`, and partly written files."""
    shutil.rmtree(folder / WORK, ignore_errors=True)
    for partial in folder.glob("*.partial"):
        partial.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove the result files of finished stages to free disk space. The stages stay finished."""
    record = read(folder)
    assert record is not None
    assert record.finished
    record.discarded = True
    _write(folder, record)  # Write the manifest first: if the process is then killed, missing files are no damage.
    for name in record.files:
        (folder / name).unlink(missing_ok=True)


def check_whole(path: Path) -> None:
    """Check that the stages of a folder have finished, and that the folder's files are complete.

    A file, or a folder without a manifest, passes.

    Raises:
        ValueError: a stage has not finished; files were discarded, are missing or have a different size; or the
            manifest is damaged.
    """
    record = read(path)
    if record is None:
        return
    if not record.finished:
        raise ValueError(_NOT_FINISHED.format(path))
    if record.discarded:
        raise ValueError(f"The files of {path} were removed after use. Run the stage again, with another output_dir.")
    if damaged := _damaged(path, record):
        raise ValueError(
            f"Files of {path} are missing or have a different size: {', '.join(damaged[:3])}. Run the stage again."
        )


def _damaged(folder: Path, record: Manifest) -> list[str]:
    """Return the files that are missing, or whose size differs from the manifest.

    Return [] if the files were discarded, or if a stage has not finished, because such a stage may change files.
    """
    if not record.finished or record.discarded:
        return []
    return [
        name for name, entry in record.files.items()
        if not (file := folder / name).is_file() or file.stat().st_size != entry["bytes"]
    ]  # fmt: skip


def results(folder: Path) -> list[Path]:
    """Return the result files in a folder, without the files in subfolders that have their own manifest."""
    others = {path.parent for path in folder.rglob(NAME)} - {folder}
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _is_result(path.relative_to(folder)) and not others & set(path.parents)
    ]


def _is_result(path: Path) -> bool:
    """Return whether a file is a result, and not a manifest, a page of `topr look`, a hidden or a temporary file.

    Args:
        path (`Path`): Path relative to the folder of the stage.
    """
    is_own = path.name in (NAME, PAGE) or path.suffix == ".partial" or path.parts[0] == WORK
    return not is_own and not _is_hidden(path)


def _is_hidden(path: Path) -> bool:
    """Return whether a path is hidden: a lock, or a file of another program, such as the `.cache` of `hf download`."""
    return any(part.startswith(".") for part in path.parts)


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a folder. Return None if the folder has no manifest.

    Raises:
        ValueError: the manifest is damaged, or lists a file outside the folder, which `discard` would remove.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text())
        record = Manifest(plain["stages"], plain["files"], plain.get("discarded", False))
        names = [name for name, entry in record.files.items() if isinstance(entry["bytes"], int)]
        parts = [part for stage in record.stages.values() for part in (stage["inputs"], stage["sources"])]
        whole = bool(parts) and all(isinstance(part, dict) for part in parts) and len(names) == len(record.files)
    except (json.JSONDecodeError, UnicodeError, RecursionError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged. Remove {folder}, and run the command again.")
    for name in names:
        # Check the parent, because the file itself can be a symlink. All files in the Hub's cache are symlinks.
        if (
            Path(name).name in ("", "..")
            or "\0" in name
            or not (folder / name).parent.resolve().is_relative_to(folder.resolve())
        ):
            raise ValueError(
                f"{path} names a file outside its folder ({name}), so topr did not write it. Remove {path}."
            )
    return record


def fingerprint(path: Path) -> str:
    """Return a short hash of the name and content of a file, or of the relative paths and content of a folder's files.

    Hidden files, the page of `topr look`, and subfolders that other stages write, are left out. If the stages of a
    folder have finished, hash the paths, sizes and checksums in the folder's manifest instead.
    """
    record = read(path)
    if record is not None and record.finished:
        content: object = record.files
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        # Skip folders that other stages write, because a stage may write to a subfolder of its input.
        stages = {file.parent for file in files if file.name == NAME or file.name.startswith(LOCK)} - {path}
        content = [
            [file.relative_to(path).as_posix() if path.is_dir() else file.name, _sha256(file)]
            for file in files
            if file.is_file()
            and file.name != PAGE
            and not stages & set(file.parents)
            and not _is_hidden(file.relative_to(path))
        ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _write(folder: Path, record: Manifest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / NAME) as partial:
        plain = {"stages": record.stages, "files": record.files} | ({"discarded": True} if record.discarded else {})
        partial.write_text(json.dumps(plain, indent=1))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
