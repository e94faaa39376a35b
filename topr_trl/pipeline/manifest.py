"""Manifests: what a stage was given and what it made, beside its files, so that finished work is not done again."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Readers of data sets (pandas, pyarrow, datasets) pass over names that begin so, and read the shards beside it.
NAME = "_manifest.json"
WORK = "work"  # the folder in a stage's folder for what is not its result; removed when it is finished


def begin(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Open a stage's folder.

    Args:
        folder: of the stage; made if it is not there.
        inputs: everything that its results depend on, as JSON.

    Returns:
        Whether the stage is finished already: its manifest says so, and the files are there in their sizes.

    Raises:
        ValueError: the folder holds results for other inputs, or files of something else.
    """
    known, inputs = read(folder), json.loads(json.dumps(inputs))
    if known is None:
        if foreign := _results(folder):
            raise ValueError(
                f"{folder} holds files that no stage has written ({foreign[0].name}): name an empty folder."
            )
        _write(folder, {"inputs": inputs, "files": None})
        return False
    if known["files"] is None and not _results(folder) and not (folder / WORK).exists():
        _write(folder, {"inputs": inputs, "files": None})  # begun, and it has made nothing
        return False
    changed = [name for name in {**known["inputs"], **inputs} if known["inputs"].get(name) != inputs.get(name)]
    if changed:
        details = "; ".join(f"{n}: {known['inputs'].get(n)!r} there, {inputs.get(n)!r} now" for n in sorted(changed))
        raise ValueError(
            f"{folder} holds results for other settings ({details}). Remove the folder and those of later stages, or "
            "use another output_dir."
        )
    if known["files"] is None:
        return False
    damaged = _damaged(folder, known)
    for name in damaged:  # to be made anew
        (folder / name).unlink(missing_ok=True)
    return not damaged


def finish(folder: Path, rows: int, **notes: Any) -> None:
    """Write down that a stage is finished: its files with sizes and checksums, its rows, and what else it tells.

    Folders in it that have manifests of their own answer for themselves.
    """
    known = read(folder)
    assert known is not None
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in _results(folder)
    }
    _write(folder, {**known, **notes, "rows": rows, "files": files, "finished": time.strftime("%Y-%m-%d %H:%M:%S")})


def clean(folder: Path) -> None:
    """Remove what a finished stage has no more use for."""
    shutil.rmtree(folder / WORK, ignore_errors=True)
    for partial in folder.glob("*.partial"):
        partial.unlink(missing_ok=True)


def check_whole(path: Path) -> None:
    """Refuse to read a folder whose stage has not been finished, or that has lost files since.

    Raises:
        ValueError: naming what is wrong. A file, or a folder without a manifest, is taken as it is.
    """
    known = read(path)
    if known is None:
        return
    if known["files"] is None:
        raise ValueError(f"{path} is not finished: run the stage that writes it to its end first.")
    if damaged := _damaged(path, known):
        raise ValueError(f"{path} has lost or cut files since it was finished: {', '.join(damaged[:3])}. Make it anew.")


def drop(folder: Path, copy: Path) -> None:
    """Remove the files of a finished stage, for which there is no more use since `copy` holds their rows and more.

    The stage stays finished. A second call does nothing.
    """
    known = read(folder)
    if known is None or known["files"] is None:
        return
    if not known.get("dropped"):
        _write(folder, {**known, "dropped": str(copy)})
    for name in known["files"]:
        (folder / name).unlink(missing_ok=True)


def check_kept(folder: Path) -> None:
    """Refuse to work on rows that are gone.

    Raises:
        ValueError: naming the folder that holds them.
    """
    copy = (read(folder) or {}).get("dropped")
    if copy:
        raise ValueError(
            f"The rows of {folder} were removed when {copy} had been made of them (keep_copies=True keeps both). If "
            "that is damaged now, remove both folders, and they are made anew."
        )


def _damaged(folder: Path, known: dict[str, Any]) -> list[str]:
    def whole(path: Path, size: int) -> bool:
        return path.is_file() and path.stat().st_size == size

    if known.get("dropped"):
        return []
    return [name for name, entry in known["files"].items() if not whole(folder / name, entry["bytes"])]


def _results(folder: Path) -> list[Path]:
    """The files that a stage has made, without those of folders in its own that have a manifest."""
    others = {path.parent for path in folder.rglob(NAME)} - {folder}
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_aside(path.relative_to(folder)) and not others & set(path.parents)
    ]


def _is_aside(path: Path) -> bool:
    """What lies in a stage's folder and is not its result."""
    return path.name == NAME or path.name.startswith(_LOCK) or path.suffix == ".partial" or path.parts[0] == WORK


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if there is none.

    Raises:
        ValueError: it is damaged, or names files outside of the folder: those would be removed with it.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        known: dict[str, Any] = json.loads(path.read_text())
        files = {} if known["files"] is None else known["files"]
        names = [name for name, entry in files.items() if isinstance(entry["bytes"], int)]
        whole = isinstance(known["inputs"], dict) and len(names) == len(files)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):  # no JSON, or something else in it
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: remove {folder}, and it is made anew.")
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
    """A short hash of what a finished stage made; of names and sizes, for files without a manifest."""
    known = read(path)
    if known is not None and known["files"] is not None:
        content: Any = known["files"]
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        content = [[file.name, file.stat().st_size] for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


_LOCK = ".lock"


def check_own(folder: Path) -> None:
    """Refuse to run a loop in a folder that is somebody else's: it holds files, and no loop has locked it yet.

    Raises:
        ValueError: naming one of the files.
    """
    if folder.is_dir() and not (folder / _LOCK).exists() and (foreign := sorted(folder.iterdir())):
        raise ValueError(f"{folder} holds files that no loop has written ({foreign[0].name}): name an empty folder.")


@contextmanager
def lock(folder: Path, part: str = "", shared: bool = False) -> Iterator[None]:
    """Let one process work in a folder (or a part of it) at a time; it ends with the process, however that ends.

    Those that share a lock work at the same time; one that does not waits for all of them.

    A process left over by a loop that was killed may still be at work; it is waited for.

    Raises:
        ValueError: `folder` is a file.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder to write.")
    folder.mkdir(parents=True, exist_ok=True)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with (folder / f"{_LOCK}{part}").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another process that is at work in {folder}.", flush=True)
            fcntl.flock(file, kind)
        yield


def _write(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NAME}.{os.getpid()}.partial"
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(folder / NAME)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
