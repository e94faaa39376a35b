"""Run the batch scripts in examples/slurm with Bash and a fake `topr`, which only saves its arguments."""

import json
import os
import subprocess
import sys
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
        "scontrol": f"#!/bin/sh\nprintf '%s\\n' {' '.join(nodes)}\n",
        "topr": f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('given.json', 'w'))\n",
        "srun": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-9]")
    subprocess.run(["bash", str(script)], cwd=tmp_path, check=True)
    command, *given = json.loads((tmp_path / "given.json").read_text())
    assert command == "iterate"
    monkeypatch.chdir(ROOT)
    loop = parse(command, [*given, "--bf16", "False"])
    gpus = int(asked["gpus-per-node"]) * len(nodes)
    sampling = loop.sampling_workers * loop.vllm_tensor_parallel_size
    assert sampling <= gpus
    if loop.overlap:
        assert loop.sampling_hosts + loop.training_hosts == nodes[4:] + nodes[:4]
        assert sampling <= int(asked["gpus-per-node"]) * len(loop.sampling_hosts)
    # Skip the checks of vLLM, the problems and the rewards, which may not be available here.
    monkeypatch.setattr("topr_trl.pipeline.launch.find_spec", lambda name: True)
    monkeypatch.setattr("topr_trl.pipeline.loop.load_problems", lambda *_: None)
    monkeypatch.setattr("topr_trl.pipeline.loop.check_rewards", lambda *_: None)
    check(loop)
