"""Run a function in worker processes, on items that may hang, crash or use all memory.

A worker is a new Python process that reads items from its standard input and writes results to its standard output, one
line of JSON each. It does not import this package, so it starts quickly, without PyTorch and without a GPU. If the
parent process ends, the worker ends at the end of its input or, if an item hangs, by an alarm.
"""

import atexit
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from typing import Any

_READY = b"ready"
_SECONDS_TO_START = 120.0


class WorkerPool:
    """Pool of worker processes that call a function, with limits of time and memory.

    A worker that exceeds the time limit is killed. A worker cannot allocate memory beyond the memory limit.

    Args:
        file (`Path`):
            Python file that defines the function. Its imports should be fast.
        function (`str`):
            Name of the function. Its argument and its result must be JSON-serializable.
        workers (`int`, *optional*):
            Maximum number of processes. They start when there is work. Default: one per core that this process may
            use, divided among the processes of `accelerate launch`.
        seconds (`float`, *optional*, defaults to `5.0`):
            Limit of wall-clock time per item, in seconds.
        memory (`int`, *optional*, defaults to 2 GiB):
            Limit of address space per worker, in bytes. It applies only on Linux.
        environment (`Mapping[str, str]`, *optional*):
            Environment variables of the workers. Default: the variables of this process.

    Raises:
        ValueError: `seconds` or `workers` is not positive.
    """

    def __init__(
        self,
        file: Path,
        function: str,
        workers: int | None = None,
        seconds: float = 5.0,
        memory: int = 2 << 30,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if seconds <= 0 or (workers is not None and workers < 1):
            raise ValueError(
                f"A pool needs a worker and time: set workers={workers} and seconds={seconds} to positive values."
            )
        command = [sys.executable, "-P", __file__, str(file), function, str(seconds), str(memory)]
        self._start = partial(_Worker, command, seconds, environment)
        self._limit = workers or _cores()
        self._workers: list[_Worker] = []
        self._lock = Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    def map(self, items: Sequence[Any], done: Callable[[int], object] = lambda count: None) -> list[Any]:
        """Call the function on each item, and return the results in the order of the items.

        Args:
            items (`Sequence`): Arguments of the function. They must be JSON-serializable.
            done (`Callable`, *optional*): Function that is called with 1 after each item, for a progress bar.

        Returns:
            The results. A result is None if the function raised an exception, if the item exceeded the time limit, or
            if two workers died on the item.

        Raises:
            RuntimeError: a worker did not start.
        """
        if os.getpid() != self._owner:  # After a fork, the workers belong to the parent.
            self._workers, self._lock, self._owner = [], Lock(), os.getpid()
        with self._lock:
            while len(self._workers) < min(self._limit, len(items)):
                self._workers.append(self._start())
            try:
                return self._map(items, done)
            except BaseException:
                self._end_workers()  # Otherwise, the next call could get results of this call.
                raise

    def _map(self, items: Sequence[Any], done: Callable[[int], object]) -> list[Any]:
        results: list[Any] = [None] * len(items)
        waiting = deque(range(len(items)))
        tried_again: set[int] = set()  # items whose worker died; each is retried once
        finished = 0
        while finished < len(items):
            for worker in self._workers:
                if worker.idle and waiting:
                    index = waiting.popleft()
                    worker.send(index, items[index])
            busy = [worker for worker in self._workers if not worker.idle]
            timeout = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = wait([worker.output for worker in busy], timeout)
            for k, worker in enumerate(self._workers):
                if worker.idle:
                    continue
                alive = worker.read() if worker.output in ready else time.monotonic() < worker.deadline
                if worker.finished or not alive:
                    died = not worker.finished and time.monotonic() < worker.deadline
                    if worker.item is not None and died and worker.item not in tried_again:
                        tried_again.add(worker.item)
                        waiting.appendleft(worker.item)
                    elif worker.item is not None:
                        results[worker.item] = worker.result
                        finished += 1
                        done(1)
                    worker.item, worker.finished = None, False
                if not alive:
                    worker.end()
                    if not worker.started:
                        raise RuntimeError("A worker process did not start; its error message is above.")
                    self._workers[k] = self._start()
        return results

    def close(self) -> None:
        """End the workers. The next call of `map` starts new workers."""
        if os.getpid() == self._owner:
            with self._lock:
                self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Worker:
    """Worker process, and the state of its current item."""

    def __init__(self, command: list[str], seconds: float, environment: Mapping[str, str] | None) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        self.seconds = seconds
        self.started = self.finished = False
        self.item: int | None = None
        self.result: Any = None
        self.deadline = time.monotonic() + _SECONDS_TO_START
        self._read = b""

    @property
    def idle(self) -> bool:
        return self.started and self.item is None

    def send(self, index: int, item: Any) -> None:
        self.item, self.result, self.finished = index, None, False
        self.deadline = time.monotonic() + self.seconds
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # The idle worker has died. `read` will detect this.
            self.process.stdin.write(json.dumps(item).encode() + b"\n")

    def read(self) -> bool:
        """Read the available output. Return False at the end of the output, which means that the worker has died."""
        read = os.read(self.output, 1 << 16)
        self._read += read
        while b"\n" in self._read:
            line, _, self._read = self._read.partition(b"\n")
            if line == _READY:
                self.started = True
            else:
                self.result, self.finished = json.loads(line), True
        return bool(read)

    def end(self) -> None:
        with self.process:  # At the end, the `with` block closes the pipes and waits for the process.
            self.process.kill()


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _serve(file: str, name: str, seconds: float, memory: int) -> None:
    """Run the loop of a worker. Write one result per item, or None if the function raises."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the parent, which ends the worker.
    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = importlib.util.spec_from_file_location("served", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["served"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name)
    # Redirect output that libraries print, so that it does not mix with the results.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    for printed in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), printed)
    output.write(_READY + b"\n")
    for line in sys.stdin.buffer:
        # The alarm has no handler, so it ends this process. A parent that is alive kills this process earlier.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        try:
            result = function(json.loads(line))
        except Exception:
            result = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        output.write(json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
