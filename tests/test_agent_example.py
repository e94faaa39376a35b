"""Run examples/agent.py in miniature, and check its output, its log and its saved models."""

import re

import pytest
from miniature import run_in_miniature

from topr_trl import load_rows

SIZES = "DEMONSTRATIONS, LOGGED_SHOPS, HELD_OUT_SHOPS, RUNS, MOST_TURNS = 12_000, 150, 100, 8, 4"


@pytest.mark.weekly
def test_the_example_in_miniature(tmp_path):
    said = run_in_miniature("agent.py", SIZES, "640, 4, 3, 2, 4", tmp_path)
    assert re.search(r"before +TOPR +TOPR, without the mask\n[- ]+\npass@1 ", said)
    assert "(3 problems, 2 samples each" in said
    assert re.search(r"^Answer: price of (\d\d)<\|end\|>\nTool: \d+ coins\. Also ", said, re.MULTILINE)

    log = load_rows(tmp_path / "topr-agent" / "log")
    assert len(log) == 4 * 2
    for row in log:
        roles = [message["role"] for message in row["completion"]]
        assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"] * (len(roles) % 2)
        assert row["reward"] == (1.0 if row["verdict"] == "correct" else -1.0)
    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (log, load_rows(
        tmp_path / "topr-agent" / "before"
    ))]  # fmt: skip
    assert not questions[0] & questions[1]
    for name in ("trained", "without-mask"):
        assert (tmp_path / "topr-agent" / name / "model.safetensors").is_file()
