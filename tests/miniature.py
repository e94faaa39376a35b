"""Examples with small sizes: the same file, but for one line."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_in_miniature(example: str, sizes: str, small: str, folder: Path) -> str:
    """Run an example in a folder, with other values in the line `sizes`, and return what it prints."""
    source = (EXAMPLES / example).read_text()
    assert source.count(sizes) == 1
    source = source.replace(sizes, f"from functools import partial\n{sizes.partition('=')[0]}= {small}")
    # A model that was taught so little may write no right answer, and rewards that are all the same minus their mean
    # leave nothing to learn.
    source = source.replace("OfflineTOPRConfig(", "partial(OfflineTOPRConfig, baseline=0)(")
    (folder / "small.py").write_text(source)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "small.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout
