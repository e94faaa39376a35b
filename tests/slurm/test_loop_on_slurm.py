"""Test the loop on a Slurm cluster (`make test-slurm`): it samples and trains on two nodes, and
continues after it lost one."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cluster import NODES, Cluster, why_not
from safetensors.torch import load_file

from topr_trl import load_rows
from topr_trl.tasks.arithmetic import CARELESS_MODEL

pytestmark = [pytest.mark.weekly, pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"
SETTINGS = {
    "num_train_problems": 48, "num_test_problems": 4, "num_shots": 0, "problems_per_shard": 4, "num_generations": 4,
    "num_generations_eval": 2, "max_new_tokens": 60, "curation": "uniform", "iteration_size": 160,
    "learning_rate": 1e-4, "optim": "adamw_torch", "save_steps": 2, "bf16": False, "report_to": "none",
    "gradient_checkpointing": False, "use_cpu": True, "dtype": "float32", "disable_tqdm": True,
}  # fmt: skip
SRUN = f"srun --nodes 2 --ntasks-per-node 1 --export=ALL {CONFIGS.parent}/slurm"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def start(out, environment, **more):
    command = [sys.executable, "-m", "topr_trl", "iterate", "--output_dir", str(out)]
    for name, value in {**SETTINGS, **more}.items():
        command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen(command, env={**environment, **own}, stdout=log, stderr=log)


def said(out):
    return (out.parent / f"{out.name}.log").read_text()


def until(happened, process, out):
    end = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, said(out)[-4_000:]
        assert time.monotonic() < end, said(out)[-4_000:]
        time.sleep(0.05)


def test_nodes_that_are_lost_while_they_sample_and_train(cluster, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "slurm"
    assert start(whole, cluster.environment, per_device_train_batch_size=4).wait() == 0, said(whole)[-4_000:]
    config = yaml.safe_load((CONFIGS / "ddp.yaml").read_text())
    config |= {"num_machines": 2, "num_processes": 2, "mixed_precision": "no", "rdzv_backend": "static"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    launched = {
        "per_device_train_batch_size": 2, "accelerate_config": tmp_path / "two.yaml",
        "sampling_launcher": f"{SRUN}/sample_on_node.sh", "training_launcher": f"{SRUN}/train_on_node.sh",
    }  # fmt: skip
    rows, model = out / "iteration-1" / "rollouts", out / "iteration-1" / "model"
    for happened in (
        lambda: any(rows.glob("*.parquet")),
        lambda: any(model.glob("work/checkpoint-*/trainer_state.json")),
    ):
        process = start(out, cluster.environment, **launched)
        until(happened, process, out)
        assert cluster.lose_node(NODES[1]) > 2  # the daemon and the processes that it ran
        assert process.wait(600) != 0  # Slurm's requeue would start the same command again.
    assert start(out, cluster.environment, **launched).wait() == 0, said(out)[-4_000:]
    for stage in ("sample", "train"):
        assert f"topr iterate: The stage {stage} " in said(out)
    for folder in ("base/test/rollouts", "iteration-1/rollouts", "iteration-1/test/rollouts"):
        first, second = (load_rows(run / folder) for run in (whole, out))
        if folder != "iteration-1/test/rollouts":  # The weights differ by rounding, so samples can differ.
            assert first["completion_ids"][:] == second["completion_ids"][:]
        assert len(first) == len(second)
    start_, weights, others = (
        load_file(folder / "model.safetensors")
        for folder in (CARELESS_MODEL, whole / "iteration-1" / "model", out / "iteration-1" / "model")
    )
    # Sums in another order differ by rounding, and Adam magnifies the difference where gradients are tiny.
    assert distance(weights, others) < 0.05 * distance(weights, start_)


def distance(one, other):
    return sum((one[name] - other[name]).square().sum().item() for name in one) ** 0.5
