"""Test a recorder in front of vLLM's server on the CPU. `make test-vllm` runs these tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from recorders import recorder

from topr_trl.importing.formats import recording
from topr_trl.recording.protocols import choice_of, messages_of

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "1 + 2 ="}], "max_tokens": 8, "temperature": 0.0}
TEXT = {"model": "m", "prompt": "1 + 2 =", "max_tokens": 8, "temperature": 0.0}


def compared(answer):
    """Return the text of each choice, and the distinct events of an answer without their text.

    vLLM joins events for a client that reads slowly, so their number differs from call to call. Events of several
    choices come in any order.
    """
    texts, events = {}, []
    for line in filter(None, answer.split("\n\n")):
        data = line.removeprefix("data: ")
        event = {"data": data} if data == "[DONE]" else json.loads(data)
        for name in ("id", "created"):
            event.pop(name, None)
        for choice in event.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or choice
            text = message.pop("text" if message is choice else "content", None) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        if event not in events:
            events.append(event)
    return texts, sorted(events, key=json.dumps)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2, "temperature": 1.0, "seed": 3}, {"logprobs": 1}])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_a_client_sees_what_vllm_sends(vllm, tmp_path, endpoint, more):
    body = {**(CHAT if endpoint.startswith("chat") else TEXT), **more}
    if endpoint.startswith("chat") and "logprobs" in more:
        body |= {"logprobs": True, "top_logprobs": 1}
    with recorder(tmp_path, upstream=f"{vllm}/v1") as running:
        found = requests.post(f"{running.address}/v1/{endpoint}", json=body, timeout=60)
        direct = requests.post(f"{vllm}/v1/{endpoint}", json=body, timeout=60)
        assert found.status_code == direct.status_code == 200
        assert compared(found.text) == compared(direct.text)
        for rollout in running.rollouts():
            (call,) = rollout["calls"]
            choice = call["response"]["choices"][call["choice"]]
            assert choice.get("prompt_token_ids") or call["response"]["prompt_token_ids"]
            logps = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
            assert len(choice["token_ids"]) == len(logps) > 0


OTHERS = {
    "responses": {"model": "m", "input": "1 + 2 =", "max_output_tokens": 8, "temperature": 0.0},
    "messages": {"model": "m", "messages": CHAT["messages"], "max_tokens": 8, "temperature": 0.0},
}


def without_ids(answer):
    """Return the types of an answer's events in their order, and the answer without ids, times and streamed pieces."""
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.split("\n") if line.startswith(("{", "data: {"))
    ]
    ids = ("id", "item_id", "created_at", "sequence_number", "delta")
    shown = [
        json.loads(json.dumps(event), object_hook=lambda found: {key: found[key] for key in found if key not in ids})
        for event in events
    ]
    return list(dict.fromkeys(event["type"] for event in events if "type" in event)), shown[-2:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", OTHERS)
def test_a_client_of_another_api_sees_what_vllm_sends(vllm, tmp_path, endpoint, stream):
    body = {**OTHERS[endpoint], "stream": stream}
    with recorder(tmp_path, upstream=f"{vllm}/v1") as running:
        found = requests.post(f"{running.address}/v1/{endpoint}", json=body, timeout=60)
        direct = requests.post(f"{vllm}/v1/{endpoint}", json=body, timeout=60)
        assert without_ids(found.text) == without_ids(direct.text)
        (rollout,) = running.rollouts()
        (call,) = rollout["calls"]
        text = json.dumps(choice_of(call)["message"]["content"])
        assert (call["state"], found.headers["x-topr-rollout"]) == ("finished", rollout["rollout_id"])
        if endpoint == "responses":
            (row,) = recording.rows({**rollout, "rewards": {"reward": 1}})
            assert row["prompt_ids"]
            assert 0 < len(row["completion_ids"]) <= 8
            more = {"input": "4 + 2 =", "previous_response_id": call["response"]["id"]}
            requests.post(f"{running.address}/v1/responses", json={**body, **more}, timeout=60)
            (rollout,) = running.rollouts()
            first, second, third = (turn["content"] for turn in messages_of(rollout["calls"][1]))
            assert (first, json.dumps(second), third) == ("1 + 2 =", text, "4 + 2 =")


def test_errors_are_those_of_vllm(vllm, tmp_path):
    with recorder(tmp_path, upstream=f"{vllm}/v1") as running:
        for body in ({**CHAT, "model": "other"}, {**CHAT, "max_tokens": -1}):
            found = requests.post(f"{running.address}/v1/chat/completions", json=body, timeout=60)
            direct = requests.post(f"{vllm}/v1/chat/completions", json=body, timeout=60)
            assert (found.status_code, found.json()) == (direct.status_code, direct.json())


@pytest.mark.weekly
def test_the_example(tmp_path):
    """Training on recorded answers improves the model, and vLLM serves each version."""
    command = [sys.executable, str(ROOT / "examples" / "record.py"), "--output_dir", str(tmp_path / "out"),
               "--questions", "400", "--test_questions", "200"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    first, *_, last = map(float, re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1]))
    assert last > first
