import json
import os
import random
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from trl import ModelConfig

from topr_trl import OfflineTOPRConfig, SamplingArguments, load_candidates
from topr_trl.cli import commands
from topr_trl.cli import main as cli
from topr_trl.generation.vllm import VLLMArguments
from topr_trl.pipeline.arguments import Settings, StageArguments
from topr_trl.pipeline.loop import LoopArguments, _devices, check, plan

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"
KILLS = 20
SETTINGS = {
    "num_train_problems": 24, "num_test_problems": 4, "num_shots": 0, "problems_per_shard": 4, "num_candidates": 4,
    "eval_samples": 2, "max_new_tokens": 60, "curation": "uniform", "iteration_size": 64, "learning_rate": 1e-3,
    "optim": "adamw_torch", "per_device_train_batch_size": 4, "save_steps": 2, "bf16": False, "report_to": "none",
    "gradient_checkpointing": False, "use_cpu": True, "dtype": "float32", "disable_tqdm": True,
}  # fmt: skip


def start(out, **more):
    command = [sys.executable, "-m", "topr_trl", "iterate", "--output_dir", str(out)]
    command += [part for name, value in {**SETTINGS, **more}.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in commands.AT_ONCE])
def test_help_shows_what_matters(command, capsys):
    cli.main([command, "--help"])
    short = capsys.readouterr().out
    cli.main([command, "--help_all"])
    assert len(short.splitlines()) < 240 < 600 < len(capsys.readouterr().out.splitlines())
    assert f"usage: topr {command} " in short
    assert ("--input" in short) == (command != "iterate")
    assert "--fsdp_config" not in short
    for shown in commands._SHOWN[command]:
        assert f"--{shown} " in short, f"{shown} is no setting"


def test_plan(tmp_path):
    steps = list(plan(LoopArguments(iterations=2), "base", tmp_path))
    names = [step.stage for step in steps]
    testing = ["sample", "score", "evaluate"]
    assert names == testing + 2 * (["sample", "score", "curate", "log-mu", "train", *testing])
    models = {step.model for step in steps if step.stage in ("log-mu", "train")}
    assert models == {"base", str(tmp_path / "iteration-1" / "model")}
    given = list(plan(LoopArguments(candidates=str(tmp_path)), None, tmp_path))
    assert [step.stage for step in given] == [*testing, *names[4:8], *testing]
    assert given[3].input == tmp_path


def settings(tmp_path, **training):
    return Settings(
        StageArguments(), SamplingArguments(), VLLMArguments(),
        OfflineTOPRConfig(str(tmp_path), use_cpu=True, bf16=False, **training), ModelConfig(),
    )  # fmt: skip


def test_what_would_fail_later_is_refused_first(tmp_path, monkeypatch):
    for name, message in (("fsdp2", "DTensors"), ("zero3_offload", "its own Adam")):
        loop = LoopArguments(accelerate_config=str(CONFIGS / f"{name}.yaml"))
        with pytest.raises(ValueError, match=message):
            check(loop, settings(tmp_path))
    check(LoopArguments(accelerate_config=str(CONFIGS / "fsdp2.yaml")), settings(tmp_path, optim="adamw_torch"))
    for name in ("input", "output", "worker", "compare"):
        now = settings(tmp_path)
        setattr(now.stage, name, "0/1")
        with pytest.raises(ValueError, match=f"{name} is for single stages"):
            check(LoopArguments(), now)
    now = settings(tmp_path)
    now.stage.dataset_name, now.stage.test_dataset_name = "nowhere.jsonl", "nowhere.jsonl"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check(LoopArguments(), now)
    now = settings(tmp_path)
    if find_spec("vllm") is None:
        now.stage.sampling_backend = "vllm"
        with pytest.raises(ImportError, match="sampling_python"):
            check(LoopArguments(), now)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--accelerate_config"):
        check(LoopArguments(), now)


def test_workers_share_the_gpus_that_the_loop_sees(monkeypatch):
    for visible, seen in ((None, "2,3"), ("4,5,6,7", "6,7"), ("", None)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _devices(range(2, 4)).get("CUDA_VISIBLE_DEVICES") == seen


def test_stages_get_the_settings_of_the_embedded_model(tmp_path, monkeypatch):
    """Those that the loop chose because no model was named; it names one to every stage."""
    started = []
    monkeypatch.setattr(
        "topr_trl.pipeline.loop._run", lambda step, loop, settings, arguments: started.append(arguments)
    )
    monkeypatch.setattr("topr_trl.pipeline.loop._is_finished", lambda step, settings: False)
    with pytest.raises(FileNotFoundError):  # no stage has run
        cli.main(["iterate", "--output_dir", str(tmp_path), "--num_shots", "2"])
    parser = commands.make_parser("train")
    for arguments in started:
        _, stage, sampling, _, training, model = parser.parse_args_and_config([*arguments, "--model_name_or_path", "x"])
        assert (stage.num_shots, sampling.max_new_tokens, training.learning_rate) == (2, 96, 1e-4)
        assert model.model_name_or_path == "x"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A loop that nothing disturbed."""
    out = tmp_path_factory.mktemp("loop") / "whole"
    assert start(out).wait() == 0, log_of(out)
    return out


def log_of(out):
    return (out.parent / f"{out.name}.log").read_text()[-4_000:]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.xdist_group("whole")
def test_sampling_workers_and_a_launcher_make_the_same(whole, tmp_path):
    config = yaml.safe_load((CONFIGS / "ddp.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "main_process_port": 0}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    out = tmp_path / "several"
    several = {"sampling_workers": 2, "accelerate_config": tmp_path / "two.yaml", "per_device_train_batch_size": 2}
    for moment in (9, 20, 30, 14):  # the workers, curation, the launcher's processes
        process = start(out, **several)
        try:
            process.wait(moment)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert start(out, **several).wait() == 0, log_of(out)
    for folder in ("base/test/scored", "iteration-1/scored", "iteration-1/log_mu"):
        assert keys(whole / folder) == keys(out / folder), folder
    one, two = (load_candidates(run / "iteration-1/log_mu")["mu_logps"][:] for run in (whole, out))
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-4)
    history, other = (
        json.loads((run / "iteration-1/model/trainer_state.json").read_text())["log_history"] for run in (whole, out)
    )
    assert other[-1]["epoch"] == history[-1]["epoch"]
    # Sums in another order, and Adam's first steps magnify it where gradients are tiny.
    assert difference_of_weights(whole, out) < 2e-4


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.xdist_group("whole")
@pytest.mark.skipif(sys.platform != "linux", reason="stages end with a killed loop on Linux alone")
def test_a_loop_that_is_killed_ends_as_one_that_is_not(whole, tmp_path):
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(tmp_path / "killed")
        try:
            # Starting a stage takes several seconds; a stage ends in most of the longer ones of these times.
            code = process.wait(moments.uniform(0.5, 14) if kills < KILLS else None)
        except subprocess.TimeoutExpired:
            if kills % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:  # the loop alone; its stage has to follow
                process.kill()
            process.wait()
            kills += 1
            continue
        assert code == 0, log_of(tmp_path / "killed")
        break
    assert kills >= KILLS, f"the loop ended after {kills} kills: make it longer"
    lost = repeated = 0
    for folder in ("base/test/scored", "iteration-1/scored", "iteration-1/log_mu", "iteration-1/test/scored"):
        expected, found = keys(whole / folder), keys(tmp_path / "killed" / folder)
        lost += len(set(expected) - set(found))
        repeated += len(found) - len(set(found))
        assert expected == found, folder
    difference = difference_of_weights(whole, tmp_path / "killed")
    print(f"kills survived {kills}, rows lost {lost}, rows repeated {repeated}, weight difference {difference}")
    assert (lost, repeated, difference) == (0, 0, 0.0)
    before = len((tmp_path / "killed.log").read_text())
    assert start(tmp_path / "killed").wait() == 0
    assert (tmp_path / "killed.log").read_text()[before:].count("done before") == 11  # nothing is run


def keys(folder: Path):
    rows = load_candidates(folder)
    return [(row["problem_id"], row["sample_id"], tuple(row["completion_ids"])) for row in rows]


def difference_of_weights(*runs: Path):
    weights, others = (load_file(run / "iteration-1/model/model.safetensors") for run in runs)
    return max((weights[name] - others[name]).abs().max().item() for name in weights)
