"""Start the processes of a stage, and end all of them when one fails or this process ends.

Unless a stage needs a launcher or another Python, its process is forked from a server. The server has already imported
PyTorch, transformers and TRL, because these imports take several seconds. The server is Python's fork server, see
`fork_server.py`. On systems other than Linux, forking is not safe with these libraries, so each process imports them.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Lock

from topr_trl.pipeline.parent_process import KILL, LOOP, end_with_parent

_LINES = 30  # number of log lines to show after a failure
_GRACE = 60.0  # seconds between SIGTERM and SIGKILL
_PRELOADED = ["topr_trl.pipeline.fork_server", "topr_trl.pipeline.loop", "topr_trl.cli.commands"]
_FORKS = sys.platform == "linux"
_CONTEXT = multiprocessing.get_context("forkserver") if _FORKS else multiprocessing.get_context("spawn")

# `Process.start` also polls the processes of other threads. If two threads poll a process at the same time, one of them
# can get exit status 255.
_LOCK = Lock()


@dataclass
class Program:
    """Arguments of a `topr` process, the GPUs of the process, and the command that starts the process.

    Attributes:
        arguments (`list[str]`): Arguments of `topr`.
        gpus (`list[str]`, defaults to `[]`): GPUs that the process may use. With [], the process sees the GPUs of its
            parent. The field has no effect with a launcher.
        python (`list[str]`, defaults to `[]`): Command that replaces this Python, such as the Python of a different
            environment, or `accelerate launch`. With [] and without a launcher, the process is forked from the server.
        launcher (`list[str]`, defaults to `[]`): Words before the command. A launcher can start processes on other
            machines. When the parent ends, the launcher gets SIGTERM instead of SIGKILL, so that the launcher can end
            these processes.
    """

    arguments: list[str]
    gpus: list[str] = field(default_factory=list)
    python: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        """Return the command to execute, or [] if neither `python` nor `launcher` is set."""
        if not self.python and not self.launcher:
            return []
        return [*self.launcher, *(self.python or [sys.executable]), "-m", "topr_trl", *self.arguments]


def start_server() -> None:
    """Start the server, which imports the libraries while this process does other work. Do nothing outside Linux."""
    if _FORKS:
        _CONTEXT.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()


def start(program: Program, log: Path | None = None) -> BaseProcess:
    """Start a process, on POSIX systems in a new process group. On Linux, the process ends when its parent ends.

    Args:
        program (`Program`): Command to run.
        log (`Path`, *optional*): File to append the output to. With `None`, the process shares this process's output.
    """
    start_server()
    environment = {**os.environ, LOOP: str(os.getpid())}
    if program.launcher:
        del environment[LOOP]  # This process id has no meaning on another machine.
    elif program.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(program.gpus)
    process = _CONTEXT.Process(target=_run, args=(program, environment, log))
    with _LOCK:
        process.start()
    return process


def _run(program: Program, environment: dict[str, str], log: Path | None) -> None:
    """Run a program in this new process."""
    if sys.platform != "win32":
        os.setsid()
    end_with_parent(signal.SIGTERM if program.launcher else KILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # The server ignores Ctrl+C.
    if log is not None:
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    if program.command:
        os.execvp(program.command[0], program.command)
    import torch

    # bitsandbytes, for example, uses the GPU when the server imports it. A forked process then cannot use the GPU, so
    # start Python again.
    if torch.cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, "-m", "topr_trl", *program.arguments])
    if threads := environment.get("OMP_NUM_THREADS"):  # PyTorch has read the server's environment.
        torch.set_num_threads(int(threads.split(",")[0]))
    multiprocessing.set_start_method(None, force=True)  # Reward functions and dataloaders get Python's default.
    sys.argv[1:] = program.arguments
    try:
        runpy.run_module("topr_trl", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # Trackers finish their runs in these functions, which `multiprocessing` skips.


def run_processes(programs: Iterable[Program], stage: str, log: Path | None, stop: Event) -> None:
    """Run programs at the same time until all have ended with status 0.

    All processes have ended when this function returns or raises. At Ctrl+C, or when `stop` is set, forked processes
    can first save their work.

    Args:
        programs (`Iterable[Program]`): Programs to run.
        stage (`str`): Name of the stage, for messages.
        log (`Path` or `None`): File to append the output of the processes to. With `None`, they share this process's
            output.
        stop (`Event`): Event that ends all processes when it is set.

    Raises:
        ChildProcessError: a process failed, or `stop` was set.
    """
    processes: list[BaseProcess] = []
    forked: list[BaseProcess] = []
    try:
        for program in programs:
            processes.append(start(program, log))
            forked += [] if program.command else processes[-1:]
        while None in (codes := [_exit_code(process) for process in processes]) or any(codes):
            if failed := [code for code in codes if code]:
                raise ChildProcessError(describe_failure(stage, f"failed with exit status {failed[0]}", log))
            if stop.wait(0.05):
                _interrupt(forked, _GRACE)
                raise ChildProcessError(f"The stage {stage} was stopped.")
    except KeyboardInterrupt:
        _interrupt(forked)
        raise
    finally:
        end(processes)


def _interrupt(processes: list[BaseProcess], seconds: float | None = None) -> None:
    """Send SIGINT (Ctrl+C) to processes, and wait until they have ended. `topr train` first saves a checkpoint.

    Do not pass launchers: at Ctrl+C, `srun`, for example, only prints a message.

    Args:
        processes (`list[BaseProcess]`): Forked processes.
        seconds (`float`, *optional*): Longest time to wait for each process. `None` means no limit.
    """
    for process in processes:
        if _exit_code(process) is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
    for process in processes:
        connection.wait([process.sentinel], seconds)


def _exit_code(process: BaseProcess) -> int | None:
    with _LOCK:
        return process.exitcode


def end(processes: list[BaseProcess]) -> None:
    """End processes with SIGTERM, and kill children that they leave behind.

    A process that still runs after `_GRACE` seconds gets SIGKILL, and its children are not killed.
    """
    for process in processes:
        if _exit_code(process) is None:
            process.terminate()
    for process in processes:
        if not (has_ended := connection.wait([process.sentinel], _GRACE)):
            # Do not kill the process group, because helper processes of srun must still end tasks on other machines.
            process.kill()
            connection.wait([process.sentinel])
        with _LOCK:  # Hold the lock only after the process has ended.
            process.join()
        if has_ended:  # `accelerate launch` can leave a child behind if it starts a single process.
            with suppress(OSError, AttributeError):  # No process is left, or the system is not POSIX.
                os.killpg(process.pid, KILL)  # type: ignore[arg-type]


def describe_failure(stage: str, failure: str, log: Path | None) -> str:
    """Return the error message. If there is a log, print its last lines first."""
    if log is not None:
        print(*log.read_text(errors="replace").splitlines()[-_LINES:], sep="\n", flush=True)
    return (
        f"The stage {stage} {failure}; its output is {f'in {log}' if log else 'above'}. "
        "Finished work is kept: run the same command again to continue."
    )
