"""Test what is recorded of the Responses API, of Anthropic's Messages API and of Ollama's chat, and what is learned."""

import json
import re
from itertools import count

import httpx2 as httpx
import openai
import pytest
from api_server import ARGUMENTS, IDS, PROMPT_IDS, TEXT, THOUGHT, ApiServer
from reading import learned
from recorders import recorder, until

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.recording.protocols import PROTOCOLS, choice_of, messages_of

pytestmark = pytest.mark.slow
QUESTION = "2 + 2?"
ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
HI = {"role": "user", "content": QUESTION}
NEW, CHAT = ("responses", "messages", "api/chat"), "chat/completions"
TOOLS = {
    CHAT: {"type": "function", "function": ADD},
    "responses": {"type": "function", **ADD},
    "messages": {"name": "add", "input_schema": ADD["parameters"]},
    "api/chat": {"type": "function", "function": ADD},
}


@pytest.fixture
def running(tmp_path):
    with recorder(tmp_path / "log", ApiServer()) as found:
        yield found


def path_of(endpoint):
    return endpoint if endpoint.startswith("api/") else f"v1/{endpoint}"


def body_of(endpoint, *turns, **more):
    return {"model": "m", "input" if endpoint == "responses" else "messages": [HI, *turns], **more}


def ask(running, endpoint, *turns, stream=False, headers=None, **more):
    body = body_of(endpoint, *turns, stream=stream, **more)
    return httpx.post(f"{running.address}/{path_of(endpoint)}", json=body, headers=headers)


def call_of(running):
    """Return the last call of the last rollout."""
    return running.rollouts()[-1]["calls"][-1]


def shown(call):
    """Return the message of an answer, as the page shows it."""
    message = choice_of(call)["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    parts = message["content"] or ()
    text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    return text, message.get("reasoning_content"), calls


def rows_of(running, tmp_path):
    for rollout in running.rollouts():
        httpx.post(f"{running.address}/rewards", json={"rollout_id": rollout["rollout_id"], "reward": 1})
    main.main(["import", "--input", str(tmp_path / "log"), "--output_dir", str(tmp_path / "rows")])
    return list(load_rows(tmp_path / "rows"))


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("endpoint", NEW)
def test_a_stream_is_unchanged_and_stored_like_an_answer(running, endpoint, has_tools):
    tools = {"tools": [TOOLS[endpoint]]} if has_tools else {}
    found = [ask(running, endpoint, stream=stream, **tools) for stream in (True, False)]
    assert [each.headers["x-topr-rollout"] for each in found] == [each["rollout_id"] for each in running.rollouts()]
    streamed, whole = (rollout["calls"][0] for rollout in running.rollouts())
    for through, call in zip(found, (streamed, whole), strict=True):
        running.upstream.numbers = count(1)
        direct = httpx.post(f"{running.direct}/{path_of(endpoint)}", json=running.upstream.requests.pop(0))
        running.upstream.numbers = count(1)
        assert without_ids(through.text) == without_ids(direct.text)
        assert through.headers["content-type"] == direct.headers["content-type"]
        assert (call["state"], call["endpoint"]) == ("finished", endpoint)
        text, thought, calls = shown(call)
        assert (text, thought) == ("" if has_tools else TEXT, THOUGHT)
        assert [(name, as_json(given)) for name, given in map(dict.values, calls)] == [("add", ARGUMENTS)] * has_tools
    first, second = (without_ids(json.dumps(call["response"])) for call in (streamed, whole))
    assert json.loads(first) == json.loads(second)


def without_ids(text):
    return re.sub(r"_\d+", "_0", text)


def as_json(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def next_turns(endpoint, call):
    """Return the turns of a request that continues an answer: the answer, and the result of its tool."""
    response = call["response"]
    if endpoint == "responses":
        identifier = response["output"][-1].get("call_id")
        return [*response["output"][1:], {"type": "function_call_output", "call_id": identifier, "output": "4"}]
    if endpoint == "messages":
        blocks = [{**block, "cache_control": {"type": "ephemeral"}} for block in response["content"][1:]]
        result = {"type": "tool_result", "tool_use_id": blocks[-1].get("id"), "content": "4"}
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    if endpoint == CHAT:
        message = response["choices"][0]["message"]
        return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}]
    return [{**response["message"], "thinking": ""}, {"role": "tool", "tool_name": "add", "content": "4"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [*NEW, CHAT])
def test_calls_that_continue_an_answer_share_a_rollout(running, endpoint, stream):
    """The application leaves out the thinking, and adds marks of a cache."""
    tools = [TOOLS[endpoint]]
    first = ask(running, endpoint, tools=tools, stream=stream).headers["x-topr-rollout"]
    later = next_turns(endpoint, call_of(running))
    assert ask(running, endpoint, *later, tools=tools).headers["x-topr-rollout"] == first
    assert [turn["role"] for turn in messages_of(call_of(running))] == ["user", "assistant", "tool"]
    assert ask(running, endpoint, *later, tools=tools).headers["x-topr-rollout"] != first


@pytest.mark.parametrize("endpoint", NEW)
def test_what_is_learned(running, tmp_path, endpoint, tool_tokenizer):
    more = {"system": "Calculate."} if endpoint == "messages" else {}
    more |= {"instructions": "Calculate."} if endpoint == "responses" else {}
    options = {"options": {"temperature": 0.5}} if endpoint == "api/chat" else {"temperature": 0.5}
    asked = {"tools": [TOOLS[endpoint]], **more, **options}
    ask(running, endpoint, **asked)
    first = call_of(running)
    turns = next_turns(endpoint, first)
    thought = {"responses": first["response"].get("output"), "messages": first["response"].get("content")}
    if endpoint == "responses":
        turns = [thought[endpoint][0], *turns]
    elif endpoint == "messages":
        turns[0]["content"] = thought[endpoint]
    else:
        turns[0] = first["response"]["message"]
    ask(running, endpoint, *turns, stream=True, **asked)
    (row,) = rows_of(running, tmp_path)
    called, said = learned(row, tool_tokenizer)
    assert all(words in called for words in (THOUGHT, '"name": "add"', '"a": 2, "b": 2'))
    assert (THOUGHT in said, said.endswith(f"{TEXT}<|im_end|>")) == (True, True)
    assert [turn["role"] for turn in row["prompt"]] == [*["system"] * bool(more), "user"]
    assert (row["temperature"], row["model"], row["served_model"]) == (0.5, "m", "/w")
    assert "add" in row["tools"]


def test_a_response_continues_an_earlier_one_by_its_id(running, tmp_path, tool_tokenizer):
    client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none")
    tools = [TOOLS["responses"]]
    first = client.responses.create(model="m", input=QUESTION, tools=tools)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "4"}
    asked = {"model": "m", "tools": tools, "previous_response_id": first.id}
    second = client.responses.create(input=[result], **asked)
    third = client.responses.create(input="Sure?", **{**asked, "previous_response_id": second.id})
    again = client.responses.create(input=[result], **asked)  # a second continuation of the same response
    assert [each.output_text for each in (second, third, again)] == [TEXT] * 3
    assert running.upstream.requests[1]["previous_response_id"] == first.id
    rollout, other = running.rollouts()
    last = rollout["calls"][-1]
    assert [turn["role"] for turn in messages_of(last)] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages_of(other["calls"][0]) == messages_of(rollout["calls"][1])
    assert "previous_response_id" not in last["request"]
    row, branch = rows_of(running, tmp_path)
    assert ['"name": "add"' in text for text in learned(row, tool_tokenizer)] == [True, False, False]
    assert [turn["role"] for turn in branch["prompt"]] == ["user", "assistant", "tool"]


def test_an_id_names_one_of_several_equal_responses(running):
    firsts = [ask(running, "responses") for _ in range(2)]
    for first in firsts:
        later = ask(running, "responses", previous_response_id=first.json()["id"]).headers
        assert (later["x-topr-rollout"], later["x-topr-answer"]) == (first.headers["x-topr-rollout"], "2")


def test_a_response_whose_start_is_not_recorded(running, tmp_path):
    ask(running, "responses", previous_response_id="resp_of_another_recorder")
    assert call_of(running)["request"]["previous_response_id"] == "resp_of_another_recorder"
    first = running.rollouts()[0]["calls"][0]["response"]["id"]
    ask(running, "responses", previous_response_id=first)
    (rollout,) = running.rollouts()
    assert [call["request"]["previous_response_id"] for call in rollout["calls"]] == ["resp_of_another_recorder"] * 2
    with pytest.raises(ValueError, match="previous_response_id"):
        rows_of(running, tmp_path)


def test_a_redacted_response_is_continued_without_its_tokens(tmp_path):
    with recorder(tmp_path / "log", ApiServer(), redact=[r"2 \+ 2"], token_ids="always") as running:
        first = ask(running, "responses")
        more = {"previous_response_id": first.json()["id"]}
        second = httpx.post(f"{running.address}/v1/responses", json={"model": "m", "input": "so", **more})
        assert first.headers["x-topr-rollout"] == second.headers["x-topr-rollout"]
        for call in running.rollouts()[0]["calls"]:
            assert messages_of(call)[0]["content"] == "[redacted]?"
            assert "output_messages" not in call["response"]


def test_the_name_of_a_prompt_is_recorded_and_redacted(tmp_path):
    with recorder(tmp_path / "log", ApiServer(), redact=["key-1"]) as running:
        ask(running, "responses", prompt={"id": "p", "variables": {"name": "key-1"}})
        assert call_of(running)["request"]["prompt"] == {"id": "p", "variables": {"name": "[redacted]"}}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_responses(running, tmp_path, stream):
    running.upstream.owner = "vllm"
    found = ask(running, "responses", stream=stream)
    assert "raw_message_tokens" not in found.text
    assert '"output_messages": null' in found.text
    assert running.upstream.requests[0]["enable_response_messages"]
    seen = ask(running, "responses", stream=stream, enable_response_messages=True)
    assert "raw_message_tokens" in seen.text
    for row in rows_of(running, tmp_path):
        assert (row["prompt_ids"], row["completion_ids"]) == (PROMPT_IDS, IDS)
    for endpoint in NEW[1:]:
        ask(running, endpoint)
        assert running.upstream.requests[-1].keys() == {"model", "messages", "stream"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", NEW)
def test_errors_of_the_server(running, endpoint, stream):
    running.upstream.fault = "refuse"
    found = ask(running, endpoint, stream=stream)
    assert (found.status_code, "no such model" in found.text) == (400, True)
    assert (call_of(running)["state"], call_of(running)["error"]) == ("failed", "no such model")
    running.upstream.fault = "error"
    if stream:
        assert "too many requests" in ask(running, endpoint, stream=True).text
        assert (call_of(running)["state"], call_of(running)["error"]) == ("cut", "too many requests")


@pytest.mark.parametrize("endpoint", NEW)
def test_a_stream_that_breaks_off_ends_with_an_error_and_is_kept(running, tmp_path, endpoint):
    running.upstream.fault = "die"
    *_, last = filter(None, ask(running, endpoint, stream=True).text.split("\n"))
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "closed the connection" in (error if endpoint == "api/chat" else error["message"])
    call = call_of(running)
    assert (call["state"], "closed the connection" in call["error"]) == ("cut", True)
    assert shown(call)[:2] == ("It is", THOUGHT)
    (row,) = rows_of(running, tmp_path)
    assert (row["finish_reason"], row["completion"][0]["content"]) == ("length", "It is")


@pytest.mark.parametrize("endpoint", NEW)
def test_an_answer_is_stored_before_the_client_knows_its_end(running, endpoint):
    """The client may continue the answer before the server closes the connection."""
    running.upstream.fault = "linger"
    last = {"responses": '"response.completed"', "messages": '"message_stop"', "api/chat": '"done": true'}[endpoint]
    url = f"{running.address}/{path_of(endpoint)}"
    with httpx.stream("POST", url, json=body_of(endpoint, stream=True)) as response:
        next(line for line in response.iter_lines() if last in line)
        assert call_of(running)["state"] == "finished"
    until(lambda: running.upstream.left)
    assert (call_of(running)["state"], call_of(running)["error"]) == ("finished", None)


def test_the_error_of_a_client_of_responses(running):
    client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)
    running.upstream.fault = "die"
    with pytest.raises(openai.APIError, match="closed the connection"):
        list(client.responses.create(model="m", input=QUESTION, stream=True))


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_the_arguments_of_a_tool_call_that_was_cut(endpoint):
    asked, server, made = {"tools": [TOOLS[endpoint]]}, ApiServer(), PROTOCOLS[endpoint].assembler()
    whole, events = {
        "responses": (server.response, server.response_events), "messages": (server.message, server.message_events)
    }[endpoint]  # fmt: skip
    for event in events(asked, whole(asked)):
        made.add(event)
        if """'{"a":'""" in str(event):
            break
    (call,) = shown({"endpoint": endpoint, "response": made.answer, "choice": 0})[2]
    assert call["arguments"] == '{"a":'


BAD = {
    "responses": [{"type": 5}, {"type": "response.created", "response": "x"}, {"output_index": "0"}, [], {"item": 3}],
    "messages": [{"type": "content_block_start", "index": "x"}, {"type": "message_start", "message": 3}, 5,
                 {"type": "content_block_delta", "index": 0, "delta": "x"}],
    "api/chat": [{"message": 5, "done": False}, {"message": {"content": 3}}, {"message": {"tool_calls": 3}}, "x"],
}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "bad"), [(endpoint, bad) for endpoint, each in BAD.items() for bad in each])
def test_malformed_events_and_answers_are_passed_on(running, endpoint, bad):
    found = httpx.post(f"{running.address}/{path_of(endpoint)}", json={"model": "m", "raw": bad, "stream": True})
    assert json.dumps(bad) in found.text
    assert (call_of(running)["state"], shown(call_of(running))[0]) == ("finished", TEXT)
    whole = httpx.post(f"{running.address}/{path_of(endpoint)}", json={"model": "m", "raw": bad, "stream": False})
    assert (whole.json(), call_of(running)["state"]) == (bad, "failed")
    assert httpx.get(f"{running.address}/rollouts").status_code == 200


def test_a_stream_that_ends_without_an_answer_has_failed(running):
    given = {"model": "m", "messages": [], "raw": {"model": "m", "done": True}, "stream": True}
    httpx.post(f"{running.address}/{path_of('api/chat')}", json=given)
    assert call_of(running)["state"] == "failed"


@pytest.mark.parametrize("given", [
    "text", [1], [None], [{"role": "assistant", "content": 5, "tool_calls": 7}], {}, 3, [{"content": "no role"}],
    [{"role": "assistant", "tool_calls": [{"function": "f"}, 3]}], [{"role": "user"}],
])  # fmt: skip
@pytest.mark.parametrize("endpoint", [CHAT, *NEW])
def test_malformed_messages_are_passed_on(running, endpoint, given):
    body = {"model": "m", "messages": given, "input": given, "stream": False, "system": 3, "instructions": 4}
    assert httpx.post(f"{running.address}/{path_of(endpoint)}", json=body).status_code == 200
    assert running.upstream.requests[-1]["messages"] == given
    assert httpx.get(f"{running.address}/rollouts").status_code == 200


def test_the_key_of_anthropics_client(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_RECORD_TOKEN", "own-token")
    monkeypatch.setenv("TOPR_UPSTREAM_KEY", "key-of-the-server")
    with recorder(tmp_path, ApiServer()) as running:
        assert ask(running, "messages", headers={"x-api-key": "other"}).status_code == 401
        assert ask(running, "messages", headers={"x-api-key": "own-token"}).status_code == 200
        assert running.upstream.headers[-1]["x-api-key"] == "key-of-the-server"
        assert "Authorization" not in running.upstream.headers[-1]


def test_other_paths_of_ollama_are_passed_on(running):
    assert httpx.post(f"{running.address}/api/generate", json={}).text == "/api/generate"
    assert httpx.get(f"{running.address}/rollouts").json()["unrecorded"] == {"POST /api/generate": 1}
