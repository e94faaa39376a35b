import re
import sys

import pytest
from miniature import run_in_miniature

from topr_trl import load_rows
from topr_trl.sandbox.unit_tests import parse_tests, run_tests

SIZES = "WARM_UP_ROWS, LOGGED_TASKS, HELD_OUT_TASKS, COMPLETIONS = 24_000, 300, 200, 16"


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_example_in_miniature(tmp_path):
    said = run_in_miniature("code_generation.py", SIZES, "64, 4, 3, 2", tmp_path)
    assert re.search(r"before +positives only +TOPR\n[- ]+\npass@1 ", said)
    assert "(3 problems, 2 samples each" in said

    # The printed program passes the printed tests.
    program, tests = re.search(r"^(def f.*)\n\n((?:assert .*\n)+)", said, re.MULTILINE).groups()
    assert len(parse_tests(tests)[0]) == 4
    assert run_tests([program], [tests])[0][0] == "correct"

    folders = {name: tmp_path / "topr-code" / name for name in ("log", "before", "topr/held-out")}
    rows = {name: load_rows(folder) for name, folder in folders.items()}
    assert len(rows["log"]) == 4 * 2
    assert rows["before"]["prompt"][:] == rows["topr/held-out"]["prompt"][:]
    assert not set(rows["log"]["prompt"]) & set(rows["before"]["prompt"])
    assert set(rows["log"]["reward"]) <= {1.0, -1.0}
    assert (tmp_path / "topr-code" / "topr" / "model.safetensors").is_file()
