"""Test how processes of stages are started, on this machine and on others, and what happens if one fails."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing import popen_forkserver
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import yaml

from tests.loops import loop, stage_of
from topr_trl.cli.parsing import parse
from topr_trl.pipeline import child_processes as processes
from topr_trl.pipeline import launch, manifest, parent_process, steps
from topr_trl.pipeline.child_processes import Program
from topr_trl.pipeline.launch import check_launch, devices, programs_of, worker_devices
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments

pytestmark = pytest.mark.xdist_group("server")  # so that only one process of the tests starts the server of stages
CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"


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
    assert loop(tmp_path, sampling_devices=[0, 1]).sampling_devices == ["0", "1"]  # from YAML
    assert loop(tmp_path, sampling_devices=["0,1"]).sampling_devices == ["0", "1"]
    for wrong in (["1", "1"], []):
        with pytest.raises(ValueError, match="sampling_devices must list GPUs, each once, not"):
            loop(tmp_path, sampling_devices=wrong)


# Programs.


def stage(name, tmp_path):
    """Return a stage with few settings."""
    if name == "sample":
        return stage_of(name, SampleArguments(output_dir=str(tmp_path / "rows"), use_cpu=True))
    return stage_of(name, TrainArguments(output_dir=str(tmp_path / name), use_cpu=True, bf16=False))


def arguments(name, tmp_path):
    return [name, "--config", str(tmp_path / f"{name}.yaml")]


def test_a_stage_of_one_process_is_forked(tmp_path):
    for name in ("sample", "log-mu", "train"):
        (program,) = programs_of(stage(name, tmp_path), loop(tmp_path))
        assert program.arguments == arguments(name, tmp_path)
        assert program.command == []


def test_programs_on_this_machine(tmp_path):
    settings = loop(tmp_path, sampling_workers=3, sampling_python=sys.executable, training_devices=["4", "5"],
                    sampling_devices=["0", "1"], accelerate_config=str(CONFIGS / "ddp.yaml"))  # fmt: skip
    words = ["-m", "topr_trl", *arguments("sample", tmp_path), "--worker"]
    programs = programs_of(stage("sample", tmp_path), settings)
    assert [(program.command, program.gpus) for program in programs] == [
        ([sys.executable, *words, f"{k}/3"], [gpu]) for k, gpu in enumerate("010")
    ]
    for name, gpus in (("train", ["4", "5"]), ("log-mu", ["0", "1"])):
        (program,) = programs_of(stage(name, tmp_path), settings)
        assert program.gpus == gpus
        assert program.command == [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "ddp.yaml"),
            "--main_process_port", "0", "--num_processes", "2", "--gpu_ids", "all", "-m", "topr_trl",
            *arguments(name, tmp_path),
        ]  # fmt: skip


def test_launchers_come_before_the_command(tmp_path):
    config = str(CONFIGS / "zero3_nodes.yaml")
    settings = loop(tmp_path, accelerate_config=config, training_launcher="srun --nodes 4 'my node.sh'",
                    sampling_launcher="srun sample.sh")  # fmt: skip
    (program,) = programs_of(stage("sample", tmp_path), settings)
    assert program.command == ["srun", "sample.sh", sys.executable, "-m", "topr_trl", *arguments("sample", tmp_path)]
    (program,) = programs_of(stage("train", tmp_path), settings)
    # examples/slurm/train_on_node.sh adds the machine's rank behind the first five words.
    launched = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    assert program.command == ["srun", "--nodes", "4", "my node.sh", *launched, "-m", "topr_trl", "train", "--config",
                               str(tmp_path / "train.yaml")]  # fmt: skip


def test_training_that_would_see_several_gpus_needs_a_config_of_accelerate(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = tmp_path / "ddp.yaml"
    config.write_text((CONFIGS / "ddp.yaml").read_text().replace("num_processes: 8", "num_processes: 2"))
    with pytest.raises(ValueError, match=r"log-mu would see 2 GPUs.* --accelerate_config .* CUDA_VISIBLE_DEVICES if"):
        check_launch("iterate", loop(tmp_path, use_cpu=False))
    check_launch("iterate", loop(tmp_path, use_cpu=False, accelerate_config=str(config)))
    too_many = {"use_cpu": False, "accelerate_config": str(CONFIGS / "ddp.yaml")}
    with pytest.raises(ValueError, match=r"num_processes=8, .* 2 GPUs"):
        check_launch("iterate", loop(tmp_path, **too_many, training_devices=["0", "1"]))
    check_launch("iterate", loop(tmp_path, **too_many, training_devices=["0"], sampling_devices=["1"]))
    check_launch("iterate", loop(tmp_path, **too_many, training_launcher="env"))
    check_launch("iterate", loop(tmp_path, use_cpu=True))
    check_launch("iterate", loop(tmp_path, use_cpu=False, sampling_devices=["0"], training_devices=["1"]))
    with pytest.raises(ValueError, match="train would see 2 GPUs"):
        check_launch("iterate", loop(tmp_path, use_cpu=False, sampling_devices=["0"], training_devices=["0", "1"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    check_launch("iterate", loop(tmp_path, use_cpu=False))


def test_launchers_that_lack_something_are_refused(tmp_path):
    with pytest.raises(ValueError, match="training_launcher: No closing quotation"):
        loop(tmp_path, training_launcher="srun --comment 'a")
    with pytest.raises(ValueError, match="sampling_devices are GPUs of this machine, and sampling_launcher starts"):
        loop(tmp_path, sampling_launcher="srun", sampling_devices=["0"])
    with pytest.raises(ValueError, match="Remove sampling_workers, and let the launcher start the workers"):
        loop(tmp_path, sampling_launcher="srun", sampling_workers=2)
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
    with pytest.raises(ValueError, match="num_machines=2: set --training_launcher"):
        check_launch("iterate", loop(tmp_path, accelerate_config=str(tmp_path / "two.yaml")))
    check_launch("iterate", loop(tmp_path, accelerate_config=str(tmp_path / "two.yaml"), training_launcher="env"))


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"fsdp_config": {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}}, "Set SHARDED_STATE_DICT"),
        ({"fsdp_config": {"fsdp_version": 2}}, ""),  # its checkpoints are sharded, and its final weights whole
        ({"deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": False}}, "zero3_save_16bit_model: true"),
        ({"deepspeed_config": {"deepspeed_config_file": "zero.json"}}, "stage3_gather_16bit_weights_on_model_save"),
    ],
)
def test_configs_without_whole_weights_at_the_end_are_refused(tmp_path, monkeypatch, config, remedy):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "find_spec", lambda _: True)  # DeepSpeed may not be installed.
    Path("zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    kind = "FSDP" if "fsdp_config" in config else "DEEPSPEED"
    Path("sharded.yaml").write_text(yaml.safe_dump({"distributed_type": kind, **config}))
    with pytest.raises(ValueError, match=remedy) if remedy else nullcontext():
        check_launch("iterate", loop(tmp_path, accelerate_config="sharded.yaml", optim="adamw_torch"))


@pytest.mark.parametrize(("given", "said"), [({}, 0), ({"bf16": True}, 1), ({"bf16": True, "use_peft": True}, 0)])
def test_deepspeed_in_bfloat16_gives_a_warning(given, said, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    (tmp_path / "zero2.yaml").write_text("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}")
    config = str(tmp_path / "zero2.yaml")
    check_launch("iterate", loop(tmp_path, accelerate_config=config, optim="adamw_torch", **given))
    assert sum("DeepSpeed rounds weights" in str(warning.message) for warning in recwarn) == said


def test_the_machines_of_a_launcher_choose_gpu_or_cpu(tmp_path, monkeypatch):
    """A login node of a cluster has no GPU."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for given, names in (([], {"sample"}), (["--use_cpu"], {"sample", "train"})):
        settings = parse("iterate", ["--output_dir", str(tmp_path), "--training_launcher", "env", *given])
        for name in ("sample", "train"):
            programs_of(stage(name, tmp_path), settings)
        assert {
            name for name in ("sample", "train") if "use_cpu: true" in (tmp_path / f"{name}.yaml").read_text()
        } == names


# Failures.


def python(code):
    """Return a program that runs some code."""
    return Program([], python=[sys.executable, "-c", code])


def run(*programs, log=None, stop=None):
    processes.run_processes(programs, "sample", log, stop or Event())


SLEEP = "import time; time.sleep(99)"


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(started):
    with pytest.raises(ChildProcessError, match="The stage sample failed with exit status 3; its output is above"):
        run(python(SLEEP), python("raise SystemExit(3)"), python(""))
    assert [process.exitcode for process in started][:2] == [-15, 3]


@pytest.fixture
def started(monkeypatch):
    """Return the list of the started processes."""
    found, start = [], processes.start
    monkeypatch.setattr(processes, "start", lambda *given: found.append(start(*given)) or found[-1])
    return found


@pytest.mark.parametrize("name", ["log-mu", "sample"])
def test_exit_status_0_alone_is_not_trusted(name, tmp_path, monkeypatch):
    """srun can exit with 0 after losing its node, before or after the stage has begun."""
    monkeypatch.setattr(launch, "run_processes", lambda *_: None)
    with pytest.raises(ChildProcessError, match=f"The stage {name} ended before its work was done"):
        launch.run_apart(stage(name, tmp_path), loop(tmp_path), None, Event())


def test_a_process_that_cannot_start_ends_those_that_have(started, monkeypatch):
    start = processes.start

    def fails_second(*given):
        if started:
            raise OSError("too many processes")
        return start(*given)

    monkeypatch.setattr(processes, "start", fails_second)
    with pytest.raises(OSError, match="too many processes"):
        run(python(SLEEP), python(SLEEP))
    assert started[0].exitcode == -15


def test_a_stage_can_be_stopped_and_its_log_is_shown(tmp_path, capfd, started):
    stop = Event()
    Timer(0.5, stop.set).start()
    with pytest.raises(ChildProcessError, match="The stage sample was stopped"):
        run(python(SLEEP), stop=stop)
    assert started[0].exitcode == -15
    log = tmp_path / "train.log"
    with pytest.raises(ChildProcessError, match=r"its output is in .*train\.log"):
        run(python("for n in range(100): print('line', n, flush=True)\nraise SystemExit(1)"), log=log)
    said = capfd.readouterr().out
    assert "line 99" in said
    assert "line 10\n" not in said


@pytest.mark.parametrize(("is_pressed", "error"), [(False, ChildProcessError), (True, KeyboardInterrupt)])
def test_a_forked_stage_gets_ctrl_c_before_it_is_ended(tmp_path, monkeypatch, is_pressed, error):
    """`topr train` then saves a checkpoint. The other side of the loop fails, or the user presses Ctrl+C."""
    code = "import time\ntry:\n    print(1, flush=True); time.sleep(99)\nexcept KeyboardInterrupt:\n    exit(7)"
    begun, start = [], processes.start
    monkeypatch.setattr(processes, "start", lambda _, log: begun.append(start(python(code), log)) or begun[-1])

    def wait(seconds):
        wait_for(tmp_path / "log")
        time.sleep(0.5)  # Python ignores Ctrl+C during some callbacks, so let the program reach its own sleep.
        if is_pressed:
            raise KeyboardInterrupt
        return True

    with pytest.raises(error, match=None if is_pressed else "The stage train was stopped"):
        processes.run_processes([Program(["train"])], "train", tmp_path / "log", SimpleNamespace(wait=wait))
    assert begun[0].exitcode == 7


@pytest.mark.skipif(sys.platform != "linux", reason="stages are forked on Linux alone")
def test_two_sides_of_a_loop_never_poll_at_once(monkeypatch):
    """Only one of two polls would read the exit status of a process."""
    poll, polls, most = popen_forkserver.Popen.poll, [], []

    def slow(self, *given):
        polls.append(self)
        most.append(len(polls))
        time.sleep(0.01)
        code = poll(self, *given)
        polls.remove(self)
        return code

    monkeypatch.setattr(popen_forkserver.Popen, "poll", slow)
    sides = [threading.Thread(target=run, args=[python("")] * 4) for _ in range(2)]
    for side in sides:
        side.start()
    for side in sides:
        side.join(600)  # on a busy machine, eight forks can take more than a minute
    assert set(most) == {1}


def test_a_process_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(9)"
    process = processes.start(python(stubborn), log := tmp_path / "log")
    wait_for(log)
    processes.end([process])
    assert process.exitcode == -9


def wait_for(log):
    """Wait until a file has text, and return it."""
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    return log.read_text()


@pytest.mark.slow
def test_a_loop_that_is_asked_to_end_ends_what_it_has_started(tmp_path):
    """The processes of a launcher on this machine also end, although the launcher passes no signal on."""
    launcher, program, log = (tmp_path / name for name in ("launcher.py", "loop.py", "log"))
    sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {sleeps!r}])\n")
    program.write_text(
        "import pathlib, signal, sys, threading\nfrom topr_trl.pipeline import child_processes, parent_process\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # removes the handler of coverage.py
        "    parent_process.end_processes_on_signals()\n"
        f"    program = child_processes.Program([], launcher=[sys.executable, {str(launcher)!r}])\n"
        f"    log = pathlib.Path({str(log)!r})\n"
        "    child_processes.run_processes([program], 'train', log, threading.Event())\n"
    )
    loop_process = subprocess.Popen([sys.executable, str(program)])
    child = psutil.Process(int(wait_for(log)))
    loop_process.terminate()
    assert loop_process.wait(30) == 128 + 15
    child.wait(10)


def test_a_stage_on_windows_does_not_signal_its_loop(monkeypatch):
    sent = []
    monkeypatch.setenv(parent_process.LOOP, "1")
    monkeypatch.setattr(parent_process.os, "kill", lambda *signal: sent.append(signal))
    monkeypatch.setattr(parent_process, "_PRCTL", None)
    monkeypatch.setattr(parent_process.sys, "platform", "win32")
    parent_process.end_with_the_loop()
    assert sent == []


# The server.

REWARDS = """
import json, multiprocessing, os, sys, threading, time, torch

def report(completions, **_):
    seen = {"threads": torch.get_num_threads(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "pid": os.getpid(),
            "server": os.getppid(), "method": multiprocessing.get_start_method(), "word": os.environ["WORD"]}
    with open("seen.json.partial", "w") as file:
        json.dump(seen, file)
    os.replace("seen.json.partial", "seen.json")
    time.sleep(float(os.environ["SECONDS"]))
    return [1.0] * len(completions)
"""
NO_DEVICE = """
import torch

def fails(*_):
    raise AssertionError("a CUDA context")

torch.cuda._lazy_init = fails
"""
REPORT_OF_SERVER = """
import json, os, signal

others = {*map(int, os.listdir("/proc/self/task"))} - {os.getpid()}
seen = {"threads": [open(f"/proc/self/task/{n}/comm").read().strip() for n in others],
        "without_context": os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"],
        "ignores_ctrl_c": signal.getsignal(signal.SIGINT) == signal.SIG_IGN}
with open("server.json", "w") as file:
    json.dump(seen, file)
"""
LOOP = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have started the tests in the background.
from topr_trl.pipeline import child_processes
from topr_trl.pipeline.child_processes import Program, run_processes, start_server
if __name__ == "__main__":
    if sys.platform == "linux":
        child_processes._PRELOADED.insert(1, "no_device")
        child_processes._PRELOADED.append("report_of_server")
    start_server()
    os.environ.update({"OMP_NUM_THREADS": "3", "WORD": "of the loop"})  # after the server has read its environment
    arguments = "score --input rows.jsonl --output_dir scored --reward_funcs rewards.py:report".split()
    run_processes([Program(arguments, ["3"])], "score", None, threading.Event())
"""


@pytest.fixture
def scoring(tmp_path, monkeypatch):
    """Return a function that starts a small loop, whose only stage reports what it sees."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    Path("rewards.py").write_text(REWARDS)
    Path("loop.py").write_text(LOOP)
    Path("no_device.py").write_text(NO_DEVICE)
    Path("report_of_server.py").write_text(REPORT_OF_SERVER)

    def start(seconds, **environment):
        for name in ("seen.json", "server.json"):
            Path(name).unlink(missing_ok=True)
        own = {"SECONDS": str(seconds), "PYTHONPATH": str(CONFIGS.parents[1]), **environment}
        return subprocess.Popen([sys.executable, "loop.py"], env={**os.environ, **own})

    return start


def seen_by(process):
    while not Path("seen.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    return json.loads(Path("seen.json").read_text())


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_and_its_stage(scoring):
    """Kills leave nothing running and nothing damaged, and a stage has its own threads and GPUs.

    Each start of the server takes eight seconds, so all this is one test.
    """
    for killed in ("pid", "server", "loop") if sys.platform == "linux" else ():
        process = scoring(600, OMP_NUM_THREADS="1")
        seen = seen_by(process) | {"loop": process.pid}
        family = [psutil.Process(seen[name]) for name in ("pid", "server", "loop")]
        assert family[1] in family[2].children()
        check_server()
        family = [*family, *family[2].children(recursive=True)]
        psutil.Process(seen[killed]).kill()
        assert process.wait(60) != 0, killed
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == [], killed
    process = scoring(0, OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="0,1,2,3")
    seen = seen_by(process)
    assert process.wait(120) == 0
    assert manifest.read(Path("scored")).finished
    default = "forkserver" if sys.version_info >= (3, 14) else "fork"
    assert [seen[name] for name in ("threads", "gpus", "word", "method")] == [3, "3", "of the loop", default]


def check_server():
    """Check that the server has one thread and no device.

    A forked process has only the thread that forks, and cannot use the CUDA context of its parent.
    """
    server = json.loads(Path("server.json").read_text())
    # These threads end before a fork: those of OpenBLAS, which OMP_NUM_THREADS=1 avoids, and the one of PyArrow's
    # allocator.
    assert set(server["threads"]) <= {"jemalloc_bg_thd"}
    assert server["without_context"] == "1"
    assert server["ignores_ctrl_c"], "Ctrl+C would print a traceback"


def test_a_stage_is_no_fork_of_a_server_that_uses_the_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    monkeypatch.setattr(processes.os, "setsid", lambda: None)
    monkeypatch.setattr(processes, "end_with_parent", lambda _: None)
    monkeypatch.setattr(processes.runpy, "run_module", lambda *_, **__: pytest.fail("the fork runs the stage"))

    class Executed(Exception):
        pass

    def execute(path, words):
        assert (path, words) == (sys.executable, [sys.executable, "-m", "topr_trl", "train", "--debug"])
        raise Executed

    monkeypatch.setattr(processes.os, "execv", execute)
    with pytest.raises(Executed):
        processes._run(Program(["train", "--debug"]), dict(os.environ), None)


@pytest.mark.parametrize(
    ("launcher", "signal_of_end"), [([], parent_process.KILL), (["srun"], processes.signal.SIGTERM)]
)
def test_a_launcher_can_end_its_processes_when_the_server_ends(monkeypatch, launcher, signal_of_end):
    asked = []
    monkeypatch.setattr(processes.os, "setsid", lambda: None)
    monkeypatch.setattr(processes, "end_with_parent", asked.append)
    monkeypatch.setattr(processes.os, "execvp", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        processes._run(Program(["train"], python=["python"], launcher=launcher), dict(os.environ), None)
    assert asked == [signal_of_end]


def test_no_side_of_a_loop_starts_the_server(monkeypatch, tmp_path):
    """The kernel would end the server, and the stages of the other side, with the thread of this side."""
    events = []
    monkeypatch.setattr(steps, "start_server", lambda: events.append(threading.current_thread()))
    monkeypatch.setattr(steps, "run_steps", lambda *_: events.append(threading.current_thread()))
    steps.run_sides({"sampling": [], "training": []}, loop(tmp_path, overlap=1), tmp_path)
    assert events[0] is threading.main_thread()
    assert threading.main_thread() not in events[1:]
