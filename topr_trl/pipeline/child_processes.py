"""Start groups of processes, restart a group after a failure, and end all groups when this process ends."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO

Process = subprocess.Popen[bytes]

_LINES = 30  # number of log lines to show after a failure
_PAUSE = 10.0  # seconds to wait before a restart
_GRACE = 60.0  # seconds between SIGTERM and SIGKILL


@dataclass
class ProcessGroup:
    """Processes that run together. If one fails, all of them are ended and restarted.

    Attributes:
        start (`Callable`): Function that starts the processes and returns them. If it is a generator and raises an
            error, the processes that it yielded are ended.
        has_finished (`Callable`): Function that checks whether the work is done. Exit status 0 is not enough, because a
            launcher can exit with 0 after losing a machine. The default always returns `True`.
        processes (`list`, defaults to `[]`): Started processes. Empty before a start and after `end`.
        failures (`int`, defaults to `0`): Number of failures so far.
        pause (`float`, defaults to `0.0`): Earliest time of the next start, on the clock of `time.monotonic`.
        is_done (`bool`, defaults to `False`): Whether the work is done.
    """

    start: Callable[[], Iterable[Process]]
    has_finished: Callable[[], bool] = lambda: True
    processes: list[Process] = field(default_factory=list)
    failures: int = 0
    pause: float = 0.0
    is_done: bool = False

    def failure(self) -> str:
        """Return a description of the group's failure, or "" if it has not failed.

        If all processes have exited with status 0 and the work is done, also set `is_done`, and kill children that the
        processes left behind.
        """
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
        """End the processes with SIGTERM, and kill children that they leave behind.

        A process that still runs after `_GRACE` seconds gets SIGKILL, and its children are not killed.
        """
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                # Do not kill the process group. Other processes of srun must still end tasks on other machines.
                process.kill()
                process.wait()
            else:
                _kill_group(process)
        self.processes = []


def _kill_group(process: Process) -> None:
    """Kill children that a process left behind. `accelerate launch` can leave one if it starts a single process."""
    with suppress(OSError, AttributeError):  # No process is left, or the system is not POSIX.
        os.killpg(process.pid, _KILL)


def run_process_groups(groups: list[ProcessGroup], stage: str, retries: int, log: Path | None, stop: Event) -> None:
    """Run groups of processes until all are done. Restart a group that fails.

    All processes have ended when this function returns or raises.

    Args:
        groups (`list[ProcessGroup]`): Groups to run.
        stage (`str`): Name of the stage, for messages.
        retries (`int`): Maximum number of restarts of a group.
        log (`Path` or `None`): File with the output of the processes, for messages. With `None`, they share this
            process's output.
        stop (`Event`): Event that ends all groups when it is set.

    Raises:
        ChildProcessError: a group failed more than `retries` times, or `stop` was set.
    """
    try:
        while not all(group.is_done for group in groups):
            for group in groups:
                if not group.processes and not group.is_done and time.monotonic() >= group.pause:
                    group.processes.extend(group.start())
                elif failure := group.failure():
                    group.end()
                    group.failures += 1
                    group.pause = time.monotonic() + _PAUSE
                    if group.failures > retries:
                        raise ChildProcessError(_describe_failure(stage, failure, log))
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


def _describe_failure(stage: str, failure: str, log: Path | None) -> str:
    """Return the error message. If there is a log, print its last lines first."""
    if log is not None:
        print(*log.read_text(errors="replace").splitlines()[-_LINES:], sep="\n", flush=True)
    return (
        f"The stage {stage} {failure}; its output is {f'in {log}' if log else 'above'}. "
        "Finished work is kept: run the same command again to continue."
    )


def start(command: list[str], gpus: list[str], output: IO[bytes] | None, is_launcher: bool = False) -> Process:
    """Start a process in its own process group. On Linux, the process ends when this process ends.

    Args:
        command (`list[str]`): Program and its arguments.
        gpus (`list[str]`): GPUs that the process may use. A launcher, or any process with [], sees all GPUs that this
            process sees.
        output (`IO[bytes]` or `None`): File for the output. With `None`, the started process shares this process's
            output.
        is_launcher (`bool`, defaults to `False`): Whether the program starts processes on other machines. When this
            process ends, a launcher gets SIGTERM instead of SIGKILL, so that it can end the processes it started.
    """
    environment = {**os.environ, _LOOP: str(os.getpid())}
    if is_launcher:
        del environment[_LOOP]  # This process id has no meaning on another machine.
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    ended = partial(_end_with_parent, signal.SIGTERM if is_launcher else _KILL)
    return subprocess.Popen(
        command, env=environment, preexec_fn=ended if sys.platform == "linux" else None, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


# The loop is the process of `topr iterate` or `topr trial`. If it is killed on Linux, its stages end, too. On other
# systems, a stage finishes its work, and a new loop waits for it.
# Each child asks the kernel for a signal when its parent ends. Processes that `accelerate launch` starts do this in
# `end_with_the_loop`. This function also checks that the loop still runs, because the loop may have ended earlier.

_LOOP = "TOPR_LOOP"  # environment variable with the process id of the loop
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # Loading it after a fork is unsafe.


def _end_with_parent(by: signal.Signals) -> None:
    """Ask the kernel to send this process the signal `by` when its parent ends. Do nothing outside Linux."""
    set_parent_death_signal = 1
    if _PRCTL is not None:
        _PRCTL(set_parent_death_signal, by)


def end_processes_on_signals() -> None:
    """Make SIGTERM and SIGHUP (a closed terminal) raise `SystemExit`, so that the loop can end its processes.

    Do nothing in other threads, because Python can set signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # Under nohup, SIGHUP stays ignored.
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def end_with_the_loop() -> None:
    """Exit if the loop that started this process has ended. On Linux, also make this process end with its parent.

    Do nothing if no loop started this process, if the loop used a launcher, or on Windows.
    """
    loop = os.environ.get(_LOOP)
    if loop is None or sys.platform == "win32":  # On Windows, `os.kill` does not check the loop, but interrupts it.
        return
    _end_with_parent(_KILL)
    try:
        os.kill(int(loop), 0)
    except ProcessLookupError:
        sys.exit("The loop that started this stage has ended.")
