"""Test rewards over HTTP, and who may send them."""

import json

import httpx2 as httpx
import pytest
from recorders import recorder

from topr_trl.recording.store import NAME

pytestmark = pytest.mark.slow
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}


def recorded(running, **more):
    return httpx.post(f"{running.address}/v1/chat/completions", json=CHAT, **more).headers["x-topr-rollout"]


def grade(running, **given):
    return httpx.post(f"{running.address}/rewards", json=given)


@pytest.mark.parametrize(("given", "reward"), [
    ({"reward": 0.5}, 0.5), ({"label": True}, 1.0), ({"label": "down"}, -1.0), ({"reward": 1, "name": "reward"}, 1.0),
])  # fmt: skip
def test_a_reward_or_a_label(running, given, reward):
    name = recorded(running)
    assert grade(running, rollout_id=name, comment="why", **given).json()["reward"] == reward
    (rollout,) = running.rollouts()
    assert (rollout["rewards"], rollout["comments"]) == ({"reward": reward}, {"reward": "why"})


def test_a_reward_with_the_base_url_of_the_application(running):
    name = recorded(running)
    assert httpx.post(f"{running.address}/v1/rewards", json={"rollout_id": name, "reward": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_reward_of_an_answer(running, stream):
    """The number in the header can be sent back as it is."""
    url = f"{running.address}/v1/chat/completions"
    headers = [
        httpx.post(url, json={**CHAT, "stream": stream}, headers={"x-topr-rollout": "r"}).headers for _ in range(2)
    ]
    assert [each["x-topr-answer"] for each in headers] == ["1", "2"]
    sent = grade(running, rollout_id="r", answer=headers[1]["x-topr-answer"], label="down", comment="why")
    assert sent.json() == {"rollout_id": "r", "answer": 2, "name": "reward", "reward": -1}
    assert grade(running, rollout_id="r", answer=1, reward=0.5).status_code == 200
    (rollout,) = running.rollouts()
    assert [call["rewards"]["reward"] for call in rollout["calls"]] == [0.5, -1]
    assert (rollout["rewards"]["reward"], rollout["calls"][1]["comments"]) == (None, {"reward": "why"})
    shown = httpx.get(f"{running.address}/rollouts/r").json()
    assert [(call["number"], call["rewards"]) for call in shown["calls"]] == [(1, {"reward": 0.5}), (2, {"reward": -1})]
    (row,) = httpx.get(f"{running.address}/rollouts").json()["rollouts"]
    assert (row["answer_rewards"], row["answers"], row["ungraded"]) == ({"reward": [-0.25, 2]}, 2, 2)


def test_numbers_of_several_choices(running):
    def asked(n, **more):
        return httpx.post(f"{running.address}/v1/chat/completions", json={**CHAT, "n": n}, **more).headers

    assert [asked(2)["x-topr-answer"], asked(2, headers={"x-topr-rollout": "r"})["x-topr-answer"]] == ["1,1", "1,2"]


def test_a_rollout_has_one_reward_or_rewards_of_answers(running):
    name = recorded(running)
    assert grade(running, rollout_id=name, answer=1, reward=1).status_code == 200
    refused = grade(running, rollout_id=name, reward=1)
    assert (refused.status_code, "first remove it" in refused.json()["error"]["message"]) == (409, True)
    for given in ({"answer": 1, "reward": None}, {"reward": 1}):
        assert grade(running, rollout_id=name, **given).status_code == 200
    assert grade(running, rollout_id=name, answer=1, reward=1).status_code == 409


def test_an_answer_that_does_not_exist(running):
    name = recorded(running)
    for reward in (1, None):
        found = grade(running, rollout_id=name, answer=2, reward=reward)
        assert (found.status_code, "x-topr-answer" in found.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize(("given", "field"), [
    *(({"rollout_id": "r", "reward": 1, "answer": wrong}, "answer must be a number in the header x-topr-answer")
      for wrong in (0, -1, 1.5, True, "", "one", "1,2", "\u00b2", [], "9" * 30)),
    ({"reward": 1}, "rollout_id"), ({"rollout_id": 3, "reward": 1}, "rollout_id"),
    ({"rollout_id": "r"}, "reward"), ({"rollout_id": "r", "reward": 1, "label": True}, "label"),
    ({"rollout_id": "r", "reward": "1"}, "reward must be a finite number, not '1'"),
    ({"rollout_id": "r", "reward": True}, "reward"),
    ({"rollout_id": "r", "reward": 1e300}, "reward"), ({"rollout_id": "r", "label": "maybe"}, "label"),
    ({"rollout_id": "r", "label": 1}, "label"), ({"rollout_id": "r", "label": []}, "label"),
    ({"rollout_id": "r", "reward": 1, "name": "a.b"}, "name"), ({"rollout_id": "r", "reward": 1, "name": ""}, "name"),
    ({"rollout_id": "r", "reward": 1, "comment": 3}, "comment"),
    ({"rollout_id": "r", "reward": 1, "comment": "x" * 10_001}, "comment"),
    ({"rollout_id": "r", "reward": 1, "score": 3}, "score"), ({"rollout_id": "\ud83d", "reward": 1}, "rollout_id"),
    ({"rollout_id": "r", "reward": 1, "name": "\ud83d"}, "name"),
    ({"rollout_id": "r", "reward": 1, "comment": "\ud83d"}, "comment"),
])  # fmt: skip
def test_malformed_rewards(running, given, field):
    headers = {"Content-Type": "application/json"}
    found = httpx.post(f"{running.address}/rewards", content=json.dumps(given), headers=headers)
    assert found.status_code == 400
    assert field in found.json()["error"]["message"]


@pytest.mark.parametrize(("content", "words"), [
    (b"", "not JSON"), (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "JSON object"),
    (b'"x"', "JSON object"), (b'{"rollout_id": "r", "reward": NaN}', "finite"),
])  # fmt: skip
def test_malformed_bodies(running, content, words):
    headers = {"Content-Type": "application/json"}
    found = httpx.post(f"{running.address}/rewards", content=content, headers=headers)
    assert (found.status_code, words in found.json()["error"]["message"]) == (400, True)


def test_an_unknown_rollout(running):
    found = grade(running, rollout_id="none", reward=1)
    assert found.status_code == 404
    assert "x-topr-rollout" in found.json()["error"]["message"]
    assert httpx.get(f"{running.address}/rollouts/none").status_code == 404


def test_a_full_disk(running):
    name = recorded(running)
    running.fill()
    found = [grade(running, rollout_id=name, reward=1, name=f"n{k}", comment="x" * 9_000) for k in range(5)]
    assert found[-1].status_code == 507


@pytest.mark.parametrize("path", ["/rollouts", "/rollouts/r"])
def test_a_recording_that_cannot_be_read_is_named(running, path):
    (running.folder / NAME).unlink()
    answer = httpx.get(f"{running.address}{path}")
    assert answer.status_code == 500
    assert f"{NAME} cannot be read" in answer.json()["error"]["message"]


def test_lists(running):
    names = [recorded(running) for _ in range(3)]
    grade(running, rollout_id=names[1], label=True, name="rating")
    for graded, expected in (("", names[::-1]), ("yes", names[1:2]), ("no", [names[2], names[0]])):
        found = httpx.get(f"{running.address}/rollouts?graded={graded}").json()
        assert [each["rollout_id"] for each in found["rollouts"]] == expected
        assert (found["totals"]["rollouts"], found["totals"]["graded"]) == (3, 1)
    number = httpx.get(f"{running.address}/rollouts").json()["rollouts"][0]["number"]
    found = httpx.get(f"{running.address}/rollouts?before={number}").json()
    assert [each["rollout_id"] for each in found["rollouts"]] == names[1::-1]
    first = found["rollouts"][0]
    assert (first["asked"], first["answer"], first["rewards"]) == ("2 + 2?", "It is 4.", {"rating": 1.0})
    for wrong in ("before=x", f"search={'x' * 201}"):
        assert httpx.get(f"{running.address}/rollouts?{wrong}").status_code == 400
    for search, expected in (("2%20%2b%202", 3), ("none", 0)):
        assert len(httpx.get(f"{running.address}/rollouts?search={search}").json()["rollouts"]) == expected


def test_a_rollout_has_its_conversation_and_no_tokens(running):
    name = recorded(running)
    found = httpx.get(f"{running.address}/rollouts/{name}")
    (call,) = found.json()["calls"]
    assert (call["messages"], call["answer"]["content"]) == (CHAT["messages"], "It is 4.")
    assert "token_ids" not in found.text


def test_the_page_shows_a_prompt_of_token_ids(running):
    name = httpx.post(f"{running.address}/v1/completions", json={"model": "m", "prompt": [5, 6]}).headers[
        "x-topr-rollout"
    ]
    (call,) = httpx.get(f"{running.address}/rollouts/{name}").json()["calls"]
    assert call["messages"] == [{"role": "user", "content": "[5, 6]"}]


@pytest.mark.parametrize("path", ["/..%2f..%2fetc/passwd", "/rollouts/..%2f..%2fetc%2fpasswd", "/v2/x", "/static/x"])
def test_there_are_no_other_files(running, path):
    assert httpx.get(f"{running.address}{path}").status_code == 404


@pytest.mark.parametrize("headers", [
    {"Origin": "https://example.com"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "example.com"},
    {"Host": "127.0.0.1.example.com"}, {"Host": "["}, {"Origin": "http://["},
])  # fmt: skip
@pytest.mark.parametrize("path", ["/rewards", "/v1/chat/completions"])
def test_pages_of_other_sites_are_refused(running, path, headers):
    name = recorded(running)
    asked = len(running.upstream.requests)
    body = {**CHAT, "rollout_id": name, "reward": 1}
    refusal = httpx.post(f"{running.address}{path}", json=body, headers=headers)
    assert refusal.status_code == 403
    if "Host" in headers:
        assert "TOPR_RECORD_TOKEN" in refusal.json()["error"]["message"]
    else:  # A proxy that does not pass on the header `Host` has the same effect.
        assert "pass on the header Host" in refusal.json()["error"]["message"]
    assert (len(running.upstream.requests), running.rollouts()[0]["rewards"]) == (asked, {})


def test_forms_of_other_sites_are_refused(running):
    """Browsers send a form to another site without a preflight request."""
    name = recorded(running)
    body = f'{{"rollout_id": "{name}", "reward": 1}}'
    found = httpx.post(f"{running.address}/rewards", content=body, headers={"Content-Type": "text/plain"})
    assert found.status_code == 415
    assert running.rollouts()[0]["rewards"] == {}


def test_the_page_allows_no_other_scripts(running):
    policy = httpx.get(running.address).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy != httpx.get(running.address).headers["content-security-policy"]


def test_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_RECORD_TOKEN", "long random text")
    monkeypatch.setenv("TOPR_UPSTREAM_KEY", "sk-upstream")
    with recorder(tmp_path, host="0.0.0.0") as running:
        url = f"{running.address}/v1/chat/completions"
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic !"},
            {"Authorization": b"Bearer \xff"},
        ):
            found = httpx.post(url, json=CHAT, headers=headers)
            assert found.status_code == 401
            assert "TOPR_RECORD_TOKEN" in found.json()["error"]["message"]
        assert httpx.get(running.address).headers["www-authenticate"].startswith("Basic")
        assert httpx.post(url, json=CHAT, headers={"Authorization": "Bearer long random text"}).status_code == 200
        assert httpx.get(running.address, auth=("any", "long random text")).status_code == 200
        assert [headers["Authorization"] for headers in running.upstream.headers] == ["Bearer sk-upstream"]
        assert b"random" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
