"""Test that clients of four APIs work unchanged through the recorder, and that their calls are learned.

`make test-clients` installs the clients in an environment of their own, and runs these tests.
"""

import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest
from api_server import TEXT, THOUGHT, ApiServer
from reading import learned
from recorders import recorder

from topr_trl import load_rows
from topr_trl.cli import main

PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
ENDPOINTS = {
    "chat/completions": ("openai_chat", "litellm", "langchain", "pydantic_ai"),
    "responses": ("openai_responses", "openai_responses_by_id", "openai_agents", "langchain_responses",
                  "pydantic_ai_responses"),
    "messages": ("anthropic", "litellm_anthropic", "pydantic_ai_anthropic"),
    "api/chat": ("ollama", "litellm_ollama"),
}  # fmt: skip


@pytest.mark.weekly
@pytest.mark.skipif(not PYTHON.exists(), reason="make test-clients installs the clients")
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(("endpoint", "name"), [(each, name) for each, names in ENDPOINTS.items() for name in names])
def test_a_client_works_and_its_calls_are_learned(tmp_path, tool_tokenizer, endpoint, name, mode):
    with recorder(tmp_path / "log", ApiServer()) as running:
        command = [str(PYTHON), str(Path(__file__).with_name("clients.py")), name, running.address, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4_000:]
        assert done.stdout.strip().endswith(TEXT)
        (rollout,) = running.rollouts()
        assert [(call["endpoint"], call["state"]) for call in rollout["calls"]] == [(endpoint, "finished")] * 2
        body = {"rollout_id": rollout["rollout_id"], "reward": 1}
        assert httpx.post(f"{running.address}/rewards", json=body).status_code == 200
    main.main(["import", "--input", str(tmp_path / "log"), "--output_dir", str(tmp_path / "rows")])
    called, said = (text for row in load_rows(tmp_path / "rows") for text in learned(row, tool_tokenizer))
    assert all(words in called for words in ('"name": "add"', '"a": 2, "b": 2'))
    assert said.endswith(f"{TEXT}<|im_end|>")
    assert (THOUGHT in called, THOUGHT in said) == (endpoint != "chat/completions",) * 2
