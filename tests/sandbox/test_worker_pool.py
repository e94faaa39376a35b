import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topr_trl.sandbox.worker_pool import WorkerPool

WORK = """
import os, sys, time

def work(item):
    what, value = item
    if what == "hang":
        while True:
            pass
    if what == "hang in C":
        return len(str(9 ** (9 ** 9)))
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ValueError(value)
    if what == "recurse":
        return work(["recurse", value])
    if what == "eat":
        return len(bytearray(8 << 30))
    if what == "print":
        print("42"); print("43", file=sys.stderr)
    if what == "sleep":
        time.sleep(value)
    if what == "modules":
        return sorted(set(sys.modules) & {"torch", "topr_trl", "transformers", "datasets"})
    if what == "pid":
        return os.getpid()
    return value
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "work.py"
    path.write_text(WORK)
    return path


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_order_is_kept_and_what_goes_wrong_is_none(file):
    pool = WorkerPool(file, "work", workers=2, seconds=1)
    bad = ["hang", "die", "raise", "recurse", "eat", "hang in C"]
    items = [part for i, what in enumerate(bad) for part in (["sleep", 0.1 - i / 100], [what, i], ["print", i])]
    counted = []
    results = pool.map(items, counted.append)
    assert results == [v for i in range(len(bad)) for v in (0.1 - i / 100, None, i)]
    assert sum(counted) == len(items)
    assert pool.map([["", 7]]) == [7]  # The pool still works.
    pool.close()
    assert pool.map([]) == []


def test_workers_import_none_of_the_package(file):
    pool = WorkerPool(file, "work", workers=1)
    assert pool.map([["modules", None]]) == [[]]
    pool.close()


def test_an_interrupted_call_leaves_no_results_to_the_next(file):
    pool = WorkerPool(file, "work", workers=2)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.map([["", i] for i in range(10)], interrupt)
    assert pool.map([["", 8], ["", 9]]) == [8, 9]
    pool.close()


def test_a_worker_that_was_killed_while_idle_is_replaced(file):
    pool = WorkerPool(file, "work", workers=1)
    (pid,) = pool.map([["pid", None]])
    os.kill(pid, signal.SIGKILL)
    assert pool.map([["", 1], ["", 2]]) == [1, 2]
    pool.close()


def test_a_worker_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="did not start"):
        WorkerPool(tmp_path / "nowhere.py", "work").map([1])
    with pytest.raises(ValueError, match="seconds=0"):
        WorkerPool(tmp_path / "nowhere.py", "work", seconds=0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_parent(file):
    """Idle workers end when their input ends, and a worker that hangs is ended by its alarm."""
    code = (
        "import json, os, sys, threading, time\n"
        "from pathlib import Path\n"
        "from topr_trl.sandbox.worker_pool import WorkerPool\n"
        f"pool = WorkerPool(Path({str(file)!r}), 'work', workers=2, seconds=2)\n"
        "pool.map([['sleep', 0.5], ['sleep', 0.5]])\n"
        "print(json.dumps([worker.process.pid for worker in pool._workers]), flush=True)\n"
        "pool.map([['hang', 0]])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 2
    assert all(map(alive, pids))
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, pids))
