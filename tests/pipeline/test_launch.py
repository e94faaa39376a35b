"""Test how processes of stages are started, on this machine and on others, and what happens if one fails."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Timer

import psutil
import pytest
import yaml

from tests.loops import stage_of
from topr_trl.pipeline import child_processes as processes
from topr_trl.pipeline import launch, manifest
from topr_trl.pipeline.launch import check_launch, devices, worker_devices
from topr_trl.pipeline.settings import IterateArguments
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"


def loop(tmp_path, **more):
    return IterateArguments(output_dir=str(tmp_path), **{"use_cpu": True, "bf16": False, **more})


@pytest.mark.parametrize(
    ("visible", "of_a_stage", "of_a_worker"),
    [(None, [], ["2", "3"]), ("4,5,6,7", ["4", "5", "6", "7"], ["6", "7"]), ("", [], [])],
)
def test_stages_and_workers_have_the_gpus_that_the_loop_sees(monkeypatch, tmp_path, visible, of_a_stage, of_a_worker):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = loop(tmp_path)
    assert devices("sample", settings) == devices("train", settings) == of_a_stage
    assert worker_devices(devices("sample", settings), 1, 2) == of_a_worker


def test_each_side_has_the_gpus_that_are_named_for_it(tmp_path):
    settings = loop(tmp_path, sampling_devices=["0", "1", "5"], training_devices=["GPU-2ab"])
    assert devices("train", settings) == ["GPU-2ab"]
    assert devices("log-mu", settings) == devices("sample", settings) == ["0", "1", "5"]
    assert [worker_devices(["0", "1", "5"], k, 1) for k in range(4)] == [["0"], ["1"], ["5"], ["0"]]
    for wrong in (["1", "1"], []):
        with pytest.raises(ValueError, match="sampling_devices must list GPUs, each once, not"):
            loop(tmp_path, sampling_devices=wrong)


# Other machines.


@pytest.fixture
def started(monkeypatch):
    """Return the list of the commands that would be started."""
    found = []
    monkeypatch.setattr(launch, "start", lambda command, gpus, output, is_launcher=False: found.append(command))
    return found


def test_sampling_processes_on_other_machines(tmp_path, started):
    settings = loop(tmp_path, sampling_workers=3, sampling_hosts=["a", "b"],
                    sampling_launcher="ssh {host} env 'NAME=worker {worker}'")  # fmt: skip
    for k in range(3):
        command = ["python", "-m", "topr_trl", "sample", "--worker", f"{k}/3"]
        launch._start_worker(command, k, settings, None)
    assert started == [
        ["ssh", host, "env", f"NAME=worker {k}", "python", "-m", "topr_trl", "sample", "--worker", f"{k}/3"]
        for k, host in enumerate("aba")
    ]


def test_a_stage_has_taken_the_time_of_its_sampling_workers(tmp_path, monkeypatch):
    now = [0.0]

    def run_process_groups(groups, stage, retries, log, stop):
        now[0] += 3.0  # to start the processes
        if len(groups) > 1:
            now[0] += 40.0
        else:
            manifest.begin(args.folder, stage, {}, {})
            manifest.finish(args.folder, stage, 1, seconds=0.5)

    monkeypatch.setattr(launch, "run_process_groups", run_process_groups)
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    for workers, seconds in ((1, 0.5), (2, 43.0)):
        settings = loop(tmp_path, sampling_workers=workers)
        args = SampleArguments(output_dir=str(tmp_path / f"rows-{workers}"), num_train_problems=1, num_generations=1,
                               max_new_tokens=1, num_shots=0, use_cpu=True)  # fmt: skip
        assert launch.run_apart(stage_of("sample", args), settings, None, Event())["seconds"] == seconds


def test_training_on_other_machines(tmp_path, started):
    config = str(CONFIGS / "zero3_nodes.yaml")
    hosts = ["a", "b", "c", "d"]
    settings = loop(tmp_path, accelerate_config=config, training_launcher="srun --nodelist {host} --label {node}",
                    training_hosts=hosts)  # fmt: skip
    list(launch._start_nodes(["-m", "topr_trl", "train"], "train", settings, None))
    ports = {command[command.index("--main_process_port") + 1] for command in started}
    assert len(ports) == 1
    for node, (host, command) in enumerate(zip(hosts, started, strict=True)):
        assert command[:6] == ["srun", "--nodelist", host, "--label", str(node), sys.executable]
        rest = command[6:]
        assert rest[rest.index("--machine_rank") + 1] == str(node)
        assert rest[rest.index("--main_process_ip") + 1] == "a"
        assert rest[-3:] == ["-m", "topr_trl", "train"]
    # If sampling runs on other machines than training, log μ is computed there, too.
    aside = loop(tmp_path, accelerate_config=config, training_launcher="srun --nodelist {host}", training_hosts=hosts,
                 sampling_hosts=["e", "f", "g", "h"])  # fmt: skip
    started.clear()
    list(launch._start_nodes(["-m", "topr_trl", "log-mu"], "log-mu", aside, None))
    assert [command[2] for command in started] == ["e", "f", "g", "h"]
    assert started[1][started[1].index("--main_process_ip") + 1] == "e"


def test_launchers_that_lack_something_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"training_launcher accepts .*{host}, {node}, {port}, not {rank}"):
        loop(tmp_path, training_launcher="srun --relative {rank}")
    with pytest.raises(ValueError, match=r"sampling_launcher has {host}: set sampling_hosts to the machines"):
        loop(tmp_path, sampling_launcher="ssh {host}")
    with pytest.raises(ValueError, match="training_launcher: No closing quotation"):
        loop(tmp_path, training_launcher="srun --comment 'a")
    with pytest.raises(ValueError, match="sampling_devices are GPUs of this machine, and sampling_launcher starts"):
        loop(tmp_path, sampling_launcher="srun", sampling_devices=["0"])
    with pytest.raises(FileNotFoundError, match="sampling_launcher: there is no program nowhere-here"):
        check_launch("iterate", loop(tmp_path, sampling_launcher="nowhere-here -n 1"))
    with pytest.raises(ValueError, match="training_launcher is empty: set it to a command, or remove it"):
        check_launch("iterate", loop(tmp_path, training_launcher=" "))
    offloading = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "offload.json").write_text(json.dumps(offloading))
    named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": f"{tmp_path}/offload.json"}}
    (tmp_path / "named.yaml").write_text(yaml.safe_dump(named))
    with pytest.raises(ValueError, match="With an offloaded optimizer, DeepSpeed runs its own Adam"):
        check_launch("iterate", loop(tmp_path, accelerate_config=str(tmp_path / "named.yaml")))
    config = yaml.safe_load((CONFIGS / "ddp.yaml").read_text()) | {"num_machines": 2, "num_processes": 2}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    two = {"accelerate_config": str(tmp_path / "two.yaml")}
    with pytest.raises(ValueError, match="num_machines=2: set --training_launcher"):
        check_launch("iterate", loop(tmp_path, **two))
    with pytest.raises(ValueError, match="num_machines=2, and training_hosts has 1"):
        check_launch("iterate", loop(tmp_path, **two, training_launcher="env H={host}", training_hosts=["a"]))
    with pytest.raises(ValueError, match="num_machines=2: set --training_launcher"):
        check_launch("iterate", loop(tmp_path, **two, training_launcher="env H=1", training_hosts=["a", "b"]))
    enough = {"training_launcher": "env H={host}", "training_hosts": ["a", "b"]}
    check_launch("iterate", loop(tmp_path, **two, **enough))
    with pytest.raises(ValueError, match="num_machines=2, and sampling_hosts has 1"):
        check_launch("iterate", loop(tmp_path, **two, **enough, sampling_hosts=["c"]))


# Failures.


def python(code):
    return subprocess.Popen([sys.executable, "-c", code])


def run(starts, retries=0, log=None, stop=None):
    groups = [start if isinstance(start, processes.ProcessGroup) else processes.ProcessGroup(start) for start in starts]
    processes.run_process_groups(groups, "sample", retries, log, stop or Event())


def failing(times, path):
    """Return a start function whose process fails the given number of times."""

    def start():
        code = f"from pathlib import Path; p = Path({str(path)!r}); n = len(p.read_text()) if p.exists() else 0; "
        return [python(f"{code} p.write_text('x' * (n + 1)); raise SystemExit(3 if n < {times} else 0)")]

    return start


def test_a_process_that_fails_is_started_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes, "_PAUSE", 0.0)
    done = []
    run([failing(2, tmp_path / "a"), lambda: [done.append(1) or python("")]], retries=2)
    assert len((tmp_path / "a").read_text()) == 3
    assert done == [1]  # The other process is not restarted.
    said = capfd.readouterr().out
    assert "A process of the stage sample failed with exit status 3; starting it again (retry 1 of 2)." in said
    with pytest.raises(ChildProcessError, match="The stage sample failed with exit status 3; its output is above"):
        run([failing(2, tmp_path / "b")], retries=1)
    assert len((tmp_path / "b").read_text()) == 2


def test_exit_status_0_alone_is_not_trusted(monkeypatch, capfd):
    """srun can exit with 0 after losing its node."""
    monkeypatch.setattr(processes, "_PAUSE", 0.0)
    answers = [False, True]
    run([processes.ProcessGroup(lambda: [python("")], lambda: answers.pop(0))], retries=1)
    assert "A process of the stage sample ended before its work was done; starting it again" in capfd.readouterr().out
    with pytest.raises(ChildProcessError, match="The stage sample ended before its work was done"):
        run([processes.ProcessGroup(lambda: [python("")], lambda: False)])


def test_processes_of_one_training_end_and_start_together(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_PAUSE", 0.0)
    first_fails, others = failing(1, tmp_path / "a"), []

    def start():
        # The second process would run for an hour after the first one has failed.
        others.append(python("import time; time.sleep(3600)" if not others else ""))
        return [*first_fails(), others[-1]]

    run([start], retries=1)
    assert len(others) == 2
    assert others[0].returncode == -15


def test_a_machine_that_cannot_start_ends_those_that_have(tmp_path, monkeypatch):
    started = []

    def start(*_, **__):
        if started:
            raise OSError("too many processes")
        started.append(python("import time; time.sleep(3600)"))
        return started[0]

    monkeypatch.setattr(launch, "start", start)
    settings = loop(tmp_path, accelerate_config=str(CONFIGS / "zero3_nodes.yaml"),
                    training_launcher="srun --nodelist {host}", training_hosts=["a", "b", "c", "d"])  # fmt: skip
    with pytest.raises(OSError, match="too many processes"):
        run([lambda: launch._start_nodes([], "train", settings, None)])
    assert started[0].poll() == -15


def test_a_stage_can_be_stopped_and_its_log_is_shown(tmp_path, capfd):
    stop, started = Event(), []
    Timer(0.5, stop.set).start()
    begin = time.monotonic()
    with pytest.raises(ChildProcessError, match="The stage sample was stopped"):
        run([lambda: [started.append(python("import time; time.sleep(3600)")) or started[-1]]], stop=stop)
    assert time.monotonic() - begin < 60
    assert started[0].returncode == -15
    log = tmp_path / "train.log"
    log.write_text("\n".join(f"line {n}" for n in range(100)))
    with pytest.raises(ChildProcessError, match=r"its output is in .*train\.log"):
        run([failing(1, tmp_path / "a")], log=log)
    said = capfd.readouterr().out
    assert "line 99" in said
    assert "line 10\n" not in said


def test_a_stage_that_never_began_is_started_again_and_then_named(tmp_path, monkeypatch):
    """srun can exit with 0 if it loses a node before the stage has written its manifest."""
    monkeypatch.setattr(processes, "_PAUSE", 0.0)
    monkeypatch.setattr(launch.sys, "executable", shutil.which("true"))
    manifest.begin(tmp_path / "rows", "sample", {})
    manifest.finish(tmp_path / "rows", "sample", 0)
    args = TrainArguments(input=str(tmp_path / "rows"), output_dir=str(tmp_path / "rows"), use_cpu=True, bf16=False)
    with pytest.raises(ChildProcessError, match="The stage log-mu ended before its work was done"):
        launch.run_apart(stage_of("log-mu", args), loop(tmp_path / "run"), None, Event())


def test_a_process_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    process.stdout.readline()
    processes.ProcessGroup(list, processes=[process]).end()
    assert process.returncode == -9


def test_a_loop_that_is_asked_to_end_ends_what_it_has_started(tmp_path):
    """The processes of a launcher on this machine also end, although the launcher passes no signal on."""
    launcher, program = tmp_path / "launcher.py", tmp_path / "loop.py"
    stage = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {stage!r}])\n")
    program.write_text(
        "import signal, sys, threading\nfrom topr_trl.pipeline import child_processes as processes\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # removes the handler of coverage.py
        f"processes.end_processes_on_signals()\nlog = open({str(tmp_path / 'log')!r}, 'wb')\n"
        f"start = lambda: [processes.start([sys.executable, {str(launcher)!r}], [], log, is_launcher=True)]\n"
        "processes.run_process_groups([processes.ProcessGroup(start)], 'train', 0, None, threading.Event())\n"
    )
    loop_process = subprocess.Popen([sys.executable, str(program)])
    log = tmp_path / "log"
    while loop_process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    child = psutil.Process(int(log.read_text()))
    loop_process.terminate()
    assert loop_process.wait(30) == 128 + 15
    child.wait(10)


def test_a_stage_on_windows_does_not_signal_its_loop(monkeypatch):
    sent = []
    monkeypatch.setenv(processes._LOOP, "1")
    monkeypatch.setattr(processes.os, "kill", lambda *signal: sent.append(signal))
    monkeypatch.setattr(processes, "_PRCTL", None)
    monkeypatch.setattr(processes.sys, "platform", "win32")
    processes.end_with_the_loop()
    assert sent == []


def test_what_a_process_has_started_ends_with_it(tmp_path):
    """`accelerate launch` with one process starts a child and does not pass SIGTERM on."""
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    with (tmp_path / "log").open("wb") as log:
        process = processes.start([sys.executable, "-c", launcher], [], log)
    while not (said := (tmp_path / "log").read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    child = psutil.Process(int(said))
    processes.ProcessGroup(list, processes=[process]).end()
    child.wait(10)
