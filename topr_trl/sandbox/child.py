"""Where a program runs: the worker's side of `topr_trl.sandbox.unit_tests`. It imports the standard library alone.

A worker enters namespaces of its own once. For each program it forks a keeper, and the keeper forks the inmate, which
runs the program. The keeper ends the inmate, and with it all that it started, when the inmate is done or when the
worker lets go of the leash, be it because the worker was killed.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

if sys.platform == "linux":
    import resource

NO_PROGRAM = "no program"  # what is found of a text that does not compile
NOT_STARTED = "not started"  # ... if the sandbox failed, and not the program
RAN = "ran\n"  # what a program has led to comes after this

_PROCESSES = 16  # of a program, its threads included
_FILE_BYTES = 1 << 20  # that a program may write to a file; all of its files together: four times that
_OPEN_FILES = 64
_RESULT_BYTES = 1 << 20
_RESULT_FD, _STARTED, _REFUSED, _COMPILED = 3, b"\n", b"-", b"+"
_SECONDS_TO_START = 10.0

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h. System calls as new as these have one number on all
# architectures.
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_RECURSIVE, _CLONED_TREE, _MOVE_FROM_FD, _MOUNT_ATTR_RDONLY = -100, 0x8000, 0x8001, 0x4, 0x1
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 36, 38, 0x20080522


def canonical(value: Any) -> str:
    """Text of plain data that is the same for values that are equal (`1 == 1.0 == True`), and a single line.

    Nothing that a subclass defines is called.

    Raises:
        TypeError: there is something else in it than None, numbers, text, bytes, lists, tuples, sets and dicts.
    """
    if value is None:
        return "None"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return int.__repr__(int(value)) if float.is_integer(value) else float.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, list.__iter__(value)))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, tuple.__iter__(value)))})"
    if isinstance(value, set):
        return f"{{{', '.join(sorted(map(canonical, set.__iter__(value))))}}}"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(canonical, frozenset.__iter__(value))))}}}"
    if isinstance(value, dict):
        return f"dict {sorted((canonical(k), canonical(v)) for k, v in dict.items(value))}"
    raise TypeError(f"{type(value).__name__} is no plain data.")


@dataclass(frozen=True)
class Job:
    """A program, and how it is run.

    Attributes:
        program, calls: source texts.
        seconds, memory: limits; memory in bytes of address space.
        directory: where it starts.
        alone: whether it has namespaces of its own.
        user: who runs it, if that is not the worker's user.
    """

    program: str
    calls: list[str]
    seconds: float
    memory: int
    directory: str
    alone: bool
    user: int | None


def run(item: list[Any] | None) -> str:
    """Run a program and evaluate calls in it.

    Args:
        item: `[program, calls, seconds, memory]`; None: nothing is run.

    Returns:
        `RAN` and a line for each call, the canonical text of its value or `!` and the name of an exception; fewer
        lines if the program ended before, `!Timeout` if it took too long. `NO_PROGRAM`, if it does not compile;
        `NOT_STARTED`, if the sandbox failed. A program's doing is what comes after `RAN`. For None: in what the sandbox
        is weaker here than it can be.
    """
    refused, user = enter(), nobody()
    if item is None:
        if user is None and os.geteuid() == 0:
            refused += f"{'; ' * bool(refused)}programs run as root, since no other user can read {os.__file__}"
        return refused
    program, calls, seconds, memory = item
    try:
        directory = tempfile.mkdtemp() if refused else "/dev/shm"
        if refused and user is not None:
            os.chown(directory, user, user)
        job = Job(program, calls, seconds, memory, directory, not refused, user)
        results, to_results = os.pipe()
        end_of_leash, leash = os.pipe()
        keeper = os.fork()
    except OSError:
        return NOT_STARTED
    if keeper == 0:
        os.close(leash)
        _and_exit(lambda: _keep(job, to_results, end_of_leash))
    os.close(to_results)
    os.close(end_of_leash)
    try:
        return _read(results, seconds)
    finally:
        os.close(leash)
        os.waitpid(keeper, 0)
        os.close(results)
        if refused:
            shutil.rmtree(directory, ignore_errors=True)


def _read(results: int, seconds: float) -> str:
    if not select.select([results], [], [], _SECONDS_TO_START)[0] or os.read(results, 1) != _STARTED:
        return NOT_STARTED
    deadline, read = time.monotonic() + seconds, b""
    while select.select([results], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(results, 1 << 16)
        read += part
        if read[:1] == _REFUSED:
            return NO_PROGRAM
        if not part:
            return RAN + (read.removeprefix(_COMPILED).decode(errors="replace").rstrip("\n") or "!Ended")
        if len(read) > _RESULT_BYTES:
            return f"{RAN}!TooLong"
    return f"{RAN}!Timeout"


def _and_exit(work: Callable[[], object]) -> None:
    """In a forked process: nothing of the worker's runs in it afterwards."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _works(work: Callable[[], object]) -> bool:
    """Whether something can be done, tried in a process of its own."""
    child = os.fork()
    if child == 0:
        _and_exit(work)
    return os.waitpid(child, 0)[1] == 0


@cache
def enter() -> str:
    """Give up the network, writable files, and the sight of other processes and of what is in `_hidden`.

    Returns:
        What the kernel refuses, or nothing.
    """
    user, group = os.geteuid(), os.getegid()
    os.umask(0o022)
    try:
        _libc("unshare", _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWNET | (_CLONE_NEWUSER if user else 0))
        if user:
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for file, content in maps.items():
                with open(f"/proc/self/{file}", "w") as opened:
                    opened.write(content)
        _libc("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        if not _works(_own_processes_and_files):
            raise OSError("those of processes")
        for directory in _hidden():
            _hide(directory, kept={os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _libc("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    except OSError as error:
        return f"namespaces ({error})"
    return ""


def _hidden() -> list[str]:
    """Other processes with their environments, daemons' sockets, keys and tokens."""
    places = ["/proc", "/run", "/tmp", "/var/tmp", os.path.expanduser("~")]
    return [place for place in map(os.path.realpath, places) if os.path.isdir(place) and place != "/"]


def _hide(directory: str, kept: set[str]) -> None:
    """Put an empty directory there, with nothing in it but those of `kept` that were."""
    inside = [path for path in kept if os.path.commonpath([path, directory]) == directory]
    trees = {path: _libc("syscall", _SYS_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONED_TREE) for path in inside}
    _libc("mount", b"tmpfs", directory.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=64k,mode=0755")
    for path, tree in trees.items():
        os.makedirs(path, exist_ok=True)
        _libc("syscall", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_FROM_FD)
        os.close(tree)


@cache
def nobody() -> int | None:
    """As whom programs run where the worker is root: a user that nobody is, one for each worker.

    Root's files are not theirs, root's processes are out of their reach, and the limit on processes, which does not
    hold for root, counts theirs alone. None if the worker is not root, or no other user can read Python's own files.
    """
    user = 61_184 + os.getpid() % 4_096  # systemd's range for users of a moment
    return user if os.geteuid() == 0 and _works(lambda: _become(user, os.__file__)) else None


def _own_processes_and_files() -> None:
    """The next process forked is the first of a namespace, all of which ends with it; /dev/shm is an empty one."""
    _libc("unshare", _CLONE_NEWPID | _CLONE_NEWNS)
    size = f"size={4 * _FILE_BYTES},mode=0777".encode()
    _libc("mount", b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, size)


def _keep(job: Job, to_results: int, end_of_leash: int) -> None:
    if job.alone:
        _own_processes_and_files()
    else:
        _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1)
    inmate = os.fork()
    if inmate == 0:
        _and_exit(lambda: _live(job, to_results))
    os.close(to_results)
    select.select([end_of_leash, os.pidfd_open(inmate)], [], [])
    for kill in (os.killpg, os.kill):  # the first of a namespace takes all of it along
        with suppress(ProcessLookupError):
            kill(inmate, signal.SIGKILL)
    os.waitpid(inmate, 0)
    while not job.alone and (left := _children()):  # what has left the group
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    """Of this process. Those of its children's that lost their parent are among them (`PR_SET_CHILD_SUBREAPER`)."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _become(user: int, and_read: str = os.devnull) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    with open(and_read, "rb"):
        pass


def _live(job: Job, to_results: int) -> None:
    os.setsid()
    os.chdir(job.directory)
    os.dup2(to_results, _RESULT_FD)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(_RESULT_FD + 1, 256)  # the worker's channels among them
    _give_up_rights(job)
    os.write(_RESULT_FD, _STARTED)
    space = {"__name__": "program"}
    try:
        compiled = compile(job.program, "program", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        os.write(_RESULT_FD, _REFUSED)
        return
    os.write(_RESULT_FD, _COMPILED)  # before anything of the program's runs
    try:
        exec(compiled, space)
    except BaseException as error:
        return _write(f"!{type(error).__name__}")
    for call in job.calls:
        try:
            result = canonical(eval(call, space))
        except BaseException as error:
            result = f"!{type(error).__name__}"
        _write(result)


def _give_up_rights(job: Job) -> None:
    limits = {
        resource.RLIMIT_AS: job.memory,
        resource.RLIMIT_CPU: int(job.seconds) + 2,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: _PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if job.user is not None:
        _become(job.user)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _libc("capset", ctypes.byref(header), ctypes.byref(none))


def _write(line: str) -> None:
    left = line.encode(errors="replace") + b"\n"
    while left:
        left = left[os.write(_RESULT_FD, left) :]


def _libc(name: str, *arguments: Any) -> int:
    result: int = getattr(_library(), name)(*arguments)
    if result == -1:
        raise OSError(code := ctypes.get_errno(), f"{name}: {os.strerror(code)}")
    return result


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
