"""Lock folders, so that only one process writes to a folder, or to a part of it, at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # prefix of the names of lock files


@contextmanager
def lock(folder: Path, part: str = "") -> Iterator[None]:
    """Hold the lock of a folder, or of a part of the folder. If another process holds the lock, wait.

    The lock is released at the end of the `with` block, or when the process is killed. If a killed loop leaves a stage
    running, a new loop waits until the stage releases its lock.

    Args:
        folder (`Path`): Folder to lock. A missing folder is created.
        part (`str`, defaults to `""`): Part of the folder with its own lock, such as `"-0-of-4"` for the first of four
            workers. By default, hold the lock of the folder, which does not include the locks of its parts.

    Raises:
        ValueError: `folder` is a file.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, and must be a folder.")
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
    """Return whether any part of a folder is locked, not counting `part`."""
    return any(_is_held(path) for path in folder.glob(f"{LOCK}-*") if path.name != f"{LOCK}{part}")


def _is_held(path: Path) -> bool:
    try:
        with FileLock(path).acquire(blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def lock_all(folder: Path) -> Iterator[None]:
    """Lock a folder, and wait until all workers have released its parts."""
    with lock(folder):
        for path in sorted(folder.glob(f"{LOCK}-*")):
            with lock(folder, path.name.removeprefix(LOCK)):
                pass
        yield
