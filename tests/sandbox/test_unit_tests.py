import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topr_trl.sandbox import unit_tests as sandbox
from topr_trl.sandbox.child import NOT_STARTED, _read, canonical
from topr_trl.sandbox.unit_tests import parse_tests, run_tests
from topr_trl.sandbox.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
TEST = "assert f(2) == 4\nassert f(-1) == -2"
RIGHT = "def f(x): return 2 * x"


@pytest.fixture(scope="module")
def isolated():
    """Skip the test if the kernel refuses a part of the sandbox's protection."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_tests([RIGHT], [TEST], seconds=1.5)
    if caught:
        pytest.skip(str(caught[0].message))


def found(program, call="f()", **limits):
    """Return the value of the call as text. None is the expected value, so no program here should return it."""
    ((_, what),) = run_tests([program], [f"assert {call} == None"], **{"seconds": 1.5, **limits})
    return what


def running(argument):
    files = [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [file for file in files if file.is_file() and argument.encode() in contents(file)]


def contents(file):
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


# Verdicts.


@pytest.mark.parametrize(
    ("program", "judgement"),
    [
        (RIGHT, ("correct", TEST)),
        ("import math\nclass A:\n    def f(self, x): return math.floor(2.0 * x)\nf = A().f", ("correct", TEST)),
        ("def f(x): return 2.0 * x", ("correct", TEST)),
        ("def f(x): return x + 2", ("incorrect", "4\n1")),
        ("def f(x): return 8 // x - (x < 0) / 0", ("incorrect", "!ZeroDivisionError\n!ZeroDivisionError")),
        ("def g(x): return 2 * x", ("incorrect", "!NameError\n!NameError")),
        ("1 / 0\n" + RIGHT, ("incorrect", "!ZeroDivisionError")),
        ("raise SystemExit\n" + RIGHT, ("incorrect", "!SystemExit")),
        ("import os\ndef f(x): return 4 if x == 2 else os._exit(0)", ("incorrect", "4")),
        ("def f(x): return", ("incorrect", "None\nNone")),
        ("def f(x): return 2 * ", ("invalid", None)),
        ("\0", ("invalid", None)),
        ("(" * 100_000, ("invalid", None)),
        ("", ("incorrect", "!NameError\n!NameError")),
    ],
)
def test_verdicts(program, judgement):
    assert run_tests([program], [TEST], seconds=1.5) == [judgement]


def test_many_programs_in_their_order():
    programs = [f"def f(x): return {n} * x" for n in range(30)] * 2
    verdicts = [verdict for verdict, _ in run_tests(programs, [TEST] * 60, seconds=1.5)]
    assert verdicts == (["incorrect"] * 2 + ["correct"] + ["incorrect"] * 27) * 2
    assert run_tests([], []) == []


# Programs that would pass without being right, or do harm.


@pytest.mark.parametrize("how", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
@pytest.mark.parametrize("place", ["{how}\n" + RIGHT, "def f(x):\n    {how}"])
def test_leaving_early_is_not_passing(how, place):
    ((verdict, what),) = run_tests([place.format(how=how)], [TEST], seconds=1.5)
    assert verdict == "incorrect"
    assert what.startswith("!")


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("class Any:\n    def __eq__(self, other): return True\nf = Any", "!TypeError"),
        ("class I(int):\n    __eq__ = lambda a, b: True\n    __repr__ = lambda a: 'None'\nf = I", "0"),
        ("class L(list):\n    __iter__ = lambda a: iter([4])\n    __repr__ = lambda a: 'None'\nf = L", "[]"),
        ("f = lambda: (lambda: 0)", "!TypeError"),
        ("def f():\n    a = []\n    a.append(a)\n    return a", "!RecursionError"),
        ("f = lambda: 9 ** 9999", "!ValueError"),  # Python refuses to write so many digits.
        ("f = lambda: 'x' * 2_000_000", "!TooLong"),
        ("f = lambda: input()", "!EOFError"),
        ("f = lambda: [print('None' * 1_000_000), 1][1]", "1"),
        ("f = lambda: bytearray(350 << 20)", "!MemoryError"),
        ("f = lambda: 'a\\nb\\ud800'", r"'a\nb\ud800'"),
        ("f = lambda: len(str(7 ** 7 ** 9))", "!Timeout"),
    ],
)
def test_returned_values_and_errors(program, what):
    assert found(program, seconds=1.0) == what


def test_the_right_values_are_nowhere_near():
    search = (
        "import gc, sys\n"
        "def f():\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame:\n"
        "        seen.append(repr({**frame.f_locals, **frame.f_globals})); frame = frame.f_back\n"
        "    return [''.join(reversed('f-fo-rewsna')) in text for text in (*seen, repr(gc.get_objects()))]\n"
    )
    ((_, what),) = run_tests([search], ["assert f() == 'answer-of-f'"])
    assert "0" in what
    assert "1" not in what


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in found("import os\ndef f(): return dict(os.environ)", seconds=1.4)
    read = "def f():\n    return open('/proc/self/environ').read() + open(f'/proc/{os.getppid()}/environ').read()"
    assert "secret" not in found(f"import os\n{read}", seconds=1.4)


def test_nothing_is_inherited():
    opened = "[n for n in range(4, 300) if not closed(n)]"
    closed = "def closed(n):\n    try: os.fstat(n)\n    except OSError: return True\n"
    assert found(f"import os\n{closed}f = lambda: {opened}") == "[]"
    assert found("import ctypes\nf = lambda: ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)") == "1"  # PR_GET_NO_NEW_PRIVS


def test_limits_on_files_and_processes(isolated):
    assert found("def f():\n    with open('a', 'w') as a: a.write('x' * 2_000_000)") == "!OSError"
    assert found("def f():\n    return [open('/dev/null') for _ in range(100)]") == "!OSError"
    bomb = "import os, time\ndef f():\n    while True:\n        if os.fork() == 0: time.sleep(999)"
    assert found(bomb) == "!BlockingIOError"  # The children are killed: waiting for them would be a timeout.


def test_a_fork_bomb_that_goes_on_is_ended():
    bomb = "import os\ndef f():\n    while True:\n        try: os.fork()\n        except OSError: pass\n"
    assert found(bomb, seconds=1.0) == "!Timeout"
    assert run_tests([RIGHT], [TEST], seconds=1.0)[0][0] == "correct"


def test_nothing_is_written_outside(tmp_path, isolated):
    kept = tmp_path / "kept"
    kept.write_text("before")
    kept.chmod(0o666)
    what = found(f"def f():\n    open({str(kept)!r}, 'w').write('after')")
    assert what in ("!OSError", "!FileNotFoundError", "!PermissionError")
    assert kept.read_text() == "before"
    for place in (Path.home(), "/etc", "/usr", "/tmp", "/var/tmp"):
        assert found(f"def f():\n    open('{place}/of-the-sandbox', 'w')") in ("!OSError", "!PermissionError")
    writable = "[p for p in ('/', '/usr', '/etc', '/dev', '/tmp') if not os.statvfs(p).f_flag & os.ST_RDONLY]"
    assert found(f"import os\nf = lambda: {writable}") == "[]"
    assert found("import os\ndef f():\n    open('here', 'w').write('x')\n    return os.listdir()") == "['here']"
    assert found("import os\ndef f(): return os.listdir()") == "[]"


def test_home_is_hidden(isolated):
    kept = (
        f"[path for path in {list(map(os.path.realpath, (sys.prefix, sys.base_prefix)))!r} if not os.path.isdir(path)]"
    )
    home = f"[n for n in os.listdir({str(Path.home())!r}) if n.startswith(('.ssh', '.cache', '.bash', '.profile'))]"
    assert found(f"import os\nf = lambda: {kept} + {home}") in ("[]", "!FileNotFoundError")
    assert found("import os\nf = lambda: os.listdir('/proc') + os.listdir('/run')") == "[]"


def test_python_may_be_reached_through_a_link(tmp_path, isolated):
    """As with uv and conda. The link is in a hidden directory."""
    (tmp_path / "python").symlink_to(sys.base_prefix)
    executable = tmp_path / "python" / Path(sys._base_executable).relative_to(sys.base_prefix)
    program = f"import statistics, wsgiref.util\n{RIGHT}"
    code = f"from topr_trl.sandbox import run_tests\nprint(run_tests([{program!r}], [{TEST!r}]))"
    paths = [str(Path(__file__).parents[2]), *(path for path in sys.path if "site-packages" in path)]
    ran = subprocess.run([executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True)
    assert (ran.stdout.decode().strip(), ran.stderr.decode()) == (str([("correct", TEST)]), "")


def test_there_is_no_network(isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert found(f"import socket\ndef f(): socket.create_connection({address}, 1)") == "!OSError"


def gone(argument):
    end = time.monotonic() + 5
    while running(argument) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(argument)


def test_no_process_outlives_its_program():
    marker = f"{7_000 + os.getpid()}.25"
    child = f"import subprocess\ndef f():\n    subprocess.Popen(['sleep', '{marker}']%s)\n    return 1"
    assert found(child % "") == "1"
    assert found(child % ", start_new_session=True") == "1"
    thread = "threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
    assert found(f"import threading\ndef f():\n    {thread}\n    return 1") == "1"
    assert gone(marker)


def test_a_program_ends_with_its_worker():
    marker = f"{8_000 + os.getpid()}.25"
    with ThreadPoolExecutor(1) as thread:
        verdict = thread.submit(found, f"import subprocess\nsubprocess.run(['sleep', '{marker}'])", seconds=2.0)
        while not (first := running(marker)):
            time.sleep(0.02)
        for worker in sandbox._pool(2.0, 256)._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(1.0)  # Meanwhile, another worker runs the program again.
        assert not any(marker.encode() in contents(file) for file in first)
        assert verdict.result() == "!Timeout"


@pytest.mark.parametrize("victim", ["os.getppid()", "-1", "0", pytest.param(str(os.getpid()), id="the tests")])
def test_others_cannot_be_killed(victim, isolated):
    pool = sandbox._pool(1.5, 256)
    before = [worker.process.pid for worker in pool._workers]
    run_tests([f"import os\ntry: os.kill({victim}, 9)\nexcept OSError: pass\n{RIGHT}"], [TEST], seconds=1.5)
    assert [worker.process.pid for worker in pool._workers] == before
    assert run_tests([RIGHT + " + 0"], [TEST], seconds=1.5)[0][0] == "correct"


# Machines where the kernel refuses namespaces, and systems without them.


@pytest.mark.skipif(os.geteuid() != 0, reason="drops a right of root's")
def test_without_namespaces_it_warns_and_goes_on():
    marker = f"{9_000 + os.getpid()}.25"
    programs = [RIGHT, "while True: pass", "import os; os._exit(0)"]
    programs += [f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'], start_new_session=True)\n{RIGHT}"]

    def as_in_a_container():
        assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0  # PR_CAPBSET_DROP of CAP_SYS_ADMIN, for this thread alone
        with pytest.warns(UserWarning, match=r"protection on this machine: namespaces \(\[Errno 1\] unshare: Op"):
            return run_tests(programs, [TEST] * len(programs), seconds=1.25)

    with ThreadPoolExecutor(1) as thread:
        verdicts = [verdict for verdict, _ in thread.submit(as_in_a_container).result()]
    assert verdicts == ["correct", "incorrect", "incorrect", "correct"]
    assert gone(marker)


def test_a_sandbox_that_fails_is_no_verdict(tmp_path, monkeypatch):
    results, to_results = os.pipe()
    os.close(to_results)
    assert _read(results, seconds=1.0) == NOT_STARTED
    os.close(results)
    failing = tmp_path / "failing.py"
    failing.write_text(f"def run(item):\n    return {NOT_STARTED!r}")
    pool = WorkerPool(failing, "run")
    monkeypatch.setattr(sandbox, "_pool", lambda *_: pool)
    with pytest.raises(RuntimeError, match="could not start a program"):
        run_tests([RIGHT], [TEST])
    pool.close()


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="needs Linux, and this is darwin"):
        run_tests([RIGHT], [TEST], seconds=0.123)


# Tests and values.


@pytest.mark.parametrize(
    ("program", "seen"),
    [
        ("class NotStarted(Exception): pass\nraise NotStarted", "!NotStarted"),
        ("raise SyntaxError", "!SyntaxError"),
        ("import os\nos.write(3, b'not started')\nos._exit(0)", "not started"),
        ("import os\nos.write(3, b'no program\\n-')\nos._exit(0)", "no program\n-"),
    ],
)
def test_a_program_cannot_speak_for_the_sandbox(program, seen):
    assert run_tests([program], ["assert f(1) == 2"]) == [("incorrect", seen)]


def test_tests_are_read():
    calls, values = parse_tests("assert f([1, 2]) == {1: (2.0, 'a')}\n\nassert a.b(x for x in y) == -1, 'why'")
    assert calls == ["f([1, 2])", "a.b((x for x in y))"]
    assert values == ["dict [('1', \"(2, 'a')\")]", "-1"]


@pytest.mark.parametrize(
    "tests", ["", "# none", "f(2) == 4", "assert f(2)", "assert f(2) > 4", "assert f(2) == g(2)", "assert f(2) == 4 =="]
)
def test_malformed_tests(tests):
    with pytest.raises(ValueError, match=r"assert CALL == LITERAL|There is no test"):
        run_tests([RIGHT], [tests])


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"memory_mb": 0}])
def test_limits_that_leave_nothing(limits):
    with pytest.raises(ValueError, match="needs time and memory"):
        run_tests([RIGHT], [TEST], **limits)


scalars = st.sampled_from([None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, 1.5, float("inf"), "", "1", "\n", b"", b"1"])
hashable = scalars | st.lists(scalars, max_size=2).map(tuple) | st.frozensets(scalars, max_size=2)
plain = st.recursive(
    hashable | st.sets(hashable, max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(hashable, inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine makes examples slowly.
@given(plain, plain)
def test_canonical_text_is_equal_exactly_where_values_are(a, b):
    assert (canonical(a) == canonical(b)) == (a == b)
    assert "\n" not in canonical(a)


def test_a_float_cannot_choose_its_text():
    kind = type("Fake", (float,), {"__int__": lambda self: 4, "__repr__": lambda self: "4"})
    assert [canonical(kind(value)) for value in (3.0, 3.5)] == ["3", "3.5"]
