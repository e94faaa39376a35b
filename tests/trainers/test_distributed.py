import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed_script
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.loops import start_forked
from topr_trl.tasks.arithmetic import CARELESS_MODEL

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "accelerate_configs"
KINDS = ["offline", "online", "curated", "replayed"]


def launch(config, *command, timeout=300, again=False):
    """Run a script on the CPU, as a user would, and return its output.

    Args:
        config: name of a file in examples/accelerate_configs, for two processes.
        again: whether to retry once after a timeout. gloo can hang when a process ends (see distributed_script.py).
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if not config.startswith("zero"):  # DeepSpeed uses the CPU without this variable
        environment["ACCELERATE_USE_CPU"] = "true"
    launcher = ["-m", "accelerate.commands.launch", "--mixed_precision=no", "--main_process_port=0", "--num_machines=1",
                "--num_processes=2", f"--config_file={CONFIGS / config}.yaml", "--dynamo_backend=no"]  # fmt: skip
    command = [sys.executable, *launcher, *map(str, command)]

    def run():
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)

    try:
        done = run()
    except subprocess.TimeoutExpired:
        if not again:
            raise
        done = run()
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    return done.stdout


def forked(out, *kinds, processes=1):
    """Run the script of the tests in processes that are forked from a warm one, instead of `accelerate launch`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = []
    for rank in range(processes):
        several = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), **place}
        environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **(several if processes > 1 else {})}
        started.append(start_forked(distributed_script.in_process, kinds, out, environment, out / f"{rank}.log"))
    for rank, process in enumerate(started):
        process.join(300)
        assert process.exitcode == 0, (out / f"{rank}.log").read_text()[-20_000:]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    forked(out, *KINDS)
    return out


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize(
    ("config", "distributed", "kinds"),
    [
        (None, "MULTI_CPU", KINDS),
        pytest.param("fsdp2", "FSDP", ["offline", "online", "replayed"], marks=pytest.mark.weekly),
        pytest.param("zero2", "DEEPSPEED", ["offline", "online"], marks=pytest.mark.weekly),
        pytest.param("zero3", "DEEPSPEED", ["offline", "online", "replayed"], marks=pytest.mark.weekly),
    ],
)
def test_two_processes_train_like_one(config, distributed, kinds, one_process, tmp_path):
    if config is None:
        forked(tmp_path, *kinds, processes=2)
    else:
        if config.startswith("zero"):
            pytest.importorskip("deepspeed")
        launch(config, ROOT / "tests" / "distributed_script.py", tmp_path, *kinds)
    for kind in kinds:
        one, two = (json.loads((out / f"{kind}.json").read_text()) for out in (one_process, tmp_path))
        assert (one["processes"], two["processes"]) == (1, 2)
        assert two["distributed"] == distributed
        assert len(one["logs"]) == len(two["logs"]) == (5 if kind == "offline" else 7)
        assert len(one["logged rows"]) == (8 if kind == "replayed" else 0)
        assert two["logged rows"] == one["logged rows"]  # each process has its own
        assert len(one["evaluated"]) == (2 if kind == "offline" else 1)  # number of evaluation sets
        for a, b in zip(one["logs"] + one["evaluated"], two["logs"] + two["evaluated"], strict=True):
            for name in a:
                if name == "topr/computed_tokens":  # micro-batches are smaller with two processes
                    continue
                if name in ("loss", "grad_norm") or name.endswith(("_loss", "reward")) or "topr/" in name:
                    rounding = 5e-3 if "log_ratio" in name else 1e-5  # a log-ratio sums over a completion
                    assert b[name] == pytest.approx(a[name], rel=1e-3, abs=rounding), (kind, name)
        if kind == "offline":
            assert min(entry["topr/computed_tokens"] for entry in one["logs"]) < 0.9  # rows share prompts
            assert min(entry["topr/computed_tokens"] for entry in two["logs"]) < 0.9
        expected = weights(one_process / kind / "whole")
        for saved in ("whole", "resumed"):
            found = weights(tmp_path / kind / saved)
            assert found.keys() == expected.keys()
            # Rounding differs with the order of sums, and Adam's first steps magnify it where gradients are tiny.
            assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 4e-4, (kind, saved)
            moved = max((expected[n] - start).abs().max().item() for n, start in weights(CARELESS_MODEL).items())
            assert moved > 1e-3


@pytest.mark.processes
@pytest.mark.weekly
def test_log_pi_is_not_rounded_by_fsdp2_in_a_bfloat16_run(tmp_path):
    launch("fsdp2", ROOT / "tests" / "distributed_script.py", tmp_path, "bfloat16")
    assert min(json.loads((tmp_path / "bfloat16.json").read_text())) > 0.8


def weights(folder):
    """Return the weights of a saved model, loaded with transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.processes
@pytest.mark.weekly
def test_stage_train_merges_an_adapter_under_zero3(tmp_path):
    pytest.importorskip("deepspeed")
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "reward": float((-1) ** n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def train(model, out):
        launch(
            "zero3", ROOT / "tests" / "topr_on_gloo.py", "train", "--input", tmp_path / "rows.jsonl",
            "--output_dir", tmp_path / out,
            "--model_name_or_path", model, "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--use_cpu",
            "false", "--ddp_backend", "gloo", "--per_device_train_batch_size", 2, "--learning_rate", "1e-2",
            "--bf16", "false", "--optim", "adamw_torch", again=True,
        )  # fmt: skip

    train(CARELESS_MODEL, "model")
    found, start = weights(tmp_path / "model"), weights(CARELESS_MODEL)
    moved = {name for name in start if (found[name] - start[name]).abs().max() > 1e-3}
    assert moved
    assert all("q_proj" in name or "v_proj" in name for name in moved)
    train(tmp_path / "model", "second")
    config = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(CARELESS_MODEL)
    again = weights(tmp_path / "second")
    assert {name for name in start if not torch.equal(again[name], found[name])} == moved
