"""Store the results of cells (single runs), and run missing cells in a pool of processes."""

import gc
import json
import logging
import multiprocessing
import os
import platform
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from topr_trl import __version__

Cell = dict[str, Any]  # settings that JSON can represent, including `claim`


class Unfinished(Exception):
    """Error for missing results that other cells or tables depend on."""


class Store:
    """Results of a profile: one file per experiment, one JSON object per line.

    If a run is killed, only the running cells are lost.
    """

    def __init__(self, directory: Path, setting: str = "") -> None:
        self.directory, self.setting = directory, setting  # entries with another setting are ignored
        self.finished: dict[str, dict[str, Any]] = {}
        for path in sorted(directory.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a kill truncated this line
                if entry["setting"] == setting:
                    self.finished[_key(entry["cell"])] = entry

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a cell, or None if the cell has not been run."""
        entry = self.finished.get(_key(cell))
        return entry["result"] if entry else None

    def results(self, cells: list[Cell]) -> list[tuple[Cell, dict[str, Any]]]:
        """Return the finished cells, with their results."""
        return [(cell, result) for cell in cells if (result := self.get(cell)) is not None]

    def unfinished(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells that have not been run."""
        return [cell for cell in cells if self.get(cell) is None]

    def entries(self, cells: list[Cell]) -> list[dict[str, Any]]:
        """Return the entries of the finished cells, with result, wall-clock seconds, machine, versions and date."""
        return [self.finished[_key(cell)] for cell in cells if _key(cell) in self.finished]

    def add(self, cell: Cell, result: dict[str, Any], seconds: float, command: str) -> None:
        """Save a result."""
        entry = {
            "cell": cell, "setting": self.setting, "result": result, "seconds": round(seconds, 1), "command": command,
            "date": time.strftime("%Y-%m-%d"), "machine": machine(), "versions": versions(), "commit": commit(),
        }  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{cell['claim']}.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(entry) + "\n")
        self.finished[_key(cell)] = entry


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


@cache
def versions() -> dict[str, str]:
    """Return the versions of packages that can affect results."""
    return {"topr_trl": __version__, **{name: version(name) for name in ("torch", "transformers", "trl")}}


@cache
def commit() -> str:
    """Return the commit of this checkout, or "" outside a repository or without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return found.stdout.strip() if found else ""


@cache
def machine() -> str:
    """Return the names of the GPU (if any) and processor, and the number of cores."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{model}, {os.cpu_count()} cores"


def run(
    plan: Callable[[], list[Cell]], work: Any, store: Store, workers: int, command: str, description: str,
    device: str = "cpu", until: float = float("inf"),
) -> bool:  # fmt: skip
    """Start single-threaded worker processes on a device, and run the planned cells in them, see `finish`."""
    os.environ["TQDM_DISABLE"] = "1"  # hides the bars of the workers, because one bar shows all cells
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare, (device,)) as pool:
        return finish(plan, work, store, pool, workers, command, description, until)


def finish(
    plan: Callable[[], list[Cell]], work: Any, store: Store, pool: Executor, workers: int, command: str,
    description: str, until: float = float("inf"),
) -> bool:  # fmt: skip
    """Run the planned cells that are not in the store, and return whether all have been run.

    Results determine further cells, so `plan` is called again after each one. No cell starts after the time `until`,
    see `time.monotonic`: more cells than workers are never submitted, because a submitted one cannot be stopped.
    """
    machine(), versions(), commit()  # An error here loses no result.
    running: dict[Future[tuple[Any, float]], Cell] = {}
    with tqdm(desc=description, unit="cell") as progress:
        while True:
            cells = plan()
            todo = [cell for cell in store.unfinished(cells) if cell not in running.values()]
            for cell in todo[: workers - len(running) if time.monotonic() < until else 0]:
                running[pool.submit(timed, work, cell)] = cell
            progress.total, progress.n = len(cells), len(cells) - len(store.unfinished(cells))
            progress.refresh()
            if not running:
                return not todo
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result, seconds = future.result()
                store.add(running.pop(future), result, seconds, command)


def timed(work: Any, *args: Any) -> tuple[Any, float]:
    """Return the result of `work(*args)`, and its time in seconds."""
    start = time.perf_counter()
    result = work(*args)
    seconds = time.perf_counter() - start
    gc.collect()  # frees the model, which is part of reference cycles
    return result, seconds


def _prepare(device: str) -> None:
    """Set the device, one thread and quiet logs in a worker process. The worker exits if its parent is killed."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device != "cpu":  # not set on a CPU, because a default device slows down every call of torch
        torch.set_default_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass can return NaN
    torch.set_num_threads(1)  # one cell per core is faster than one cell on all cores
    os.environ["OMP_NUM_THREADS"] = "1"  # for subprocesses of a cell
    quiet()


def quiet() -> None:
    """Show no progress bars and no warnings of libraries in this process."""
    import datasets
    import transformers

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
