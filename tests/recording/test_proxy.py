"""Test the answers to clients, the requests to the server, and the stored calls."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import aiohttp
import httpx2 as httpx
import openai
import psutil
import pytest
from recorders import WORDS, recorder, until

from topr_trl.recording.conversations import Conversation
from topr_trl.recording.proxy import _events
from topr_trl.recording.recorded_answer import LARGE

pytestmark = pytest.mark.slow
HI = [{"role": "user", "content": "2 + 2?"}]
ANSWER = "".join(WORDS)


def client_of(running, **more):
    return openai.OpenAI(base_url=f"{running.address}/v1", api_key="sk-secret", max_retries=0, **more)


def chat(running, **more):
    return client_of(running).chat.completions.with_raw_response.create(**{"model": "m", "messages": HI, **more})


def received(running, after_the_first=lambda: None):
    """Return the words of a stream, and the error that ended it."""
    words = []
    try:
        for event in client_of(running).chat.completions.create(model="m", messages=HI, stream=True):
            words.append(event.choices[0].delta.content)
            if len(words) == 1:
                after_the_first()
    except openai.APIError as error:
        return words, error
    return words, None


def call_of(running):
    (rollout,) = running.rollouts()
    (call,) = rollout["calls"]
    return call


def send(connection, path, body, length=None):
    """Send a request whose `Content-Length` is `length`, or the length of the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    connection.sendall(f"{head}\r\nContent-Length: {length or len(body)}\r\n\r\n{body}".encode())


def test_an_answer_is_unchanged_and_has_a_rollout(running):
    found = chat(running)
    body = {"model": "m", "messages": HI}
    assert json.loads(found.text) == httpx.post(f"{running.direct}/v1/chat/completions", json=body).json()
    (rollout,) = running.rollouts()
    assert found.headers["x-topr-rollout"] == rollout["rollout_id"]
    (call,) = rollout["calls"]
    assert (call["state"], call["served_model"]) == ("finished", "/weights/m")
    assert call["response"]["prompt_token_ids"] == [1, 2, 3]
    (choice,) = call["response"]["choices"]
    assert choice["token_ids"] == [10, 11, 12, 13]
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [0, -0.5, -1, -1.5]


def test_calls_that_start_together_all_have_token_ids(running):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: chat(running), range(8)))
    assert ["return_token_ids" in asked for asked in running.upstream.requests] == [True] * 8


def test_a_request_without_a_model_uses_the_only_one(running):
    httpx.post(f"{running.address}/v1/chat/completions", json={"messages": HI})
    assert running.upstream.requests[0]["return_token_ids"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_unchanged_and_stored_like_an_answer(running, n):
    body = {"model": "m", "messages": HI, "stream": True, "n": n}
    direct = httpx.post(f"{running.direct}/v1/chat/completions", json=body).text
    found = httpx.post(f"{running.address}/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in found.text.split("\n\n") if line.startswith("data: {")]
    assert events == [json.loads(line[6:]) for line in direct.split("\n\n") if line.startswith("data: {")]
    assert found.text.endswith("data: [DONE]\n\n")
    assert found.headers["content-type"].startswith("text/event-stream")
    names = found.headers["x-topr-rollout"].split(",")
    assert [rollout["rollout_id"] for rollout in running.rollouts()] == names
    assert len(names) == n
    streamed = running.rollouts()[0]["calls"][0]["response"]
    whole = json.loads(chat(running, n=n, extra_body={"return_token_ids": True}, logprobs=True).text)
    del whole["usage"]
    for choice in whole["choices"]:
        choice["message"].pop("tool_calls")
    assert streamed == whole


@pytest.mark.parametrize(("owner", "token_ids", "asked"), [
    ("openai", "auto", False), ("openai", "always", True), ("vllm", "never", False), ("vllm", "auto", True),
])  # fmt: skip
def test_token_ids_are_requested_from_vllm(tmp_path, owner, token_ids, asked):
    with recorder(tmp_path, token_ids=token_ids) as running:
        running.upstream.owner = owner
        chat(running)
        assert ("return_token_ids" in running.upstream.requests[0]) == asked


@pytest.mark.parametrize("stream", [False, True])
def test_text_completions(running, stream):
    body = {"model": "m", "prompt": "2 + 2?", "stream": stream}
    found = httpx.post(f"{running.address}/v1/completions", json=body)
    assert "[10" not in found.text
    choice = call_of(running)["response"]["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (ANSWER, [10, 11, 12, 13])
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [0, -0.5, -1, -1.5]


def test_choices_are_rollouts_and_a_name_joins_them(running):
    names = chat(running, n=2).headers["x-topr-rollout"].split(",")
    assert len(set(names)) == 2
    named = {"x-topr-rollout": "mine"}
    for _ in range(2):
        assert chat(running, n=2, extra_headers=named).headers["x-topr-rollout"] == "mine"
    by_name = {rollout["rollout_id"]: rollout["calls"] for rollout in running.rollouts()}
    assert list(by_name) == [*names, "mine"]
    assert [call["choice"] for name in names for call in by_name[name]] == [0, 1]
    assert [call["choice"] for call in by_name["mine"]] == [0, 1, 0, 1]


def test_secrets_in_headers_are_passed_on_and_not_stored(running):
    chat(running, extra_headers={"Cookie": "session=secret-cookie"})
    assert running.upstream.headers[-1]["Authorization"] == "Bearer sk-secret"
    assert running.upstream.headers[-1]["Cookie"] == "session=secret-cookie"
    for file in running.folder.iterdir():
        assert b"secret" not in file.read_bytes()


def test_errors_of_the_server_are_passed_on(running):
    running.upstream.fault = "refuse"
    with pytest.raises(openai.InternalServerError, match="model m is busy") as raised:
        chat(running)
    assert raised.value.status_code == 503
    call = call_of(running)
    assert (call["state"], call["error"]) == ("failed", "model m is busy")


def test_a_server_that_cannot_be_reached(tmp_path):
    with recorder(tmp_path, upstream="http://127.0.0.1:9/v1") as running:
        with pytest.raises(openai.InternalServerError, match=r"127\.0\.0\.1:9") as raised:
            chat(running)
        assert raised.value.status_code == 502
        assert call_of(running)["state"] == "failed"


def test_a_server_that_dies_during_a_stream(running):
    running.upstream.fault = "die"
    words, error = received(running)
    assert words == WORDS[:2]
    assert "closed the connection" in str(error)
    call = call_of(running)
    assert (call["state"], call["response"]["choices"][0]["message"]["content"]) == ("cut", "It is")
    assert call["response"]["choices"][0]["token_ids"] == [10, 11]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_sending(tmp_path, stream):
    with recorder(tmp_path, upstream_timeout=0.3) as running:
        running.upstream.fault = "stall" if stream else "hang"
        if stream:
            words, error = received(running)
            assert (words, "upstream_timeout" in str(error)) == (WORDS[:2], True)
        else:
            with pytest.raises(openai.APIError, match="upstream_timeout"):
                chat(running)
        until(lambda: running.rollouts()[0]["calls"][0]["state"] != "open")
        assert call_of(running)["state"] == ("cut" if stream else "failed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_server(running, stream):
    if stream:
        running.upstream.delay, running.upstream.words = 0.05, WORDS * 50
        with httpx.stream("POST", f"{running.address}/v1/chat/completions",
                          json={"model": "m", "messages": HI, "stream": True}) as response:  # fmt: skip
            next(response.iter_bytes())
    else:
        running.upstream.fault = "hang"
        with pytest.raises(openai.APITimeoutError):
            client_of(running, timeout=0.5).chat.completions.create(model="m", messages=HI)
    until(lambda: running.upstream.left)
    until(lambda: running.rollouts()[0]["calls"][0]["state"] != "open")
    call = call_of(running)
    assert call["state"] == ("cut" if stream else "failed")
    assert "client closed" in call["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("on_full", "status", "counts"), [
    ("refuse", 507, {}), ("pass", 200, {"POST /v1/chat/completions (the disk is full)": 1}),
])  # fmt: skip
def test_a_full_disk(tmp_path, on_full, status, counts, stream):
    with recorder(tmp_path, on_full=on_full) as running:
        running.fill()
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}], "stream": stream}
        found = httpx.post(f"{running.address}/v1/chat/completions", json=body)
        assert (found.status_code, "x-topr-rollout" in found.headers) == (status, False)
        assert ("--on_full pass" in found.text, len(running.upstream.requests)) == (not counts, len(counts))
        assert httpx.get(f"{running.address}/rollouts").json()["unrecorded"] == counts


@pytest.mark.parametrize("on_full", ["refuse", "pass"])
def test_a_disk_that_is_full_during_a_stream(tmp_path, on_full):
    with recorder(tmp_path, on_full=on_full) as running:
        running.upstream.words, running.upstream.gate = ["w" * 5_000] * 6, threading.Event()
        words, error = received(running, lambda: (running.fill(), running.upstream.gate.set()))
        if on_full == "pass":
            assert (len(words), error) == (6, None)
        else:
            assert len(words) < 6
            assert "cannot be recorded" in str(error)
            assert error.body["code"] == 507


@pytest.mark.parametrize("stream", [False, True])
def test_redaction(tmp_path, stream):
    with recorder(tmp_path / "log", redact=[r"key-\w+", r"It is \d"]) as running:
        asked = [{"role": "user", "content": "My key is key-abc123."}]
        found = chat(running, messages=asked, stream=stream)
        text = found.text if not stream else "".join(event.choices[0].delta.content for event in found.parse())
        assert "It is 4." in text if not stream else text == "It is 4."
        assert running.upstream.requests[0]["messages"] == asked  # The model gets the unredacted text.
        call = call_of(running)
        assert call["redacted"] == 1
        assert call["request"]["messages"][0]["content"] == "My key is [redacted]."
        choice = call["response"]["choices"][0]
        assert choice["message"]["content"] == "[redacted]."
        assert "token_ids" not in choice
        for file in running.folder.iterdir():
            assert b"key-abc123" not in file.read_bytes()
            assert b"It is" not in file.read_bytes()


@pytest.mark.parametrize("stream", [False, True])
def test_a_redacted_prompt_has_no_token_ids(tmp_path, stream):
    with recorder(tmp_path, redact=["(?i)KEY-\\w+"]) as running:
        body = {"model": "m", "messages": [{"role": "user", "content": "key-abc"}], "metadata": {"key-def": 1}}
        httpx.post(f"{running.address}/v1/chat/completions", json={**body, "stream": stream})
        call = call_of(running)
        assert call["request"]["metadata"] == {"[redacted]": 1}
        assert "token_ids" not in json.dumps(call["response"])
        assert call["response"]["choices"][0]["message"]["content"] == ANSWER


def test_redacted_conversations_cannot_be_guessed(tmp_path):
    with recorder(tmp_path, redact=["unused"]) as running:
        first = chat(running).headers["x-topr-rollout"]
        message = {"role": "assistant", "content": ANSWER}
        guess = Conversation("m", [*HI, message]).continued
        assert all(guess.encode() not in file.read_bytes() for file in tmp_path.iterdir())
        assert chat(running, messages=[*HI, message, *HI]).headers["x-topr-rollout"] == first


@pytest.mark.parametrize("name", ["x" * 201, "tab\there", "a,b"])
def test_names_of_rollouts(running, name):
    found = httpx.post(
        f"{running.address}/v1/chat/completions", json={"model": "m", "messages": HI}, headers={"x-topr-rollout": name}
    )
    assert found.status_code == 400
    assert "x-topr-rollout" in found.json()["error"]["message"]


def test_a_request_that_is_too_large(tmp_path):
    with recorder(tmp_path, max_body_mb=1) as running:
        found = httpx.post(f"{running.address}/v1/chat/completions", json={"messages": "x" * 2_000_000})
        assert found.status_code == 413
        assert "max_body_mb" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/rewards"])
def test_a_request_that_arrives_too_slowly(tmp_path, path):
    with recorder(tmp_path, client_timeout=0.3) as running:
        with running.connect() as connection:
            send(connection, path, "{", length=9)
            found = ""
            while "client_timeout" not in found:  # The head and the body can arrive separately.
                piece = connection.recv(65536).decode()
                assert piece, found
                found += piece
        assert found.startswith("HTTP/1.1 408")
        assert running.rollouts() == []


def test_a_client_that_does_not_read(tmp_path):
    with recorder(tmp_path, client_timeout=0.3) as running:
        running.upstream.words = ["w" * 1_000_000] * 50
        with running.connect() as connection:
            send(connection, "/v1/chat/completions", json.dumps({"model": "m", "messages": HI, "stream": True}))
            until(lambda: running.rollouts() and call_of(running)["state"] == "cut")
        assert "client_timeout" in call_of(running)["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_too_large(tmp_path, stream):
    with recorder(tmp_path, max_answer_mb=1) as running:
        running.upstream.words = ["w" * 400_000] * 2  # The logprobs repeat the words.
        if stream:
            words, error = received(running)
            assert (len(words), "max_answer_mb" in str(error)) == (1, True)
        else:
            with pytest.raises(openai.InternalServerError, match="max_answer_mb"):
                chat(running)
        call = call_of(running)
        assert (call["state"], "max_answer_mb" in call["error"]) == ("cut" if stream else "failed", True)


def test_models_are_read_again_after_the_server_was_away(running):
    chat(running)
    running.upstream.fault, running.upstream.owner = "die", "other"
    received(running)
    running.upstream.fault = None
    chat(running)
    assert [bool(asked.get("return_token_ids")) for asked in running.upstream.requests] == [True, True, False]


@pytest.mark.parametrize(("seconds", "asked", "lists"), [(0, [True, True], 2), (60, [True, False], 1)])
def test_models_are_read_again_for_a_new_model(running, monkeypatch, seconds, asked, lists):
    """A server can load an adapter while it runs. For a model that it never lists, do not ask in each call."""
    monkeypatch.setattr("topr_trl.recording.proxy._SECONDS_BETWEEN", seconds)
    chat(running)
    running.upstream.names = ["m", "adapter"]
    chat(running, model="adapter")
    chat(running)
    assert [bool(each.get("return_token_ids")) for each in running.upstream.requests] == [*asked, True]
    assert running.upstream.lists == lists


@pytest.mark.parametrize("path", ["..%2fadmin", "%2e%2e/admin", "models/../../admin", "..%5cadmin"])
def test_only_paths_under_the_upstream_are_passed_on(running, path):
    assert httpx.get(f"{running.address}/v1/{path}").status_code == 404
    assert running.upstream.headers == []


@pytest.mark.parametrize("path", ["a%2Fb%20c?q=a%2Bb&q=2", "models%3Fx"])
def test_a_path_is_passed_on_as_it_is(running, path):
    assert httpx.get(f"{running.address}/v1/{path}").text == f"/v1/{path}"


def test_headers_are_passed_on_and_cookies_are_not_kept(running):
    port = running.direct.rpartition(":")[2]
    with recorder(running.folder.parent / "other", upstream=f"http://localhost:{port}/v1") as other:
        found = [httpx.get(f"{other.address}/v1/x", headers=[("x-a", "1"), ("x-a", "2")]) for _ in range(2)]
        assert found[0].headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert running.upstream.headers[-1].getall("x-a") == ["1", "2"]
        assert "Cookie" not in running.upstream.headers[-1]


@pytest.mark.parametrize("path", ["chat/completions", "x"])
def test_a_redirect_is_an_error(running, path):
    """A client that follows the redirect would bypass the recorder."""
    with recorder(running.folder.parent / "other", upstream=f"{running.direct}/moved") as other:
        found = httpx.post(f"{other.address}/v1/{path}?api_key=SECRET", json={"model": "m", "messages": HI})
        assert found.status_code == 502
        assert "redirects to /elsewhere" in found.json()["error"]["message"]
        assert "Set upstream" in found.json()["error"]["message"]
        assert "SECRET" not in found.text
        if path != "x":
            assert "redirects to /elsewhere" in call_of(other)["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_half_of_an_emoji_is_passed_on(running, stream):
    running.upstream.words = ["a", json.loads('"\\ud83d"')]
    body = {"model": "m", "messages": HI, "stream": stream}
    found = httpx.post(f"{running.address}/v1/chat/completions", json=body)
    assert (found.status_code, "\\ud83d" in found.text, 'token_ids": [' in found.text) == (200, True, False)
    assert call_of(running)["state"] == "finished"


GOOD = b'data: {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("event", [
    b'{"choices": [null]}', b'{"choices": 5}', b'{"choices": [{"index": null, "delta": {"content": "b"}}]}',
    b'{"choices": [{"index": 0, "delta": "x"}]}', b'{"choices": [{"index": 0, "delta": {"tool_calls": [null]}}]}',
    b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"name": 3}}]}}]}', b"{", b"[" * 10_000,
    b'{"error": null, "choices": []}', b'{"error": "", "choices": []}', b'{"error": {}, "choices": []}',
])  # fmt: skip
def test_malformed_events_are_passed_on(running, event):
    running.upstream.raw = b": comment\n\ndata: " + event + b"\n\n" + GOOD
    found = httpx.post(f"{running.address}/v1/chat/completions", json={"model": "m", "messages": HI, "stream": True})
    assert b"data: " + event + b"\n\n" in found.content
    assert found.content.startswith(b": comment\n\n")
    assert found.text.endswith("data: [DONE]\n\n")
    call = call_of(running)
    assert (call["state"], call["response"]["choices"][0]["message"]["content"]) == ("finished", "yes")


@pytest.mark.parametrize(("end", "state"), [(b"", "finished"), (b"cut", "cut")])
def test_a_server_that_sends_fewer_choices(running, end, state):
    running.upstream.raw = GOOD.replace(b"data: [DONE]\n\n", b"") if end else GOOD
    body = {"model": "m", "messages": HI, "stream": True, "n": 2}
    httpx.post(f"{running.address}/v1/chat/completions", json=body)
    until(lambda: running.rollouts()[0]["calls"][0]["state"] != "open")
    assert running.rollouts()[0]["calls"][0]["state"] == state


def test_an_event_of_several_lines(running):
    running.upstream.raw = (
        b'event: e\r\ndata: {"choices": [{"index": 0,\r\n'
        b'data: "token_ids": [5], "delta": {"content": "so, "}}]}\r\n\r\n' + GOOD
    )
    found = httpx.post(f"{running.address}/v1/chat/completions", json={"model": "m", "messages": HI, "stream": True})
    first = found.text.split("\n\n")[0].split("\n")
    assert first[0] == "event: e"
    assert json.loads(first[1][6:])["choices"] == [{"index": 0, "token_ids": None, "delta": {"content": "so, "}}]
    assert call_of(running)["response"]["choices"][0]["token_ids"] == [5]


def events(pieces):
    async def collect():
        async def stream():
            for piece in pieces:
                yield piece

        return [event async for event in _events(stream())]

    return asyncio.run(collect())


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_events_do_not_depend_on_the_pieces(size):
    stream = b": hi\n\n\ndata: a\r\n\r\nevent: e\ndata: b\n\ndata: c"
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert events(pieces) == [[b": hi"], [b"data: a"], [b"event: e", b"data: b"], [b"data: c"]]


def test_the_time_for_an_event_is_linear_in_its_size():
    started = time.process_time()  # CPU time: a busy machine does not change it
    assert events([b"x" * 2**16] * 400) == [[b"x" * 2**16 * 400]]
    assert time.process_time() - started < 5  # 26 s if each piece copies the earlier ones


@pytest.mark.parametrize("answer", [
    b'{"choices": [null]}', b'{"choices": [{"message": "x"}]}', b'{"choices": [{"index": null, "message": {}}]}',
    b'{"choices": []}', b"[1]", b"{", b"[" * 10_000,
])  # fmt: skip
def test_malformed_answers_are_passed_on(running, answer):
    running.upstream.raw = answer
    found = httpx.post(f"{running.address}/v1/chat/completions", json={"model": "m", "messages": HI})
    assert (found.status_code, found.content) == (200, answer)
    assert call_of(running)["state"] == "failed"
    assert httpx.get(f"{running.address}/rollouts").status_code == 200


@pytest.mark.parametrize("asked", [{"prompt": ["x"] * 200, "n": 100}, {"prompt": "x", "n": 20_000}])
def test_a_request_for_too_many_choices(running, asked):
    found = httpx.post(f"{running.address}/v1/completions", json={"model": "m", **asked})
    assert found.status_code == 400
    assert "10,000" in found.json()["error"]["message"]


def test_many_ids_are_not_in_a_header(running):
    found = httpx.post(f"{running.address}/v1/completions", json={"model": "m", "prompt": "x", "n": 201})
    assert (found.status_code, "x-topr-rollout" in found.headers) == (200, False)
    assert len(running.rollouts()) == 201


def test_a_connection_that_takes_too_long(running, monkeypatch):
    async def late(*given, **more):
        raise aiohttp.ConnectionTimeoutError("no connection")

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", late)
    with pytest.raises(openai.InternalServerError, match="cannot be reached") as raised:
        chat(running)
    assert raised.value.status_code == 502


def test_chunks_after_a_full_disk_are_not_stored(tmp_path):
    """Recovery joins the chunks, so a gap would change the text."""
    with recorder(tmp_path, on_full="pass") as running:
        running.upstream.words, running.upstream.gate = ["w" * 5_000, "x" * 5_000, "y", "z"], threading.Event()
        stored = []

        def fill():
            running.fill()
            add = running.store.add_chunk
            running.store.add_chunk = lambda call, data: (add(call, data), stored.append(data))
            running.upstream.gate.set()

        words, _ = received(running, fill)
        assert (len(words), stored) == (4, [])


def test_a_failure_of_the_recorder_is_not_blamed_on_the_client(running, monkeypatch):
    def fail(*given):
        raise ZeroDivisionError

    monkeypatch.setattr("topr_trl.recording.protocols.completions.with_nulls", fail)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{running.address}/v1/chat/completions", json={"model": "m", "messages": HI, "stream": True})
    call = call_of(running)
    assert (call["state"], "ZeroDivisionError" in call["error"]) == ("cut", True)


SECRETS = {"api_key": "QUERY-SECRET", "k": "x y+z%/secret"}


@pytest.mark.parametrize("fault", ["die", "broken", "echo", "refuse"])
@pytest.mark.parametrize("stream", [False, True])
def test_secrets_of_a_request_are_not_stored_and_not_shown(tmp_path, monkeypatch, fault, stream):
    monkeypatch.setenv("TOPR_UPSTREAM_KEY", "UPSTREAM-SECRET")
    with recorder(tmp_path) as running:
        running.upstream.fault = fault
        body = {"model": "m", "messages": HI, "stream": stream or fault == "die"}
        headers = {"Authorization": "Bearer HEADER-SECRET", "x-api-key": "OTHER-SECRET", "Cookie": "s=COOKIE-SECRET"}
        found = httpx.post(f"{running.address}/v1/chat/completions", json=body, params=SECRETS, headers=headers)
        error = call_of(running)["error"]
        assert "secret" not in error.lower()
        assert error
        if fault != "echo":  # The client gets this answer of the server as it is.
            assert "secret" not in found.text.lower()
        rollout = running.rollouts()[0]["rollout_id"]
        for path in ("rollouts", f"rollouts/{rollout}"):
            assert "secret" not in httpx.get(f"{running.address}/{path}").text.lower()
    assert all(b"SECRET" not in file.read_bytes() for file in tmp_path.iterdir())


def test_requests_that_are_not_recorded_are_said_once_and_counted(tmp_path, capsys):
    with recorder(tmp_path, redact=["unused"]) as running:
        for path in (
            "messages/batches?key=SECRET",
            "messages/batches",
            "embeddings",
            *(f"files/{n}/%1b[31m" for n in range(30)),
        ):
            httpx.post(f"{running.address}/v1/{path}", json={})
        httpx.get(f"{running.address}/v1/models")
        for content in (b"[1]", b"{"):
            httpx.post(f"{running.address}/v1/completions", content=content)
        httpx.post(f"{running.address}/v1/completions", json={"model": "m", "prompt": [5, 6]})
        counts = httpx.get(f"{running.address}/rollouts").json()["unrecorded"]
        assert running.rollouts() == []
    said = capsys.readouterr().out
    assert counts["POST /v1/messages/batches"] == 2
    assert counts["POST /v1/embeddings"] == 1
    assert (len(counts), sum(counts.values())) == (21, 36)
    assert said.count("POST /v1/messages/batches: passed on and not recorded") == 1
    assert (said.count("\n"), "SECRET" in said, "\x1b" in said, "/models" in said) == (21, False, False, False)


@pytest.mark.parametrize("on_full", ["refuse", "pass"])
def test_a_large_request_on_a_full_disk(tmp_path, on_full):
    with recorder(tmp_path, on_full=on_full) as running:
        add = running.store.add_text
        running.store.add_text = lambda *given: (running.fill(), add(*given))
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * (LARGE + 1)}]}
        found = httpx.post(f"{running.address}/v1/chat/completions", json=body)
        assert found.status_code == (507 if on_full == "refuse" else 200)
        assert call_of(running)["state"] == "failed"


def test_a_websocket_is_refused(running):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    found = httpx.get(f"{running.address}/v1/responses", headers=headers)
    assert (found.status_code, "WebSocket" in found.text) == (501, True)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", ""])
def test_a_base_url_without_v1(running, path):
    found = httpx.post(f"{running.address}/{path}", json={})
    assert found.status_code in (404, 405)
    assert f"{running.address}/v1" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["v1/chat/completions", "rewards"])
def test_a_body_that_cannot_be_unpacked(running, path):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    found = httpx.post(f"{running.address}/{path}", content=b"not gzip", headers=headers)
    assert (found.status_code, "Content-Encoding" in found.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("of", ["request", "answer"])
def test_large_bodies_do_not_hold_up_other_calls(running, of):
    """The large call waits in its thread until another call has ended."""
    ended, add = threading.Event(), running.store.add_text
    running.store.add_text = lambda *given: (ended.wait(20), add(*given))
    large = "x" * (LARGE + 1)
    running.upstream.words = ["a", "b"] if of == "request" else ["a", large]
    messages = [{"role": "user", "content": large if of == "request" else "hi"}]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(chat, running, messages=messages)
        until(lambda: running.rollouts())
        time.sleep(0.2)
        running.upstream.words = ["a", "b"]
        chat(running)
        ended.set()
        shown = json.loads(waiting.result().text)
    calls = {
        rollout["calls"][0]["request"]["messages"][0]["content"]: rollout["calls"][0] for rollout in running.rollouts()
    }
    call = calls[messages[0]["content"]]
    assert (call["state"], shown["choices"][0]["token_ids"]) == ("finished", None)
    assert call["response"]["choices"][0]["message"] == shown["choices"][0]["message"]
    assert call["response"]["choices"][0]["token_ids"] == [10, 11]
    later = [*messages, {"role": "assistant", "content": call["response"]["choices"][0]["message"]["content"]}]
    first = next(each["rollout_id"] for each in running.rollouts() if each["calls"][0]["request"] == call["request"])
    assert chat(running, messages=[*later, *HI]).headers["x-topr-rollout"] == first


def test_a_client_that_does_not_read_a_whole_answer(tmp_path):
    with recorder(tmp_path, client_timeout=0.3) as running:
        running.upstream.words = ["w" * 20_000_000]
        with running.connect() as connection:
            send(connection, "/v1/chat/completions", json.dumps({"model": "m", "messages": HI}))
            own = connection.getsockname()[1]
            until(lambda: running.rollouts() and call_of(running)["state"] == "finished")
            until(lambda: not [  # The recorder closes its end after `client_timeout`.
                each for each in psutil.Process().net_connections("tcp")
                if each.raddr and each.raddr.port == own and each.status == psutil.CONN_ESTABLISHED
            ])  # fmt: skip
            received = 0
            with suppress(ConnectionResetError):
                while piece := connection.recv(1 << 20):
                    received += len(piece)
            assert received < 20_000_000
