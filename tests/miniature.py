"""Run the example scripts with small sizes, for tests."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_in_miniature(example: str, sizes: str, small: str, folder: Path) -> str:
    """Run an example in a folder, with the values `small` in its line `sizes`, and return its output."""
    source = (EXAMPLES / example).read_text()
    assert source.count(sizes) == 1
    source = source.replace(sizes, f"from functools import partial\n{sizes.partition('=')[0]}= {small}")
    # After so little training, the model may write no right answer. With the mean as the baseline, all R would then be
    # 0, and there would be nothing to learn.
    source = source.replace("OfflineTOPRConfig(", "partial(OfflineTOPRConfig, baseline=0)(")
    (folder / "small.py").write_text(source)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "small.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout
