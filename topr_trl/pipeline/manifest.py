"""Manifests: what each stage was given and made, beside its files, so that finished work is not done again.

A folder may hold the work of several stages, one after the other: those that add columns to the same rows.
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

# Readers of data sets (pandas, pyarrow, datasets) skip names that begin with _ or ., and read the shards beside it.
NAME = "_manifest.json"
WORK = "work"  # the folder in a stage's folder for what is not its result; removed when it is finished
_NOT_FINISHED = "{} is not finished: run the stage that writes it to its end first."

Json = dict[str, Any]
Stage = Json  # `inputs`, `sources`; when it is finished: `rows`, `finished`, and what else it tells


@dataclass
class Manifest:
    """The stages that worked in a folder, and its files.

    Attributes:
        stages: by name, in the order in which they worked here.
        files: size in `bytes` and `sha256` of each, after the last stage that was finished.
        discarded: whether they were removed when nothing was to read them again.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)
    discarded: bool = False

    @property
    def finished(self) -> bool:
        """Whether all stages have finished."""
        return all("finished" in stage for stage in self.stages.values())

    @property
    def last(self) -> Stage:
        """The stage that came last."""
        return list(self.stages.values())[-1]


NEW, RESTART, BEGUN, DAMAGED, FINISHED = "new", "restart", "begun", "damaged", "finished"


def state(folder: Path, stage: str, inputs: Json, made: bool = True, defaults: Mapping[str, Any] | None = None) -> str:
    """Return how far a stage is in its folder. Changes no file.

    Args:
        folder (`Path`): The folder that the stage writes.
        stage (`str`): Name of the stage.
        inputs (`dict`): Everything that the result depends on, as JSON.
        made (`bool`, defaults to `True`): Whether the stage has written results there. If not, it may start again with
            other inputs.
        defaults (`dict`, *optional*): Values of inputs that an older manifest lacks.

    Returns:
        `NEW`, `RESTART` (begun with other inputs, nothing written), `BEGUN`, `DAMAGED` (finished, but files are missing
        or of another size), or `FINISHED`.

    Raises:
        ValueError: the folder holds results for other inputs, an unfinished stage, or files that topr did not write.
    """
    known = read(folder)
    if known is None:
        if foreign := results(folder):
            raise ValueError(f"{folder} has {foreign[0].name}, which topr did not write. Name an empty folder.")
        return NEW
    there = known.stages.get(stage)
    if there is None:
        if not known.finished:
            raise ValueError(_NOT_FINISHED.format(folder))
        return NEW
    if changed := _changed(there["inputs"], json.loads(json.dumps(inputs)), defaults or {}):
        if made or "finished" in there:
            raise ValueError(
                f"{folder} holds results for other settings ({'; '.join(changed)}). Use another output_dir, or remove "
                "the folder and those of later stages."
            )
        return RESTART
    if "finished" not in there:
        return BEGUN
    return DAMAGED if _damaged(folder, known) else FINISHED


def begin(
    folder: Path,
    stage: str,
    inputs: Json,
    sources: Mapping[str, str] | None = None,
    made: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> bool:
    """Open a stage's folder: create it, or remove what is in the way of the stage.

    Args:
        folder, stage, inputs, made, defaults: as for `state`.
        sources (`dict`, *optional*): Folders that the stage reads, relative to its own.

    Returns:
        Whether the stage has finished.

    Raises:
        ValueError: as for `state`.
    """
    found, known = state(folder, stage, inputs, made, defaults), read(folder) or Manifest()
    if found == RESTART or (found == FINISHED and known.finished):
        clean(folder)
    if found in (NEW, RESTART):
        known.stages[stage] = {"inputs": json.loads(json.dumps(inputs)), "sources": dict(sources or {})}
        _write(folder, known)
    if found == DAMAGED:  # each stage that worked here makes the missing files again
        for name in _damaged(folder, known):
            (folder / name).unlink(missing_ok=True)
        for entry in known.stages.values():
            entry.pop("finished", None)
        _write(folder, known)
    return found == FINISHED


_OF_FILES = ("input", "compare", "rewards", "requests", "problems")  # inputs that are fingerprints


def _changed(there: Json, now: Json, defaults: Mapping[str, Any]) -> list[str]:
    """Return the inputs that differ, each with both values; a missing input has its default."""
    found = []
    for name in sorted({**there, **now}):
        before, after = there.get(name, defaults.get(name)), now.get(name, defaults.get(name))
        if not same_value(before, after):
            found.append(
                f"{name}: " + ("not the same files" if name in _OF_FILES else f"{before!r} there, {after!r} now")
            )
    return found


def same_value(one: object, other: object) -> bool:
    """Return whether two values of a setting are the same. Version 0.2 wrote a baseline of 0 as the text "0"."""
    if isinstance(one, str) != isinstance(other, str):
        try:
            return float(one) == float(other)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False
    return one == other


def forget(folder: Path, stage: str) -> None:
    """Undo `begin` for a stage that wrote nothing."""
    known = read(folder)
    assert known is not None
    del known.stages[stage]
    clean(folder)
    if known.stages:
        _write(folder, known)
    else:
        (folder / NAME).unlink()


def finish(folder: Path, stage: str, rows: int, **notes: object) -> None:
    """Write down that a stage is finished: the folder's files with sizes and checksums, its rows, and notes.

    Folders in it that have manifests of their own are left to those.
    """
    known = read(folder)
    assert known is not None
    known.files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in results(folder)
    }
    known.stages[stage] |= {**notes, "rows": rows, "finished": time.strftime("%Y-%m-%d %H:%M:%S")}
    _write(folder, known)
    if known.finished:
        clean(folder)


def clean(folder: Path) -> None:
    """Remove what finished stages no longer need."""
    shutil.rmtree(folder / WORK, ignore_errors=True)
    for partial in folder.glob("*.partial"):
        partial.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove what finished stages made, when nothing will read it again; they stay finished."""
    known = read(folder)
    assert known is not None
    assert known.finished
    known.discarded = True
    _write(folder, known)  # before the first is gone: a kill in between is no damage
    for name in known.files:
        (folder / name).unlink(missing_ok=True)


def check_whole(path: Path) -> None:
    """Raise a ValueError for a folder whose stages are not finished, or that has lost files since.

    A file, or a folder without a manifest, is taken as it is.
    """
    known = read(path)
    if known is None:
        return
    if not known.finished:
        raise ValueError(_NOT_FINISHED.format(path))
    if known.discarded:
        raise ValueError(f"The files of {path} were removed after use. Run the stage again, with another output_dir.")
    if damaged := _damaged(path, known):
        raise ValueError(
            f"{path} has lost or truncated files since it was finished: {', '.join(damaged[:3])}. Make it again."
        )


def _damaged(folder: Path, known: Manifest) -> list[str]:
    """Files that are missing or of another size. An unfinished stage may be replacing them."""

    def whole(path: Path, size: int) -> bool:
        return path.is_file() and path.stat().st_size == size

    if not known.finished or known.discarded:
        return []
    return [name for name, entry in known.files.items() if not whole(folder / name, entry["bytes"])]


def results(folder: Path) -> list[Path]:
    """The files that stages have made here, without those of folders inside that have a manifest of their own."""
    others = {path.parent for path in folder.rglob(NAME)} - {folder}
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_aside(path.relative_to(folder)) and not others & set(path.parents)
    ]


def _is_aside(path: Path) -> bool:
    """Whether a file in a stage's folder is none of its results."""
    return path.name == NAME or _is_hidden(path) or path.suffix == ".partial" or path.parts[0] == WORK


def _is_hidden(path: Path) -> bool:
    """Locks, and what other programs leave beside files, such as the `.cache` of `hf download`."""
    return any(part.startswith(".") for part in path.parts)


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder, None if there is none.

    Raises:
        ValueError: it is damaged, or names files outside of the folder (those would be removed with it).
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text())
        known = Manifest(plain["stages"], plain["files"], plain.get("discarded", False))
        names = [name for name, entry in known.files.items() if isinstance(entry["bytes"], int)]
        parts = [part for stage in known.stages.values() for part in (stage["inputs"], stage["sources"])]
        whole = bool(parts) and all(isinstance(part, dict) for part in parts) and len(names) == len(known.files)
    except (json.JSONDecodeError, UnicodeError, RecursionError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged. Remove {folder}, and run the command again.")
    for name in names:
        # The file itself may be a link: in the Hub's cache all are.
        if (
            Path(name).name in ("", "..")
            or "\0" in name
            or not (folder / name).parent.resolve().is_relative_to(folder.resolve())
        ):
            raise ValueError(f"{path} names a file outside of its folder ({name}): no stage writes that. Remove it.")
    return known


def fingerprint(path: Path) -> str:
    """A short hash of the content of files, which for what finished stages made their manifest knows."""
    known = read(path)
    if known is not None and known.finished:
        content: object = known.files
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        # A stage may write into a folder of what it reads.
        stages = {file.parent for file in files if file.name == NAME or file.name.startswith(LOCK)} - {path}
        content = [
            [file.name, _sha256(file)]
            for file in files
            if file.is_file() and not stages & set(file.parents) and not _is_hidden(file.relative_to(path))
        ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _write(folder: Path, known: Manifest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / NAME) as partial:
        plain = {"stages": known.stages, "files": known.files} | ({"discarded": True} if known.discarded else {})
        partial.write_text(json.dumps(plain, indent=1))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
