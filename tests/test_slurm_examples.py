"""Run the batch scripts in examples/slurm with Bash and a fake `topr`, which only saves its arguments."""

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from topr_trl.cli.parsing import parse
from topr_trl.pipeline.loop import check

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_starts_the_loop_with_settings_that_fit(script, tmp_path, monkeypatch):
    lines = script.read_text().splitlines()
    asked = dict(
        line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH") and "=" in line
    )
    nodes = [f"node{n}" for n in range(int(asked["nodes"]))]
    programs = {
        "topr": f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('given.json', 'w'))\n",
        "srun": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    subprocess.run(["bash", str(script)], cwd=tmp_path, check=True)
    command, *given = json.loads((tmp_path / "given.json").read_text())
    assert command == "iterate"
    monkeypatch.chdir(ROOT)
    loop = parse(command, [*given, "--bf16", "False"])
    for launcher in (loop.sampling_launcher, loop.training_launcher):
        words = shlex.split(launcher)
        given = dict(pairwise(words))
        assert int(given["--nodes"]) * (1 + bool(loop.overlap)) == len(
            nodes
        )  # With overlap, two steps run side by side.
        assert (ROOT / words[-1]).stat().st_mode & 0o100
        if "sample" in launcher:
            assert int(given["--gpus-per-task"]) == loop.vllm_tensor_parallel_size
            gpus = int(given["--ntasks-per-node"]) * int(given["--gpus-per-task"])
        else:
            gpus = int(given["--gpus-per-node"])
        assert gpus == int(asked["gpus-per-node"])
    # Skip the checks of vLLM, the problems and the rewards, which may not be available here.
    monkeypatch.setattr("topr_trl.pipeline.launch.find_spec", lambda name: True)
    monkeypatch.setattr("topr_trl.pipeline.loop.load_problems", lambda *_: None)
    monkeypatch.setattr("topr_trl.pipeline.loop.check_rewards", lambda *_: None)
    check(loop)


@pytest.mark.parametrize(
    ("script", "stage", "expected"),
    [
        ("sample_on_node.sh", "sample", "python -m topr_trl sample --config a.yaml --worker 3/8"),
        (
            "train_on_node.sh", "train",
            "python -m accelerate.commands.launch --config_file nodes.yaml --machine_rank 3 --main_process_ip node4 "
            "-m topr_trl train --config a.yaml",
        ),
    ],
)  # fmt: skip
def test_a_script_adds_what_differs_between_machines(script, stage, expected, tmp_path):
    for name, text in {"scontrol": "printf 'node4\\nnode7\\n'", "python": 'echo python "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    launch = "" if stage == "sample" else "accelerate.commands.launch --config_file nodes.yaml -m "
    command = f"python -m {launch}topr_trl {stage} --config a.yaml".split()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_PROCID": "3", "SLURM_NTASKS": "8",
                   "SLURM_STEP_NODELIST": "node[4,7]"}  # fmt: skip
    run = subprocess.run([SCRIPTS[0].parent / script, *command], env=environment, capture_output=True, text=True,
                         check=True)  # fmt: skip
    assert run.stdout.split() == expected.split()
