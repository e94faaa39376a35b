"""Processes that run together: started, watched, ended with this one, and started again where one fails."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO

Process = subprocess.Popen[bytes]

_LINES = 30  # of its log that are shown of a stage that failed
_PAUSE = 10.0  # seconds before processes are started again
_GRACE = 60.0  # seconds in which a process that is asked to end does so


@dataclass
class ProcessGroup:
    """Processes that run together: where one fails, all are ended, and started again.

    A launcher may say nothing of a lost machine: exit status 0 alone is not trusted, `has_finished` has to say so, too.
    """

    start: Callable[[], list[Process]]
    has_finished: Callable[[], bool] = lambda: True
    processes: list[Process] = field(default_factory=list)
    failures: int = 0
    pause: float = 0.0  # begin again at this time
    is_done: bool = False

    def failure(self) -> str:
        """Return why the group failed, "" if it did not; and note when all is done."""
        codes = [process.poll() for process in self.processes]
        if failed := [code for code in codes if code]:
            return f"failed with exit status {failed[0]}"
        if codes and None not in codes:
            self.is_done = self.has_finished()
            if not self.is_done:
                return "ended before its work was done"
            self.end()
        return ""

    def end(self) -> None:
        """End the processes, and what they have started on this machine: asked first, then killed."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()  # alone: what srun leaves behind ends its tasks elsewhere
                process.wait()
            else:
                _kill_group(process)
        self.processes = []


def _kill_group(process: Process) -> None:
    """Kill what a process has started and left: `accelerate launch` leaves its one process behind."""
    with suppress(OSError, AttributeError):  # nothing is left, or not POSIX
        os.killpg(process.pid, _KILL)


def run_process_groups(groups: list[ProcessGroup], stage: str, retries: int, log: Path | None, stop: Event) -> None:
    """Run groups of processes until all are done; one that fails is started again.

    Args:
        stage: whose they are, for messages.
        log: file that their output goes to, if it does not go where that of this process goes.

    Raises:
        ChildProcessError: one failed more than `retries` times, or `stop` was set. All have ended by then.
    """
    try:
        while not all(group.is_done for group in groups):
            for group in groups:
                if not group.processes and not group.is_done and time.monotonic() >= group.pause:
                    group.processes = group.start()
                elif failure := group.failure():
                    group.end()
                    group.failures += 1
                    group.pause = time.monotonic() + _PAUSE
                    if group.failures > retries:
                        raise ChildProcessError(_message(stage, failure, log))
                    print(
                        f"A process of the stage {stage} {failure}; starting it again (retry {group.failures} of "
                        f"{retries}).",
                        flush=True,
                    )
            if stop.wait(0.1):
                raise ChildProcessError(f"The stage {stage} was stopped.")
    finally:
        for group in groups:
            group.end()


def _message(stage: str, failure: str, log: Path | None) -> str:
    if log is not None:
        print(*log.read_text(errors="replace").splitlines()[-_LINES:], sep="\n", flush=True)
    return (
        f"The stage {stage} {failure}; its output is {f'in {log}' if log else 'above'}. "
        "What was finished is kept: the same command continues from there."
    )


def start(command: list[str], gpus: list[str], output: IO[bytes] | None, is_launcher: bool = False) -> Process:
    """Start a process, in a group of its own, that ends with this one.

    What a launcher starts may be on another machine. It is asked to end, and passes that on.
    """
    environment = {**os.environ, _LOOP: str(os.getpid())}
    if is_launcher:
        del environment[_LOOP]  # no process of that machine
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    ended = partial(_end_with_parent, signal.SIGTERM if is_launcher else _KILL)
    return subprocess.Popen(
        command, env=environment, preexec_fn=ended if sys.platform == "linux" else None, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


# A stage ends when its loop is killed (Linux; elsewhere it finishes its work, and a new loop waits for it). The loop
# asks the kernel for that for its children; those of a launcher in between ask for themselves, which may be too late.

_LOOP = "TOPR_LOOP"
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has none
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before a fork, not after


def _end_with_parent(by: signal.Signals) -> None:
    set_parent_death_signal = 1
    if _PRCTL is not None:
        _PRCTL(set_parent_death_signal, by)


def end_processes_on_signals() -> None:
    """For a loop: SIGTERM and a closed terminal (SIGHUP) end it as an error does, and so what it has started."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def end_with_the_loop() -> None:
    """For a process that a loop may have started: end when the loop does, at once if it has ended already."""
    loop = os.environ.get(_LOOP)
    if loop is None:
        return
    _end_with_parent(_KILL)
    try:
        os.kill(int(loop), 0)
    except ProcessLookupError:
        sys.exit("The loop that started this stage has ended.")
