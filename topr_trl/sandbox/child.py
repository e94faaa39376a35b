"""Run programs in a worker process of `topr_trl.sandbox.unit_tests`.

A worker enters new Linux namespaces once. For each program, it forks a supervisor, and the supervisor forks the child
that runs the program. The supervisor kills the child and all of its descendants when the child ends, or when the
control pipe closes. The worker holds the other end of this pipe, so the pipe also closes when the worker is killed.

This module imports only the standard library, so a worker starts quickly.
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

NO_PROGRAM = "no program"  # result for a text that does not compile
NOT_STARTED = "not started"  # result if the sandbox failed before the program started
RAN = "ran\n"  # prefix of the results of a program that started

_PROCESSES = 16  # limit of processes and threads per program
_FILE_BYTES = 1 << 20  # limit per file; in namespaces, all files of a program together can have four times this size
_OPEN_FILES = 64
_RESULT_BYTES = 1 << 20
# File descriptor to which the child writes results, and bytes that it writes before the results.
_RESULT_FD, _STARTED, _REFUSED, _COMPILED = 3, b"\n", b"-", b"+"
_SECONDS_TO_START = 10.0

# Constants of sched.h, mount.h, fcntl.h, prctl.h and capability.h in Linux, and numbers of system calls, which are the
# same on x86 and ARM.
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_RECURSIVE, _CLONED_TREE, _MOVE_FROM_FD, _MOUNT_ATTR_RDONLY = -100, 0x8000, 0x8001, 0x4, 0x1
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 36, 38, 0x20080522


def canonical(value: Any) -> str:
    """Return one line of text for a value. Equal values (`1 == 1.0 == True`) have the same text.

    `__repr__`, `__iter__` and `__int__` of the built-in types are called directly, because a program could define
    subclasses that override them to fake results.

    Args:
        value (`Any`): Value to write as text.

    Raises:
        TypeError: the value holds anything but None, bools, ints, floats, text, bytes, lists, tuples, sets and dicts.
        ValueError: an int has more digits than Python converts to text (4,300 by default).
    """
    if value is None:
        return "None"
    if isinstance(value, float):
        return int.__repr__(float.__int__(value)) if float.is_integer(value) else float.__repr__(value)
    for kind in (int, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, list.__iter__(value)))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, tuple.__iter__(value)))})"
    if isinstance(value, set | frozenset):
        members = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
        return f"{{{', '.join(sorted(map(canonical, members)))}}}"
    if isinstance(value, dict):
        return f"dict {sorted((canonical(k), canonical(v)) for k, v in dict.items(value))}"
    raise TypeError(f"{type(value).__name__} is not plain data.")


@dataclass(frozen=True)
class Job:
    """Program to run, with its limits.

    Attributes:
        program (`str`): Source text.
        calls (`list[str]`): Expressions to evaluate after the program.
        seconds (`float`): Limit of wall-clock time, in seconds.
        memory (`int`): Limit of address space per process, in bytes.
        directory (`str`): Working directory.
        isolated (`bool`): Whether the program runs in its own namespaces.
        user (`int`, *optional*): Id of the user that runs the program. None keeps the user of the worker.
    """

    program: str
    calls: list[str]
    seconds: float
    memory: int
    directory: str
    isolated: bool
    user: int | None


def run(item: list[Any] | None) -> str:
    """Run a program and evaluate calls in it.

    Args:
        item (`list`, *optional*): `[program, calls, seconds, memory]`, as in [`Job`]. None only checks the sandbox.

    Returns:
        For None, a description of the protections that this machine lacks, or `""` if nothing is missing. For a
        program, one of these texts:

        - `NO_PROGRAM`, if the program does not compile.
        - `NOT_STARTED`, if the sandbox failed before the program started.
        - `RAN` and one line per call: the canonical text of its value, or `!` and the name of an exception. There are
          fewer lines if the program ended early.
        - `RAN` and a single line: `!` and the name of an exception outside the calls, `!Ended` if the program ended
          before the first line, `!Timeout` if it took too long, or `!TooLong` if its results are too long.

        A program can only affect the text after `RAN`.
    """
    refused, user = enter_namespaces(), unprivileged_user()
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
        control, held_open = os.pipe()
        supervisor = os.fork()
    except OSError:
        return NOT_STARTED
    if supervisor == 0:
        os.close(held_open)
        _run_and_exit(lambda: _supervise(job, to_results, control))
    os.close(to_results)
    os.close(control)
    try:
        return _read(results, seconds)
    finally:
        os.close(held_open)
        os.waitpid(supervisor, 0)
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


def _run_and_exit(work: Callable[[], object]) -> None:
    """Call `work` and exit this forked process, so that it never returns to the code of the worker."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _succeeds(work: Callable[[], object]) -> bool:
    """Return whether `work` runs without an exception in a forked process."""
    child = os.fork()
    if child == 0:
        _run_and_exit(work)
    return os.waitpid(child, 0)[1] == 0


@cache
def enter_namespaces() -> str:
    """Move this process to namespaces that have no network, hide private directories and make all files read-only.

    Later calls only return the result of the first call. This function also checks that `_enter_program_namespaces`,
    which isolates each program, will succeed.

    Returns:
        `""`, or a description of the protection that the kernel refused.
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
        if not _succeeds(_enter_program_namespaces):
            raise OSError("PID namespaces")
        python = {prefix: os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
        for directory in _directories_to_hide():
            _hide(directory, kept={*python.values()})
        for prefix, real in python.items():
            if not os.path.exists(prefix):  # The directory is reached through a link that is hidden now.
                os.makedirs(os.path.dirname(prefix), exist_ok=True)
                os.symlink(real, prefix)
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _libc("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    except OSError as error:
        return f"namespaces ({error})"
    return ""


def _directories_to_hide() -> list[str]:
    """Return the directories that can contain sockets, keys, tokens, or the environment variables of processes."""
    places = ["/proc", "/run", "/tmp", "/var/tmp", os.path.expanduser("~")]
    return [place for place in map(os.path.realpath, places) if os.path.isdir(place) and place != "/"]


def _hide(directory: str, kept: set[str]) -> None:
    """Hide the content of a directory with an empty mount. Only the directories in `kept` stay visible."""
    inside = [path for path in kept if os.path.commonpath([path, directory]) == directory]
    trees = {path: _libc("syscall", _SYS_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONED_TREE) for path in inside}
    _libc("mount", b"tmpfs", directory.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=64k,mode=0755")
    for path, tree in trees.items():
        os.makedirs(path, exist_ok=True)
        _libc("syscall", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_FROM_FD)
        os.close(tree)


@cache
def unprivileged_user() -> int | None:
    """Return the id of the user that runs programs if the worker is root. No account has this id.

    The user cannot write root's files or signal root's processes. The limit on processes applies to this user, but
    would not apply to root. Each worker process has its own id, because workers with the same id would share the limit.

    Returns:
        The id. None if the worker is not root, or if the user could not read the files of Python.
    """
    user = 61_184 + os.getpid() % 4_096  # systemd's range for temporary users
    return user if os.geteuid() == 0 and _succeeds(lambda: _switch_user(user, os.__file__)) else None


def _enter_program_namespaces() -> None:
    """Enter a new PID namespace, and a mount namespace with an empty /dev/shm.

    The next process that is forked is the first process of the PID namespace. When this process ends, the kernel kills
    all other processes of the namespace.
    """
    _libc("unshare", _CLONE_NEWPID | _CLONE_NEWNS)
    size = f"size={4 * _FILE_BYTES},mode=0777".encode()
    _libc("mount", b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, size)


def _supervise(job: Job, to_results: int, control: int) -> None:
    if job.isolated:
        _enter_program_namespaces()
    else:
        _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _run_and_exit(lambda: _run_program(job, to_results))
    os.close(to_results)
    select.select([control, os.pidfd_open(child)], [], [])
    for kill in (os.killpg, os.kill):  # In a PID namespace, all other processes die with the child.
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while not job.isolated and (left := _children()):  # Descendants may have left the process group.
        for orphan in left:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)


def _children() -> list[int]:
    """Return the children of this process, including adopted descendants (`PR_SET_CHILD_SUBREAPER`)."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _switch_user(user: int, and_read: str = os.devnull) -> None:
    """Switch to a user. Raise an OSError if this user cannot read the file `and_read`."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    with open(and_read, "rb"):
        pass


def _run_program(job: Job, to_results: int) -> None:
    os.setsid()
    os.chdir(job.directory)
    os.dup2(to_results, _RESULT_FD)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(_RESULT_FD + 1, 256)  # This call also closes the pipes of the worker.
    _drop_rights(job)
    os.write(_RESULT_FD, _STARTED)
    space = {"__name__": "program"}
    try:
        compiled = compile(job.program, "program", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        os.write(_RESULT_FD, _REFUSED)
        return
    os.write(_RESULT_FD, _COMPILED)  # The program has not run yet, so it cannot fake this byte.
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


def _drop_rights(job: Job) -> None:
    limits = {
        resource.RLIMIT_AS: job.memory,
        resource.RLIMIT_CPU: int(job.seconds) + 2,  # backup for the wall-clock limit of the worker
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: _PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if job.user is not None:
        _switch_user(job.user)
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
