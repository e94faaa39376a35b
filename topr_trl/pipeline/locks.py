"""Locks on folders: one process works in a folder, or in a part of it, at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # how the names of lock files begin


@contextmanager
def lock(folder: Path, part: str = "") -> Iterator[None]:
    """Let one process work in a folder (or a part of it) at a time; it ends with the process, however that ends.

    Waits for a process that a killed loop left behind. Raises a ValueError if `folder` is a file.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder to write.")
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / f"{LOCK}{part}")
    try:
        held.acquire(blocking=False)
    except Timeout:
        print(f"Waiting for another process that is working in {folder}.", flush=True)
        held.acquire()
    try:
        yield
    finally:
        held.release()


def others_work(folder: Path, part: str) -> bool:
    """Whether processes hold other parts of a folder than this one."""
    return any(_is_held(path) for path in folder.glob(f"{LOCK}-*") if path.name != f"{LOCK}{part}")


def _is_held(path: Path) -> bool:
    try:
        with FileLock(path).acquire(blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def lock_all(folder: Path) -> Iterator[None]:
    """A lock on the folder, and on each of its parts in turn: waits until all workers are done."""
    with lock(folder):
        for path in sorted(folder.glob(f"{LOCK}-*")):
            with lock(folder, path.name.removeprefix(LOCK)):
                pass
        yield
