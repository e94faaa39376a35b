"""Test the import of runs that agents wrote: trajectories, sessions and simulations."""

import json
from itertools import groupby
from pathlib import Path

import pytest
from records import EXAMPLES
from test_evaluations import imported
from test_logs_of_apis import LEGS, turns

from topr_trl.data.tokenization import tokenize_row
from topr_trl.importing.format import Unusable
from topr_trl.importing.formats import atif

WRITTEN = Path(__file__).parent / "written"
START = [("system", "Calculate.", None, []), ("user", "How many legs have 3 cats?", None, [])]
CALLED = [("assistant", "I look.", "Hm.", [LEGS]), ("tool", "FOUR", None, [])]


def learned(row, tokenizer):
    """Return the texts of a completion that a trainer learns."""
    made = tokenize_row(row, tokenizer)
    own = made.completion_mask or [True] * len(made.completion_ids)
    runs = groupby(zip(made.completion_ids, own, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_own, run in runs if is_own]


def test_trajectories_that_harbor_wrote(tmp_path, tool_tokenizer):
    (tmp_path / "rewards.jsonl").write_text(
        "\n".join(
            json.dumps({"id": name, "reward": n}) for n, name in enumerate(("text", "context", "tokens", "parent"))
        )
    )
    rows = imported(tmp_path, WRITTEN / "harbor-0.26.0.jsonl", "--rewards", str(tmp_path / "rewards.jsonl"),
                    "--id_field", "session_id")  # fmt: skip
    assert rows["reward"][:] == [0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert rows["rollout_id"][:] == [None, None, "tokens", "tokens", "parent", "parent"]
    assert (set(rows["model"]), set(rows["temperature"])) == ({"m"}, {0.7})
    text, context, first, second, parent, inner = rows
    assert turns(text["prompt"]) == START
    assert turns(text["completion"]) == [*CALLED, ("assistant", "It is 12.", None, [])]
    assert text["completion"][0]["tool_calls"][0]["id"] == text["completion"][1]["tool_call_id"] == "t"
    asked, answer = learned(text, tool_tokenizer)
    assert all(words in asked for words in ("I look.", '"animal": "cat"'))
    assert "FOUR" not in asked
    assert answer.endswith("It is 12.<|im_end|>")
    dispatched = [("assistant", "DISPATCHED", None, []), ("user", "The page shows 4.", None, [])]
    assert turns(context["prompt"]) == [*START, *CALLED, *dispatched]
    assert learned(context, tool_tokenizer)[0].endswith("It is 12.<|im_end|>")
    assert (first["prompt_ids"], first["completion_ids"]) == ([1, 21], [5, 2, 60, 42, 2])
    assert first["completion_mask"] == [1, 1, 0, 1, 1]
    assert first["sampler_logps"] == [-0.5, -0.25, None, -1.0, -0.125]
    assert (second["prompt_ids"], second["completion_ids"], second["sampler_logps"]) == ([1, 70], [43], [-2.0])
    assert turns(parent["prompt"]) == START
    assert turns(inner["prompt"]) == [("user", "Legs?", None, [])]


SUMMARIZED = {"source": "system", "message": "Summarized.", "observation": {"results": [
    {"subagent_trajectory_ref": [{"trajectory_path": "a.json"}]}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "steps", "why"),
    [
        ({"agent": {"name": "terminus-2"}}, [], "parsed answers.*collect_rollout_details"),
        ({}, [SUMMARIZED], "context was summarized"),
        ({}, [{"source": "agent", "message": "4", "llm_call_count": 2}], "llm_call_count above 1"),
        ({}, [{"source": "user", "message": [{"type": "image", "source": {}}]}], "has image"),
        ({"subagent_trajectories": [EXAMPLES["atif"]]}, [], "needs a session_id"),
    ],
)
def test_trajectories_without_the_text_of_the_model(changes, steps, why):
    record = EXAMPLES["atif"]
    with pytest.raises(Unusable, match=why):
        atif.rows({**record, **changes, "steps": [*record["steps"], *steps]})


def test_token_ids_need_the_prompt():
    step = {"source": "agent", "message": "4", "metrics": {"completion_token_ids": [4]}}
    with pytest.raises(Unusable, match="without prompt_token_ids"):
        atif.rows({"agent": {"name": "a"}, "steps": [step]})
