"""End a process when the loop that started it ends.

The loop is the process of `topr iterate` or `topr trial`. If the loop is killed on Linux, its stages end, too. On other
systems, a stage finishes its work, and a new loop waits for the stage.
"""

import ctypes
import os
import signal
import sys
import threading

LOOP = "TOPR_LOOP"  # environment variable with the process id of the loop
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # Loading the C library after a fork is unsafe.


def end_with_parent(by: signal.Signals) -> None:
    """Ask the kernel to send this process the signal `by` when its parent ends. Do nothing outside Linux."""
    set_parent_death_signal = 1
    if _PRCTL is not None:
        _PRCTL(set_parent_death_signal, by)


def end_with_the_loop() -> None:
    """Exit if the loop that started this process has ended. On Linux, also make this process end with its parent.

    `accelerate launch` starts further processes of a stage, so each process of a stage calls this function. Do nothing
    if no loop started this process, if the loop used a launcher, or on Windows.
    """
    loop = os.environ.get(LOOP)
    if loop is None or sys.platform == "win32":  # On Windows, `os.kill` does not check the loop, but interrupts it.
        return
    end_with_parent(KILL)
    try:
        os.kill(int(loop), 0)
    except ProcessLookupError:
        sys.exit("The loop that started this stage has ended.")


def is_one_of_several() -> bool:
    """Return whether a launcher such as `accelerate launch` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def end_processes_on_signals() -> None:
    """Make SIGTERM and SIGHUP (a closed terminal) raise `SystemExit`, so that the loop can end its processes.

    Signals that are ignored or already have a handler stay unchanged. Outside the main thread, do nothing, because
    Python can set signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # Under nohup, SIGHUP stays ignored.
            signal.signal(number, lambda received, _: sys.exit(128 + received))
