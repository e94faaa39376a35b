import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from topr_trl import load_rows
from topr_trl.sandbox.unit_tests import parse_tests, run_tests

EXAMPLE = Path(__file__).parents[2] / "examples" / "code_generation.py"
SIZES = "WARM_UP_ROWS, LOGGED_TASKS, HELD_OUT_TASKS, COMPLETIONS = 24_000, 300, 200, 16"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_example_in_miniature(tmp_path):
    source = EXAMPLE.read_text()
    assert source.count(SIZES) == 1
    (tmp_path / "small.py").write_text(source.replace(SIZES, SIZES.partition("=")[0] + "= 64, 4, 3, 2"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "small.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4_000:]
    assert re.search(r"before +positives only +TOPR\n[- ]+\npass@1 ", done.stdout)
    assert "(3 problems, 2 samples each" in done.stdout

    # The task that it prints is right by its own tests.
    program, tests = re.search(r"^(def f.*)\n\n((?:assert .*\n)+)", done.stdout, re.MULTILINE).groups()
    assert len(parse_tests(tests)[0]) == 4
    assert run_tests([program], [tests])[0][0] == "correct"

    folders = {name: tmp_path / "topr-code" / name for name in ("log", "before", "topr/held-out")}
    rows = {name: load_rows(folder) for name, folder in folders.items()}
    assert len(rows["log"]) == 4 * 2
    assert rows["before"]["prompt"][:] == rows["topr/held-out"]["prompt"][:]
    assert not set(rows["log"]["prompt"]) & set(rows["before"]["prompt"])
    assert set(rows["log"]["reward"]) <= {1.0, -1.0}
    assert (tmp_path / "topr-code" / "topr" / "model.safetensors").is_file()
